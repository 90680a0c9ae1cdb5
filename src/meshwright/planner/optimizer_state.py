"""Bytes of the optimizer state of any rule, from the arrays that optax would make: it loads optax."""

import math

import jax
import jax.numpy as jnp

from meshwright.config import MeshShape, Optimizer, Training
from meshwright.sharding.params import Tree, trained_only, tree_map
from meshwright.sharding.placement import local_shape
from meshwright.step.optimizers import build_update_rule, place_optimizer_state


def optimizer_state_bytes(o: Optimizer, training: Training, params: Tree, placements: Tree, mesh: MeshShape) -> int:
    """Returns the bytes of the optimizer state on one device. params: descriptions."""
    dtype = jnp.dtype(training.param_dtype)
    params, placements = trained_only(params, params), trained_only(params, placements)
    abstract = tree_map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), params)
    state, where = place_optimizer_state(build_update_rule(o, training, params), abstract, placements, mesh)
    return sum(
        math.prod(local_shape(leaf.shape, placement, mesh)) * leaf.dtype.itemsize
        for leaf, placement in zip(jax.tree.leaves(state), where, strict=True)
    )
