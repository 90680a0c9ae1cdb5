"""Reference attention on one device, and the two signatures that every attention kernel has."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.models.kernels.scores import Scores, cap
from meshwright.models.remat import ATTN_OUT


@dataclasses.dataclass(frozen=True)
class Positions:
    """Documents and positions of some queries or keys, for the attention mask."""

    segments_BT: jax.Array
    """Document of each token; tokens of different documents do not attend to each other."""
    positions_T: jax.Array
    """Position of each token in the whole sequence, int32; a token does not attend to later positions."""


def sequence_positions(segments_BT: jax.Array) -> Positions:
    """Returns the positions of whole sequences in their order."""
    return Positions(segments_BT, jnp.arange(segments_BT.shape[1]))


def reference_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    queries: Positions,
    keys: Positions,
    *,
    window: int | None,
    scores: Scores | None = None,
) -> jax.Array:
    """Computes causal attention within documents; grouped-query attention (GQA) without repeating keys or values.

    window: sliding window: a token attends to itself and the `window - 1` tokens before it; None is all before it.
    scores: soft cap and sinks; None has neither. Returns [B, T, N, H] in the dtype of q. Scores [B, N, T, S] and
    softmax are float32.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5)
    scores_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    if scores is not None:
        scores_BKGTS = cap(scores_BKGTS, scores.softcap)
    scores_BKGTS = jnp.where(visible_mask(queries, keys, window)[:, None, None], scores_BKGTS, -1e30)
    sinks_N = None if scores is None else scores.sinks_N
    weights_BKGTS = _softmax(scores_BKGTS, None if sinks_N is None else sinks_N.reshape(K, N // K, 1, 1))
    out_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS.astype(q_BTNH.dtype), v_BSKH)
    return out_BTKGH.reshape(B, T, N, v_BSKH.shape[3])


class SelfAttention(Protocol):
    """Attention of whole sequences to themselves; returns [B, T, N, H].

    Residuals that it saves for its backward pass are named ATTN_OUT, or matched by the remat policies through their
    primitive (models/remat.py). Where no layer has a soft cap or sinks, `scores` is not given.
    """

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        segments_BT: jax.Array,
        /,
        *,
        window: int | None,
        scores: Scores | None = None,
    ) -> jax.Array: ...


class CrossAttention(Protocol):
    """Attention of some positions of a sequence to others: between a device's queries and the gathered keys."""

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        queries: Positions,
        keys: Positions,
        /,
        *,
        window: int | None,
        scores: Scores | None = None,
    ) -> jax.Array: ...


def as_self_attention(attend: CrossAttention) -> SelfAttention:
    """Makes self-attention of a kernel that takes queries and keys at any positions."""

    def self_attention(
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        segments_BT: jax.Array,
        /,
        *,
        window: int | None,
        **scores: Any,
    ) -> jax.Array:
        positions = sequence_positions(segments_BT)
        return checkpoint_name(attend(q_BTNH, k_BTKH, v_BTKH, positions, positions, window=window, **scores), ATTN_OUT)

    return self_attention


def visible_mask(queries: Positions, keys: Positions, window: int | None) -> jax.Array:
    """Returns the keys [B, T, S] that each query attends to, bool: causal, within documents and the sliding window."""
    distance = queries.positions_T[:, None] - keys.positions_T[None, :]
    causal = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return causal[None] & (queries.segments_BT[:, :, None] == keys.segments_BT[:, None, :])


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Softmax over the keys and, where there are any, the sinks, whose weights are left out."""
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    if sinks is None:
        shifted = jnp.exp(scores - top)
        return shifted / shifted.sum(-1, keepdims=True)
    top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    shifted = jnp.exp(scores - top)
    return shifted / (shifted.sum(-1, keepdims=True) + jnp.exp(sinks - top))
