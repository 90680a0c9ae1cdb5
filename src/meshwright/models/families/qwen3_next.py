"""Qwen3-Next (Qwen team 2025; its published configuration): three layers of linear attention
to one of full attention.

A layer is a Mixtral layer with another first half. Of `full_attention_interval` layers the last has
gated attention: an output gate of each feature, and a rotation of the first `rotary_fraction` of a
head. The others have a gated delta net (models/blocks/delta_net.py), of N key heads with G value
heads each:

    h = rms_norm(x);  q, k, v, z, b, a = column_parallel(h)
    out = delta_net(q, k, v, decay = -exp(a_log) softplus(a + step_bias), rate = sigmoid(b))
    x += row_parallel((rms_norm(out) * silu(z)) o)

All layers have experts, and a shared one whose output a sigmoid scales.
Norms multiply by 1 + scale.
"""

import dataclasses
from typing import Annotated

import msgspec

from meshwright.errors import refuse
from meshwright.models.blocks.delta_net import DeltaNet, DeltaSpec
from meshwright.models.blocks.layers import Norm
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.expert_fields import ChoiceOfExperts
from meshwright.models.families.fields import PartialRotary, TiedOrNot
from meshwright.models.model import Kind
from meshwright.ranges import PositiveInt


@dataclasses.dataclass(frozen=True)
class LinearAndFull(PartialRotary, TiedOrNot):
    """Linear and full attention by turns."""

    full_attention_interval: PositiveInt = 4
    """Layers of which the last has full attention, and the others linear attention."""
    linear_heads: PositiveInt = 4
    """Heads of queries and keys of linear attention."""
    linear_value_heads: PositiveInt = 8
    """Value heads of linear attention; each group of them shares a key head."""
    linear_key_size: PositiveInt = 32
    """Size of a query and a key of linear attention."""
    linear_value_size: PositiveInt = 32
    """Size of a value of linear attention."""
    convolution_taps: Annotated[int, msgspec.Meta(ge=2, le=2**20)] = 4
    """Tokens that the convolution before linear attention reads, the token itself included."""
    norm_epsilon: float = 1e-6

    @property
    def norm(self) -> Norm:
        """Norm before all halves of layers, of queries and keys, and after the last layer."""
        return Norm("rms_plus_one", self.norm_epsilon)

    def by_turns(self, feed_forward: Kind) -> Decoder:
        """Returns the layers, each with the same second half."""
        heads, value_heads, interval = (
            self.linear_heads,
            self.linear_value_heads,
            self.full_attention_interval,
        )
        refuse(
            (
                not 2 <= interval <= self.layers,
                f"{self.layers} layers of which every {interval}-th has full attention",
                "at least one layer has full attention, and one linear attention",
                f"--model.full-attention-interval {max(2, min(interval, self.layers))}",
            ),
            (
                value_heads < heads or value_heads % heads != 0,
                f"{value_heads} value heads of linear attention for {heads} key heads",
                "each key head has the same number of value heads, one at least",
                f"--model.linear-value-heads {2 * heads}",
            ),
        )
        sizes = (self.linear_key_size, self.linear_value_size, self.convolution_taps)
        linear = DeltaNet(
            self.width,
            DeltaSpec(heads, value_heads // heads, *sizes),
            self.norm_epsilon,
            self.out_std,
        )
        full = self.attention(qk_norm=self.norm, gated=True)
        linear_block = Block("linear_blocks", linear, feed_forward, self.norm)
        full_block = Block("blocks", full, feed_forward, self.norm)
        return self.repeat(*[linear_block] * (interval - 1), full_block)


@dataclasses.dataclass(frozen=True)
class Qwen3Next(ChoiceOfExperts, LinearAndFull):
    """Configuration of a hybrid of linear and full attention, with experts in all layers.

    Example:
        >>> model = mw.Qwen3Next(vocab=32000, width=512, layers=4, heads=8, kv_heads=2, experts=16)
        >>> [layer.stack for layer in model.spec().layers]
        ['linear_blocks', 'linear_blocks', 'linear_blocks', 'blocks']
    """

    shared_mlp: PositiveInt = 384
    """Feed-forward width F of the shared expert."""

    def build(self) -> Decoder:
        """Returns the layers by turns."""
        return self.by_turns(self.routed(shared=self.shared_mlp, shared_gate=True))
