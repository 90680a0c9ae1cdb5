"""Inverse square root schedule (Vaswani et al. 2017, arXiv:1706.03762, section 5.3)."""

import jax.numpy as jnp
import optax

from meshwright.config import Optimizer


def inverse_sqrt(config: Optimizer, intervals: int) -> optax.Schedule:
    """Returns the peak rate times sqrt(w / (w + t)), t steps after a warm-up of w steps; `intervals` is not needed."""
    warmup = max(config.warmup_steps, 1)
    return lambda count: config.learning_rate * jnp.sqrt(warmup / (warmup + count))
