"""Mixtures of experts: Mixtral (Jiang et al. 2024, arXiv:2401.04088), Qwen3-MoE (arXiv:2505.09388), and layers like
DeepSeek-V3's (arXiv:2412.19437) with many small experts, shared experts, and dense layers first.

One layer is Llama's with another second half. E experts of width F, of which a token uses k, and shared experts:

    h = sequence_all_gather(rms_norm(x));  x += sequence_reduce_scatter(sum_k weight_k expert_k(h) + shared(h))
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshwright.comm.collectives import sequence_all_gather, sequence_reduce_scatter
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.blocks.experts import ExchangeType, Routing, capacity_moe, dropless_moe, route, router_losses
from meshwright.models.blocks.norm import rms_norm
from meshwright.models.families.llama import (
    Llama,
    dense_layer,
    output_std,
    shrunk_sizes,
    swiglu,
    swiglu_params,
)
from meshwright.models.model import Aux, ExpertSpec, ForwardContext, Layer, LayerSpec, Metrics, Model, ModelSpec
from meshwright.sharding.params import Param, Tree

Opening = Callable[[jax.Array, dict[str, Any]], jax.Array]
"""Computation before a layer, with weights of its subtree: `(x [B, T/tensor, D], weights) -> x`."""


@dataclasses.dataclass(frozen=True)
class Mixtral(Llama):
    """Configuration of a mixture of experts; `mlp` is the width of the dense layers.

    Example:
        >>> model = mw.Mixtral(vocab=32000, width=512, layers=8, heads=8, experts=16, experts_per_token=2)
        >>> model.spec().layers[0].experts.experts_per_token
        2
    """

    experts: int = 8
    """Experts E of a layer."""
    experts_per_token: int = 2
    """Experts that a token is routed to, k."""
    expert_mlp: int = 384
    """Feed-forward width F of an expert."""
    shared_experts: int = 0
    """Experts that every token uses (DeepSeek)."""
    dense_layers: int = 0
    """Leading layers without experts (DeepSeek)."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the router's logits: softmax over experts, or a sigmoid of each (DeepSeek-V3)."""
    normalize_top_k: bool = True
    """Whether the scores of a token's experts are scaled to sum to one."""
    routed_scaling: float = 1.0
    """Factor on the weights of routed experts (DeepSeek-V3: 2.5)."""
    expert_groups: int = 1
    """Groups of neighbouring experts; a token uses its best `topk_groups` (DeepSeek-V3: 8, of which 4)."""
    topk_groups: int = 1
    """Groups whose experts a token may use."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    """Dispatch of tokens to experts: all of them, in groups of unequal size (dropless), or as many of each sequence as
    an expert has capacity for (capacity)."""
    capacity_factor: float = 1.25
    """Capacity of an expert as a multiple of an even share of a sequence's tokens; for `capacity`."""
    expert_buffer_factor: float = 0.0
    """Rows that a device of the mesh axis `expert` has room for, as a multiple of an even share; for `dropless`. Rows
    beyond are dropped and counted as `choices dropped`. 0 has room for the most that can arrive, up to `expert` times
    the share, and gives the numbers of one device."""
    expert_exchange: ExchangeType = "compute"
    """Type of the rows that go to experts, for `dropless`: the compute dtype, or fp8 with a scale for each row, as in
    DeepSeek-V3; what comes back, and gradients, stay in the compute dtype. Rows are rounded on every mesh."""
    aux_loss_weight: float = 0.01
    """Weight of the load-balancing loss, summed over layers (DeepSeek-V3, equations 17 to 20)."""
    router_z_loss_weight: float = 0.001
    """Weight of the router's z-loss, summed over layers (ST-MoE, arXiv:2202.08906, equation 5)."""
    bias_update_rate: float = 0.0
    """Step of the router bias that balances load without an auxiliary loss (DeepSeek-V3, section 2.1.2); 0 disables
    it."""

    @property
    def routing(self) -> Routing:
        """Routing of a layer with experts."""
        return Routing(
            self.experts,
            self.experts_per_token,
            self.router_score,
            self.normalize_top_k,
            self.routed_scaling,
            self.expert_groups,
            self.topk_groups,
        )

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.dense_layers

    @property
    def has_router_bias(self) -> bool:
        """Whether the router has a bias, which the step updates."""
        return self.bias_update_rate > 0

    def params(self) -> Tree:
        """Returns the parameter descriptions; `dense_blocks` and `blocks` are stacked over layers."""
        _check(self)
        tree: Tree = {**super().params(), "blocks": self.expert_params(self.expert_layers)}
        if self.dense_layers:
            dense = self.dense_layers
            tree["dense_blocks"] = {**self.half_params(dense), **swiglu_params(self, dense)}
        return tree

    def expert_params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of `layers` layers with experts."""
        L, D, E, F, out = layers, self.width, self.experts, self.expert_mlp, output_std(self)
        blocks = {
            **self.half_params(L),
            "router": Param((L, D, E), "LDR", precision="float32", role="router"),
            "expert_gate": Param((L, E, D, F), "LEDF", role="ffn_in"),
            "expert_up": Param((L, E, D, F), "LEDF", role="ffn_in"),
            "expert_down": Param((L, E, F, D), "LEFD", std=out, role="ffn_out"),
        }
        if self.has_router_bias:
            blocks["router_bias"] = Param((L, E), "LR", "zeros", precision="float32")
        if self.shared_experts:
            shared_F = self.shared_experts * F
            blocks["shared_gate"] = Param((L, D, shared_F), "LDF", role="ffn_in")
            blocks["shared_up"] = Param((L, D, shared_F), "LDF", role="ffn_in")
            blocks["shared_down"] = Param((L, shared_F, D), "LFD", std=out, role="ffn_out")
        return blocks

    def spec(self) -> ModelSpec:
        """Returns the dense layers, then the layers with experts."""
        dense = LayerSpec("dense_blocks", self.attention)
        # With capacity every device has room for the capacity of its experts, and no other buffer.
        factor = self.expert_buffer_factor if self.dispatch == "dropless" else self.capacity_factor
        sent_bytes = 1 if self.expert_exchange == "fp8" else None
        experts = ExpertSpec(self.experts, self.experts_per_token, factor, sent_bytes)
        sparse = LayerSpec("blocks", self.attention, experts)
        layers = (dense,) * self.dense_layers + (sparse,) * self.expert_layers
        return dataclasses.replace(super().spec(), layers=layers)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Layer]:
        """Returns the dense layer, where there is one, and the layer with experts."""
        attention = self.attention_half(ctx)
        dense = {"dense_blocks": dense_layer(self, ctx, "dense_blocks", attention)} if self.dense_layers else {}
        return {**dense, "blocks": self.expert_layer(ctx, "blocks")}

    def expert_layer(self, ctx: ForwardContext, stack: str, opening: Opening = lambda x_BTD, weights: x_BTD) -> Layer:
        """Returns the layer with experts whose parameters are the subtree `stack`.

        opening: `(x, weights) -> x`, what comes before the layer with weights of the same subtree.
        """
        attention, experts = self.attention_half(ctx), routed_experts(self, ctx)

        def layer(x_BTD: jax.Array, params: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
            weights = ctx.gather_params(params, stack)
            x_BTD = attention(opening(x_BTD, weights), weights, index)
            with jax.named_scope("experts"):
                h_BTD = sequence_all_gather(rms_norm(x_BTD, weights["mlp_norm"], self.norm_epsilon), 1)
                y_BTD, aux = experts(h_BTD, weights)
                if self.shared_experts:
                    y_BTD += swiglu(h_BTD, {name: weights[f"shared_{name}"] for name in ("gate", "up", "down")})
                return x_BTD + ctx.dropout(sequence_reduce_scatter(y_BTD, 1), 2 * index + 2), aux

        return layer

    def layer_metrics(self, aux: dict[str, Aux], sequences: int) -> Metrics:
        """Returns the routing metrics of a step, averaged over layers."""
        return routing_metrics(aux["blocks"], self.expert_layers, sequences)

    def post_update(self, params: Tree, aux: dict[str, Aux]) -> Tree:
        """Returns `params` with the router bias moved towards experts whose load was below the mean.

        aux: in the rows of `params`.
        """
        if not self.bias_update_rate:
            return params
        moved = {}
        for stack in aux.keys() & params.keys():
            if "router_bias" in params[stack]:
                load_LE, bias_LE = aux[stack]["load"], params[stack]["router_bias"]
                step_LE = self.bias_update_rate * jnp.sign(load_LE.mean(-1, keepdims=True) - load_LE)
                moved[stack] = {**params[stack], "router_bias": bias_LE + step_LE.astype(bias_LE.dtype)}
        return {**params, **moved}

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these, with a dense layer where there is one."""
        sizes = shrunk_sizes(self, shape)
        dense = min(1, self.dense_layers)
        return dataclasses.replace(
            self, layers=max(layers, 1 + dense), dense_layers=dense, expert_mlp=sizes["mlp"], **sizes
        )

    def features(self) -> set[str]:
        """Returns the features that `runs.composition` lists."""
        leading = {"leading dense layers"} if self.dense_layers else set()
        return super().features() | leading | {f"dispatch: {self.dispatch}"}


def routing_metrics(sums: Aux, expert_layers: int, sequences: int) -> Metrics:
    """Returns the routing metrics of a step, averaged over the layers with experts.

    sums: aux of those layers, summed over the batch of `sequences`, [L, ...]. The expert balance is one where all
    experts have equal load; the largest load is that of the busiest expert of a layer over the mean.
    """
    layers, load_LE = jnp.float32(expert_layers), sums["load"]
    metrics = {
        "expert balance": (sums["balance"].sum() / sequences, layers),
        "router z": (sums["router z"].sum() / sequences, layers),
        "largest expert load": ((load_LE.max(-1) / load_LE.mean(-1)).sum(), layers),
        "smallest expert load": ((load_LE.min(-1) / load_LE.mean(-1)).sum(), layers),
    }
    if "dropped" in sums:
        metrics["choices dropped"] = (sums["dropped"].sum(), load_LE.sum())
    return metrics


def _check(c: Mixtral) -> None:
    group = c.experts // max(c.expert_groups, 1)
    for asked, truth, wrong, fix in (
        (
            f"{c.experts_per_token} experts per token of {c.experts} experts",
            "a token uses at least one expert, and each at most once",
            not 1 <= c.experts_per_token <= c.experts,
            f"--model.experts-per-token {min(2, c.experts)}",
        ),
        (
            f"{c.dense_layers} dense layers of {c.layers}",
            "at least one layer has experts",
            c.dense_layers >= c.layers,
            f"--model.dense-layers {max(c.layers - 1, 0)}",
        ),
        (
            f"--model.norm-place {c.norm_place} with experts",
            "the half of a layer with experts normalises what it reads",
            c.norm_place != "before",
            "--model.norm-place before",
        ),
        (
            f"--model.mlp-bias {c.mlp_bias} with experts",
            "experts have no biases",
            c.mlp_bias != "none",
            "--model.mlp-bias none",
        ),
        (
            f"{c.experts} experts in {c.expert_groups} groups",
            "groups are of equal size",
            c.experts % c.expert_groups != 0,
            "a number of groups that divides the experts",
        ),
        (
            f"top {c.topk_groups} of {c.expert_groups} groups with {c.experts_per_token} experts per token",
            f"{c.topk_groups} groups hold {c.topk_groups * group} experts",
            not 1 <= c.topk_groups <= c.expert_groups or c.topk_groups * group < c.experts_per_token,
            f"--model.topk-groups {c.expert_groups}",
        ),
    ):
        if wrong:
            raise ConfigError(asked, truth, fix)


def routed_experts(
    c: Mixtral, ctx: ForwardContext
) -> Callable[[jax.Array, dict[str, jax.Array]], tuple[jax.Array, Aux]]:
    """Returns `(h, weights of a layer) -> (output of the routed experts [B, T, D], router statistics)`."""

    def experts(h_BTD: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, Aux]:
        with jax.named_scope("router"):
            routes = route(c.routing, h_BTD, weights["router"], weights.get("router_bias"))
            aux = router_losses(c.routing, routes, ctx.sequence.seq)
        aux["aux_loss"] = c.aux_loss_weight * aux["balance"] + c.router_z_loss_weight * aux["router z"]
        routed = {name: weights[f"expert_{name}"] for name in ("gate", "up", "down")}
        if c.dispatch == "dropless":
            y_BTD, dropped = dropless_moe(
                c.routing, h_BTD, routes, routed, ctx.grouped_matmul, c.expert_buffer_factor, c.expert_exchange
            )
            return y_BTD, aux if dropped is None else {**aux, "dropped": dropped}
        y_BTD, aux["dropped"] = capacity_moe(c.routing, h_BTD, routes, routed, ctx.sequence, c.capacity_factor)
        return y_BTD, aux

    return experts
