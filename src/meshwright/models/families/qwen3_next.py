"""Qwen3-Next (Qwen team 2025; its published configuration): three layers of linear attention to one of full attention.

A layer is a Mixtral layer with another first half. Of `full_attention_interval` layers the last has gated attention: an
output gate of each feature, and a rotation of the first `rotary_fraction` of a head. The others have a gated delta net
(models/blocks/delta_net.py), of N key heads with G value heads each:

    h = rms_norm(x);  q, k, v, z, b, a = column_parallel(h)
    out = delta_net(q, k, v, decay = -exp(a_log) softplus(a + step_bias), rate = sigmoid(b))
    x += row_parallel((rms_norm(out) * silu(z)) o)

All layers have experts, and a shared one whose output a sigmoid scales. Norms multiply by 1 + scale.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import sequence_all_gather, sequence_reduce_scatter
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.blocks.delta_net import DeltaInputs, DeltaSpec, delta_net
from meshwright.models.blocks.linear import attention_projection, linear, linears
from meshwright.models.blocks.norm import rms_norm, rms_norm_plus_one
from meshwright.models.blocks.rotary import apply_rope
from meshwright.models.families.llama import AttentionHalf, output_std, rotary_angles, shrunk_sizes, swiglu
from meshwright.models.families.mixtral import Mixtral, routed_experts, routing_metrics
from meshwright.models.model import Aux, ForwardContext, Layer, LayerSpec, Metrics, Model, ModelSpec, Pattern
from meshwright.models.remat import ATTN_OUT, ATTN_RESIDUAL, QKV
from meshwright.sharding.params import GatherParams, Param, Tree


@dataclasses.dataclass(frozen=True)
class Qwen3Next(Mixtral):
    """Configuration of a hybrid of linear and full attention, with experts in all layers.

    Of `Mixtral`, it has no dense layers, no ungated shared experts, and no sliding window; queries and keys of full
    attention are normalised, each head alone.

    Example:
        >>> model = mw.Qwen3Next(vocab=32000, width=512, layers=4, heads=8, kv_heads=2, experts=16)
        >>> [layer.stack for layer in model.spec().layers]
        ['linear_blocks', 'linear_blocks', 'linear_blocks', 'blocks']
    """

    full_attention_interval: int = 4
    """Layers of which the last has full attention, and the others linear attention."""
    linear_heads: int = 4
    """Heads of queries and keys of linear attention."""
    linear_value_heads: int = 8
    """Value heads of linear attention; each group of them shares a key head."""
    linear_key_size: int = 32
    """Size of a query and a key of linear attention."""
    linear_value_size: int = 32
    """Size of a value of linear attention."""
    convolution_taps: int = 4
    """Tokens that the convolution before linear attention reads, the token itself included."""
    rotary_fraction: float = 0.25
    """Fraction of a head of full attention that rotates."""
    shared_mlp: int = 384
    """Feed-forward width F of the shared expert."""
    norm_epsilon: float = 1e-6
    """Constant added to the mean square in RMSNorm."""
    aux_loss_weight: float = 0.001
    """Weight of the load-balancing loss, summed over layers."""
    router_z_loss_weight: float = 0.0
    """Weight of the router's z-loss, summed over layers (ST-MoE, arXiv:2202.08906, equation 5)."""

    _unused: ClassVar[dict[str, Any]] = {
        "sliding_window": None, "qkv_bias": "none", "out_bias": "none", "qk_norm": "none", "norm_place": "before",
        "shared_experts": 0, "dense_layers": 0,
    }  # fmt: skip

    @property
    def delta(self) -> DeltaSpec:
        """Linear attention of a layer that has it."""
        groups = self.linear_value_heads // self.linear_heads
        sizes = (self.linear_key_size, self.linear_value_size)
        return DeltaSpec(self.linear_heads, groups, *sizes, self.convolution_taps)

    @property
    def rotary_size(self) -> int:
        """Features of a head of full attention that rotate."""
        return int(self.attention.head_size * self.rotary_fraction)

    def is_full(self, place: int) -> bool:
        """Whether the layer at a place, counted from any whole period, has full attention."""
        return (place + 1) % self.full_attention_interval == 0

    def params(self) -> Tree:
        """Returns the parameter descriptions; `linear_blocks` and `blocks` are stacked over their layers."""
        _check(self)
        full = sum(map(self.is_full, range(self.layers)))
        tree: Tree = {**super().params(), "final_norm": Param((self.width,), "D", "zeros")}
        tree["linear_blocks"] = {**_delta_params(self, self.layers - full), **_expert_params(self, self.layers - full)}
        tree["blocks"] = {**_attention_params(self, full), **_expert_params(self, full)}
        return tree

    def spec(self) -> ModelSpec:
        """Returns the layers by turns."""
        _check(self)
        spec = super().spec()
        attention = dataclasses.replace(self.attention, normalises_qk=True, gates_output=True)
        full = dataclasses.replace(spec.layers[0], attention=attention)
        recurrent = LayerSpec("linear_blocks", None, full.experts, self.delta)
        layers = tuple(full if self.is_full(place) else recurrent for place in range(self.layers))
        return dataclasses.replace(spec, layers=layers, period=self.full_attention_interval)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Pattern]:  # type: ignore[override]
        """Returns the layers of a period, those of each stack in their order."""
        recurrent = _layer(self, ctx, "linear_blocks", _delta_half(self, ctx))
        full = _layer(self, ctx, "blocks", _gated_half(self, ctx))
        return {"linear_blocks": (recurrent,) * (self.full_attention_interval - 1), "blocks": (full,)}

    def unembed(self, params: Tree, x_BTD: jax.Array, gather_params: GatherParams) -> tuple[jax.Array, jax.Array]:
        """Returns the normalised hidden states [B, T, D] and the unembedding [V/stage+tensor, D]."""
        final_D = gather_params(params["final_norm"], "final_norm")
        name = self.spec().embedding
        table_VD = gather_params(params[name], name)
        with jax.named_scope("unembedding"):
            return sequence_all_gather(rms_norm_plus_one(x_BTD, final_D, self.norm_epsilon), 1), table_VD

    def layer_metrics(self, aux: dict[str, Aux], sequences: int) -> Metrics:
        """Returns the routing metrics of a step, averaged over layers."""
        both = jax.tree.map(lambda *a: jnp.concatenate(a), aux["linear_blocks"], aux["blocks"])
        return routing_metrics(both, self.layers, sequences)

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these, with periods of two layers."""
        sizes = shrunk_sizes(self, shape)
        return dataclasses.replace(
            self, layers=2 * layers, full_attention_interval=2, expert_mlp=sizes["mlp"], shared_mlp=sizes["mlp"],
            linear_heads=shape.tensor, linear_value_heads=2 * shape.tensor, linear_key_size=8, linear_value_size=8,
            rotary_fraction=0.5, **sizes,
        )  # fmt: skip


def _check(c: Qwen3Next) -> None:
    for name, value in c._unused.items():
        if getattr(c, name) != value:
            raise ConfigError(
                f"model.{name} = {getattr(c, name)!r} in Qwen3-Next",
                "all of its layers have experts and a gated shared one, its full attention reads all tokens before it "
                "and normalises each head of queries and keys",
                f"model.{name} = {value!r}",
            )
    for asked, truth, wrong, fix in (
        (
            f"{c.layers} layers of which every {c.full_attention_interval}-th has full attention",
            "at least one layer has full attention, and one linear attention",
            not 2 <= c.full_attention_interval <= c.layers,
            f"--model.full-attention-interval {max(2, min(c.full_attention_interval, c.layers))}",
        ),
        (
            f"{c.linear_value_heads} value heads of linear attention for {c.linear_heads} key heads",
            "each key head has the same number of value heads, one at least",
            c.linear_value_heads < c.linear_heads or c.linear_value_heads % c.linear_heads != 0,
            f"--model.linear-value-heads {2 * c.linear_heads}",
        ),
        (
            f"a rotation of {c.rotary_fraction} of a head of {c.attention.head_size} features",
            f"{c.rotary_size} features rotate, and they rotate in pairs",
            not 2 <= c.rotary_size <= c.attention.head_size or c.rotary_size % 2 != 0,
            "--model.rotary-fraction 0.25 with heads of a multiple of 8 features",
        ),
        (
            f"a convolution of {c.convolution_taps} taps",
            "it reads the token before at least",
            c.convolution_taps < 2,
            "--model.convolution-taps 4",
        ),
    ):
        if wrong:
            raise ConfigError(asked, truth, fix)


def _norms(c: Qwen3Next, layers: int) -> dict[str, Param]:
    return {name: Param((layers, c.width), "LD", "zeros") for name in ("attention_norm", "mlp_norm")}


def _attention_params(c: Qwen3Next, layers: int) -> dict[str, Param]:
    """Parameters of gated attention, with the norms before both halves of the layers."""
    L, D, N, K, H = layers, c.width, c.heads, c.kv_heads, c.attention.head_size
    return {
        **_norms(c, layers),
        "query": Param((L, D, N, H), "LDNH", role="qkv"),
        "query_gate": Param((L, D, N, H), "LDNH", role="qkv"),
        "key": Param((L, D, K, H), "LDKH", role="qkv"),
        "value": Param((L, D, K, H), "LDKH", role="qkv"),
        "query_norm": Param((L, H), "LH", "zeros"),
        "key_norm": Param((L, H), "LH", "zeros"),
        "attention_out": Param((L, N, H, D), "LNHD", std=output_std(c), role="attention_out", contract=2),
    }


def _delta_params(c: Qwen3Next, layers: int) -> dict[str, Param]:
    """Parameters of a gated delta net, with the norms before both halves of the layers."""
    L, D, N, G, W = layers, c.width, c.delta.heads, c.delta.groups, c.delta.taps
    H, F = c.delta.key_size, c.delta.value_size
    return {
        **_norms(c, layers),
        "query": Param((L, D, N, H), "LDNH", role="qkv"),
        "key": Param((L, D, N, H), "LDNH", role="qkv"),
        "value": Param((L, D, N, G, F), "LDNGH", role="qkv"),
        "value_gate": Param((L, D, N, G, F), "LDNGH", role="qkv"),
        "rate": Param((L, D, N, G), "LDNG", role="projection"),
        "step": Param((L, D, N, G), "LDNG", role="projection"),
        "step_bias": Param((L, N, G), "LNG", "ones", precision="float32"),
        "a_log": Param((L, N, G), "LNG", "log_uniform", precision="float32"),
        "query_taps": Param((L, N, H, W), "LNHW"),
        "key_taps": Param((L, N, H, W), "LNHW"),
        "value_taps": Param((L, N, G, F, W), "LNGHW"),
        "value_norm": Param((L, F), "LH", "ones"),
        "attention_out": Param((L, N, G, F, D), "LNGHD", std=output_std(c), role="attention_out", contract=3),
    }


def _expert_params(c: Qwen3Next, layers: int) -> dict[str, Param]:
    """Parameters of the experts of a stack, and of the shared one."""
    L, D, F = layers, c.width, c.shared_mlp
    routed = {name: p for name, p in c.expert_params(layers).items() if "router" in name or "expert" in name}
    return {
        **routed,
        "shared_gate": Param((L, D, F), "LDF", role="ffn_in"),
        "shared_up": Param((L, D, F), "LDF", role="ffn_in"),
        "shared_down": Param((L, F, D), "LFD", std=output_std(c), role="ffn_out"),
        "shared_scale": Param((L, D, 1), "LDQ", role="router"),
    }


def _layer(c: Qwen3Next, ctx: ForwardContext, stack: str, attention: AttentionHalf) -> Layer:
    experts = routed_experts(c, ctx)

    def layer(x_BTD: jax.Array, params: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
        weights = ctx.gather_params(params, stack)
        x_BTD = attention(x_BTD, weights, index)
        with jax.named_scope("experts"):
            h_BTD = sequence_all_gather(rms_norm_plus_one(x_BTD, weights["mlp_norm"], c.norm_epsilon), 1)
            y_BTD, aux = experts(h_BTD, weights)
            shared_BTD = swiglu(h_BTD, {name: weights[f"shared_{name}"] for name in ("gate", "up", "down")})
            y_BTD += jax.nn.sigmoid(linear(h_BTD, weights["shared_scale"])) * shared_BTD
            return x_BTD + ctx.dropout(sequence_reduce_scatter(y_BTD, 1), 2 * index + 2), aux

    return layer


def _gated_half(c: Qwen3Next, ctx: ForwardContext) -> AttentionHalf:
    """Returns the attention half of the layers with full attention."""
    size, norm = c.rotary_size, functools.partial(rms_norm_plus_one, epsilon=c.norm_epsilon)
    cos_sin = rotary_angles(c, ctx.tokens.positions, size)

    def rotated(x_BTNH: jax.Array) -> jax.Array:
        return jnp.concatenate([apply_rope(x_BTNH[..., :size], cos_sin), x_BTNH[..., size:]], -1)

    def attention(x_BTD: jax.Array, w: dict[str, Any], index: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            names = ("query", "query_gate", "key", "value")
            h_BTD = norm(x_BTD, w["attention_norm"])
            products = ctx.column_parallel(linears, h_BTD, [w[name] for name in names])
            q_BTNH, gate_BTNH, k_BTKH, v_BTKH = products
            q_BTNH, k_BTKH = rotated(norm(q_BTNH, w["query_norm"])), rotated(norm(k_BTKH, w["key_norm"]))
            q_BTNH, k_BTKH, v_BTKH = (checkpoint_name(x, QKV) for x in (q_BTNH, k_BTKH, v_BTKH))
            y_BTD = ctx.attend_row_parallel(
                attention_projection, q_BTNH, k_BTKH, v_BTKH, w["attention_out"], window=None,
                factor_BTNH=jax.nn.sigmoid(checkpoint_name(gate_BTNH, QKV)),
            )  # fmt: skip
            return checkpoint_name(x_BTD + ctx.dropout(y_BTD, 2 * index + 1), ATTN_RESIDUAL)

    return attention


def _delta_half(c: Qwen3Next, ctx: ForwardContext) -> AttentionHalf:
    """Returns the attention half of the layers with linear attention."""
    names = ("query", "key", "value", "value_gate", "rate", "step")

    def attend(x: DeltaInputs, taps_NFW: jax.Array) -> jax.Array:
        if ctx.attend_delta is not None:
            return ctx.attend_delta(x, taps_NFW)
        return delta_net(x, taps_NFW, ctx.tokens.positions)[0]

    def attention(x_BTD: jax.Array, w: dict[str, Any], index: jax.Array) -> jax.Array:
        with jax.named_scope("linear attention"):
            h_BTD = rms_norm_plus_one(x_BTD, w["attention_norm"], c.norm_epsilon)
            products = ctx.column_parallel(linears, h_BTD, [w[name] for name in names])
            q_BTNH, k_BTNH, v_BTNGH, gate_BTNGH = (checkpoint_name(x, QKV) for x in products[:4])
            rate_BTNG, step_BTNG = (x.astype(jnp.float32) for x in products[4:])
            decay_BTNG = -jnp.exp(w["a_log"]) * jax.nn.softplus(step_BTNG + w["step_bias"])
            inputs = DeltaInputs(q_BTNH, k_BTNH, v_BTNGH, decay_BTNG, jax.nn.sigmoid(rate_BTNG))
            out_BTNGH = checkpoint_name(attend(inputs, _taps(w)), ATTN_OUT)
            out_BTNGH = rms_norm(out_BTNGH, w["value_norm"], c.norm_epsilon)
            out_BTNGH *= jax.nn.silu(gate_BTNGH.astype(jnp.float32)).astype(out_BTNGH.dtype)
            y_BTD = ctx.row_parallel(functools.partial(linear, contract=3), out_BTNGH, w["attention_out"])
            return checkpoint_name(x_BTD + ctx.dropout(y_BTD, 2 * index + 1), ATTN_RESIDUAL)

    return attention


def _taps(w: dict[str, Any]) -> jax.Array:
    """Returns the taps of the convolution [N, channels, W], as `delta_net` takes them."""
    values = w["value_taps"]
    flat = values.reshape(values.shape[0], -1, values.shape[-1])
    return jnp.concatenate([w["query_taps"], w["key_taps"], flat], 1)
