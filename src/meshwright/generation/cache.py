"""Cache of decoding: its plan before it exists, its arrays, and attention to it.

Slots are positions of a batch that is padded on the left: every sequence ends at the same slot, so
a step writes one slot for the whole batch. The cache is sharded over batch, key/value heads
(`tensor`) and slots (`context`). Slot s is on device s mod n of the n devices of `context`: a
prompt fills all of them evenly, and so does what follows it.

Slots come before heads and sequences in memory: what a step writes is one block. With sequences
first, XLA:TPU copies the whole cache into that order at the beginning of the decode loop and back
at its end, into a second cache.

A layer with a recurrence (linear attention, a convolution) caches its state, of one size whatever
the number of slots: the same on every device of `context`, which compute the same.

Attention visits the filled slots block by block with a running maximum and sum (Milakov and
Gimelshein 2018, arXiv:1805.02867), so its work follows the tokens there are and not the slots there
is room for; a sliding window starts at its first block. Devices of `context` combine their parts by
log-sum-exp.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    axis_index,
    local_shard,
    reduce_scatter,
)
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.blocks.context import CONTEXT
from meshwright.models.kernels.attention import Index, Scores, cap
from meshwright.models.model import ModelSpec, RecurrentStep
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.placement import Placement, local_shape, replicates_kv_heads, to_spec

SLOT_MULTIPLE = 128
"""Slots of a device are a multiple of this, so that their blocks are whole."""
_BLOCK = 1024
"""Most slots of a block of attention on one device."""
_HIDDEN = -1e30
_PLACEMENT: Placement = ((), CONTEXT, ("tensor",), BATCH_AXES, ())
_STATES: Placement = ((), ("tensor",), BATCH_AXES)
"""Axes of the first dimensions of a state: layers, features, sequences."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Cached keys and values of a stack of layers, [L, S, K, B, H] each.

    Of latent attention (blocks/latent.py) `k` holds latents and rotary keys
    as one head, whose beginning is the value.
    """

    k: Any
    v: Any
    """None where the cache holds latents."""
    index: Any = None
    """Keys of an indexer, [L, S, K, B, its head size]; None where there is none."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class States:
    """Cached states of a stack of layers with a recurrence, or of layers that keep nothing."""

    arrays: Any
    """Tree of `Recurrence.carried`, each array [L, features, B, ...]; {} keeps nothing."""


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """Cache of a model on a mesh, before it exists."""

    spec: ModelSpec
    shape: MeshShape
    batch: int
    """Sequences; a multiple of the devices that share the batch."""
    slots: int
    """Slots of each sequence."""
    dtype: str
    """Dtype of keys and values."""

    def __post_init__(self) -> None:
        for layer in self.spec.layers:
            if not layer.decodes:
                raise ConfigError(
                    f"generating with layers of stack {layer.stack!r}",
                    "they have no attention, and what they carry from token to token is not known",
                    "a model whose layers all state an `AttentionSpec` or a `Recurrence`",
                )

    @functools.cached_property
    def abstract(self) -> dict[str, Any]:
        """`KeyValues` or `States` of each stack, of arrays as (global shape, dtype)."""
        stacks = dict[str, Any]()
        for stack, layers in self.spec.stacks.items():
            first = next(layer for layer in self.spec.layers if layer.stack == stack)
            if not first.has_first_half:
                stacks[stack] = States({})
                continue
            if first.recurrence is not None:
                stacks[stack] = States(
                    jax.tree.map(
                        lambda x, layers=layers: jax.ShapeDtypeStruct((layers, *x.shape), x.dtype),
                        first.recurrence.carried(self.batch),
                    )
                )
                continue
            attention = first.attention
            assert attention is not None
            # Fewer heads than devices of `tensor`: every device caches the one
            # that its queries attend to.
            tensor, (kv_heads, size) = self.shape.tensor, attention.cached_heads
            heads = tensor if replicates_kv_heads(kv_heads, tensor) else kv_heads
            leaf = jax.ShapeDtypeStruct(
                (layers, self.slots, heads, self.batch, size), jnp.dtype(self.dtype)
            )
            index = None
            if attention.indexer is not None:
                shape = (*leaf.shape[:-1], attention.indexer.head_size)
                index = jax.ShapeDtypeStruct(shape, leaf.dtype)
            stacks[stack] = KeyValues(leaf, leaf if attention.latent is None else None, index)
        return stacks

    def placement(self, cache: Any, rank: int) -> Placement:
        """Returns the mesh axes of each dimension of an array
        of `cache`, [L, S, K, B, H] or [L, N, B, ...]."""
        degrees = self.shape.degrees()
        axes_of_all = _PLACEMENT
        if isinstance(cache, States):
            axes_of_all = (*_STATES, *[()] * (rank - len(_STATES)))
        return tuple(
            tuple(axis for axis in axes if degrees[axis] > 1) for axes in axes_of_all[:rank]
        )

    @property
    def specs(self) -> dict[str, Any]:
        """`PartitionSpec` of every array."""
        return {
            stack: jax.tree.map(
                lambda x, cache=cache: to_spec(self.placement(cache, len(x.shape))), cache
            )
            for stack, cache in self.abstract.items()
        }

    @property
    def bytes_per_device(self) -> int:
        """Bytes that the cache takes on each device."""
        arrays = [(cache, x) for cache in self.abstract.values() for x in jax.tree.leaves(cache)]
        return sum(
            math.prod(local_shape(x.shape, self.placement(cache, len(x.shape)), self.shape))
            * x.dtype.itemsize
            for cache, x in arrays
        )


@dataclasses.dataclass(frozen=True)
class Slots:
    """Slots that a step writes and attends to;
    the same on every device, `first_B` the device's part of the batch."""

    slot: jax.Array
    """First slot of the step's tokens, int32;
    a multiple of the devices of `context` where there are several tokens."""
    first_B: jax.Array
    """First slot of each sequence: those before are padding. int32."""
    tokens: int
    """Tokens T of each sequence in this step."""

    @property
    def positions_BT(self) -> jax.Array:
        """Position of each token within its text, int32; 0 in padding."""
        return jnp.maximum(self.slot + jnp.arange(self.tokens) - self.first_B[:, None], 0)


class CachedAttend:
    """Attention of a step's tokens to the cache, for `ForwardContext.attend`.

    A layer calls it once, with its own queries, keys and values of the step: [1, tokens, heads, H],
    where the tokens of all sequences are one dimension, split over `context`. It writes keys and
    values into the cache, then attends. `open` gives it the cache of a stack and a layer's row of
    it while that layer is traced, `close` takes the cache back.
    """

    def __init__(self, slots: Slots):
        self._slots = slots
        self._cache: Any = None
        self._row: Any = None

    def open(self, cache: Any, row: jax.Array) -> None:
        """Sets the cache and the row of the layer that is traced next."""
        self._cache, self._row = cache, row

    def close(self) -> Any:
        """Returns the cache that the layer has written to."""
        cache, self._cache = self._cache, None
        assert cache is not None
        return cache

    def latent(
        self, q_BTNZ: jax.Array, cached_BTZ: jax.Array, kv_rank: int, index: Index | None, /
    ) -> jax.Array:
        """Returns the attention output of latents [1, tokens, N, kv_rank], for
        `ForwardContext.attend_latent`."""
        if index is not None:
            index = Index(
                self._by_sequence(index.q_BTIH),
                self._by_sequence(index.k_BSH),
                self._by_sequence(index.weights_BTI),
                index.top_k,
            )
        scores = Scores(index=index)
        k_BTKZ = cached_BTZ[:, :, None]
        return self(q_BTNZ, k_BTKZ, None, window=None, scores=scores, kv_rank=kv_rank)

    def recur(self, step: RecurrentStep, inputs: Any, /) -> jax.Array:
        """Returns the output of a recurrence [1, tokens, ...]
        from the cached state, for `ForwardContext.recur`.

        inputs: tree of this device's tokens [1, tokens, ...]. A text's first token begins without a
        state, and so does padding.
        """
        cache, row = self._cache, self._row
        assert isinstance(cache, States)
        with jax.named_scope("cache"):
            state = jax.tree.map(
                lambda a: lax.dynamic_index_in_dim(a, row, 0, keepdims=False), cache.arrays
            )
            sequences = jax.tree.map(self._by_sequence, inputs)
            out, state = step(sequences, self._slots.positions_BT, state)
            arrays = jax.tree.map(
                lambda a, new: lax.dynamic_update_index_in_dim(a, new, row, 0), cache.arrays, state
            )
            self._cache = States(arrays)
        local_tokens = jax.tree.leaves(inputs)[0].shape[1]
        flat = _flat(out, local_tokens * lax.axis_size(CONTEXT))
        return local_shard(flat, CONTEXT, 0)[None]

    def _by_sequence(self, x: jax.Array) -> jax.Array:
        """Gathers this device's tokens [1, tokens, ...] over `context` into [B, T, ...]."""
        batch, tokens = self._slots.first_B.shape[0], self._slots.tokens
        whole = all_gather(x[0], CONTEXT, 0)[: batch * tokens]
        return whole.reshape(batch, tokens, *whole.shape[1:])

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array | None,
        /,
        *,
        window: int | None,
        scores: Scores | None = None,
        kv_rank: int | None = None,
    ) -> jax.Array:
        """Returns the attention output of this device's tokens [1, tokens, N, H]."""
        assert self._cache is not None
        q, k = self._by_sequence(q_BTNH), self._by_sequence(k_BTKH)
        v = None if v_BTKH is None else self._by_sequence(v_BTKH)
        with jax.named_scope("cache"):
            index = None if scores is None else scores.index
            index_k = None if index is None else index.k_BSH[:, :, None]
            self._cache = write(self._cache, self._row, self._slots, k, v, index_k)
            out, lse = attend(self._cache, self._row, self._slots, q, window, scores, kv_rank)
        sinks_N = None if scores is None else scores.sinks_N
        if lax.axis_size(CONTEXT) == 1:
            if sinks_N is not None:
                out *= jax.nn.sigmoid(lse - sinks_N)[..., None]
            return _flat(out, q_BTNH.shape[1]).astype(q_BTNH.dtype)[None]
        highest = all_reduce_max(lse, CONTEXT)
        weight = jnp.exp(lse - highest)
        total = all_reduce(weight, CONTEXT)
        if sinks_N is not None:
            total += jnp.exp(sinks_N - highest)
        out *= (weight / total)[..., None]
        flat = _flat(out, q_BTNH.shape[1] * lax.axis_size(CONTEXT))
        return reduce_scatter(flat, CONTEXT, 0).astype(q_BTNH.dtype)[None]


def _flat(out: jax.Array, rows: int) -> jax.Array:
    """Makes the tokens of all sequences [B, T, ...] one dimension, padded to `rows`."""
    flat = out.reshape(-1, *out.shape[2:])
    return jnp.pad(flat, ((0, rows - flat.shape[0]), *((0, 0),) * (flat.ndim - 1)))


def write(
    cache: KeyValues,
    row: Any,
    slots: Slots,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array | None,
    index_BTKH: jax.Array | None = None,
) -> KeyValues:
    """Returns the cache with a step's keys and values at their slots,
    of which this device keeps its own.

    v_BTKH: None for a cache of latents.  index_BTKH: keys of an indexer.
    """
    devices, here = lax.axis_size(CONTEXT), axis_index(CONTEXT)
    start = slots.slot // devices

    def place(array: jax.Array, new_BTKH: jax.Array) -> jax.Array:
        new_TKBH = new_BTKH.transpose(1, 2, 0, 3).astype(array.dtype)
        where = (row, start, 0, 0, 0)
        if slots.tokens > 1:
            T, K, B, H = new_TKBH.shape
            mine = lax.dynamic_index_in_dim(
                new_TKBH.reshape(T // devices, devices, K, B, H), here, 1, keepdims=False
            )
            return lax.dynamic_update_slice(array, mine[None], where)
        if devices > 1:
            old = lax.dynamic_slice(array, where, (1, *new_TKBH.shape))[0]
            new_TKBH = jnp.where(slots.slot % devices == here, new_TKBH, old)
        return lax.dynamic_update_slice(array, new_TKBH[None], where)

    return KeyValues(
        place(cache.k, k_BTKH),
        None if v_BTKH is None else place(cache.v, v_BTKH),
        None if index_BTKH is None else place(cache.index, index_BTKH),
    )


class Sums(NamedTuple):
    """Running sums of attention to the blocks visited so far;
    the queries of a key/value head are one dimension [G T].

    With scores s of a block's keys and their values v (Milakov
    and Gimelshein 2018, arXiv:1805.02867):

        m' = max(m, max s)
        l' = l exp(m - m') + sum exp(s - m')
        o' = o exp(m - m') + sum exp(s - m') v
    """

    highest: jax.Array
    """Highest score m, [K, B, G T]."""
    total: jax.Array
    """Sum of exponentials l, [K, B, G T]."""
    out: jax.Array
    """Weighted sum of values o, [K, B, G T, value size]."""


@dataclasses.dataclass(frozen=True)
class _BlockAttention:
    """Attention of a step's queries to blocks of a layer's slots on this device."""

    cache: KeyValues
    row: Any
    slots: Slots
    q_KBGH: jax.Array
    """Queries of a key/value head, of all its query heads and tokens [G, T] as one dimension."""
    at_T: jax.Array
    """Slot of each token."""
    block: int
    """Slots of a block."""
    window: int | None
    chunk: int | None
    softcap: float | None
    kv_rank: int | None
    chosen_BTS: jax.Array | None
    """Slots of this device that an indexer chose; None where there is none."""

    @property
    def value_size(self) -> int:
        """Size of a value: of a cache of latents, the first features of the keys."""
        return self.kv_rank or int(self.cache.v.shape[-1])

    def empty(self) -> Sums:
        """Returns the sums before the first block."""
        K, B, queries, _ = self.q_KBGH.shape
        return Sums(
            jnp.full((K, B, queries), _HIDDEN, jnp.float32),
            jnp.zeros((K, B, queries), jnp.float32),
            jnp.zeros((K, B, queries, self.value_size), jnp.float32),
        )

    def visit(self, number: Any, sums: Sums) -> Sums:
        """Returns the sums with block `number`."""
        dtype = self.q_KBGH.dtype
        k_SKBH = _block(self.cache.k, self.row, number, self.block)
        v_SKBH = self._values(number, k_SKBH)
        products = jnp.einsum(
            "kbgh,skbh->kbgs",
            self.q_KBGH,
            k_SKBH.astype(dtype),
            preferred_element_type=jnp.float32,
        )
        products = cap(products, self.softcap)
        seen = self._seen(number)
        highest = jnp.maximum(sums.highest, jnp.where(seen, products, _HIDDEN).max(-1))
        weights = jnp.where(seen, jnp.exp(products - highest[..., None]), 0.0)
        decay = jnp.exp(sums.highest - highest)
        total = sums.total * decay + weights.sum(-1)
        part = jnp.einsum(
            "kbgs,skbh->kbgh",
            weights.astype(dtype),
            v_SKBH.astype(dtype),
            preferred_element_type=jnp.float32,
        )
        return Sums(highest, total, sums.out * decay[..., None] + part)

    def _values(self, number: Any, k_SKBH: jax.Array) -> jax.Array:
        if self.cache.v is None:
            return k_SKBH[..., : self.kv_rank]
        return _block(self.cache.v, self.row, number, self.block)

    def _seen(self, number: Any) -> jax.Array:
        """Returns the slots of a block that each query attends to, [1, B, G T, S]."""
        _, B, queries, _ = self.q_KBGH.shape
        T = len(self.at_T)
        local_S = number * self.block + jnp.arange(self.block)
        key_S = local_S * lax.axis_size(CONTEXT) + axis_index(CONTEXT)
        seen_BTS = _seen(self.slots.first_B, self.at_T, key_S, self.window, self.chunk)
        if self.chosen_BTS is not None:
            first = number * self.block
            seen_BTS &= lax.dynamic_slice_in_dim(self.chosen_BTS, first, self.block, axis=2)
        seen = jnp.broadcast_to(seen_BTS[:, None], (B, queries // T, T, self.block))
        return seen.reshape(1, B, queries, self.block)

    def block_range(self) -> tuple[Any, Any]:
        """Returns the first block with a slot that is attended to, and the one after the last."""
        slots = self.slots
        devices = lax.axis_size(CONTEXT)
        oldest = slots.first_B.min()
        if self.window is not None:
            oldest = jnp.maximum(oldest, slots.slot - self.window + 1)
        newest = slots.slot + len(self.at_T) - 1
        return oldest // devices // self.block, newest // devices // self.block + 1


def attend(
    cache: KeyValues,
    row: Any,
    slots: Slots,
    q_BTNH: jax.Array,
    window: int | None,
    scores: Scores | None = None,
    kv_rank: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends to this device's slots of a layer;
    returns the output [B, T, N, value] and its log-sum-exp [B, T, N].

    Both are float32. A query that sees none of the slots gets zeros, and a log-sum-exp near -1e30.
    kv_rank: first features of the keys that are the values of a cache of latents.
    """
    T = q_BTNH.shape[1]
    local_slots, K = cache.k.shape[1:3]
    q_KBGH = _by_kv_head(q_BTNH, K)
    at_T = slots.slot + jnp.arange(T)
    scores = scores or Scores()
    if scores.chunk is not None:
        window = min(window or scores.chunk, scores.chunk)
    chosen_BTS = None
    if scores.index is not None:
        chosen_BTS = _chosen(scores.index, cache.index, row, slots, at_T)

    attention = _BlockAttention(
        cache=cache,
        row=row,
        slots=slots,
        q_KBGH=q_KBGH,
        at_T=at_T,
        block=math.gcd(local_slots, _BLOCK),
        window=window,
        chunk=scores.chunk,
        softcap=scores.softcap,
        kv_rank=kv_rank,
        chosen_BTS=chosen_BTS,
    )
    if attention.block == local_slots:
        sums = attention.visit(0, attention.empty())
    else:
        first, end = attention.block_range()
        sums = lax.fori_loop(first, end, attention.visit, attention.empty())
    return _attention_of(sums, T)


def _by_kv_head(q_BTNH: jax.Array, kv_heads: int) -> jax.Array:
    """Returns the queries times 1 / sqrt(H), by key/value head: [K, B, G T, H]."""
    B, T, N, H = q_BTNH.shape
    G = N // kv_heads
    q_BTKGH = (q_BTNH * H**-0.5).reshape(B, T, kv_heads, G, H)
    return q_BTKGH.transpose(2, 0, 3, 1, 4).reshape(kv_heads, B, G * T, H)


def _attention_of(sums: Sums, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the output o / l [B, T, N, value size] and the log-sum-exp m + ln l [B, T, N]."""
    K, B, queries, value_size = sums.out.shape
    G = queries // tokens
    total = jnp.maximum(sums.total, 1e-30)
    out = (sums.out / total[..., None]).reshape(K, B, G, tokens, value_size)
    lse = (sums.highest + jnp.log(total)).reshape(K, B, G, tokens)
    out_BTNH = out.transpose(1, 3, 0, 2, 4).reshape(B, tokens, K * G, value_size)
    lse_BTN = lse.transpose(1, 3, 0, 2).reshape(B, tokens, K * G)
    return out_BTNH, lse_BTN


def _chosen(
    index: Index, cached_LSKBH: jax.Array, row: Any, slots: Slots, at_T: jax.Array
) -> jax.Array:
    """Returns which slots an indexer chose for each token, [B, T, S]. A mesh with `context` is
    refused (runs/checks.py)."""
    # Every device of `tensor` has the same keys, as one head.
    k_BSH = lax.dynamic_index_in_dim(cached_LSKBH, row, 0, keepdims=False)[:, 0].swapaxes(0, 1)
    visible_BTS = _seen(slots.first_B, at_T, jnp.arange(k_BSH.shape[1]), None, None)
    return index.chosen(index.scores(k_BSH), visible_BTS)


def _seen(
    first_B: jax.Array, at_T: jax.Array, key_S: jax.Array, window: int | None, chunk: int | None
) -> jax.Array:
    """Returns the slots [B, T, S] that each token attends to.
    at_T, key_S: slots of the tokens, and of the keys."""
    distance_TS = at_T[:, None] - key_S[None]
    seen_TS = distance_TS >= 0
    if window is not None:
        seen_TS &= distance_TS < window
    seen_BTS = seen_TS[None] & (key_S[None, None] >= first_B[:, None, None])
    if chunk is None:
        return seen_BTS
    chunk_BT = (at_T[None] - first_B[:, None]) // chunk
    chunk_BS = (key_S[None] - first_B[:, None]) // chunk
    return seen_BTS & (chunk_BT[:, :, None] == chunk_BS[:, None])


def _block(array: jax.Array, row: Any, number: Any, block: int) -> jax.Array:
    """Returns block `number` of a layer's slots [S, K, B, H]."""
    start = (row, number * block, 0, 0, 0)
    size = (1, block, *array.shape[2:])
    return lax.dynamic_slice(array, start, size)[0]
