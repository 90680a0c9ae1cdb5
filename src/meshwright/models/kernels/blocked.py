"""Blocked attention in XLA: flash attention (Dao 2023, arXiv:2307.08691) as a loop
over the visible pairs of blocks.

It runs on every platform, for shapes and hardware without a fused kernel. The scores of one block
of queries and one of keys are live at a time, and none are saved; pairs that a causal mask or a
sliding window hides are not computed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.models.kernels.attention import Kernels, cap, cap_gradient
from meshwright.models.kernels.chunks import (
    ChunkAttention,
    ChunkMask,
    Gradients,
    Keys,
    Queries,
    Result,
    cut,
    gradient_dot_output,
    select,
    self_attention_of,
    update,
)

_SCORE_BYTES = 2**28
"""Largest size of the float32 scores of a pair of blocks, in bytes."""
_LEAST_BLOCK = 128
"""Smallest block, where the number of tokens has one that divides it."""
_BLOCKS = 8
"""Blocks of a chunk, at least, unless they are smaller than _LEAST_BLOCK:
of 8 x 8 pairs, 36 are causal."""
_MASKED = -1e30
"""Score of a masked key before the softmax."""


def block_size(tokens: int, bytes_per_score: int) -> int:
    """Returns the queries and keys of a block: a divisor of `tokens`
    whose scores fit in _SCORE_BYTES."""
    largest = math.isqrt(_SCORE_BYTES // bytes_per_score)
    largest = min(largest, max(tokens // _BLOCKS, _LEAST_BLOCK))
    smallest = min(_LEAST_BLOCK, largest)
    divisors = [size for size in range(smallest, tokens + 1) if tokens % size == 0]
    fitting = [size for size in divisors if size <= largest]
    if fitting:
        return max(fitting)
    return min(divisors, default=tokens)


class _Blocks:
    """Pairs of blocks of a pair of chunks, and the mask of each.

    A causal mask over 4 x 4 blocks leaves 10 pairs (D: diagonal, F: full), a window
    of one block 7 (W: cut by it):

        keys j    0 1 2 3        0 1 2 3
        queries 0 D              D
                1 F D            W D
                2 F F D            W D
                3 F F F D            W D
    """

    def __init__(self, queries: Queries, keys: Keys, mask: ChunkMask):
        B, T, N, _ = queries.q_BTNH.shape
        S, K = keys.k_BSKH.shape[1:3]
        size = block_size(math.gcd(T, S), 4 * B * N)
        self.mask = mask
        self.kv_heads = K
        self.block = size
        pairs = []
        for i, j in np.ndindex(T // size, S // size):
            if mask.between(i, j, size) is not None:
                pairs.append((i, j))
        self.pairs = np.array(pairs, np.int32).reshape(-1, 2)
        self.query_segments = cut(queries.segments_BT, size)
        self.key_segments = cut(keys.segments_BS, size)

    def grouped(self, x_BTNH: jax.Array) -> jax.Array:
        """Returns the blocks, query heads grouped by key/value head:
        [blocks, B, block, K, G, H]."""
        B, T, N, H = x_BTNH.shape
        return cut(x_BTNH.reshape(B, T, self.kv_heads, N // self.kv_heads, H), self.block)

    def by_head(self, x_BNT: jax.Array) -> jax.Array:
        """Returns the blocks of one number per query and head: [blocks, B, K, G, block]."""
        B, N, T = x_BNT.shape
        x = x_BNT.reshape(B, self.kv_heads, N // self.kv_heads, T // self.block, self.block)
        return jnp.moveaxis(x, 3, 0)

    def visible(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Returns the mask of block i of the queries and block j of the keys,
        [B, 1, 1, block, block]."""
        queries = select(self.query_segments, i)
        keys = select(self.key_segments, j)
        return self.mask.visible(queries, keys, i, j)[:, None, None]

    def loop(self, add: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Returns the carry after `add(carry, i, j)` for every pair of blocks."""
        if len(self.pairs) == 1:
            return add(carry, *self.pairs[0])

        def body(carry: Any, pair: Any) -> tuple[Any, None]:
            return add(carry, pair[0], pair[1]), None

        return lax.scan(body, carry, self.pairs)[0]


class _Softmax(NamedTuple):
    """Running softmax of queries over the keys visited so far, float32."""

    top: jax.Array
    """m: largest score."""
    weight: jax.Array
    """l: sum of exp(score - m)."""
    total: jax.Array
    """O: sum of exp(score - m) times the values."""

    @classmethod
    def start(cls, q: jax.Array, v: jax.Array, zero: jax.Array) -> "_Softmax":
        """Returns the state before the first block of keys: no weight,
        and the masked score as the largest.

        q: blocks of queries, [blocks, B, block, K, G, H].  v: blocks of values.
        """
        blocks, B, block, K, G, _ = q.shape
        zeros = jnp.full((blocks, B, K, G, block), zero)
        total = jnp.full((blocks, B, K, G, block, v.shape[-1]), zero)
        return cls(zeros + _MASKED, zeros, total)


# FlashAttention-2 (arXiv:2307.08691), algorithm 1: for a block of queries Q_i
# and each visible block of keys K_j,
#
#   S = cap(Q_i K_j^T / sqrt(H)),   m' = max(m, rowmax S),   P = exp(S - m')
#   l' = exp(m - m') l + rowsum P,  O' = exp(m - m') O + P V_j
#
# and at the end  output = O / l,  lse = m + log l.
def _forward(queries: Queries, keys: Keys, mask: ChunkMask, softcap: float | None = None) -> Result:
    blocks = _Blocks(queries, keys, mask)
    scaled = blocks.grouped(queries.q_BTNH * queries.q_BTNH.shape[3] ** -0.5)
    # Zeros that are there with the queries: of constants XLA:GPU copies those of all layers
    # of a body at its start.
    zero, q = lax.optimization_barrier((jnp.float32(0), scaled))
    k = cut(keys.k_BSKH, blocks.block)
    v = cut(keys.v_BSKH, blocks.block)

    def add(states: _Softmax, i: Any, j: Any) -> _Softmax:
        scores = cap(_scores(select(q, i), select(k, j)), softcap)
        state = _add_block(scores, select(v, j), select(states, i), blocks.visible(i, j))
        return update(states, i, state)

    states = blocks.loop(add, _Softmax.start(q, v, zero))
    return _result_of(states, queries.q_BTNH)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns Q K^T of a block of queries [B, T, K, G, H] and
    of keys [B, S, K, H]: float32 [B, K, G, T, S]."""
    return jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)


def _add_block(scores: jax.Array, v: jax.Array, state: _Softmax, mask: jax.Array) -> _Softmax:
    """Returns the running softmax with one more block of keys."""
    top = jnp.maximum(state.top, jnp.where(mask, scores, _MASKED).max(-1))
    # A query without a visible key so far has the masked score
    # as its largest: its weights need the mask to be zero.
    weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
    rescale = jnp.exp(state.top - top)
    added = jnp.einsum(
        "bkgts,bskh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    weight = state.weight * rescale + weights.sum(-1)
    total = state.total * rescale[..., None] + added
    return _Softmax(top, weight, total)


def _result_of(states: _Softmax, q_BTNH: jax.Array) -> Result:
    """Returns output and log-sum-exp of all blocks of queries, in the order of the tokens."""
    B, T, N, _ = q_BTNH.shape
    sees_keys = states.weight > 0
    weight = jnp.where(sees_keys, states.weight, 1.0)
    # [blocks, B, K, G, block, H] and [blocks, B, K, G, block]
    out = (states.total / weight[..., None]).astype(q_BTNH.dtype)
    lse = jnp.where(sees_keys, states.top + jnp.log(weight), _MASKED)
    out_BTNH = out.transpose(1, 0, 4, 2, 3, 5).reshape(B, T, N, out.shape[-1])
    lse_BNT = jnp.moveaxis(lse, 0, 3).reshape(B, N, T)
    return Result(out_BTNH, lse_BNT)


class _QueryBlock(NamedTuple):
    """Block of queries, as the backward pass reads it."""

    q: jax.Array
    """Scaled queries."""
    g: jax.Array
    """dO: gradient of the output."""
    inner: jax.Array
    """D = rowsum(dO * O)."""
    lse: jax.Array
    """Log-sum-exp of the scores over all keys."""


class _KeyBlock(NamedTuple):
    """Keys and values of a block, or their gradients."""

    k: jax.Array
    v: jax.Array


# FlashAttention-2 (arXiv:2307.08691), algorithm 2: nothing of the scores is saved;
# for each visible pair of blocks
#
#   S = cap(Q_i K_j^T / sqrt(H)),  P = exp(S - lse_i),  D_i = rowsum(dO_i * O_i)
#   dS = P * (dO_i V_j^T - D_i)
#   dV_j += P^T dO_i
#   dQ_i += dS K_j / sqrt(H)
#   dK_j += dS^T Q_i / sqrt(H)
#
# where dS is multiplied by the derivative of the cap, if there is one.
def _backward(
    queries: Queries,
    keys: Keys,
    result: Result,
    g_BTNH: jax.Array,
    mask: ChunkMask,
    softcap: float | None = None,
) -> Gradients:
    scale = queries.q_BTNH.shape[3] ** -0.5
    blocks = _Blocks(queries, keys, mask)
    inner = gradient_dot_output(g_BTNH, result)
    zero, g = lax.optimization_barrier((jnp.float32(0), blocks.grouped(g_BTNH)))
    q = blocks.grouped(queries.q_BTNH * scale)
    query_blocks = _QueryBlock(q, g, blocks.by_head(inner), blocks.by_head(result.lse_BNT))
    key_blocks = _KeyBlock(cut(keys.k_BSKH, blocks.block), cut(keys.v_BSKH, blocks.block))

    def add(sums: tuple[jax.Array, _KeyBlock], i: Any, j: Any) -> tuple[jax.Array, _KeyBlock]:
        by_query, by_key = sums
        pair = (select(query_blocks, i), select(key_blocks, j))
        gradients = _block_gradients(*pair, blocks.visible(i, j), softcap)
        totals = (select(by_query, i), select(by_key, j))
        g_q, g_keys = jax.tree.map(jnp.add, totals, gradients)
        return update(by_query, i, g_q), update(by_key, j, g_keys)

    g_q, g_keys = blocks.loop(add, _full_like((q, key_blocks), zero))
    g_k = _in_order(g_keys.k, keys.k_BSKH)
    g_v = _in_order(g_keys.v, keys.v_BSKH)
    return _in_order(g_q * scale, queries.q_BTNH), g_k, g_v


def _in_order(blocks: jax.Array, like: jax.Array) -> jax.Array:
    """Joins blocks of tokens [blocks, B, ...] into an array of another's shape, [B, T, ...]."""
    return blocks.swapaxes(0, 1).reshape(like.shape)


def _full_like(tree: Any, value: jax.Array) -> Any:
    """Returns a tree of arrays of the shapes of another,
    in the dtype of `value` and filled with it."""
    return jax.tree.map(lambda x: jnp.full(x.shape, value), tree)


def _block_gradients(
    queries: _QueryBlock, keys: _KeyBlock, mask: jax.Array, softcap: float | None
) -> tuple[jax.Array, _KeyBlock]:
    """Returns dQ without its factor 1 / sqrt(H), and dK and dV, of one pair of blocks, float32."""
    scores = cap(_scores(queries.q, keys.k), softcap)
    weights = jnp.where(mask, jnp.exp(scores - queries.lse[..., None]), 0.0)
    g_weights = _scores(queries.g, keys.v)
    g_scores = weights * (g_weights - queries.inner[..., None])
    g_scores = cap_gradient(g_scores, scores, softcap).astype(queries.q.dtype)

    g_q = jnp.einsum("bkgts,bskh->btkgh", g_scores, keys.k, preferred_element_type=jnp.float32)
    g_k = _sum_over_queries(g_scores, queries.q)
    g_v = _sum_over_queries(weights.astype(queries.q.dtype), queries.g)
    return g_q, _KeyBlock(g_k, g_v)


def _sum_over_queries(x_BKGTS: jax.Array, queries_BTKGH: jax.Array) -> jax.Array:
    """Returns X^T Y, summed over the queries and heads
    of each key/value head: float32 [B, S, K, H]."""
    return jnp.einsum(
        "bkgts,btkgh->bskh", x_BKGTS, queries_BTKGH, preferred_element_type=jnp.float32
    )


@functools.lru_cache(maxsize=32)
def _with_softcap(softcap: float) -> ChunkAttention:
    # The same cap gives the same functions: they are static arguments of what calls them.
    return ChunkAttention(
        functools.partial(_forward, softcap=softcap),
        functools.partial(_backward, softcap=softcap),
        _with_softcap,
    )


blocked_chunks = ChunkAttention(_forward, _backward, _with_softcap)
"""Blocked attention between two chunks."""


def blocked_kernels(block: int | None) -> Kernels:
    """Returns blocked attention, which chooses its blocks itself."""
    return Kernels(
        "blocked",
        self_attention_of(blocked_chunks),
        chunk_attention=blocked_chunks,
        features=frozenset({"softcap", "sinks"}),
        fused=False,
    )
