"""Attention: one function, whatever the hardware."""

import jax
import jax.numpy as jnp

from meshwright.memory import SCORES, save_as


def attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array, *, window: int | None
) -> jax.Array:
    """Causal attention within documents; each key/value head serves N/K query heads without being repeated.

    segments_BT: document of each position; positions of different documents do not see each other.
    window: a position sees itself and the `window - 1` before it; None sees all before it.
    Returns [B, T, N, H] in the type of q. Scores and softmax are float32.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5)
    scores_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    scores_BKGTS = jnp.where(_visible(segments_BT, window)[:, None, None], scores_BKGTS, -1e30)
    weights_BKGTS = save_as(_softmax(scores_BKGTS), SCORES)
    out_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS.astype(q_BTNH.dtype), v_BSKH)
    return out_BTKGH.reshape(B, T, N, H)


def _visible(segments_BT: jax.Array, window: int | None) -> jax.Array:
    """Which key position [B, T, S] each query position sees."""
    T = segments_BT.shape[1]
    behind = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    causal = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return causal[None] & (segments_BT[:, :, None] == segments_BT[:, None, :])


def _softmax(scores: jax.Array) -> jax.Array:
    shifted = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return shifted / shifted.sum(-1, keepdims=True)
