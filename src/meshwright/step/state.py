"""State of a training (parameters, optimizer state, step count), and the rule that updates it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec

from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.params import Tree

BATCH_SPEC = PartitionSpec(BATCH_AXES)
"""Sharding of every array of a batch, [B, ...]."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "healthy", "params", "optimizer", "variables"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """Parameters, optimizer state and step count."""

    step: jax.Array
    """Steps taken; int32 scalar."""
    healthy: jax.Array
    """False after a step whose loss or gradient was not finite; nothing changes from then on. Bool
    scalar."""
    params: Tree
    optimizer: Any
    variables: tuple[Tree, ...] = ()
    """Arrays that the forward pass of a wrapped model changes, such as batch statistics: one tree,
    or none."""

    @property
    def shardings(self) -> "State":
        """Sharding of every array of an abstract state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self)


def specs_of(shardings: Tree) -> Tree:
    """Returns the `PartitionSpec` of every `NamedSharding` of a tree."""
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


class UpdateRule(NamedTuple):
    """Update of the parameters, as the step calls it."""

    init: Callable[[Tree], Any]
    """`params -> state`."""
    update: Callable[[Tree, Any, Tree, jax.Array], tuple[Tree, Any]]
    """`(float32 gradients, state, params, step) -> (params, state)`."""


def float32_update(rule: optax.GradientTransformation) -> UpdateRule:
    """Returns the update of float32 parameters by an optax rule: its updates are added to them."""

    def update(grads: Tree, state: Any, params: Tree, step: jax.Array) -> tuple[Tree, Any]:
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return UpdateRule(rule.init, update)
