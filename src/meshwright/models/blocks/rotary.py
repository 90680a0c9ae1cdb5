"""Rotary position embedding (RoPE: Su et al. 2021, arXiv:2104.09864) and its scalings
for longer contexts.

Linear and Llama 3.1's; YaRN is in yarn.py.
"""

import dataclasses
import math
import sys
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from meshwright.errors import refuse
from meshwright.models.blocks.yarn import Yarn
from meshwright.ranges import PositiveFloat, PositiveInt, Ranged

RotaryBase = Annotated[float, msgspec.Meta(gt=1, le=sys.float_info.max)]
"""Base of rotary frequencies."""


@dataclasses.dataclass(frozen=True)
class RopeScaling(Ranged, part="model.rope-scaling"):
    """Llama 3.1's scaling of low frequencies for long contexts (arXiv:2407.21783;
    meta-llama `apply_scaling`)."""

    factor: PositiveFloat = 8.0
    """Factor by which low frequencies are divided."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_max_position_embeddings / low_freq_factor are scaled
    by the full factor."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_position_embeddings / high_freq_factor are not scaled."""
    original_max_position_embeddings: PositiveInt = 8192
    """Longest sequence of the pre-training before the extension."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.low_freq_factor, self.high_freq_factor
        refuse(
            (
                high < low,
                f"--model.rope-scaling.high-freq-factor {high}",
                f"frequencies between the two factors are scaled in part, and the low one is {low}",
                f"--model.rope-scaling.high-freq-factor {4 * low}",
            )
        )


def rope_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Returns the radians per position of each of the H/2 pairs, float32."""
    frequency = theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if scaling is not None:
        wavelength = 2 * math.pi / frequency
        above = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
        between = scaling.high_freq_factor - scaling.low_freq_factor
        # Llama 4 has no frequencies between the two.
        smooth = np.clip(above / between, 0.0, 1.0) if between else (above > 0).astype(np.float64)
        frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    return frequency.astype(np.float32)


def rope_angles(positions_BT: jax.Array, frequency_H: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine [B, T, 1, H/2], float32.
    positions_BT: positions within each document."""
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_H.reshape(1, 1, 1, -1)
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(
    x_BTNH: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    *,
    pairs: Literal["halves", "neighbours"] = "halves",
) -> jax.Array:
    """Rotates each pair of features (i, i + H/2), or of neighbours (2i, 2i + 1), by its angle.

    The first features of all pairs come first: queries and keys in one order have the scores
    of any other.
    """
    cos, sin = cos_sin
    x32 = x_BTNH.astype(jnp.float32)
    if pairs == "halves":
        a, b = jnp.split(x32, 2, axis=-1)
    else:
        x32 = x32.reshape(*x_BTNH.shape[:-1], -1, 2)
        a, b = x32[..., 0], x32[..., 1]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Growth of queries with their position: times 1 + scale ln(1 + floor((position + offset)
    / length))."""

    scale: float
    length: int
    """Positions after which the queries grow."""
    offset: int
    """1 counts positions from 1 (Llama 4), 0 from 0 (Ministral 3)."""

    def factor(self, positions_BT: jax.Array) -> jax.Array:
        """Returns the factor on queries, float32 [B, T, 1, 1].
        positions_BT: positions within each document."""
        counted_BT = positions_BT.astype(jnp.float32)
        if self.offset:
            counted_BT += float(self.offset)
        steps_BT = jnp.floor(counted_BT / self.length)
        return (1.0 + self.scale * jnp.log1p(steps_BT))[..., None, None]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotation of queries and keys by their position in the document."""

    size: int
    """Features of a head that rotate, the first ones."""
    theta: float
    """Base of the frequencies."""
    scaling: RopeScaling | Yarn | None = None
    """Scaling of the low frequencies."""
    factor: float = 1.0
    """Factor by which all frequencies are divided (linear position
    interpolation, arXiv:2306.15595)."""
    pairs: Literal["halves", "neighbours"] = "halves"
    """Features that make a pair: one of each half, or neighbours."""
    turning: float = 1.0
    """Fraction of the pairs that turn, those of the highest frequencies;
    the others have the frequency 0 (Gemma 4)."""
    field: str = dataclasses.field(default="head_size", compare=False)
    """Field of the family that gives `size`, which errors name."""

    def __post_init__(self) -> None:
        refuse(
            (
                self.size % 2 != 0,
                f"a rotation of {self.size} features of a head",
                f"features rotate in pairs, and {self.size} = {self.size // 2} * 2 + 1",
                f"--model.{self.field.replace('_', '-')} {self.size + 1}",
            )
        )

    def angles(self, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns cosine and sine [B, T, 1, size/2], float32.
        positions_BT: positions within each document."""
        if isinstance(self.scaling, Yarn):
            cos, sin = rope_angles(positions_BT, self.scaling.frequencies(self.size, self.theta))
            return cos * self.scaling.magnitude, sin * self.scaling.magnitude
        frequencies_H = rope_frequencies(self.size, self.theta, self.scaling) / np.float32(
            self.factor
        )
        frequencies_H[int(self.turning * self.size // 2) :] = 0.0
        return rope_angles(positions_BT, frequencies_H)

    def rotate(self, x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Returns queries or keys with their first `size` features rotated."""
        if x_BTNH.shape[-1] == self.size:
            return apply_rope(x_BTNH, cos_sin, pairs=self.pairs)
        rotated = apply_rope(x_BTNH[..., : self.size], cos_sin, pairs=self.pairs)
        return jnp.concatenate([rotated, x_BTNH[..., self.size :]], -1)
