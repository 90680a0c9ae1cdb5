"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786) and Gemma 2 (2024, arXiv:2408.00118): local layers to
one global, norms before and after each half.

One layer, model width D, N query heads and K key/value heads of size H, feed-forward width F; every
norm is RMSNorm with the scale 1 + w:

    h = norm(x) x += norm(row_parallel(attention(norm(column_parallel(h q)), norm(column_parallel(h
    k)), h v) o)) h = norm(x) x += norm(row_parallel((gelu(column_parallel(h gate)) *
    column_parallel(h up)) down))

Local layers attend within a sliding window. In Gemma 3 they have rotary frequencies of their own,
in Gemma 2 attention scores and logits have a soft cap, and queries and keys no norm.
"""

import dataclasses
from typing import Any

from meshwright.models.blocks.attention import Attention
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.blocks.layers import Norm
from meshwright.models.blocks.rotary import RotaryBase
from meshwright.models.decoder import Block, Decoder, head_size_of
from meshwright.models.families.fields import GroupedQuery, local_and_global
from meshwright.ranges import NonNegativeInt, PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True)
class Gemma(GroupedQuery):
    """Configuration that Gemma 2 and Gemma 3 have in common."""

    layers: int = 6
    kv_heads: int = 2
    mlp: PositiveInt = 384
    """Feed-forward width F."""
    local_layers: NonNegativeInt = 5
    """Layers with a sliding window before each layer without."""
    sliding_window: PositiveInt = 512
    """Positions that a token attends to in local layers, itself included."""
    rope_theta: float = 1000000.0
    """Base of the rotary frequencies in global layers."""
    query_scale: PositiveFloat | None = None
    """Attention scores are divided by the root of this; None is the head size."""
    norm_epsilon: float = 1e-6

    @property
    def norm(self) -> Norm:
        """Norm before and after all halves of layers, and after the last layer."""
        return Norm("rms_plus_one", self.norm_epsilon)

    def attention(self, **changes: Any) -> Attention:
        """Returns the attention of the fields. changes: of the fields of `Attention`."""
        size = head_size_of(self)
        # The kernels divide scores by the root of the head size.
        return super().attention(query_factor=(size / (self.query_scale or size)) ** 0.5, **changes)

    def alternate(
        self, local: Attention, last: Attention, logit_softcap: float | None = None
    ) -> Decoder:
        """Returns local and global layers by turns. local, last: their attention."""
        block = Block(
            "blocks",
            last,
            FeedForward(self.width, self.mlp, self.out_std, "geglu"),
            self.norm,
            "both",
        )
        kinds = local_and_global(self, block, local)
        return self.repeat(
            *kinds, tied=True, embedding_factor=self.width**0.5, logit_softcap=logit_softcap
        )


@dataclasses.dataclass(frozen=True)
class Gemma3(Gemma):
    """Configuration of a Gemma 3 decoder.

    Example:
        >>> model = mw.Gemma3(vocab=32000, width=512, layers=12, heads=4, kv_heads=2, mlp=1536)
        >>> [layer.attention.window for layer in model.spec().layers[:6]]
        [512, 512, 512, 512, 512, None]
    """

    rope_factor: PositiveFloat = 1.0
    """Factor by which the positions of global layers are divided,
    for longer sequences than those of pre-training."""
    local_rope_theta: RotaryBase = 10000.0
    """Base of the rotary frequencies in local layers."""

    def build(self) -> Decoder:
        """Returns local and global layers by turns, with norms of queries and keys."""
        local = self.rotary(theta=self.local_rope_theta)
        return self.alternate(
            self.attention(qk_norm=self.norm, window=self.sliding_window, rotary=local),
            self.attention(qk_norm=self.norm, rotary=self.rotary(factor=self.rope_factor)),
        )


@dataclasses.dataclass(frozen=True)
class Gemma2(Gemma):
    """Configuration of a Gemma 2 decoder.

    Example:
        >>> model = mw.Gemma2(vocab=32000, width=512, layers=4, heads=4, kv_heads=2, mlp=1536)
        >>> [layer.attention.window for layer in model.spec().layers]
        [4096, None, 4096, None]
    """

    local_layers: int = 1
    sliding_window: int = 4096
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    softcap: PositiveFloat | None = 50.0
    """Soft cap of the attention scores; None for no cap."""
    logit_softcap: PositiveFloat | None = 30.0
    """Soft cap of the logits; None for no cap."""

    def build(self) -> Decoder:
        """Returns local and global layers by turns, with soft caps."""
        last = self.attention(softcap=self.softcap)
        return self.alternate(
            dataclasses.replace(last, window=self.sliding_window), last, self.logit_softcap
        )
