"""Table of a pipeline schedule.

The tasks of each stage in each tick, and buffer slots of inputs and gradients.
A tick of a stage has three places, run in this order, any of which may be empty: a forward pass, a
backward pass (or its first half, the gradient of the input), and the other half of a split backward
pass, the gradient of the weights. All stages finish a tick together, so that a tick lasts as long
as the tasks of its busiest stage.

`tabulate` builds the table from the order of tasks on each stage: every task runs as early as its
inputs allow. Tasks that follow each other on a stage share a tick where their places in it do: a
forward pass and the backward pass after it, an input gradient and the weight gradient after it.
What a tick sends, the next one can use; the loss and its gradient are ready after the tick in which
the last part has finished a microbatch. `step/pipeline.py` executes a table.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.errors import ConfigError
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
"""Number of ticks by the kinds of tasks in them: the set, over the stages, of the kinds that a
stage runs at once."""


class Task(NamedTuple):
    """Work of a stage in a tick: one pass of one of its virtual stages for one microbatch."""

    kind: int
    virtual_stage: int
    microbatch: int


NEXT_TICK = Task(IDLE, NOTHING, NOTHING)
"""Mark in a stage's order of tasks: what follows is not in the same tick as what comes before."""


def lockstep_seconds(concurrent: ConcurrentTasks, seconds: Mapping[int, float]) -> float:
    """Returns the time of all ticks.

    Each lasts as long as the tasks of its busiest stage. seconds: of each kind.
    """
    ticks = []
    for stages, count in concurrent.items():
        of_stages = [sum(seconds[kind] for kind in kinds) for kinds in stages]
        ticks.append(count * max(of_stages, default=0.0))
    return sum(ticks)


@dataclasses.dataclass(frozen=True)
class TaskCounts:
    """Counts of a schedule that its time and memory follow from; they need no buffer slots."""

    name: str
    microbatches: int
    stages: int
    virtual_stages: int
    concurrent_tasks: ConcurrentTasks
    """Number of ticks by the kinds of tasks that the stages run in them; idle stages are left out.
    """
    task_counts: dict[int, int]
    """Number of tasks of each kind on stage 0; the other stages do the same work."""
    most_live_inputs: int
    """Largest number of inputs that a stage holds in a tick."""

    @functools.cached_property
    def ticks_by_halves(self) -> tuple[tuple[int, int], int]:
        """Number of ticks with only forward, only backward, and both passes."""
        forward = backward = both = 0
        for stages, count in self.concurrent_tasks.items():
            kinds = frozenset[int]().union(*stages)
            has_forward, has_backward = FORWARD in kinds, bool(kinds - {FORWARD})
            forward += count * (has_forward and not has_backward)
            backward += count * (has_backward and not has_forward)
            both += count * (has_forward and has_backward)
        return (forward, backward), both

    def bubble(self, backward: float = 2.0) -> float:
        """Returns idle over busy time of a stage, where all stages finish a tick together.

        backward: seconds of a backward pass over those of a forward pass; each half of a split one
        takes half of it.
        """
        seconds = {
            FORWARD: 1.0,
            BACKWARD: backward,
            BACKWARD_INPUT: backward / 2,
            BACKWARD_WEIGHT: backward / 2,
        }
        busy = sum(count * seconds[kind] for kind, count in self.task_counts.items())
        return lockstep_seconds(self.concurrent_tasks, seconds) / busy - 1


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Slots for the values that reach a stage from one direction after each tick."""

    hop: int
    """Stages that the values move: 1 to the next stage, -1 to the previous one, 0 stays on the same
    stage."""
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
class ScheduleTable(TaskCounts):
    """Tasks and buffer slots of every stage in every tick.

    Arrays of tasks are int32 [ticks, stages, places], NOTHING (kind: IDLE) where a place is empty.
    """

    parts: PartMap
    kind: np.ndarray
    virtual_stage: np.ndarray
    microbatch: np.ndarray
    input_slot: np.ndarray
    """Slot of the task's input activations, which stay there until the last gradient has used them.
    """
    gradient_slot: np.ndarray
    """Slot of the gradient of the task's output."""
    arrivals: tuple[Arrivals, ...]
    """Slots for what other stages send in a tick, by direction; directions that carry nothing are
    left out."""
    loss_arrives: np.ndarray
    """Slot, [ticks], where the last part's stage puts the gradient that the loss gives for this
    tick's output."""
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
    def splits_backward(self) -> bool:
        """Whether backward passes are split into the gradients of the input and of the weights."""
        return bool(self.task_counts[BACKWARD_INPUT])

    @property
    def segments(self) -> tuple[tuple[str, range], ...]:
        """Ticks before the first backward pass, with both passes, and after the last forward pass.

        Names and ranges of ticks; empty ranges are left out.
        """
        running = (self.kind != IDLE).any(axis=1)
        forward, backward = (
            np.flatnonzero(ticks) for ticks in (running[:, 0], running[:, 1:].any(axis=1))
        )
        drain = int(forward[-1]) + 1
        steady = min(int(backward[0]), drain) if len(backward) else drain
        ranges = (
            ("fill", range(steady)),
            ("steady", range(steady, drain)),
            ("drain", range(drain, self.ticks)),
        )
        return tuple((name, ticks) for name, ticks in ranges if ticks)

    @property
    def title(self) -> str:
        """Name and size of the schedule."""
        virtual_stages = (
            f" of {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else ""
        )
        return (
            f"{self.name}: {self.microbatches} microbatches through {self.stages} "
            f"stages{virtual_stages}"
        )

    @property
    def summary(self) -> str:
        """Ticks, bubble and live inputs of the schedule."""
        return (
            f"{self.ticks} ticks, bubble {self.bubble():.1%} of the busy time, at most "
            f"{self.input_slots} live inputs "
            "per stage"
        )

    def tasks(self, tick: int, stage: int) -> list[Task]:
        """Returns the tasks of a stage in a tick, in the order in which they run."""
        columns = (
            a[tick, stage].tolist() for a in (self.kind, self.virtual_stage, self.microbatch)
        )
        return [Task(*task) for task in zip(*columns, strict=True) if task[0] != IDLE]

    def runs(self, part: int, *kinds: int) -> np.ndarray:
        """Returns the microbatch of a part's task of these kinds in each tick, [ticks].

        NOTHING without one.
        kinds: of one place of a tick.
        """
        stage = self.parts.stage_of[part]
        virtual_stage = self.parts.virtual_stage_of(part)
        place = PLACE[kinds[0]]
        running = np.isin(self.kind[:, stage, place], kinds) & (
            self.virtual_stage[:, stage, place] == virtual_stage
        )
        return np.where(running, self.microbatch[:, stage, place], NOTHING).astype(np.int32)


def dependency(parts: PartMap, stage: int, task: Task) -> tuple[int, Task] | None:
    """Returns the stage and the task that must finish before `task` can run.

    None for the first forward pass.
    A backward pass waits for that of the next part, which is given here with the same kind
    (BACKWARD or BACKWARD_INPUT); on the last part it waits for the forward pass.
    """
    part = parts.part(stage, task.virtual_stage)
    if task.kind == BACKWARD_WEIGHT:
        return stage, task._replace(kind=BACKWARD_INPUT)
    if task.kind != FORWARD and part == parts.last_part:
        return stage, task._replace(kind=FORWARD)
    needed = part - 1 if task.kind == FORWARD else part + 1
    return (
        None
        if needed < 0
        else (parts.stage_of[needed], task._replace(virtual_stage=parts.virtual_stage_of(needed)))
    )


Orders = Sequence[Sequence[Task]]
"""Tasks of each stage, in order."""
_Ticks = list[dict[Task, int]]


def can_run(parts: PartMap, microbatches: int, orders: Orders) -> bool:
    """Returns whether each stage can run its tasks in this order.

    No pass is missing, and no stages wait in a cycle.
    """
    try:
        _run("", parts, microbatches, orders)
    except ConfigError:
        return False
    return True


def count_tasks(name: str, parts: PartMap, microbatches: int, orders: Orders) -> TaskCounts:
    """Counts the tasks of each stage. Raises ConfigError as `tabulate` does."""
    return _counts(name, parts, microbatches, *_run(name, parts, microbatches, orders))


def tabulate(name: str, parts: PartMap, microbatches: int, orders: Orders) -> ScheduleTable:
    """Builds the table of the tasks of each stage.

    name: the schedule's, for errors and pictures.
    1F1B of 3 microbatches on 2 stages; F0 is a forward pass of microbatch 0, B0 its backward pass:

        tick          0    1    2       3       4    5
        stage 0       F0   F1   F2      B0      B1   B2
        stage 1       .    F0   F1 B0   F2 B1   B2   .
        live inputs   1 0  2 1  3 2     3 2     2 1  1 0    of stages 0 and 1

    Raises ConfigError where a pass is missing or run twice, and where the stages wait for each
    other.
    """
    ticks, sent = _run(name, parts, microbatches, orders)
    shape = (_length(ticks), parts.stages)
    arrivals = {hop: Arrivals(hop, _nothing(shape), _nothing(shape)) for hop in (1, -1, 0)}
    loss_arrives = _nothing(shape[:1])
    input_slot, input_slots = _store_inputs(parts, ticks, sent, arrivals)
    gradient_slot, gradient_slots = _store_gradients(parts, ticks, sent, arrivals, loss_arrives)
    kind, virtual_stage, microbatch = _places(ticks, shape)
    return ScheduleTable(
        **vars(_counts(name, parts, microbatches, ticks, sent)),
        parts=parts,
        kind=kind,
        virtual_stage=virtual_stage,
        microbatch=microbatch,
        input_slot=input_slot,
        gradient_slot=gradient_slot,
        arrivals=tuple(a for a in arrivals.values() if a.has_inputs or a.has_gradients),
        loss_arrives=loss_arrives,
        input_slots=input_slots,
        gradient_slots=gradient_slots,
        live_inputs=_live_inputs(ticks, sent),
    )


def _nothing(shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array of a table in which nothing happens yet."""
    return np.full(shape, NOTHING, np.int32)


def _places(ticks: _Ticks, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns kind, virtual stage and microbatch of each task, [tick, stage, place]."""
    kind = np.full((*shape, len(PLACES)), IDLE, np.int32)
    virtual_stage = _nothing((*shape, len(PLACES)))
    microbatch = _nothing((*shape, len(PLACES)))
    for stage, tick_of in enumerate(ticks):
        for task, tick in tick_of.items():
            index = (tick, stage, PLACE[task.kind])
            kind[index] = task.kind
            virtual_stage[index] = task.virtual_stage
            microbatch[index] = task.microbatch
    return kind, virtual_stage, microbatch


def _store_inputs(
    parts: PartMap, ticks: _Ticks, sent: _Ticks, arrivals: Mapping[int, "Arrivals"]
) -> tuple[np.ndarray, int]:
    """Gives each input of a virtual stage a slot, and enters its arrival.

    Returns the slot that the task in each place reads, [tick, stage, place], and the slots that a
    stage has.
    """
    read = _nothing((_length(ticks), parts.stages, len(PLACES)))
    most = 1
    for stage in range(parts.stages):
        slots = _Slots()
        for sent_in, task, uses in _values(ticks[stage], sent[stage], (FORWARD,)):
            slot = slots.take(sent_in + 1, max(uses.values()))
            part = parts.part(stage, task.virtual_stage)
            if part > 0:  # the first part reads the tokens, which are there when it runs
                arrivals[parts.hop(part - 1)].inputs[sent_in, stage] = slot
            for kind, tick in uses.items():
                read[tick, stage, PLACE[kind]] = slot
        most = max(most, len(slots.taken_until))
    return read, most


def _store_gradients(
    parts: PartMap,
    ticks: _Ticks,
    sent: _Ticks,
    arrivals: Mapping[int, "Arrivals"],
    loss_arrives: np.ndarray,
) -> tuple[np.ndarray, int]:
    """Gives a slot to each gradient of a virtual stage's output, and enters its arrival.

    The last part's gradient is the loss's.
    Returns the slot that the task in each place reads, [tick, stage, place], and the slots that a
    stage has.
    """
    read = _nothing((_length(ticks), parts.stages, len(PLACES)))
    most = 1
    for stage in range(parts.stages):
        slots = _Slots()
        for sent_in, task, uses in _values(ticks[stage], sent[stage], (BACKWARD, BACKWARD_INPUT)):
            slot = slots.take(sent_in + 1, max(uses.values()))
            part = parts.part(stage, task.virtual_stage)
            if part == parts.last_part:
                loss_arrives[sent_in] = slot
            else:
                arrivals[-parts.hop(part)].gradients[sent_in, stage] = slot
            for kind, tick in uses.items():
                read[tick, stage, PLACE[kind]] = slot
        most = max(most, len(slots.taken_until))
    return read, most


def _run(name: str, parts: PartMap, microbatches: int, orders: Orders) -> tuple[_Ticks, _Ticks]:
    """Returns the tick of each task of each stage, and the tick in which what it waits for is sent.

    Raises ConfigError where a pass is missing or run twice, and where the stages wait for each
    other.
    """
    size = (
        f"{microbatches} microbatches on stage={parts.stages} with {parts.virtual_stages} "
        "virtual stages"
    )
    asked = f"pipeline schedule {name!r} for {size}"
    for stage, kinds, v, m in _incomplete(parts, microbatches, orders):
        names = ", ".join(TASK_NAMES[kind] for kind in kinds) or "nothing"
        raise ConfigError(
            asked,
            f"stage {stage} runs {names} for virtual stage {v} and microbatch {m}",
            "forward, then backward or its two halves, once for each virtual stage and microbatch",
        )
    timeline = _Timeline(parts, orders)
    advanced = True
    while advanced:
        advanced = False
        for stage in range(parts.stages):
            if timeline.advance(stage):
                advanced = True
    waiting = timeline.waiting()
    if waiting:
        tasks = "; ".join(
            f"stage {stage} for {TASK_NAMES[task.kind]} of virtual stage {task.virtual_stage}, "
            f"microbatch {task.microbatch}"
            for stage, task in waiting
        )
        last = max(timeline.last_tick)
        raise ConfigError(
            asked, f"in tick {last} all stages wait: {tasks}", "an order without a cycle"
        )
    return timeline.ticks, timeline.sent


class _Timeline:
    """Ticks of the tasks of each stage, found in the order of its tasks.

    A task runs in the first tick in which its place is free and what it needs has been sent:

        tick = max(tick of the stage's task before, or the next one if its place has passed,
                   tick of the needed task + 1)

    A weight gradient needs the input gradient of its own stage, in whose tick it may run.
    """

    def __init__(self, parts: PartMap, orders: Orders) -> None:
        self.orders = orders
        self.ticks: _Ticks = [{} for _ in orders]
        self.sent: _Ticks = [{} for _ in orders]
        self.position = [0] * len(orders)
        """Tasks of each stage that have a tick."""
        self.last_tick = [0] * len(orders)
        self.last_place = [NOTHING] * len(orders)
        # By the first microbatch; the others wait for the same tasks of their own.
        self.needs = {
            (stage, kind, v): dependency(parts, stage, Task(kind, v, 0))
            for stage, kind, v in itertools.product(
                range(parts.stages), TASK_NAMES, range(parts.virtual_stages)
            )
        }
        self.split = {
            (stage, task.virtual_stage, task.microbatch)
            for stage, order in enumerate(orders)
            for task in order
            if task.kind == BACKWARD_INPUT
        }
        """Backward passes in two halves."""

    def advance(self, stage: int) -> bool:
        """Places the next tasks of a stage, up to one that waits for another stage.

        Returns whether there were any.
        """
        order = self.orders[stage]
        advanced = False
        while self.position[stage] < len(order):
            task = order[self.position[stage]]
            if task == NEXT_TICK:
                self.last_place[stage] = len(PLACES)
            elif self._place(stage, task):
                advanced = True
            else:
                break
            self.position[stage] += 1
        return advanced

    def _place(self, stage: int, task: Task) -> bool:
        """Places a task of a stage; returns False where it waits for one that has no tick yet."""
        place = PLACE[task.kind]
        tick = self.last_tick[stage]
        if self.last_place[stage] >= place:  # the places of a tick are run in their order
            tick += 1
        sent = tick - 1
        needed = self.needs[stage, task.kind, task.virtual_stage]
        if needed is not None:
            needed_tick = self._tick_of(*needed, task.microbatch)
            if needed_tick is None:
                return False
            sent = needed_tick
        arrival = sent if task.kind == BACKWARD_WEIGHT else sent + 1
        tick = max(tick, arrival)
        self.ticks[stage][task] = tick
        self.sent[stage][task] = sent
        self.last_tick[stage] = tick
        self.last_place[stage] = place
        return True

    def _tick_of(self, stage: int, first: Task, microbatch: int) -> int | None:
        """Returns the tick of a task of another microbatch than the first.

        None without one so far.
        """
        kind = first.kind
        if kind in (BACKWARD, BACKWARD_INPUT):
            is_split = (stage, first.virtual_stage, microbatch) in self.split
            kind = BACKWARD_INPUT if is_split else BACKWARD
        return self.ticks[stage].get(Task(kind, first.virtual_stage, microbatch))

    def waiting(self) -> list[tuple[int, Task]]:
        """Returns the stages that have not run all of their tasks, and what each waits with."""
        return [
            (stage, order[self.position[stage]])
            for stage, order in enumerate(self.orders)
            if self.position[stage] < len(order)
        ]


def _incomplete(
    parts: PartMap, microbatches: int, orders: Orders
) -> Iterator[tuple[int, list[int], int, int]]:
    trains = {task.kind for order in orders for task in order} - {IDLE} != {FORWARD}
    legal = (
        [[FORWARD, BACKWARD], [FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT]] if trains else [[FORWARD]]
    )
    for stage, order in enumerate(orders):
        passes: dict[tuple[int, int], list[int]] = {
            (v, m): [] for v in range(parts.virtual_stages) for m in range(microbatches)
        }
        for kind, v, m in order:
            if kind != IDLE:
                passes.setdefault((v, m), []).append(kind)
        for (v, m), kinds in passes.items():
            if sorted(kinds) not in legal or v >= parts.virtual_stages or m >= microbatches:
                yield stage, kinds, v, m


def _length(ticks: _Ticks) -> int:
    return max(tick for own in ticks for tick in own.values()) + 1


def _live_inputs(ticks: _Ticks, sent: _Ticks) -> np.ndarray:
    """Returns the inputs that each stage holds in each tick, arrival to last use."""
    live = np.zeros((_length(ticks) + 1, len(ticks)), np.int32)
    for stage, own in enumerate(ticks):
        last = dict[tuple[int, int], int]()
        for (_, v, m), tick in own.items():
            last[v, m] = max(tick, last.get((v, m), 0))
        arrived = [sent[stage][task] for task in own if task.kind == FORWARD]
        np.add.at(live[:, stage], np.array(arrived, np.int64) + 1, 1)
        np.subtract.at(live[:, stage], np.array(list(last.values()), np.int64) + 1, 1)
    return live.cumsum(axis=0, dtype=np.int32)[:-1]


def _counts(
    name: str, parts: PartMap, microbatches: int, ticks: _Ticks, sent: _Ticks
) -> TaskCounts:
    # Kinds that run at once as bits: a search counts hundreds of schedules with ten thousands of
    # tasks each.
    running = [[0] * parts.stages for _ in range(_length(ticks))]
    for stage, own in enumerate(ticks):
        for task, tick in own.items():
            running[tick][stage] |= 1 << task.kind
    concurrent = Counter[frozenset[frozenset[int]]]()
    for stages, count in Counter(frozenset(tick) - {0} for tick in running).items():
        concurrent[frozenset(map(_kinds_of, stages))] += count
    first = Counter(task.kind for task in ticks[0])
    return TaskCounts(
        name,
        microbatches,
        parts.stages,
        parts.virtual_stages,
        concurrent_tasks=dict(concurrent),
        task_counts={kind: first[kind] for kind in TASK_NAMES},
        most_live_inputs=int(_live_inputs(ticks, sent).max()),
    )


def _kinds_of(bits: int) -> frozenset[int]:
    """Returns the kinds of tasks that bits stand for."""
    return frozenset(kind for kind in TASK_NAMES if bits >> kind & 1)


def _values(
    own: dict[Task, int], sent: dict[Task, int], kinds: tuple[int, ...]
) -> Iterator[tuple[int, Task, dict[int, int]]]:
    """Yields what reaches a stage for its tasks of some kinds, in the order of arrival.

    The tick in which it is sent, the task, and the tick of each use by the kind that uses it. What
    is sent in a tick is stored after that tick.
    """
    for arrival, task in sorted((sent[task], task) for task in own if task.kind in kinds):
        later = (task._replace(kind=kind) for kind in TASK_NAMES if kind >= task.kind)
        yield arrival, task, {use.kind: own[use] for use in later if use in own}


class _Slots:
    """Buffer slots, each taken from one tick to another; the first free one is given."""

    def __init__(self) -> None:
        self.taken_until: list[int] = []

    def take(self, first: int, last: int) -> int:
        for slot, until in enumerate(self.taken_until):
            if until < first:
                self.taken_until[slot] = last
                return slot
        self.taken_until.append(last)
        return len(self.taken_until) - 1
