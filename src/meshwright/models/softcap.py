"""Soft cap of attention scores and of logits (Gemma 2, arXiv:2408.00118, section 2)."""

import jax
import jax.numpy as jnp


def cap(x: jax.Array, softcap: float | None) -> jax.Array:
    """Returns c tanh(x / c), which is within -c and c and near x where x is small; x itself without a cap c."""
    return x if softcap is None else softcap * jnp.tanh(x / softcap)


def cap_gradient(g: jax.Array, capped: jax.Array, softcap: float | None) -> jax.Array:
    """Returns the gradient of x from that of the capped x: times 1 - (capped / c)^2."""
    return g if softcap is None else g * (1 - jnp.square(capped / softcap))
