"""Context parallelism: attention over a sequence that is sharded over `context`,
in four strategies.

- `all_gather`: gathers keys and values of the complete sequence (Llama 3, arXiv:2407.21783,
  section 3.3.2).
- `ring`: passes blocks of keys and values around a ring of devices, and combines the attention to
  each by its log-sum-exp (Liu et al. 2023, arXiv:2310.01889). The backward pass sends the blocks
  around again instead of saving them.
- `ulysses`: exchanges heads for positions, so each device attends over the complete sequence with
  some of the heads (Jacobs et al. 2023, arXiv:2309.14509).
- `usp`: a ring of Ulysses groups, for fewer heads than devices (Fang
  and Zhao 2024, arXiv:2405.07719).

Load balancing in `ring` and `all_gather`: each device holds one chunk from the front and one from
the back of the sequence (zigzag, sharding/sequence.py), so the causal mask gives every device equal
work; pairs of chunks that it masks entirely are not computed (blocks/ring.py). The scores are
computed by the platform's kernel under every strategy.

Segments and positions of the complete sequence are known to every device;
only queries, keys and values are sent.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import axis_index, grouped_all_to_all
from meshwright.models.kernels.attention import Kernels, Scores
from meshwright.models.model import Attend
from meshwright.models.remat import ATTN_OUT
from meshwright.sharding.placement import replicates_kv_heads
from meshwright.sharding.sequence import SequenceSplit

CONTEXT = ("context",)


def build_attend(
    sequence: SequenceSplit,
    segments_BT: jax.Array,
    kernels: Kernels,
    observed: list[jax.Array] | None = None,
) -> Attend:
    """Builds the attention of a context strategy.
    segments_BT: documents of the complete sequence, on every device.

    observed: list to which the log-sum-exp of each call is appended, by kernels that have one.
    """

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None,
        scores: Scores | None = None,
    ) -> jax.Array:
        parts = sequence.group
        segments = segments_BT
        rest: dict[str, Any] = {}
        if scores is not None:
            if scores.chunk is not None:
                segments = chunked_segments(segments_BT, scores.chunk)
                window = min(window or scores.chunk, scores.chunk)
            scores = _scores_of_group(scores, sequence)
            computed = (scores.sinks_N, scores.softcap, scores.index)
            if any(part is not None for part in computed):
                rest["scores"] = scores
        if parts > 1:
            q, k, v = (grouped_all_to_all(x, "context", parts, 2, 1) for x in (q, k, v))
        lse: jax.Array | None = None
        with_lse = getattr(kernels.self_attention, "with_lse", None)
        if sequence.groups > 1:
            from meshwright.models.blocks.ring import attend_over_devices

            out, lse = attend_over_devices(
                sequence, kernels, (q, k, v), segments, window, rest.get("scores")
            )
        elif with_lse is not None:
            out, lse = with_lse(q, k, v, segments, window=window, **rest)
        else:
            out = kernels.self_attention(q, k, v, segments, window=window, **rest)
        if observed is not None and lse is not None:
            observed.append(lse)
        if parts == 1:
            return out
        # Kernel and ring name their own residuals; the output after the exchange is another array,
        # which the output projection reads.
        return checkpoint_name(grouped_all_to_all(out, "context", parts, 1, 2), ATTN_OUT)

    return attend


def _scores_of_group(scores: Scores, sequence: SequenceSplit) -> Scores:
    """Returns the scores with the sinks of the heads that this device of a Ulysses group has."""
    if scores.sinks_N is None or sequence.group == 1:
        return scores
    size = scores.sinks_N.shape[0] // sequence.group
    first: Any = 0
    if sequence.shards > 1:
        first = (lax.axis_index("context") % sequence.group) * size
    sinks_N = lax.dynamic_slice_in_dim(scores.sinks_N, first, size)
    return dataclasses.replace(scores, sinks_N=sinks_N)


def chunked_segments(segments_BT: jax.Array, chunk: int) -> jax.Array:
    """Returns documents that end where those of `segments_BT` end and
    after every `chunk` tokens, numbered in order."""
    position_T = jnp.arange(segments_BT.shape[1])
    changes_BT = jnp.diff(segments_BT, axis=1)
    begins_BT = jnp.concatenate([jnp.ones_like(segments_BT[:, :1]), changes_BT], 1) != 0
    first_BT = lax.cummax(jnp.where(begins_BT, position_T, 0), axis=1)
    begins_chunk_BT = (position_T - first_BT) % chunk == 0
    return jnp.cumsum(begins_chunk_BT, axis=1, dtype=segments_BT.dtype)


def with_own_kv_head(attend: Attend) -> Attend:
    """Returns `attend` for fewer key/value heads than devices
    of `tensor`: each takes the head of its own queries.

    Gradients of the projections are summed over `tensor`,
    as for any parameter that every device of it has.
    """

    def own(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, **kind: Any) -> jax.Array:
        devices = lax.axis_size("tensor")
        heads = k_BTKH.shape[2]
        if replicates_kv_heads(heads, devices):
            head = axis_index(("tensor",)) * heads // devices
            k_BTKH = lax.dynamic_slice_in_dim(k_BTKH, head, 1, axis=2)
            v_BTKH = lax.dynamic_slice_in_dim(v_BTKH, head, 1, axis=2)
        return attend(q_BTNH, k_BTKH, v_BTKH, **kind)

    return own
