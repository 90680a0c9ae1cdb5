"""Silent corruption: steps computed twice, whose results must be equal bit by bit."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import HostError
from meshwright.signs import Phases
from meshwright.trainer.replicas import Sums, shard_sums, shown

Step = Callable[[Any, Any], tuple[Any, Any]]


def checked(step: Step, every: int, phases: Phases) -> Step:
    """Returns a train step that is checked once in `every` steps."""

    def take(state: Any, batch: Any) -> tuple[Any, Any]:
        number = phases.now[0]  # the step that the loop has begun
        return step(state, batch) if number % every else checked_step(step, state, batch, number)

    return take


def checked_step(step: Step, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
    """Takes a step twice from the same state, and returns the second result.

    The step is deterministic: another result comes from a device that computes wrongly or from
    memory that lost a bit. Takes as much more memory as the state, once.
    Raises HostError naming the devices.
    """
    spare = jax.tree.map(jnp.copy, state)
    first = shard_sums(step(spare, batch)[0])
    del spare
    state, metrics = step(state, batch)
    check_equal(first, shard_sums(state), number)
    return state, metrics


def check_equal(first: Sums, second: Sums, step: int) -> None:
    """Raises HostError where a step that was computed twice gave two results."""
    names = [name for name in first if first[name] != second[name]]
    if not names:
        return
    devices = {d for name in names for d in first[name] if first[name][d] != second[name][d]}
    raise HostError(
        f"step {step}, checked for silent corruption",
        f"computed twice, it gave two results in {shown(names)}: {_names_of(devices)}",
        "--resume, from a checkpoint before it, without the host of that device",
    )


def _names_of(devices: set[jax.Device]) -> str:
    ordered = sorted(devices, key=operator.attrgetter("id"))
    return shown([f"device {d.id} of process {d.process_index}" for d in ordered])
