"""Parts that recurrent layers share: a short convolution, chunks of tokens, decays
of states, what decoding carries.

A recurrence (blocks/delta_net.py, blocks/mamba2.py) convolves each channel with its own taps and
keeps a state per head that decays from token to token. Tokens are computed in chunks of C, all
chunks at once as one batch of matmuls:

    tokens [B, T, N, ...]  ->  chunks [chunks, N, B, C, ...]  ->  output [B, T, N, ...]

Nothing crosses from one document into the next: the state is zero before a document's first token,
and the convolution reads no token before it.
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
    """Returns the SiLU of the causal convolution and its bias.
    joined_BTNF: with the W - 1 tokens before."""
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
    """Splits [B, T, N, ...] into [chunks, N, B, C, ...], float32;
    zeros fill the last chunk and change nothing."""
    B, T = x.shape[:2]
    padding = ((0, 0), (0, -T % C), *((0, 0),) * (x.ndim - 2))
    x = jnp.pad(x.astype(jnp.float32), padding)
    return jnp.moveaxis(x.reshape(B, -1, C, *x.shape[2:]), (1, 3), (0, 1))


def chunked_values(x: jax.Array, C: int) -> jax.Array:
    """Splits [B, T, N, G, ...] into [chunks, N, B, G, C, ...], as `chunked` does."""
    return jnp.moveaxis(chunked(x, C), 4, 3)


def tokens_of_chunks(out: jax.Array, T: int) -> jax.Array:
    """Returns [B, T, N, G, F] from [chunks, N, B, G, C, F], the inverse of `chunked_values`."""
    _, N, B, G, _, F = out.shape
    return out.transpose(2, 0, 4, 1, 3, 5).reshape(B, -1, N, G, F)[:, :T]


class Decays(NamedTuple):
    """Decays of states with one log decay g per token, between tokens of a chunk:
    [chunks, N, B, G, ...], float32."""

    total: jax.Array
    """Log decays from before the chunk to token i: g_1 + ... + g_i, [C]."""
    document: jax.Array
    """Number of the token's document, 0 for the one before the chunk, [C]."""

    @property
    def from_before(self) -> jax.Array:
        """Decays from before the chunk to token i: exp(g_1 + ...
        + g_i), 0 in later documents, [C, 1]."""
        return (jnp.exp(self.total) * (self.document == 0))[..., None]

    @property
    def to_end(self) -> jax.Array:
        """Decays from token i to the end of the chunk: exp(g_{i+1} + ...
        + g_C), 0 in documents before, [C, 1]."""
        same_document = self.document == self.document[..., -1:]
        return (jnp.exp(self.total[..., -1:] - self.total) * same_document)[..., None]

    def products(self, x: jax.Array, k: jax.Array) -> jax.Array:
        """Returns the products of x of token i with k of token j, decayed, [C, C];
        x and k are [chunks, N, B, C, H].

        P_ij = x_i k_j exp(g_{j+1} + ...
        + g_i) where j <= i are tokens of one document, and 0 elsewhere.
        """
        C = self.total.shape[-1]
        earlier = jnp.tril(jnp.ones((C, C), bool)) & _same_document(self.document)
        difference = self.total[..., :, None] - self.total[..., None, :]
        decays = jnp.exp(jnp.where(earlier, difference, -jnp.inf))
        return jnp.einsum("mnbch,mnbsh->mnbcs", x, k)[:, :, :, None] * decays


class ChannelDecays(NamedTuple):
    """Decays of states with a log decay for each channel h of the key, as `Decays`.

    Decays within a chunk are not a factor of the products of tokens. The chunk is halved: with i in
    the second half, j in the first and m the last token of the first,

        exp(g_{j+1} + ... + g_i) = exp(g_{m+1} + ... + g_i) exp(g_{j+1} + ... + g_m)

    whose factors are at most 1, however long the chunk and however fast the decay. So the products
    of the second half with the first are a matmul. Those within each half are made in the same way:
    blocks of 1, 2, 4, ... tokens.
    """

    halves: tuple[tuple[jax.Array, jax.Array], ...]
    """Of blocks of 1, 2, 4, ... tokens: decays from the first half's end to i, to the first half's
    end from j, each [pairs of blocks, size, H]."""
    total: jax.Array
    """g_1 + ... + g_i, [C, H]."""
    rest: jax.Array
    """g_{i+1} + ... + g_C, [C, H]."""
    document: jax.Array
    """Number of the token's document, 0 for the one before the chunk, [C]."""

    @property
    def from_before(self) -> jax.Array:
        """Decays from before the chunk to token i, 0 in later documents, [C, H]."""
        return jnp.exp(self.total) * (self.document == 0)[..., None]

    @property
    def to_end(self) -> jax.Array:
        """Decays from token i to the end of the chunk, 0 in documents before, [C, H]."""
        return jnp.exp(self.rest) * (self.document == self.document[..., -1:])[..., None]

    def products(self, x: jax.Array, k: jax.Array) -> jax.Array:
        """Returns the products of x of token i with k of token j, decayed, [C, C];
        x and k are [chunks, N, B, C, H].

        P_ij = sum_h x_ih k_jh exp(g_{j+1,h} + ...
        + g_ih) where j <= i are tokens of one document, and 0 elsewhere.
        """
        x, k = x[:, :, :, None], k[:, :, :, None]
        products = (x * k).sum(-1)[..., None, None]
        for from_middle, to_middle in self.halves:
            size = from_middle.shape[-2]
            first_k, _ = _pairs(k, size)
            _, second_x = _pairs(x, size)
            corner = (second_x * from_middle) @ jnp.swapaxes(first_k * to_middle, -1, -2)
            first, second = products[..., 0::2, :, :], products[..., 1::2, :, :]
            products = lower_blocks(first, corner, second)
        return jnp.where(_same_document(self.document), products[..., 0, :, :], 0.0)


def decays_of(decay: jax.Array, starts_BT: jax.Array, C: int) -> Decays | ChannelDecays:
    """Returns the decays of chunks of C tokens, 0 across documents.

    decay: log decays g, at most 0, [B, T, N, G],
    or of each channel of a key, [B, T, N, G, key size].
    starts_BT: whether a token begins a document.
    """
    # The first token of a document decays nothing: what was there is left out by its document.
    starts = jnp.expand_dims(starts_BT, tuple(range(2, decay.ndim)))
    of_channels = decay.ndim == 5
    decay = chunked_values(jnp.where(starts, 0.0, decay), C)
    # Documents are counted from the one before the chunk, which is 0: [chunks, 1, B, 1, C].
    document = jnp.cumsum(chunked(starts_BT[:, :, None], C)[:, 0], -1)[:, None, :, None]
    if of_channels:
        return _channel_decays(decay, document)
    return Decays(jnp.cumsum(decay, -1), document)


def _channel_decays(decay: jax.Array, document: jax.Array) -> ChannelDecays:
    """Adds log decays [..., C, H] within blocks of 1, 2, 4, ...
    tokens: no difference of large sums is taken."""
    C = decay.shape[-2]
    total, rest = decay, jnp.zeros_like(decay)  # within each block
    halves = []
    size = 1
    while size < C:
        first_total, second_total = _pairs(total, size)
        first_rest, second_rest = _pairs(rest, size)
        halves.append((jnp.exp(second_total), jnp.exp(first_rest)))
        longer_total = second_total + first_total[..., -1:, :]
        longer_rest = first_rest + second_total[..., -1:, :]
        total = jnp.stack([first_total, longer_total], -3).reshape(decay.shape)
        rest = jnp.stack([longer_rest, second_rest], -3).reshape(decay.shape)
        size *= 2
    return ChannelDecays(tuple(halves), total, rest, document)


def _same_document(document: jax.Array) -> jax.Array:
    return document[..., :, None] == document[..., None, :]


def _pairs(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first and the second of each pair of blocks
    of `size` tokens, [..., pairs, size, H]."""
    *lead, C, H = x.shape
    pairs = x.reshape(*lead, C // (2 * size), 2, size, H)
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def lower_blocks(first: jax.Array, corner: jax.Array, second: jax.Array) -> jax.Array:
    """Returns [[first, 0], [corner, second]]."""
    top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)
