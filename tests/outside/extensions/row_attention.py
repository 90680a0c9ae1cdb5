"""Attention kernel in Pallas: a block of queries against all keys; scores stay on the chip."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from meshwright.models.kernels.attention import (
    AttentionShapes,
    Kernels,
    Positions,
    as_self_attention,
    reference_attention,
)

BLOCK = 128
"""Largest block of queries."""

_Where = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Segments [B, T] and positions [T] of the queries, then those of the keys."""
_Saved = tuple[jax.Array, jax.Array, jax.Array, _Where]
"""Queries, keys and values, from which the backward pass computes the scores again."""


def row_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    queries: Positions,
    keys: Positions,
    *,
    window: int | None,
) -> jax.Array:
    """Computes causal attention within documents, [B, T, N, H]; the backward pass is that of the reference kernel."""
    where = (queries.segments_BT, queries.positions_T, keys.segments_BT, keys.positions_T)
    return _attend(q_BTNH, k_BSKH, v_BSKH, where, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, where: _Where, window: int | None
) -> jax.Array:
    # Pallas compiles for TPUs and is interpreted on CPUs; which of the two is known when the step is lowered.
    compiled, interpreted = (
        functools.partial(_call_kernel, window=window, interpret=i) for i in (False, True)
    )
    return jax.lax.platform_dependent(q, k, v, where, cpu=interpreted, default=compiled)


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, where: _Where, window: int | None
) -> tuple[jax.Array, _Saved]:
    return _attend(q, k, v, where, window), (q, k, v, where)


def _backward(window: int | None, saved: _Saved, g: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, where = saved
    queries, keys = Positions(*where[:2]), Positions(*where[2:])
    _, pullback = jax.vjp(
        lambda q, k, v: reference_attention(q, k, v, queries, keys, window=window), q, k, v
    )
    return *pullback(g), None


_attend.defvjp(_forward, _backward)


def _call_kernel(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    where: _Where,
    *,
    window: int | None,
    interpret: bool,
) -> jax.Array:
    """Runs the kernel for each sequence, head and block of queries."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    block = min(T, BLOCK)
    query_segments_BT, query_positions_T, key_segments_BS, key_positions_S = where
    out_BNTH = pl.pallas_call(
        functools.partial(_kernel, window=window),
        grid=(B, N, pl.cdiv(T, block)),
        in_specs=[
            pl.BlockSpec((None, None, block, H), lambda b, n, t: (b, n, t, 0)),
            pl.BlockSpec((None, None, S, H), lambda b, n, t: (b, n // (N // K), 0, 0)),
            pl.BlockSpec((None, None, S, H), lambda b, n, t: (b, n // (N // K), 0, 0)),
            pl.BlockSpec((None, block, 1), lambda b, n, t: (b, t, 0)),
            pl.BlockSpec((block, 1), lambda b, n, t: (t, 0)),
            pl.BlockSpec((None, 1, S), lambda b, n, t: (b, 0, 0)),
            pl.BlockSpec((1, S), lambda b, n, t: (0, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, block, H), lambda b, n, t: (b, n, t, 0)),
        out_shape=jax.ShapeDtypeStruct((B, N, T, H), q_BTNH.dtype),
        interpret=interpret,
    )(
        *(x.transpose(0, 2, 1, 3) for x in (q_BTNH, k_BSKH, v_BSKH)),
        query_segments_BT[:, :, None], query_positions_T[:, None], key_segments_BS[:, None], key_positions_S[None],
    )  # fmt: skip
    return out_BNTH.transpose(0, 2, 1, 3)


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    q_segment,
    q_position,
    k_segment,
    k_position,
    out_ref,
    *,
    window: int | None,
) -> None:  # type: ignore[no-untyped-def]
    """Writes softmax(q k' / sqrt(H)) v of one block of queries [block, H] and all keys [S, H] of one head."""
    q, k, v = q_ref[...], k_ref[...], v_ref[...]
    scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    distance = q_position[...] - k_position[...]
    visible = (distance >= 0) & (q_segment[...] == k_segment[...])
    if window is not None:
        visible &= distance < window
    scores = jnp.where(visible, scores, -1e30)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out_ref[...] = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(
        out_ref.dtype
    )


def _unsupported(shapes: AttentionShapes) -> str | None:
    """Returns why the kernel cannot run these shapes, None if it can."""
    if shapes.platform not in ("cpu", "tpu"):
        return f"the row kernel is written for TPUs and interpreted on CPUs, and the devices are {shapes.platform!r}"
    if shapes.seq > BLOCK and shapes.seq % BLOCK:
        return f"the row kernel takes sequences in multiples of {BLOCK}, and {shapes.seq} is none"
    return None


row_kernel = Kernels("row", as_self_attention(row_attention), row_attention, _unsupported)
