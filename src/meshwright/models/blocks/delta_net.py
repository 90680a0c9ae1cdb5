"""Linear attention by the gated delta rule: a short convolution, then a state that forgets
and is corrected.

Yang et al. 2024 (Gated DeltaNet, arXiv:2412.06464). A value head has a state S
[key size, value size], float32. A token with key k (of length 1), value v, log decay g <= 0 and
rate b in (0, 1) changes it, and its query q reads it:

    S <- exp(g) S;  S <- S + b k (v - k S);  out = q S

Chunks of the sequence are computed at once as matmuls (section 3.3, and arXiv:2406.06484): within a
chunk the corrections solve a unit lower triangular system, whose inverse is made of matmuls too; a
scan over the chunks carries the state. Nothing crosses from one document into the next: the state
is zero before a document's first token, and the convolution reads no token before it.

A sequence that `context` splits is computed in segments at once. After a segment the state is
affine in the state S before it, A S + B, and devices gather A and B of all segments and compose
those before their own:

    segment       0            1                   2
    A, B          A0, B0       A1, B1              A2, B2        of its own chunks, then gathered
    state before  0            B0                  A1 B0 + B1
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import all_gather
from meshwright.models.blocks.layers import linear, linears, rms_norm
from meshwright.models.blocks.recurrence import (
    Carried,
    abstract_carried,
    chunk_of,
    chunked,
    chunked_values,
    convolved,
    decays_of,
    last_inputs,
    lower_blocks,
    tokens_before,
    tokens_of_chunks,
    zero_carried,
)
from meshwright.models.model import ForwardContext, Gathered, Kind, MatmulSizes, Recurrence, Widths
from meshwright.models.remat import ATTN_OUT, QKV, recomputed
from meshwright.sharding.params import Param
from meshwright.sharding.sequence import SEGMENTS, SequenceSplit

_EPSILON = 1e-6
"""Constant of the norms of queries and keys, as in the released code."""
_HALVED_KEYS = 1.6
"""Arrays of keys that each halving of `ChannelDecays` adds, with their gradients. Compiled for
CPUs, 1024 tokens, 4 heads: 1.3 of 64 features, 1.6 of 128."""


@dataclasses.dataclass(frozen=True)
class DeltaSpec(Recurrence):
    """Linear attention of one layer, by the gated delta rule."""

    item = "linear attention"
    formula = "chunks of 64 tokens, and their states (models/blocks/delta_net.py; arXiv:2412.06464)"

    heads: int
    """Heads of queries and keys N."""
    groups: int
    """Value heads G of each of them; each has its own state."""
    key_size: int
    value_size: int
    taps: int
    """Tokens W that the convolution of queries, keys
    and values reads, the token itself included."""
    decays: int = 1
    """Decays of a state: one, or one for each channel of its key."""
    gate_rank: int = 0
    """Width of the products that decays and output gate are each projections of;
    0 projects them from the input."""

    @property
    def channels(self) -> int:
        """Features of a key head that pass the convolution: its query, key and values."""
        return 2 * self.key_size + self.groups * self.value_size

    @property
    def values(self) -> int:
        """Features of all values."""
        return self.heads * self.groups * self.value_size

    @property
    def state(self) -> int:
        """Elements of the states of all heads."""
        return self.values * self.key_size

    def widths(self, width: int, tensor: int) -> Widths:
        """Returns the widths on one of `tensor` devices.

        Queries, keys, values and output gate are saved,
        or the products of low rank that decays and gate are made of.
        """
        mixed, values = self.heads * self.channels / tensor, self.values / tensor
        if not self.gate_rank:
            return Widths(0, 0, 0, values, mixed + values, width, kept=mixed + values)
        low = 2 * self.gate_rank
        # The products of decays, and the decays, which are float32.
        decays = 3 * self.heads * self.groups * self.decays / tensor
        kept = mixed + 2 * values + decays
        return Widths(0, 0, 0, values, mixed + low / tensor, width + low, kept=kept)

    def chunk(self, seq: int) -> int:
        """Returns the tokens of a chunk: a power of two up to 64,
        so that the blocks of its matrices pair."""
        return chunk_of(seq)

    def carried(self, batch: int) -> Carried:
        """Returns the state of one layer: states are [N, B, G, key size, value size]."""
        inputs = (self.heads, batch, self.taps - 1, self.channels)
        states = (self.heads, batch, self.groups, self.key_size, self.value_size)
        return abstract_carried(inputs, states)

    def matmuls(self, seq: int) -> list[MatmulSizes]:
        """Returns the matmuls of a chunk of a sequence: [m, k] by [k, n],
        and how many there are, of all heads."""
        C, H, F, N = chunk_of(seq), self.key_size, self.value_size, self.heads
        levels = [1 << level for level in range(C.bit_length() - 1)]
        heads = self.groups * N
        inverse = [MatmulSizes(size, size, size, C // size * heads) for size in levels]
        scores = [MatmulSizes(C, H, C, 2 * N)]
        if self.decays > 1:
            # Of keys and of queries, second halves with first ones;
            # those of one token with one are sums.
            scores = [MatmulSizes(size, H, size, C // size * heads) for size in levels[1:]]
        return [
            *scores,
            *inverse,
            MatmulSizes(C, C, F, heads),
            MatmulSizes(C, C, H, heads),
            # Those of `_pass_chunk`, one chunk after another.
            MatmulSizes(C, C, F, heads, scanned=True),
            MatmulSizes(C, H, F, 2 * heads, scanned=True),
            MatmulSizes(H, C, F, heads, scanned=True),
        ]

    def gathered(self, batch: int, segment: int, dtype: str) -> dict[str, Gathered]:
        """Returns what a segment shares: the last inputs of its convolution,
        and A and B of its states."""
        tail = (self.heads, batch, min(self.taps - 1, segment), self.channels)
        size = self.key_size + self.value_size
        change = (self.heads, batch, self.groups, self.key_size, size)
        return {
            "inputs of the convolution": Gathered(jax.ShapeDtypeStruct(tail, dtype)),
            "changes of states": Gathered(jax.ShapeDtypeStruct(change, jnp.float32), inside=True),
        }

    def segment_matmuls(self, seq: int) -> list[MatmulSizes]:
        """Returns the matmuls of `_changes_of` for a chunk: A and B are a state of more columns."""
        C, H, size = chunk_of(seq), self.key_size, self.key_size + self.value_size
        heads = self.groups * self.heads
        return [
            MatmulSizes(C, H, size, heads, scanned=True),
            MatmulSizes(H, C, size, heads, scanned=True),
        ]

    def composition_matmuls(self, segments: int) -> list[MatmulSizes]:
        """Returns the matmuls of `_states_before` for a sequence: A of each segment
        with the state before it."""
        H, heads = self.key_size, self.groups * self.heads
        return [MatmulSizes(H, H, self.value_size, segments * heads, scanned=True)]

    def inner_bytes(self, seq: int) -> float:
        """Returns the bytes per token that the backward pass recomputes, float32,
        with their gradients.

        Per value head: nine matrices of a chunk, twelve of its keys or values,
        and the states before each chunk.
        """
        C = chunk_of(seq)
        matrices, rows = 9 * C, 6.0 * (self.key_size + self.value_size)
        if self.decays > 1:
            rows += _HALVED_KEYS * self.key_size * (C.bit_length() - 1)
        return 4.0 * (self.heads * self.groups * (matrices + rows) + 2 * self.state / C)


class DeltaInputs(NamedTuple):
    """Inputs of a layer's tokens, before the convolution.

    q and k are [B, T, N, key size], v is [B, T, N, G, value size]. decay is the log decay of each
    state, at most 0, or of each channel of its key: float32 [B, T, N, G] or [B, T, N, G, key size].
    rate is how much of a token's correction is written, in (0, 1): float32 [B, T, N, G].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    rate: jax.Array


def delta_net(
    x: DeltaInputs, taps_NFW: jax.Array, positions_BT: jax.Array, carried: Carried | None = None
) -> tuple[jax.Array, Carried]:
    """Returns the output of linear attention [B, T, N, G, H] in the dtype of the values,
    and what later tokens need.

    taps_NFW: of the convolution, the channels of a head in the order query, key, values;
    the last tap is the token's.
    positions_BT: positions within each document; a token at position 0 begins one.
    carried: from the tokens before these; None where there are none.
    """
    (B, T, N, H), (G, F) = x.k.shape, x.v.shape[3:]
    mixed_BTNF = _convolved_features(x)
    if carried is None:
        inputs = (N, B, taps_NFW.shape[-1] - 1, mixed_BTNF.shape[-1])
        carried = zero_carried(inputs, (N, B, G, H, F))
    joined_BTNF = jnp.concatenate([tokens_before(carried, mixed_BTNF.dtype), mixed_BTNF], 1)
    mixed = _after_convolution(x, joined_BTNF, taps_NFW, positions_BT)
    with jax.named_scope("delta rule"):
        out, states = gated_delta_rule(mixed, positions_BT == 0, carried.states)
    return out.astype(x.v.dtype), Carried(last_inputs(joined_BTNF[:, T:]), states)


def delta_net_of_segments(
    x: DeltaInputs, taps_NFW: jax.Array, positions_BT: jax.Array, sequence: SequenceSplit
) -> jax.Array:
    """Returns the output of `delta_net` for this device's tokens of sequences
    that `context` splits.

    The two segments of a device are computed as two sequences, [B SEGMENTS, T / SEGMENTS, ...].
    Sends, for each segment, the last W - 1 inputs of the convolution and A and B of the states, to
    all devices of `context`.
    """
    B, T = positions_BT.shape

    def split(array: jax.Array) -> jax.Array:
        return array.reshape(B * SEGMENTS, T // SEGMENTS, *array.shape[2:])

    segments = jax.tree.map(split, x)
    positions_BT = split(positions_BT)
    mixed_BTNF = _convolved_features(segments)
    before_BTNF = _inputs_before(mixed_BTNF, taps_NFW.shape[-1] - 1, sequence)
    joined_BTNF = jnp.concatenate([before_BTNF, mixed_BTNF], 1)
    mixed = _after_convolution(segments, joined_BTNF, taps_NFW, positions_BT)
    with jax.named_scope("delta rule"):
        out = gated_delta_rule_of_segments(mixed, positions_BT == 0, sequence)
    return out.astype(x.v.dtype).reshape(B, T, *out.shape[2:])


def _inputs_before(mixed_BTNF: jax.Array, count: int, sequence: SequenceSplit) -> jax.Array:
    """Returns the `count` tokens before each segment, zeros before a sequence,
    [B SEGMENTS, count, N, features].

    A segment of fewer tokens shares all it has, so what is gathered then is the sequence itself.
    """
    tail = min(count, mixed_BTNF.shape[1])
    last_BTNF = mixed_BTNF[:, mixed_BTNF.shape[1] - tail :]
    all_SBTNF = _gather_segments(last_BTNF, sequence)
    S, B, _, *features = all_SBTNF.shape
    ordered_BTNF = jnp.moveaxis(all_SBTNF, 0, 1).reshape(B, S * tail, *features)
    padded_BTNF = jnp.pad(ordered_BTNF, ((0, 0), (count, 0), (0, 0), (0, 0)))

    def before(segment: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(padded_BTNF, segment * tail, count, 1)

    pair = [before(segment) for segment in sequence.local_segments()]
    return jnp.stack(pair, 1).reshape(B * SEGMENTS, count, *features)


def _gather_segments(x: jax.Array, sequence: SequenceSplit) -> jax.Array:
    """Gathers [B SEGMENTS, ...] over `context` into [segments, B, ...],
    in the order of the sequence."""
    segments = jnp.moveaxis(x.reshape(-1, SEGMENTS, *x.shape[1:]), 1, 0)
    return all_gather(segments, ("context",), 0)[np.argsort(sequence.segments().reshape(-1))]


def _convolved_features(x: DeltaInputs) -> jax.Array:
    """Returns what the convolution reads: query, key and values
    of each head, [B, T, N, channels]."""
    return jnp.concatenate([x.q, x.k, x.v.reshape(*x.v.shape[:3], -1)], -1)


def _after_convolution(
    x: DeltaInputs, joined_BTNF: jax.Array, taps_NFW: jax.Array, positions_BT: jax.Array
) -> DeltaInputs:
    """Returns `x` with queries, keys and values after the convolution.
    joined_BTNF: with W - 1 tokens before."""
    H = x.k.shape[-1]
    mixed_BTNF = convolved(joined_BTNF, taps_NFW, positions_BT)
    q_BTNH, k_BTNH, v_BTNF = jnp.split(mixed_BTNF, (H, 2 * H), axis=-1)
    return x._replace(q=q_BTNH, k=k_BTNH, v=v_BTNF.reshape(x.v.shape))


@recomputed
def _gated(out_BTNGH: jax.Array, gate_BTNGH: jax.Array) -> jax.Array:
    return out_BTNGH * jax.nn.silu(gate_BTNGH.astype(jnp.float32)).astype(out_BTNGH.dtype)


class Chunks(NamedTuple):
    """Chunks of C tokens of each value head, [chunks, N, B, G, ...]: what does not depend
    on the state before them."""

    corrections: jax.Array
    """U = A diag(b) V, [C, value size]: what the chunk writes if the state before it is zero."""
    read_keys: jax.Array
    """W = A diag(b d) K, [C, key size]: by which the state
    before the chunk is read for corrections."""
    read_queries: jax.Array
    """diag(d) Q, [C, key size]: by which that state is read for the output."""
    scores: jax.Array
    """Q K' * D, [C, C]."""
    written_keys: jax.Array
    """Keys decayed to the end of the chunk, [C, key size]."""
    kept: jax.Array
    """Fraction of the state before the chunk that is left after it, [1 or key size]."""


def _unit(x: jax.Array) -> jax.Array:
    """Returns vectors of length 1 in float32, along the last dimension."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + _EPSILON)


def _chunks_of(x: DeltaInputs, starts_BT: jax.Array, C: int) -> Chunks:
    """Computes the parts of all chunks (Yang et al. 2024, section 3.3).

    Of a chunk with keys K, queries Q, values V, rates b and log decays g, let

        D_ij = exp(g_{j+1} + ... + g_i)   where j <= i are tokens of one document, and 0 elsewhere
        d_i  = exp(g_1 + ... + g_i)       where i is of the document before the chunk, 0 elsewhere
        A    = (I + strictly lower part of diag(b) (K K' * D))^-1

    Where each channel h of a key has a decay of its own (arXiv:2510.26692, section 3), D and d have
    one too: K K' * D is then sum_h K_ih K_jh D_ijh, and diag(d) K is d_ih K_ih.
    """
    key_size = x.k.shape[-1]
    q = chunked(_unit(x.q) * key_size**-0.5, C)
    k = chunked(_unit(x.k), C)
    v = chunked_values(x.v, C)
    rate = chunked_values(x.rate, C)
    decays = decays_of(x.decay, starts_BT, C)
    keys = decays.products(k, k)
    scores = decays.products(q, k)
    from_before = decays.from_before
    solve = unit_lower_inverse(jnp.tril(keys * rate[..., None], -1))

    k = k[:, :, :, None]
    q = q[:, :, :, None]
    return Chunks(
        corrections=solve @ (v * rate[..., None]),
        read_keys=solve @ (k * (rate[..., None] * from_before)),
        read_queries=q * from_before,
        scores=scores,
        written_keys=k * decays.to_end,
        kept=from_before[..., -1, :],
    )


def _pass_chunk(states: jax.Array, chunk: Chunks) -> tuple[jax.Array, jax.Array]:
    """Returns the states after a chunk and its output, [N, B, G, C, value size].

    With the state S before it:

        X   = U - W S
        out = diag(d) Q S + (Q K' * D) X
        S  <- kept S + (decayed K)' X
    """
    values = chunk.corrections - chunk.read_keys @ states
    out = chunk.read_queries @ states + chunk.scores @ values
    return _state_after(states, chunk, values), out


def _state_after(states: jax.Array, chunk: Chunks, values: jax.Array) -> jax.Array:
    """Returns what is left of the states before a chunk, and what it writes.
    values: X of `_pass_chunk`."""
    remaining = states * chunk.kept[..., None]
    return remaining + jnp.swapaxes(chunk.written_keys, -1, -2) @ values


# What a chunk computes is many times its inputs: the backward pass computes it again from them.
@functools.partial(jax.checkpoint, prevent_cse=False)
def gated_delta_rule(
    x: DeltaInputs, starts_BT: jax.Array, states: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, N, G, H], float32, and the states after the last token.

    x: after the convolution.
    starts_BT: whether a token begins a document.
    states: as `Carried` has them.
    """
    T = x.v.shape[1]
    chunks = _chunks_of(x, starts_BT, chunk_of(T))
    states, out = lax.scan(_pass_chunk, states, chunks)
    return tokens_of_chunks(out, T), states


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(2,))
def gated_delta_rule_of_segments(
    x: DeltaInputs, starts_BT: jax.Array, sequence: SequenceSplit
) -> jax.Array:
    """Returns the output of this device's segments, [B SEGMENTS, T / SEGMENTS, N, G, H], float32.

    x: after the convolution.  starts_BT: whether a token begins a document.
    """
    T = x.v.shape[1]
    chunks = _chunks_of(x, starts_BT, chunk_of(T))
    changes = _gather_segments(jnp.moveaxis(_changes_of(chunks), 1, 0), sequence)
    states = jnp.moveaxis(_states_before(changes, sequence), 1, 0)
    _, out = lax.scan(_pass_chunk, states, chunks)
    return tokens_of_chunks(out, T)


def _changes_of(chunks: Chunks) -> jax.Array:
    """Returns A and B side by side: a segment changes the state S before it into A S + B.

    They are the state after the segment whose columns began as the unit matrix, with nothing
    written, and as zeros: [N, B, G, key size, key size + value size].
    """
    H = chunks.read_keys.shape[-1]
    nothing_written = jnp.zeros_like(chunks.read_keys)
    corrections = jnp.concatenate([nothing_written, chunks.corrections], -1)
    unit = jnp.eye(H, corrections.shape[-1], dtype=corrections.dtype)
    first = jnp.broadcast_to(unit, (*corrections.shape[1:4], *unit.shape))

    def pass_chunk(state: jax.Array, chunk: Chunks) -> tuple[jax.Array, None]:
        return _state_after(state, chunk, chunk.corrections - chunk.read_keys @ state), None

    changes, _ = lax.scan(pass_chunk, first, chunks._replace(corrections=corrections))
    return changes


def _states_before(changes: jax.Array, sequence: SequenceSplit) -> jax.Array:
    """Returns the states before this device's segments, [B SEGMENTS, N, G, key size, value size].

    changes: A and B of all segments in order, [segments, B, N, G, key size, key size + value size].
    """
    H = changes.shape[-2]

    def pass_segment(state: jax.Array, change: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _multiply(change[..., :H], state) + change[..., H:], state

    empty = jnp.zeros_like(changes[0, ..., H:])
    _, before = lax.scan(pass_segment, empty, changes)
    local = before[jnp.stack(sequence.local_segments())]
    return jnp.moveaxis(local, 0, 1).reshape(-1, *empty.shape[1:])


_multiply = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Returns the inverse of I + `lower`, which is strictly lower triangular, [..., C, C]
    with C a power of two.

    Inverses of the diagonal blocks are joined in pairs: [[A, 0], [B, D]] has
    [[A', 0], [-D' B A', D']]. No power of the matrix is taken, which would grow where the inverse
    does not.
    """
    *lead, C, _ = lower.shape
    inverse, size = jnp.ones((*lead, C, 1, 1), lower.dtype), 1
    while size < C:
        pairs = C // (2 * size)
        below = lower.reshape(*lead, pairs, 2, size, pairs, 2, size)[..., :, 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(below, axis1=-4, axis2=-2), -1, -3)
        halves = inverse.reshape(*lead, pairs, 2, size, size)
        first, second = halves[..., 0, :, :], halves[..., 1, :, :]
        corner = -_multiply(_multiply(second, below), first)
        inverse, size = lower_blocks(first, corner, second), 2 * size
    return inverse[..., 0, :, :]


def _inverse_bwd(inverse: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_multiply(_multiply(transposed, g), transposed), -1),)


unit_lower_inverse.defvjp(lambda lower: (unit_lower_inverse(lower),) * 2, _inverse_bwd)


@dataclasses.dataclass(frozen=True)
class DeltaNet(Kind):
    """Linear attention of one kind of layers, with an output gate (Qwen3-Next)."""

    delta: DeltaSpec
    epsilon: float
    """Constant of the norm of the output."""
    out_std: float
    """Initial standard deviation of the output projection."""

    scope = "linear attention"

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        L, D, N, G, W = layers, self.width, self.delta.heads, self.delta.groups, self.delta.taps
        H, F = self.delta.key_size, self.delta.value_size
        return {
            "query": Param((L, D, N, H), "LDNH", role="qkv"),
            "key": Param((L, D, N, H), "LDNH", role="qkv"),
            "value": Param((L, D, N, G, F), "LDNGH", role="qkv"),
            "value_gate": Param((L, D, N, G, F), "LDNGH", role="qkv"),
            "rate": Param((L, D, N, G), "LDNG", role="projection"),
            "step": Param((L, D, N, G), "LDNG", role="projection"),
            "step_bias": Param((L, N, G), "LNG", "ones", precision="float32", stored="float32"),
            "a_log": Param((L, N, G), "LNG", "log_uniform", precision="float32", stored="float32"),
            "query_taps": Param((L, N, H, W), "LNHW"),
            "key_taps": Param((L, N, H, W), "LNHW"),
            "value_taps": Param((L, N, G, F, W), "LNGHW"),
            "value_norm": Param((L, F), "LH", "ones"),
            "attention_out": Param(
                (L, N, G, F, D), "LNGHD", std=self.out_std, role="attention_out", contract=3
            ),
        }

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `LayerSpec`."""
        return {"recurrence": self.delta}

    def build(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the attention of a step's tokens, or of a decoding step's.

        q, k, v, gate, b, s = h Wq, h Wk, h Wv, h Wg, h Wb, h Ws
        decay = -exp(a_log) softplus(s + step_bias);  rate = sigmoid(b)
        out = (rms_norm(delta_net(q, k, v, decay, rate)) * silu(gate)) Wo
        """

        def mix(h_BTD: jax.Array, w: dict[str, Any]) -> jax.Array:
            x, gate_BTNGH = self.inputs(ctx, h_BTD, w)
            out_BTNGH = checkpoint_name(self._recur(ctx, x, self._taps(w)), ATTN_OUT)
            out_BTNGH = ctx.record("attention heads", out_BTNGH, split="tensor")
            normal_BTNGH = rms_norm(out_BTNGH, w["value_norm"], self.epsilon)
            gated_BTNGH = self.gated(normal_BTNGH, gate_BTNGH)
            return ctx.row_parallel(_project, gated_BTNGH, w["attention_out"])

        return mix

    def inputs(
        self, ctx: ForwardContext, h_BTD: jax.Array, w: dict[str, Any]
    ) -> tuple[DeltaInputs, jax.Array]:
        """Returns the inputs of linear attention, and its output gate."""
        names = ("query", "key", "value", "value_gate", "rate", "step")
        products = ctx.column_parallel(linears, h_BTD, [w[name] for name in names])
        q_BTNH, k_BTNH, v_BTNGH, gate_BTNGH = (checkpoint_name(x, QKV) for x in products[:4])
        rate_BTNG, step_BTNG = (x.astype(jnp.float32) for x in products[4:])
        decay_BTNG = -jnp.exp(w["a_log"]) * jax.nn.softplus(step_BTNG + w["step_bias"])
        rate_BTNG = jax.nn.sigmoid(rate_BTNG)
        return DeltaInputs(q_BTNH, k_BTNH, v_BTNGH, decay_BTNG, rate_BTNG), gate_BTNGH

    def gated(self, out_BTNGH: jax.Array, gate_BTNGH: jax.Array) -> jax.Array:
        """Returns the normalised output times the SiLU of its gate."""
        return _gated(out_BTNGH, gate_BTNGH)

    def _taps(self, w: dict[str, Any]) -> jax.Array:
        """Returns the taps of query, key and values of each head, [N, channels, W]."""
        values = w["value_taps"]
        flat = values.reshape(values.shape[0], -1, values.shape[-1])
        return jnp.concatenate([w["query_taps"], w["key_taps"], flat], 1)

    def _recur(self, ctx: ForwardContext, x: DeltaInputs, taps_NFW: jax.Array) -> jax.Array:
        """Returns linear attention of a step's tokens, of segments, or of a decoding step's."""

        def step(
            x: DeltaInputs, positions_BT: jax.Array, carried: Carried | None
        ) -> tuple[jax.Array, Carried]:
            return delta_net(x, taps_NFW, positions_BT, carried)

        def split_step(
            x: DeltaInputs, positions_BT: jax.Array, sequence: SequenceSplit
        ) -> jax.Array:
            return delta_net_of_segments(x, taps_NFW, positions_BT, sequence)

        return ctx.recur(step, x, split_step)


_project = functools.partial(linear, contract=3)
