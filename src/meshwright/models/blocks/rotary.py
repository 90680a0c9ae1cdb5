"""Rotary position embedding (RoPE: Su et al. 2021, arXiv:2104.09864) in the half-split order of Llama's checkpoints."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of low frequencies for long contexts (arXiv:2407.21783; meta-llama `apply_scaling`)."""

    factor: float = 8.0
    """Factor by which low frequencies are divided."""
    low_freq_factor: float = 1.0
    """Wavelengths above original_max_position_embeddings / low_freq_factor are scaled by the whole factor."""
    high_freq_factor: float = 4.0
    """Wavelengths below original_max_position_embeddings / high_freq_factor are not scaled."""
    original_max_position_embeddings: int = 8192
    """Longest sequence of the pre-training before the extension."""


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
    """Returns cosine and sine [B, T, 1, H/2], float32. positions_BT: positions within each document."""
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_H.reshape(1, 1, 1, -1)
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each pair of features (i, i + H/2) by its angle."""
    cos, sin = cos_sin
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)


def apply_rope_interleaved(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each pair of features (2i, 2i + 1) by its angle; first come the first features of all pairs.

    Queries and keys in one order have the scores of any other.
    """
    cos, sin = cos_sin
    pairs = x_BTNH.astype(jnp.float32).reshape(*x_BTNH.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)
