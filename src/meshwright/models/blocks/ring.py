"""Context parallelism by chunks: attention in a ring of devices,
and attention to gathered keys and values.

The sequence is cut into 2n chunks for a ring of n groups, and group i holds chunks i and 2n-1-i
(zigzag, sharding/sequence.py). Under a causal mask every group then has the same work: its own two
chunks, and two full pairs of chunks for every other group. A group attends to its own keys with a
causal mask. For the keys of group j it computes its back chunk with their front chunk, and either
front with front (i > j) or back with back (i < j): two pairs of equal size whatever the group, so
that the compiled step has no branch. With a sliding window a branch chooses between the kinds of
pairs, and skips the empty ones.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import all_gather, ring_shift
from meshwright.models.kernels.attention import Kernels, Positions, Scores, sequence_positions
from meshwright.models.kernels.chunks import (
    ChunkAttention,
    Keys,
    Masks,
    Pass,
    Queries,
    Rest,
    as_gradients,
    backward_pass,
    causal_mask,
    cut,
    forward_pass,
    pair_mask,
    save,
    uncut,
)
from meshwright.models.remat import ATTN_OUT
from meshwright.sharding.sequence import SequenceSplit


class _Plan(NamedTuple):
    """Static facts of the attention over a split sequence."""

    kernel: ChunkAttention
    sequence: SequenceSplit
    window: int | None

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return self.sequence.seq // (2 * self.sequence.groups)

    @property
    def diagonal(self) -> Masks:
        """Mask of a chunk to itself."""
        return (pair_mask(0, self.size, self.size, self.window),)

    def others(self) -> tuple[Masks, jax.Array]:
        """Returns the masks between different chunks,
        and for each distance in chunks the index of its mask."""
        distances = range(1, 2 * self.sequence.groups)
        masks = [pair_mask(d * self.size, self.size, self.size, self.window) for d in distances]
        used = tuple(dict.fromkeys(masks))
        return used, jnp.asarray([0, *map(used.index, masks)], jnp.int32)


class _Ring:
    """Pairs of this device's chunks with those of its group and of the others,
    whose keys go around the ring.

    Every shift is independent of the attention next to it, so that the two overlap.
    """

    def __init__(
        self, plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array
    ):
        self.plan = plan
        self.last = 2 * plan.sequence.groups - 1
        self.group = lax.axis_index("context") // plan.sequence.group
        self.segments = cut(segments_BT, plan.size)
        self.masks, self.kinds = plan.others()
        self.queries = Queries(cut(q, plan.size), self._segments_of(self.group))
        self.kv = jnp.stack([cut(k, plan.size), cut(v, plan.size)], axis=1)

    def _segments_of(self, group: jax.Array) -> jax.Array:
        return self.segments[jnp.stack([group, self.last - group])]

    def _shift(self, x: Any) -> Any:
        """Sends a value to the same device of the next group."""
        return jax.tree.map(lambda leaf: ring_shift(leaf, "context", self.plan.sequence.group), x)

    def visit(self, each: Pass, rows: Any) -> Any:
        """Returns the sums of all pairs;
        those of keys go around the ring with their keys, once, and arrive home."""
        groups = self.plan.sequence.groups

        def attend(sums: Any, kv: jax.Array, shifts: jax.Array | int) -> Any:
            other = (self.group - shifts) % groups
            keys = Keys(kv[:, 0], kv[:, 1], self._segments_of(other))
            # Front with front where the other group is earlier, else back with back.
            same = jnp.where(self.group > other, 0, 1)
            far = self.last - self.group - other
            near = abs(self.group - other)
            back_with_front = (1, 0, self.kinds[far])
            equal_chunks = (same, same, self.kinds[near])
            for pair in (back_with_front, equal_chunks):
                sums = each.visit(self.masks, pair, rows, keys, sums)
            return sums

        def step(carry: Any, shifts: jax.Array) -> tuple[Any, None]:
            kv, sums = carry
            by_query, by_key = attend(sums, kv, shifts)
            return (self._shift(kv), (by_query, self._shift(by_key))), None

        by_query, by_key = self._own_pairs(each, rows)
        start = (self._shift(self.kv), (by_query, self._shift(by_key)))
        (kv, sums), _ = lax.scan(step, start, jnp.arange(1, groups - 1))
        by_query, by_key = attend(sums, kv, groups - 1)
        return uncut((by_query, self._shift(by_key)))

    def _own_pairs(self, each: Pass, rows: Any) -> Any:
        """Returns the sums of both diagonal pairs, and of back with front."""
        keys = Keys(self.kv[:, 0], self.kv[:, 1], self.queries.segments_BT)
        if self.plan.window is None or self.plan.window >= self.plan.sequence.seq:
            # Without a window, the back chunk sees all of the front chunk: the two are one chunk.
            sums = each.compute(causal_mask(2 * self.plan.size, None), uncut(rows), uncut(keys))
            return cut(jax.tree.map(lambda x: x.astype(jnp.float32), sums), self.plan.size)
        sums = each.start(rows, keys)
        far = self.kinds[self.last - 2 * self.group]
        diagonal = self.plan.diagonal
        sums = each.visit(diagonal, (0, 0, 0), rows, keys, sums)
        sums = each.visit(diagonal, (1, 1, 0), rows, keys, sums)
        return each.visit(self.masks, (1, 0, far), rows, keys, sums)


class _Gathered:
    """Pairs of this device's two chunks with the 2n chunks of gathered keys,
    in the order of the sequence."""

    def __init__(
        self, plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array
    ):
        group = lax.axis_index("context")
        segments = cut(segments_BT, plan.size)
        self.plan = plan
        self.last = 2 * plan.sequence.groups - 1
        self.chunks = jnp.stack([group, self.last - group])
        self.queries = Queries(cut(q, plan.size), segments[self.chunks])
        self.keys = Keys(cut(k, plan.size), cut(v, plan.size), segments)

    def visit(self, each: Pass, rows: Any) -> Any:
        """Returns the sums of all pairs: two diagonal ones, and 2n-1 with earlier chunks."""
        diagonal = (jnp.arange(2), self.chunks, jnp.zeros(2, jnp.int32))
        sums = each.start(rows, self.keys)
        sums = each.visit_all(self.plan.diagonal, diagonal, rows, self.keys, sums)
        masks, kinds = self.plan.others()
        # The back chunk, number 2n-1-i, has as many earlier chunks, the front chunk i.
        number = jnp.arange(self.last)
        back = self.chunks[1]
        half = jnp.where(number < back, 1, 0)
        chunk = jnp.where(number < back, number, number - back)
        earlier = (half, chunk, kinds[self.chunks[half] - chunk])
        return uncut(each.visit_all(masks, earlier, rows, self.keys, sums))


def _pairs(plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest) -> _Ring | _Gathered:
    segments_BT, _ = rest
    if plan.sequence.is_ring:
        return _Ring(plan, q, k, v, segments_BT)
    return _Gathered(plan, q, k, v, segments_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest, plan: _Plan
) -> tuple[jax.Array, jax.Array]:
    """Computes attention of a device's queries, saving output and log-sum-exp; returns both.

    In a ring keys and values go around once in the forward pass; in the backward pass they go
    around again, with their gradients, instead of being saved.
    """
    return _forward(q, k, v, rest, plan)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, rest: Rest, plan: _Plan
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    pairs = _pairs(plan, q, k, v, rest)
    result, _ = pairs.visit(forward_pass(plan.kernel), (pairs.queries,))
    return save(result, (q, k, v, rest))


def _backward(plan: _Plan, saved: Any, g_outputs: tuple[jax.Array, Any]) -> tuple[Any, ...]:
    q, k, v, rest, result = saved
    g_BTNH, _ = g_outputs
    pairs = _pairs(plan, q, k, v, rest)
    rows = (pairs.queries, *cut((result, g_BTNH), plan.size))
    return as_gradients(pairs.visit(backward_pass(plan.kernel), rows), saved, g_BTNH)


_attend.defvjp(_forward, _backward)


def attend_over_devices(
    sequence: SequenceSplit,
    kernels: Kernels,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    segments_BT: jax.Array,
    window: int | None,
    scores: Scores | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the attention of this device's queries, or those of its group's part,
    to the complete sequence.

    Returns their log-sum-exp too, None where the kernel has none.
    segments_BT: documents of the complete sequence.
    scores: soft cap and sinks of the layer.
    """
    q, k, v = qkv
    if not sequence.is_ring:
        k, v = (sequence.in_order(all_gather(x, ("context",), 1)) for x in (k, v))
    if kernels.chunk_attention is not None:
        kernel, sinks_N = kernels.chunk_attention.of(scores)
        return _attend(q, k, v, (segments_BT, sinks_N), _Plan(kernel, sequence, window))
    assert kernels.cross_attention is not None, (
        f"choose_kernels gives no {kernels.name} kernel to {sequence.strategy}"
    )
    positions_T = sequence.local_positions()
    queries = Positions(segments_BT[:, positions_T], jnp.asarray(positions_T))
    options = {} if scores is None else {"scores": scores}
    keys = sequence_positions(segments_BT)
    out = kernels.cross_attention(q, k, v, queries, keys, window=window, **options)
    return checkpoint_name(out, ATTN_OUT), None
