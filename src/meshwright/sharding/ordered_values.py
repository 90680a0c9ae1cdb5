"""Initial values of stacks whose rows are in the order of the pipeline stages."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p


def normal_in_order(order: tuple[int, ...], shape: tuple[int, ...], words: jax.Array) -> jax.Array:
    """Generates the rows of a stack of normal numbers in a given order, each on its own device.

    Indexing the whole array would materialise it on every device. Threefry hashes an element's index, so hashing the
    indices that the elements have in the whole array gives the same numbers (`jax_threefry_partitionable`).
    """
    inner = shape[2:]
    layer = np.maximum(np.array(order), 0).astype(np.uint64)[:, None]
    # Indices have 64 bits, and JAX integers 32: the index is kept as two words, and the last dimensions fit in one.
    start = (layer * np.uint64(shape[1]) + np.arange(shape[1], dtype=np.uint64)) * np.uint64(math.prod(inner))
    offset = jnp.zeros(inner, jnp.uint32)
    for dim, size in enumerate(inner):
        offset = offset * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, inner, dim)
    high, low = (
        jnp.asarray(word.astype(np.uint32)).reshape(*shape[:2], *(1,) * len(inner))
        for word in (start >> np.uint64(32), start & np.uint64(2**32 - 1))
    )
    low = jnp.broadcast_to(low + offset, shape)
    high = jnp.broadcast_to(high, shape) + (low < offset).astype(jnp.uint32)
    first_bits, second_bits = threefry2x32_p.bind(*(jnp.broadcast_to(w, shape) for w in words), high, low)
    # 23 random bits are the mantissa of a float32 in [1, 2).
    unit = jax.lax.bitcast_convert_type(((first_bits ^ second_bits) >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1.0
    least = np.nextafter(np.float32(-1.0), np.float32(0.0))
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(jnp.maximum(least, unit * (np.float32(1.0) - least) + least))
