"""Llama 4's text model (Meta 2025; its published configurations): rotary layers with chunked attention, layers without.

A layer is Llama's, with a second half that is dense or a mixture of experts. Of `no_rope_interval` layers the last has
no rotary embedding: it attends to all before it, and its queries grow with their position. The others attend within
chunks, rotate neighbouring features, and normalise queries and keys without a scale. Of `expert_interval` layers the
last has experts: a token's routed experts, whose input is scaled by the sigmoid of its logit, and one shared.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import sequence_all_gather, sequence_reduce_scatter
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.blocks.experts import ExpertFunction, Routing, dropless_moe, route, router_losses
from meshwright.models.blocks.linear import attention_projection, linears
from meshwright.models.blocks.norm import rms_norm
from meshwright.models.blocks.rotary import apply_rope_interleaved
from meshwright.models.families.llama import (
    AttentionHalf,
    Llama,
    attention_params,
    dense_layer,
    output_std,
    rotary_angles,
    shrunk_sizes,
    swiglu,
    swiglu_params,
)
from meshwright.models.families.mixtral import routing_metrics
from meshwright.models.kernels.scores import Scores
from meshwright.models.model import (
    AttentionSpec,
    Aux,
    ExpertSpec,
    ForwardContext,
    Layer,
    LayerSpec,
    Metrics,
    Model,
    ModelSpec,
    Pattern,
)
from meshwright.models.remat import ATTN_RESIDUAL, QKV
from meshwright.sharding.params import Param, Tree


@dataclasses.dataclass(frozen=True)
class Llama4(Llama):
    """Configuration of a Llama 4 decoder; `mlp` is the width of the dense layers.

    Example:
        >>> model = mw.Llama4(vocab=32000, width=512, layers=4, heads=8, kv_heads=2, experts=16, expert_interval=2)
        >>> [(layer.stack, layer.attention.chunk) for layer in model.spec().layers]
        [('dense_blocks', 8192), ('blocks', 8192), ('dense_blocks', 8192), ('blocks', None)]
    """

    rope_theta: float = 500000.0
    """Base of the rotary frequencies."""
    no_rope_interval: int = 4
    """Layers of which the last has no rotary embedding."""
    attention_chunk: int = 8192
    """Tokens of a chunk, within which rotary layers attend."""
    qk_l2_norm: Literal["none", "rotary"] = "rotary"
    """Whether rotary layers divide queries and keys by their root mean square, after rotation."""
    temperature_scale: float = 0.1
    """Growth s of the queries of layers without rotary embedding: times 1 + s ln(1 + floor((position + 1) / p))."""
    temperature_floor: int = 8192
    """Positions p after which the queries grow."""
    expert_interval: int = 1
    """Layers of which the last has experts; 1 gives all of them experts."""
    experts: int = 16
    """Experts E of a layer."""
    experts_per_token: int = 1
    """Experts that a token is routed to, k."""
    expert_mlp: int = 384
    """Feed-forward width F of an expert, and of the shared one."""
    expert_buffer_factor: float = 0.0
    """Rows that a device of the mesh axis `expert` has room for, as a multiple of an even share. Rows beyond are
    dropped and counted as `choices dropped`. 0 has room for the most that can arrive."""
    aux_loss_weight: float = 0.001
    """Weight of the load-balancing loss, summed over layers."""
    router_z_loss_weight: float = 0.0
    """Weight of the router's z-loss, summed over layers (ST-MoE, arXiv:2202.08906, equation 5)."""

    @property
    def period(self) -> int:
        """Layers after which their kinds repeat."""
        return math.lcm(self.no_rope_interval, self.expert_interval)

    @property
    def routing(self) -> Routing:
        """Routing of a layer with experts: the sigmoid of the logits of a token's experts."""
        return Routing(self.experts, self.experts_per_token, "sigmoid", False, 1.0, 1, 1)

    def rotates(self, place: int) -> bool:
        """Whether the layer at a place, counted from any whole period, has a rotary embedding."""
        return (place + 1) % self.no_rope_interval != 0

    def has_experts(self, place: int) -> bool:
        """Whether the layer at a place, counted from any whole period, has experts."""
        return (place + 1) % self.expert_interval == 0

    def params(self) -> Tree:
        """Returns the parameter descriptions; `dense_blocks` and `blocks` are stacked over their layers."""
        _check(self)
        L = sum(self.has_experts(i) for i in range(self.layers))
        D, E, F, out = self.width, self.experts, self.expert_mlp, output_std(self)
        blocks = {
            **attention_params(self, L),
            "router": Param((L, D, E), "LDR", precision="float32", role="router"),
            "expert_gate": Param((L, E, D, F), "LEDF", role="ffn_in"),
            "expert_up": Param((L, E, D, F), "LEDF", role="ffn_in"),
            "expert_down": Param((L, E, F, D), "LEFD", std=out, role="ffn_out"),
            "shared_gate": Param((L, D, F), "LDF", role="ffn_in"),
            "shared_up": Param((L, D, F), "LDF", role="ffn_in"),
            "shared_down": Param((L, F, D), "LFD", std=out, role="ffn_out"),
        }
        tree: Tree = {**super().params(), "blocks": blocks}
        if self.layers > L:
            dense = self.layers - L
            tree["dense_blocks"] = {**attention_params(self, dense), **swiglu_params(self, dense)}
        return tree

    def spec(self) -> ModelSpec:
        """Returns the layers by turns."""
        experts = ExpertSpec(self.experts, self.experts_per_token, self.expert_buffer_factor)

        def layer(place: int) -> LayerSpec:
            attention = self._attention(self.rotates(place))
            if self.has_experts(place):
                return LayerSpec("blocks", attention, experts)
            return LayerSpec("dense_blocks", attention)

        layers = tuple(map(layer, range(self.layers)))
        return dataclasses.replace(super().spec(), layers=layers, period=self.period)

    def _attention(self, rotates: bool) -> AttentionSpec:
        normalises = rotates and self.qk_l2_norm == "rotary"
        chunk = self.attention_chunk if rotates else None
        return dataclasses.replace(self.attention, chunk=chunk, normalises_qk=normalises)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Pattern]:  # type: ignore[override]
        """Returns the layers of a period, those of each stack in their order."""
        halves = {rotates: _attention_half(self, ctx, rotates) for rotates in (True, False)}
        experts = _experts(self, ctx)
        found: dict[str, list[Layer]] = {}
        for place in range(min(self.period, self.layers)):
            attention = halves[self.rotates(place)]
            if self.has_experts(place):
                found.setdefault("blocks", []).append(_expert_layer(self, ctx, attention, experts))
            else:
                found.setdefault("dense_blocks", []).append(dense_layer(self, ctx, "dense_blocks", attention))
        return {stack: tuple(layers) for stack, layers in found.items()}

    def layer_metrics(self, aux: dict[str, Aux], sequences: int) -> Metrics:
        """Returns the routing metrics of a step, averaged over layers with experts."""
        return routing_metrics(aux["blocks"], self.layers // self.expert_interval, sequences)

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these, with periods of two layers."""
        sizes = shrunk_sizes(self, shape)
        return dataclasses.replace(
            self, layers=2 * layers, no_rope_interval=2, expert_interval=min(2, self.expert_interval),
            attention_chunk=16, expert_mlp=sizes["mlp"], **sizes,
        )  # fmt: skip

    def features(self) -> set[str]:
        """Returns the features that `runs.composition` lists."""
        return super().features() | {"dispatch: dropless"}


def _check(c: Llama4) -> None:
    for asked, truth, wrong, fix in (
        (
            f"a sliding window of {c.sliding_window} in Llama 4",
            "its rotary layers attend within chunks, and the others to all before them",
            c.sliding_window is not None,
            f"--model.attention-chunk {c.sliding_window}, without --model.sliding-window",
        ),
        (
            f"--model.qkv-bias {c.qkv_bias} --model.qk-norm {c.qk_norm} --model.norm-place {c.norm_place} in Llama 4",
            "projections have no biases, queries and keys no learned norm, and both halves normalise what they read",
            (c.qkv_bias, c.qk_norm, c.norm_place) != ("none", "none", "before"),
            "--model.qkv-bias none --model.qk-norm none --model.norm-place before",
        ),
        (
            f"--model.out-bias {c.out_bias} --model.mlp-bias {c.mlp_bias} in Llama 4",
            "its projections have no biases",
            (c.out_bias, c.mlp_bias) != ("none", "none"),
            "--model.out-bias none --model.mlp-bias none",
        ),
        (
            f"{c.layers} layers of which every {c.expert_interval}-th has experts",
            "at least one layer has experts",
            not 1 <= c.expert_interval <= c.layers,
            f"--model.expert-interval {max(1, min(c.expert_interval, c.layers))}",
        ),
        (
            f"every {c.no_rope_interval}-th layer without rotary embedding, chunks of {c.attention_chunk} tokens",
            "both are 1 at least",
            min(c.no_rope_interval, c.attention_chunk, c.temperature_floor) < 1,
            "--model.no-rope-interval 4 --model.attention-chunk 8192",
        ),
        (
            f"{c.experts_per_token} experts per token of {c.experts} experts",
            "a token uses at least one expert, and each at most once",
            not 1 <= c.experts_per_token <= c.experts,
            "--model.experts-per-token 1",
        ),
    ):
        if wrong:
            raise ConfigError(asked, truth, fix)


def _attention_half(c: Llama4, ctx: ForwardContext, rotates: bool) -> AttentionHalf:
    """Returns the attention half of the layers with or without rotary embedding."""
    positions_BT = ctx.tokens.positions
    cos_sin = rotary_angles(c, positions_BT, c.attention.head_size)
    steps_BT = jnp.floor((positions_BT.astype(jnp.float32) + 1.0) / c.temperature_floor)
    growth_BT11 = (1.0 + c.temperature_scale * jnp.log1p(steps_BT))[..., None, None]

    def rotated(x_BTNH: jax.Array) -> jax.Array:
        x_BTNH = apply_rope_interleaved(x_BTNH, cos_sin)
        if c.qk_l2_norm == "none":
            return x_BTNH
        return rms_norm(x_BTNH, jnp.ones(x_BTNH.shape[-1:], x_BTNH.dtype), c.norm_epsilon)

    def attention(x_BTD: jax.Array, weights: dict[str, Any], index: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            h_BTD = rms_norm(x_BTD, weights["attention_norm"], c.norm_epsilon)
            names = ("query", "key", "value")
            q_BTNH, k_BTKH, v_BTKH = ctx.column_parallel(linears, h_BTD, [weights[name] for name in names])
            if rotates:
                q_BTNH, k_BTKH = rotated(q_BTNH), rotated(k_BTKH)
            else:
                q_BTNH = (q_BTNH * growth_BT11).astype(q_BTNH.dtype)
            q_BTNH, k_BTKH, v_BTKH = (checkpoint_name(x, QKV) for x in (q_BTNH, k_BTKH, v_BTKH))
            y_BTD = ctx.attend_row_parallel(
                attention_projection, q_BTNH, k_BTKH, v_BTKH, weights["attention_out"], window=None,
                scores=Scores(chunk=c.attention_chunk) if rotates else None,
            )  # fmt: skip
            return checkpoint_name(x_BTD + ctx.dropout(y_BTD, 2 * index + 1), ATTN_RESIDUAL)

    return attention


_Experts = Callable[[jax.Array, dict[str, Any]], tuple[jax.Array, Aux]]


def _expert_layer(c: Llama4, ctx: ForwardContext, attention: AttentionHalf, experts: _Experts) -> Layer:
    def layer(x_BTD: jax.Array, params: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
        weights = ctx.gather_params(params, "blocks")
        x_BTD = attention(x_BTD, weights, index)
        with jax.named_scope("experts"):
            h_BTD = sequence_all_gather(rms_norm(x_BTD, weights["mlp_norm"], c.norm_epsilon), 1)
            y_BTD, aux = experts(h_BTD, weights)
            y_BTD += swiglu(h_BTD, {name: weights[f"shared_{name}"] for name in ("gate", "up", "down")})
            return x_BTD + ctx.dropout(sequence_reduce_scatter(y_BTD, 1), 2 * index + 2), aux

    return layer


def _experts(c: Llama4, ctx: ForwardContext) -> _Experts:
    """Returns `(h, weights of a layer) -> (output of the routed experts [B, T, D], router statistics)`."""

    def experts(h_BTD: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, Aux]:
        with jax.named_scope("router"):
            routes = route(c.routing, h_BTD, weights["router"], None)
            aux = router_losses(c.routing, routes, ctx.sequence.seq)
        aux["aux_loss"] = c.aux_loss_weight * aux["balance"] + c.router_z_loss_weight * aux["router z"]
        routed = {name: weights[f"expert_{name}"] for name in ("gate", "up", "down")}
        y_BTD, dropped = dropless_moe(
            c.routing, h_BTD, routes, routed, ctx.grouped_matmul, c.expert_buffer_factor,
            function=ExpertFunction(weighted="input"),
        )  # fmt: skip
        return y_BTD, aux if dropped is None else {**aux, "dropped": dropped}

    return experts
