"""State of a training run: everything that a step changes."""

import dataclasses
import functools
from typing import Any

import jax

from meshwright.sharding.params import Tree


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
    """False after a step whose loss or gradient was not finite; nothing changes from then on. Bool scalar."""
    params: Tree
    optimizer: Any
    variables: tuple[Tree, ...] = ()
    """Arrays that the forward pass of a wrapped model changes, such as batch statistics: one tree, or none."""
