"""Qwen3.5 and later (Qwen team 2026; its published configurations): the layers of Qwen3-Next.

The dense ones have a SwiGLU as the second half of all layers, the mixtures the experts of
Qwen3-Next. Their files have the projections of linear attention apart. Positions in an image have
three numbers, those of a text one.
"""

import dataclasses

from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.decoder import Decoder
from meshwright.models.families.qwen3_next import LinearAndFull, Qwen3Next
from meshwright.ranges import PositiveInt


@dataclasses.dataclass(frozen=True)
class Qwen35(LinearAndFull):
    """Configuration of a dense hybrid of linear and full attention.

    Example:
        >>> model = mw.Qwen35(vocab=32000, width=512, layers=4, heads=8, kv_heads=2, mlp=1536)
        >>> [layer.stack for layer in model.spec().layers]
        ['linear_blocks', 'linear_blocks', 'linear_blocks', 'blocks']
    """

    mlp: PositiveInt = 384
    """Feed-forward width F."""

    def build(self) -> Decoder:
        """Returns the layers by turns."""
        return self.by_turns(FeedForward(self.width, self.mlp, self.out_std))


@dataclasses.dataclass(frozen=True)
class Qwen35Moe(Qwen3Next):
    """Configuration of a hybrid of linear and full attention, with experts in all layers.

    Example:
        >>> model = mw.Qwen35Moe(vocab=32000, width=512, layers=4, heads=8, kv_heads=2, experts=16)
        >>> model.spec().layers[0].experts.experts_per_token
        2
    """
