"""Mistral 4 (Mistral AI 2026; its published configuration): DeepSeek's layers, whose queries grow
with their position, and whose router scores experts by softmax.
"""

import dataclasses

from meshwright.models.blocks.rotary import Temperature
from meshwright.models.families.deepseek import Deepseek
from meshwright.ranges import NonNegativeFloat, PositiveInt


@dataclasses.dataclass(frozen=True)
class Mistral4(Deepseek):
    """Configuration of a Mistral 4 decoder.

    Example:
        >>> model = mw.Mistral4(vocab=32000, width=512, layers=8, heads=8, experts=16)
        >>> model.decoder.layers[0].attention.temperature.length
        8192
    """

    temperature_scale: NonNegativeFloat = 0.1
    """Growth s of the queries: times 1 + s ln(1 + floor(position / p))."""
    temperature_floor: PositiveInt = 8192
    """Positions p after which the queries grow."""

    @property
    def temperature(self) -> Temperature:
        """Growth of queries with their position."""
        return Temperature(self.temperature_scale, self.temperature_floor, offset=0)
