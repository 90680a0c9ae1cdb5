"""Buffers of a pipeline: slots of live activations, and the rows of a virtual stage in its parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.sharding.schedule_table import NOTHING


def read_slot(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    """Reads a slot of a buffer [slots, ...]."""
    return lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), keepdims=False)


def write_slot(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the buffer with `value` in a slot; slot NOTHING leaves it as it is."""
    value = jnp.where(slot == NOTHING, read_slot(buffer, slot), value)
    return lax.dynamic_update_index_in_dim(buffer, value, jnp.maximum(slot, 0), 0)


def part_rows(tree: Any, virtual_stage: jax.Array, virtual_stages: int) -> Any:
    """Slices the rows of one virtual stage from every leaf [virtual_stages * rows, ...]."""
    if virtual_stages == 1:
        return tree

    def rows(x: jax.Array) -> jax.Array:
        n = x.shape[0] // virtual_stages
        return lax.dynamic_slice_in_dim(x, virtual_stage * n, n)

    return jax.tree.map(rows, tree)


def add_to_part(tree: Any, values: Any, virtual_stage: jax.Array, virtual_stages: int) -> Any:
    """Returns `tree` with `values` added to the rows of one virtual stage."""
    if virtual_stages == 1:
        return jax.tree.map(jnp.add, tree, values)

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        n = x.shape[0] // virtual_stages
        start = virtual_stage * n
        return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, start, n) + y, start, 0)

    return jax.tree.map(add, tree, values)


def zeros_of(abstract: Any) -> Any:
    """Returns zeros of the shapes and types of a tree."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract)


def masked(tree: Any, runs: jax.Array | bool) -> Any:
    """Returns the tree, or zeros on a stage that has no task; infinities of a stage without a task do not survive."""
    if runs is True:
        return tree
    return jax.tree.map(lambda x: jnp.where(runs, x, jnp.zeros_like(x)), tree)
