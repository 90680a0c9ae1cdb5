"""YaRN: scaling of rotary frequencies for longer contexts (Peng et al. 2023, arXiv:2309.00071)."""

import dataclasses
import math
from typing import Literal

import numpy as np

from meshwright.errors import refuse
from meshwright.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Ranged


@dataclasses.dataclass(frozen=True)
class Yarn(Ranged, part="model.yarn"):
    """Scaling of the low rotary frequencies, with a factor on queries and keys."""

    factor: PositiveFloat = 32.0
    """Factor by which low frequencies are divided."""
    beta_fast: PositiveFloat = 32.0
    """Pairs that turn more often than this in the original context keep their frequency."""
    beta_slow: PositiveFloat = 1.0
    """Pairs that turn less often than this are scaled by the full factor; those between in part."""
    original_max_position_embeddings: PositiveInt = 4096
    """Longest sequence of the pre-training before the extension."""
    attention_factor: PositiveFloat | None = None
    """Factor on queries and keys after rotation; None is 0.1 ln(factor) + 1."""
    bounds: Literal["whole", "exact"] = "whole"
    """Whether the first and the last pair that are scaled
    in part are rounded outward (whole), or not (GPT-OSS)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fast, slow = self.beta_fast, self.beta_slow
        refuse(
            (
                fast < slow,
                f"YaRN with beta_fast {fast} and beta_slow {slow}",
                "pairs that turn more often than beta_fast keep their frequency, and those that "
                "turn less often than beta_slow are scaled",
                f"--model.yarn.beta-fast {32 * slow}",
            )
        )

    @property
    def longest(self) -> int:
        """Longest sequence after the extension."""
        return int(self.factor * self.original_max_position_embeddings)

    @property
    def magnitude(self) -> float:
        """Factor on queries and keys."""
        return self._growth(1.0) if self.attention_factor is None else self.attention_factor

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, head_size: int, theta: float) -> np.ndarray:
        """Returns the radians per position of each of the H/2 pairs, float32."""
        pair = np.arange(head_size // 2, dtype=np.float64)
        frequency = theta ** (-2 * pair / head_size)

        def pair_that_turns(turns: float) -> float:
            """Pair, as a fraction, that turns this often in the original context."""
            positions = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return head_size * math.log(positions) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.bounds == "whole":
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_size - 1)
        scaled = np.clip((pair - low) / (high - low if high != low else 0.001), 0.0, 1.0)
        return (frequency / self.factor * scaled + frequency * (1 - scaled)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class LatentYarn(Yarn):
    """YaRN of latent attention, with a factor on attention scores besides
    (DeepSeek-V2, arXiv:2405.04434)."""

    factor: PositiveFloat = 40.0
    """Factor by which low frequencies are divided."""
    mscale: NonNegativeFloat = 1.0
    """Weight of ln(factor) in the factor on rotated queries and keys, over that of
    `mscale_all_dim`; 0 is none."""
    mscale_all_dim: NonNegativeFloat = 1.0
    """Weight of ln(factor) in the factor on scores, (0.1 mscale_all_dim ln(factor) + 1)^2;
    0 has no such factor."""

    @property
    def magnitude(self) -> float:
        """Factor on rotated queries and keys."""
        if self.attention_factor is None and self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return super().magnitude

    @property
    def score_scale(self) -> float:
        """Factor on attention scores, besides one over the root of the head size."""
        return self._growth(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0
