"""State space layer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a short convolution, then a state that decays.

A head has a state S [state size, H], float32. A token with key k (B of the paper), query q (C), value v (x), step
t > 0 and the head's rate a < 0 changes it and reads it; keys and queries are shared by the heads of a group:

    S <- exp(a t) S + k (t v)';  out = q S + skip v

Chunks of the sequence are computed at once as matmuls (section 6, state space duality): with M_ij the decay from token j
to token i of the chunk,

    inside a chunk     out = (Q K' * M) V
    of the chunk       S   = (decayed K)' V
    from before it     out += decayed Q S_before

and a scan over the chunks multiplies and adds states. Nothing crosses from one document into the next: the state is
zero before a document's first token, and the convolution reads no token before it.
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
from meshwright.models.blocks.delta_net import (
    causal_convolution,
    chunk_of,
    chunked,
    chunked_values,
    decays_of,
)
from meshwright.models.blocks.layers import attention_projection, linears
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
    """Tokens W that the convolution of values, keys and queries reads, the token itself included."""

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

        Values, keys, queries and output gate are saved; what saves everything keeps what the convolution returns too.
        """
        groups = self.groups if replicates_kv_heads(self.groups, tensor) else self.groups / tensor
        values = self.values / tensor
        mixed = values + 2 * groups * self.state_size
        return Widths(0, 0, 0, values, mixed + values, width, kept=mixed)

    def chunk(self, seq: int) -> int:
        """Returns the tokens of a chunk: a power of two up to 64."""
        return chunk_of(seq)

    def carried(self, batch: int) -> "Carried":
        """Returns the state of one layer.

        Each head has the inputs of its group's key and query: `tensor` may have more devices than there are groups.
        """
        channels = self.head_size + 2 * self.state_size
        inputs = (self.heads, batch, self.taps - 1, channels)
        states = (self.heads, batch, self.state_size, self.head_size)
        return Carried(
            jax.ShapeDtypeStruct(inputs, jnp.float32), jax.ShapeDtypeStruct(states, jnp.float32)
        )

    def matmuls(self, seq: int) -> list[MatmulSizes]:
        """Returns the matmuls of a chunk of a sequence: [m, k] by [k, n], and how many there are, of all heads."""
        C, S, H = chunk_of(seq), self.state_size, self.head_size
        return [
            MatmulSizes(C, S, C, self.groups),
            MatmulSizes(C, C, H, self.heads),
            MatmulSizes(S, C, H, self.heads),
            MatmulSizes(C, S, H, self.heads),
        ]

    def inner_bytes(self, seq: int) -> float:
        """Returns the bytes per token that the backward pass recomputes, float32, with their gradients.

        Per head: five matrices of a chunk, six of its values, and the states of each chunk and before it; per group: keys
        and queries.
        """
        C = chunk_of(seq)
        of_heads = 5 * C + 6 * self.head_size + 4 * self.head_size * self.state_size / C
        return 4.0 * (self.heads * of_heads + 4 * self.groups * self.state_size)


class Carried(NamedTuple):
    """State and last inputs that later tokens need, of one size after any number of tokens."""

    inputs: Any
    """Inputs of the convolution of the last W - 1 tokens, [N, B, W - 1, channels], float32: value, key, query."""
    states: Any
    """[N, B, state size, H], float32."""


class SpaceInputs(NamedTuple):
    """Inputs of a layer's tokens on a device, before the convolution.

    value is [B, T, N, H]; key and query are [B, T, K, state size]; step is [B, T, N], above 0, float32.
    """

    value: jax.Array
    key: jax.Array
    query: jax.Array
    step: jax.Array


class Convolution(NamedTuple):
    """Taps [..., W] and biases of the channels of values [N, H], keys and queries [K, state size]."""

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
    """Returns the output of a state space [B, T, N, H] in the dtype of the values, and what later tokens need.

    rate_N: below 0, float32.  skip_N: factor of each token's own value.  positions_BT: positions within each document; a
    token at position 0 begins one.  carried: from the tokens before these; None where there are none.
    """
    (B, T, N, H), (K, S) = x.value.shape, x.key.shape[2:]
    if carried is None:
        taps = convolution.value[0].shape[-1]
        inputs = jnp.zeros((N, B, taps - 1, H + 2 * S), jnp.float32)
        carried = Carried(inputs, jnp.zeros((N, B, S, H), jnp.float32))
    before_BTNF = carried.inputs.transpose(1, 2, 0, 3).astype(x.value.dtype)
    v_before, k_before, q_before = jnp.split(before_BTNF, (H, H + S), -1)
    each = N // K  # heads of a group, whose inputs are those of its first head
    value = jnp.concatenate([v_before, x.value], 1)
    key = jnp.concatenate([k_before[:, :, ::each], x.key], 1)
    query = jnp.concatenate([q_before[:, :, ::each], x.query], 1)
    v_BTNH = _mixed(value, *convolution.value, positions_BT)
    k_BTKS = _mixed(key, *convolution.key, positions_BT)
    q_BTKS = _mixed(query, *convolution.query, positions_BT)
    with jax.named_scope("state space"):
        mixed = SpaceInputs(v_BTNH, k_BTKS, q_BTKS, x.step)
        starts_BT = positions_BT == 0
        out_BTNH, states = state_space(mixed, rate_N, skip_N, starts_BT, carried.states)
    of_heads = [jnp.repeat(a[:, T:], each, 2) for a in (key, query)]
    last = jnp.concatenate([value[:, T:], *of_heads], -1).transpose(2, 0, 1, 3)
    return out_BTNH.astype(x.value.dtype), Carried(last.astype(jnp.float32), states)


@recomputed
def _mixed(
    joined_BTNF: jax.Array, taps_NFW: jax.Array, bias_NF: jax.Array, positions_BT: jax.Array
) -> jax.Array:
    return jax.nn.silu(causal_convolution(joined_BTNF, taps_NFW, positions_BT) + bias_NF)


def _add_state(state: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the states after a chunk, and those before it. chunk: what it keeps of them, and what it adds."""
    kept, added = chunk
    return state * kept[..., None, None] + added, state


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

    x: after the convolution.  starts_BT: whether a token begins a document.  states: as `Carried` has them.
    """
    (B, T, N, H), (K, S) = x.value.shape, x.key.shape[2:]
    G, C = N // K, chunk_of(T)
    decay = (x.step * rate_N).reshape(B, T, K, G)
    decays = decays_of(decay, starts_BT, C)
    stepped = x.value.astype(jnp.float32) * x.step[..., None]
    v = chunked_values(stepped.reshape(B, T, K, G, H), C)  # [chunks, K, B, G, C, H]
    k, q = chunked(x.key, C), chunked(x.query, C)  # [chunks, K, B, C, S]

    scores = jnp.einsum("mkbcs,mkbjs->mkbcj", q, k)[:, :, :, None] * decays.within
    out = scores @ v
    added = jnp.einsum("mkbcs,mkbgch->mkbgsh", k, v * decays.to_end[..., None])
    before = states.reshape(K, G, B, S, H).swapaxes(1, 2)
    after, before = lax.scan(_add_state, before, (decays.from_before[..., -1], added))
    read = jnp.einsum("mkbcs,mkbgsh->mkbgch", q, before)
    out += read * decays.from_before[..., None]

    out_BTNH = out.transpose(2, 0, 4, 1, 3, 5).reshape(B, -1, N, H)[:, :T]
    out_BTNH += skip_N[:, None] * x.value.astype(jnp.float32)
    return out_BTNH, after.swapaxes(1, 2).reshape(N, B, S, H)


def _gated(out_BTNH: jax.Array, gate_BTNH: jax.Array) -> jax.Array:
    """Returns the output times the SiLU of its gate, float32."""
    return out_BTNH.astype(jnp.float32) * jax.nn.silu(gate_BTNH.astype(jnp.float32))


# Both compute the gated output from what the backward pass has: in float32 it would be saved in twice the bytes.
@recomputed
def _sums_of_squares(out_BTNH: jax.Array, gate_BTNH: jax.Array) -> jax.Array:
    """Returns the sum of the squares of each gated head [B, T, N]."""
    return jnp.square(_gated(out_BTNH, gate_BTNH)).sum(-1)


@recomputed
def _scaled(
    out_BTNH: jax.Array, gate_BTNH: jax.Array, inverse_rms_BTN: jax.Array, scale_NH: jax.Array
) -> jax.Array:
    """Returns the gated heads over their root mean square, times their scale, in the dtype of the output."""
    normal = _gated(out_BTNH, gate_BTNH) * inverse_rms_BTN[..., None]
    return (normal * scale_NH.astype(jnp.float32)).astype(out_BTNH.dtype)


@dataclasses.dataclass(frozen=True)
class Mamba2(Kind):
    """State space of one kind of layers, with an output gate and a norm of each group's heads together."""

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
        """Returns the state space of a step's tokens, or of a decoding step's."""
        names = ("value_gate", "value", "key", "query", "step")

        def mix(h_BTD: jax.Array, w: dict[str, Any]) -> jax.Array:
            products = ctx.column_parallel(linears, h_BTD, [w[name] for name in names])
            gate, value, key, query = (checkpoint_name(x, QKV) for x in products[:4])
            step_BTN = jax.nn.softplus(products[4].astype(jnp.float32) + w["step_bias"])
            if self.step_floor:
                step_BTN = jnp.maximum(step_BTN, self.step_floor)
            x = SpaceInputs(value, self._own_groups(key, 2), self._own_groups(query, 2), step_BTN)
            convolution = self._convolution(w)

            def step(
                x: SpaceInputs, positions_BT: jax.Array, carried: Carried | None
            ) -> tuple[jax.Array, Carried]:
                rate_N = -jnp.exp(w["a_log"])
                return mamba2(x, convolution, rate_N, w["skip"], positions_BT, carried)

            out_BTNH = checkpoint_name(ctx.recur(step, x), ATTN_OUT)
            out_BTNH = ctx.record("attention heads", out_BTNH, split="tensor")
            normal_BTNH = self._normalised(out_BTNH, gate, w["value_norm"])
            return ctx.row_parallel(attention_projection, normal_BTNH, w["attention_out"])

        return mix

    def _convolution(self, w: dict[str, Any]) -> Convolution:
        """Returns taps and biases of this device's channels."""
        of_groups = []
        for name in ("key", "query"):
            taps = self._own_groups(w[f"{name}_taps"], 0)
            of_groups.append((taps, self._own_groups(w[f"{name}_taps_bias"], 0)))
        return Convolution((w["value_taps"], w["value_taps_bias"]), *of_groups)

    def _own_groups(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns the groups of this device's heads. x: of all groups, where `tensor` has more devices than they are.

        Gradients of their parameters are summed over `tensor`, as for any parameter that every device of it has.
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
