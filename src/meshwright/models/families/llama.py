"""Llama and its relatives: Llama 1 to 3.x, Mistral, Qwen2, Qwen3, OLMo 2 (Touvron et al.
2023, arXiv:2302.13971).

One layer, model width D, N query heads and K key/value heads (GQA) of size H, SwiGLU of width F:

    h = rms_norm(x)
    x += row_parallel(attention(column_parallel(h q, h k, h v)) o)
    h = rms_norm(x)
    x += row_parallel((silu(column_parallel(h gate)) * column_parallel(h up)) down)
"""

import dataclasses

from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.fields import LEARNED, Projections, ScaledRotary, TiedOrNot
from meshwright.ranges import PositiveInt


@dataclasses.dataclass(frozen=True)
class Llama(Projections, ScaledRotary, TiedOrNot):
    """Configuration of a Llama-like decoder.

    Example:
        >>> model = mw.Llama(vocab=32000, width=512, layers=8, heads=8, kv_heads=2, mlp=1536)
        >>> model.spec().attention[0].head_size, model.spec().kv_heads
        (64, 2)
    """

    mlp: PositiveInt = 384
    """Feed-forward width F."""
    mlp_bias: LEARNED = "none"
    """Bias of the three projections of dense feed-forward layers (`mlp_bias`
    of Llama's configuration)."""

    def build(self) -> Decoder:
        """Returns layers of one kind."""
        feed_forward = FeedForward(
            self.width, self.mlp, self.out_std, bias=self.mlp_bias == "learned"
        )
        block = Block("blocks", self.attention(), feed_forward, self.norm, self.norm_place)
        return self.repeat(block)
