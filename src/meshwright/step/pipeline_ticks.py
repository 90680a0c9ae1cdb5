"""Ticks of a pipeline as the engine runs them: the table's columns by segment, and the scopes of their branches."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    IDLE,
    NOTHING,
    PLACES,
    Arrivals,
    ScheduleTable,
)

Tick = dict[str, Any]
"""The table's entries of one tick, for this stage."""
Ticks = dict[frozenset[frozenset[str]], int]
"""Number of ticks by the scopes of what the stages run in them: a set for each stage that is not idle."""

_EVENTS = {"embed": (0, (FORWARD,)), "loss": (-1, (FORWARD,)), "embed gradient": (0, (BACKWARD, BACKWARD_INPUT))}
"""What all stages do together: the part that starts it, by index, and the kinds of its tasks."""


def scope_of(segment: str, name: str) -> str:
    """Returns the named scope of a branch, by which the census knows how often a stage takes it."""
    return f"pipeline {segment}: {name}."  # the full stop keeps a scope from being a substring of another


def repeats_forward(scope: str) -> bool:
    """Returns whether what a branch differentiates is a forward pass that another branch has computed."""
    return not scope.endswith((": forward.", ": loss."))


def branch_ticks(table: ScheduleTable, together: bool = False) -> dict[str, tuple[int, int]]:
    """Returns, for the scope of each branch, the number of ticks in which a stage takes it, and the number of ticks.

    together: whether a stage without a task computes beside the others (`PipelineModel.together`).
    """
    counts: dict[str, tuple[int, int]] = {}
    for segment, ticks in table.segments:
        running = table.kind[ticks] != IDLE
        taken = running.any(axis=1) if together else running[:, 0]
        counts |= {scope_of(segment, name): (int(taken[:, i].sum()), len(ticks)) for i, name in enumerate(PLACES)}
        events = {name: int((row[ticks] != NOTHING).sum()) for name, row in _events(table).items()}
        counts |= {scope_of(segment, name): (count, len(ticks)) for name, count in events.items()}
    return {scope: count for scope, count in counts.items() if count[0]}


def tick_scopes(table: ScheduleTable, together: bool = False) -> Ticks:
    """Counts the ticks of a table by the scopes of the halves that each stage runs in them."""
    counts: Ticks = {}
    for segment, ticks in table.segments:
        for row in table.kind[ticks] != IDLE:
            stages = [row.any(axis=0)] if together else row
            scopes = frozenset(
                frozenset(scope_of(segment, name) for name, runs in zip(PLACES, own, strict=True) if runs)
                for own in stages
            )
            counts[scopes] = counts.get(scopes, 0) + 1
    return counts


def _events(table: ScheduleTable) -> dict[str, np.ndarray]:
    """Returns the microbatch of each event in each tick, [ticks], or NOTHING."""
    parts = range(len(table.parts.stage_of))
    return {name: table.runs(parts[part], *kinds) for name, (part, kinds) in _EVENTS.items()}


class Segment:
    """Some ticks of a table: its columns for this stage, and what is known of all stages before the program runs."""

    def __init__(self, table: ScheduleTable, name: str, ticks: range):
        self.name, self.running = name, table.kind[ticks] != IDLE
        """Whether a stage runs a task, [ticks, stages, places]."""
        self.whole = bool((table.kind[ticks] == BACKWARD).any())
        """Whether some backward pass is not split."""
        self.events = {name: row[ticks] for name, row in _events(table).items()}
        # Gradients travel at the beginning of the tick after the one that has computed them; the last tick sends none.
        before = np.asarray(ticks) - 1
        self.arrivals = [Arrivals(a.hop, a.inputs[ticks], a.gradients[before]) for a in table.arrivals]
        self.columns: dict[str, Any] = {
            name: getattr(table, name)[ticks]
            for name in ("kind", "virtual_stage", "microbatch", "input_slot", "gradient_slot")
        }
        self.loss_arrives = table.loss_arrives[ticks]
        self.last_stage = table.parts.last_stage

    def ticks(self) -> Tick:
        """Returns the entries of all ticks for this stage, each [ticks, ...]."""
        stage = lax.axis_index("stage")
        return {
            **{name: jnp.asarray(column)[:, stage] for name, column in self.columns.items()},
            **{name: jnp.asarray(row) for name, row in self.events.items()},
            "any": jnp.asarray(self.running.any(axis=1)),
            "inputs": [jnp.asarray(a.inputs)[:, stage] for a in self.arrivals],
            "gradients": [jnp.asarray(a.gradients)[:, stage] for a in self.arrivals],
            "loss_arrives": jnp.where(stage == self.last_stage, jnp.asarray(self.loss_arrives), NOTHING),
        }
