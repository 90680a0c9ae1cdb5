"""Arcee's AFM (2025; its published configuration): Llama's layers with an MLP
whose hidden features are relu(h up)^2."""

import dataclasses

from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import Llama


@dataclasses.dataclass(frozen=True)
class Arcee(Llama):
    """Configuration of an Arcee decoder.

    Example:
        >>> model = mw.Arcee(vocab=32000, width=512, layers=8, heads=8, kv_heads=2, mlp=1536)
        >>> sorted(name for name in model.params()["blocks"] if name in ("gate", "up", "down"))
        ['down', 'up']
    """

    def build(self) -> Decoder:
        """Returns layers of one kind."""
        (block,) = set(super().build().layers)
        bias = self.mlp_bias == "learned"
        feed_forward = FeedForward(self.width, self.mlp, self.out_std, "relu2", bias)
        return self.repeat(dataclasses.replace(block, feed_forward=feed_forward))
