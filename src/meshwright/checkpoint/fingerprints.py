"""Fingerprints of tensors, independent of how the tensors are sharded."""

import math

import jax
import jax.numpy as jnp
import numpy as np

Fingerprint = tuple[int, int]

SALTS = (0x9E3779B9, 0x85EBCA77)


@jax.jit
def fingerprints(tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns a fingerprint, uint32[2], of each tensor: sums over elements of two hashes of (bits, global index).

    Each hash is a bijection of the element's bits (the finaliser of MurmurHash3), so one changed element always
    changes the sum. Elements whose bits are all zero add nothing, so padding rows of zeros do not change it. Each
    device hashes its own shard; 8 bytes per tensor are reduced over the mesh.
    """
    hashes, last = dict[str, jax.Array](), jnp.uint32(0)
    for name, x in tensors.items():
        # One tensor after another: a compiler that does not fuse the hash into its sum has those of one in memory.
        x, _ = jax.lax.optimization_barrier((x, last))
        hashes[name] = jnp.stack([_hash_sum(x, salt) for salt in SALTS])
        last = hashes[name][0]
    return hashes


def _hash_sum(x: jax.Array, salt: int) -> jax.Array:
    index = jnp.zeros(x.shape, jnp.uint32)
    for dim, size in enumerate(x.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
    return sum_of_hashes(x, index, salt)


def sum_of_hashes(x: jax.Array, index: jax.Array, salt: int) -> jax.Array:
    """Returns one hash of (bits, index) summed over the elements of `x`. index: of each in the whole tensor, uint32."""
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    h = bits ^ (index * jnp.uint32(0xC2B2AE3D) + jnp.uint32(salt))
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(jnp.where(bits == 0, 0, h ^ (h >> 16)), dtype=jnp.uint32)


def block_fingerprint(block: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]) -> Fingerprint:
    """Returns what a block adds to the fingerprint of its tensor; the sums over all blocks are the fingerprint.

    index: of the block in the tensor.  shape: of the tensor.
    """
    strides = [math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))]
    offset = sum(part.start * stride for part, stride in zip(index, strides, strict=True)) % 2**32
    sums = _block_sums(block, np.array(strides, np.uint32), np.uint32(offset))
    return int(sums[0]), int(sums[1])


def add_fingerprints(a: Fingerprint, b: Fingerprint) -> Fingerprint:
    """Returns the sum of two fingerprints."""
    return (a[0] + b[0]) % 2**32, (a[1] + b[1]) % 2**32


@jax.jit
def _block_sums(block: jax.Array, strides: jax.Array, offset: jax.Array) -> jax.Array:
    index = jnp.full(block.shape, offset, jnp.uint32)
    for dim in range(block.ndim):
        index += strides[dim] * jax.lax.broadcasted_iota(jnp.uint32, block.shape, dim)
    return jnp.stack([sum_of_hashes(block, index, salt) for salt in SALTS])
