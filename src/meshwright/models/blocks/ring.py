"""Context parallelism by chunks: attention in a ring of devices, and attention to gathered keys and values.

The sequence is cut into 2n chunks for a ring of n groups, and group i holds chunks i and 2n-1-i (zigzag,
sharding/sequence.py). Under a causal mask every group then has the same work: its own two chunks, and two full pairs of
chunks for every other group. A group attends to its own keys with a causal mask. For the keys of group j it computes
its back chunk with their front chunk, and either front with front (i > j) or back with back (i < j): two pairs of equal
size whatever the group, so that the compiled step has no branch. With a sliding window a branch chooses between the
kinds of pairs, and skips the empty ones.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import all_gather, ring_shift
from meshwright.models.kernels.attention import Kernels, Positions, sequence_positions
from meshwright.models.kernels.chunks import (
    ChunkAttention,
    Keys,
    Masks,
    Queries,
    Rest,
    Result,
    Step,
    as_gradients,
    backward_pair,
    backward_step,
    causal_mask,
    cut,
    empty_result,
    forward_pair,
    forward_step,
    named,
    pair_mask,
    zeros_like,
)
from meshwright.models.kernels.scores import Scores, add_sinks
from meshwright.models.remat import ATTN_OUT
from meshwright.sharding.sequence import SequenceSplit

Rows = tuple[Result, jax.Array]
"""Results of this device's two chunks over all keys, and the gradients of their outputs."""


class _Plan(NamedTuple):
    """Static facts of the attention over a split sequence."""

    kernel: ChunkAttention
    sequence: SequenceSplit
    window: int | None

    @property
    def groups(self) -> int:
        """Groups of devices, each with two chunks."""
        return self.sequence.groups

    @property
    def local_causal(self) -> bool:
        """Whether a device's own chunks attend to each other as one chunk: without a window, back sees all of front."""
        return self.window is None or self.window >= self.sequence.seq

    def masks(self) -> tuple[Masks, list[int]]:
        """Returns the masks between chunks, and for each distance in chunks the index of its mask."""
        size = self.sequence.seq // (2 * self.groups)
        by_distance = [pair_mask(d * size, size, size, self.window) for d in range(2 * self.groups)]
        masks = tuple(dict.fromkeys(by_distance))
        return masks, [masks.index(mask) for mask in by_distance]

    def other_masks(self) -> tuple[Masks, jax.Array]:
        """Returns the masks between different chunks, and the index of each distance's mask."""
        masks, kinds = self.masks()
        used = tuple(dict.fromkeys(masks[kind] for kind in kinds[1:]))
        return used, jnp.asarray([0, *(used.index(masks[kind]) for kind in kinds[1:])], jnp.int32)

    def diagonal(self) -> Masks:
        """Returns the mask of a chunk to itself."""
        masks, kinds = self.masks()
        return (masks[kinds[0]],)


def _halves(x: jax.Array, axis: int = 1) -> jax.Array:
    """Returns front and back chunk of a local array [B, T, ...], stacked: [2, B, T/2, ...]."""
    return jnp.stack(jnp.split(x, 2, axis=axis))


def _join(x: jax.Array, axis: int = 1) -> jax.Array:
    """Returns the local array of a stacked front and back chunk."""
    return jnp.concatenate([x[0], x[1]], axis=axis)


class _Ring:
    """Pairs of this device's chunks with those of its group and of the others, whose keys go around the ring.

    Every shift is independent of the attention next to it, so that the two overlap.
    """

    def __init__(self, plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array):
        self.plan, self.last = plan, 2 * plan.groups - 1
        self.index = lax.axis_index("context") // plan.sequence.group
        self.segments = cut(segments_BT, segments_BT.shape[1] // (2 * plan.groups))
        self.masks, self.kinds = plan.other_masks()
        self.queries = Queries(_halves(q), self._group_segments(self.index))
        self.kv = jnp.stack([_halves(k), _halves(v)], axis=1)

    def _group_segments(self, group: jax.Array) -> jax.Array:
        return self.segments[jnp.stack([group, self.last - group])]

    def _keys_after(self, kv: jax.Array, shifts: jax.Array | int) -> Keys:
        """Returns the keys on this device after a number of shifts."""
        return Keys(kv[:, 0], kv[:, 1], self._group_segments((self.index - shifts) % self.plan.groups))

    def _steps(self, shifts: jax.Array | int) -> list[Step]:
        """Returns the pairs of chunks (front 0, back 1) with the keys of another group, and their masks."""
        other = (self.index - shifts) % self.plan.groups
        same = jnp.where(self.index > other, 0, 1)
        far, near = self.last - self.index - other, abs(self.index - other)
        return [(1, 0, self.kinds[far]), (same, same, self.kinds[near])]

    def _own_steps(self) -> list[tuple[Masks, Step]]:
        """Returns the pairs of this device's chunks: both diagonals, and back with front."""
        diagonal, far = self.plan.diagonal(), self.last - 2 * self.index
        return [(diagonal, (0, 0, 0)), (diagonal, (1, 1, 0)), (self.masks, (1, 0, self.kinds[far]))]

    def _shift(self, x: Any) -> Any:
        """Sends a value to the same device of the next group."""
        return jax.tree.map(lambda leaf: ring_shift(leaf, "context", self.plan.sequence.group), x)

    def forward(self) -> Result:
        """Returns attention of this device's chunks to all keys, float32."""

        def attend(results: Result, kv: jax.Array, shifts: jax.Array | int) -> Result:
            keys = self._keys_after(kv, shifts)
            for step in self._steps(shifts):
                results = forward_step(self.plan.kernel, self.masks, step, self.queries, keys, results)
            return results

        def step(carry: Any, shifts: jax.Array) -> tuple[Any, None]:
            kv, results = carry
            return (self._shift(kv), attend(results, kv, shifts)), None

        last = self.plan.groups - 1
        start = (self._shift(self.kv), self._own_forward(self._keys_after(self.kv, 0)))
        (kv, results), _ = lax.scan(step, start, jnp.arange(1, last))
        return attend(results, kv, last)

    def _own_forward(self, keys: Keys) -> Result:
        kernel, queries = self.plan.kernel, self.queries
        if self.plan.local_causal:
            whole_queries, whole_keys = Queries(*map(_join, queries)), Keys(*map(_join, keys))
            mask = causal_mask(whole_queries.q_BTNH.shape[1], None)
            out_BTNH, lse_BNT = forward_pair(kernel, mask, whole_queries, whole_keys)
            return Result(_halves(out_BTNH.astype(jnp.float32)), _halves(lse_BNT, 2))
        results = jax.vmap(empty_result)(queries)
        for masks, step in self._own_steps():
            results = forward_step(kernel, masks, step, queries, keys, results)
        return results

    def backward(self, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of this device's queries, keys and values, float32."""

        def attend(sums: Any, kv: jax.Array, shifts: jax.Array | int) -> Any:
            keys = self._keys_after(kv, shifts)
            for step in self._steps(shifts):
                sums = backward_step(self.plan.kernel, self.masks, step, self.queries, keys, rows, sums)
            return sums

        def step(carry: Any, shifts: jax.Array) -> tuple[Any, None]:
            kv, (g_q, g_kv) = carry
            g_q, g_kv = attend((g_q, g_kv), kv, shifts)
            return (self._shift(kv), (g_q, self._shift(g_kv))), None

        last = self.plan.groups - 1
        g_q, g_kv = self._own_backward(self._keys_after(self.kv, 0), rows)
        start = (self._shift(self.kv), (g_q, self._shift(g_kv)))
        (kv, sums), _ = lax.scan(step, start, jnp.arange(1, last))
        g_q, g_kv = attend(sums, kv, last)
        # One more shift returns every block of gradients to the device that holds its keys.
        g_k, g_v = self._shift(g_kv)
        return _join(g_q), _join(g_k), _join(g_v)

    def _own_backward(self, keys: Keys, rows: Rows) -> Any:
        kernel, queries, (results, g) = self.plan.kernel, self.queries, rows
        if self.plan.local_causal:
            whole_queries, whole_keys = Queries(*map(_join, queries)), Keys(*map(_join, keys))
            mask = causal_mask(whole_queries.q_BTNH.shape[1], None)
            result = Result(_join(results.out_BTNH), _join(results.lse_BNT, 2))
            whole = backward_pair(kernel, mask, whole_queries, whole_keys, result, _join(g))
            g_q, g_k, g_v = (_halves(x.astype(jnp.float32)) for x in whole)
            return g_q, (g_k, g_v)
        sums = zeros_like((queries.q_BTNH, (keys.k_BSKH, keys.v_BSKH)))
        for masks, step in self._own_steps():
            sums = backward_step(kernel, masks, step, queries, keys, rows, sums)
        return sums


class _Gathered:
    """Pairs of this device's two chunks with the 2n chunks of gathered keys, in the order of the sequence."""

    def __init__(self, plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array):
        self.plan, self.index, self.last = plan, lax.axis_index("context"), 2 * plan.groups - 1
        size = segments_BT.shape[1] // (2 * plan.groups)
        segments = cut(segments_BT, size)
        self.own = jnp.stack([self.index, self.last - self.index])
        self.queries = Queries(_halves(q), segments[self.own])
        self.keys = Keys(cut(k, size), cut(v, size), segments)

    def _loop(self, add: Any, carry: Any) -> Any:
        """Returns `add(masks, step, carry)` over all pairs: two diagonal ones, and 2n-1 with earlier chunks."""
        diagonal = self.plan.diagonal()
        own = (jnp.arange(2), self.own, jnp.zeros(2, jnp.int32))
        carry = lax.scan(lambda carry, step: (add(diagonal, step, carry), None), carry, own)[0]
        others, table = self.plan.other_masks()
        # The back chunk has 2n-1-i earlier chunks, the front chunk i.
        number, back = jnp.arange(self.last), self.last - self.index
        chunk = jnp.where(number < back, number, number - back)
        half = jnp.where(number < back, 1, 0)
        steps = (half, chunk, table[self.own[half] - chunk])
        return lax.scan(lambda carry, step: (add(others, step, carry), None), carry, steps)[0]

    def forward(self) -> Result:
        """Returns attention of this device's chunks to all keys, float32."""

        def add(masks: Masks, step: Step, results: Result) -> Result:
            return forward_step(self.plan.kernel, masks, step, self.queries, self.keys, results)

        found: Result = self._loop(add, jax.vmap(empty_result)(self.queries))
        return found

    def backward(self, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of this device's queries, and of all keys and values, float32."""

        def add(masks: Masks, step: Step, sums: Any) -> Any:
            return backward_step(self.plan.kernel, masks, step, self.queries, self.keys, rows, sums)

        g_q, g_kv = self._loop(add, zeros_like((self.queries.q_BTNH, self.keys[:2])))
        g_k, g_v = (x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in g_kv)
        return _join(g_q), g_k, g_v


def _pairs(plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest) -> _Ring | _Gathered:
    return (_Ring if plan.sequence.is_ring else _Gathered)(plan, q, k, v, rest[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest, plan: _Plan) -> jax.Array:
    """Computes attention of a device's queries, saving output and log-sum-exp.

    In a ring keys and values go around once in the forward pass; in the backward pass they go around again, with their
    gradients, instead of being saved.
    """
    return _forward(q, k, v, rest, plan)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest, plan: _Plan) -> tuple[jax.Array, Any]:
    results = _pairs(plan, q, k, v, rest).forward()
    result = add_sinks(Result(_join(results.out_BTNH), _join(results.lse_BNT, 2)), rest[1])
    result = named(result, q.dtype)
    return result.out_BTNH, (q, k, v, rest, result)


def _backward(plan: _Plan, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    q, k, v, rest, (out_BTNH, lse_BNT) = saved
    pairs = _pairs(plan, q, k, v, rest)
    rows = (Result(_halves(out_BTNH), _halves(lse_BNT, 2)), _halves(g))
    return as_gradients(pairs.backward(rows), saved, g)


_attend.defvjp(_forward, _backward)


def attend_over_devices(
    sequence: SequenceSplit,
    kernels: Kernels,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    segments_BT: jax.Array,
    window: int | None,
    scores: Scores | None,
) -> jax.Array:
    """Returns the attention of this device's queries, or those of its group's part, to the complete sequence.

    segments_BT: documents of the complete sequence.  scores: soft cap and sinks of the layer.
    """
    q, k, v = qkv
    if not sequence.is_ring:
        k, v = (sequence.in_order(all_gather(x, ("context",), 1)) for x in (k, v))
    if kernels.chunk_attention is not None:
        kernel, sinks_N = kernels.chunk_attention.of(scores)
        return _attend(q, k, v, (segments_BT, sinks_N), _Plan(kernel, sequence, window))
    assert kernels.cross_attention is not None, f"choose_kernels gives no {kernels.name} kernel to {sequence.strategy}"
    positions_T = sequence.local_positions()
    queries = Positions(segments_BT[:, positions_T], jnp.asarray(positions_T))
    given = {} if scores is None else {"scores": scores}
    out = kernels.cross_attention(q, k, v, queries, sequence_positions(segments_BT), window=window, **given)
    return checkpoint_name(out, ATTN_OUT)
