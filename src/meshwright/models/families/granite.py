"""Granite 3 (IBM 2024; its published configurations): Llama's or Mixtral's layers, with factors on
embeddings, on the scores of attention, on what each half of a layer adds, and on logits.
"""

import dataclasses
from typing import Any

from meshwright.models.blocks.attention import Attention
from meshwright.models.decoder import Decoder, head_size_of
from meshwright.models.families.fields import GroupedQuery
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.ranges import PositiveFloat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors(GroupedQuery):
    """Factors of Granite."""

    embedding_multiplier: PositiveFloat = 12.0
    """Factor on embeddings."""
    attention_multiplier: PositiveFloat = 0.015625
    """Factor on the scores of attention, instead of one over the root of the head size."""
    residual_multiplier: PositiveFloat = 0.22
    """Factor on what each half of a layer adds."""
    logits_scaling: PositiveFloat = 8.0
    """Divisor of the logits."""

    def attention(self, **changes: Any) -> Attention:
        """Returns the attention of the fields. changes: of the fields of `Attention`."""
        # The kernels divide scores by the root of the head size.
        factor = self.attention_multiplier * head_size_of(self) ** 0.5
        return super().attention(query_factor=factor, **changes)

    def scaled(self, decoder: Decoder) -> Decoder:
        """Returns a decoder with these factors."""
        layers = [
            dataclasses.replace(block, branch_factor=self.residual_multiplier)
            for block in decoder.layers
        ]
        return dataclasses.replace(
            decoder,
            layers=tuple(layers),
            embedding_factor=self.embedding_multiplier,
            logit_factor=1.0 / self.logits_scaling,
        )


@dataclasses.dataclass(frozen=True)
class Granite(Factors, Llama):
    """Configuration of a dense Granite decoder.

    Example:
        >>> model = mw.Granite(vocab=32000, width=512, layers=8, heads=8, kv_heads=2, mlp=1536)
        >>> model.decoder.embedding_factor, model.decoder.logit_factor
        (12.0, 0.125)
    """

    def build(self) -> Decoder:
        """Returns layers of one kind."""
        return self.scaled(super().build())


@dataclasses.dataclass(frozen=True)
class GraniteMoe(Factors, Mixtral):
    """Configuration of a Granite decoder with experts.

    Example:
        >>> model = mw.GraniteMoe(vocab=32000, width=512, layers=8, heads=8, experts=16)
        >>> model.decoder.layers[0].branch_factor
        0.22
    """

    def build(self) -> Decoder:
        """Returns the layers with experts."""
        return self.scaled(super().build())
