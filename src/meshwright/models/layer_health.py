"""Health of a layer: figures of its forward pass that cost no pass of their own.

A layer's aux gets an entry `HEALTH`, a dictionary of float32 scalars of this device's tokens. They
are added over microbatches and devices, and those in `MAXIMA` are the largest instead.

    residual squares   sum over tokens of the mean over D of x^2, where x is what the layer adds to
    residual tokens    number of these tokens
    attention lse      largest log-sum-exp of a query's attention logits, or 0 if all are below

A kernel that computes softmax by blocks has the log-sum-exp anyway. With S visible keys the largest
logit of a query is between lse - ln S and lse. A kernel without one (the reference, one from
outside without `chunk_attention`) has no figure.
"""

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.model import Aux, ForwardContext, Layer

HEALTH = "health"
"""Entry of a layer's aux, and of a step's metrics."""
SQUARES = "residual squares"
TOKENS = "residual tokens"
LSE = "attention lse"
MAXIMA = (LSE,)
"""Figures of which the largest counts; all others are sums."""


def with_health(layer: Layer, ctx: ForwardContext) -> Layer:
    """Returns a layer that has its health in its aux.
    ctx: that of the layer, with its list of observed figures."""

    lists = [ctx.observed, *(piece.observed for piece in ctx.batch_pieces)]

    def run(x_BTD: jax.Array, params: Any, index: jax.Array) -> tuple[jax.Array, Aux]:
        for observed in lists:
            observed.clear()
        y_BTD, aux = layer(x_BTD, params, index)
        health: Any = _residual(x_BTD)
        found = [jnp.max(lse) for observed in lists for lse in observed]
        if found:
            health[LSE] = jax.lax.stop_gradient(jnp.stack([*found, jnp.zeros(())]).max())
        for observed in lists:
            observed.clear()
        return y_BTD, {**aux, HEALTH: health}

    return run


def _residual(x_BTD: jax.Array) -> dict[str, jax.Array]:
    """Returns the sums from which the root mean square of a residual stream is made."""
    B, T, D = x_BTD.shape
    # A value of its own: fused into the layer's norm, the norm's products
    # and sums would be contracted otherwise.
    x_BTD = jax.lax.optimization_barrier(jax.lax.stop_gradient(x_BTD))
    squares = jnp.square(x_BTD.astype(jnp.float32)).sum() / D
    return {SQUARES: squares, TOKENS: jnp.float32(B * T)}


def add_aux(a: Any, b: Any) -> Any:
    """Adds two trees of aux; of maxima it takes the larger."""

    def add(path: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.maximum(x, y) if is_maximum(path) else x + y

    return jax.tree_util.tree_map_with_path(add, a, b)


def is_maximum(path: Any) -> bool:
    """Whether the leaf at a path of a tree of aux is a maximum."""
    last = path[-1]
    return isinstance(last, jax.tree_util.DictKey) and last.key in MAXIMA


def split_health(aux: dict[str, Aux]) -> tuple[dict[str, Aux], dict[str, dict[str, jax.Array]]]:
    """Returns the aux of each stack without its health,
    and the health of each stack that has some."""
    rest: dict[str, Aux] = {}
    health: Any = {}
    for stack, values in aux.items():
        rest[stack] = {name: value for name, value in values.items() if name != HEALTH}
        if HEALTH in values:
            health[stack] = values[HEALTH]
    return rest, health
