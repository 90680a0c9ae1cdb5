"""Builder of schedule tables from the order of tasks on each stage: every task runs as early as its inputs allow.

Tasks that follow each other on a stage share a tick where their places in it do: a forward pass and the backward pass
after it, an input gradient and the weight gradient after it. What a tick sends, the next one can use; the loss and its
gradient are ready after the tick in which the last part has finished a microbatch.

Arithmetic alone: no device and no array of JAX is needed.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from meshwright.errors import ConfigError
from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    IDLE,
    NEXT_TICK,
    NOTHING,
    PLACE,
    PLACES,
    TASK_NAMES,
    Arrivals,
    ScheduleTable,
    Task,
    TaskCounts,
    dependency,
)
from meshwright.sharding.stages import PartMap


def tabulate(name: str, parts: PartMap, microbatches: int, orders: Sequence[Sequence[Task]]) -> ScheduleTable:
    """Builds the table of the tasks of each stage, in order. name: the schedule's, for errors and pictures.

    Raises ConfigError where a pass is missing or run twice, and where the stages wait for each other.
    """
    return _Builder(name, parts, microbatches, orders).table()


def count_tasks(name: str, parts: PartMap, microbatches: int, orders: Sequence[Sequence[Task]]) -> TaskCounts:
    """Counts the tasks of each stage, in order. Raises ConfigError as `tabulate` does."""
    return _Builder(name, parts, microbatches, orders).counts()


def can_run(parts: PartMap, microbatches: int, orders: Sequence[Sequence[Task]]) -> bool:
    """Returns whether the tasks of each stage can run in this order: no pass is missing, no stages wait in a cycle."""
    try:
        _Builder("", parts, microbatches, orders).ticks()
    except ConfigError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class _Builder:
    """Table of given orders of tasks: when each task runs, and in which slots its inputs and gradients wait."""

    name: str
    parts: PartMap
    microbatches: int
    orders: Sequence[Sequence[Task]]

    def table(self) -> ScheduleTable:
        ticks, sent = self.ticks()
        shape = (_length(ticks), self.parts.stages)
        kind, virtual_stage, microbatch, input_slot, gradient_slot = (
            np.full((*shape, len(PLACES)), NOTHING, np.int32) for _ in range(5)
        )
        kind[:] = IDLE
        for stage, own in enumerate(ticks):
            for task, tick in own.items():
                at = (tick, stage, PLACE[task.kind])
                kind[at], virtual_stage[at], microbatch[at] = task
        arrivals = {hop: Arrivals(hop, *(np.full(shape, NOTHING, np.int32) for _ in range(2))) for hop in (1, -1, 0)}
        live_inputs, loss_arrives = np.zeros(shape, np.int32), np.full(shape[0], NOTHING, np.int32)
        input_slots = gradient_slots = 1
        for stage in range(self.parts.stages):
            inputs = _inputs(ticks[stage], sent[stage])
            slots = self._place_inputs(stage, inputs, arrivals, input_slot, live_inputs)
            input_slots = max(input_slots, slots)
            gradients = _gradients(ticks[stage], sent[stage])
            slots = self._place_gradients(stage, gradients, arrivals, gradient_slot, loss_arrives)
            gradient_slots = max(gradient_slots, slots)
        return ScheduleTable(
            self.name, self.microbatches, self.parts, kind, virtual_stage, microbatch, input_slot, gradient_slot,
            tuple(a for a in arrivals.values() if a.has_inputs or a.has_gradients), loss_arrives,
            input_slots, gradient_slots, live_inputs,
        )  # fmt: skip

    def counts(self) -> TaskCounts:
        ticks, sent = self.ticks()
        # Kinds that run at once as bits: a search counts hundreds of schedules with ten thousands of tasks each.
        running = [[0] * len(self.orders) for _ in range(_length(ticks))]
        live = np.zeros((len(running) + 1, self.parts.stages), np.int32)
        for stage, own in enumerate(ticks):
            last = dict[tuple[int, int], int]()
            for (kind, v, m), tick in own.items():
                running[tick][stage] |= 1 << kind
                last[v, m] = max(tick, last.get((v, m), 0))
            arrived = [sent[stage][task] for task in own if task.kind == FORWARD]
            np.add.at(live[:, stage], np.array(arrived, np.int64) + 1, 1)
            np.subtract.at(live[:, stage], np.array(list(last.values()), np.int64) + 1, 1)
        concurrent = Counter[frozenset[frozenset[int]]]()
        for bits, count in Counter(frozenset(tick) - {0} for tick in running).items():
            concurrent[frozenset(_kinds(each) for each in bits)] += count
        first = Counter(task.kind for task in ticks[0])
        return TaskCounts(
            self.name, self.microbatches, self.parts.stages, self.parts.virtual_stages,
            dict(concurrent), {kind: first[kind] for kind in TASK_NAMES},
            int(live.cumsum(axis=0).max()),
        )  # fmt: skip

    @functools.cached_property
    def _backward_kinds(self) -> dict[tuple[int, int, int], int]:
        """BACKWARD or BACKWARD_INPUT, whichever (stage, virtual stage, microbatch) runs."""
        return {
            (stage, task.virtual_stage, task.microbatch): task.kind
            for stage, order in enumerate(self.orders)
            for task in order
            if task.kind in (BACKWARD, BACKWARD_INPUT)
        }

    @functools.cached_property
    def _dependencies(self) -> dict[tuple[int, int, int], tuple[int, Task] | None]:
        """`dependency` of the first microbatch's task, by (stage, kind, virtual stage)."""
        stages, virtual_stages = range(self.parts.stages), range(self.parts.virtual_stages)
        return {
            (stage, kind, v): dependency(self.parts, stage, Task(kind, v, 0))
            for stage, kind, v in itertools.product(stages, TASK_NAMES, virtual_stages)
        }

    def ticks(self) -> tuple[list[dict[Task, int]], list[dict[Task, int]]]:
        """Returns the tick of each task of each stage, and the tick in which what it waits for is sent.

        Every task runs as early as its order and its inputs allow.
        """
        self._check_complete()
        needs, backward_kinds = self._dependencies, self._backward_kinds
        ticks: list[dict[Task, int]] = [{} for _ in self.orders]
        sent: list[dict[Task, int]] = [{} for _ in self.orders]
        position, last = [0] * len(self.orders), [(0, NOTHING)] * len(self.orders)
        advanced = True
        while advanced:
            advanced = False
            for stage, order in enumerate(self.orders):
                while position[stage] < len(order):
                    task = order[position[stage]]
                    if task == NEXT_TICK:
                        last[stage] = (last[stage][0], len(PLACES))
                        position[stage] += 1
                        continue
                    needed = needs[stage, task.kind, task.virtual_stage]
                    place, (tick, taken) = PLACE[task.kind], last[stage]
                    tick += taken >= place  # the places of a tick are run in their order
                    before: int | None = tick - 1
                    if needed is not None:
                        at, (kind, v, _) = needed
                        if kind in (BACKWARD, BACKWARD_INPUT):
                            kind = backward_kinds[at, v, task.microbatch]
                        before = ticks[at].get(Task(kind, v, task.microbatch))
                    if before is None:
                        break
                    # A weight gradient may follow its input gradient in the same tick.
                    tick = max(tick, before + (task.kind != BACKWARD_WEIGHT))
                    ticks[stage][task], sent[stage][task], last[stage] = tick, before, (tick, place)
                    position[stage] += 1
                    advanced = True
        waiting = [s for s, order in enumerate(self.orders) if position[s] < len(order)]
        if waiting:
            tasks = "; ".join(f"stage {s} for {self._text(self.orders[s][position[s]])}" for s in waiting)
            raise self._refuse(f"in tick {max(last)[0]} all stages wait: {tasks}", "an order without a cycle")
        return ticks, sent

    def _check_complete(self) -> None:
        """Raises ConfigError unless every part runs its passes once for every microbatch."""
        kinds = {task.kind for order in self.orders for task in order} - {IDLE}
        legal = [[FORWARD]] if kinds == {FORWARD} else [[FORWARD, BACKWARD], [FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT]]
        for stage, order in enumerate(self.orders):
            passes: dict[tuple[int, int], list[int]] = {
                (v, m): [] for v in range(self.parts.virtual_stages) for m in range(self.microbatches)
            }
            for task in order:
                if task == NEXT_TICK:
                    continue
                passes.setdefault((task.virtual_stage, task.microbatch), []).append(task.kind)
            for (v, m), kinds_run in passes.items():
                known = v < self.parts.virtual_stages and m < self.microbatches
                if not known or sorted(kinds_run) not in legal:
                    names = ", ".join(TASK_NAMES[k] for k in kinds_run) or "nothing"
                    raise self._refuse(
                        f"stage {stage} runs {names} for virtual stage {v} and microbatch {m}",
                        "forward, then backward or its two halves, once for each virtual stage and microbatch",
                    )

    def _refuse(self, truth: str, fix: str) -> ConfigError:
        parts = self.parts
        return ConfigError(
            f"pipeline schedule {self.name!r} for {self.microbatches} microbatches on stage={parts.stages} with "
            f"{parts.virtual_stages} virtual stages",
            truth,
            fix,
        )

    def _text(self, task: Task) -> str:
        return f"{TASK_NAMES[task.kind]} of virtual stage {task.virtual_stage}, microbatch {task.microbatch}"

    def _place_inputs(
        self,
        stage: int,
        inputs: Iterable[tuple[int, Task, dict[int, int]]],
        arrivals: dict[int, Arrivals],
        input_slot: np.ndarray,
        live_inputs: np.ndarray,
    ) -> int:
        """Assigns a slot to every input of a stage, from arrival to last use; returns the slots taken."""
        slots = _Slots()
        for sent, task, uses in inputs:
            last = max(uses.values())
            slot = slots.take(sent + 1, last)
            live_inputs[sent + 1 : last + 1, stage] += 1
            part = self.parts.part(stage, task.virtual_stage)
            if part:
                arrivals[self.parts.hop(part - 1)].inputs[sent, stage] = slot
            for kind, tick in uses.items():
                input_slot[tick, stage, PLACE[kind]] = slot
        return slots.count

    def _place_gradients(
        self,
        stage: int,
        gradients: Iterable[tuple[int, Task, dict[int, int]]],
        arrivals: dict[int, Arrivals],
        gradient_slot: np.ndarray,
        loss_arrives: np.ndarray,
    ) -> int:
        """Assigns a slot to every output gradient of a stage, from arrival to last use; returns the slots taken."""
        slots = _Slots()
        for sent, task, uses in gradients:
            slot = slots.take(sent + 1, max(uses.values()))
            part = self.parts.part(stage, task.virtual_stage)
            if part == self.parts.last_part:
                loss_arrives[sent] = slot
            else:
                arrivals[-self.parts.hop(part)].gradients[sent, stage] = slot
            for kind, tick in uses.items():
                gradient_slot[tick, stage, PLACE[kind]] = slot
        return slots.count


def _inputs(ticks: dict[Task, int], sent: dict[Task, int]) -> list[tuple[int, Task, dict[int, int]]]:
    """Returns the inputs of a stage in the order of their arrival: tick in which it is sent, task, tick of each use.

    Uses are by the kind of the task. A value that is sent in a tick is stored after that tick.
    """
    # The first part reads the tokens, which are there when it runs.
    arrivals = sorted((sent[task], task) for task in ticks if task.kind == FORWARD)
    return [(arrival, task, _uses(ticks, task, *TASK_NAMES)) for arrival, task in arrivals]


def _gradients(ticks: dict[Task, int], sent: dict[Task, int]) -> list[tuple[int, Task, dict[int, int]]]:
    """Returns the output gradients of a stage in the order of their arrival, as `_inputs` does its inputs."""
    backward = sorted((sent[task], task) for task in ticks if task.kind in (BACKWARD, BACKWARD_INPUT))
    return [(arrival, task, _uses(ticks, task, task.kind, BACKWARD_WEIGHT)) for arrival, task in backward]


@functools.cache
def _kinds(bits: int) -> frozenset[int]:
    """Kinds of tasks whose bits are set."""
    return frozenset(kind for kind in TASK_NAMES if bits >> kind & 1)


def _uses(ticks: dict[Task, int], task: Task, *kinds: int) -> dict[int, int]:
    return {kind: ticks[use] for kind in kinds if (use := task._replace(kind=kind)) in ticks}


def _length(ticks: list[dict[Task, int]]) -> int:
    """Returns the number of ticks until every stage has run its tasks."""
    return max(tick for own in ticks for tick in own.values()) + 1


class _Slots:
    """Buffer slots, each taken from one tick to another; the first free one is given."""

    def __init__(self) -> None:
        self._taken_until: list[int] = []

    @property
    def count(self) -> int:
        return len(self._taken_until)

    def take(self, first: int, last: int) -> int:
        for slot, until in enumerate(self._taken_until):
            if until < first:
                self._taken_until[slot] = last
                return slot
        self._taken_until.append(last)
        return len(self._taken_until) - 1
