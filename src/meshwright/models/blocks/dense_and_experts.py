"""Second half of a layer with a dense feed-forward and experts side by side (Gemma 4).

Both read the residual stream x through norms of their own, and so does the router; a learned factor
s of each feature multiplies the router's input. With the block's norm before the half and after it:

    y = norm(dense(norm(x))) + norm(experts(norm(x), routed by rms(x) s / sqrt(D)));  x += norm(y)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from meshwright.models.blocks.experts import Experts
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.blocks.layers import Norm
from meshwright.models.model import Aux, ForwardContext, Kind
from meshwright.sharding.params import Param


@dataclasses.dataclass(frozen=True)
class DenseAndExperts(Kind):
    """Dense feed-forward and experts of one kind of layers."""

    dense: FeedForward
    experts: Experts
    norm: Norm
    """Norm of their outputs, of the input of the experts, and of that of the router."""

    scope = "dense and experts"
    reads_residual = True

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        params = self.dense.params(layers) | self.experts.params(layers)
        for name in ("dense_out_norm", "experts_norm", "experts_out_norm", "router_norm"):
            params |= self.norm.params(name, (layers, self.width), "LD")
        return params

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `LayerSpec`."""
        return {**self.dense.facts(), **self.experts.facts(), "has_two_feed_forwards": True}

    def build(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the half for a step's tokens: `(normalised x, weights, x) -> output, aux`."""
        dense = self.dense.build(ctx)
        experts = self.experts.build_routed(ctx)

        def feed(h_BTD: jax.Array, w: dict[str, Any], x_BTD: jax.Array) -> tuple[jax.Array, Aux]:
            dense_BTD, _ = dense(h_BTD, w)
            routed_BTD = self.norm(x_BTD, w["router_norm"] * self.width**-0.5)
            experts_BTD, aux = experts(routed_BTD, self.norm(x_BTD, w["experts_norm"]), w)
            y_BTD = self.norm(dense_BTD, w["dense_out_norm"])
            return y_BTD + self.norm(experts_BTD, w["experts_out_norm"]), aux

        return feed
