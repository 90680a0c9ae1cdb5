"""Granite 4 (IBM 2025; its published configurations): layers with a state space, and of each
`attention_interval` one with attention; dense, or with experts and a shared one. The factors are
those of Granite 3 (families/granite.py).
"""

import dataclasses
from typing import Any, Literal

from meshwright.config import MeshShape
from meshwright.errors import refuse
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.expert_fields import RoutedExperts
from meshwright.models.families.fields import StateSpace, TiedOrNot
from meshwright.models.families.granite import Factors
from meshwright.models.model import Kind
from meshwright.ranges import NonNegativeInt, PositiveInt


@dataclasses.dataclass(frozen=True)
class GraniteHybrid(RoutedExperts, StateSpace, TiedOrNot, Factors):
    """Configuration of a Granite 4 decoder.

    Example:
        >>> model = mw.GraniteHybrid(
        ...     vocab=32000, width=512, layers=4, heads=8, attention_interval=4, attention_offset=1
        ... )
        >>> [layer.stack for layer in model.spec().layers]
        ['mamba_blocks', 'blocks', 'mamba_blocks', 'mamba_blocks']
    """

    mlp: PositiveInt = 384
    """Feed-forward width F of the dense feed-forward, or of the shared expert."""
    experts: NonNegativeInt = 0
    """Experts E of a layer; 0 has a dense feed-forward."""
    attention_interval: NonNegativeInt = 2
    """Layers of which one has attention, and the others a state space; 0 has no attention."""
    attention_offset: NonNegativeInt = 1
    """Layers before the one with attention, of each interval."""
    rotation: Literal["none", "rope"] = "none"
    """Whether heads of attention rotate."""
    attention_bias: Literal["none", "learned"] = "none"
    """Bias of the four projections of attention."""

    def build(self) -> Decoder:
        """Returns the layers by turns."""
        interval, offset = self.attention_interval, self.attention_offset
        legal = max(1, min(interval, self.layers))
        refuse(
            (
                interval > self.layers,
                f"{self.layers} layers of which one of {interval} has attention",
                "at least one layer has attention, unless the interval is 0",
                f"--model.attention-interval {legal} --model.attention-offset "
                f"{min(offset, legal - 1)}",
            ),
            (
                interval > 0 and offset >= interval,
                f"{offset} layers before the one with attention of each {interval}",
                f"{interval} layers are numbered from 0 to {interval - 1}",
                f"--model.attention-offset {interval - 1}",
            ),
        )
        bias = self.attention_bias == "learned"
        rotary = self.rotary() if self.rotation == "rope" else None
        attention = self.attention(rotary=rotary, qkv_bias=bias, out_bias=bias)
        feed_forward: Kind = FeedForward(self.width, self.mlp, self.out_std)
        if self.experts:
            feed_forward = self.routed(shared=self.mlp)
        kinds = [Block("mamba_blocks", self.mamba(), feed_forward, self.norm)] * max(1, interval)
        if interval:
            kinds[offset] = Block("blocks", attention, feed_forward, self.norm)
        return self.scaled(self.repeat(*kinds))

    def small_sizes(self, shape: MeshShape, layers: int) -> dict[str, Any]:
        """Returns fields of `shrunk`."""
        interval = min(2, self.attention_interval)
        return {
            **super().small_sizes(shape, layers),
            "attention_interval": interval,
            "attention_offset": min(self.attention_offset, max(0, interval - 1)),
        }
