"""SmolLM3 (Hugging Face 2025): Llama's layers, every fourth
without rotary embedding (NoPE, arXiv:2501.18795)."""

import dataclasses
from typing import Literal

from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import Llama
from meshwright.ranges import PositiveInt


@dataclasses.dataclass(frozen=True)
class SmolLM3(Llama):
    """Configuration of a SmolLM3 decoder.

    Example:
        >>> model = mw.SmolLM3(vocab=32000, width=512, layers=8, heads=8, kv_heads=2, mlp=1536)
        >>> [kind.attention.rotary is not None for kind in model.decoder.layers[:4]]
        [True, True, True, False]
    """

    rope_theta: float = 5000000.0
    norm_epsilon: float = 1e-6
    embedding: Literal["untied", "tied"] = "tied"
    no_rope_interval: PositiveInt = 4
    """Layers of which the last has no rotary embedding."""

    def build(self) -> Decoder:
        """Returns layers with and without rotary embedding by turns."""
        rotary = super().build().layers[0]
        last = dataclasses.replace(rotary, attention=self.attention(rotary=None))
        return self.repeat(*[rotary] * (self.no_rope_interval - 1), last)
