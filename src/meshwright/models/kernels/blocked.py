"""Blocked attention in XLA: flash attention (Dao 2023, arXiv:2307.08691) as a loop over the visible pairs of blocks.

It runs on every platform, for shapes and hardware without a fused kernel. The scores of one block of queries and one of
keys are live at a time, and none are saved; pairs that a causal mask or a sliding window hides are not computed.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.models.kernels.attention import FEATURES, Kernels, cap, cap_gradient
from meshwright.models.kernels.chunks import (
    ChunkAttention,
    ChunkMask,
    Gradients,
    Keys,
    Queries,
    Result,
    cut,
    select,
    self_attention_of,
    update,
)

_SCORE_BYTES = 2**28
"""Largest size of the float32 scores of a pair of blocks, in bytes."""
_LEAST_BLOCK = 128
"""Smallest block, where the number of tokens has one that divides it."""
_BLOCKS = 8
"""Blocks of a chunk, at least, unless they are smaller than _LEAST_BLOCK: of 8 x 8 pairs, 36 are causal."""
_MASKED = -1e30
"""Score of a masked key before the softmax."""


def block_size(tokens: int, bytes_per_score: int) -> int:
    """Returns the queries and keys of a block: a divisor of `tokens` whose scores fit in _SCORE_BYTES."""
    most = min(math.isqrt(_SCORE_BYTES // bytes_per_score), max(tokens // _BLOCKS, _LEAST_BLOCK))
    divisors = [b for b in range(1, tokens + 1) if tokens % b == 0]
    enough = [b for b in divisors if b >= min(_LEAST_BLOCK, most)]
    return max((b for b in enough if b <= most), default=min(enough, default=tokens))


class _Blocks:
    """Pairs of blocks of a pair of chunks, and the mask of each."""

    def __init__(self, queries: Queries, keys: Keys, mask: ChunkMask):
        B, T, N, _ = queries.q_BTNH.shape
        S, self.kv_heads = keys.k_BSKH.shape[1:3]
        self.mask = mask
        self.block = size = block_size(math.gcd(T, S), 4 * B * N)
        pairs = [
            (i, j)
            for i in range(T // size)
            for j in range(S // size)
            if mask.between(i, j, size) is not None
        ]
        self.pairs = np.array(pairs, np.int32).reshape(-1, 2)
        self.segments = (cut(queries.segments_BT, size), cut(keys.segments_BS, size))

    def grouped(self, x_BTNH: jax.Array) -> jax.Array:
        """Returns the blocks, query heads grouped by key/value head: [blocks, B, block, K, G, H]."""
        B, T, N, H = x_BTNH.shape
        return cut(x_BTNH.reshape(B, T, self.kv_heads, N // self.kv_heads, H), self.block)

    def by_head(self, x_BNT: jax.Array) -> jax.Array:
        """Returns the blocks of one number per query and head: [blocks, B, K, G, block]."""
        B, N, T = x_BNT.shape
        x = x_BNT.reshape(B, self.kv_heads, N // self.kv_heads, T // self.block, self.block)
        return jnp.moveaxis(x, 3, 0)

    def visible(self, i: jax.Array, j: jax.Array) -> jax.Array:
        queries, keys = select(self.segments[0], i), select(self.segments[1], j)
        return self.mask.visible(queries, keys, i, j)[:, None, None]

    def loop(self, add: Any, carry: Any) -> Any:
        if len(self.pairs) == 1:
            return add(carry, *self.pairs[0])
        return lax.scan(
            lambda carry, pair: (add(carry, pair[0], pair[1]), None), carry, self.pairs
        )[0]


def _forward(queries: Queries, keys: Keys, mask: ChunkMask, softcap: float | None = None) -> Result:
    blocks = _Blocks(queries, keys, mask)
    B, T, N, H = queries.q_BTNH.shape
    # Zeros that are there with the queries: of constants XLA:GPU copies those of all layers of a body at its start.
    zero, q = lax.optimization_barrier((jnp.float32(0), blocks.grouped(queries.q_BTNH * H**-0.5)))
    k, v = cut(keys.k_BSKH, blocks.block), cut(keys.v_BSKH, blocks.block)
    shape = (q.shape[0], B, *q.shape[3:5], blocks.block)
    zeros, values = (jnp.full(x, zero) for x in (shape, (*shape, v.shape[-1])))

    # Running softmax of blocks of queries: largest score, sum of weights, weighted sum of values, float32.
    def add(states: Any, i: Any, j: Any) -> Any:
        scores = jnp.einsum(
            "btkgh,bskh->bkgts", select(q, i), select(k, j), preferred_element_type=jnp.float32
        )
        scores, v_j = cap(scores, softcap), select(v, j)
        (top, weight, total), mask = select(states, i), blocks.visible(i, j)
        new_top = jnp.maximum(top, jnp.where(mask, scores, _MASKED).max(-1))
        # A row without a visible key so far has the masked score as its largest: its weights need the mask to be zero.
        weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
        rescale = jnp.exp(top - new_top)
        added = jnp.einsum(
            "bkgts,bskh->bkgth", weights.astype(v.dtype), v_j, preferred_element_type=jnp.float32
        )
        return update(
            states,
            i,
            (new_top, weight * rescale + weights.sum(-1), total * rescale[..., None] + added),
        )

    top, weight, total = blocks.loop(add, (zeros + _MASKED, zeros, values))
    seen = weight > 0
    weight = jnp.where(seen, weight, 1.0)
    out = (total / weight[..., None]).astype(queries.q_BTNH.dtype)
    lse = jnp.where(seen, top + jnp.log(weight), _MASKED)
    # [blocks, B, K, G, block, H] and [blocks, B, K, G, block]
    return Result(
        out.transpose(1, 0, 4, 2, 3, 5).reshape(B, T, N, v.shape[-1]),
        jnp.moveaxis(lse, 0, 3).reshape(B, N, T),
    )


def _backward(
    queries: Queries,
    keys: Keys,
    result: Result,
    g_BTNH: jax.Array,
    mask: ChunkMask,
    softcap: float | None = None,
) -> Gradients:
    blocks = _Blocks(queries, keys, mask)
    H = queries.q_BTNH.shape[3]
    # The row sums of gradient times output that the softmax's derivative needs (FlashAttention-2, arXiv:2307.08691).
    inner_BNT = jnp.einsum(
        "btnh,btnh->bnt", g_BTNH, result.out_BTNH, preferred_element_type=jnp.float32
    )
    zero, g = lax.optimization_barrier((jnp.float32(0), blocks.grouped(g_BTNH)))
    q = blocks.grouped(queries.q_BTNH * H**-0.5)
    rows = (q, g, blocks.by_head(inner_BNT), blocks.by_head(result.lse_BNT))
    columns = (cut(keys.k_BSKH, blocks.block), cut(keys.v_BSKH, blocks.block))

    def add(sums: Any, i: Any, j: Any) -> Any:
        (q, g, inner, lse), (k, v), mask = select(rows, i), select(columns, j), blocks.visible(i, j)
        # The softmax is computed again from the log-sum-exp.
        scores = cap(
            jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32), softcap
        )
        weights = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0.0)
        g_weights = jnp.einsum("btkgh,bskh->bkgts", g, v, preferred_element_type=jnp.float32)
        g_scores = cap_gradient(weights * (g_weights - inner[..., None]), scores, softcap).astype(
            q.dtype
        )
        g_q = jnp.einsum("bkgts,bskh->btkgh", g_scores, k, preferred_element_type=jnp.float32)
        g_k = jnp.einsum("bkgts,btkgh->bskh", g_scores, q, preferred_element_type=jnp.float32)
        g_v = jnp.einsum(
            "bkgts,btkgh->bskh", weights.astype(q.dtype), g, preferred_element_type=jnp.float32
        )
        totals = (select(sums[0], i), select(sums[1], j))
        g_q, g_kv = jax.tree.map(jnp.add, totals, (g_q, (g_k, g_v)))
        return update(sums[0], i, g_q), update(sums[1], j, g_kv)

    g_q, g_kv = blocks.loop(add, jax.tree.map(lambda x: jnp.full(x.shape, zero), (q, columns)))
    g_k, g_v = (
        x.swapaxes(0, 1).reshape(like.shape) for x, like in zip(g_kv, keys[:2], strict=True)
    )
    return (g_q * H**-0.5).swapaxes(0, 1).reshape(queries.q_BTNH.shape), g_k, g_v


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


def blocked_kernels(block: int) -> Kernels:
    """Returns blocked attention, which chooses its blocks itself."""
    attend, features = self_attention_of(blocked_chunks), frozenset(FEATURES)
    return Kernels(
        "blocked", attend, chunk_attention=blocked_chunks, features=features, fused=False
    )
