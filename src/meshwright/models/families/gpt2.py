"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, tied embeddings.

One layer, model width D, N heads of size H, feed-forward width F = 4 D:

    h = layer_norm(x);  x += row_parallel(attention(column_parallel(h q, h k, h v)) o)
    h = layer_norm(x);  x += row_parallel(gelu(column_parallel(h up)) down)
"""

import dataclasses

from meshwright.models.blocks.attention import Attention
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.blocks.layers import Norm
from meshwright.models.decoder import Block, Decoder, DecoderModel, head_size_of
from meshwright.models.families.fields import LEARNED
from meshwright.ranges import NonNegativeFloat, PositiveInt


@dataclasses.dataclass(frozen=True)
class Gpt2(DecoderModel):
    """Configuration of a GPT-2 decoder.

    Example:
        >>> model = mw.Gpt2(vocab=50257, width=768, layers=12, heads=12)
        >>> model.spec().max_seq
        1024
    """

    positions: PositiveInt = 1024
    """Longest sequence: rows of the table of positions."""
    bias: LEARNED = "learned"
    """Biases of projections and norms."""
    norm_epsilon: NonNegativeFloat = 1e-5
    """Constant added to the variance in LayerNorm."""

    def build(self) -> Decoder:
        """Returns layers of one kind."""
        D, N, bias = self.width, self.heads, self.bias == "learned"
        attention = Attention(
            D, N, None, head_size_of(self), self.out_std, qkv_bias=bias, out_bias=bias
        )
        feed_forward = FeedForward(D, 4 * D, self.out_std, "gelu", bias=bias)
        norm = Norm("layer", self.norm_epsilon, bias)
        return self.repeat(
            Block("blocks", attention, feed_forward, norm), tied=True, positions=self.positions
        )
