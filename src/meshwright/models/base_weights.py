"""Frozen weights in 8 or 4 bits: int8 with a scale per column, and NF4 in blocks of 64.

NF4 (Dettmers et al. 2023, arXiv:2305.14314, appendix E) has 16 values, quantiles of a normal distribution; a block of
64 elements along one dimension shares its largest magnitude, a float32: 4.5 bits per element. Two codes share a byte.
Weights travel as they are kept and are dequantised after the gather, in the layer that uses them: one layer is in the
compute dtype at a time. They have no gradient.

The blocks lie along the model width where 64 divides it, a dimension that no axis splits in use; their number and
place do not depend on the mesh, so neither do the numbers.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import ConfigError
from meshwright.sharding.params import Param, Tree, is_param

BLOCK = 64
"""Elements that share a scale in NF4."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Values of the codes, ascending (appendix E)."""

Quantised = Literal["int8", "nf4"]


def is_quantised(p: Param) -> bool:
    """Whether a quantised base has a parameter in few bits: every matrix of a layer but its router."""
    return p.role not in (None, "router", "adapter") and "L" in p.dims


def quantised_params(params: Tree, base: Quantised) -> Tree:
    """Returns descriptions in which each matrix of a layer is two arrays: `values` or `codes`, and `scales`.

    Raises ConfigError for a matrix of which no dimension is a whole number of blocks.
    """

    def describe(path: str, p: Any) -> Any:
        if isinstance(p, dict):
            return {name: describe(f"{path}.{name}", inner) for name, inner in p.items()}
        if not is_param(p) or not is_quantised(p):
            return p
        return _int8(p) if base == "int8" else _nf4(path, p)

    return {name: describe(name, tree) for name, tree in params.items()}


def _int8(p: Param) -> dict[str, Param]:
    inner = _contracted(p)
    shape = tuple(1 if i in inner else n for i, n in enumerate(p.shape))
    dims = "".join("Q" if i in inner else letter for i, letter in enumerate(p.dims))
    return {"values": dataclasses.replace(p, stored="int8"), "scales": _scales(p, shape, dims)}


def _scales(p: Param, shape: tuple[int, ...], dims: str) -> Param:
    return dataclasses.replace(
        p, shape=shape, dims=dims, init="ones", role=None, stored="float32", precision="float32", contract=1
    )


def _nf4(path: str, p: Param) -> dict[str, Param]:
    dim = block_dim(path, p)
    codes, scales = (list(p.shape) for _ in range(2))
    codes[dim], scales[dim] = p.shape[dim] // 2, p.shape[dim] // BLOCK
    return {
        "codes": dataclasses.replace(p, shape=tuple(codes), stored="uint8", packed=dim),
        "scales": _scales(p, tuple(scales), p.dims),
    }


def block_dim(path: str, p: Param) -> int:
    """Returns the dimension along which the blocks of a matrix lie. Raises ConfigError where 64 divides none."""
    dims = [i for i, letter in enumerate(p.dims) if letter not in "LE" and p.shape[i] % BLOCK == 0]
    if not dims:
        sizes = ", ".join(f"{letter}={n}" for letter, n in zip(p.dims, p.shape, strict=True) if letter not in "LE")
        raise ConfigError(
            f"{path} in NF4",
            f"{BLOCK} elements of a dimension share a scale, and {BLOCK} divides none of {sizes}",
            "--finetune.base int8, or compute",
        )
    return min(dims, key=lambda i: (p.dims[i] != "D", -p.shape[i]))


def _contracted(p: Param) -> tuple[int, ...]:
    """Dimensions that the matmul contracts: the first ones after layers and experts."""
    lead = p.dims.count("L") + p.dims.count("E")
    return tuple(range(lead, lead + p.contract))


def quantise(path: str, p: Param, w: jax.Array, base: Quantised) -> dict[str, jax.Array]:
    """Returns a matrix [L, ...] as `quantised_params` describes it. p: its description before that."""
    w = w.astype(jnp.float32)
    if base == "int8":
        scales = jnp.maximum(jnp.abs(w).max(_contracted(p), keepdims=True), 1e-30) / 127.0
        return {"values": jnp.round(w / scales).astype(jnp.int8), "scales": scales}
    dim = block_dim(path, p)
    blocks = w.reshape(*w.shape[:dim], -1, BLOCK, *w.shape[dim + 1 :])
    scales = jnp.abs(blocks).max(dim + 1, keepdims=True)
    # The nearest value: boundaries are half way between two.
    values = np.array(NF4, np.float32)
    boundaries = jnp.asarray((values[1:] + values[:-1]) / 2)
    codes = jnp.searchsorted(boundaries, blocks / jnp.maximum(scales, 1e-30)).astype(jnp.uint8)
    pairs = codes.reshape(*w.shape[:dim], -1, 2, *w.shape[dim + 1 :])
    first, second = (jax.lax.index_in_dim(pairs, i, dim + 1, keepdims=False) for i in (0, 1))
    return {"codes": first << 4 | second, "scales": scales.squeeze(dim + 1)}


def dequantise(w: Any, dtype: Any) -> Any:
    """Returns a weight in `dtype`, of a layer or of all; what is not quantised is returned as it is."""
    if isinstance(w, dict) and "codes" in w:
        codes, scales = w["codes"], w["scales"]
        dim = next(i for i, (n, m) in enumerate(zip(codes.shape, scales.shape, strict=True)) if n != m)
        pairs = jnp.stack([codes >> 4, codes & 15], dim + 1)
        blocks = pairs.reshape(*codes.shape[:dim], -1, BLOCK, *codes.shape[dim + 1 :])
        values = jnp.asarray(NF4, jnp.float32)[blocks.astype(jnp.int32)] * jnp.expand_dims(scales, dim + 1)
        return values.reshape(*codes.shape[:dim], -1, *codes.shape[dim + 1 :]).astype(dtype)
    if isinstance(w, dict) and "values" in w:
        return (w["values"].astype(jnp.float32) * w["scales"]).astype(dtype)
    return w
