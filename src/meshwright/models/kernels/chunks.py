"""Attention between chunks of a sequence, from which context parallelism and long sequences are put together.

A chunk kernel computes attention of a chunk of queries to a chunk of keys, and the log-sum-exp (lse) of their scores.
Results for several chunks of keys are combined by their lse (ring attention, Liu et al. 2023, arXiv:2310.01889). The
backward pass of a pair of chunks takes output and lse over all keys (FlashAttention-2, arXiv:2307.08691), so that the
gradients of the pairs add up. A causal mask makes every pair full, diagonal or empty, a sliding window cuts one or two
more: each kind is compiled with a mask of its own, and empty pairs are not computed.

Attention sinks are one more key, with a value of zeros, and no kernel has to know them. From output and lse

    lse' = log(exp(lse) + exp(sink)),  output' = exp(lse - lse') output

and the backward passes, given lse' and output', return the gradients of queries, keys and values.
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

from meshwright.models.kernels.attention import Scores
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
        first = (
            np.zeros_like(last) if self.window is None else np.maximum(last - self.window + 1, 0)
        )
        return float(
            np.clip(np.minimum(last, keys - 1) - first + 1, 0, None).sum() / (queries * keys)
        )

    def visible(
        self, queries_BT: jax.Array, keys_BS: jax.Array, i: Any = 0, j: Any = 0
    ) -> jax.Array:
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
        return (
            self
            if self.distance is None
            else pair_mask(self.distance + (i - j) * size, size, size, self.window)
        )


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
    """Returns the kernel with a soft cap of the scores (`Scores.softcap`); None if it cannot."""

    def of(self, scores: Scores | None) -> "tuple[ChunkAttention, jax.Array | None]":
        """Returns the kernel with the soft cap of a layer's scores, and the sinks."""
        if scores is None or scores.softcap is None:
            return self, None if scores is None else scores.sinks_N
        assert self.with_softcap is not None, (
            "choose_kernels gives no such kernel to layers with a soft cap"
        )
        return self.with_softcap(scores.softcap), scores.sinks_N


def cut(x: Any, size: int) -> Any:
    """Returns the pieces of `size` tokens of arrays [B, T, ...], stacked in front: [pieces, B, size, ...].

    x: a tree; the tokens of a `Result`'s lse are its last dimension.
    """

    def pieces(x: Any, axis: int = 1) -> Any:
        if isinstance(x, Result):
            return Result(pieces(x.out_BTNH), pieces(x.lse_BNT, 2))
        x = x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    return jax.tree.map(pieces, x, is_leaf=lambda x: isinstance(x, Result))


def uncut(x: Any) -> Any:
    """Inverts `cut`."""

    def joined(x: Any, axis: int = 1) -> Any:
        if isinstance(x, Result):
            return Result(joined(x.out_BTNH), joined(x.lse_BNT, 2))
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    return jax.tree.map(joined, x, is_leaf=lambda x: isinstance(x, Result))


def select(x: Any, i: jax.Array | int) -> Any:
    """Returns element i of every array's leading dimension."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), x)


def update(x: Any, i: jax.Array | int, value: Any) -> Any:
    """Replaces element i of every array's leading dimension."""
    return jax.tree.map(lambda leaf, v: lax.dynamic_update_index_in_dim(leaf, v, i, 0), x, value)


Masks = tuple[ChunkMask | None, ...]
"""Masks of the pairs that a step may compute; None for a pair without a visible key."""
Step = tuple[Any, Any, Any]
"""Indices of a chunk of queries, of a chunk of keys, and of the mask between them."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """Forward or backward pass over pairs of chunks.

    `rows` are what a pass reads of chunks of queries: `(queries,)`, or `(queries, result over all keys, gradient of the
    output)`. `sums` are what it computes for chunks of queries and for chunks of keys: `(result, ())`, or gradients
    `(g_q, (g_k, g_v))`, float32. All have a leading dimension of chunks.
    """

    start: Callable[[Any, Keys], Any]
    """`(rows, keys) -> sums` before the first pair, also of a single chunk."""
    pair: Callable[[ChunkMask, Any, Keys], Any]
    """Computes a pair of chunks."""
    add: Callable[[Any, Any], Any]
    """Adds a pair to the sums of its two chunks."""

    def compute(self, mask: ChunkMask, rows: Any, keys: Keys) -> Any:
        """Computes a pair; the scope tells the census (hlo/flops.py) how much of it is visible."""
        fraction = mask.visible_fraction(rows[0].q_BTNH.shape[1], keys.k_BSKH.shape[1])
        with jax.named_scope(f"visible_{fraction:.6f}"):
            return self.pair(mask, rows, keys)

    def visit(self, masks: Masks, step: Step, rows: Any, keys: Keys, sums: Any) -> Any:
        """Returns `sums` with the pair of one step."""
        i, j, kind = step
        row, column = select(rows, i), select(keys, j)

        def branch(mask: ChunkMask | None, sums: Any) -> Any:
            return sums if mask is None else self.add(sums, self.compute(mask, row, column))

        branches, here = (
            [functools.partial(branch, mask) for mask in masks],
            (select(sums[0], i), select(sums[1], j)),
        )
        by_query, by_key = (
            branches[0](here) if len(branches) == 1 else lax.switch(kind, branches, here)
        )
        return update(sums[0], i, by_query), update(sums[1], j, by_key)

    def visit_all(self, masks: Masks, steps: Any, rows: Any, keys: Keys, sums: Any) -> Any:
        """Returns `sums` with the pairs of all steps, three arrays of indices, one after another."""
        return lax.scan(
            lambda sums, step: (self.visit(masks, step, rows, keys, sums), None), sums, steps
        )[0]


def forward_pass(kernel: ChunkAttention) -> Pass:
    """Returns the pass that combines the results of a kernel by their lse."""

    def start(rows: Any, keys: Keys) -> Any:
        *lead, T, N, _ = rows[0].q_BTNH.shape
        out_BTNH = jnp.zeros((*lead, T, N, keys.v_BSKH.shape[-1]), jnp.float32)
        return Result(out_BTNH, jnp.full((*lead, N, T), -1e30, jnp.float32)), ()

    def add(sums: Any, found: Any) -> Any:
        pair = (sums[0], found[0])
        lse_BNT = jnp.logaddexp(*(result.lse_BNT for result in pair))
        weights = [jnp.exp(result.lse_BNT - lse_BNT).swapaxes(1, 2)[..., None] for result in pair]
        out_BTNH = sum(
            result.out_BTNH.astype(jnp.float32) * w for result, w in zip(pair, weights, strict=True)
        )
        return Result(jnp.asarray(out_BTNH), lse_BNT), ()

    return Pass(start, lambda mask, rows, keys: (kernel.forward(rows[0], keys, mask), ()), add)


def backward_pass(kernel: ChunkAttention) -> Pass:
    """Returns the pass that sums the gradients of a kernel."""

    def pair(mask: ChunkMask, rows: Any, keys: Keys) -> Any:
        queries, result, g_BTNH = rows
        g_q, g_k, g_v = kernel.backward(queries, keys, result, g_BTNH, mask)
        return g_q, (g_k, g_v)

    def add(sums: Any, found: Any) -> Any:
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, found)

    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, jnp.float32))
    return Pass(lambda rows, keys: zeros((rows[0].q_BTNH, keys[:2])), pair, add)


Rest = tuple[jax.Array, jax.Array | None]
"""Documents, and sinks of each head."""


def self_attention_of(kernel: ChunkAttention) -> Callable[..., jax.Array]:
    """Makes self-attention of a chunk kernel, with the complete sequence as one chunk; it saves output and lse."""

    def self_attention(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments_BT: jax.Array,
        *,
        window: int | None,
        scores: Scores | None = None,
    ) -> jax.Array:
        chosen, sinks_N = kernel.of(scores)
        return _attend(q, k, v, (segments_BT, sinks_N), chosen, causal_mask(q.shape[1], window))

    return self_attention


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest, kernel: ChunkAttention, mask: ChunkMask
) -> jax.Array:
    return _forward(q, k, v, rest, kernel, mask)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest, kernel: ChunkAttention, mask: ChunkMask
) -> tuple[jax.Array, Any]:
    result, _ = forward_pass(kernel).compute(mask, (Queries(q, rest[0]),), Keys(k, v, rest[0]))
    return save(result, (q, k, v, rest))


def _backward(kernel: ChunkAttention, mask: ChunkMask, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    q, k, v, rest, result = saved
    gradients = backward_pass(kernel).compute(
        mask, (Queries(q, rest[0]), result, g), Keys(k, v, rest[0])
    )
    return as_gradients(gradients, saved, g)


_attend.defvjp(_forward, _backward)


def save(
    result: Result, inputs: tuple[jax.Array, jax.Array, jax.Array, Rest]
) -> tuple[jax.Array, Any]:
    """Returns the output of attention to all keys and to the sinks, and the residuals of the backward pass.

    Output and lse are named: the remat policies save them together (models/remat.py).
    """
    out_BTNH, lse_BNT = result
    (q_BTNH, _, _, (_, sinks_N)), dtype = inputs, out_BTNH.dtype
    if sinks_N is not None:
        whole_BNT = jnp.logaddexp(lse_BNT, sinks_N.astype(jnp.float32)[None, :, None])
        weight_BTN = jnp.exp(lse_BNT - whole_BNT).swapaxes(1, 2)
        out_BTNH, lse_BNT = (
            (out_BTNH.astype(jnp.float32) * weight_BTN[..., None]).astype(dtype),
            whole_BNT,
        )
    out_BTNH = checkpoint_name(out_BTNH.astype(q_BTNH.dtype), ATTN_OUT)
    return out_BTNH, (*inputs, Result(out_BTNH, checkpoint_name(lse_BNT, ATTN_LSE)))


def as_gradients(gradients: Any, saved: Any, g_BTNH: jax.Array) -> tuple[Any, ...]:
    """Returns the gradients of the inputs of `save`. gradients: of queries, and of keys and values.  saved: residuals.

    With weights p of the keys and p' of the sink, output = sum p v, and the derivative by the sink is -p' output.
    """
    *qkv, (segments, sinks_N), result = saved
    g_q, (g_k, g_v) = gradients
    g_qkv = (x.astype(like.dtype) for x, like in zip((g_q, g_k, g_v), qkv, strict=True))
    g_sinks = None
    if sinks_N is not None:
        inner_BNT = jnp.einsum(
            "btnh,btnh->bnt", g_BTNH, result.out_BTNH, preferred_element_type=jnp.float32
        )
        weight_BNT = jnp.exp(sinks_N.astype(jnp.float32)[None, :, None] - result.lse_BNT)
        g_sinks = -(weight_BNT * inner_BNT).sum((0, 2)).astype(sinks_N.dtype)
    return *g_qkv, (np.zeros(segments.shape, jax.dtypes.float0), g_sinks)
