"""LoRA: low-rank adapters of frozen matrices,
which may be quantised (arXiv:2106.09685, QLoRA: arXiv:2305.14314).

An adapter of a weight W `[in..., out...]` is two parameters, A `[in..., r]` and B `[r, out...]`, in
the same stack (`blocks.adapters.query.a`). They have the letters of W's dimensions, so every layout
places them as it places W. The product is computed at the projection, `x W + (alpha / r) (x A) B`,
between the two collectives of tensor parallelism: it is summed with that of W, and nothing more is
sent. Merging `W + (alpha / r) A B` in every layer instead would cost a matrix of W's size and 2 r n
FLOPs for n elements, at each gather. Families do not know of adapters: a gathered weight that has
one is a `SelfMultiplying` (blocks/layers.py).

Frozen matrices may be kept as int8 with a scale per column, or as NF4 (QLoRA, appendix E): 16
values, quantiles of a normal distribution, of which two share a byte, and a float32 scale for each
block of 64 elements along one dimension, its largest magnitude. Weights are gathered as they are
kept and dequantised in the layer that uses them, one layer at a time. Blocks are along the model
width where 64 divides it, a dimension that no axis splits in use: neither they nor the numbers
depend on the mesh.
"""

import dataclasses
import fnmatch
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import ConfigError, nearest
from meshwright.fine_tuning import FineTune
from meshwright.models.blocks.layers import SelfMultiplying, linear
from meshwright.sharding.params import (
    LOW_PRECISION_ROLES,
    GatherParams,
    Param,
    Stored,
    Tree,
    is_param,
)
from meshwright.sharding.placed_params import frozen_params

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


def quantised_params(params: Tree, base: Quantised) -> Tree:
    """Returns descriptions in which each matrix of a layer but its router is `values`
    or `codes`, and `scales`.

    Raises ConfigError for a matrix of which no dimension is a multiple of a block.
    """

    def describe(path: str, p: Any) -> Any:
        if isinstance(p, dict):
            return {name: describe(f"{path}.{name}", inner) for name, inner in p.items()}
        if not is_param(p) or p.role in (None, "router", "adapter") or "L" not in p.dims:
            return p
        scales = dataclasses.replace(
            p, init="ones", role=None, stored="float32", precision="float32", contract=1
        )
        if base == "int8":
            inner = _contracted(p)
            shape = tuple(1 if i in inner else n for i, n in enumerate(p.shape))
            dims = "".join("Q" if i in inner else letter for i, letter in enumerate(p.dims))
            return {
                "values": dataclasses.replace(p, stored="int8"),
                "scales": dataclasses.replace(scales, shape=shape, dims=dims),
            }
        dim = block_dim(path, p)
        codes, blocks = (
            (*p.shape[:dim], p.shape[dim] // size, *p.shape[dim + 1 :]) for size in (2, BLOCK)
        )
        return {
            "codes": dataclasses.replace(p, shape=codes, stored="uint8", packed=dim),
            "scales": dataclasses.replace(scales, shape=blocks),
        }

    return {name: describe(name, tree) for name, tree in params.items()}


def block_dim(path: str, p: Param) -> int:
    """Returns the dimension along which the blocks of a matrix lie.
    Raises ConfigError where 64 divides none."""
    dims = [i for i, letter in enumerate(p.dims) if letter not in "LE" and p.shape[i] % BLOCK == 0]
    if not dims:
        sizes = ", ".join(
            f"{letter}={n}" for letter, n in zip(p.dims, p.shape, strict=True) if letter not in "LE"
        )
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
    """Returns a matrix [L, ...] as `quantised_params` describes it.
    p: its description before that."""
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
    """Returns a weight in `dtype`, of a layer or of all; other weights are returned unchanged."""
    if isinstance(w, dict) and "codes" in w:
        codes, scales = w["codes"], w["scales"]
        dim = next(
            i for i, (n, m) in enumerate(zip(codes.shape, scales.shape, strict=True)) if n != m
        )
        pairs = jnp.stack([codes >> 4, codes & 15], dim + 1)
        blocks = pairs.reshape(*codes.shape[:dim], -1, BLOCK, *codes.shape[dim + 1 :])
        values = jnp.asarray(NF4, jnp.float32)[blocks.astype(jnp.int32)] * jnp.expand_dims(
            scales, dim + 1
        )
        return values.reshape(*codes.shape[:dim], -1, *codes.shape[dim + 1 :]).astype(dtype)
    if isinstance(w, dict) and "values" in w:
        return (w["values"].astype(jnp.float32) * w["scales"]).astype(dtype)
    return w


ADAPTERS = "adapters"
"""Subtree of a stack with the adapters of its weights."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"]
)
@dataclasses.dataclass(frozen=True)
class AdaptedWeight(SelfMultiplying):
    """Gathered weight of one layer with its adapter; multiplies itself."""

    base: Any
    """Weight [in..., out...]."""
    a: jax.Array
    """A [in..., r]."""
    b: jax.Array
    """B [r, out...]."""
    scale: float

    option = "--finetune.targets"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.base.shape)

    def linear(self, x: jax.Array, contract: int) -> jax.Array:
        """Returns x W + scale (x A) B, contracting the last `contract` dimensions of x;
        result in x's dtype."""
        low_BTU = linear(x, self.a, contract=contract)
        return linear(x, self.base, contract=contract) + self.scale * linear(low_BTU, self.b)


def adapters_of(weights: Tree) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns A and B of the weights of a layer that have an adapter, by name."""
    return {name: (w.a, w.b) for name, w in weights.items() if isinstance(w, AdaptedWeight)}


def with_adapters(weights: Tree, adapters: dict[str, tuple[jax.Array, jax.Array]]) -> Tree:
    """Returns the weights of a layer with other arrays in their adapters."""
    changed = dict(weights)
    for name, (a, b) in adapters.items():
        changed[name] = dataclasses.replace(weights[name], a=a, b=b)
    return changed


@dataclasses.dataclass(frozen=True)
class AdapterGather(GatherParams):
    """Gathers sharded parameters into weights, dequantised after the gather,
    with their adapters."""

    scale: float | None
    """Factor of A B; None leaves the adapters out, which is the reference of preferences."""

    def __call__(self, params: Tree, path: str) -> Tree:
        """Returns the weights of the subtree `path`, of one layer of it where it is stacked."""
        weights = super().__call__(params, path)
        if not isinstance(weights, dict):
            return weights
        weights = {name: dequantise(w, self.compute_dtype) for name, w in weights.items()}
        adapters = weights.pop(ADAPTERS, {})
        if self.scale is None:
            return weights
        for name, pair in adapters.items():
            weights[name] = AdaptedWeight(weights[name], pair["a"], pair["b"], self.scale)
        return weights


def adapter_gather(gather: GatherParams, scale: float) -> AdapterGather:
    """Returns `gather` for parameters that `adapted_params` describes."""
    fields = {f.name: getattr(gather, f.name) for f in dataclasses.fields(GatherParams)}
    return AdapterGather(**fields, scale=scale)


def adapted_params(params: Tree, tuning: FineTune, compute_dtype: Stored) -> Tree:
    """Returns the descriptions of a frozen model with adapters. params: descriptions of the model.

    A begins with the variance that PEFT's has, 1 / (3 inputs); B with zeros. Raises ConfigError for
    a target that no matrix has, and for a matrix that the type of the base cannot hold.
    """
    frozen, rank = (
        frozen_params(params, "float32" if tuning.base == "float32" else compute_dtype),
        tuning.rank,
    )

    def adapter(p: Param) -> dict[str, Param]:
        inner, outer = slice(1, 1 + p.contract), slice(1 + p.contract, None)
        shapes = ((*p.shape[:1], *p.shape[inner], rank), (*p.shape[:1], rank, *p.shape[outer]))
        std = (3 * math.prod(p.shape[inner])) ** -0.5
        return {
            "a": Param(
                shapes[0], f"L{p.dims[inner]}U", std=std, role="adapter", contract=p.contract
            ),
            "b": Param(shapes[1], f"LU{p.dims[outer]}", "zeros", role="adapter"),
        }

    for stack, names in targets_of(params, tuning).items():
        frozen[stack] = {
            **frozen[stack],
            ADAPTERS: {name: adapter(params[stack][name]) for name in names},
        }
    return frozen if tuning.base not in ("int8", "nf4") else quantised_params(frozen, tuning.base)


def targets_of(params: Tree, tuning: FineTune) -> dict[str, list[str]]:
    """Returns the matrices that get an adapter, by stack.
    Raises ConfigError for a pattern that matches none."""
    matrices = [
        (stack, name, p)
        for stack, tree in params.items()
        if isinstance(tree, dict)
        for name, p in tree.items()
        if is_param(p) and p.role in LOW_PRECISION_ROLES
    ]

    def matches(pattern: str, stack: str, name: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for path in (name, f"{stack}.{name}"))

    found: dict[str, list[str]] = {}
    unused = set(tuning.targets)
    for stack, name, p in matrices:
        if "E" not in p.dims and "L" in p.dims:
            matching = {
                target
                for target in tuning.targets
                if target == "all" or matches(target, stack, name)
            }
            unused -= matching
            if matching:
                found.setdefault(stack, []).append(name)
    if unused:
        pattern, names = min(unused), sorted({name for _, name, _ in matrices})
        routed = sorted(
            {name for _, name, p in matrices if "E" in p.dims and matches(pattern, "", name)}
        )
        truth = f"no matrix of a layer has such a name; they are {', '.join(names)}"
        if routed:
            truth = f"{', '.join(routed)} are of routed experts, whose grouped matmul takes arrays"
        fix = "--finetune.targets all, which leaves them out" if routed else nearest(pattern, names)
        raise ConfigError(f"--finetune.targets {pattern}", truth, fix)
    return found


def merged(params: Tree, scale: float, like: Tree) -> Tree:
    """Returns the model with its adapters merged, W + scale A B, without them.
    params: arrays, in any rows.

    The sum is in float32; quantised weights are dequantised. Every weight has its type in `like`.
    """

    def one(w: Any, pair: Tree | None, like: Any) -> jax.Array:
        w = dequantise(w, jnp.float32)
        if pair is not None:
            a, b = (x.astype(jnp.float32) for x in (pair["a"], pair["b"]))
            with jax.default_matmul_precision("highest"):
                w = w.astype(jnp.float32) + scale * jax.lax.dot_general(
                    a, b, (((a.ndim - 1,), (1,)), ((0,), (0,)))
                )
        return w.astype(like.dtype)

    def subtree(tree: Tree, like: Tree) -> Tree:
        if not isinstance(like, dict):
            return one(tree, None, like)
        return {
            name: one(tree[name], tree.get(ADAPTERS, {}).get(name), of) for name, of in like.items()
        }

    return {path: subtree(params[path], of) for path, of in like.items()}
