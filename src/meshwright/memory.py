"""What the backward pass finds saved, and what it computes again."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

# Marks that a model puts on its activations with `save_as`; the residual stream between layers is always kept.
SCORES, PROJECTION = "scores", "projection"

_KEEP = jax.checkpoint_policies
POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "attention": _KEEP.save_anything_except_these_names(SCORES),
    "projections": _KEEP.save_only_these_names(PROJECTION),
    "full": _KEEP.nothing_saveable,
}


def save_as(x: jax.Array, mark: str) -> jax.Array:
    """Names an activation for the remat policy."""
    return checkpoint_name(x, mark)


def over_layers(
    block: Callable[[jax.Array, Any, jax.Array], jax.Array],
    x: jax.Array,
    stacked: Any,
    *,
    layers: int,
    remat: str,
    unroll: int,
) -> jax.Array:
    """`block(x, held, layer)` for each layer in turn.

    stacked: the layers' parameters with a leading dimension L.  layer: int32 scalar.
    """
    policy = POLICIES[remat]
    # Inside a scan nothing can be merged across the barrier that prevent_cse inserts, so it is left out.
    body = block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=False)

    def step(x: jax.Array, layer: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        return body(x, *layer), None

    return jax.lax.scan(step, x, (stacked, jax.numpy.arange(layers)), unroll=unroll)[0]
