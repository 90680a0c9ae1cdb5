"""Mixture of experts: routing of tokens to experts, and expert parallelism over mesh axes.

The axes are `expert`, and in folded layouts `context` and `tensor` too (sharding/layouts.py). Tokens are dispatched
with an all-to-all over them: all tokens, in groups of unequal size (`dropless_moe`), or as many of each sequence as an
expert has capacity for (`capacity_moe`). Over several nodes there are two: over the network with one row for each token
and node, then inside the node with one for each expert. On the way back a node sums a token's outputs in float32 and
returns one row (DeepSeek-V3, arXiv:2412.19437, section 3.2.2).

Load balancing and capacity are counted within a sequence (DeepSeek-V3, equations 17 to 20): a token's output does not
depend on other sequences, so the numbers are the same on any mesh and with any gradient accumulation.

Padding is not text. `route` gives padding positions no expert, and everything after it follows from that: padding is
not copied, sent, multiplied or counted, and capacities and buffers are shares of the text alone. The loss of a text is
the same whatever the number, amount and place of the padding tokens around it.

A routing weight multiplies the hidden layer of its expert, before the `down` matmul, and not the output: its gradient
then needs the hidden layer, which is there, and the backward pass neither saves nor recomputes the experts' outputs and
their way back (as with ScatterMoE, Tan et al. 2024, arXiv:2403.08245, the numbers equal a weighted sum).

Each device of `tensor` routes its own part of the sequence. Where `tensor` splits the experts, rows leave from there
and return there. Where it splits the width of each expert, all its devices send the rows of the complete sequence, by
`sequence_all_gather`, and outputs are partial sums `{U/tensor}`, which `sequence_reduce_scatter` reduces.
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
from meshwright.models.blocks.feed_forward import swiglu
from meshwright.models.blocks.layers import SelfMultiplying, few_rows, linear, take_rows
from meshwright.models.model import Aux, ExpertBuffers, ExpertSpec, ForwardContext, Kind
from meshwright.models.quantisation import GROUPED_FORMAT, Rows, largest_along, quantise
from meshwright.models.remat import FFN_HIDDEN, recomputed
from meshwright.sharding.params import Param, Stored
from meshwright.sharding.sequence import SequenceSplit

EXPERT, TENSOR = ("expert",), ("tensor",)
ExchangeType = Literal["compute", "fp8"]
"""Type of the rows that go to experts on other devices: the compute dtype, or float8 with a scale for each row."""


@dataclasses.dataclass(frozen=True)
class Routing:
    """Configuration of a router; a family's fields of the same names have the meanings (families/expert_fields.py)."""

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
    """Experts of every token, weights of their outputs, and scores and log-sum-exp of the router's logits.

    Letter X: the k experts of a token, best first; letter R: all experts, whose scores sum to one. All but the int32
    indices are float32.
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
) -> Routes:
    """Scores every expert for every token and picks the top k.

    padding_BT: positions that get no expert; None where all are text.

    bias_R: added to the scores for the choice of experts only, not for their weights (auxiliary-loss-free load
    balancing: arXiv:2412.19437, equation 16).  logit_bias_R: learned bias of the router's logits (GPT-OSS).
    """
    # By default TPUs multiply float32 in one pass of bfloat16, which changes the choice of experts.
    logits_BTR = jnp.einsum(
        "btd,dr->btr", h_BTD.astype(jnp.float32), w_DR, precision=lax.Precision.HIGHEST
    )
    if logit_bias_R is not None:
        logits_BTR += logit_bias_R.astype(jnp.float32)
    lse_BT = jax.nn.logsumexp(logits_BTR, -1)
    # Scores can all round to 0, so that what divides by their sum would not be a number; logarithms of scores cannot:
    # s / sum(s) = softmax(log s), whose derivatives are at most 1.
    if r.router_score == "softmax":
        log_scores_BTR = logits_BTR - lse_BT[..., None]
        scores_BTR = probs_BTR = jnp.exp(log_scores_BTR)
    else:
        log_scores_BTR = jax.nn.log_sigmoid(logits_BTR)
        scores_BTR = jax.nn.sigmoid(logits_BTR)
        probs_BTR = jax.nn.softmax(log_scores_BTR, -1)
    biased_BTR = lax.stop_gradient(scores_BTR if bias_R is None else scores_BTR + bias_R)
    if r.topk_groups < r.expert_groups:
        # A group is scored by its two best experts.
        grouped = biased_BTR.reshape(*biased_BTR.shape[:2], r.expert_groups, -1)
        group_scores = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        best = lax.top_k(group_scores, r.topk_groups)[1]
        allowed = (best[..., None] == jnp.arange(r.expert_groups)).any(-2)
        biased_BTR = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(biased_BTR.shape)
    experts_BTX = lax.top_k(biased_BTR, r.experts_per_token)[1].astype(jnp.int32)

    def chosen(scores_R: jax.Array, experts_X: jax.Array) -> jax.Array:
        return scores_R.at[experts_X].get(unique_indices=True)  # no two gradients meet in one score

    if r.normalize_top_k:
        weights_BTX = jax.nn.softmax(jax.vmap(jax.vmap(chosen))(log_scores_BTR, experts_BTX), -1)
    else:
        weights_BTX = jax.vmap(jax.vmap(chosen))(scores_BTR, experts_BTX)
    if padding_BT is not None:
        experts_BTX = jnp.where(padding_BT[..., None], r.experts, experts_BTX)
    return Routes(experts_BTX, weights_BTX * r.routed_scaling, probs_BTR, lse_BT, padding_BT)


def router_losses(r: Routing, routes: Routes) -> dict[str, jax.Array]:
    """Returns the router's auxiliary losses and load of this device's sequences, summed over `tensor`.

    balance: load-balancing loss, E times the sum over experts of (fraction of tokens x mean router probability); 1 for
    an even load.  router z: mean squared log-sum-exp (ST-MoE: Zoph et al. 2022, arXiv:2202.08906, equation 5).  load:
    tokens routed to each expert, [E]. Means and sums are over text: padding counts nowhere. Sums over the token axes
    are over the batch. Each device of `tensor` has its own positions, so the router's gradient is partial over `tensor`.
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
    return all_reduce({"balance": balance, "router z": z, "load": counts_BE.sum(0)}, TENSOR)


def hidden_layer(
    clamp: tuple[float, float] | None,
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns the hidden layer of SwiGLU times the routing weight of each row: `(gate, up, weights [..., 1])`."""

    @recomputed
    def swiglu(gate: jax.Array, up: jax.Array, weights: jax.Array) -> jax.Array:
        if clamp is None:
            return (jax.nn.silu(gate).astype(jnp.float32) * up * weights).astype(up.dtype)
        alpha, limit = clamp
        gate32 = jnp.minimum(gate.astype(jnp.float32), limit)
        up32 = jnp.clip(up.astype(jnp.float32), -limit, limit)
        return ((up32 + 1) * gate32 * jax.nn.sigmoid(alpha * gate32) * weights).astype(up.dtype)

    return swiglu


Multiply = Callable[[Any, Any, jax.Array], tuple[jax.Array, ...]]
"""Grouped matmul: `(rows [R, K], weights, each [E, K, N], rows of each expert [E]) -> results, each [R, N]`
(kernels/choose.py). Weights in low precision take `Rows` too."""
ExpertWeights = dict[str, jax.Array]
"""Weights of this device's experts: gate, up [E/expert, D, F/tensor] and down [E/expert, F/tensor, D]; of experts with
biases gate_bias, up_bias [E/expert, F/tensor] and down_bias [E/expert, D]. Folded they are [E/expert+context+tensor]
and have all of F."""


@dataclasses.dataclass(frozen=True)
class Experts(Kind):
    """Mixture of experts of one kind of layers, with experts that every token uses where `shared` is above 0.

    Fields of a family that have the same names have the meanings (families/expert_fields.py).
    """

    routing: Routing
    hidden: int
    """Feed-forward width F of an expert."""
    out_std: float
    """Initial standard deviation of the projections down."""
    shared: int = 0
    """Feed-forward width of the experts that every token uses."""
    shared_gate: bool = False
    """Whether the sigmoid of a projection of the token multiplies their output (Qwen3-Next)."""
    router_bias: Literal["none", "choice", "logits"] = "none"
    """Bias that changes the choice of experts and not their weights (DeepSeek-V3), or of the logits (GPT-OSS)."""
    bias: bool = False
    """Whether the projections of experts have biases."""
    clamp: tuple[float, float] | None = None
    """Factor of the gate inside of the sigmoid, and largest gate and factor, of clamped SwiGLU (GPT-OSS)."""
    weighted: Literal["hidden", "input"] = "hidden"
    """Whether the routing weight multiplies the hidden layer or the input of an expert (Llama 4)."""
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
            )
        )

    scope = "experts"

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        L, D, E, F = layers, self.width, self.routing.experts, self.hidden
        params = {
            "router": Param((L, D, E), "LDR", precision="float32", role="router"),
            "expert_gate": Param((L, E, D, F), "LEDF", role="ffn_in"),
            "expert_up": Param((L, E, D, F), "LEDF", role="ffn_in"),
            "expert_down": Param((L, E, F, D), "LEFD", std=self.out_std, role="ffn_out"),
        }
        if self.router_bias != "none":
            # A step of `bias_update_rate` is lost in a bfloat16 bias above 0.5.
            at_rest: Stored | None = "float32" if self.router_bias == "choice" else None
            params["router_bias"] = Param(
                (L, E), "LR", "zeros", precision="float32", stored=at_rest
            )
        if self.bias:
            params |= {
                f"expert_{name}_bias": Param((L, E, F), "LEF", "zeros") for name in ("gate", "up")
            }
            params["expert_down_bias"] = Param((L, E, D), "LED", "zeros")
        if self.shared:
            params |= {
                f"shared_{name}": Param((L, D, self.shared), "LDF", role="ffn_in")
                for name in ("gate", "up")
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
        own = (r.expert_groups, r.topk_groups, self.weighted)
        spec = ExpertSpec(
            r.experts,
            r.experts_per_token,
            factor,
            sent_bytes,
            *own,
            gates_shared=bool(self.shared and self.shared_gate),
        )
        return {"experts": spec}

    def build(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the experts of a step's tokens, routed and shared."""
        folded, padding_BT, text = "tensor" in ctx.expert_axes, ctx.tokens.padding, None
        if padding_BT is not None:
            dispatched_BT = local_shard(padding_BT, TENSOR, 1) if folded else padding_BT
            # Here, outside of the loop over layers, it is sent once.
            text = self.mean_text(~dispatched_BT, ctx.expert_axes, ctx.expert_nodes)
            padding_BT = local_shard(padding_BT, TENSOR, 1)

        def feed(h_BTD: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, Aux]:
            biases = {self.router_bias: w.get("router_bias")}
            with jax.named_scope("router"):
                routes = route(
                    self.routing,
                    h_BTD,
                    w["router"],
                    biases.get("choice"),
                    biases.get("logits"),
                    padding_BT,
                )
                aux = router_losses(self.routing, routes)
            # Outputs of experts that `tensor` splits are those of this device's tokens.
            own_BTD = h_BTD
            if self.shared or not folded:
                h_BTD = sequence_all_gather(h_BTD, 1)
            if not folded:
                own_BTD, routes = h_BTD, _gathered(routes)
            aux["aux_loss"] = (
                self.aux_loss_weight * aux["balance"] + self.router_z_loss_weight * aux["router z"]
            )
            own = {
                name.removeprefix("expert_"): weight
                for name, weight in w.items()
                if name.startswith("expert_")
            }
            if self.dispatch == "capacity":
                y_BTD, dropped = capacity_moe(self, own_BTD, routes, own, ctx.sequence)
            else:
                y_BTD, dropped = dropless_moe(
                    self,
                    own_BTD,
                    routes,
                    own,
                    ctx.grouped_matmul,
                    ctx.expert_axes,
                    ctx.expert_nodes,
                    text,
                )
            if dropped is not None:
                aux["dropped"] = all_reduce(dropped, TENSOR) if folded else dropped
            if self.shared:
                shared_BTD = swiglu(h_BTD, w["shared_gate"], w["shared_up"], w["shared_down"])
                if self.shared_gate:
                    shared_BTD = jax.nn.sigmoid(linear(h_BTD, w["shared_scale"])) * shared_BTD
                y_BTD += sequence_reduce_scatter(shared_BTD, 1) if folded else shared_BTD
            return y_BTD if folded else sequence_reduce_scatter(y_BTD, 1), aux

        return feed

    def mean_text(self, text_BT: jax.Array, axes: Axes, nodes: int) -> jax.Array | None:
        """Returns the tokens of text on a device, on average over `axes` and rounded up.

        None where no buffer has less room than could arrive, and nothing depends on it.
        """
        devices = math.prod(map(lax.axis_size, axes))
        if self.dispatch != "dropless" or not self.facts()["experts"].drops(devices, nodes):
            return None
        return -(-all_reduce(text_BT.sum(dtype=jnp.int32), axes) // devices)

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

        rows: [rows, D], sorted by expert.  weights: [rows, 1].  rows_E: rows of each expert.  partial: axes that split
        the experts' width, over which the result is a partial sum.
        """
        if self.weighted == "input":
            rows, weights = (
                Rows(rows.values * weights.astype(rows.values.dtype)),
                jnp.ones_like(weights),
            )
        given = rows if isinstance(w["gate"], SelfMultiplying) else rows.values

        def bias_of_rows(name: str, like: jax.Array) -> jax.Array:
            """Returns the bias of each row's expert; any for the empty rows of a buffer."""
            expert = (jnp.arange(like.shape[0])[:, None] >= jnp.cumsum(rows_E)).sum(1)
            return take_rows(w[f"{name}_bias"], expert, few_rows).astype(like.dtype)

        def hidden(name: str, y: jax.Array) -> jax.Array:
            return checkpoint_name(y + bias_of_rows(name, y) if self.bias else y, FFN_HIDDEN)

        gate, up = multiply(given, (w["gate"], w["up"]), rows_E)
        activated = hidden_layer(self.clamp)(hidden("gate", gate), hidden("up", up), weights)
        (out,) = multiply(activated, (w["down"],), rows_E)
        if self.bias:
            # One of the devices whose outputs are summed adds the bias; the gradient of the weights reads it again.
            first = weights * (axis_index(partial) == 0)
            out += recomputed(lambda scale: (scale * bias_of_rows("down", out)).astype(out.dtype))(
                first
            )
        return out


def _gathered(routes: Routes) -> Routes:
    """Returns the routes of the complete sequence, gathered over `tensor`, in one collective."""
    k = routes.weights_BTX.shape[-1]
    columns = (routes.weights_BTX, routes.experts_BTX.astype(jnp.float32))
    both = all_gather(jnp.concatenate(columns, -1), TENSOR, 1)
    chosen = lax.stop_gradient(both[..., k:]).astype(jnp.int32)
    return dataclasses.replace(routes, experts_BTX=chosen, weights_BTX=both[..., :k])


@jax.custom_jvp
def _with_values(x: jax.Array, low: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns float8 rows times their scales in the type of x. The derivative is by x, of which nothing is read."""
    return (low.astype(jnp.float32) * scales).astype(x.dtype)


_with_values.defjvp(lambda primals, tangents: (_with_values(*primals), tangents[0]))


def round_rows(x: jax.Array) -> Rows:
    """Returns the rows of x [R, D] rounded to float8 (e4m3) with a scale each; derivatives pass unchanged.

    DeepSeek-V3 sends activations to experts in fp8 and their outputs, like the gradients of both, in bfloat16
    (arXiv:2412.19437, sections 3.2.2 and 3.3.3). Here every row is rounded before it is sent, also where all experts
    are on its own device, so that the numbers do not depend on the mesh; sending it then loses nothing.
    """
    fixed = lax.stop_gradient(x)
    low, scales = quantise(fixed, largest_along(fixed, (1,)), GROUPED_FORMAT)
    return Rows(_with_values(x, low, scales), (low, scales))


def beside(
    rows: jax.Array, columns: jax.Array, send: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Sends rows [R, D] and float32 columns [R, C] of each as one array of their bits; returns what arrives of both."""
    D, C, words = rows.shape[1], columns.shape[1], 4 // rows.dtype.itemsize
    bits = jnp.dtype(f"uint{32 // words}")
    own = lax.bitcast_convert_type(columns, bits).reshape(len(rows), C * words)
    # GPUs copy 16 bytes at a time where rows begin at multiples of them.
    aligned = jnp.zeros((len(rows), -(D + C * words) % (4 * words)), bits)
    arrived = send(jnp.concatenate([lax.bitcast_convert_type(rows, bits), own, aligned], 1))
    there = lax.bitcast_convert_type(
        arrived[:, D : D + C * words].reshape(len(arrived), C, words), jnp.float32
    )
    return lax.bitcast_convert_type(arrived[:, :D], rows.dtype), there.reshape(len(arrived), C)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def send_rows(
    rows: Rows, columns: jax.Array, exchange: Exchange, level: Level, room: int, largest: int
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Sends rows and float32 columns of each [R, C]; gradients come back in the types of both.

    Returns what arrives, `room` rows: values, float8 rows and columns. Of rounded rows the float8 ones are sent, and
    the values that arrive are zeros.
    """
    send = functools.partial(
        ragged_all_to_all, exchange=exchange, level=level, rows=room, largest=largest
    )
    if rows.rounded is None:
        values, columns = beside(rows.values, columns, send)
        return values, None, columns
    low, columns = beside(rows.rounded[0], columns, send)
    return jnp.zeros((room, low.shape[1]), rows.values.dtype), low, columns


def _send_back(level: Level, _: int, largest: int, saved: Any, g: Any) -> tuple[Any, ...]:
    exchange, rows = saved[0].reversed(), saved[1].shape[0]
    values, columns = beside(
        g[0], g[2], lambda bits: ragged_all_to_all(bits, exchange, level, rows, largest)
    )
    return Rows(values), columns, None


# The number of rows is not an array, so an array of shape [rows, 0] carries it to the backward pass.
send_rows.defvjp(
    lambda rows, *more: (send_rows(rows, *more), (more[1], jnp.zeros((rows.values.shape[0], 0)))),
    _send_back,
)


def arrived_rows(values: jax.Array, low: jax.Array | None, columns: jax.Array) -> Rows:
    """Returns the rows that `send_rows` has sent. columns: of which the last are the scales of rounded rows."""
    scales = lax.stop_gradient(columns[:, -1:])
    return Rows(values) if low is None else Rows(_with_values(values, low, scales), (low, scales))


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
    """Computes the weighted sum of each token's experts, in groups of unequal size (MegaBlocks, arXiv:2211.15841).

    axes: those that split the experts.  nodes: groups of their devices between which a token has one row for all of its
    experts in a group; with 1 it has one for each expert.  text: as `Experts.mean_text` returns it, or None to count it.
    Returns the outputs [B, T, D], zeros at padding, and a number that sums over `axes` to the (token, expert) pairs
    that found no room; None where there is always room.
    """
    B, T, D = h_BTD.shape
    k = e.routing.experts_per_token
    flat = h_BTD.reshape(B * T, D)
    # Products in low precision would round these rows alike where they arrive.
    rounds = e.expert_exchange == "fp8" or (
        isinstance(w["gate"], SelfMultiplying) and e.weighted == "hidden"
    )
    chosen, weights = (x.reshape(B * T, k) for x in (routes.experts_BTX, routes.weights_BTX))
    spec, devices = e.facts()["experts"], math.prod(map(lax.axis_size, axes))
    levels = split_axes(axes, (nodes, devices // nodes))
    text_BT = routes.text(e.routing)
    if text is None:
        text = e.mean_text(text_BT, axes, nodes)
    buffers = limits = spec.buffers(B * T, devices, nodes)
    if text is not None:
        # A device has the room of its even share of the text; its buffers are as large as batches without padding need.
        rooms = spec.rooms(np.arange(B * T + 1), devices, nodes)
        limits = ExpertBuffers(
            *(
                jnp.minimum(most, look_up(room, text))
                for most, room in zip(buffers, rooms, strict=True)
            )
        )
    own, partial = e.routing.experts // devices, () if "tensor" in axes else TENSOR
    apply = functools.partial(e.apply, w=w, multiply=multiply, partial=partial)
    send = _to_nodes if nodes > 1 else _to_experts
    rows = round_rows(flat) if rounds else Rows(flat)
    out, served = send(e, rows, chosen, weights, apply, levels, own, (buffers, limits))
    dropped = None
    if text is not None:
        dropped = (text_BT.sum(dtype=jnp.int32) * k - served).astype(jnp.float32)
    return out.reshape(B, T, D), dropped


def look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """Returns `table[index]` of an integer table that never decreases.

    The program has one constant for each step of the table, and not one for each of its elements.
    """
    rises = np.diff(table)
    at = np.flatnonzero(rises)
    reached = index[..., None] > at
    return (int(table[0]) + jnp.where(reached, rises[at], 0).sum(-1)).astype(jnp.int32)


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

    group_RX: `groups` and above is no copy.  limit: copies that are made, at most and by default `room`.
    """
    limit = room if limit is None else limit
    flat = group_RX.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    ends = jnp.minimum(jnp.cumsum((flat[:, None] == jnp.arange(groups)).sum(0)), limit).astype(
        jnp.int32
    )
    places = jnp.argsort(order)
    places = jnp.where((flat < groups) & (places < limit), places, room).reshape(group_RX.shape)
    return Copies(order[:room], places, jnp.diff(ends, prepend=0))


@jax.custom_vjp
def copy_rows(x: jax.Array, source: jax.Array, places: jax.Array) -> jax.Array:
    """Returns rows `source` of x, [copies, D]. places: of the copies of each row, [rows, k], out of bounds for none.

    With the places the gradient is a gather too; that of an index is a scatter.
    """
    return x[source]


@jax.custom_vjp
def sum_copies(x: jax.Array, source: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the sum of the copies of each row, [rows, D], in float32: the transpose of `copy_rows`."""
    copies = x.at[places].get(mode="fill", fill_value=0)
    return (
        copies[:, 0] if places.shape[1] == 1 else copies.sum(1, dtype=jnp.float32).astype(x.dtype)
    )


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
    """Copies rows as `copy_rows` does, and float32 columns of each beside the scales of rounded rows."""
    values = copy_rows(rows.values, source, places)
    if rows.rounded is None:
        return Rows(values), columns
    low, scales = (x[source] for x in rows.rounded)
    return Rows(values, (low, scales)), jnp.concatenate([columns, scales], 1)


Apply = Callable[[Rows, jax.Array, jax.Array], jax.Array]
"""`(rows, routing weights, rows of each expert here) -> outputs`."""
Rooms = tuple[ExpertBuffers, ExpertBuffers]
"""Rows of each buffer, and how many of them this batch may use, which may be arrays."""


def _to_experts(
    e: Experts,
    rows: Rows,
    chosen_RX: jax.Array,
    weights_RX: jax.Array,
    apply: Apply,
    levels: list[Level],
    own: int,
    rooms: Rooms,
) -> tuple[jax.Array, jax.Array]:
    """Sends each row to the devices of its experts, a copy for each, and returns the sums of their outputs.

    chosen_RX: experts, counted from the first of these devices; any number above theirs for none.  levels: of these
    devices, none where the experts are here.  own: experts of each. Copies without room give zeros; returns the number
    of the others too.
    """
    k, (level, *_) = chosen_RX.shape[1], levels or [Level((), 1, None)]
    buffers, limits = rooms
    slots, places, sizes = sort_copies(chosen_RX, level.size * own, buffers.copies, limits.copies)
    source = slots // k
    weights = copy_rows(weights_RX.reshape(-1, 1), slots, places.reshape(-1, 1))
    copies, columns = copies_of(rows, weights, source, places)
    if level.size == 1:
        return sum_copies(apply(copies, weights, sizes), source, places), sizes.sum()
    # A row has at most one copy for each expert, which bounds those that one device sends another.
    largest = min(buffers.experts, chosen_RX.shape[0] * min(k, own))
    sent = sizes.reshape(level.size, -1)
    exchange = plan_exchange(sent, level, limits.experts)
    # Kernels read these rows as they arrive; beside them columns would cost a copy.
    to = (exchange, level, buffers.experts, largest)
    (values, low, _), columns = (
        send_rows(copies, columns[:, :0], *to),
        ragged_all_to_all(columns, *to),
    )
    out = apply(arrived_rows(values, low, columns), columns[:, :1], exchange.arriving_sizes.sum(0))
    out = ragged_all_to_all(out, exchange.reversed(), level, buffers.copies, largest)
    return sum_copies(out, source, places), exchange.sizes.sum()


def _to_nodes(
    e: Experts,
    rows: Rows,
    chosen_RX: jax.Array,
    weights_RX: jax.Array,
    apply: Apply,
    levels: list[Level],
    own: int,
    rooms: Rooms,
) -> tuple[jax.Array, jax.Array]:
    """Sends each row once to every node with experts of it, and there to these; returns as `_to_experts` does.

    A node's device that a row arrives at is the counterpart of the one that sent it, and sums the outputs of the row's
    experts there, so that one row returns from each node.
    """
    k, (level, *inside) = chosen_RX.shape[1], levels
    of_node, limit = e.routing.experts // level.size, e.facts()["experts"].most_nodes(level.size)
    node_RX = chosen_RX // of_node
    first_RX = (node_RX[:, :, None] == node_RX[:, None]).argmax(-1) == jnp.arange(k)
    tokens, (buffers, limits) = chosen_RX.shape[0], rooms
    room, largest = limit * tokens, min(buffers.nodes, tokens)
    slots, places, sizes = sort_copies(jnp.where(first_RX, node_RX, level.size), level.size, room)
    source, places, sent = slots // k, jnp.sort(places, 1)[:, :limit], sizes[:, None]
    # An update for each expert would cost a message between nodes.
    exchange = plan_exchange(sent, level, limits.nodes)
    # Rows that do not arrive are zeros, so experts are counted from one.
    columns = copy_rows(jnp.concatenate([weights_RX, 1.0 + chosen_RX], 1), source, places)
    arrived = send_rows(
        *copies_of(rows, columns, source, places), exchange, level, buffers.nodes, largest
    )
    columns = arrived[2]
    here_RX = columns[:, k : 2 * k].astype(jnp.int32) - 1 - level.index() * of_node
    here_RX = jnp.where((here_RX >= 0) & (here_RX < of_node), here_RX, of_node)
    out, served = _to_experts(
        e, arrived_rows(*arrived), here_RX, columns[:, :k], apply, inside, own, rooms
    )
    out = ragged_all_to_all(out, exchange.reversed(), level, room, largest)
    return sum_copies(out, source, places), served


def expert_capacity(r: Routing, tokens: Any, factor: float) -> Any:
    """Returns the tokens of a sequence that an expert has capacity for: `factor` times an even share, rounded up.

    tokens: tokens of text in the sequence, an integer or an array of them.
    """
    pairs = np.ceil(tokens * r.experts_per_token * factor).astype(int)
    return np.minimum(tokens, -(-pairs // r.experts))


def capacity_moe(
    e: Experts, h_BTD: jax.Array, routes: Routes, w: ExpertWeights, sequence: SequenceSplit
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the weighted sum of each token's experts within their capacity, first choices first.

    Every expert has capacity for a number of tokens of each sequence (GShard: Lepikhin et al. 2020, arXiv:2006.16668,
    section 2.2), which follows from the sequence's tokens of text. Returns the outputs [B, T, D], zeros at padding, and
    the number of this device's (token, expert) pairs that were dropped.
    """
    B, T, _ = h_BTD.shape
    r = e.routing
    capacities = expert_capacity(r, np.arange(sequence.seq + 1), e.capacity_factor)
    # Pairs are counted over the complete sequence, all first choices before any second choice.
    whole_BTX = all_gather(routes.experts_BTX, CONTEXT, 1)
    if sequence.shards > 1:
        whole_BTX = whole_BTX[:, np.argsort(sequence.position_order())]
    pairs = whole_BTX.transpose(0, 2, 1).reshape(B, -1)
    slot = jnp.cumsum(pairs[..., None] == jnp.arange(r.experts), 1) - 1
    slot = jnp.take_along_axis(slot, pairs[..., None], -1, mode="clip")[..., 0]
    text_B = (whole_BTX[..., 0] < r.experts).sum(1)
    kept = (pairs < r.experts) & (slot < look_up(capacities, text_B)[:, None])
    kept_BTX = kept.reshape(B, r.experts_per_token, -1).transpose(0, 2, 1)
    if sequence.shards > 1:
        kept_BTX = kept_BTX[:, sequence.local_positions()]
    local_capacity = min(int(capacities[-1]), T)
    # Slot of each pair among the kept pairs of its expert on this device; dropped pairs get a slot out of bounds.
    one_hot_BTXE = (routes.experts_BTX[..., None] == jnp.arange(r.experts)) & kept_BTX[..., None]
    slot_BTE = jnp.cumsum(one_hot_BTXE.any(2), 1) - 1
    slot_BTX = jnp.take_along_axis(slot_BTE, routes.experts_BTX, -1, mode="clip")
    slot_BTX = jnp.where(kept_BTX, slot_BTX, local_capacity)
    index = (routes.experts_BTX, jnp.arange(B)[:, None, None], slot_BTX)

    def in_slots(x: jax.Array) -> jax.Array:
        zeros = jnp.zeros((r.experts, B, local_capacity, *x.shape[3:]), x.dtype)
        return all_to_all(zeros.at[index].set(x, mode="drop", unique_indices=True), EXPERT, 0, 1)

    x_EBCD, weights_EBC = in_slots(h_BTD[:, :, None]), in_slots(routes.weights_BTX)
    gate_EBCF, up_EBCF = (
        checkpoint_name(jnp.einsum("ebcd,edf->ebcf", x_EBCD, w[n]), FFN_HIDDEN)
        for n in ("gate", "up")
    )
    hidden_EBCF = hidden_layer(None)(gate_EBCF, up_EBCF, weights_EBC[..., None])
    out_EBCD = jnp.einsum("ebcf,efd->ebcd", hidden_EBCF, w["down"])
    out_EBCD = all_to_all(out_EBCD, EXPERT, 1, 0)
    out_BTXD = out_EBCD.at[index].get(mode="fill", fill_value=0, unique_indices=True)
    dropped_BTX = routes.text(r)[..., None] & ~kept_BTX
    out_BTD = out_BTXD.sum(2, dtype=jnp.float32).astype(h_BTD.dtype)
    return out_BTD, dropped_BTX.sum().astype(jnp.float32)
