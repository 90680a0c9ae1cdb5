"""Fields that families with experts have in common, and the layers that are made of them."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from meshwright.declarations import changes
from meshwright.errors import refuse
from meshwright.models.blocks.experts import ExchangeType, Experts, Routing
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.blocks.layers import Norm
from meshwright.models.decoder import Block, Decoder, DecoderModel
from meshwright.models.families.fields import TiedOrNot
from meshwright.models.model import Aux, Kind, Metrics
from meshwright.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from meshwright.sharding.params import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedExperts(DecoderModel):
    """Routed experts: a token uses some of them."""

    experts: PositiveInt = 8
    """Experts E of a layer."""
    experts_per_token: PositiveInt = 2
    """Experts that a token is routed to, k."""
    expert_mlp: PositiveInt = 384
    """Feed-forward width F of an expert."""
    expert_buffer_factor: Annotated[NonNegativeFloat, changes("program", "evaluation")] = 0.0
    """Rows that each of n devices that experts are split over has room for, as a multiple of an
    even share; for `dropless`. Rows beyond are dropped and counted as `choices dropped`. 0 has room
    for the most that can arrive, up to n times the share, and gives the numbers of one device."""
    aux_loss_weight: Annotated[NonNegativeFloat, changes("program")] = 0.001
    """Weight of the load-balancing loss, summed over layers (DeepSeek-V3, equations 17 to 20)."""
    router_z_loss_weight: Annotated[NonNegativeFloat, changes("program")] = 0.0
    """Weight of the router's z-loss, summed over layers (ST-MoE, arXiv:2202.08906, equation 5)."""

    def routed(self, **changes: Any) -> Experts:
        """Returns the experts: fields of `Routing` and `Experts`
        that the family has, others by default or changed."""

        def made(kind: Any, **others: Any) -> Any:
            names = [field.name for field in dataclasses.fields(kind)]
            own = {name: getattr(self, name) for name in names if hasattr(self, name)}
            return kind(
                **own, **others | {name: changes[name] for name in names if name in changes}
            )

        routing = made(Routing)
        fix = "--model.experts-per-token 2"
        if hasattr(self, "normalize_top_k"):
            fix += ", or --model.no-normalize-top-k"
        refuse(
            (
                routing.normalize_top_k and routing.experts_per_token == 1 < routing.experts,
                "1 expert per token whose weights are scaled to sum to one (normalize_top_k)",
                "the weight of the one expert is 1 whatever its score, so the router has no "
                "gradient",
                fix,
            )
        )
        return made(Experts, routing=routing, hidden=self.expert_mlp)

    def layer_metrics(self, aux: dict[str, Aux], sequences: int) -> Metrics:
        """Returns the routing metrics of a step, averaged over the layers with experts.

        The expert balance is one where all experts have equal load; the largest load is that of the
        busiest expert of a layer over the mean.
        """
        sums = [aux[stack] for stack in self.decoder.stacks if "load" in aux.get(stack, {})]
        if not sums:
            return {}
        both = sums[0] if len(sums) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *sums)
        layers = jnp.float32(sum(layer.experts is not None for layer in self.spec().layers))
        load_LE = both["load"]
        mean_L = load_LE.mean(-1)
        mean_L = jnp.where(mean_L > 0, mean_L, 1.0)  # a batch without text has no load
        metrics = {
            "expert balance": (both["balance"].sum() / sequences, layers),
            "router z": (both["router z"].sum() / sequences, layers),
            "largest expert load": ((load_LE.max(-1) / mean_L).sum(), layers),
            "smallest expert load": ((load_LE.min(-1) / mean_L).sum(), layers),
        }
        if "dropped" in both:
            metrics["choices dropped"] = (both["dropped"].sum(), load_LE.sum())
        return metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceOfExperts(RoutedExperts):
    """How tokens choose experts and reach them."""

    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the router's logits: softmax over experts, or a sigmoid of each (DeepSeek-V3)."""
    normalize_top_k: bool = True
    """Whether the scores of a token's experts are scaled to sum to one."""
    routed_scaling: PositiveFloat = 1.0
    """Factor on the weights of routed experts (DeepSeek-V3: 2.5)."""
    expert_groups: PositiveInt = 1
    """Groups of neighbouring experts;
    a token uses its best `topk_groups` (DeepSeek-V3: 8, of which 4)."""
    topk_groups: PositiveInt = 1
    """Groups whose experts a token may use."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    """Dispatch of tokens to experts: all of them, in groups of unequal size (dropless), or as many
    of each sequence as an expert has capacity for (capacity)."""
    capacity_factor: PositiveFloat = 1.25
    """Capacity of an expert as a multiple of an even share of a sequence's tokens;
    for `capacity`."""
    expert_exchange: Annotated[ExchangeType, changes("program", "evaluation", "plan")] = "compute"
    """Type of the rows that go to experts, for `dropless`: the compute dtype, or fp8 with a scale
    for each row, as in DeepSeek-V3; what comes back, and gradients, stay in the compute dtype. Rows
    are rounded on every mesh. Those of experts in low precision always are, but in Llama 4, whose
    routing weights multiply them where they arrive."""
    bias_update_rate: Annotated[NonNegativeFloat, changes("program")] = 0.0
    """Step of the router bias that balances load without an auxiliary loss (DeepSeek-V3,
    section 2.1.2); 0 disables it."""

    @property
    def router_bias(self) -> Literal["none", "choice"]:
        """Bias of the router, which the step updates."""
        return "choice" if self.bias_update_rate > 0 else "none"

    def post_update(self, params: Tree, aux: dict[str, Aux]) -> Tree:
        """Returns `params` with the router bias moved towards experts
        whose load was below the mean.

        aux: in the rows of `params`.
        """
        if not self.bias_update_rate:
            return params
        moved = {}
        for stack in aux.keys() & params.keys():
            if "router_bias" in params[stack]:
                load_LE, bias_LE = aux[stack]["load"], params[stack]["router_bias"]
                step_LE = self.bias_update_rate * jnp.sign(
                    load_LE.mean(-1, keepdims=True) - load_LE
                )
                moved[stack] = {
                    **params[stack],
                    "router_bias": bias_LE + step_LE.astype(bias_LE.dtype),
                }
        return {**params, **moved}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseLayersFirst(ChoiceOfExperts, TiedOrNot):
    """Leading dense layers, then layers with routed and shared experts."""

    mlp: PositiveInt = 384
    """Feed-forward width F of the dense layers."""
    shared_experts: NonNegativeInt = 0
    """Experts that every token uses (DeepSeek)."""
    dense_layers: NonNegativeInt = 0
    """Leading layers without experts (DeepSeek)."""

    def routed_and_shared(self) -> Experts:
        """Returns the second half of the layers with experts."""
        return self.routed(shared=self.shared_experts * self.expert_mlp)

    def second_halves(self) -> list[tuple[str, Kind]]:
        """Returns the stack and the second half of every layer: the dense layers, then those
        with experts."""
        refuse(
            (
                self.dense_layers >= self.layers,
                f"{self.dense_layers} dense layers of {self.layers}",
                "at least one layer has experts",
                f"--model.dense-layers {max(self.layers - 1, 0)}",
            )
        )
        dense = ("dense_blocks", FeedForward(self.width, self.mlp, self.out_std))
        experts = ("blocks", self.routed_and_shared())
        return [dense] * self.dense_layers + [experts] * (self.layers - self.dense_layers)

    def dense_then_experts(self, attention: Kind, norm: Norm, **place: Any) -> Decoder:
        """Returns the dense layers, then the layers with experts.
        place: that of the norm, as in `Block`."""
        layers = tuple(
            Block(stack, attention, half, norm, **place) for stack, half in self.second_halves()
        )
        return Decoder(self.width, layers, norm, tied=self.embedding == "tied")
