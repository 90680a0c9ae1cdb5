"""Fingerprints of tensors, independent of how the tensors are sharded."""

import jax
import jax.numpy as jnp

SALTS = (0x9E3779B9, 0x85EBCA77)


@jax.jit
def fingerprints(tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns a fingerprint, uint32[2], of each tensor: sums over elements of two hashes
    of (bits, global index).

    Each hash is a bijection of the element's bits (the finaliser of MurmurHash3), so one changed
    element always changes the sum. Elements whose bits are all zero add nothing, so padding rows of
    zeros do not change it. Each device hashes its own shard; 8 bytes per tensor are reduced over
    the mesh.
    """
    hashes: dict[str, jax.Array] = {}
    last = jnp.uint32(0)
    for name, x in tensors.items():
        # One tensor after another: a compiler that does not fuse the hash
        # into its sum has those of one in memory.
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
    """Returns one hash of (bits, index) summed over the elements of `x`.
    index: of each in the whole tensor, uint32."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    h = bits ^ (index * jnp.uint32(0xC2B2AE3D) + jnp.uint32(salt))
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(jnp.where(bits == 0, 0, h ^ (h >> 16)), dtype=jnp.uint32)
