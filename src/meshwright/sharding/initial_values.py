"""Initial values of parameters.

They depend only on seed, path and global index, so any mesh has the same bits.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from meshwright.errors import ConfigError
from meshwright.hardware.mesh import cache_on_simulated_devices
from meshwright.sharding.params import Param, Tree, is_param, named_leaves, row_mask


def _initial(p: Param, words: jax.Array, dtype: Any) -> jax.Array:
    if dtype in ("int8", "uint8"):
        truth = "quantised weights are read from weights, and not drawn"
        raise ConfigError(
            "random initial values of a quantised base",
            truth,
            "--init-from, or --finetune.base compute",
        )
    if p.init == "zeros":
        return jnp.zeros(p.shape, dtype)
    mask = row_mask(p)
    if p.init == "ones":
        return jnp.broadcast_to(mask, p.shape).astype(dtype)
    if p.order is None:
        w = jax.random.normal(
            jax.random.wrap_key_data(words, impl="threefry2x32"), p.shape, jnp.float32
        )
    else:
        w = _normal_in_order(p.order, p.shape, words)
    if p.init == "log_uniform":
        w = jnp.log(0.01 + (16.0 - 0.01) * jax.scipy.special.ndtr(w))
        return jnp.where(mask, w, 0.0).astype(dtype)
    return jnp.where(mask, p.std * w, 0.0).astype(dtype)


def random_bits(
    words: jax.Array, shape: tuple[int, ...], order: tuple[int, ...] | None
) -> jax.Array:
    """Returns the uint32 numbers of a threefry key, for the rows of a stack in a given order.

    Each row is on its own device.
    words: data of the key.  order: layer in each row; None is the order of the layers. Indexing the
    whole array would materialise it on every device. Threefry hashes an element's index, so hashing
    the indices that the elements have in the whole array gives the same numbers
    (`jax_threefry_partitionable`).
    """
    if order is None:
        return jax.random.bits(jax.random.wrap_key_data(words, impl="threefry2x32"), shape)
    shape, given = (*shape, *(1,) * (2 - len(shape))), shape
    inner = shape[2:]
    layer = np.maximum(np.array(order), 0).astype(np.uint64)[:, None]
    # Indices have 64 bits, and JAX integers 32: the index is kept as two words, and the last
    # dimensions fit in one.
    start = (layer * np.uint64(shape[1]) + np.arange(shape[1], dtype=np.uint64)) * np.uint64(
        math.prod(inner)
    )
    offset = jnp.zeros(inner, jnp.uint32)
    for dim, size in enumerate(inner):
        offset = offset * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, inner, dim)
    high, low = (
        jnp.asarray(word.astype(np.uint32)).reshape(*shape[:2], *(1,) * len(inner))
        for word in (start >> np.uint64(32), start & np.uint64(2**32 - 1))
    )
    low = jnp.broadcast_to(low + offset, shape)
    high = jnp.broadcast_to(high, shape) + (low < offset).astype(jnp.uint32)
    first_bits, second_bits = threefry2x32_p.bind(
        *(jnp.broadcast_to(w, shape) for w in words), high, low
    )
    return (first_bits ^ second_bits).reshape(given)


def _normal_in_order(order: tuple[int, ...], shape: tuple[int, ...], words: jax.Array) -> jax.Array:
    """Generates the rows of a stack of normal numbers in a given order, each on its own device."""
    # 23 random bits are the mantissa of a float32 in [1, 2).
    bits = random_bits(words, shape, order) >> 9
    unit = jax.lax.bitcast_convert_type(bits | jnp.uint32(0x3F800000), jnp.float32) - 1.0
    least = np.nextafter(np.float32(-1.0), np.float32(0.0))
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(
        jnp.maximum(least, unit * (np.float32(1.0) - least) + least)
    )


# This program runs once. At full optimisation XLA:CPU compiles it for 7 of the 8 s that a small
# model takes to start.
_COMPILER_OPTIONS: dict[str, dict[str, Any]] = {"cpu": {"xla_backend_optimization_level": 1}}


def init_params(params: Tree, shardings: Tree, *, seed: int, dtype: Any) -> Tree:
    """Creates the arrays of `params` in their shardings. No device holds more than its blocks."""
    draw, words = init_program(params, shardings, seed=seed, dtype=dtype)
    # The value of an element must not depend on how many devices share the array.
    with jax.threefry_partitionable(True), cache_on_simulated_devices():
        return draw(words)


def init_program(
    params: Tree, shardings: Tree, *, seed: int, dtype: Any
) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns the jitted program of `init_params`, and its arguments."""
    # Seed and path are the two words of a parameter's key. They are arguments, not constants: XLA
    # would take 0.2 s per parameter to fold them.
    words = {
        path: np.array([seed, zlib.crc32(path.encode())], np.uint32)
        for path in named_leaves(params)
    }
    treedef: Any = jax.tree.structure(params, is_leaf=is_param)

    def build(words: dict[str, jax.Array]) -> Tree:
        leaves: list[jax.Array] = []
        for path, p in named_leaves(params).items():
            # One parameter after another: the random bits of all of them would take more than the
            # parameters.
            word, *leaves[-1:] = jax.lax.optimization_barrier((words[path], *leaves[-1:]))
            leaves.append(_initial(p, word, p.stored or dtype))
        return treedef.unflatten(leaves)

    options = _COMPILER_OPTIONS.get(jax.default_backend())
    return jax.jit(build, out_shardings=shardings, compiler_options=options), words
