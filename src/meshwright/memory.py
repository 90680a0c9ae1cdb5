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
    block: Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
    x: jax.Array,
    stacked: Any,
    layers_L: Any,
    *,
    remat: str,
    unroll: int,
) -> tuple[jax.Array, Any]:
    """`block(x, held, layer) -> (x, told)` for each layer in turn; what they tell is stacked, [L, ...].

    stacked: the layers' parameters with a leading dimension L.  layers_L: their numbers, int32.
    """
    policy = POLICIES[remat]
    # Inside a scan nothing can be merged across the barrier that prevent_cse inserts, so it is left out.
    body = block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=False)

    def step(x: jax.Array, layer: tuple[Any, jax.Array]) -> tuple[jax.Array, Any]:
        return body(x, *layer)

    return jax.lax.scan(step, x, (stacked, layers_L), unroll=unroll)
