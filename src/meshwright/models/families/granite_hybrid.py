"""Granite 4 (IBM 2025; its published configurations): layers with a state space, and some with
attention.

They are dense, or have experts and a shared one. The factors are those of Granite 3
(families/granite.py).
"""

import dataclasses
from typing import ClassVar, Literal

from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.expert_fields import RoutedExperts
from meshwright.models.families.fields import StateSpace, TiedOrNot
from meshwright.models.families.granite import Factors
from meshwright.models.families.layer_pattern import PatternOfLayers
from meshwright.models.model import Kind
from meshwright.ranges import NonNegativeInt, PositiveInt


@dataclasses.dataclass(frozen=True)
class GraniteHybrid(PatternOfLayers, RoutedExperts, StateSpace, TiedOrNot, Factors):
    """Configuration of a Granite 4 decoder.

    Example:
        >>> model = mw.GraniteHybrid(
        ...     vocab=32000, width=512, layers=4, heads=8, pattern="M*MM"
        ... )
        >>> [layer.stack for layer in model.spec().layers]
        ['mamba_blocks', 'blocks', 'mamba_blocks', 'mamba_blocks']
    """

    KINDS: ClassVar[dict[str, str]] = {"M": "a state space", "*": "attention"}

    mlp: PositiveInt = 384
    """Feed-forward width F of the dense feed-forward, or of the shared expert."""
    experts: NonNegativeInt = 0
    """Experts E of a layer; 0 has a dense feed-forward."""
    pattern: str = dataclasses.field(default="M*", kw_only=True)
    """Kinds of the layers, repeated where there are more: M a state space, * attention
    (`layer_types` of the published configurations)."""
    rotation: Literal["none", "rope"] = "none"
    """Whether heads of attention rotate."""
    attention_bias: Literal["none", "learned"] = "none"
    """Bias of the four projections of attention."""

    def build(self) -> Decoder:
        """Returns the layers of the pattern."""
        self.check_pattern()
        bias = self.attention_bias == "learned"
        rotary = self.rotary() if self.rotation == "rope" else None
        attention = self.attention(rotary=rotary, qkv_bias=bias, out_bias=bias)
        feed_forward: Kind = FeedForward(self.width, self.mlp, self.out_std)
        if self.experts:
            feed_forward = self.routed(shared=self.mlp)
        blocks = {
            "M": Block("mamba_blocks", self.mamba(), feed_forward, self.norm),
            "*": Block("blocks", attention, feed_forward, self.norm),
        }
        return self.scaled(self.in_order([blocks[kind] for kind in self.kinds]))
