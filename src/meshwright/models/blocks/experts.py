"""Mixture of experts: routing of tokens to experts, and expert parallelism over mesh axes.

The axes are `expert`, and in folded layouts `context` and `tensor` too (sharding/layouts.py).
Tokens are dispatched with an all-to-all over them: all tokens, in groups of unequal size
(`dropless_moe`), or as many of each sequence as an expert has capacity for (`capacity_moe`). Over
several nodes there are two: over the network with one row for each token and node, then inside the
node with one for each expert. On the way back a node sums a token's outputs in float32 and returns
one row (DeepSeek-V3, arXiv:2412.19437, section 3.2.2).

Load balancing and capacity are counted within a sequence (DeepSeek-V3, equations 17 to 20): a
token's output does not depend on other sequences, so the numbers are the same on any mesh and with
any gradient accumulation.

Padding is not text. `route` gives padding positions no expert, and everything after it follows from
that: padding is not copied, sent, multiplied or counted, and capacities and buffers are shares of
the text alone. The loss of a text is the same whatever the number, amount and place of the padding
tokens around it.

A routing weight multiplies the hidden layer of its expert, before the `down` matmul, and not the
output: its gradient then needs the hidden layer, which is there, and the backward pass neither
saves nor recomputes the experts' outputs and their way back (as with ScatterMoE, Tan et al. 2024,
arXiv:2403.08245, the numbers equal a weighted sum).

Each device of `tensor` routes its own part of the sequence. Where `tensor` splits the experts, rows
leave from there and return there. Where it splits the width of each expert, all its devices send
the rows of the complete sequence, by `sequence_all_gather`, and outputs are partial sums
`{U/tensor}`, which `sequence_reduce_scatter` reduces.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    local_shard,
    sequence_all_gather,
    sequence_reduce_scatter,
)
from meshwright.comm.hierarchical import Axes, Level, split_axes
from meshwright.comm.ragged import Exchange, plan_exchange, ragged_all_to_all
from meshwright.errors import refuse
from meshwright.models.blocks.context import CONTEXT
from meshwright.models.blocks.feed_forward import relu2_mlp, swiglu
from meshwright.models.blocks.layers import SelfMultiplying, linear, take_rows
from meshwright.models.blocks.row_sums import few_rows
from meshwright.models.model import Aux, ExpertBuffers, ExpertSpec, ForwardContext, Kind
from meshwright.models.quantisation import GROUPED_FORMAT, Rows, largest_along, quantise
from meshwright.models.remat import FFN_HIDDEN, recomputed
from meshwright.sharding.params import Param, Stored
from meshwright.sharding.sequence import SequenceSplit

EXPERT = ("expert",)
TENSOR = ("tensor",)
ExchangeType = Literal["compute", "fp8"]
"""Type of the rows that go to experts on other devices: the compute dtype,
or float8 with a scale for each row."""


@dataclasses.dataclass(frozen=True)
class Routing:
    """Configuration of a router; a family's fields of the same names have the meanings
    (families/expert_fields.py)."""

    experts: int
    experts_per_token: int
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True
    routed_scaling: float = 1.0
    expert_groups: int = 1
    topk_groups: int = 1

    def __post_init__(self) -> None:
        group = self.experts // max(self.expert_groups, 1)
        k, in_groups = self.experts_per_token, self.topk_groups * group
        refuse(
            (
                not 1 <= k <= self.experts,
                f"{k} experts per token of {self.experts} experts",
                "a token uses at least one expert, and each at most once",
                f"--model.experts-per-token {min(2, self.experts)}",
            ),
            (
                self.experts % max(self.expert_groups, 1) != 0,
                f"{self.experts} experts in {self.expert_groups} groups",
                "groups are of equal size",
                "a number of groups that divides the experts",
            ),
            (
                not 1 <= self.topk_groups <= self.expert_groups or in_groups < k,
                f"top {self.topk_groups} of {self.expert_groups} groups with {k} experts per token",
                f"{self.topk_groups} groups hold {in_groups} experts",
                f"--model.topk-groups {self.expert_groups}",
            ),
        )


@dataclasses.dataclass(frozen=True)
class Routes:
    """Experts of every token, weights of their outputs,
    and scores and log-sum-exp of the router's logits.

    Letter X: the k experts of a token, best first; letter R: all experts, whose scores sum to one.
    All but the int32 indices are float32.
    """

    experts_BTX: jax.Array
    """Experts of a token; those of padding are all `experts`, the number after the last expert."""
    weights_BTX: jax.Array
    router_probs_BTR: jax.Array
    lse_BT: jax.Array
    padding_BT: jax.Array | None = None
    """Positions of `router_probs_BTR` and `lse_BT` that are not text, bool; None where all are."""

    def text(self, r: Routing) -> jax.Array:
        """Returns whether each position is text, bool [B, T]: whether it has experts."""
        return self.experts_BTX[..., 0] < r.experts


def route(
    r: Routing,
    h_BTD: jax.Array,
    w_DR: jax.Array,
    bias_R: jax.Array | None,
    logit_bias_R: jax.Array | None = None,
    padding_BT: jax.Array | None = None,
    scale_R: jax.Array | None = None,
) -> Routes:
    """Scores every expert for every token and picks the top k.

    padding_BT: positions that get no expert; None where all are text.
    scale_R: factor on the weight of each expert.

    bias_R: added to the scores for the choice of experts only, not for their weights
    (auxiliary-loss-free load balancing: arXiv:2412.19437, equation 16).
    logit_bias_R: learned bias of the router's logits (GPT-OSS).
    """
    # By default TPUs multiply float32 in one pass of bfloat16, which changes the choice of experts.
    logits_BTR = jnp.einsum(
        "btd,dr->btr", h_BTD.astype(jnp.float32), w_DR, precision=lax.Precision.HIGHEST
    )
    if logit_bias_R is not None:
        logits_BTR += logit_bias_R.astype(jnp.float32)
    lse_BT = jax.nn.logsumexp(logits_BTR, -1)
    # Scores can all round to 0, so that what divides by their sum would not be a number; logarithms
    # of scores cannot: s / sum(s) = softmax(log s), whose derivatives are at most 1.
    if r.router_score == "softmax":
        log_scores_BTR = logits_BTR - lse_BT[..., None]
        scores_BTR = probs_BTR = jnp.exp(log_scores_BTR)
    else:
        log_scores_BTR = jax.nn.log_sigmoid(logits_BTR)
        scores_BTR = jax.nn.sigmoid(logits_BTR)
        probs_BTR = jax.nn.softmax(log_scores_BTR, -1)
    biased_BTR = scores_BTR
    if bias_R is not None:
        biased_BTR += bias_R
    biased_BTR = lax.stop_gradient(biased_BTR)
    if r.topk_groups < r.expert_groups:
        biased_BTR = _within_best_groups(r, biased_BTR)
    experts_BTX = lax.top_k(biased_BTR, r.experts_per_token)[1].astype(jnp.int32)
    if r.normalize_top_k:
        weights_BTX = jax.nn.softmax(_scores_of(log_scores_BTR, experts_BTX), -1)
    else:
        weights_BTX = _scores_of(scores_BTR, experts_BTX)
    if scale_R is not None:
        weights_BTX *= take_rows(scale_R[:, None], experts_BTX, few_rows)[..., 0]
    if padding_BT is not None:
        experts_BTX = jnp.where(padding_BT[..., None], r.experts, experts_BTX)
    return Routes(experts_BTX, weights_BTX * r.routed_scaling, probs_BTR, lse_BT, padding_BT)


def _within_best_groups(r: Routing, scores_BTR: jax.Array) -> jax.Array:
    """Returns the scores with minus infinity outside of a token's best groups, scored
    by their two best experts."""
    grouped = scores_BTR.reshape(*scores_BTR.shape[:2], r.expert_groups, -1)
    best_scores = lax.top_k(grouped, min(2, grouped.shape[-1]))[0]
    best_groups = lax.top_k(best_scores.sum(-1), r.topk_groups)[1]
    allowed = (best_groups[..., None] == jnp.arange(r.expert_groups)).any(-2)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(scores_BTR.shape)


@jax.vmap
@jax.vmap
def _scores_of(scores_R: jax.Array, experts_X: jax.Array) -> jax.Array:
    """Returns the scores of the chosen experts of every token, [B, T, k]."""
    return scores_R.at[experts_X].get(unique_indices=True)  # no two gradients meet in one score


def router_losses(r: Routing, routes: Routes) -> dict[str, jax.Array]:
    """Returns the router's auxiliary losses, load and entropy
    of this device's sequences, summed over `tensor`.

    balance: load-balancing loss, E times the sum over experts of (fraction of tokens x mean router
    probability); 1 for an even load.
    router z: mean squared log-sum-exp (ST-MoE: Zoph et al. 2022, arXiv:2202.08906, equation 5).
    load: tokens routed to each expert, [E].
    entropy: mean of -sum p ln p over the router probabilities p of a token. Means and sums are over
    text: padding counts nowhere. Sums over the token axes are over the batch. Each device of
    `tensor` has its own positions, so the gradient of the router is partial over `tensor`.
    """
    padding_BT = routes.padding_BT
    text_BT = jnp.ones(routes.lse_BT.shape, bool) if padding_BT is None else ~padding_BT
    chosen_BTXE = routes.experts_BTX[..., None] == jnp.arange(r.experts)
    counts_BE = chosen_BTXE.sum((1, 2)).astype(jnp.float32)
    sequence_counts_BE, tokens_B = all_reduce(
        (lax.stop_gradient(counts_BE), text_BT.sum(1, dtype=jnp.float32)), (*CONTEXT, *TENSOR)
    )
    weights_BT = text_BT / jnp.maximum(tokens_B, 1)[:, None]
    mean_probs_BE = (routes.router_probs_BTR * weights_BT[..., None]).sum(1)
    fractions_BE = sequence_counts_BE / jnp.maximum(tokens_B, 1)[:, None]
    balance = (fractions_BE * mean_probs_BE).sum() * (r.experts / r.experts_per_token)
    z = (jnp.square(routes.lse_BT) * weights_BT).sum()
    # A copy: fused into the logarithm, the products with the probabilities would be summed
    # in another order.
    probs_BTR = lax.optimization_barrier(lax.stop_gradient(routes.router_probs_BTR))
    entropy_BT = -(probs_BTR * jnp.log(jnp.maximum(probs_BTR, 1e-30))).sum(-1)
    entropy = (entropy_BT * weights_BT).sum()
    sums = {"balance": balance, "router z": z, "load": counts_BE.sum(0), "entropy": entropy}
    return all_reduce(sums, TENSOR)


Activation = Literal["silu", "gelu", "relu2"]


def hidden_layer(
    clamp: tuple[float, float] | None, activation: Activation = "silu"
) -> Callable[..., jax.Array]:
    """Returns the hidden layer times the routing weight of each row.

    It is a function `(gate, up, weights [..., 1])` of SwiGLU and GeGLU,
    and `(up, weights)` of the square of ReLU.
    """
    if activation == "relu2":
        return _weighted_relu2

    @recomputed
    def glu(gate: jax.Array, up: jax.Array, weights: jax.Array) -> jax.Array:
        if clamp is None:
            activated = jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate)
            return (activated.astype(jnp.float32) * up * weights).astype(up.dtype)
        alpha, limit = clamp
        gate32 = jnp.minimum(gate.astype(jnp.float32), limit)
        up32 = jnp.clip(up.astype(jnp.float32), -limit, limit)
        return ((up32 + 1) * gate32 * jax.nn.sigmoid(alpha * gate32) * weights).astype(up.dtype)

    return glu


@recomputed
def _weighted_relu2(up: jax.Array, weights: jax.Array) -> jax.Array:
    activated = jnp.square(jax.nn.relu(up))
    return (activated.astype(jnp.float32) * weights).astype(up.dtype)


Multiply = Callable[[Any, Any, jax.Array], tuple[jax.Array, ...]]
"""Grouped matmul: `(rows [R, K], weights, each [E, K, N], rows of each expert [E]) -> results, each
[R, N]` (kernels/choose.py). Weights in low precision take `Rows` too."""
ExpertWeights = dict[str, jax.Array]
"""Weights of this device's experts: gate, up [E/expert, D, F/tensor] and down
[E/expert, F/tensor, D]; of experts with biases gate_bias, up_bias [E/expert, F/tensor] and
down_bias [E/expert, D]. Folded they are [E/expert+context+tensor] and have all of F. Experts with
the square of ReLU have no gate. Those in a latent have Z for D."""


@dataclasses.dataclass(frozen=True)
class Experts(Kind):
    """Mixture of experts of one kind of layers,
    with experts that every token uses where `shared` is above 0.

    Fields of a family that have the same names have the meanings (families/expert_fields.py).
    """

    routing: Routing
    hidden: int
    """Feed-forward width F of an expert."""
    out_std: float
    """Initial standard deviation of the projections down."""
    expert_latent: int | None = None
    """Width Z of the latent that routed experts read and write, between two projections that all
    experts share (Nemotron 3 Super); None is the model's width. Router and shared experts read the
    model's width."""
    shared: int = 0
    """Feed-forward width of the experts that every token uses."""
    shared_gate: bool = False
    """Whether the sigmoid of a projection of the token multiplies their output (Qwen3-Next)."""
    router_bias: Literal["none", "choice", "logits"] = "none"
    """Bias that changes the choice of experts and not their weights (DeepSeek-V3),
    or of the logits (GPT-OSS)."""
    bias: bool = False
    """Whether the projections of experts have biases."""
    activation: Activation = "silu"
    """Function of the gate in the hidden layer of routed experts; gelu is its approximation by
    tanh. relu2 is relu(up)^2 without a gate, of shared experts too (Nemotron 3)."""
    weight_scale: bool = False
    """Whether a learned factor of each expert multiplies its routing weights (Gemma 4)."""
    clamp: tuple[float, float] | None = None
    """Factor of the gate inside of the sigmoid, and largest gate and factor,
    of clamped SwiGLU (GPT-OSS)."""
    weighted: Literal["hidden", "input"] = "hidden"
    """Whether the routing weight multiplies the hidden layer or the input
    of an expert (Llama 4)."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    capacity_factor: float = 1.25
    expert_buffer_factor: float = 0.0
    expert_exchange: ExchangeType = "compute"
    aux_loss_weight: float = 0.0
    router_z_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        refuse(
            (
                self.dispatch == "capacity" and self.expert_exchange != "compute",
                f"--model.expert-exchange {self.expert_exchange} with --model.dispatch capacity",
                "an expert's capacity of rows is sent in the compute dtype",
                "--model.dispatch dropless, or --model.expert-exchange compute",
            ),
            (
                self.clamp is not None and self.activation == "relu2",
                'experts with a clamp and activation="relu2"',
                "a clamp limits the gate, and the square of ReLU has none",
                "clamp=None",
            ),
        )

    scope = "experts"

    @property
    def projections(self) -> tuple[str, ...]:
        """Projections into the hidden layer."""
        return ("up",) if self.activation == "relu2" else ("gate", "up")

    @property
    def row_width(self) -> int:
        """Width of the rows that routed experts read and write."""
        return self.width if self.expert_latent is None else self.expert_latent

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        L, D, E, F = layers, self.width, self.routing.experts, self.hidden
        row = "D" if self.expert_latent is None else "Z"
        params = {
            "router": Param((L, D, E), "LDR", precision="float32", role="router"),
            **{
                f"expert_{name}": Param((L, E, self.row_width, F), f"LE{row}F", role="ffn_in")
                for name in self.projections
            },
            "expert_down": Param(
                (L, E, F, self.row_width), f"LEF{row}", std=self.out_std, role="ffn_out"
            ),
        }
        if self.expert_latent is not None:
            Z = self.expert_latent
            params["latent_down"] = Param((L, D, Z), "LDZ", role="expert_latent")
            params["latent_up"] = Param((L, Z, D), "LZD", std=self.out_std, role="expert_latent")
        if self.router_bias != "none":
            # A step of `bias_update_rate` is lost in a bfloat16 bias above 0.5.
            at_rest: Stored | None = "float32" if self.router_bias == "choice" else None
            params["router_bias"] = Param(
                (L, E), "LR", "zeros", precision="float32", stored=at_rest
            )
        if self.weight_scale:
            params["weight_scale"] = Param((L, E), "LR", "ones", precision="float32")
        if self.bias:
            params |= {
                f"expert_{name}_bias": Param((L, E, F), "LEF", "zeros") for name in self.projections
            }
            params["expert_down_bias"] = Param((L, E, self.row_width), f"LE{row}", "zeros")
        if self.shared:
            params |= {
                f"shared_{name}": Param((L, D, self.shared), "LDF", role="ffn_in")
                for name in self.projections
            }
            params["shared_down"] = Param(
                (L, self.shared, D), "LFD", std=self.out_std, role="ffn_out"
            )
        if self.shared_gate:
            params["shared_scale"] = Param((L, D, 1), "LDQ", role="router")
        return params

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `LayerSpec`."""
        # With capacity every device has room for the capacity of its experts, and no other buffer.
        factor = self.expert_buffer_factor if self.dispatch == "dropless" else self.capacity_factor
        sent_bytes = 1 if self.expert_exchange == "fp8" else None
        r = self.routing
        spec = ExpertSpec(
            experts=r.experts,
            experts_per_token=r.experts_per_token,
            buffer_factor=factor,
            sent_bytes=sent_bytes,
            groups=r.expert_groups,
            topk_groups=r.topk_groups,
            weighted=self.weighted,
            gates_shared=bool(self.shared and self.shared_gate),
            latent=self.expert_latent,
        )
        return {"experts": spec, "hidden_products": 1 / len(self.projections)}

    def build(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the experts of a step's tokens, routed and shared."""
        apply = self.build_routed(ctx)
        return lambda h_BTD, w: apply(h_BTD, h_BTD, w)

    def build_routed(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the experts of a step's tokens: `(input of the router, input of the experts,
        weights) -> y, aux`."""
        padding_BT = ctx.tokens.padding
        text: jax.Array | None = None
        if padding_BT is not None:
            local_padding_BT = local_shard(padding_BT, TENSOR, 1)
            dispatched_BT = local_padding_BT if "tensor" in ctx.expert_axes else padding_BT
            # Here, outside of the loop over layers, it is sent once.
            text = self.mean_text(~dispatched_BT, ctx.expert_axes, ctx.expert_nodes)
            padding_BT = local_padding_BT

        def feed(
            routed_BTD: jax.Array, h_BTD: jax.Array, w: dict[str, Any]
        ) -> tuple[jax.Array, Aux]:
            with jax.named_scope("router"):
                routes = self._route(routed_BTD, w, padding_BT)
                if ctx.tap is not None:
                    routes = dataclasses.replace(
                        routes,
                        router_probs_BTR=ctx.tap("router probabilities", routes.router_probs_BTR),
                        weights_BTX=ctx.tap("router weights", routes.weights_BTX),
                    )
                aux = router_losses(self.routing, routes)
            y_BTD, dropped = self._outputs(ctx, h_BTD, routes, w, text)
            aux["aux_loss"] = (
                self.aux_loss_weight * aux["balance"] + self.router_z_loss_weight * aux["router z"]
            )
            if dropped is not None:
                aux["dropped"] = dropped
            return y_BTD, aux

        return feed

    def _route(self, h_BTD: jax.Array, w: dict[str, Any], padding_BT: jax.Array | None) -> Routes:
        """Returns the routes of this device's positions."""
        bias = w.get("router_bias")
        choice_bias = bias if self.router_bias == "choice" else None
        logit_bias = bias if self.router_bias == "logits" else None
        return route(
            self.routing,
            h_BTD,
            w["router"],
            choice_bias,
            logit_bias,
            padding_BT,
            w.get("weight_scale"),
        )

    def _outputs(
        self,
        ctx: ForwardContext,
        h_BTD: jax.Array,
        routes: Routes,
        w: dict[str, Any],
        text: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the outputs of routed and shared experts, [B, T/tensor, D],
        and the pairs that were dropped."""
        if self.expert_latent is not None:
            return self._latent_outputs(ctx, h_BTD, routes, w, text)
        # Where `tensor` splits the experts, the routed ones get and return the tokens
        # of this device.
        folded = "tensor" in ctx.expert_axes
        gathered_BTD = h_BTD
        if self.shared or not folded:
            gathered_BTD = sequence_all_gather(h_BTD, 1)
        if folded:
            y_BTD, dropped = self._folded_outputs(ctx, h_BTD, routes, w, text)
            if self.shared:
                y_BTD += sequence_reduce_scatter(self._shared_output(gathered_BTD, w), 1)
            return y_BTD, dropped
        y_BTD, dropped = self._routed_outputs(ctx, gathered_BTD, _gathered(routes), w, text)
        if self.shared:
            y_BTD += self._shared_output(gathered_BTD, w)
        return sequence_reduce_scatter(y_BTD, 1), dropped

    def _folded_outputs(
        self,
        ctx: ForwardContext,
        h_BTD: jax.Array,
        routes: Routes,
        w: dict[str, Any],
        text: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the outputs of routed experts that `tensor` splits too, for the tokens of this
        device, and the pairs that were dropped on all devices of `tensor`."""
        outputs, dropped = self._routed_outputs(ctx, h_BTD, routes, w, text)
        if dropped is not None:
            dropped = all_reduce(dropped, TENSOR)
        return outputs, dropped

    def _latent_outputs(
        self,
        ctx: ForwardContext,
        h_BTD: jax.Array,
        routes: Routes,
        w: dict[str, Any],
        text: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns what `_outputs` does, of routed experts between two projections.

            y = latent_up routed(latent_down h) + shared(h)

        Each device of `tensor` projects its own positions, so that latents are gathered and
        scattered, and not the residual stream.
        """
        z_BTZ = linear(h_BTD, w["latent_down"])
        if "tensor" in ctx.expert_axes:
            routed_BTZ, dropped = self._folded_outputs(ctx, z_BTZ, routes, w, text)
        else:
            gathered_BTZ = sequence_all_gather(z_BTZ, 1)
            partial_BTZ, dropped = self._routed_outputs(
                ctx, gathered_BTZ, _gathered(routes), w, text
            )
            routed_BTZ = sequence_reduce_scatter(partial_BTZ, 1)
        # The gradient of latent_up reads it: saved with the hidden layer, it is not computed, and
        # sent, again.
        routed_BTZ = checkpoint_name(routed_BTZ, FFN_HIDDEN)
        y_BTD = linear(routed_BTZ, w["latent_up"])
        if self.shared:
            shared_BTD = self._shared_output(sequence_all_gather(h_BTD, 1), w)
            y_BTD += sequence_reduce_scatter(shared_BTD, 1)
        return y_BTD, dropped

    def _routed_outputs(
        self,
        ctx: ForwardContext,
        h_BTD: jax.Array,
        routes: Routes,
        w: dict[str, Any],
        text: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns what `capacity_moe` or `dropless_moe` returns."""
        expert_weights = {
            name.removeprefix("expert_"): weight
            for name, weight in w.items()
            if name.startswith("expert_")
        }
        if self.dispatch == "capacity":
            return capacity_moe(self, h_BTD, routes, expert_weights, ctx.sequence)
        return dropless_moe(
            self,
            h_BTD,
            routes,
            expert_weights,
            ctx.grouped_matmul,
            ctx.expert_axes,
            ctx.expert_nodes,
            text,
        )

    def _shared_output(self, h_BTD: jax.Array, w: dict[str, Any]) -> jax.Array:
        """Returns the output of the experts that every token uses, a partial sum over `tensor`."""
        weights = [w[f"shared_{name}"] for name in (*self.projections, "down")]
        apply = relu2_mlp if self.activation == "relu2" else swiglu
        y_BTD = apply(h_BTD, *weights)
        if self.shared_gate:
            y_BTD = jax.nn.sigmoid(linear(h_BTD, w["shared_scale"])) * y_BTD
        return y_BTD

    def mean_text(self, text_BT: jax.Array, axes: Axes, nodes: int) -> jax.Array | None:
        """Returns the tokens of text on a device, on average over `axes` and rounded up.

        None where no buffer has less room than could arrive, and nothing depends on it.
        """
        devices = math.prod(map(lax.axis_size, axes))
        if self.dispatch != "dropless" or not self.facts()["experts"].drops(devices, nodes):
            return None
        return -(-all_reduce(text_BT.sum(dtype=jnp.int32), axes) // devices)

    def sends_rounded(self, w: ExpertWeights) -> bool:
        """Returns whether rows are rounded before they are sent to their experts: for a smaller
        exchange, or because products in low precision would round them alike where they arrive."""
        is_rounded_by_products = isinstance(w["up"], SelfMultiplying) and self.weighted == "hidden"
        return self.expert_exchange == "fp8" or is_rounded_by_products

    def apply(
        self,
        rows: Rows,
        weights: jax.Array,
        rows_E: jax.Array,
        *,
        w: ExpertWeights,
        multiply: Multiply,
        partial: Axes,
    ) -> jax.Array:
        """Applies each expert to its rows, and their routing weights.

        rows: [rows, D], of experts in a latent [rows, Z], sorted by expert.
        weights: [rows, 1].
        rows_E: rows of each expert.
        partial: axes that split the experts' width, over which the result is a partial sum.
        """
        if self.weighted == "input":
            rows = Rows(rows.values * weights.astype(rows.values.dtype))
            weights = jnp.ones_like(weights)
        inputs = rows if isinstance(w["up"], SelfMultiplying) else rows.values
        products = multiply(inputs, tuple(w[name] for name in self.projections), rows_E)
        hidden = list[jax.Array]()
        for name, product in zip(self.projections, products, strict=True):
            if self.bias:
                product += _bias_of_rows(w[f"{name}_bias"], rows_E, product)
            hidden.append(checkpoint_name(product, FFN_HIDDEN))
        activated = hidden_layer(self.clamp, self.activation)(*hidden, weights)
        (out,) = multiply(activated, (w["down"],), rows_E)
        if not self.bias:
            return out

        @recomputed
        def scaled_bias(scales: jax.Array) -> jax.Array:
            return (scales * _bias_of_rows(w["down_bias"], rows_E, out)).astype(out.dtype)

        # One of the devices whose outputs are summed adds the bias;
        # the gradient of the weights reads it again.
        return out + scaled_bias(weights * (axis_index(partial) == 0))


def _bias_of_rows(bias: jax.Array, rows_E: jax.Array, like: jax.Array) -> jax.Array:
    """Returns the bias of each row's expert in the shape and type of `like`;
    any for the empty rows of a buffer."""
    expert = (jnp.arange(like.shape[0])[:, None] >= jnp.cumsum(rows_E)).sum(1)
    return take_rows(bias, expert, few_rows).astype(like.dtype)


def _gathered(routes: Routes) -> Routes:
    """Returns the routes of the complete sequence, gathered over `tensor`, in one collective."""
    k = routes.weights_BTX.shape[-1]
    columns = (routes.weights_BTX, routes.experts_BTX.astype(jnp.float32))
    both = all_gather(jnp.concatenate(columns, -1), TENSOR, 1)
    chosen = lax.stop_gradient(both[..., k:]).astype(jnp.int32)
    return dataclasses.replace(routes, experts_BTX=chosen, weights_BTX=both[..., :k])


@jax.custom_jvp
def _with_values(x: jax.Array, low: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns float8 rows times their scales in the type of x.
    The derivative is by x, of which nothing is read."""
    return (low.astype(jnp.float32) * scales).astype(x.dtype)


_with_values.defjvp(lambda primals, tangents: (_with_values(*primals), tangents[0]))


def round_rows(x: jax.Array) -> Rows:
    """Returns the rows of x [R, D] rounded to float8 (e4m3) with a scale each;
    derivatives pass unchanged.

    DeepSeek-V3 sends activations to experts in fp8 and their outputs, like the gradients of both,
    in bfloat16 (arXiv:2412.19437, sections 3.2.2 and 3.3.3). Here every row is rounded before it is
    sent, also where all experts are on its own device, so that the numbers do not depend on the
    mesh; sending it then loses nothing.
    """
    fixed = lax.stop_gradient(x)
    low, scales = quantise(fixed, largest_along(fixed, (1,)), GROUPED_FORMAT)
    return Rows(_with_values(x, low, scales), (low, scales))


def send_with_columns(
    rows: jax.Array, columns: jax.Array, send: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Sends rows [R, D] and float32 columns of each [R, C] as one array of their bits;
    returns what arrives of both.

    | D elements of a row | C float32 columns | zeros up to a multiple of 16 bytes |
    """
    D = rows.shape[1]
    C = columns.shape[1]
    # Elements of a row that have the bits of one float32 number.
    per_float = 4 // rows.dtype.itemsize
    bits = jnp.dtype(f"uint{32 // per_float}")
    column_bits = lax.bitcast_convert_type(columns, bits).reshape(len(rows), C * per_float)
    # GPUs copy 16 bytes at a time where rows begin at multiples of them.
    padding = jnp.zeros((len(rows), -(D + C * per_float) % (4 * per_float)), bits)
    row_bits = lax.bitcast_convert_type(rows, bits)
    arrived = send(jnp.concatenate([row_bits, column_bits, padding], 1))
    arrived_bits = arrived[:, D : D + C * per_float].reshape(len(arrived), C, per_float)
    arrived_columns = lax.bitcast_convert_type(arrived_bits, jnp.float32)
    arrived_rows = lax.bitcast_convert_type(arrived[:, :D], rows.dtype)
    return arrived_rows, arrived_columns.reshape(len(arrived), C)


class Arrived(NamedTuple):
    """Rows that `send_rows` has sent, and float32 columns of each."""

    values: jax.Array
    """[room, D] in the compute dtype; zeros where float8 rows are sent."""
    low: jax.Array | None
    """Float8 rows [room, D], where rows are rounded."""
    columns: jax.Array
    """[room, C]; the last are the scales of rounded rows."""

    def rows(self) -> Rows:
        """Returns the rows, with their float8 values and scales where they are rounded."""
        if self.low is None:
            return Rows(self.values)
        scales = lax.stop_gradient(self.columns[:, -1:])
        return Rows(_with_values(self.values, self.low, scales), (self.low, scales))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def send_rows(
    rows: Rows, columns: jax.Array, exchange: Exchange, level: Level, room: int, largest: int
) -> Arrived:
    """Sends rows and float32 columns of each [R, C]; gradients come back in the types of both.

    room: rows that arrive at most. Of rounded rows the float8 ones are sent.
    """
    send = functools.partial(
        ragged_all_to_all, exchange=exchange, level=level, capacity=room, largest=largest
    )
    if rows.rounded is None:
        values, columns = send_with_columns(rows.values, columns, send)
        return Arrived(values, None, columns)
    low, columns = send_with_columns(rows.rounded[0], columns, send)
    return Arrived(jnp.zeros((room, low.shape[1]), rows.values.dtype), low, columns)


def _send_rows_forward(
    rows: Rows, columns: jax.Array, exchange: Exchange, *static: Any
) -> tuple[Arrived, tuple[Exchange, jax.Array]]:
    # The number of rows is not an array, so an array of shape [rows, 0] carries it
    # to the backward pass.
    carrier = jnp.zeros((rows.values.shape[0], 0))
    return send_rows(rows, columns, exchange, *static), (exchange, carrier)


def _send_rows_backward(
    level: Level, _: int, largest: int, saved: tuple[Exchange, jax.Array], g: Arrived
) -> tuple[Rows, jax.Array, None]:
    exchange, carrier = saved
    send = functools.partial(
        ragged_all_to_all,
        exchange=exchange.reversed(),
        level=level,
        capacity=carrier.shape[0],
        largest=largest,
    )
    values, columns = send_with_columns(g.values, g.columns, send)
    return Rows(values), columns, None


send_rows.defvjp(_send_rows_forward, _send_rows_backward)


Apply = Callable[[Rows, jax.Array, jax.Array], jax.Array]
"""`(rows, routing weights, rows of each expert here) -> outputs`."""


@dataclasses.dataclass(frozen=True)
class ExpertParallelism:
    """Devices that the experts of a layer are split over,
    and what each of them has: buffers and experts."""

    between: Level | None
    """Nodes between which a token is sent once;
    None where it is sent once for each of its experts."""
    inside: Level | None
    """Devices that split the experts of a node, or of the mesh without nodes;
    None for one device."""
    node_experts: int
    """Experts of the devices of `inside` together."""
    local_experts: int
    """Experts of one device."""
    most_nodes: int
    """Most nodes that the experts of one token are on."""
    buffers: ExpertBuffers
    limits: ExpertBuffers
    """Rows of each buffer that this batch may use, which may be arrays."""
    apply: Apply


def dropless_moe(
    e: Experts,
    h_BTD: jax.Array,
    routes: Routes,
    w: ExpertWeights,
    multiply: Multiply,
    axes: Axes = EXPERT,
    nodes: int = 1,
    text: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the weighted sum of each token's experts,
    in groups of unequal size (MegaBlocks, arXiv:2211.15841).

        out[t] = sum over the experts x of token t that have room: weight[t, x] expert_x(h[t])

    Tokens are dispatched, copied and sorted by expert, to the devices of their experts; each device
    multiplies groups of rows by the weights of its experts; and the outputs return and are
    combined, summed by token.

    axes: those that split the experts.
    nodes: groups of their devices between which a token has one row for all of its experts in a
    group; with 1 it has one for each expert.
    text: as `Experts.mean_text` returns it, or None to count it. Returns the outputs [B, T, D],
    zeros at padding, and a number that sums over `axes` to the (token, expert) pairs that found no
    room; None where there is always room.
    """
    k = e.routing.experts_per_token
    h_TD = h_BTD.reshape(-1, h_BTD.shape[-1])
    chosen_TX = routes.experts_BTX.reshape(-1, k)
    weights_TX = routes.weights_BTX.reshape(-1, k)
    text_BT = routes.text(e.routing)
    if text is None:
        text = e.mean_text(text_BT, axes, nodes)
    partial = () if "tensor" in axes else TENSOR
    apply = functools.partial(e.apply, w=w, multiply=multiply, partial=partial)
    parallelism = _split_experts(e, len(h_TD), axes, nodes, text, apply)
    rows = round_rows(h_TD) if e.sends_rounded(w) else Rows(h_TD)
    dispatch = _to_experts if nodes == 1 else _to_nodes
    out_TD, served = dispatch(rows, chosen_TX, weights_TX, parallelism)
    dropped = None
    if text is not None:
        dropped = (text_BT.sum(dtype=jnp.int32) * k - served).astype(jnp.float32)
    return out_TD.reshape(h_BTD.shape), dropped


def _split_experts(
    e: Experts, tokens: int, axes: Axes, nodes: int, text: jax.Array | None, apply: Apply
) -> ExpertParallelism:
    """Returns how `axes` split the experts. tokens: of a device.
    text: tokens of text, as in `dropless_moe`."""
    spec: ExpertSpec = e.facts()["experts"]
    devices = math.prod(map(lax.axis_size, axes))
    levels = split_axes(axes, (nodes, devices // nodes))
    between = levels.pop(0) if nodes > 1 else None
    inside = levels.pop(0) if levels else None
    buffers = spec.buffers(tokens, devices, nodes)
    limits = buffers
    if text is not None:
        # A device has the room of its even share of the text;
        # its buffers are as large as batches without padding need.
        rooms = spec.rooms(np.arange(tokens + 1), devices, nodes)
        limits = ExpertBuffers(
            nodes=jnp.minimum(buffers.nodes, look_up(rooms.nodes, text)),
            copies=jnp.minimum(buffers.copies, look_up(rooms.copies, text)),
            experts=jnp.minimum(buffers.experts, look_up(rooms.experts, text)),
        )
    return ExpertParallelism(
        between,
        inside,
        node_experts=spec.experts // nodes,
        local_experts=spec.experts // devices,
        most_nodes=spec.most_nodes(nodes),
        buffers=buffers,
        limits=limits,
        apply=apply,
    )


def look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """Returns `table[index]` of an integer table that never decreases.

    The program has one constant for each step of the table, and not one for each of its elements.
    """
    rises = np.diff(table)
    steps = np.flatnonzero(rises)
    is_past_step = index[..., None] > steps
    value = int(table[0]) + jnp.where(is_past_step, rises[steps], 0).sum(-1)
    return value.astype(jnp.int32)


class Copies(NamedTuple):
    """Copies of rows, sorted by the group that each goes to."""

    slots: jax.Array
    """Slot `row * k + x` that each copy is of, [room]; past the last copy any."""
    places: jax.Array
    """Place of the copy of each slot, [rows, k]; out of bounds where there is none."""
    sizes: jax.Array
    """Copies for each group."""


def sort_copies(
    group_RX: jax.Array, groups: int, room: int, limit: jax.Array | int | None = None
) -> Copies:
    """Sorts the slots of rows by their group, as many as have room.

    group_RX: `groups` and above is no copy.
    limit: copies that are made, at most and by default `room`.
    """
    limit = room if limit is None else limit
    group = group_RX.reshape(-1)
    order = jnp.argsort(group, stable=True)
    counts = (group[:, None] == jnp.arange(groups)).sum(0)
    ends = jnp.minimum(jnp.cumsum(counts), limit).astype(jnp.int32)
    place = jnp.argsort(order)
    is_copied = (group < groups) & (place < limit)
    places = jnp.where(is_copied, place, room).reshape(group_RX.shape)
    return Copies(order[:room], places, jnp.diff(ends, prepend=0))


@jax.custom_vjp
def copy_rows(x: jax.Array, source: jax.Array, places: jax.Array) -> jax.Array:
    """Returns rows `source` of x, [copies, D].
    places: of the copies of each row, [rows, k], out of bounds for none.

        grad_x = sum_copies(grad_y, source, places)

    With the places the gradient is a gather too; that of an index is a scatter.
    """
    return x[source]


@jax.custom_vjp
def sum_copies(x: jax.Array, source: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the sum of the copies of each row, [rows, D],
    in float32: the transpose of `copy_rows`.

    grad_x = copy_rows(grad_y, source, places)
    """
    copies = x.at[places].get(mode="fill", fill_value=0)
    if places.shape[1] == 1:
        return copies[:, 0]
    return copies.sum(1, dtype=jnp.float32).astype(x.dtype)


copy_rows.defvjp(
    lambda x, source, places: (copy_rows(x, source, places), (source, places)),
    lambda saved, g: (sum_copies(g, *saved), None, None),
)
sum_copies.defvjp(
    lambda x, source, places: (sum_copies(x, source, places), (source, places)),
    lambda saved, g: (copy_rows(g, *saved), None, None),
)


def copies_of(
    rows: Rows, columns: jax.Array, source: jax.Array, places: jax.Array
) -> tuple[Rows, jax.Array]:
    """Copies rows as `copy_rows` does;
    returns them and their columns, with the scales of rounded rows as the last."""
    values = copy_rows(rows.values, source, places)
    if rows.rounded is None:
        return Rows(values), columns
    low, scales = (x[source] for x in rows.rounded)
    return Rows(values, (low, scales)), jnp.concatenate([columns, scales], 1)


def _to_experts(
    rows: Rows, chosen_TX: jax.Array, weights_TX: jax.Array, parallelism: ExpertParallelism
) -> tuple[jax.Array, jax.Array]:
    """Dispatches a copy of each row to every one of its experts, and combines their outputs.

        rows [T, D] -> copies sorted by expert [copies, D] -> devices
        of the experts -> outputs [copies, D] -> [T, D]

    chosen_TX: experts, counted from the first of the devices `parallelism.inside`; any number above
    theirs for none. Copies without room give zeros. Returns the outputs and the number of copies
    that found room.
    """
    k = chosen_TX.shape[1]
    copies = sort_copies(
        chosen_TX,
        parallelism.node_experts,
        parallelism.buffers.copies,
        parallelism.limits.copies,
    )
    source = copies.slots // k
    weights = copy_rows(weights_TX.reshape(-1, 1), copies.slots, copies.places.reshape(-1, 1))
    sent, columns = copies_of(rows, weights, source, copies.places)
    if parallelism.inside is None:
        out = parallelism.apply(sent, weights, copies.sizes)
        served = copies.sizes.sum()
    else:
        # A row has at most one copy for each expert,
        # which bounds those that one device sends another.
        most_copies = len(chosen_TX) * min(k, parallelism.local_experts)
        out, served = _apply_elsewhere(sent, columns, copies.sizes, most_copies, parallelism)
    return sum_copies(out, source, copies.places), served


def _apply_elsewhere(
    rows: Rows,
    columns: jax.Array,
    sizes: jax.Array,
    most_copies: int,
    parallelism: ExpertParallelism,
) -> tuple[jax.Array, jax.Array]:
    """Sends rows to the devices of their experts and returns the outputs in the same order,
    and how many found room.

    columns: routing weight of each row, then its scale where rows are rounded.
    sizes: rows for each expert of the devices.
    most_copies: bound on the rows that one device sends another.
    """
    level = parallelism.inside
    assert level is not None
    buffers = parallelism.buffers
    largest = min(buffers.experts, most_copies)
    exchange = plan_exchange(sizes.reshape(level.size, -1), level, parallelism.limits.experts)
    plan = (exchange, level, buffers.experts, largest)
    # Kernels read these rows as they arrive; with columns in the same array they would be copied.
    arrived = send_rows(rows, columns[:, :0], *plan)
    arrived = arrived._replace(columns=ragged_all_to_all(columns, *plan))
    rows_E = exchange.arriving_sizes.sum(0)
    out = parallelism.apply(arrived.rows(), arrived.columns[:, :1], rows_E)
    out = ragged_all_to_all(out, exchange.reversed(), level, buffers.copies, largest)
    return out, exchange.sizes.sum()


def _to_nodes(
    rows: Rows, chosen_TX: jax.Array, weights_TX: jax.Array, parallelism: ExpertParallelism
) -> tuple[jax.Array, jax.Array]:
    """Dispatches each row once to every node of its experts, and inside the node to these
    (DeepSeek-V3, section 3.2.2).

        network          node                          network
        row, once   ->   a copy for each expert   ->   sum of the node's outputs, once

    The device of a node that a row arrives at is the counterpart of the one that sent it, and sums
    the outputs of the row's experts there. Returns as `_to_experts` does.
    """
    level = parallelism.between
    assert level is not None
    k = chosen_TX.shape[1]
    tokens = len(chosen_TX)
    room = parallelism.most_nodes * tokens
    buffers = parallelism.buffers
    largest = min(buffers.nodes, tokens)
    copies = _sort_by_node(chosen_TX, level.size, parallelism.node_experts, room)
    source = copies.slots // k
    # Sorted, the places of a row's copies come first.
    places = jnp.sort(copies.places, 1)[:, : parallelism.most_nodes]
    # An update for each expert would cost a message between nodes.
    exchange = plan_exchange(copies.sizes[:, None], level, parallelism.limits.nodes)
    # Rows that do not arrive are zeros, so experts are counted from one.
    columns = copy_rows(jnp.concatenate([weights_TX, 1.0 + chosen_TX], 1), source, places)
    sent, columns = copies_of(rows, columns, source, places)
    arrived = send_rows(sent, columns, exchange, level, buffers.nodes, largest)
    node_chosen_TX = _chosen_in_node(
        arrived.columns[:, k : 2 * k], level.index(), parallelism.node_experts
    )
    node_rows = arrived.rows()
    out, served = _to_experts(node_rows, node_chosen_TX, arrived.columns[:, :k], parallelism)
    out = ragged_all_to_all(out, exchange.reversed(), level, room, largest)
    return sum_copies(out, source, places), served


def _sort_by_node(chosen_TX: jax.Array, nodes: int, node_experts: int, room: int) -> Copies:
    """Sorts the slots of tokens by the node of their expert, the first slot
    of each token and node."""
    node_TX = chosen_TX // node_experts
    is_same_node_TXX = node_TX[:, :, None] == node_TX[:, None]
    is_first_TX = is_same_node_TXX.argmax(-1) == jnp.arange(chosen_TX.shape[1])
    return sort_copies(jnp.where(is_first_TX, node_TX, nodes), nodes, room)


def _chosen_in_node(chosen_from_one_TX: jax.Array, node: jax.Array, node_experts: int) -> jax.Array:
    """Returns experts counted from the first of a node,
    or their number `node_experts` for those of other nodes."""
    chosen_TX = chosen_from_one_TX.astype(jnp.int32) - 1 - node * node_experts
    is_in_node = (chosen_TX >= 0) & (chosen_TX < node_experts)
    return jnp.where(is_in_node, chosen_TX, node_experts)


def expert_capacity(r: Routing, tokens: Any, factor: float) -> Any:
    """Returns the tokens of a sequence that an expert has capacity for: `factor` times an
    even share, rounded up.

    tokens: tokens of text in the sequence, an integer or an array of them.
    """
    pairs = np.ceil(tokens * r.experts_per_token * factor).astype(int)
    return np.minimum(tokens, -(-pairs // r.experts))


def capacity_moe(
    e: Experts, h_BTD: jax.Array, routes: Routes, w: ExpertWeights, sequence: SequenceSplit
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the weighted sum of each token's experts within their capacity, first choices first.

    Every expert has capacity for a number of tokens of each sequence (GShard: Lepikhin et al. 2020,
    arXiv:2006.16668, section 2.2), which follows from the sequence's tokens of text. Tokens are
    dispatched to slots of their experts:

        tokens [B, T, D] -> slots [E, B, C, D] -> all-to-all [E/expert, B*expert, C, D] ->
        experts -> and back

    Returns the outputs [B, T, D], zeros at padding,
    and the number of this device's (token, expert) pairs that were dropped.
    """
    r = e.routing
    B = h_BTD.shape[0]
    capacities = expert_capacity(r, np.arange(sequence.seq + 1), e.capacity_factor)
    kept_BTX = _pairs_within_capacity(r, routes.experts_BTX, capacities, sequence)
    local_capacity = min(int(capacities[-1]), h_BTD.shape[1])
    slot_BTX = _slots_of_pairs(r, routes.experts_BTX, kept_BTX, local_capacity)
    index = (routes.experts_BTX, jnp.arange(B)[:, None, None], slot_BTX)
    slots = (r.experts, B, local_capacity)
    x_EBCD = _dispatch_to_slots(h_BTD[:, :, None], index, slots)
    weights_EBC = _dispatch_to_slots(routes.weights_BTX, index, slots)

    products = list[jax.Array]()
    for name in e.projections:
        product_EBCF = jnp.einsum("ebcd,edf->ebcf", x_EBCD, w[name])
        products.append(checkpoint_name(product_EBCF, FFN_HIDDEN))
    hidden_EBCF = hidden_layer(None, e.activation)(*products, weights_EBC[..., None])
    out_EBCD = jnp.einsum("ebcf,efd->ebcd", hidden_EBCF, w["down"])

    out_EBCD = all_to_all(out_EBCD, EXPERT, 1, 0)
    out_BTXD = out_EBCD.at[index].get(mode="fill", fill_value=0, unique_indices=True)
    dropped_BTX = routes.text(r)[..., None] & ~kept_BTX
    out_BTD = out_BTXD.sum(2, dtype=jnp.float32).astype(h_BTD.dtype)
    return out_BTD, dropped_BTX.sum().astype(jnp.float32)


def _pairs_within_capacity(
    r: Routing, experts_BTX: jax.Array, capacities: np.ndarray, sequence: SequenceSplit
) -> jax.Array:
    """Returns which (token, expert) pairs are within the capacity of their expert, bool [B, T, k].

        kept[p] = (pairs of the expert before p in the sequence) < capacity of an expert

    Pairs are counted over the complete sequence, all first choices before any second choice.
    capacities: by the number of tokens of text in a sequence.
    """
    complete_BTX = all_gather(experts_BTX, CONTEXT, 1)
    if sequence.shards > 1:
        complete_BTX = complete_BTX[:, np.argsort(sequence.position_order())]
    pairs = complete_BTX.transpose(0, 2, 1).reshape(len(complete_BTX), -1)
    before = jnp.cumsum(pairs[..., None] == jnp.arange(r.experts), 1) - 1
    before = jnp.take_along_axis(before, pairs[..., None], -1, mode="clip")[..., 0]
    text_B = (complete_BTX[..., 0] < r.experts).sum(1)
    kept = (pairs < r.experts) & (before < look_up(capacities, text_B)[:, None])
    kept_BTX = kept.reshape(len(kept), r.experts_per_token, -1).transpose(0, 2, 1)
    if sequence.shards > 1:
        kept_BTX = kept_BTX[:, sequence.local_positions()]
    return kept_BTX


def _slots_of_pairs(
    r: Routing, experts_BTX: jax.Array, kept_BTX: jax.Array, capacity: int
) -> jax.Array:
    """Returns the index of each pair among the kept pairs of its expert on this device;
    `capacity` if dropped."""
    one_hot_BTXE = (experts_BTX[..., None] == jnp.arange(r.experts)) & kept_BTX[..., None]
    slot_BTE = jnp.cumsum(one_hot_BTXE.any(2), 1) - 1
    slot_BTX = jnp.take_along_axis(slot_BTE, experts_BTX, -1, mode="clip")
    return jnp.where(kept_BTX, slot_BTX, capacity)


def _dispatch_to_slots(
    x: jax.Array, index: tuple[jax.Array, ...], slots: tuple[int, int, int]
) -> jax.Array:
    """Writes x [B, T, k or 1, ...] to slots [E, B, C] of its experts and sends them there:
    [E/expert, B*expert, C, ...]."""
    zeros = jnp.zeros((*slots, *x.shape[3:]), x.dtype)
    filled = zeros.at[index].set(x, mode="drop", unique_indices=True)
    return all_to_all(filled, EXPERT, 0, 1)
