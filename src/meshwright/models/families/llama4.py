"""Llama 4's text model (Meta 2025; its published configurations): rotary layers with chunked attention, layers without.

A layer is Llama's, with a second half that is dense or a mixture of experts. Of `no_rope_interval` layers the last has
no rotary embedding: it attends to all before it, and its queries grow with their position. The others attend within
chunks, rotate neighbouring features, and normalise queries and keys without a scale. Of `expert_interval` layers the
last has experts: a token's routed experts, whose input is scaled by the sigmoid of its logit, and one shared.
"""

import dataclasses
import math
from typing import Any, Literal

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.blocks.experts import Experts, Routing
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.expert_fields import RoutedExperts
from meshwright.models.families.fields import ScaledRotary, TiedOrNot


@dataclasses.dataclass(frozen=True)
class Llama4(RoutedExperts, ScaledRotary, TiedOrNot):
    """Configuration of a Llama 4 decoder; `mlp` is the width of the dense layers.

    Example:
        >>> model = mw.Llama4(vocab=32000, width=512, layers=4, heads=8, kv_heads=2, experts=16, expert_interval=2)
        >>> [(layer.stack, layer.attention.chunk) for layer in model.spec().layers]
        [('dense_blocks', 8192), ('blocks', 8192), ('dense_blocks', 8192), ('blocks', None)]
    """

    mlp: int = 384
    """Feed-forward width F of the dense layers."""
    rope_theta: float = 500000.0
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
    experts_per_token: int = 1

    def build(self) -> Decoder:
        """Returns the layers by turns."""
        _check(self)
        period = math.lcm(self.no_rope_interval, self.expert_interval)
        l2 = self.norm_epsilon if self.qk_l2_norm == "rotary" else None
        rotary = self.attention(rotary=self.rotary(pairs="neighbours"), chunk=self.attention_chunk, qk_l2_epsilon=l2)
        whole = self.attention(rotary=None, temperature=(self.temperature_scale, self.temperature_floor))
        dense = FeedForward(self.width, self.mlp, self.out_std)
        experts = Experts(
            self.width,
            Routing(self.experts, self.experts_per_token, "sigmoid", normalize_top_k=False),
            self.expert_mlp,
            self.out_std,
            self.expert_mlp,
            weighted="input",
            **self.expert_fields(),
        )

        def kind(place: int) -> Block:
            attention = rotary if place % self.no_rope_interval else whole
            if place % self.expert_interval:
                return Block("dense_blocks", attention, dense, self.norm)
            return Block("blocks", attention, experts, self.norm)

        return self.repeat(*(kind(place) for place in range(1, period + 1)))

    def small_sizes(self, shape: MeshShape, layers: int) -> dict[str, Any]:
        """Returns fields of `shrunk`, with periods of two layers."""
        intervals = {"no_rope_interval": 2, "expert_interval": min(2, self.expert_interval)}
        return {**super().small_sizes(shape, layers), **intervals, "attention_chunk": 16}


def _check(c: Llama4) -> None:
    for asked, truth, wrong, fix in (
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
    ):
        if wrong:
            raise ConfigError(asked, truth, fix)
