"""Vocabulary-parallel cross-entropy that never materialises all logits.

Each device has a block of the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053, section 3) and
goes over the tokens in chunks, so at most `chunk` x V/stage+tensor logits are live on it at once,
forward and backward. The backward pass recomputes the logits from the saved log-sum-exp.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.comm.collectives import all_reduce, all_reduce_max, axis_index
from meshwright.models.kernels.attention import cap, cap_gradient
from meshwright.sharding.layouts import VOCAB_AXES


@functools.cache
def chunk_tokens(tokens: int, vocab: int, logits_mib: int) -> int:
    """Returns the tokens per chunk, whose float32 logits fit in `logits_mib` MiB.

    That is the largest divisor of `tokens` that fits, where it is at least half of what fits.
    Otherwise the fewest chunks that fit are of equal size, and `split_chunks` fills up the last
    with less than a token for each of them.
    vocab: rows of this device's block of the vocabulary.
    """
    most = min(tokens, max(1, logits_mib * 2**20 // (4 * vocab)))
    for chunk in range(most, most // 2, -1):
        if tokens % chunk == 0:
            return chunk
    chunks = math.ceil(tokens / most)
    return math.ceil(tokens / chunks)


def split_chunks[T](tree: T, chunk: int) -> T:
    """Splits arrays [T, ...] into chunks [chunks, chunk, ...]; zeros fill up the last."""

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -len(x) % chunk), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, chunk, *x.shape[1:])

    return jax.tree.map(split, tree)


def join_chunks[T](tree: T, tokens: int) -> T:
    """Inverts `split_chunks`: returns the first `tokens` tokens of arrays [chunks, chunk, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def token_losses(
    x_TD: jax.Array,
    table_VD: jax.Array,
    labels_T: jax.Array,
    vocab: int,
    chunk: int,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the negative log-likelihood of each label and the log-sum-exp (lse)
    of its logits; both [T], float32.

    x_TD: final hidden states, equal on `tensor` and `stage`.
    table_VD: this device's block of the unembedding.
    vocab: size of the vocabulary; rows of the table beyond it are padding and get probability zero.
    chunk: tokens per chunk; the last may be filled up.
    softcap: of the logits, if there is one.
    Sends two all-reduces over VOCAB_AXES of 4 T and 8 T bytes.
    """
    return _forward(x_TD, table_VD, labels_T, vocab, chunk, softcap)[0]


def _logits(
    x_TD: jax.Array, table_VD: jax.Array, vocab: int, softcap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the float32 logits of this device's block, padding at -1e30,
    and the block's first row."""
    rows = table_VD.shape[0]
    first = axis_index(VOCAB_AXES) * rows
    logits_TV = jax.lax.dot_general(
        x_TD, table_VD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    in_vocab_V = first + jnp.arange(rows) < vocab
    return jnp.where(in_vocab_V[None], cap(logits_TV, softcap), -1e30), first


def _is_label(labels_T: jax.Array, first: jax.Array, rows: int) -> jax.Array:
    """Returns whether each row of a block is the label of each token, [T, V].
    first: first row of the block."""
    return (labels_T - first)[:, None] == jnp.arange(rows)[None]


# lse = max + ln sum_v exp(logits[v] - max), nll = lse - logits[label]; maximum and sums are over
# the vocabulary blocks of all devices.
def _forward(
    x_TD: jax.Array,
    table_VD: jax.Array,
    labels_T: jax.Array,
    vocab: int,
    chunk: int,
    softcap: float | None,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    def chunk_losses(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_TD, labels_T = inputs
        logits_TV, first = _logits(x_TD, table_VD, vocab, softcap)
        max_T = all_reduce_max(logits_TV.max(-1), VOCAB_AXES)
        is_label_TV = _is_label(labels_T, first, table_VD.shape[0])
        local_sum_exp_T = jnp.exp(logits_TV - max_T[:, None]).sum(-1)
        local_label_logit_T = jnp.where(is_label_TV, logits_TV, 0).sum(-1)
        local_sums = (local_sum_exp_T, local_label_logit_T)
        sum_exp_T, label_logit_T = all_reduce(local_sums, VOCAB_AXES)
        lse_T = max_T + jnp.log(sum_exp_T)
        return lse_T - label_logit_T, lse_T

    tokens = x_TD.shape[0]
    if chunk == tokens:
        nll_T, lse_T = chunk_losses((x_TD, labels_T))
    else:
        chunks = split_chunks((x_TD, labels_T), chunk)
        nll_T, lse_T = join_chunks(jax.lax.map(chunk_losses, chunks), tokens)
    return (nll_T, lse_T), (x_TD, table_VD, labels_T, lse_T)


# With the probabilities p = exp(logits - lse) and the label y of token t:
#
#   grad_logits[t, v] = (grad_nll[t] + grad_lse[t]) p[t, v] - grad_nll[t] [v = y[t]]
#
# which is multiplied by the derivative of the cap, if there is one.
def _logit_gradients(
    probability_TV: jax.Array, is_label_TV: jax.Array, g_nll_T: jax.Array, g_lse_T: jax.Array
) -> jax.Array:
    from_lse_TV = (g_nll_T + g_lse_T)[:, None] * probability_TV
    return from_lse_TV - jnp.where(is_label_TV, g_nll_T[:, None], 0)


def _backward(
    vocab: int, chunk: int, softcap: float | None, saved: Any, g: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, np.ndarray]:
    x_TD, table_VD, labels_T, lse_T = saved
    g_nll_T, g_lse_T = g

    def chunk_gradients(
        g_table_VD: jax.Array, inputs: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        x_TD, labels_T, lse_T, g_nll_T, g_lse_T = inputs
        logits_TV, first = _logits(x_TD, table_VD, vocab, softcap)
        is_label_TV = _is_label(labels_T, first, table_VD.shape[0])
        probability_TV = jnp.exp(logits_TV - lse_T[:, None])
        g_logits_TV = _logit_gradients(probability_TV, is_label_TV, g_nll_T, g_lse_T)
        # Padding has no probability, so its gradient is zero whatever the cap's derivative there.
        g_logits_TV = cap_gradient(g_logits_TV, jnp.where(logits_TV > -1e29, logits_TV, 0), softcap)
        g_logits_TV = g_logits_TV.astype(table_VD.dtype)
        g_table_VD += jax.lax.dot_general(
            g_logits_TV, x_TD, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        # Partial over the vocabulary blocks: the backward passes of sequence_all_gather and
        # broadcast, which gave x_TD, sum over them.
        return g_table_VD, (g_logits_TV @ table_VD).astype(x_TD.dtype)

    inputs = (x_TD, labels_T, lse_T, g_nll_T, g_lse_T)
    zeros_VD = jnp.zeros(table_VD.shape, jnp.float32)
    if chunk == x_TD.shape[0]:
        g_table_VD, g_x_TD = chunk_gradients(zeros_VD, inputs)
    else:
        # What fills up the last chunk has no gradient of a loss, so its logits have none.
        chunks = split_chunks(inputs, chunk)
        g_table_VD, g_chunks = jax.lax.scan(chunk_gradients, zeros_VD, chunks)
        g_x_TD = join_chunks(g_chunks, x_TD.shape[0])
    no_gradient = np.zeros(labels_T.shape, jax.dtypes.float0)
    return g_x_TD, g_table_VD.astype(table_VD.dtype), no_gradient


token_losses.defvjp(_forward, _backward)
