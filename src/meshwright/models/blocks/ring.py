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
from meshwright.models.kernels.attention import Positions, sequence_positions
from meshwright.models.kernels.choose import Kernels
from meshwright.models.kernels.chunks import (
    ChunkAttention,
    Keys,
    Masks,
    Queries,
    Result,
    Step,
    backward_pair,
    backward_step,
    causal_mask,
    empty_result,
    forward_pair,
    forward_step,
    named,
    no_gradient,
    pair_mask,
)
from meshwright.models.kernels.scores import Scores, add_sinks, sinks_gradient
from meshwright.models.remat import ATTN_OUT
from meshwright.sharding.sequence import SequenceSplit


class _Plan(NamedTuple):
    """Static facts of the attention over a split sequence."""

    kernel: ChunkAttention
    sequence: SequenceSplit
    window: int | None

    @property
    def groups(self) -> int:
        """Groups of devices, each with two chunks."""
        return self.sequence.groups

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


def _halves(x: jax.Array) -> jax.Array:
    """Returns front and back chunk of a local array [B, T, ...], stacked: [2, B, T/2, ...]."""
    return jnp.stack(jnp.split(x, 2, axis=1))


def _join(x: jax.Array, axis: int = 1) -> jax.Array:
    """Returns the local array of a stacked front and back chunk."""
    return jnp.concatenate([x[0], x[1]], axis=axis)


def _chunk_segments(segments_BT: jax.Array, groups: int) -> jax.Array:
    """Returns the documents of all chunks of the whole sequence: [2n, B, T/2n]."""
    B, T = segments_BT.shape
    return segments_BT.reshape(B, 2 * groups, T // (2 * groups)).swapaxes(0, 1)


class _Ring:
    """Position of this device in the ring, and the pairs of chunks of each step."""

    def __init__(self, plan: _Plan, segments_BT: jax.Array):
        self.plan, self.last = plan, 2 * plan.groups - 1
        self.index = lax.axis_index("context") // plan.sequence.group
        self.segments = _chunk_segments(segments_BT, plan.groups)
        self.masks, self.kinds = plan.other_masks()

    def group_segments(self, group: jax.Array) -> jax.Array:
        """Returns the documents of a group's two chunks: [2, B, T/2n]."""
        return self.segments[jnp.stack([group, self.last - group])]

    def keys_after(self, kv: jax.Array, shifts: jax.Array | int) -> Keys:
        """Returns the keys on this device after a number of shifts."""
        return Keys(kv[:, 0], kv[:, 1], self.group_segments((self.index - shifts) % self.plan.groups))

    def steps(self, shifts: jax.Array | int) -> list[Step]:
        """Returns the pairs of chunks (front 0, back 1) with the keys of another group, and their masks."""
        other = (self.index - shifts) % self.plan.groups
        same = jnp.where(self.index > other, 0, 1)
        far, near = self.last - self.index - other, abs(self.index - other)
        return [(1, 0, self.kinds[far]), (same, same, self.kinds[near])]

    def own_steps(self) -> list[tuple[Masks, Step]]:
        """Returns the pairs of this device's chunks: both diagonals, and back with front."""
        masks, kinds = self.plan.masks()
        diagonal: Masks = (masks[kinds[0]],)
        far = self.last - 2 * self.index
        return [(diagonal, (0, 0, 0)), (diagonal, (1, 1, 0)), (self.masks, (1, 0, self.kinds[far]))]

    def shift(self, x: Any) -> Any:
        """Sends a value to the same device of the next group."""
        return jax.tree.map(lambda leaf: ring_shift(leaf, "context", self.plan.sequence.group), x)


_Rest = tuple[jax.Array, jax.Array | None]
"""Documents of the whole sequence, and sinks of this device's heads."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(q: jax.Array, k: jax.Array, v: jax.Array, rest: _Rest, plan: _Plan) -> jax.Array:
    return _ring_forward(q, k, v, rest, plan)[0]


def _local_causal(plan: _Plan) -> bool:
    """Returns whether attention among a device's own chunks is causal attention over both, as one chunk.

    It is without a window: then the back chunk sees all of the front chunk.
    """
    return plan.window is None or plan.window >= plan.sequence.seq


def _ring_forward(q: jax.Array, k: jax.Array, v: jax.Array, rest: _Rest, plan: _Plan) -> tuple[jax.Array, Any]:
    ring = _Ring(plan, rest[0])
    queries = Queries(_halves(q), ring.group_segments(ring.index))
    kv = jnp.stack([_halves(k), _halves(v)], axis=1)

    def attend(results: Result, kv: jax.Array, shifts: jax.Array | int) -> Result:
        keys = ring.keys_after(kv, shifts)
        for step in ring.steps(shifts):
            results = forward_step(plan.kernel, ring.masks, step, queries, keys, results)
        return results

    def step(carry: Any, shifts: jax.Array) -> tuple[Any, None]:
        kv, results = carry
        return (ring.shift(kv), attend(results, kv, shifts)), None

    # Every shift is independent of the attention beside it, so that the two overlap.
    last = plan.groups - 1
    start = (ring.shift(kv), _own_forward(ring, queries, ring.keys_after(kv, 0)))
    (kv, results), _ = lax.scan(step, start, jnp.arange(1, last))
    results = attend(results, kv, last)
    result = add_sinks(Result(_join(results.out_BTNH), _join(results.lse_BNT, 2)), rest[1])
    result = named(result, q.dtype)
    return result.out_BTNH, (q, k, v, rest, result)


def _own_forward(ring: _Ring, queries: Queries, keys: Keys) -> Result:
    """Returns attention of this device's chunks to themselves, float32."""
    kernel = ring.plan.kernel
    if _local_causal(ring.plan):
        whole_queries, whole_keys = Queries(*map(_join, queries)), Keys(*map(_join, keys))
        mask = causal_mask(whole_queries.q_BTNH.shape[1], None)
        out_BTNH, lse_BNT = forward_pair(kernel, mask, whole_queries, whole_keys)
        return Result(_halves(out_BTNH.astype(jnp.float32)), jnp.stack(jnp.split(lse_BNT, 2, axis=2)))
    results = jax.vmap(empty_result)(queries)
    for masks, step in ring.own_steps():
        results = forward_step(kernel, masks, step, queries, keys, results)
    return results


def _ring_backward(plan: _Plan, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    q, k, v, (segments_BT, sinks_N), (out_BTNH, lse_BNT) = saved
    ring = _Ring(plan, segments_BT)
    queries = Queries(_halves(q), ring.group_segments(ring.index))
    kv = jnp.stack([_halves(k), _halves(v)], axis=1)
    rows = (Result(_halves(out_BTNH), jnp.stack(jnp.split(lse_BNT, 2, axis=2))), _halves(g))

    def attend(sums: Any, kv: jax.Array, shifts: jax.Array | int) -> Any:
        keys = ring.keys_after(kv, shifts)
        for step in ring.steps(shifts):
            sums = backward_step(plan.kernel, ring.masks, step, queries, keys, rows, sums)
        return sums

    def step(carry: Any, shifts: jax.Array) -> tuple[Any, None]:
        kv, (g_q, g_kv) = carry
        g_q, g_kv = attend((g_q, g_kv), kv, shifts)
        return (ring.shift(kv), (g_q, ring.shift(g_kv))), None

    last = plan.groups - 1
    g_q, g_kv = _own_backward(ring, queries, ring.keys_after(kv, 0), rows)
    start = (ring.shift(kv), (g_q, ring.shift(g_kv)))
    (kv, sums), _ = lax.scan(step, start, jnp.arange(1, last))
    g_q, g_kv = attend(sums, kv, last)
    # One more shift returns every block of gradients to the device that holds its keys.
    g_k, g_v = ring.shift(g_kv)
    gradients = (_join(x).astype(like.dtype) for x, like in zip((g_q, g_k, g_v), (q, k, v), strict=True))
    g_sinks = sinks_gradient(saved[-1], g, sinks_N)
    return *gradients, (no_gradient(segments_BT), g_sinks)


def _own_backward(ring: _Ring, queries: Queries, keys: Keys, rows: tuple[Result, jax.Array]) -> Any:
    """Returns the gradients of this device's queries, and of its keys and values, from each other, float32."""
    kernel, (results, g) = ring.plan.kernel, rows
    if _local_causal(ring.plan):
        whole_queries, whole_keys = Queries(*map(_join, queries)), Keys(*map(_join, keys))
        mask = causal_mask(whole_queries.q_BTNH.shape[1], None)
        result = Result(_join(results.out_BTNH), _join(results.lse_BNT, 2))
        whole = backward_pair(kernel, mask, whole_queries, whole_keys, result, _join(g))
        g_q, g_k, g_v = (_halves(x.astype(jnp.float32)) for x in whole)
        return g_q, (g_k, g_v)
    like = (queries.q_BTNH, (keys.k_BSKH, keys.v_BSKH))
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
    for masks, step in ring.own_steps():
        sums = backward_step(kernel, masks, step, queries, keys, rows, sums)
    return sums


_ring.defvjp(_ring_forward, _ring_backward)


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments_BT: jax.Array,
    kernel: ChunkAttention,
    sequence: SequenceSplit,
    window: int | None,
    scores: Scores | None = None,
) -> jax.Array:
    """Computes attention of a group's queries [B, T/groups, N, H] to the whole sequence, in a ring.

    Keys and values go around once in the forward pass; in the backward pass they go around again, with their gradients,
    instead of being saved. segments_BT: documents of the whole sequence.
    """
    plan, sinks_N = _plan(kernel, sequence, window, scores)
    return _ring(q, k, v, (segments_BT, sinks_N), plan)


def _plan(
    kernel: ChunkAttention, sequence: SequenceSplit, window: int | None, scores: Scores | None
) -> tuple[_Plan, jax.Array | None]:
    """Returns the static facts of the attention, and its sinks."""
    if scores is None:
        return _Plan(kernel, sequence, window), None
    return _Plan(kernel.capped(scores.softcap), sequence, window), scores.sinks_N


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _gathered(q: jax.Array, k: jax.Array, v: jax.Array, rest: _Rest, plan: _Plan) -> jax.Array:
    return _gathered_forward(q, k, v, rest, plan)[0]


class _Gathered:
    """Pairs of this device's two chunks with the 2n chunks of all keys, in the order of the sequence."""

    def __init__(self, plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array):
        self.plan, self.index, self.last = plan, lax.axis_index("context"), 2 * plan.groups - 1
        segments = _chunk_segments(segments_BT, plan.groups)
        self.own = jnp.stack([self.index, self.last - self.index])
        self.queries = Queries(_halves(q), segments[self.own])
        self.keys = Keys(self.cut(k), self.cut(v), segments)

    def cut(self, x_BSKH: jax.Array) -> jax.Array:
        """Returns the chunks of gathered keys or values, stacked: [2n, B, T/2n, K, H]."""
        B, S = x_BSKH.shape[:2]
        return x_BSKH.reshape(B, self.last + 1, S // (self.last + 1), *x_BSKH.shape[2:]).swapaxes(0, 1)

    def loop(self, add: Any, carry: Any) -> Any:
        """Returns `add(carry, masks, step)` over all pairs: two diagonal ones, and 2n-1 with earlier chunks."""
        masks, kinds = self.plan.masks()
        diagonal: Masks = (masks[kinds[0]],)
        own = (jnp.arange(2), self.own, jnp.zeros(2, jnp.int32))
        carry = lax.scan(lambda carry, step: (add(carry, diagonal, step), None), carry, own)[0]
        others, table = self.plan.other_masks()
        # The back chunk has 2n-1-i earlier chunks, the front chunk i.
        number, back = jnp.arange(self.last), self.last - self.index
        chunk = jnp.where(number < back, number, number - back)
        half = jnp.where(number < back, 1, 0)
        steps = (half, chunk, table[self.own[half] - chunk])
        return lax.scan(lambda carry, step: (add(carry, others, step), None), carry, steps)[0]


def _gathered_forward(q: jax.Array, k: jax.Array, v: jax.Array, rest: _Rest, plan: _Plan) -> tuple[jax.Array, Any]:
    gathered = _Gathered(plan, q, k, v, rest[0])

    def add(results: Result, masks: Masks, step: Step) -> Result:
        return forward_step(plan.kernel, masks, step, gathered.queries, gathered.keys, results)

    results = gathered.loop(add, jax.vmap(empty_result)(gathered.queries))
    result = add_sinks(Result(_join(results.out_BTNH), _join(results.lse_BNT, 2)), rest[1])
    result = named(result, q.dtype)
    return result.out_BTNH, (q, k, v, rest, result)


def _gathered_backward(plan: _Plan, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    q, k, v, (segments_BT, sinks_N), (out_BTNH, lse_BNT) = saved
    gathered = _Gathered(plan, q, k, v, segments_BT)
    rows = (Result(_halves(out_BTNH), jnp.stack(jnp.split(lse_BNT, 2, axis=2))), _halves(g))

    def add(sums: Any, masks: Masks, step: Step) -> Any:
        return backward_step(plan.kernel, masks, step, gathered.queries, gathered.keys, rows, sums)

    like = (gathered.queries.q_BTNH, (gathered.keys.k_BSKH, gathered.keys.v_BSKH))
    g_q, g_kv = gathered.loop(add, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like))
    g_k, g_v = (x.swapaxes(0, 1).reshape(k.shape).astype(k.dtype) for x in g_kv)
    g_sinks = sinks_gradient(saved[-1], g, sinks_N)
    return _join(g_q).astype(q.dtype), g_k, g_v, (no_gradient(segments_BT), g_sinks)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def gathered_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments_BT: jax.Array,
    kernel: ChunkAttention,
    sequence: SequenceSplit,
    window: int | None,
    scores: Scores | None = None,
) -> jax.Array:
    """Computes attention of a device's queries [B, T/n, N, H] to the keys of the whole sequence, in its order.

    segments_BT: documents of the whole sequence.
    """
    plan, sinks_N = _plan(kernel, sequence, window, scores)
    return _gathered(q, k, v, (segments_BT, sinks_N), plan)


def attend_to_gathered(
    sequence: SequenceSplit,
    kernels: Kernels,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    segments_BT: jax.Array,
    window: int | None,
    scores: dict[str, Any],
) -> jax.Array:
    """Returns the attention of this device's queries to the whole sequence, [B, T/context, N, H].

    qkv: of this device.  segments_BT: documents of the whole sequence.  scores: empty, or the layer's `Scores`.
    """
    q, k, v = qkv[0], *(sequence.in_order(all_gather(x, ("context",), 1)) for x in qkv[1:])
    if kernels.chunk_attention is not None:
        return gathered_attention(q, k, v, segments_BT, kernels.chunk_attention, sequence, window, **scores)
    assert kernels.cross_attention is not None, f"choose_kernels gives no {kernels.name} kernel to all_gather"
    queries = _positions(segments_BT, sequence.local_positions())
    out = kernels.cross_attention(q, k, v, queries, sequence_positions(segments_BT), window=window, **scores)
    return checkpoint_name(out, ATTN_OUT)


def _positions(segments_BT: jax.Array, positions_T: Any) -> Positions:
    return Positions(segments_BT[:, positions_T], jnp.asarray(positions_T))
