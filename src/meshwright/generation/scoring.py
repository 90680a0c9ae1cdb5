"""Log-likelihood of given texts from the cache: the prefill, with the probability of each token that follows."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.comm.collectives import all_gather, all_reduce, all_reduce_max, axis_index
from meshwright.generation.decoder import Decoder, DecodeState
from meshwright.generation.sampling import Sampling
from meshwright.models.blocks.context import CONTEXT
from meshwright.models.kernels.attention import cap
from meshwright.models.loss import chunk_tokens
from meshwright.models.model import vocab_size
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES
from meshwright.sharding.params import Tree


def score_texts(decoder: Decoder, texts: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns log-probability and greediness of every token of each text after its first.

    A token is greedy where no other is more probable. texts: tokens of each sequence, at least one.
    """
    if decoder.scores is None:
        everywhere = PartitionSpec()
        score_chunk = functools.partial(_score_chunk, decoder)
        decoder.scores = decoder.compiled(score_chunk, (decoder.specs, everywhere, everywhere))
    state, scores = decoder.start(texts), []
    first_slot = int(state.slot)
    settings, stops = Sampling().settings(), decoder.no_stops
    for _ in range(first_slot, decoder.end, decoder.bucket.chunk):
        state, *found = decoder.scores(decoder.weights.params, state, settings, stops, np.int32(0))
        scores.append([np.asarray(x) for x in found])
    logprobs_BT, greedy_BT = (np.concatenate(parts, 1) for parts in zip(*scores, strict=True))
    # What slot s scores is the token in slot s + 1.
    end = decoder.end - 1 - first_slot
    rows = [(row, slice(end - len(text) + 1, end)) for row, text in enumerate(texts)]
    return [(logprobs_BT[where], greedy_BT[where]) for where in rows]


def _score_chunk(
    decoder: Decoder, params: Tree, state: DecodeState, settings: Any, stops: Any, number: Any
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Feeds one chunk and scores the tokens that follow each of its tokens."""
    chunk, batch, run = decoder.bucket.chunk, state.first.shape[0], decoder.device_run.run
    x_BTD, table_VD, cache = decoder.hidden(params, state, chunk)
    labels_BT = lax.dynamic_slice_in_dim(state.tokens, state.slot + 1, chunk, 1)
    labels_T = decoder.local_tokens(jnp.maximum(labels_BT, 0))
    size = chunk_tokens(labels_T.shape[0], table_VD.shape[0], run.training.logits_mib)
    softcap = decoder.device_run.placed.spec.logit_softcap
    scores = token_scores(x_BTD[0], table_VD, labels_T, vocab_size(run.model), size, softcap)
    logprobs_BT, greedy_BT = (
        all_gather(all_gather(x, CONTEXT, 0)[: batch * chunk].reshape(batch, chunk), BATCH_AXES, 0) for x in scores
    )
    return dataclasses.replace(state, cache=cache, slot=state.slot + chunk), logprobs_BT, greedy_BT


def token_scores(
    x_TD: jax.Array, table_VD: jax.Array, labels_T: jax.Array, vocab: int, chunk: int, softcap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of each label, float32 [T], and whether no token has a larger logit, int32 [T].

    table_VD: this device's block of the unembedding.  chunk: tokens at a time; divides T. As `models.loss.token_losses`
    without a derivative, and with the comparison.
    """
    rows = table_VD.shape[0]
    row_V = axis_index(VOCAB_AXES) * rows + jnp.arange(rows)

    def scores(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_TD, labels_T = inputs
        logits_TV = jnp.einsum("td,vd->tv", x_TD, table_VD, preferred_element_type=jnp.float32)
        logits_TV = jnp.where(row_V < vocab, cap(logits_TV, softcap), -1e30)
        largest_T = all_reduce_max(logits_TV.max(-1), VOCAB_AXES)
        sum_T, label_T = all_reduce(
            (
                jnp.exp(logits_TV - largest_T[:, None]).sum(-1),
                jnp.where(labels_T[:, None] == row_V, logits_TV, 0.0).sum(-1),
            ),
            VOCAB_AXES,
        )
        return label_T - largest_T - jnp.log(sum_T), (label_T >= largest_T).astype(jnp.int32)

    parts = (x_TD.reshape(-1, chunk, x_TD.shape[1]), labels_T.reshape(-1, chunk))
    logprobs, greedy = lax.map(scores, parts)
    return logprobs.reshape(-1), greedy.reshape(-1)
