"""YaRN: rotary frequencies and attention scale for sequences longer than those of pre-training (arXiv:2309.00071)."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Yarn:
    """Scaling of rotary frequencies by how often a feature rotates within the sequences of pre-training."""

    factor: float = 40.0
    """Longest sequence over that of pre-training."""
    original_max_position_embeddings: int = 4096
    """Longest sequence of pre-training."""
    beta_fast: float = 32.0
    """Rotations within that sequence from which a frequency stays as it is."""
    beta_slow: float = 1.0
    """Rotations up to which a frequency is divided by `factor`; between the two it is interpolated."""
    mscale: float = 1.0
    """Factor of the growth of rotated queries and keys, 0.1 mscale ln(factor) + 1, over that of `mscale_all_dim`."""
    mscale_all_dim: float = 1.0
    """Factor of the growth of whole attention scores, (0.1 mscale_all_dim ln(factor) + 1)^2; 0 has none."""

    def frequencies(self, size: int, theta: float) -> np.ndarray:
        """Returns the radians per position of each of `size` / 2 pairs, float32."""
        # In float32 and in this order, as `transformers` computes them: the angles of late positions depend on it.
        powers = np.float32(theta) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
        plain, divided = np.float32(1.0) / powers, np.float32(1.0) / (np.float32(self.factor) * powers)
        first = max(math.floor(self._pair(self.beta_fast, size, theta)), 0)
        last = min(math.ceil(self._pair(self.beta_slow, size, theta)), size - 1)
        width = last - first if last != first else 0.001
        kept = 1 - np.clip((np.arange(size // 2, dtype=np.float32) - first) / np.float32(width), 0, 1)
        return (divided * (1 - kept) + plain * kept).astype(np.float32)

    def _pair(self, rotations: float, size: int, theta: float) -> float:
        """Index of the pair that turns `rotations` times within a sequence of pre-training."""
        positions = self.original_max_position_embeddings / (rotations * 2 * math.pi)
        return size * math.log(positions) / (2 * math.log(theta))

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def rotation_scale(self) -> float:
        """Factor on cosine and sine."""
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_scale(self) -> float:
        """Factor on attention scores, besides one over the root of the head size."""
        return self._growth(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0
