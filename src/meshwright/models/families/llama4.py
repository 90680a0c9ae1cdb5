"""Llama 4's text model (Meta 2025; its published configurations): rotary layers with chunked
attention, layers without.

A layer is Llama's, with a second half that is dense or a mixture of experts. Of `no_rope_interval`
layers the last has no rotary embedding: it attends to all before it, and its queries grow with
their position. The others attend within chunks, rotate neighbouring features, and normalise queries
and keys without a scale. Of `expert_interval` layers the last has experts: a token's routed
experts, whose input is scaled by the sigmoid of its logit, and one shared.
"""

import dataclasses
import math
from typing import Literal

from meshwright.errors import refuse
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.blocks.rotary import Temperature
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.expert_fields import RoutedExperts
from meshwright.models.families.fields import ScaledRotary, TiedOrNot
from meshwright.ranges import NonNegativeFloat, PositiveInt


@dataclasses.dataclass(frozen=True)
class Llama4(RoutedExperts, ScaledRotary, TiedOrNot):
    """Configuration of a Llama 4 decoder; `mlp` is the width of the dense layers.

    Example:
        >>> sizes = {"vocab": 32000, "width": 512, "layers": 4, "heads": 8, "kv_heads": 2}
        >>> model = mw.Llama4(**sizes, experts=16, expert_interval=2)
        >>> [(layer.stack, layer.attention.chunk) for layer in model.spec().layers]
        [('dense_blocks', 8192), ('blocks', 8192), ('dense_blocks', 8192), ('blocks', None)]
    """

    mlp: PositiveInt = 384
    """Feed-forward width F of the dense layers."""
    rope_theta: float = 500000.0
    no_rope_interval: PositiveInt = 4
    """Layers of which the last has no rotary embedding."""
    attention_chunk: PositiveInt = 8192
    """Tokens of a chunk, within which rotary layers attend."""
    qk_l2_norm: Literal["none", "rotary"] = "rotary"
    """Whether rotary layers divide queries and keys by their root mean square, after rotation."""
    temperature_scale: NonNegativeFloat = 0.1
    """Growth s of the queries of layers without rotary embedding: times 1 + s ln(1 +
    floor((position + 1) / p))."""
    temperature_floor: PositiveInt = 8192
    """Positions p after which the queries grow."""
    expert_interval: PositiveInt = 1
    """Layers of which the last has experts; 1 gives all of them experts."""
    experts: int = 16
    experts_per_token: int = 1

    def build(self) -> Decoder:
        """Returns the layers by turns."""
        refuse(
            (
                self.expert_interval > self.layers,
                f"{self.layers} layers of which every {self.expert_interval}-th has experts",
                "at least one layer has experts",
                f"--model.expert-interval {self.layers}",
            )
        )
        period = math.lcm(self.no_rope_interval, self.expert_interval)
        l2 = self.norm_epsilon if self.qk_l2_norm == "rotary" else None
        rotary = self.attention(
            rotary=self.rotary(pairs="neighbours"), chunk=self.attention_chunk, qk_l2_epsilon=l2
        )
        whole = self.attention(
            rotary=None,
            temperature=Temperature(self.temperature_scale, self.temperature_floor, offset=1),
        )
        dense = FeedForward(self.width, self.mlp, self.out_std)
        scores = {"router_score": "sigmoid", "normalize_top_k": False}
        experts = self.routed(**scores, shared=self.expert_mlp, weighted="input")

        def kind(place: int) -> Block:
            attention = rotary if place % self.no_rope_interval else whole
            if place % self.expert_interval:
                return Block("dense_blocks", attention, dense, self.norm)
            return Block("blocks", attention, experts, self.norm)

        return self.repeat(*(kind(place) for place in range(1, period + 1)))
