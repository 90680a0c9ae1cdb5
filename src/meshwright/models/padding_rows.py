"""Padding rows of a stack on uneven pipeline stages: layers that are the identity."""

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.model import Aux, Layer
from meshwright.sharding.stages import NO_LAYER


def skip_padding(layer: Layer) -> Layer:
    """Returns `layer` for a stack with padding rows: these are the identity and return zero aux."""

    def maybe(x_BTD: jax.Array, params: Any, index: jax.Array, /) -> tuple[jax.Array, Aux]:
        aux = jax.eval_shape(layer, x_BTD, params, index)[1]
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), aux)
        return jax.lax.cond(index == NO_LAYER, lambda: (x_BTD, zeros), lambda: layer(x_BTD, params, index))

    return maybe


def drop_padding(layer: Layer) -> Layer:
    """Returns `layer` as `skip_padding` does, computed in padding rows too and dropped there.

    For layers that send values around a ring, in which the devices of all stages have to take part.
    """

    def dropped(x_BTD: jax.Array, params: Any, index: jax.Array, /) -> tuple[jax.Array, Aux]:
        y_BTD, aux = layer(x_BTD, params, index)
        padding = index == NO_LAYER
        return jnp.where(padding, x_BTD, y_BTD), jax.tree.map(lambda a: jnp.where(padding, jnp.zeros_like(a), a), aux)

    return dropped
