"""Layers of pipeline stages: those that read their parameters themselves,
and stacks with rows that hold no layer.

A stage with fewer layers of a stack than another has padding rows;
these are the identity and return zero aux.
"""

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.model import Aux, Layer
from meshwright.sharding.stages import NO_LAYER


def with_padding(layer: Layer, stack: str, permutes: bool) -> Layer:
    """Returns `layer` for a stack with padding rows.
    permutes: whether layers send values around a ring."""
    if permutes:
        return _drop_padding(layer)
    return _skip_padding(layer, stack)


def row_scope(stack: str) -> str:
    """Returns the named scope of a row with a layer,
    by which the census knows how many rows of a stack are padding."""
    return f"layer of {stack}."


def _skip_padding(layer: Layer, stack: str) -> Layer:
    """Returns `layer` for a stack with padding rows: these are the identity and return zero aux."""
    layer = jax.named_scope(row_scope(stack))(layer)

    def skipped(x_BTD: jax.Array, params: Any, index: jax.Array) -> tuple[jax.Array, Aux]:
        # `params` may be a function, which `eval_shape` takes in a closure only.
        _, shapes = jax.eval_shape(lambda x, index: layer(x, params, index), x_BTD, index)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return jax.lax.cond(
            index == NO_LAYER, lambda: (x_BTD, zeros), lambda: layer(x_BTD, params, index)
        )

    return skipped


def read_inside(layer: Layer) -> Layer:
    """Returns `layer` for parameters that a function reads.

    Read inside a branch they are converted where they lie;
    before it, XLA would copy them in float32.
    """
    return lambda x_BTD, read, index: layer(x_BTD, read(), index)


def _drop_padding(layer: Layer) -> Layer:
    """Returns `layer` as `_skip_padding` does, computed in padding rows too and dropped there.

    For layers that send values around a ring, in which the devices of all stages have to take part.
    """

    def dropped(x_BTD: jax.Array, params: Any, index: jax.Array) -> tuple[jax.Array, Aux]:
        y_BTD, aux = layer(x_BTD, params, index)
        is_padding = index == NO_LAYER
        x_BTD = jnp.where(is_padding, x_BTD, y_BTD)
        return x_BTD, jax.tree.map(lambda a: jnp.where(is_padding, jnp.zeros_like(a), a), aux)

    return dropped
