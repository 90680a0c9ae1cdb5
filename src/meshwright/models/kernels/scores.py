"""Scores of attention beyond scaling and a causal mask: soft caps, attention sinks, chunks of positions.

A sink is a learned logit of each head that takes part in the softmax and adds nothing to the output (GPT-OSS; Xiao et
al. 2023, arXiv:2309.17453): one more key, with a value of zeros. No kernel has to know it. From output and log-sum-exp

    lse' = log(exp(lse) + exp(sink)),  output' = exp(lse - lse') output

and every backward pass takes output and log-sum-exp over all keys (kernels/chunks.py), so lse' and output' give it the
gradients of queries, keys and values. The parts of a ring are combined first.

Chunked attention (Llama 4) is attention within documents that end after every `chunk` tokens, and within a window of
that size, by which kernels skip blocks.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from meshwright.models.kernels.chunks import Result


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of one layer's attention."""

    sinks_N: jax.Array | None = None
    """Logit of each of this device's query heads that adds nothing to the output; None has no sinks."""
    softcap: float | None = None
    """Cap of the scaled scores (`cap`; Gemma 2, arXiv:2408.00118, section 2); None has no cap."""
    chunk: int | None = None
    """Tokens of a document after which attention begins anew; None attends within documents."""


def add_sinks(result: "Result", sinks_N: jax.Array | None) -> "Result":
    """Returns attention to all keys and to the sinks."""
    if sinks_N is None:
        return result
    out_BTNH, lse_BNT = result
    whole_BNT = jnp.logaddexp(lse_BNT, sinks_N.astype(jnp.float32)[None, :, None])
    weight_BTN = jnp.exp(lse_BNT - whole_BNT).swapaxes(1, 2)
    weighted_BTNH = out_BTNH.astype(jnp.float32) * weight_BTN[..., None]
    return result._replace(out_BTNH=weighted_BTNH.astype(out_BTNH.dtype), lse_BNT=whole_BNT)


def sinks_gradient(result: "Result", g_BTNH: jax.Array, sinks_N: jax.Array | None) -> Any:
    """Returns the gradient of the sinks. result: attention to all keys and to the sinks.  g_BTNH: of its output.

    With weights p of the keys and p' of the sink, output = sum p v, and the derivative by the sink is -p' output.
    """
    if sinks_N is None:
        return None
    inner_BNT = jnp.einsum("btnh,btnh->bnt", g_BTNH, result.out_BTNH, preferred_element_type=jnp.float32)
    weight_BNT = jnp.exp(sinks_N.astype(jnp.float32)[None, :, None] - result.lse_BNT)
    return -(weight_BNT * inner_BNT).sum((0, 2)).astype(sinks_N.dtype)


def own_sinks(scores: Scores, part: jax.Array | int, parts: int) -> Scores:
    """Returns the scores of a part of this device's heads. part: its number of `parts` of equal size."""
    if scores.sinks_N is None or parts == 1:
        return scores
    size = scores.sinks_N.shape[0] // parts
    return dataclasses.replace(scores, sinks_N=lax.dynamic_slice_in_dim(scores.sinks_N, part * size, size))


def chunked_segments(segments_BT: jax.Array, chunk: int) -> jax.Array:
    """Returns documents that end where those of `segments_BT` end and after every `chunk` tokens, numbered in order."""
    place_T = jnp.arange(segments_BT.shape[1])
    begins_BT = jnp.concatenate([jnp.ones_like(segments_BT[:, :1]), jnp.diff(segments_BT, axis=1)], 1) != 0
    first_BT = lax.cummax(jnp.where(begins_BT, place_T, 0), axis=1)
    return jnp.cumsum((place_T - first_BT) % chunk == 0, axis=1, dtype=segments_BT.dtype)


def cap(x: jax.Array, softcap: float | None) -> jax.Array:
    """Returns c tanh(x / c), which is within -c and c and near x where x is small; x itself without a cap c."""
    return x if softcap is None else softcap * jnp.tanh(x / softcap)


def cap_gradient(g: jax.Array, capped: jax.Array, softcap: float | None) -> jax.Array:
    """Returns the gradient of x from that of the capped x: times 1 - (capped / c)^2."""
    return g if softcap is None else g * (1 - jnp.square(capped / softcap))
