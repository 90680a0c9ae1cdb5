"""Attention between chunks of a sequence, from which context parallelism and long sequences are put together.

A chunk kernel computes attention of a chunk of queries to a chunk of keys, and the log-sum-exp (lse) of their scores.
Results for several chunks of keys are combined by their lse (ring attention, Liu et al. 2023, arXiv:2310.01889). The
backward pass of a pair of chunks takes output and lse over all keys (FlashAttention-2, arXiv:2307.08691), so that the
gradients of the pairs add up. A causal mask makes every pair full, diagonal or empty, a sliding window cuts one or two
more: each kind is compiled with a mask of its own, and empty pairs are not computed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.models.kernels.scores import Scores, add_sinks, sinks_gradient
from meshwright.models.remat import ATTN_LSE, ATTN_OUT


@dataclasses.dataclass(frozen=True)
class ChunkMask:
    """Keys that a chunk of queries sees within a document: query t sees key s if 0 <= distance + t - s < window."""

    distance: int | None = None
    """Position of the first query minus position of the first key; None: every key is visible."""
    window: int | None = None
    """Sliding window; None where it hides no key of the pair."""

    def visible_fraction(self, queries: int, keys: int) -> float:
        """Returns the fraction of the pairs of a query and a key that are visible."""
        if self.distance is None:
            return 1.0
        last = self.distance + np.arange(queries)
        first = np.zeros_like(last) if self.window is None else np.maximum(last - self.window + 1, 0)
        return float(np.clip(np.minimum(last, keys - 1) - first + 1, 0, None).sum() / (queries * keys))

    def visible(self, queries_BT: jax.Array, keys_BS: jax.Array, i: Any = 0, j: Any = 0) -> jax.Array:
        """Returns the mask [B, T, S], bool, between piece i of the queries and piece j of the keys, given documents."""
        visible_BTS = queries_BT[:, :, None] == keys_BS[:, None, :]
        if self.distance is not None:
            T, S = queries_BT.shape[1], keys_BS.shape[1]
            tokens = jnp.arange(max(T, S))
            distance_TS = self.distance + (i - j) * T + tokens[:T][:, None] - tokens[:S][None, :]
            visible_BTS &= distance_TS >= 0
            if self.window is not None:
                visible_BTS &= distance_TS < self.window
        return visible_BTS

    def between(self, i: int, j: int, size: int) -> "ChunkMask | None":
        """Returns the mask between piece i of the queries and piece j of the keys; None if no key is visible."""
        return self if self.distance is None else pair_mask(self.distance + (i - j) * size, size, size, self.window)


FULL = ChunkMask()
"""Mask of a chunk of keys of which every query sees every key."""


def pair_mask(distance: int, queries: int, keys: int, window: int | None) -> ChunkMask | None:
    """Returns the mask between two chunks whose first positions are `distance` apart; None if no key is visible."""
    longest, shortest = distance + queries - 1, distance - keys + 1
    if longest < 0 or (window is not None and shortest >= window):
        return None
    cut = window is not None and longest >= window
    return ChunkMask(distance, window if cut else None) if cut or shortest < 0 else FULL


def causal_mask(tokens: int, window: int | None) -> ChunkMask:
    """Returns the mask of a complete sequence, or of neighbouring chunks of it, to itself."""
    return ChunkMask(0, window if window is not None and window < tokens else None)


class Queries(NamedTuple):
    """A chunk of queries."""

    q_BTNH: jax.Array
    segments_BT: jax.Array
    """Document of each query."""


class Keys(NamedTuple):
    """A chunk of keys and values."""

    k_BSKH: jax.Array
    v_BSKH: jax.Array
    segments_BS: jax.Array
    """Document of each key."""


class Result(NamedTuple):
    """Attention of a chunk of queries to some keys."""

    out_BTNH: jax.Array
    lse_BNT: jax.Array
    """Log-sum-exp of the scores, float32; below -1e11 where a query sees none of the keys."""


Gradients = tuple[jax.Array, jax.Array, jax.Array]
"""Gradients of queries, keys and values."""


@dataclasses.dataclass(frozen=True)
class ChunkAttention:
    """Attention kernel between two chunks; scores are scaled by 1/sqrt(H), documents and mask are applied.

    Where a query sees no key the output is finite; its value does not matter, since the lse gives it no weight.
    """

    forward: Callable[[Queries, Keys, ChunkMask], Result]
    backward: Callable[[Queries, Keys, Result, jax.Array, ChunkMask], Gradients]
    """`(queries, keys, result over all keys, gradient of the output, mask)` -> gradients from this pair of chunks."""
    with_softcap: "Callable[[float], ChunkAttention] | None" = None
    """Returns the kernel with a soft cap of the scores (kernels/scores.py); None if it cannot."""

    def of(self, scores: Scores | None) -> "tuple[ChunkAttention, jax.Array | None]":
        """Returns the kernel with the soft cap of a layer's scores, and the sinks."""
        if scores is None or scores.softcap is None:
            return self, None if scores is None else scores.sinks_N
        assert self.with_softcap is not None, "choose_kernels gives no such kernel to layers with a soft cap"
        return self.with_softcap(scores.softcap), scores.sinks_N


def forward_pair(kernel: ChunkAttention, mask: ChunkMask, queries: Queries, keys: Keys) -> Result:
    """Computes a pair of chunks; the scope tells the census (analysis/cost_model.py) how much of it is visible."""
    with _scope(mask, queries, keys):
        return kernel.forward(queries, keys, mask)


def backward_pair(
    kernel: ChunkAttention, mask: ChunkMask, queries: Queries, keys: Keys, result: Result, g_BTNH: jax.Array
) -> Gradients:
    """Computes the gradients of a pair of chunks. result: attention of the queries to all of their keys."""
    with _scope(mask, queries, keys):
        return kernel.backward(queries, keys, result, g_BTNH, mask)


def _scope(mask: ChunkMask, queries: Queries, keys: Keys) -> Any:
    return jax.named_scope(f"visible_{mask.visible_fraction(queries.q_BTNH.shape[1], keys.k_BSKH.shape[1]):.6f}")


def combine(a: Result, b: Result) -> Result:
    """Returns attention to the keys of both results, float32; in `a` every query sees a key."""
    lse_BNT = jnp.logaddexp(a.lse_BNT, b.lse_BNT)
    weights = (jnp.exp(x.lse_BNT - lse_BNT).swapaxes(1, 2)[..., None] for x in (a, b))
    out_BTNH = sum(x.out_BTNH.astype(jnp.float32) * w for x, w in zip((a, b), weights, strict=True))
    return Result(jnp.asarray(out_BTNH), lse_BNT)


def cut(x: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """Returns the pieces of `size` elements along an axis, stacked in front: [B, T, ...] -> [pieces, B, size, ...]."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def uncut(x: jax.Array, axis: int = 1) -> jax.Array:
    """Inverts `cut`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def select(x: Any, i: jax.Array | int) -> Any:
    """Returns element i of every array's leading dimension."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), x)


def update(x: Any, i: jax.Array | int, value: Any) -> Any:
    """Replaces element i of every array's leading dimension."""
    return jax.tree.map(lambda leaf, v: lax.dynamic_update_index_in_dim(leaf, v, i, 0), x, value)


def zeros_like(x: Any) -> Any:
    """Returns float32 zeros of the shapes of a tree: sums of gradients before the first pair."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), x)


def empty_result(queries: Queries, value_size: int | None = None) -> Result:
    """Returns the result for no keys, float32. value_size: size of a value; None is that of a key."""
    B, T, N, H = queries.q_BTNH.shape
    return Result(jnp.zeros((B, T, N, value_size or H), jnp.float32), jnp.full((B, N, T), -1e30, jnp.float32))


Masks = tuple[ChunkMask | None, ...]
"""Masks of the pairs that a step may compute; None for a pair without a visible key."""
Step = tuple[Any, Any, Any]
"""Indices of a chunk of queries, of a chunk of keys, and of the mask between them."""


def forward_step(
    kernel: ChunkAttention, masks: Masks, step: Step, queries: Queries, keys: Keys, results: Result
) -> Result:
    """Adds a pair of chunks to the results; all arrays have a leading dimension of chunks, results are float32."""
    i, j, kind = step
    q, kv = select(queries, i), select(keys, j)

    def compute(mask: ChunkMask | None, result: Result) -> Result:
        return result if mask is None else combine(result, forward_pair(kernel, mask, q, kv))

    return update(results, i, _switch(masks, kind, compute, select(results, i)))


def backward_step(
    kernel: ChunkAttention,
    masks: Masks,
    step: Step,
    queries: Queries,
    keys: Keys,
    saved: tuple[Result, jax.Array],
    sums: tuple[jax.Array, Any],
) -> tuple[jax.Array, Any]:
    """Adds the gradients of a pair of chunks to `sums`: of the queries, and of keys and values, float32.

    saved: results over all keys, and the gradients of the outputs.
    """
    i, j, kind = step
    q, kv, (result, g) = select(queries, i), select(keys, j), select(saved, i)

    def compute(mask: ChunkMask | None, sums: Any) -> Any:
        if mask is None:
            return sums
        g_q, g_k, g_v = backward_pair(kernel, mask, q, kv, result, g)
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, (g_q, (g_k, g_v)))

    g_q, g_kv = _switch(masks, kind, compute, (select(sums[0], i), select(sums[1], j)))
    return update(sums[0], i, g_q), update(sums[1], j, g_kv)


def _switch(masks: Masks, kind: Any, compute: Callable[[ChunkMask | None, Any], Any], carry: Any) -> Any:
    branches = [functools.partial(compute, mask) for mask in masks]
    return branches[0](carry) if len(branches) == 1 else lax.switch(kind, branches, carry)


def self_attention_of(kernel: ChunkAttention) -> Callable[..., jax.Array]:
    """Makes self-attention of a chunk kernel, with the complete sequence as one chunk; it saves output and lse."""

    def self_attention(
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        segments_BT: jax.Array,
        *,
        window: int | None,
        scores: Scores | None = None,
    ) -> jax.Array:
        chosen, sinks_N = kernel.of(scores)
        return _attend(q_BTNH, k_BTKH, v_BTKH, (segments_BT, sinks_N), chosen, causal_mask(q_BTNH.shape[1], window))

    return self_attention


Rest = tuple[jax.Array, jax.Array | None]
"""Documents, and sinks of each head."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest, kernel: ChunkAttention, mask: ChunkMask) -> jax.Array:
    return _forward(q, k, v, rest, kernel, mask)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest, kernel: ChunkAttention, mask: ChunkMask
) -> tuple[jax.Array, Any]:
    segments, sinks_N = rest
    result = forward_pair(kernel, mask, Queries(q, segments), Keys(k, v, segments))
    result = named(add_sinks(result, sinks_N), q.dtype)
    return result.out_BTNH, (q, k, v, rest, result)


def _backward(kernel: ChunkAttention, mask: ChunkMask, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    q, k, v, rest, result = saved
    gradients = backward_pair(kernel, mask, Queries(q, rest[0]), Keys(k, v, rest[0]), result, g)
    return as_gradients(gradients, saved, g)


_attend.defvjp(_forward, _backward)


def named(result: Result, dtype: Any) -> Result:
    """Names output and lse, which the remat policies save together (models/remat.py); the output in `dtype`."""
    out_BTNH = checkpoint_name(result.out_BTNH.astype(dtype), ATTN_OUT)
    return Result(out_BTNH, checkpoint_name(result.lse_BNT, ATTN_LSE))


def as_gradients(gradients: Any, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    """Returns the gradients of q, k, v, and of documents and sinks. saved: the residuals (q, k, v, rest, result)."""
    *qkv, (segments, sinks_N), result = saved
    no_gradient = np.zeros(segments.shape, jax.dtypes.float0)
    g_sinks = sinks_gradient(result, g, sinks_N)
    return *(x.astype(like.dtype) for x, like in zip(gradients, qkv, strict=True)), (no_gradient, g_sinks)
