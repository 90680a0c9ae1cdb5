"""Gemma 4 (Google 2026; its published configurations): Gemma 3's order of local
and global layers, with other attention.

Heads of global layers have a size and a number of their own, and keys that are values: values are a
norm of the products of keys. Of the pairs of features of a global head only those of the highest
frequencies turn. Norms multiply by their scale, scores have no divisor, and a number of each layer,
which no training changes, multiplies its output. The 26B-A4B has experts beside its dense
feed-forward (blocks/dense_and_experts.py).
"""

import dataclasses
from typing import Any

from meshwright.config import MeshShape
from meshwright.models.blocks.attention import Attention
from meshwright.models.blocks.dense_and_experts import DenseAndExperts
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.blocks.rotary import RotaryBase
from meshwright.models.decoder import Block, Decoder, head_size_of
from meshwright.models.families.expert_fields import RoutedExperts
from meshwright.models.families.fields import GroupedQuery
from meshwright.models.model import Kind
from meshwright.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Share


@dataclasses.dataclass(frozen=True)
class Gemma4(RoutedExperts, GroupedQuery):
    """Configuration of a Gemma 4 decoder.

    Example:
        >>> sizes = {"vocab": 32000, "width": 512, "layers": 6, "heads": 8}
        >>> model = mw.Gemma4(**sizes, kv_heads=4, global_kv_heads=2)
        >>> [layer.attention.head_size for layer in model.spec().layers]
        [64, 64, 64, 64, 64, 512]
    """

    layers: int = 6
    mlp: PositiveInt = 384
    """Feed-forward width F of the dense feed-forward."""
    experts: NonNegativeInt = 0
    """Experts E beside the dense feed-forward of a layer; 0 has none."""
    local_layers: NonNegativeInt = 5
    """Layers with a sliding window before each layer without."""
    sliding_window: PositiveInt = 1024
    """Positions that a token attends to in local layers, itself included."""
    local_rope_theta: RotaryBase = 10000.0
    """Base of the rotary frequencies in local layers."""
    rope_theta: float = 1000000.0
    """Base of the rotary frequencies in global layers."""
    rotary_fraction: Share = 0.25
    """Fraction of the pairs of features that turn in global layers."""
    rope_factor: PositiveFloat = 1.0
    """Factor by which the frequencies of global layers are divided."""
    global_head_size: PositiveInt = 512
    """Head size H of global layers."""
    global_kv_heads: PositiveInt = 4
    """Key/value heads K of global layers."""
    keys_are_values: bool = True
    """Whether values of global layers are a norm of the products of keys."""
    logit_softcap: PositiveFloat | None = 30.0
    """Soft cap of the logits; None for no cap."""
    norm_epsilon: float = 1e-6

    def attention(self, **changes: Any) -> Attention:
        """Returns the attention of local layers. changes: of the fields of `Attention`."""
        size = changes.get("head_size", head_size_of(self))
        # The kernels divide scores by the root of the head size.
        made = {"query_factor": size**0.5, "qk_norm": self.norm, "value_norm": self.norm}
        return dataclasses.replace(super().attention(), **made, **changes)

    def build(self) -> Decoder:
        """Returns local and global layers by turns."""
        local = self.attention(
            window=self.sliding_window, rotary=self.rotary(theta=self.local_rope_theta)
        )
        rotary = self.rotary(
            size=self.global_head_size,
            turning=self.rotary_fraction,
            factor=self.rope_factor,
            field="global_head_size",
        )
        last = self.attention(
            head_size=self.global_head_size,
            kv_heads=self.global_kv_heads,
            keys_are_values=self.keys_are_values,
            rotary=rotary,
        )
        dense = FeedForward(self.width, self.mlp, self.out_std, "geglu")
        feed_forward: Kind = dense
        if self.experts:
            routed = self.routed(activation="gelu", weight_scale=True)
            feed_forward = DenseAndExperts(self.width, dense, routed, self.norm)

        def block(stack: str, attention: Attention) -> Block:
            return Block(stack, attention, feed_forward, self.norm, "both", output_scale=True)

        kinds = [block("local_blocks", local)] * self.local_layers + [block("blocks", last)]
        return self.repeat(
            *kinds, tied=True, embedding_factor=self.width**0.5, logit_softcap=self.logit_softcap
        )

    def small_sizes(self, shape: MeshShape, layers: int) -> dict[str, Any]:
        """Returns fields of `shrunk`."""
        sizes = super().small_sizes(shape, layers)
        few = min(self.global_kv_heads, sizes["kv_heads"])
        return {**sizes, "global_head_size": 16, "global_kv_heads": few}
