"""Table of a pipeline schedule: the tasks of each stage in each tick, and buffer slots of inputs and gradients.

A tick of a stage has three places, run in this order, any of which may be empty: a forward pass, a backward pass (or
its first half, the gradient of the input), and the other half of a split backward pass, the gradient of the weights.
All stages finish a tick together, so that a tick lasts as long as the tasks of its busiest stage.

`schedule_builder.py` builds the table from the order of tasks on each stage, `step/pipeline.py` executes it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from meshwright.sharding.stages import PartMap

IDLE, FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(5)
TASK_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "input gradient",
    BACKWARD_WEIGHT: "weight gradient",
}
"""Kinds of tasks; BACKWARD_INPUT and BACKWARD_WEIGHT are B and W of the zero-bubble papers."""
PLACE = {FORWARD: 0, BACKWARD: 1, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 2}
"""Place of each kind of task in a tick."""
PLACES = ("forward", "backward", "weight gradient")
NOTHING = -1

ConcurrentTasks = Mapping[frozenset[frozenset[int]], int]
"""Number of ticks by the kinds of tasks in them: the set, over the stages, of the kinds that a stage runs at once."""


class Task(NamedTuple):
    """Work of a stage in a tick: one pass of one of its virtual stages for one microbatch."""

    kind: int
    virtual_stage: int
    microbatch: int


NEXT_TICK = Task(IDLE, NOTHING, NOTHING)
"""Mark in a stage's order of tasks: what follows is not in the same tick as what comes before."""


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Slots for the values that reach a stage from one direction after each tick."""

    hop: int
    """Stages that the values move: 1 to the next stage, -1 to the previous one, 0 stays on the same stage."""
    inputs: np.ndarray
    """Slot of an activation, int32 [ticks, stages]; NOTHING where none arrives."""
    gradients: np.ndarray
    """Slot of a gradient."""

    @property
    def has_inputs(self) -> bool:
        """Whether activations come from this direction."""
        return bool((self.inputs != NOTHING).any())

    @property
    def has_gradients(self) -> bool:
        """Whether gradients come from this direction."""
        return bool((self.gradients != NOTHING).any())


@dataclasses.dataclass(frozen=True)
class ScheduleTable:
    """Tasks and buffer slots of every stage in every tick.

    Arrays of tasks are int32 [ticks, stages, places], NOTHING (kind: IDLE) where a place is empty.
    """

    name: str
    microbatches: int
    parts: PartMap
    kind: np.ndarray
    virtual_stage: np.ndarray
    microbatch: np.ndarray
    input_slot: np.ndarray
    """Slot of the task's input activations, which stay there until the last gradient has used them."""
    gradient_slot: np.ndarray
    """Slot of the gradient of the task's output."""
    arrivals: tuple[Arrivals, ...]
    """Slots for what other stages send in a tick, by direction; directions that carry nothing are left out."""
    loss_arrives: np.ndarray
    """Slot, [ticks], where the last part's stage puts the gradient that the loss gives for this tick's output."""
    input_slots: int
    """Slots for inputs: the largest number of live inputs on any stage."""
    gradient_slots: int
    """Slots for gradients."""
    live_inputs: np.ndarray
    """Inputs that each stage holds in each tick."""

    @property
    def ticks(self) -> int:
        """Length of the schedule."""
        return int(self.kind.shape[0])

    @property
    def stages(self) -> int:
        """Number of pipeline stages P."""
        return self.parts.stages

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages on each stage."""
        return self.parts.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes are split into the gradients of the input and of the weights."""
        return bool(self.task_counts[BACKWARD_INPUT])

    @property
    def trains(self) -> bool:
        """Whether the table has backward passes."""
        return bool(self.task_counts[BACKWARD] + self.task_counts[BACKWARD_INPUT])

    @property
    def segments(self) -> tuple[tuple[str, range], ...]:
        """Ticks before the first backward pass, those that have both passes, and those after the last forward pass.

        Names and ranges of ticks; empty ranges are left out.
        """
        running = (self.kind != IDLE).any(axis=1)
        forward, backward = (np.flatnonzero(ticks) for ticks in (running[:, 0], running[:, 1:].any(axis=1)))
        drain = int(forward[-1]) + 1
        steady = min(int(backward[0]), drain) if len(backward) else drain
        ranges = (("fill", range(steady)), ("steady", range(steady, drain)), ("drain", range(drain, self.ticks)))
        return tuple((name, ticks) for name, ticks in ranges if ticks)

    def bubble(self, backward: float = 2.0) -> float:
        """Returns idle over busy time of a stage, where all stages finish a tick together.

        backward: seconds of a backward pass over those of a forward pass; each half of a split one takes half of it.
        """
        seconds = {FORWARD: 1.0, BACKWARD: backward, BACKWARD_INPUT: backward / 2, BACKWARD_WEIGHT: backward / 2}
        busy = sum(count * seconds[kind] for kind, count in self.task_counts.items())
        return lockstep_seconds(self.concurrent_tasks, seconds) / busy - 1

    @functools.cached_property
    def concurrent_tasks(self) -> ConcurrentTasks:
        """Number of ticks by the kinds of tasks that the stages run in them; idle stages are left out."""
        counts: dict[frozenset[frozenset[int]], int] = {}
        for row in self.kind:
            kinds = frozenset(frozenset(int(k) for k in own if k != IDLE) for own in row) - {frozenset()}
            counts[kinds] = counts.get(kinds, 0) + 1
        return counts

    @functools.cached_property
    def task_counts(self) -> dict[int, int]:
        """Number of tasks of each kind on stage 0; the other stages do the same work."""
        return {kind: int((self.kind[:, 0] == kind).sum()) for kind in TASK_NAMES}

    def ticks_of(self, kind: int) -> int:
        """Returns the number of ticks in which some stage runs a task of a kind."""
        return int((self.kind == kind).any(axis=(1, 2)).sum())

    def tasks(self, tick: int, stage: int) -> list[Task]:
        """Returns the tasks of a stage in a tick, in the order in which they run."""
        columns = (a[tick, stage].tolist() for a in (self.kind, self.virtual_stage, self.microbatch))
        return [Task(*task) for task in zip(*columns, strict=True) if task[0] != IDLE]

    def runs(self, part: int, *kinds: int) -> np.ndarray:
        """Returns the microbatch for which a part runs a task of these kinds in each tick, [ticks], else NOTHING.

        kinds: of one place of a tick.
        """
        stage, virtual_stage, place = self.parts.stage_of[part], self.parts.virtual_stage_of(part), PLACE[kinds[0]]
        running = np.isin(self.kind[:, stage, place], kinds) & (self.virtual_stage[:, stage, place] == virtual_stage)
        return np.where(running, self.microbatch[:, stage, place], NOTHING).astype(np.int32)


def lockstep_seconds(concurrent: ConcurrentTasks, seconds: Mapping[int, float]) -> float:
    """Returns the time of all ticks: each lasts as long as the tasks of its busiest stage. seconds: of each kind."""
    return sum(
        count * max((sum(seconds[kind] for kind in kinds) for kinds in stages), default=0.0)
        for stages, count in concurrent.items()
    )


@dataclasses.dataclass(frozen=True)
class TaskCounts:
    """Counts of a schedule that its time and memory follow from; they need no buffer slots."""

    name: str
    microbatches: int
    stages: int
    virtual_stages: int
    concurrent_tasks: ConcurrentTasks
    """As `ScheduleTable.concurrent_tasks`."""
    task_counts: dict[int, int]
    """As `ScheduleTable.task_counts`."""
    live_inputs: int
    """Largest number of inputs that a stage holds in a tick."""

    @functools.cached_property
    def ticks_by_halves(self) -> tuple[tuple[int, int], int]:
        """Number of ticks with forward passes alone and with backward passes alone, and of those with both."""
        forward = backward = both = 0
        for stages, count in self.concurrent_tasks.items():
            kinds = frozenset[int]().union(*stages)
            has_forward, has_backward = FORWARD in kinds, bool(kinds - {FORWARD})
            forward += count * (has_forward and not has_backward)
            backward += count * (has_backward and not has_forward)
            both += count * (has_forward and has_backward)
        return (forward, backward), both


def dependency(parts: PartMap, stage: int, task: Task) -> tuple[int, Task] | None:
    """Returns the stage and the task that must have finished before `task` can run; None for the first forward pass.

    A backward pass waits for that of the next part, which is given here with the same kind (BACKWARD or
    BACKWARD_INPUT); on the last part it waits for the forward pass.
    """
    part = parts.part(stage, task.virtual_stage)
    if task.kind == FORWARD:
        return None if part == 0 else _task_of(parts, part - 1, FORWARD, task.microbatch)
    if task.kind == BACKWARD_WEIGHT:
        return stage, task._replace(kind=BACKWARD_INPUT)
    if part == parts.last_part:
        return stage, task._replace(kind=FORWARD)
    return _task_of(parts, part + 1, task.kind, task.microbatch)


def _task_of(parts: PartMap, part: int, kind: int, microbatch: int) -> tuple[int, Task]:
    return parts.stage_of[part], Task(kind, parts.virtual_stage_of(part), microbatch)
