"""OLMo 3 (Allen Institute for AI 2025, arXiv:2512.13961): OLMo 2's layers, three of four
with a sliding window.

A layer is Llama's with norms after both halves and of the queries and keys of all heads together
(families/llama.py). YaRN, where there is one, scales the rotary frequencies of the global layers
only.
"""

import dataclasses
from typing import Literal

from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.blocks.yarn import Yarn
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.fields import LEARNED, Projections, TiedOrNot, local_and_global
from meshwright.ranges import PositiveInt


@dataclasses.dataclass(frozen=True)
class Olmo3(Projections, TiedOrNot):
    """Configuration of an OLMo 3 decoder.

    Example:
        >>> model = mw.Olmo3(vocab=32000, width=512, layers=4, heads=8, kv_heads=8, mlp=1536)
        >>> [layer.attention.window for layer in model.spec().layers]
        [4096, 4096, 4096, None]
    """

    mlp: PositiveInt = 384
    """Feed-forward width F."""
    mlp_bias: LEARNED = "none"
    """Bias of the three projections of feed-forward layers."""
    rope_theta: float = 500000.0
    yarn: Yarn | None = None
    """Scaling of the low rotary frequencies of global layers, for long contexts (YaRN)."""
    norm_epsilon: float = 1e-6
    sliding_window: PositiveInt = 4096
    """Positions that a token attends to in local layers, itself included."""
    qk_norm: Literal["none", "rms", "rms_heads"] = "rms_heads"
    norm_place: Literal["before", "after"] = "after"
    local_layers: PositiveInt = 3
    """Layers with a sliding window before each layer without."""

    def build(self) -> Decoder:
        """Returns local and global layers by turns."""
        last = self.attention(window=None, rotary=self.rotary(scaling=self.yarn))
        feed_forward = FeedForward(
            self.width, self.mlp, self.out_std, bias=self.mlp_bias == "learned"
        )
        block = Block("blocks", last, feed_forward, self.norm, self.norm_place)
        return self.repeat(*local_and_global(self, block, self.attention()))
