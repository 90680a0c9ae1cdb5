"""Facts of a layer that planner, memory model, caches and kernels are chosen
and priced by: sizes, widths, FLOPs.

A kind states them of its half (`models.model.Kind.facts`); no forward pass reads them.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np

from meshwright.sharding.placement import replicates_kv_heads
from meshwright.sharding.sequence import SEGMENTS, segment_tokens


class Widths(NamedTuple):
    """Elements per token of the first half of a layer, on a device of `tensor`."""

    heads: float
    query: float
    kv: float
    """Of keys or values, the mean of both."""
    value: float
    """Of the output before its projection."""
    saved: float
    """Of what remat policies save as queries, keys and values."""
    gathered: float
    """Of what is gathered over `tensor`."""
    kept: float = 0.0
    """Of what the backward pass reads besides, where everything is saved: queries and keys before
    their norm, those of latent attention as the kernel reads them, what a convolution or an output
    gate reads and returns."""


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Sizes of latent attention besides those of queries and keys."""

    query_rank: int | None
    """Width of the latent that queries are projections of;
    None projects them from the layer's input."""
    kv_rank: int
    """Width of the latent of keys and values."""
    rope_size: int
    """Size of the rotary key that all heads share, and of the rotated part of a query."""
    value_size: int

    @property
    def cached(self) -> int:
        """Elements per token that a cache holds: the latent and the rotary key."""
        return self.kv_rank + self.rope_size


IndexTraining = Literal["frozen", "warmup", "sparse"]
"""Stage of an indexer: as it is; it alone is trained, with attention to all keys;
it is trained on the chosen keys."""


@dataclasses.dataclass(frozen=True)
class IndexerSpec:
    """Sizes of the indexer that chooses the keys of each query (DeepSeek-V3.2)."""

    heads: int
    head_size: int
    top_k: int
    """Keys that a query attends to."""
    weights: int
    """Elements of its matrices, by which every token is multiplied."""
    training: IndexTraining = "frozen"

    @property
    def trained(self) -> bool:
        """Whether it is trained, by a loss that computes the scores of all main heads once more."""
        return self.training != "frozen"

    @property
    def projection_flops(self) -> float:
        """FLOPs of one token's matmuls with its weights."""
        return 2.0 * self.weights

    def score_flops(self, positions: float) -> float:
        """Returns the FLOPs of one token that is compared with `positions` keys: products
        of all heads, their sum."""
        return 2.0 * positions * self.heads * (self.head_size + 1)


class IndexWork(NamedTuple):
    """FLOPs and scores of a layer's indexer, by pass."""

    flops: float = 0.0
    scores: float = 0.0
    backward_flops: float = 0.0
    backward_scores: float = 0.0


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer."""

    heads: int
    """Query heads N."""
    kv_heads: int
    """Key/value heads K; fewer than `heads` is grouped-query attention (GQA)."""
    head_size: int
    window: int | None = None
    """Sliding window: positions a token attends to, itself included; None is all before it."""
    normalises_qk: bool = False
    """Whether queries and keys are normalised: what saves everything saves them
    before and after."""
    normalises_v: bool = False
    """Whether values are normalised, and no norm of keys reads the same products: they are
    saved before and after."""
    gates_output: bool = False
    """Whether a projection as wide as the queries multiplies the output: it is saved
    where they are."""
    latent: LatentSpec | None = None
    """Latents that keys and values are projections of (multi-head latent attention, MLA)."""
    chunk: int | None = None
    """Tokens of a chunk, within which a token attends (Llama 4)."""
    features: frozenset[str] = frozenset()
    """Rows of `kernels.attention.FEATURES` that the kernel must have: a soft cap
    of the scores, sinks, an indexer."""
    indexer: IndexerSpec | None = None
    """Indexer that chooses the keys of each query; None sees all of them."""

    @property
    def value_size(self) -> int:
        """Size of a value; only latent attention has values of another size than keys."""
        return self.head_size if self.latent is None else self.latent.value_size

    @property
    def cached_heads(self) -> tuple[int, int]:
        """Heads that a cache holds, and the size of a key: latents and rotary keys are one head."""
        return (self.kv_heads, self.head_size) if self.latent is None else (1, self.latent.cached)

    def widths(self, width: int, tensor: int) -> Widths:
        """Returns the widths on one of `tensor` devices. width: of the model."""
        kv_heads = (
            self.kv_heads
            if replicates_kv_heads(self.kv_heads, tensor)
            else max(1, self.kv_heads // tensor)
        )
        heads = self.heads // tensor
        query, value = heads * self.head_size, heads * self.value_size
        kv = kv_heads * (self.head_size + self.value_size) / 2
        kept = (query + kv) * self.normalises_qk + 2 * value * self.gates_output
        kept += kv * self.normalises_v
        if self.latent is None:
            saved = query * (1 + self.gates_output) + 2 * kv
            return Widths(heads, query, kv, value, saved, width, kept)
        # Each device of `tensor` saves the latents of its own positions;
        # queries without one are those of its heads.
        rank, cached = self.latent.query_rank, self.latent.cached
        queries = query if rank is None else rank / tensor
        kept += query + 2 * kv
        saved = queries + cached / tensor
        return Widths(heads, query, kv, value, saved, (rank or width) + cached, kept)

    def flops(self, seq: int) -> float:
        """Returns the FLOPs of one token's scores and weighted values, averaged
        over a sequence of `seq` tokens.

        Only keys that an indexer chose are counted; its own work is that of `IndexerSpec`.
        """
        positions = self.causal_positions(seq)
        if "index" in self.features and self.indexer is not None:
            positions = dataclasses.replace(self, window=self.indexer.top_k).causal_positions(seq)
        return positions * self._flops_of_a_key

    def computed_positions(self, seq: int) -> float:
        """Returns the keys that one token's scores are computed of, on average.

        Only reference attention has keys chosen by an indexer,
        and it computes those of the complete sequence.
        """
        return seq if "index" in self.features else self.causal_positions(seq)

    def computed_flops(self, seq: int) -> float:
        """Returns the FLOPs of one token's scores and weighted values that are computed,
        of keys that it sees or not."""
        return self.computed_positions(seq) * self._flops_of_a_key

    def computed_scores(self, seq: int) -> float:
        """Returns the scores of one token that are computed, of all heads."""
        return self.heads * self.computed_positions(seq)

    def index_work(self, seq: int, tensor: int) -> "IndexWork":
        """Returns what the indexer computes for one token, on all of `tensor` devices together.

        Each of them chooses the keys of all tokens. The loss compares each token once, with all
        keys of the sequence, and has the scores of the main heads anew.
        """
        if self.indexer is None:
            return IndexWork()
        indexer = self.indexer
        flops = tensor * indexer.projection_flops
        scores = 0.0
        if "index" in self.features:
            flops += tensor * indexer.score_flops(seq)
            scores += tensor * indexer.heads * seq
        if not indexer.trained:
            return IndexWork(flops, scores)
        flops += indexer.score_flops(seq) + 2.0 * seq * self.heads * self.head_size
        scores += (indexer.heads + self.heads) * seq
        # Its input is detached: a projection has the gradient of its weight only.
        backward = tensor * indexer.projection_flops + 2.0 * indexer.score_flops(seq)
        return IndexWork(flops, scores, backward, indexer.heads * seq)

    def flops_of_all_keys(self, seq: int) -> float:
        """Returns the FLOPs of scores and weighted values of all keys, chosen or not.

        The loss that trains an indexer computes the scores once more.
        """
        positions = self.causal_positions(seq)
        flops = positions * self._flops_of_a_key
        if self.indexer is not None and self.indexer.trained:
            flops += 2.0 * positions * self.heads * self.head_size
        return flops

    @property
    def _flops_of_a_key(self) -> float:
        return 2.0 * self.heads * (self.head_size + self.value_size)

    def causal_positions(self, seq: int) -> float:
        """Returns the positions a token attends to, averaged over a sequence of `seq` tokens."""
        if self.chunk is not None and self.chunk < seq:
            whole, rest = divmod(seq, self.chunk)
            return (whole * self.chunk * (self.chunk + 1) + rest * (rest + 1)) / (2 * seq)
        window = min(self.window or seq, seq)
        return (window * (window + 1) / 2 + (seq - window) * window) / seq


class MatmulSizes(NamedTuple):
    """Equal matmuls without a weight, [m, k] by [k, n]."""

    m: int
    k: int
    n: int
    number: int
    scanned: bool = False
    """Whether chunks follow each other, so that a GPU launches them for each chunk,
    and not for a sequence at once."""


class Gathered(NamedTuple):
    """Array that each segment of a sequence that `context` splits sends to all others."""

    array: jax.ShapeDtypeStruct
    inside: bool = False
    """Whether it is gathered inside what the backward pass recomputes whatever the remat
    policy keeps."""


def _flops_of(matmuls: list[MatmulSizes]) -> float:
    """Returns the FLOPs of matmuls."""
    sizes = [MatmulSizes(*row) for row in matmuls]
    return sum(2.0 * row.m * row.k * row.n * row.number for row in sizes)


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """Facts of a first half of a layer that carries a state from token to token,
    of one size after any number of them.

    Linear attention, a state space or a short convolution. The kind states it in its `facts`, as
    `recurrence`, and computes by `ForwardContext.recur`. FLOPs, the planner's work, memory and
    traffic, the cache of decoding and, of one that does not state what segments share, the refusal
    of `context` follow (docs: Adding things, A layer kind).
    """

    item: ClassVar[str]
    """Item of `models.flops.forward_flops` for what the kind computes without weights."""
    formula: ClassVar[str]
    """FLOPs of that item in words, and their source."""

    def widths(self, width: int, tensor: int) -> "Widths":
        """Returns the widths on one of `tensor` devices. width: of the model."""
        raise NotImplementedError

    def carried(self, batch: int) -> Any:
        """Returns the state after a token, a tree
        of jax.ShapeDtypeStruct of [features, batch, ...].

        `tensor` splits the first dimension, as it splits the heads or channels of the parameters.
        """
        raise NotImplementedError

    def chunk(self, seq: int) -> int:
        """Returns the tokens of a sequence of `seq` that are computed at once;
        1 for one after another."""
        return 1

    def matmuls(self, seq: int) -> list[MatmulSizes]:
        """Returns the matmuls without weights of one chunk of a sequence,
        of all devices of `tensor` together."""
        return []

    def gathered(self, batch: int, segment: int, dtype: str) -> dict[str, Gathered] | None:
        """Returns what each segment of `batch` sequences that `context` splits sends
        to all others, by name.

        All heads or channels of `tensor` together. segment: its tokens. dtype: of computation.
        None refuses `context`.
        """
        return None

    def segment_matmuls(self, seq: int) -> list[MatmulSizes]:
        """Returns the matmuls without weights that a chunk has besides `matmuls`
        where `context` splits sequences."""
        return []

    def composition_matmuls(self, segments: int) -> list[MatmulSizes]:
        """Returns the matmuls by which each device composes what all segments of a sequence have
        sent, one after another."""
        return []

    def flops(self, seq: int) -> float:
        """Returns the FLOPs of one token's forward pass in a sequence
        of `seq` tokens, without those of weights."""
        return _flops_of(self.matmuls(seq)) / self.chunk(seq)

    def computed_flops(self, seq: int, context: int) -> float:
        """Returns the FLOPs that one token's share of a device's work has
        where `context` devices split sequences."""
        segment = segment_tokens(seq, context)
        flops = _flops_of(self.matmuls(segment)) / self.chunk(segment)
        if context > 1:
            flops += _flops_of(self.segment_matmuls(segment)) / self.chunk(segment)
            flops += _flops_of(self.composition_matmuls(SEGMENTS * context)) * context / seq
        return flops

    def inner_bytes(self, seq: int) -> float:
        """Returns the bytes per token that the backward pass makes and drops,
        of all devices of `tensor` together."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class ExpertSpec:
    """Mixture of experts of one layer."""

    experts: int
    experts_per_token: int
    buffer_factor: float = 0.0
    """Rows that one of the devices that split experts has room for,
    as a multiple of an even share; 0: for all."""
    sent_bytes: int | None = None
    """Bytes of an element of the rows sent to experts; None for the compute dtype."""
    groups: int = 1
    """Groups of neighbouring experts."""
    topk_groups: int = 1
    """Groups that the experts of a token are in."""
    weighted: Literal["hidden", "input"] = "hidden"
    """What the routing weight multiplies: only where it is the hidden layer products read rows
    as they were sent."""
    gates_shared: bool = False
    """Whether a projection of the token multiplies the output of the experts
    that every token uses."""
    latent: int | None = None
    """Width of the latent that routed experts read and write; None is the model's width."""

    def row_width(self, width: int) -> int:
        """Returns the width of the rows of routed experts in a model of `width`."""
        return width if self.latent is None else self.latent

    def buffers(self, tokens: int, shards: int, nodes: int = 1) -> "ExpertBuffers":
        """Returns the rows of each buffer of a device, one of `shards`
        that split the experts, in `nodes` nodes.

        tokens: of a device. Every buffer has room for the most that can arrive, or for
        `buffer_factor` times an even share where that is less.
        """
        copies, arriving = self._copies(nodes), self._arriving(shards, nodes)
        most = ExpertBuffers(*(tokens * rows for rows in arriving))
        if not self.buffer_factor:
            return most
        shares = (int(_whole_tiles(self.buffer_factor * tokens * rows)) for rows in copies)
        limited = ExpertBuffers(*map(min, most, shares))
        return limited if nodes > 1 else limited._replace(copies=most.copies)

    def rooms(self, tokens: np.ndarray, shards: int, nodes: int = 1) -> "ExpertBuffers":
        """Returns the rows of each buffer that text may use: `buffer_factor` times an even share
        of it, in whole tiles.

        tokens: tokens of text on a device, on average over the `shards`,
        as an array of all that are asked for.
        """
        shares = ExpertBuffers(
            *(_whole_tiles(self.buffer_factor * tokens * rows) for rows in self._copies(nodes))
        )
        return shares if nodes > 1 else shares._replace(copies=tokens * self.experts_per_token)

    def drops(self, shards: int, nodes: int = 1) -> bool:
        """Returns whether some buffer may have less room
        than could arrive, whatever the number of tokens."""
        pairs = zip(self._copies(nodes), self._arriving(shards, nodes), strict=True)
        return bool(self.buffer_factor) and any(
            self.buffer_factor * copies < most for copies, most in pairs
        )

    def _copies(self, nodes: int) -> "ExpertBuffers":
        """Rows that a token has in each buffer on average over the devices,
        where all loads are even."""
        k = self.experts_per_token
        return ExpertBuffers(self.most_nodes(nodes), k, k)

    def _arriving(self, shards: int, nodes: int) -> "ExpertBuffers":
        """Most rows of each buffer, for each token of a device."""
        k = self.experts_per_token
        inside, here = (n * min(k, self.experts // n) for n in (nodes, shards))
        return ExpertBuffers(nodes, inside if nodes > 1 else k, here)

    def most_nodes(self, nodes: int) -> int:
        """Returns the most of `nodes` nodes that the experts of one token are on."""
        in_group, in_node = self.experts // self.groups, self.experts // nodes
        aligned = in_group % in_node == 0 or in_node % in_group == 0
        return min(
            self.experts_per_token,
            nodes,
            self.topk_groups * (-(-in_group // in_node) + (not aligned)),
        )

    def mean_nodes(self, nodes: int) -> float:
        """Returns the nodes that the experts of one token are on, on average over even choices.

        Groups and nodes that do not divide each other count as if a node had experts of one group.
        """
        k, in_group, own = (
            self.experts_per_token,
            self.experts // self.groups,
            max(1, self.groups // nodes),
        )
        # Experts of a node in each of its groups, and those that a token chooses from.
        here, pool = min(self.experts // nodes // own, in_group), self.topk_groups * in_group
        missed = sum(
            math.comb(own, j)
            * math.comb(self.groups - own, self.topk_groups - j)
            * math.comb(pool - j * here, k)
            for j in range(min(own, self.topk_groups) + 1)
        )
        return max(
            1.0,
            nodes * (1 - missed / (math.comb(self.groups, self.topk_groups) * math.comb(pool, k))),
        )


class ExpertBuffers(NamedTuple):
    """Rows of a device's buffers for experts, each of `ExpertSpec.row_width`: integers,
    or arrays of them."""

    nodes: Any
    """Rows that arrive from the devices of all nodes, one for each token."""
    copies: Any
    """Copies of rows that are sent to experts inside a node."""
    experts: Any
    """Rows that arrive at the device's experts."""


def _whole_tiles(rows: Any) -> Any:
    """Rounds rows up to whole tiles of 128, on which kernels work; a number or an array."""
    return -(-np.ceil(rows).astype(int) // 128) * 128


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: the stack that holds its parameters, and its halves."""

    stack: str
    attention: AttentionSpec | None = None
    experts: ExpertSpec | None = None
    recurrence: Recurrence | None = None
    """State that passes from token to token; a layer has this or `attention`."""
    normalises_inputs: bool = True
    """Whether each half reads a norm of the residual stream: the backward pass reads the
    norm's output too."""
    normalises_outputs: bool = False
    """Whether the output of each half is normalised
    before it is added: the backward pass reads it."""
    has_two_feed_forwards: bool = False
    """Whether a dense feed-forward and experts each have an input and an output of their own, both
    normalised and, over `tensor`, gathered and scattered: they are added before the norm of the
    half's output."""
    has_first_half: bool = True
    """Whether it has a first half: attention, a recurrence,
    or another of which the facts are not known."""
    has_second_half: bool = True
    """Whether it has a second half: a feed-forward or experts."""
    has_parallel_halves: bool = False
    """Whether both halves read one norm of the layer's input: nothing is between them."""
    hidden_products: float = 0.5
    """Width of what the feed-forward's last matmul reads, over that of its first outputs: half of a
    gate and what it multiplies, all of the input of a GELU."""
    attention_scope: str = ""
    """Named scope of its first half in a compiled program; empty where that is not known."""
    feed_forward_scope: str = ""
    """Named scope of its second half."""

    @property
    def halves(self) -> int:
        """Number of its halves: 1 or 2."""
        return self.has_first_half + self.has_second_half

    @property
    def scales_rows(self) -> bool:
        """Whether routing weights multiply the rows of experts: the backward pass reads them
        before and after."""
        return self.experts is not None and self.experts.weighted == "input"

    def widths(self, width: int, tensor: int) -> Widths:
        """Returns the widths on one of `tensor` devices;
        a layer without attention gathers the model's width."""
        first_half = self.attention or self.recurrence
        if first_half is None:
            return Widths(0, 0, 0, 0, 0, width)
        return first_half.widths(width, tensor)

    @property
    def decodes(self) -> bool:
        """Whether it is known what the layer keeps of earlier tokens, so that it can generate."""
        known = self.attention is not None or self.recurrence is not None
        return known or not self.has_first_half
