"""State space layer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a short convolution, then
a state that decays.

A head has a state S [state size, H], float32. A token with key k (B of the paper), query q (C),
value v (x), step t > 0 and the head's rate a < 0 changes it and reads it; keys and queries are
shared by the heads of a group:

    S <- exp(a t) S + k (t v)';  out = q S + skip v

Chunks of the sequence are computed at once as matmuls (section 6, state space duality): with M_ij
the decay from token j to token i of the chunk,

    inside a chunk     out = (Q K' * M) V
    of the chunk       S   = (decayed K)' V
    from before it     out += decayed Q S_before

and a scan over the chunks multiplies and adds states. Nothing crosses from one document into the
next: the state is zero before a document's first token, and the convolution reads no token before
it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import all_gather, axis_index
from meshwright.errors import divisors, refuse
from meshwright.models.blocks.layers import attention_projection, linears
from meshwright.models.blocks.recurrence import (
    Carried,
    ChannelDecays,
    Decays,
    abstract_carried,
    chunk_of,
    chunked,
    chunked_values,
    convolved,
    decays_of,
    last_inputs,
    tokens_before,
    tokens_of_chunks,
    zero_carried,
)
from meshwright.models.model import ForwardContext, Kind, MatmulSizes, Recurrence, Widths
from meshwright.models.remat import ATTN_OUT, QKV, recomputed
from meshwright.sharding.params import Param
from meshwright.sharding.placement import replicates_kv_heads


@dataclasses.dataclass(frozen=True)
class SpaceSpec(Recurrence):
    """State space of one layer."""

    item = "state space"
    formula = "chunks of 64 tokens, and their states (models/blocks/mamba2.py; arXiv:2405.21060)"

    heads: int
    """Heads N, each with a state."""
    head_size: int
    """Size H of a head's value and output."""
    groups: int
    """Groups K of heads, each with one key and one query."""
    state_size: int
    """Size of a key and a query."""
    taps: int
    """Tokens W that the convolution of values, keys
    and queries reads, the token itself included."""

    def __post_init__(self) -> None:
        each, over = divmod(self.heads, self.groups)
        legal = min(divisors(self.heads), key=lambda number: abs(number - self.groups))
        refuse(
            (
                over != 0,
                f"{self.groups} groups of {self.heads} heads of a state space",
                f"a group has as many heads as another, and {self.heads} = "
                f"{self.groups} * {each} + {over}",
                f"--model.mamba-groups {legal}",
            )
        )

    @property
    def values(self) -> int:
        """Features of all values."""
        return self.heads * self.head_size

    def widths(self, width: int, tensor: int) -> Widths:
        """Returns the widths on one of `tensor` devices.

        Values, keys, queries and output gate are saved;
        what saves everything keeps what the convolution returns too.
        """
        groups = self.groups if replicates_kv_heads(self.groups, tensor) else self.groups / tensor
        values = self.values / tensor
        mixed = values + 2 * groups * self.state_size
        return Widths(0, 0, 0, values, mixed + values, width, kept=mixed)

    def chunk(self, seq: int) -> int:
        """Returns the tokens of a chunk: a power of two up to 64."""
        return chunk_of(seq)

    def carried(self, batch: int) -> Carried:
        """Returns the state of one layer: states are [N, B, state size, H].

        Each head has the inputs of its group's key and query: `tensor` may have more devices
        than there are groups.
        """
        channels = self.head_size + 2 * self.state_size
        inputs = (self.heads, batch, self.taps - 1, channels)
        states = (self.heads, batch, self.state_size, self.head_size)
        return abstract_carried(inputs, states)

    def matmuls(self, seq: int) -> list[MatmulSizes]:
        """Returns the matmuls of a chunk of a sequence: [m, k] by [k, n],
        and how many there are, of all heads."""
        C, S, H = chunk_of(seq), self.state_size, self.head_size
        return [
            MatmulSizes(C, S, C, self.groups),
            MatmulSizes(C, C, H, self.heads),
            MatmulSizes(S, C, H, self.heads),
            MatmulSizes(C, S, H, self.heads),
        ]

    def inner_bytes(self, seq: int) -> float:
        """Returns the bytes per token that the backward pass recomputes, float32,
        with their gradients.

        Per head: five matrices of a chunk, six of its values, and the states of each chunk and
        before it; per group: keys and queries.
        """
        C = chunk_of(seq)
        of_heads = 5 * C + 6 * self.head_size + 4 * self.head_size * self.state_size / C
        return 4.0 * (self.heads * of_heads + 4 * self.groups * self.state_size)


class SpaceInputs(NamedTuple):
    """Inputs of a layer's tokens on a device, before the convolution.

    value is [B, T, N, H]; key and query are [B, T, K, state size];
    step is [B, T, N], above 0, float32.
    """

    value: jax.Array
    key: jax.Array
    query: jax.Array
    step: jax.Array


class Convolution(NamedTuple):
    """Taps [..., W] and biases of the channels of values [N, H], keys
    and queries [K, state size]."""

    value: tuple[jax.Array, jax.Array]
    key: tuple[jax.Array, jax.Array]
    query: tuple[jax.Array, jax.Array]


def mamba2(
    x: SpaceInputs,
    convolution: Convolution,
    rate_N: jax.Array,
    skip_N: jax.Array,
    positions_BT: jax.Array,
    carried: Carried | None = None,
) -> tuple[jax.Array, Carried]:
    """Returns the output of a state space [B, T, N, H] in the dtype of the values,
    and what later tokens need.

    rate_N: below 0, float32.
    skip_N: factor of each token's own value.
    positions_BT: positions within each document; a token at position 0 begins one.
    carried: from the tokens before these; None where there are none.
    """
    T, dtype = x.value.shape[1], x.value.dtype
    if carried is None:
        carried = _zero_carried(x, convolution)
    joined = _joined(x, tokens_before(carried, dtype))
    mixed = _after_convolution(joined, convolution, positions_BT)
    with jax.named_scope("state space"):
        starts_BT = positions_BT == 0
        out_BTNH, states = state_space(mixed, rate_N, skip_N, starts_BT, carried.states)
    return out_BTNH.astype(dtype), Carried(last_inputs(_tail(joined, T)), states)


def _zero_carried(x: SpaceInputs, convolution: Convolution) -> Carried:
    """Returns what a layer carries before the first token."""
    B, _, N, H = x.value.shape
    S, taps = x.key.shape[-1], convolution.value[0].shape[-1]
    return zero_carried((N, B, taps - 1, H + 2 * S), (N, B, S, H))


def _joined(x: SpaceInputs, before_BTNF: jax.Array) -> SpaceInputs:
    """Returns values, keys and queries with the W - 1 tokens before them.
    before_BTNF: as `_tail` joins them."""
    heads, size = x.value.shape[2:]
    groups, state_size = x.key.shape[2:]
    value, key, query = jnp.split(before_BTNF, (size, size + state_size), -1)
    each = heads // groups  # heads of a group, whose inputs are those of its first head
    return x._replace(
        value=jnp.concatenate([value, x.value], 1),
        key=jnp.concatenate([key[:, :, ::each], x.key], 1),
        query=jnp.concatenate([query[:, :, ::each], x.query], 1),
    )


def _tail(joined: SpaceInputs, first: int) -> jax.Array:
    """Returns value, key and query of each head from a token on, [B, W - 1, N, channels]."""
    each = joined.value.shape[2] // joined.key.shape[2]
    of_heads = [jnp.repeat(a[:, first:], each, 2) for a in (joined.key, joined.query)]
    return jnp.concatenate([joined.value[:, first:], *of_heads], -1)


def _after_convolution(
    joined: SpaceInputs, convolution: Convolution, positions_BT: jax.Array
) -> SpaceInputs:
    """Returns values, keys and queries of the tokens after the convolution."""

    def of(part_BTNF: jax.Array, taps_and_bias: tuple[jax.Array, jax.Array]) -> jax.Array:
        taps_NFW, bias_NF = taps_and_bias
        return convolved(part_BTNF, taps_NFW, positions_BT, bias_NF)

    return joined._replace(
        value=of(joined.value, convolution.value),
        key=of(joined.key, convolution.key),
        query=of(joined.query, convolution.query),
    )


class Chunks(NamedTuple):
    """Chunks of C tokens of K groups of G heads, float32."""

    keys: jax.Array
    """K, [chunks, K, B, C, state size]."""
    queries: jax.Array
    """Q, [chunks, K, B, C, state size]."""
    values: jax.Array
    """V, values times their steps, [chunks, K, B, G, C, H]."""
    decays: Decays | ChannelDecays
    """M and the decays from before a chunk and to its end, [chunks, K, B, G, ...]."""


def _chunks_of(x: SpaceInputs, rate_N: jax.Array, starts_BT: jax.Array, C: int) -> Chunks:
    """Splits the tokens into chunks, with the heads of each group."""
    (B, T, N, H), K = x.value.shape, x.key.shape[2]
    decay = (x.step * rate_N).reshape(B, T, K, N // K)
    stepped = x.value.astype(jnp.float32) * x.step[..., None]
    values = chunked_values(stepped.reshape(B, T, K, N // K, H), C)
    return Chunks(chunked(x.key, C), chunked(x.query, C), values, decays_of(decay, starts_BT, C))


def _add_state(state: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the states after a chunk, and those before it.
    chunk: what it keeps of them, and what it adds."""
    kept, added = chunk
    return state * kept + added, state


def _outputs(chunks: Chunks, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the output of all chunks [chunks, K, B, G, C, H], and the states after the last.

    states: before the first chunk, [K, B, G, state size, H].

        out = (Q K' * M) V + decayed Q S_before;   S_after = kept S_before + (decayed K)' V
    """
    k, q, v, decays = chunks
    out = decays.products(q, k) @ v
    added = jnp.einsum("mkbcs,mkbgch->mkbgsh", k, v * decays.to_end)
    from_before = decays.from_before
    after, before = lax.scan(_add_state, states, (from_before[..., -1:, :], added))
    read = jnp.einsum("mkbcs,mkbgsh->mkbgch", q, before)
    return out + read * from_before, after


# What a chunk computes is many times its inputs: the backward pass computes it again from them.
@functools.partial(jax.checkpoint, prevent_cse=False)
def state_space(
    x: SpaceInputs,
    rate_N: jax.Array,
    skip_N: jax.Array,
    starts_BT: jax.Array,
    states: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, N, H], float32, and the states after the last token.

    x: after the convolution.
    starts_BT: whether a token begins a document.
    states: as `Carried` has them.
    """
    T, K = x.key.shape[1:3]
    chunks = _chunks_of(x, rate_N, starts_BT, chunk_of(T))
    of_groups = states.reshape(K, -1, *states.shape[1:]).swapaxes(1, 2)
    out, after = _outputs(chunks, of_groups)
    out_BTNH = tokens_of_chunks(out, T).reshape(x.value.shape)
    out_BTNH += skip_N[:, None] * x.value.astype(jnp.float32)
    return out_BTNH, after.swapaxes(1, 2).reshape(states.shape)


def _gated(out_BTNH: jax.Array, gate_BTNH: jax.Array) -> jax.Array:
    """Returns the output times the SiLU of its gate, float32."""
    return out_BTNH.astype(jnp.float32) * jax.nn.silu(gate_BTNH.astype(jnp.float32))


# Both compute the gated output from what the backward pass has:
# in float32 it would be saved in twice the bytes.
@recomputed
def _sums_of_squares(out_BTNH: jax.Array, gate_BTNH: jax.Array) -> jax.Array:
    """Returns the sum of the squares of each gated head [B, T, N]."""
    return jnp.square(_gated(out_BTNH, gate_BTNH)).sum(-1)


@recomputed
def _scaled(
    out_BTNH: jax.Array, gate_BTNH: jax.Array, inverse_rms_BTN: jax.Array, scale_NH: jax.Array
) -> jax.Array:
    """Returns the gated heads over their root mean square, times their scale,
    in the dtype of the output."""
    normal = _gated(out_BTNH, gate_BTNH) * inverse_rms_BTN[..., None]
    return (normal * scale_NH.astype(jnp.float32)).astype(out_BTNH.dtype)


@dataclasses.dataclass(frozen=True)
class Mamba2(Kind):
    """State space of one kind of layers, with an output gate and a norm
    of each group's heads together."""

    space: SpaceSpec
    epsilon: float
    """Constant of the norm of the output."""
    out_std: float
    """Initial standard deviation of the output projection."""
    step_floor: float = 0.0
    """Least step of a token (Nemotron-H in `transformers`)."""

    scope = "state space"

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        L, D, W = layers, self.width, self.space.taps
        N, H, K, S = (
            self.space.heads,
            self.space.head_size,
            self.space.groups,
            self.space.state_size,
        )

        def of_head(init: Any) -> Param:
            return Param((L, N), "LN", init, precision="float32", stored="float32")

        channels = {"value": (N, H, "NH"), "key": (K, S, "KH"), "query": (K, S, "KH")}
        params = {"value_gate": Param((L, D, N, H), "LDNH", role="qkv")}
        for name, (heads, size, letters) in channels.items():
            params[name] = Param((L, D, heads, size), f"LD{letters}", role="qkv")
            params[f"{name}_taps"] = Param((L, heads, size, W), f"L{letters}W")
            params[f"{name}_taps_bias"] = Param((L, heads, size), f"L{letters}", "zeros")
        return params | {
            "step": Param((L, D, N), "LDN", role="projection"),
            "step_bias": of_head("ones"),
            "a_log": of_head("log_uniform"),
            "skip": of_head("ones"),
            "value_norm": Param((L, N, H), "LNH", "ones"),
            "attention_out": Param(
                (L, N, H, D), "LNHD", std=self.out_std, role="attention_out", contract=2
            ),
        }

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `LayerSpec`."""
        return {"recurrence": self.space}

    def build(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the state space of a step's tokens, or of a decoding step's.

        gate, v, k, q, s = h Wg, h Wv, h Wk, h Wq, h Ws
        y = mamba2(v, k, q, step = max(softplus(s + step_bias), floor), rate = -exp(a_log))
        out = (group_rms_norm(y * silu(gate))) Wo
        """

        def mix(h_BTD: jax.Array, w: dict[str, Any]) -> jax.Array:
            x, gate_BTNH = self._inputs(ctx, h_BTD, w)
            convolution, rate_N = self._convolution(w), -jnp.exp(w["a_log"])

            def step(
                x: SpaceInputs, positions_BT: jax.Array, carried: Carried | None
            ) -> tuple[jax.Array, Carried]:
                return mamba2(x, convolution, rate_N, w["skip"], positions_BT, carried)

            out_BTNH = checkpoint_name(ctx.recur(step, x), ATTN_OUT)
            out_BTNH = ctx.record("attention heads", out_BTNH, split="tensor")
            normal_BTNH = self._normalised(out_BTNH, gate_BTNH, w["value_norm"])
            return ctx.row_parallel(attention_projection, normal_BTNH, w["attention_out"])

        return mix

    def _inputs(
        self, ctx: ForwardContext, h_BTD: jax.Array, w: dict[str, Any]
    ) -> tuple[SpaceInputs, jax.Array]:
        """Returns the inputs of the state space, and its output gate."""
        names = ("value_gate", "value", "key", "query", "step")
        products = ctx.column_parallel(linears, h_BTD, [w[name] for name in names])
        gate, value, key, query = (checkpoint_name(x, QKV) for x in products[:4])
        step_BTN = jax.nn.softplus(products[4].astype(jnp.float32) + w["step_bias"])
        if self.step_floor:
            step_BTN = jnp.maximum(step_BTN, self.step_floor)
        key, query = self._own_groups(key, 2), self._own_groups(query, 2)
        return SpaceInputs(value, key, query, step_BTN), gate

    def _convolution(self, w: dict[str, Any]) -> Convolution:
        """Returns taps and biases of this device's channels."""
        of_groups = []
        for name in ("key", "query"):
            taps = self._own_groups(w[f"{name}_taps"], 0)
            of_groups.append((taps, self._own_groups(w[f"{name}_taps_bias"], 0)))
        return Convolution((w["value_taps"], w["value_taps_bias"]), *of_groups)

    def _own_groups(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns the groups of this device's heads.
        x: of all groups, where `tensor` has more devices than they are.

        Gradients of their parameters are summed over `tensor`,
        as for any parameter that every device of it has.
        """
        devices = lax.axis_size("tensor")
        if not replicates_kv_heads(self.space.groups, devices):
            return x
        mine = axis_index(("tensor",)) * self.space.groups // devices
        return lax.dynamic_slice_in_dim(x, mine, 1, axis=dim)

    def _normalised(
        self, out_BTNH: jax.Array, gate_BTNH: jax.Array, scale_NH: jax.Array
    ) -> jax.Array:
        """Divides the gated heads of each group by the root mean square of all of them together."""
        N, H = out_BTNH.shape[2:]
        sums_BTN = _sums_of_squares(out_BTNH, gate_BTNH)
        each = self.space.heads // self.space.groups
        if replicates_kv_heads(self.space.groups, lax.axis_size("tensor")):
            first = axis_index(("tensor",)) * self.space.groups // lax.axis_size("tensor") * each
            all_BTN = all_gather(sums_BTN, ("tensor",), 2)
            sums_BTN = lax.dynamic_slice_in_dim(all_BTN, first, each, axis=2)
        mean_BTK = sums_BTN.reshape(*sums_BTN.shape[:2], -1, each).sum(-1) / (each * H)
        inverse_BTK = lax.rsqrt(mean_BTK + self.epsilon)
        inverse_BTN = jnp.repeat(inverse_BTK, N // inverse_BTK.shape[-1], -1)
        return _scaled(out_BTNH, gate_BTNH, inverse_BTN, scale_NH)
