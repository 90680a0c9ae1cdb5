"""Command R and R+ (Cohere 2024), Command R7B and A (2024-25, arXiv:2504.00698): attention and
feed-forward side by side.

Both halves of a layer read one LayerNorm without bias, of which there is one per layer. Rotation
turns neighbouring features. Command R+ normalises each head of queries and keys. Cohere 2 has three
layers with a sliding window and rotary embedding to each without both (NoPE).
"""

import dataclasses
from typing import Any, Literal

from meshwright.models.blocks.attention import Attention
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.blocks.layers import Norm
from meshwright.models.blocks.rotary import Rotary
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.fields import LEARNED, GroupedQuery, TiedOrNot, local_and_global
from meshwright.ranges import PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True)
class _ParallelHalves(TiedOrNot, GroupedQuery):
    """Fields and layers that both generations have."""

    mlp: PositiveInt = 384
    """Feed-forward width F."""
    attention_bias: LEARNED = "none"
    """Bias of the four projections of attention."""
    logit_scale: PositiveFloat = 0.0625
    """Factor on the logits."""
    embedding: Literal["untied", "tied"] = dataclasses.field(default="tied", kw_only=True)

    @property
    def norm(self) -> Norm:
        """Norm of each layer, and after the last."""
        return Norm("layer", self.norm_epsilon)

    def rotary(self, **changes: Any) -> Rotary:
        """Returns the rotation of heads, whose pairs are neighbouring features."""
        return super().rotary(pairs="neighbours", **changes)

    def attention(self, **changes: Any) -> Attention:
        """Returns the attention of the fields. changes: of the fields of `Attention`."""
        bias = self.attention_bias == "learned"
        return super().attention(qkv_bias=bias, out_bias=bias, **changes)

    def block(self, attention: Attention) -> Block:
        """Returns layers with this attention."""
        feed_forward = FeedForward(self.width, self.mlp, self.out_std)
        return Block("blocks", attention, feed_forward, self.norm, "shared")


@dataclasses.dataclass(frozen=True)
class Cohere(_ParallelHalves):
    """Configuration of a Command R or Command R+ decoder.

    Example:
        >>> model = mw.Cohere(vocab=32000, width=512, layers=8, heads=8, kv_heads=2, mlp=1536)
        >>> sorted(name for name in model.params()["blocks"] if "norm" in name)
        ['attention_norm']
    """

    qk_norm: Literal["none", "layer_heads"] = "none"
    """Normalisation of queries and keys: a LayerNorm of each head, whose scale is its own
    (layer_heads: Command R+)."""

    def build(self) -> Decoder:
        """Returns layers of one kind."""
        qk_norm = None if self.qk_norm == "none" else Norm(self.qk_norm, self.norm_epsilon)
        block = self.block(self.attention(qk_norm=qk_norm))
        return self.repeat(block, logit_factor=self.logit_scale)


@dataclasses.dataclass(frozen=True)
class Cohere2(_ParallelHalves):
    """Configuration of a Command R7B or Command A decoder.

    Example:
        >>> model = mw.Cohere2(vocab=32000, width=512, layers=4, heads=8, kv_heads=2, mlp=1536)
        >>> [layer.attention.window for layer in model.spec().layers]
        [4096, 4096, 4096, None]
    """

    sliding_window: PositiveInt = 4096
    """Positions that a token attends to in local layers, itself included."""
    local_layers: PositiveInt = 3
    """Layers with a sliding window and rotary embedding before each layer without."""

    def build(self) -> Decoder:
        """Returns local and global layers by turns."""
        local = self.attention(window=self.sliding_window)
        last = self.block(self.attention(rotary=None))
        return self.repeat(*local_and_global(self, last, local), logit_factor=self.logit_scale)
