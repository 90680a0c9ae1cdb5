"""Parts that recurrent layers share: a short convolution, chunks of tokens, decays of states, what decoding carries.

A recurrence (blocks/delta_net.py, blocks/mamba2.py) convolves each channel with its own taps and keeps a state per head
that decays from token to token. Tokens are computed in chunks of C, all chunks at once as one batch of matmuls:

    tokens [B, T, N, ...]  ->  chunks [chunks, N, B, C, ...]  ->  output [B, T, N, ...]

Nothing crosses from one document into the next: the state is zero before a document's first token, and the convolution
reads no token before it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.models.remat import recomputed


class Carried(NamedTuple):
    """State of a layer that its later tokens need, of one size after any number of tokens."""

    inputs: Any
    """Inputs of the convolution of the last W - 1 tokens, [N, B, W - 1, channels], float32."""
    states: Any
    """States of the heads, [N, B, ...], float32."""


def abstract_carried(inputs: tuple[int, ...], states: tuple[int, ...]) -> Carried:
    """Returns the shapes of what a layer carries as abstract arrays."""
    return Carried(
        jax.ShapeDtypeStruct(inputs, jnp.float32), jax.ShapeDtypeStruct(states, jnp.float32)
    )


def zero_carried(inputs: tuple[int, ...], states: tuple[int, ...]) -> Carried:
    """Returns what a layer carries before the first token of a sequence."""
    return Carried(jnp.zeros(inputs, jnp.float32), jnp.zeros(states, jnp.float32))


def tokens_before(carried: Carried, dtype: Any) -> jax.Array:
    """Returns the carried inputs of the convolution as tokens, [B, W - 1, N, channels]."""
    return carried.inputs.transpose(1, 2, 0, 3).astype(dtype)


def last_inputs(tail_BTNF: jax.Array) -> jax.Array:
    """Returns the last W - 1 inputs of the convolution as `Carried` has them."""
    return tail_BTNF.transpose(2, 0, 1, 3).astype(jnp.float32)


@recomputed
def convolved(
    joined_BTNF: jax.Array,
    taps_NFW: jax.Array,
    positions_BT: jax.Array,
    bias_NF: jax.Array | None = None,
) -> jax.Array:
    """Returns the SiLU of the causal convolution and its bias. joined_BTNF: with the W - 1 tokens before."""
    out_BTNF = causal_convolution(joined_BTNF, taps_NFW, positions_BT)
    if bias_NF is not None:
        out_BTNF = out_BTNF + bias_NF
    return jax.nn.silu(out_BTNF)


def causal_convolution(
    x_BTNF: jax.Array, taps_NFW: jax.Array, positions_BT: jax.Array
) -> jax.Array:
    """Convolves each channel with its own W taps, within documents.

    x_BTNF: the W - 1 tokens before `positions_BT`, then the tokens of `positions_BT`.
    """
    taps, T = taps_NFW.shape[-1], positions_BT.shape[1]
    out = jnp.zeros_like(x_BTNF[:, :T])
    for back in range(taps):
        first = taps - 1 - back
        seen_BT = positions_BT >= back
        out += (
            jnp.where(seen_BT[..., None, None], x_BTNF[:, first : first + T], 0)
            * taps_NFW[..., first]
        )
    return out


def chunk_of(tokens: int) -> int:
    """Returns the tokens of a chunk of a sequence of `tokens`: a power of two, at most 64."""
    return min(64, 1 << max(0, tokens - 1).bit_length())


def chunked(x: jax.Array, C: int) -> jax.Array:
    """Splits [B, T, N, ...] into [chunks, N, B, C, ...], float32; zeros fill the last chunk and change nothing."""
    B, T = x.shape[:2]
    padding = ((0, 0), (0, -T % C), *((0, 0),) * (x.ndim - 2))
    x = jnp.pad(x.astype(jnp.float32), padding)
    return jnp.moveaxis(x.reshape(B, -1, C, *x.shape[2:]), (1, 3), (0, 1))


def chunked_values(x: jax.Array, C: int) -> jax.Array:
    """Splits [B, T, N, G, ...] into [chunks, N, B, G, C, ...], as `chunked` does."""
    return jnp.moveaxis(chunked(x, C), 4, 3)


def tokens_of_chunks(out: jax.Array, T: int) -> jax.Array:
    """Returns [B, T, N, G, F] from [chunks, N, B, G, C, F]."""
    _, N, B, G, _, F = out.shape
    return out.transpose(2, 0, 4, 1, 3, 5).reshape(B, -1, N, G, F)[:, :T]


class Decays(NamedTuple):
    """Decays of states between tokens of a chunk, 0 across documents: [chunks, N, B, G, ...], float32."""

    within: jax.Array
    """From token j to token i of the chunk: exp(g_{j+1} + ... + g_i) where j <= i, [C, C]."""
    from_before: jax.Array
    """From before the chunk to token i: exp(g_1 + ... + g_i), [C]."""
    to_end: jax.Array
    """From token i to the end of the chunk: exp(g_{i+1} + ... + g_C), [C]."""


def decays_of(decay_BTNG: jax.Array, starts_BT: jax.Array, C: int) -> Decays:
    """Returns the decays of chunks of C tokens.

    decay_BTNG: log decay g of each state, at most 0.  starts_BT: whether a token begins a document.
    """
    # The first token of a document decays nothing: what was there is left out below.
    decay = chunked_values(jnp.where(starts_BT[..., None, None], 0.0, decay_BTNG), C)
    # Documents are counted from the one before the chunk, which is 0: [chunks, 1, B, 1, C].
    document = jnp.cumsum(chunked(starts_BT[:, :, None], C)[:, 0], -1)[:, None, :, None]

    total = jnp.cumsum(decay, -1)
    same_document = document[..., :, None] == document[..., None, :]
    earlier = jnp.tril(jnp.ones((C, C), bool)) & same_document
    exponent = jnp.where(earlier, total[..., :, None] - total[..., None, :], -jnp.inf)
    to_end = jnp.exp(total[..., -1:] - total) * (document == document[..., -1:])
    return Decays(jnp.exp(exponent), jnp.exp(total) * (document == 0), to_end)
