"""Attention to keys and values that are gathered over `context`: the strategy `all_gather`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import all_gather
from meshwright.models.blocks.ring import gathered_attention
from meshwright.models.kernels.attention import Positions, sequence_positions
from meshwright.models.kernels.choose import Kernels
from meshwright.models.remat import ATTN_OUT
from meshwright.sharding.sequence import SequenceSplit


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
