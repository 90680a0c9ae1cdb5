"""Attention between chunks of a sequence, from which context parallelism
and long sequences are put together.

A chunk kernel computes attention of a chunk of queries to a chunk of keys, and the log-sum-exp
(lse) of their scores. Results for several chunks of keys are combined by their lse (ring attention,
Liu et al. 2023, arXiv:2310.01889). The backward pass of a pair of chunks takes output and lse over
all keys (FlashAttention-2, arXiv:2307.08691), so that the gradients of the pairs add up. A causal
mask makes every pair full, diagonal or empty, a sliding window cuts one or two more: each kind is
compiled with a mask of its own, and empty pairs are not computed.

Attention sinks are one more key, with a value of zeros, and no kernel has to know them.
From output and lse

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
    """Keys that a chunk of queries sees within a document: query t sees key s
    if 0 <= distance + t - s < window."""

    distance: int | None = None
    """Position of the first query minus position of the first key; None: every key is visible."""
    window: int | None = None
    """Sliding window; None where it hides no key of the pair."""

    def visible_fraction(self, queries: int, keys: int) -> float:
        """Returns the fraction of the pairs of a query and a key that are visible."""
        if self.distance is None:
            return 1.0
        last = self.distance + np.arange(queries)
        first = np.zeros_like(last)
        if self.window is not None:
            first = np.maximum(last - self.window + 1, 0)
        visible = np.clip(np.minimum(last, keys - 1) - first + 1, 0, None)
        return float(visible.sum() / (queries * keys))

    def visible(
        self, queries_BT: jax.Array, keys_BS: jax.Array, i: Any = 0, j: Any = 0
    ) -> jax.Array:
        """Returns the mask [B, T, S], bool, between piece i of the queries and piece j
        of the keys, given documents."""
        visible_BTS = queries_BT[:, :, None] == keys_BS[:, None, :]
        if self.distance is not None:
            T = queries_BT.shape[1]
            S = keys_BS.shape[1]
            tokens = jnp.arange(max(T, S))
            distance_TS = self.distance + (i - j) * T + tokens[:T][:, None] - tokens[:S][None, :]
            visible_BTS &= distance_TS >= 0
            if self.window is not None:
                visible_BTS &= distance_TS < self.window
        return visible_BTS

    def between(self, i: int, j: int, size: int) -> "ChunkMask | None":
        """Returns the mask between piece i of the queries and piece j of the keys;
        None if no key is visible."""
        if self.distance is None:
            return self
        return pair_mask(self.distance + (i - j) * size, size, size, self.window)


FULL = ChunkMask()
"""Mask of a chunk of keys of which every query sees every key."""


def pair_mask(distance: int, queries: int, keys: int, window: int | None) -> ChunkMask | None:
    """Returns the mask between two chunks whose first positions are `distance` apart;
    None if no key is visible."""
    longest = distance + queries - 1
    shortest = distance - keys + 1
    if longest < 0:
        return None
    if window is not None and shortest >= window:
        return None
    if window is not None and longest >= window:
        return ChunkMask(distance, window)
    if shortest < 0:
        return ChunkMask(distance)
    return FULL


def causal_mask(tokens: int, window: int | None) -> ChunkMask:
    """Returns the mask of a complete sequence, or of neighbouring chunks of it, to itself."""
    if window is not None and window < tokens:
        return ChunkMask(0, window)
    return ChunkMask(0)


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
    """Attention kernel between two chunks;
    scores are scaled by 1/sqrt(H), documents and mask are applied.

    Where a query sees no key the output is finite;
    its value does not matter, since the lse gives it no weight.
    """

    forward: Callable[[Queries, Keys, ChunkMask], Result]
    backward: Callable[[Queries, Keys, Result, jax.Array, ChunkMask], Gradients]
    """`(queries, keys, result over all keys, gradient of the output, mask)` -> gradients
    from this pair of chunks."""
    with_softcap: "Callable[[float], ChunkAttention] | None" = None
    """Returns the kernel with a soft cap of the scores (`Scores.softcap`); None if it cannot."""

    def of(self, scores: Scores | None) -> "tuple[ChunkAttention, jax.Array | None]":
        """Returns the kernel with the soft cap of a layer's scores, and the sinks."""
        if scores is None:
            return self, None
        if scores.softcap is None:
            return self, scores.sinks_N
        assert self.with_softcap is not None, (
            "choose_kernels gives no such kernel to layers with a soft cap"
        )
        return self.with_softcap(scores.softcap), scores.sinks_N


def gradient_dot_output(g_BTNH: jax.Array, result: Result) -> jax.Array:
    """Returns D = rowsum(dO * O), which the softmax's derivative needs (FlashAttention-2),
    float32 [B, N, T]."""
    return jnp.einsum("btnh,btnh->bnt", g_BTNH, result.out_BTNH, preferred_element_type=jnp.float32)


def cut(x: Any, size: int) -> Any:
    """Returns the pieces of `size` tokens of arrays [B, T, ...], stacked
    in front: [pieces, B, size, ...].

    x: a tree; the tokens of a `Result`'s lse are its last dimension.
    """

    return jax.tree.map(functools.partial(_cut_leaf, size), x, is_leaf=_is_result)


def uncut(x: Any) -> Any:
    """Inverts `cut`."""
    return jax.tree.map(_uncut_leaf, x, is_leaf=_is_result)


def _is_result(x: Any) -> bool:
    return isinstance(x, Result)


def _cut_leaf(size: int, x: Any, axis: int = 1) -> Any:
    if isinstance(x, Result):
        return Result(_cut_leaf(size, x.out_BTNH), _cut_leaf(size, x.lse_BNT, 2))
    pieces = x.shape[axis] // size
    x = x.reshape(*x.shape[:axis], pieces, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _uncut_leaf(x: Any, axis: int = 1) -> Any:
    if isinstance(x, Result):
        return Result(_uncut_leaf(x.out_BTNH), _uncut_leaf(x.lse_BNT, 2))
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


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

    `query_inputs` are what a pass reads of chunks of queries: `(queries,)`, or `(queries, result
    over all keys, gradient of the output)`. `sums` are what it computes for chunks of queries and
    for chunks of keys: `(result, ())`, or gradients `(g_q, (g_k, g_v))`, float32. All have a
    leading dimension of chunks.
    """

    start: Callable[[Any, Keys], Any]
    """`(query_inputs, keys) -> sums` before the first pair, also of a single chunk."""
    pair: Callable[[ChunkMask, Any, Keys], Any]
    """`(mask, query_inputs, keys) -> sums` of one pair of chunks."""
    add: Callable[[Any, Any], Any]
    """Adds a pair to the sums of its two chunks."""

    def compute(self, mask: ChunkMask, query_inputs: Any, keys: Keys) -> Any:
        """Computes a pair; the scope tells the census (hlo/flops.py) how much of it is visible."""
        queries = query_inputs[0].q_BTNH.shape[1]
        fraction = mask.visible_fraction(queries, keys.k_BSKH.shape[1])
        with jax.named_scope(f"visible_{fraction:.6f}"):
            return self.pair(mask, query_inputs, keys)

    def visit(self, masks: Masks, step: Step, query_inputs: Any, keys: Keys, sums: Any) -> Any:
        """Returns `sums` with the pair of one step."""
        i, j, mask_index = step
        query_chunk = select(query_inputs, i)
        key_chunk = select(keys, j)

        def add_pair(mask: ChunkMask | None, sums: Any) -> Any:
            if mask is None:
                return sums
            return self.add(sums, self.compute(mask, query_chunk, key_chunk))

        branches = [functools.partial(add_pair, mask) for mask in masks]
        chunk_sums = (select(sums[0], i), select(sums[1], j))
        if len(branches) == 1:
            by_query, by_key = branches[0](chunk_sums)
        else:
            by_query, by_key = lax.switch(mask_index, branches, chunk_sums)
        return update(sums[0], i, by_query), update(sums[1], j, by_key)

    def visit_all(self, masks: Masks, steps: Any, query_inputs: Any, keys: Keys, sums: Any) -> Any:
        """Returns `sums` with the pairs of all steps, three arrays
        of indices, one after another."""

        def body(sums: Any, step: Step) -> tuple[Any, None]:
            return self.visit(masks, step, query_inputs, keys, sums), None

        return lax.scan(body, sums, steps)[0]


def forward_pass(kernel: ChunkAttention) -> Pass:
    """Returns the pass that combines the results of a kernel by their lse."""

    def pair(mask: ChunkMask, query_inputs: Any, keys: Keys) -> Any:
        return kernel.forward(query_inputs[0], keys, mask), ()

    return Pass(_start_results, pair, _add_results)


def _start_results(query_inputs: Any, keys: Keys) -> Any:
    """Returns the result over no keys: an output of zeros without weight."""
    *lead, T, N, _ = query_inputs[0].q_BTNH.shape
    out_BTNH = jnp.zeros((*lead, T, N, keys.v_BSKH.shape[-1]), jnp.float32)
    lse_BNT = jnp.full((*lead, N, T), -1e30, jnp.float32)
    return Result(out_BTNH, lse_BNT), ()


# With results (o1, lse1) and (o2, lse2) over disjoint keys (ring attention, arXiv:2310.01889):
#
#   lse = log(exp(lse1) + exp(lse2)),  o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2
def _add_results(sums: Any, pair: Any) -> Any:
    """Returns the result over the keys of both."""
    results = (sums[0], pair[0])
    lse_BNT = jnp.logaddexp(sums[0].lse_BNT, pair[0].lse_BNT)
    weights = [jnp.exp(result.lse_BNT - lse_BNT).swapaxes(1, 2)[..., None] for result in results]
    out_BTNH = sum(
        result.out_BTNH.astype(jnp.float32) * weight
        for result, weight in zip(results, weights, strict=True)
    )
    return Result(jnp.asarray(out_BTNH), lse_BNT), ()


def backward_pass(kernel: ChunkAttention) -> Pass:
    """Returns the pass that sums the gradients of a kernel."""

    def pair(mask: ChunkMask, query_inputs: Any, keys: Keys) -> Any:
        queries, result, g_BTNH = query_inputs
        g_q, g_k, g_v = kernel.backward(queries, keys, result, g_BTNH, mask)
        return g_q, (g_k, g_v)

    return Pass(_start_gradients, pair, _add_gradients)


def _start_gradients(query_inputs: Any, keys: Keys) -> Any:
    """Returns float32 zeros for the gradients of queries, and of keys and values."""
    differentiated = (query_inputs[0].q_BTNH, (keys.k_BSKH, keys.v_BSKH))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), differentiated)


def _add_gradients(sums: Any, pair: Any) -> Any:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, pair)


Rest = tuple[jax.Array, jax.Array | None]
"""Documents, and sinks of each head."""


@dataclasses.dataclass(frozen=True)
class ChunkSelfAttention:
    """Self-attention of a chunk kernel, with the complete sequence as one chunk;
    it saves output and lse."""

    kernel: ChunkAttention

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments_BT: jax.Array,
        *,
        window: int | None,
        scores: Scores | None = None,
    ) -> jax.Array:
        """Returns the output of attention, as `SelfAttention` does."""
        return self.with_lse(q, k, v, segments_BT, window=window, scores=scores)[0]

    def with_lse(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments_BT: jax.Array,
        *,
        window: int | None,
        scores: Scores | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns output and log-sum-exp [B, N, T], which has no derivative."""
        chosen, sinks_N = self.kernel.of(scores)
        return _attend(q, k, v, (segments_BT, sinks_N), chosen, causal_mask(q.shape[1], window))


def self_attention_of(kernel: ChunkAttention) -> ChunkSelfAttention:
    """Makes self-attention of a chunk kernel."""
    return ChunkSelfAttention(kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest, kernel: ChunkAttention, mask: ChunkMask
) -> tuple[jax.Array, jax.Array]:
    return _forward(q, k, v, rest, kernel, mask)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest, kernel: ChunkAttention, mask: ChunkMask
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    segments, _ = rest
    query_inputs = (Queries(q, segments),)
    result, _ = forward_pass(kernel).compute(mask, query_inputs, Keys(k, v, segments))
    return save(result, (q, k, v, rest))


def _backward(
    kernel: ChunkAttention, mask: ChunkMask, residuals: Any, g_outputs: tuple[jax.Array, Any]
) -> tuple[Any, ...]:
    q, k, v, (segments, _), result = residuals
    g, _ = g_outputs
    query_inputs = (Queries(q, segments), result, g)
    gradients = backward_pass(kernel).compute(mask, query_inputs, Keys(k, v, segments))
    return as_gradients(gradients, residuals, g)


_attend.defvjp(_forward, _backward)


def save(
    result: Result, inputs: tuple[jax.Array, jax.Array, jax.Array, Rest]
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Returns output and lse of attention to all keys and to the sinks,
    and the residuals of the backward pass.

    Output and lse are named: the remat policies save them together (models/remat.py).
    """
    q_BTNH, _, _, (_, sinks_N) = inputs
    if sinks_N is not None:
        result = _with_sinks(result, sinks_N)
    out_BTNH = checkpoint_name(result.out_BTNH.astype(q_BTNH.dtype), ATTN_OUT)
    lse_BNT = checkpoint_name(result.lse_BNT, ATTN_LSE)
    return (out_BTNH, lse_BNT), (*inputs, Result(out_BTNH, lse_BNT))


def _with_sinks(result: Result, sinks_N: jax.Array) -> Result:
    """Returns the result with one more key per head,
    whose score is the sink and whose value is zero."""
    lse_BNT = jnp.logaddexp(result.lse_BNT, sinks_N.astype(jnp.float32)[None, :, None])
    weight_BTN = jnp.exp(result.lse_BNT - lse_BNT).swapaxes(1, 2)
    out_BTNH = result.out_BTNH.astype(jnp.float32) * weight_BTN[..., None]
    return Result(out_BTNH.astype(result.out_BTNH.dtype), lse_BNT)


def as_gradients(gradients: Any, residuals: Any, g_BTNH: jax.Array) -> tuple[Any, ...]:
    """Returns the gradients of the inputs of `save`.
    gradients: of queries, and of keys and values."""
    q_BTNH, k_BSKH, v_BSKH, (segments, sinks_N), result = residuals
    g_sinks = None
    if sinks_N is not None:
        g_sinks = _sink_gradients(result, g_BTNH, sinks_N)
    g_q, (g_k, g_v) = gradients
    g_q = g_q.astype(q_BTNH.dtype)
    g_k = g_k.astype(k_BSKH.dtype)
    g_v = g_v.astype(v_BSKH.dtype)
    # Documents are integers, whose gradient is of type float0.
    g_segments = np.zeros(segments.shape, jax.dtypes.float0)
    return g_q, g_k, g_v, (g_segments, g_sinks)


# With weights p of the keys and p' of the sink, output = sum p v,
# and its derivative by the sink is -p' output.
def _sink_gradients(result: Result, g_BTNH: jax.Array, sinks_N: jax.Array) -> jax.Array:
    inner_BNT = gradient_dot_output(g_BTNH, result)
    weight_BNT = jnp.exp(sinks_N.astype(jnp.float32)[None, :, None] - result.lse_BNT)
    return -(weight_BNT * inner_BNT).sum((0, 2)).astype(sinks_N.dtype)
