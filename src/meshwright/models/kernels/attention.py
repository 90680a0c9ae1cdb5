"""Attention kernels: facts that the choice among them needs, the scores of a layer, and the
reference in plain JAX."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.models.remat import ATTN_OUT, ATTN_SCORES, REMAT_POLICIES

if TYPE_CHECKING:
    from meshwright.models.kernels.chunks import ChunkAttention

FEATURES: dict[str, str] = {
    "softcap": "soft cap of the scores",
    "sinks": "attention sinks",
    "index": "choice of keys by an indexer",
}
"""Fields of `Scores` that not every kernel supports -> in words."""
SelfAttention = Callable[..., jax.Array]
"""`(q [B, T, N, H], k [B, T, K, H], v, segments [B, T], *, window, scores=None) -> [B, T, N, H]`.

Attention of complete sequences to themselves. Residuals that it saves for its backward pass are
named ATTN_OUT, or matched by the remat policies through their primitive. One with a method
`with_lse`, which returns the log-sum-exp of every query too, states the health of its layer
(models/layer_health.py). `scores` is given where a layer has a soft cap, sinks or an indexer.
"""
CrossAttention = Callable[..., jax.Array]
"""`(q, k, v, queries: Positions, keys: Positions, *, window, scores=None) -> [B, T, N, H]`,
of any positions."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("q_BTIH", "k_BSH", "weights_BTI"),
    meta_fields=("top_k",),
)
@dataclasses.dataclass(frozen=True)
class Index:
    """Queries, keys and head weights of a sparse indexer (DeepSeek-V3.2-Exp, section 2.1),
    which chooses keys.

        I[t, s] = sum over heads of weights[t, head] * relu(q[t, head] .
        k[s] / sqrt(H)) / sqrt(heads)

    The released code turns q and k by a Hadamard matrix, which changes no product,
    and rounds them to float8.
    """

    q_BTIH: jax.Array
    k_BSH: jax.Array
    """Keys; in decoding those of the step's tokens."""
    weights_BTI: jax.Array
    top_k: int
    """Keys that a query attends to."""

    def scores(self, k_BSH: jax.Array) -> jax.Array:
        """Returns the index scores [B, T, S], float32."""
        q_BTIH = self.q_BTIH.astype(jnp.float32)
        heads, size = q_BTIH.shape[2:]
        products_BTIS = jnp.einsum("btih,bsh->btis", q_BTIH, k_BSH.astype(jnp.float32))
        products_BTIS = jax.nn.relu(products_BTIS * size**-0.5)
        weights_BTI = self.weights_BTI.astype(jnp.float32) * heads**-0.5
        return jnp.einsum("bti,btis->bts", weights_BTI, products_BTIS)

    def chosen(self, scores_BTS: jax.Array, visible_BTS: jax.Array) -> jax.Array:
        """Returns which visible keys have the `top_k` highest scores, [B, T, S];
        of equal scores, the first keys."""
        B, T, S = scores_BTS.shape
        if self.top_k >= S:
            return visible_BTS
        scores_BTS = jnp.where(visible_BTS, scores_BTS, -jnp.inf)
        _, keys_BTk = jax.lax.top_k(scores_BTS, self.top_k)
        batch_B11 = jnp.arange(B)[:, None, None]
        query_1T1 = jnp.arange(T)[None, :, None]
        chosen_BTS = jnp.zeros((B, T, S), bool).at[batch_B11, query_1T1, keys_BTk].set(True)
        return chosen_BTS & visible_BTS


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of one layer's attention, beyond scaling and a causal mask."""

    sinks_N: jax.Array | None = None
    """Learned logit of each of this device's query heads that takes part in the softmax and adds
    nothing to the output (attention sinks: GPT-OSS; Xiao et al. 2023, arXiv:2309.17453)."""
    softcap: float | None = None
    """Cap of the scaled scores (`cap`; Gemma 2, arXiv:2408.00118, section 2)."""
    chunk: int | None = None
    """Tokens of a document after which attention begins anew (Llama 4);
    None attends within documents."""
    index: Index | None = None
    """Indexer that chooses the keys which each query sees (DeepSeek-V3.2); None sees all."""

    def split(self, count: int) -> "list[Scores]":
        """Returns the scores of each of `count` equal pieces of the batch."""
        if self.index is None:
            return [self] * count
        q, k = jnp.split(self.index.q_BTIH, count), jnp.split(self.index.k_BSH, count)
        weights = jnp.split(self.index.weights_BTI, count)
        pieces = []
        for i in range(count):
            index = Index(q[i], k[i], weights[i], self.index.top_k)
            pieces.append(dataclasses.replace(self, index=index))
        return pieces


def cap(x: jax.Array, softcap: float | None) -> jax.Array:
    """Returns c tanh(x / c), which is within -c and c and near x where x is small;
    x itself without a cap c."""
    return x if softcap is None else softcap * jnp.tanh(x / softcap)


def cap_gradient(g: jax.Array, capped: jax.Array, softcap: float | None) -> jax.Array:
    """Returns the gradient of x from that of the capped x: times 1 - (capped / c)^2."""
    return g if softcap is None else g * (1 - jnp.square(capped / softcap))


@dataclasses.dataclass(frozen=True)
class AttentionShapes:
    """Facts of a run that decide whether a kernel supports it."""

    platform: str
    """`jax.Device.platform`: cpu, tpu, gpu or cuda, rocm."""
    head_sizes: tuple[int, ...]
    """Sizes of the layers' keys and values, each once."""
    seq: int
    chunk: int
    """Tokens of a chunk; a device has two where the context strategy is ring, usp
    or all_gather, else one of `seq`."""
    dtype: str
    remat: str
    chip: str | None = None
    """Name in `chips.CHIPS`, if it is known."""
    windows: tuple[int | None, ...] = (None,)
    """Keys that a query of each layer sees, itself included; None is all before it."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Attention kernel: self-attention of complete sequences,
    and attention between parts of a sequence.

    The context strategies ring and usp need `chunk_attention`;
    all_gather needs it or `cross_attention`.
    """

    name: str
    """Name in logs, lints and the census."""
    self_attention: SelfAttention
    """Kernel where a device has complete sequences: without context parallelism,
    and with Ulysses."""
    cross_attention: CrossAttention | None = None
    """Kernel between queries and keys at any positions."""
    unsupported: Callable[[AttentionShapes], str | None] = lambda shapes: None
    """Returns the reason why the kernel cannot run these shapes, None if it can."""
    chunk_attention: "ChunkAttention | None" = None
    """Kernel between two chunks of a sequence, with its log-sum-exp and its backward pass."""
    features: frozenset[str] = frozenset()
    """Rows of `FEATURES` that the kernel has; it is not chosen for layers that need another."""
    missing: Callable[[], str | None] = lambda: None
    """Returns which library the kernel lacks on this machine, None if it lacks none."""
    fused: bool = True
    """Whether scores stay on the chip; the planner counts their HBM bytes otherwise."""
    backward: float = 2.5
    """Matrix products of the backward pass over those of the forward pass: five
    for two, the scores again included."""
    note: str = ""
    """Its blocks, where they were chosen, or why "auto" did not take the platform's own kernel."""
    for_shapes: Callable[[AttentionShapes], "Kernels | None"] = lambda shapes: None
    """Returns the kernel with the blocks that are fastest for some shapes;
    None where they are not known."""
    head_seconds: tuple[float, float] | None = None
    """Seconds of one head of one sequence in the forward and in the backward pass, a mean over the
    layers, where the blocks were chosen by them."""
    tokens: int = 0
    """Tokens of the chunk that `head_seconds` are of."""

    @property
    def summary(self) -> str:
        """Name, and the note if there is one."""
        return f"{self.name} ({self.note})" if self.note else self.name


@dataclasses.dataclass(frozen=True)
class Positions:
    """Documents and positions of some queries or keys, for the attention mask."""

    segments_BT: jax.Array
    """Document of each token; tokens of different documents do not attend to each other."""
    positions_T: jax.Array
    """Position of each token in the complete sequence, int32;
    a token does not attend to later positions."""


def sequence_positions(segments_BT: jax.Array) -> Positions:
    """Returns the positions of complete sequences in their order."""
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
    """Computes causal attention within documents;
    grouped-query attention (GQA) without repeating keys or values.

    window: a token attends to itself and the `window - 1` tokens before it; None is all before it.
    scores: soft cap, sinks and indexer. Returns [B, T, N, H] in the dtype of q.
    Scores [B, N, T, S] and softmax are float32.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5)
    scores_BKGTS = jnp.einsum(
        "btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    scores = scores or Scores()
    scores_BKGTS = cap(scores_BKGTS, scores.softcap)
    visible_BTS = visible_keys(queries, keys, window)
    if scores.index is not None:
        index_BTS = scores.index.scores(scores.index.k_BSH)
        visible_BTS = scores.index.chosen(index_BTS, visible_BTS)
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, -1e30)
    weights_BKGTS = _softmax(scores_BKGTS, scores.sinks_N)
    out_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS.astype(q_BTNH.dtype), v_BSKH)
    return out_BTKGH.reshape(B, T, N, v_BSKH.shape[3])


def visible_keys(queries: Positions, keys: Positions, window: int | None) -> jax.Array:
    """Returns which keys each query sees, [B, T, S]: of its document,
    and at distance 0 <= d < window."""
    distance_TS = queries.positions_T[:, None] - keys.positions_T[None, :]
    visible_TS = distance_TS >= 0
    if window is not None:
        visible_TS = visible_TS & (distance_TS < window)
    query_documents = queries.segments_BT[:, :, None]
    key_documents = keys.segments_BT[:, None, :]
    return visible_TS[None] & (query_documents == key_documents)


# exp(s - m) / sum exp(s - m), to which a sink adds exp(sink - m): a key whose value is zero.
def _softmax(scores_BKGTS: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
    """Returns the softmax over keys, of scores and the sinks of the query heads
    if there are any."""
    if sinks_N is not None:
        _, K, G, _, _ = scores_BKGTS.shape
        sinks = sinks_N.reshape(K, G, 1, 1)
    top = jax.lax.stop_gradient(scores_BKGTS.max(-1, keepdims=True))
    if sinks_N is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    weights_BKGTS = jnp.exp(scores_BKGTS - top)
    total = weights_BKGTS.sum(-1, keepdims=True)
    if sinks_N is not None:
        total = total + jnp.exp(sinks - top)
    return weights_BKGTS / total


def as_self_attention(attend: CrossAttention) -> SelfAttention:
    """Makes self-attention of a kernel that takes queries and keys at any positions."""

    def self_attention(
        q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array, **kind: Any
    ) -> jax.Array:
        positions = sequence_positions(segments_BT)
        return checkpoint_name(attend(q, k, v, positions, positions, **kind), ATTN_OUT)

    return self_attention


def reference_kernels(block: int | None) -> Kernels:
    """Returns the reference; it has no blocks."""

    def unsupported(shapes: AttentionShapes) -> str | None:
        # A policy of jax.checkpoint cannot drop only the scores
        # and save everything else: the kernel must not save them
        if ATTN_SCORES in REMAT_POLICIES[shapes.remat].dropped:
            return (
                f"reference attention saves its scores, which --training.remat {shapes.remat} drops"
            )
        return None

    return Kernels(
        "reference",
        as_self_attention(reference_attention),
        reference_attention,
        unsupported,
        features=frozenset(FEATURES),
        fused=False,
    )
