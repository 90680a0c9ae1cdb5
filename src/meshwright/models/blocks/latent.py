"""Multi-head latent attention (MLA: DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values from one small latent.

Keys and values of all heads are projections of a latent per token, besides a rotary key that all heads share. Training
expands them: every head attends with its own keys and values. A cache holds latent and rotary key instead, and decoding
moves the projections to the other side: `q (W c) = (W^T q) c`. Every head then attends to the same keys, the latents,
which are also the values.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from meshwright.models.blocks.linear import linear


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Sizes of latent attention besides those of queries and keys."""

    query_rank: int | None
    """Width of the latent that queries are projections of; None projects them from the layer's input."""
    kv_rank: int
    """Width of the latent of keys and values."""
    rope_size: int
    """Size of the rotary key that all heads share, and of the rotated part of a query."""
    value_size: int
    """Size of a value."""

    @property
    def cached(self) -> int:
        """Elements per token that a cache holds: the latent and the rotary key."""
        return self.kv_rank + self.rope_size

    def gathered(self, width: int) -> int:
        """Returns the features per token that are gathered over `tensor` before attention. width: of the model."""
        return (self.query_rank or width) + self.cached


class LatentAttend(Protocol):
    """Attention of a step's tokens to cached latents, and writing theirs; returns [B, T, N, kv_rank].

    Scores are divided by the root of the queries' size, which is that of what is cached.
    """

    def __call__(self, q_BTNZ: jax.Array, cached_BTZ: jax.Array, kv_rank: int, /) -> jax.Array: ...


def absorb_keys(q_BTNH: jax.Array, up_ZNH: Any) -> jax.Array:
    """Returns the queries times the keys' projection, as queries to latents: [B, T, N, Z].

    up_ZNH: an array, or an object that multiplies itself (blocks/linear.py). Its last dimension begins with the key.
    """
    up_ZNH, scale_NH = _values_and_scale(up_ZNH, q_BTNH.dtype)
    size = q_BTNH.shape[-1]
    if scale_NH is not None:
        q_BTNH = (q_BTNH * scale_NH[:, :size]).astype(q_BTNH.dtype)
    return jnp.einsum("btnh,znh->btnz", q_BTNH, up_ZNH[..., :size])


def absorb_values(out_BTNZ: jax.Array, up_ZNH: Any, size: int) -> jax.Array:
    """Returns the attention output of latents times the values' projection: [B, T, N, size].

    up_ZNH: as for `absorb_keys`; its last dimension ends with the value.
    """
    up_ZNH, scale_NH = _values_and_scale(up_ZNH, out_BTNZ.dtype)
    out_BTNH = jnp.einsum("btnz,znh->btnh", out_BTNZ, up_ZNH[..., -size:])
    return out_BTNH if scale_NH is None else (out_BTNH * scale_NH[:, -size:]).astype(out_BTNZ.dtype)


def _values_and_scale(weight: Any, dtype: Any) -> tuple[Any, Any]:
    """Returns a weight as an array, and the scale of its output features, None where it has none."""
    if not hasattr(weight, "linear"):
        return weight, None
    if not hasattr(weight, "values"):
        # What multiplies itself in another way, such as a weight with its adapter, is its product with unit vectors.
        return linear(jnp.eye(weight.shape[0], dtype=dtype), weight), None
    values_ZNH, scale = weight.values.astype(dtype), weight.scale
    if scale is None:
        return values_ZNH, None
    features = values_ZNH.shape[1:]
    return values_ZNH, jnp.broadcast_to(scale.reshape(features if scale.size > 1 else (1, 1)), features)


def pad_values(v_BTNH: jax.Array, size: int) -> jax.Array:
    """Returns values with zeros up to a size, for attention that sends keys and values as one array."""
    return jnp.pad(v_BTNH, ((0, 0), (0, 0), (0, 0), (0, size - v_BTNH.shape[-1])))
