"""Ministral 3 (Mistral AI 2025; its published configurations): Mistral's layers,
whose queries grow with their position."""

import dataclasses
from typing import Any

from meshwright.models.blocks.attention import Attention
from meshwright.models.blocks.rotary import Temperature
from meshwright.models.families.llama import Llama
from meshwright.ranges import NonNegativeFloat, PositiveInt


@dataclasses.dataclass(frozen=True)
class Ministral3(Llama):
    """Configuration of a Ministral 3 decoder.

    Example:
        >>> model = mw.Ministral3(vocab=32000, width=512, layers=8, heads=8, kv_heads=2, mlp=1536)
        >>> model.decoder.layers[0].attention.temperature.length
        16384
    """

    rope_theta: float = 1000000.0
    temperature_scale: NonNegativeFloat = 0.1
    """Growth s of the queries: times 1 + s ln(1 + floor(position / p))."""
    temperature_floor: PositiveInt = 16384
    """Positions p after which the queries grow."""

    def attention(self, **changes: Any) -> Attention:
        """Returns the attention of the fields. changes: of the fields of `Attention`."""
        temperature = Temperature(self.temperature_scale, self.temperature_floor, offset=0)
        return super().attention(temperature=temperature, **changes)
