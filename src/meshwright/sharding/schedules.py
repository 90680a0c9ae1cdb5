"""Pipeline schedules as tables: the tasks of each stage in each tick.

`step/pipeline.py` executes them.
A schedule gives the order of tasks on each stage (`schedule_table.py` defines task and tick).

- `gpipe`: all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965).
- `1f1b`: one forward, one backward (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1). Stage
  s runs microbatch m
  forward in tick m + s and backward in tick m + 2P - 1 - s, so at most 2P microbatches are live.
- `interleaved`: 1F1B over several virtual stages per stage, with a smaller bubble (section 2.2.2 of
  the same paper).
- `zbv`: the V-shaped placement of ZB-V and DualPipeV (Qi et al. 2024, arXiv:2405.15362), with
  unsplit backward passes.
- `zero_bubble`: the backward pass is split into the gradient of the input (B), which the previous
  stage waits for, and
  the gradient of the weights (W), which needs no neighbour (ZB-H1: Qi et al. 2023,
  arXiv:2401.10241, section 2.3).
- `circular`: all microbatches go around the ring of stages once per virtual stage, then back
  (breadth-first:
  Lamy-Poirier 2022, arXiv:2211.05953; the circular pipeline of praxis and MaxText).

A schedule from outside the package is a `PipelineSchedule`, named as `module:attribute` in a Run.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from meshwright import plugins
from meshwright.errors import ConfigError
from meshwright.sharding.layer_cuts import loop_placement, map_parts, v_placement
from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NEXT_TICK,
    PLACE,
    Orders,
    ScheduleTable,
    Task,
    TaskCounts,
    can_run,
    count_tasks,
    dependency,
    tabulate,
)
from meshwright.sharding.stages import PartMap, PartPlacement


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """Pipeline schedule: the order of tasks on each stage, and the stage of each part."""

    order: Callable[[int, int, int], Orders]
    """`(stages, microbatches, virtual_stages) -> tasks of each stage, in order`. Every part of the
    model runs FORWARD once per microbatch, and then either BACKWARD, or BACKWARD_INPUT and later
    BACKWARD_WEIGHT. FORWARD, a backward pass and BACKWARD_WEIGHT that follow each other in this
    order share a tick, unless NEXT_TICK is between them."""
    virtual_stages: int | None = 1
    """Virtual stages per stage that the order needs; None takes `training.virtual_stages`."""
    placement: PartPlacement = loop_placement
    """Stage of each part: `loop_placement`, `v_placement`, or a function `(part, stages) -> stage`
    of your own."""
    bubble: Callable[[int, int, int, float], float] | None = None
    """Bubble `(stages, microbatches, virtual_stages, backward) -> idle over busy time`, `backward`
    being seconds of a backward pass over those of a forward pass; None counts the ticks of the
    table."""

    def virtual_stages_for(self, asked: int) -> int:
        """Returns the virtual stages per stage. asked: `training.virtual_stages` of the run."""
        return asked if self.virtual_stages is None else self.virtual_stages


_Run = Counter[tuple[int, int]]
"""Microbatches that a stage has run, by kind of task and virtual stage."""


def _one_f_one_b(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns 1F1B: one forward and one backward pass in turn.

    Before them run as many forward passes as a backward pass is behind.
    With several virtual stages (interleaved 1F1B) they go through them in groups of P microbatches.
    """
    parts = map_parts(stages, virtual_stages)
    # A last group of fewer microbatches than stages comes around before its first microbatch can go
    # on, so it needs a longer warm-up; some sizes need more than the group lacks, or the stages
    # would wait for each other.
    for extra in itertools.count(-microbatches % stages * (virtual_stages - 1), stages):
        warmup = [
            2 * (stages - s) - 1 + (virtual_stages - 1) * stages + extra for s in range(stages)
        ]
        orders = [_alternating(stages, microbatches, virtual_stages, ahead) for ahead in warmup]
        if virtual_stages == 1 or can_run(parts, microbatches, orders):
            return orders
    raise AssertionError("a warm-up of all forward passes can always run")


def _alternating(stages: int, microbatches: int, virtual_stages: int, ahead: int) -> list[Task]:
    """Returns a warm-up, steady state and cool-down.

    These are `ahead` forward passes, forward and backward in turn, and the rest.
    """
    forward = list(_in_groups(stages, microbatches, virtual_stages, FORWARD))
    backward = list(_in_groups(stages, microbatches, virtual_stages, BACKWARD))
    steady = itertools.zip_longest(forward[ahead:], backward)
    return forward[:ahead] + [task for pair in steady for task in pair if task is not None]


def _in_groups(stages: int, microbatches: int, virtual_stages: int, kind: int) -> Iterator[Task]:
    """Yields tasks in groups of P microbatches.

    A group passes one virtual stage before it goes on to the next.
    """
    for first in range(0, microbatches, stages):
        for v in range(virtual_stages):
            for m in range(first, min(first + stages, microbatches)):
                yield Task(kind, v if kind == FORWARD else virtual_stages - 1 - v, m)


def _forward_then_back(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns GPipe and circular pipelines.

    All microbatches go through each virtual stage in turn, then back.
    """
    forward = [Task(FORWARD, v, m) for v in range(virtual_stages) for m in range(microbatches)]
    backward = [
        Task(BACKWARD, v, m) for v in reversed(range(virtual_stages)) for m in range(microbatches)
    ]
    return [[*forward, NEXT_TICK, *backward]] * stages


def _zero_bubble(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns ZB-H1: 1F1B whose weight gradients run in the same tick on all stages.

    They begin when stage 0 can run them: a tick with a weight gradient on any stage takes as long
    as one with a weight gradient on all.
    """
    return [_zero_bubble_order(stages, microbatches, stage) for stage in range(stages)]


def _zero_bubble_order(stages: int, microbatches: int, stage: int) -> list[Task]:
    """Returns the tasks of one stage, sorted by their tick and their place in it."""
    starts = {
        FORWARD: stage,
        BACKWARD_INPUT: 2 * stages - 1 - stage,
        BACKWARD_WEIGHT: 2 * stages - 1,
    }
    ticks = {}
    for kind, start in starts.items():
        for m in range(microbatches):
            ticks[Task(kind, 0, m)] = (m + start, PLACE[kind])
    return sorted(ticks, key=ticks.__getitem__)


def _zbv(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns 1F1B on a V by greedy choice, the second part of a stage before its first part.

    A stage holds at most 2P + 1 inputs. When the bottom of the V has run its forward passes, the
    last ones climb to stage 0 during backward passes of other stages. A stage that ran both would
    make that tick longer: running only the forward pass saves P - 1 forward passes of a part.
    """
    return _Greedy(map_parts(stages, 2, v_placement), microbatches).orders(
        2, functools.partial(_zbv_choices, stages, microbatches)
    )


def _zbv_choices(
    stages: int, microbatches: int, stage: int, counts: Sequence[_Run]
) -> list[list[tuple[int, int]]]:
    """Returns what a stage of the V may run in a tick: the first task of each list
    that is ready."""
    live = sum(counts[stage][FORWARD, v] - counts[stage][BACKWARD, v] for v in (0, 1))
    forward = [(FORWARD, 1)]
    if live <= 2 * stages:
        forward.append((FORWARD, 0))
    backward = [(BACKWARD, 1), (BACKWARD, 0)]
    is_climbing = counts[-1][FORWARD, 1] == microbatches
    return [forward + backward] if is_climbing else [forward, backward]


def _forward_only(parts: PartMap, microbatches: int) -> list[list[Task]]:
    """Returns forward passes by greedy choice.

    In each tick a stage runs its last virtual stage that has an input.
    """
    choice = [(FORWARD, v) for v in reversed(range(parts.virtual_stages))]
    return _Greedy(parts, microbatches).orders(1, lambda stage, counts: [choice])


class _Greedy:
    """Greedy choice of tasks: a stage runs the first that is ready of each list of choices.

    A task is ready in a tick if the task that it depends on ran in an earlier tick.
    """

    def __init__(self, parts: PartMap, microbatches: int):
        self.parts = parts
        self.microbatches = microbatches
        self.counts = [_Run() for _ in range(parts.stages)]
        """Tasks that each stage has run, by kind and virtual stage."""
        self._tick = 0
        self._tick_of = dict[tuple[int, Task], int]()
        self._needs = dict[tuple[int, int, int], tuple[int, Task] | None]()

    def orders(
        self,
        passes: int,
        choices: Callable[[int, Sequence[_Run]], Sequence[Sequence[tuple[int, int]]]],
    ) -> list[list[Task]]:
        """Returns the tasks of each stage in order, with a mark after each tick.

        passes: tasks of a part and microbatch.
        choices: `(stage, counts of all stages) -> lists of (kind, virtual stage)`.
        """
        orders: list[list[Task]] = [[] for _ in range(self.parts.stages)]
        tasks_of_stage = passes * self.microbatches * self.parts.virtual_stages
        while min(sum(count.values()) for count in self.counts) < tasks_of_stage:
            chosen: list[tuple[int, Task]] = []
            for stage in range(self.parts.stages):
                for wanted in choices(stage, self.counts):
                    task = self._first_ready(stage, wanted)
                    if task is not None:
                        chosen.append((stage, task))
            for stage, task in chosen:
                self._tick_of[stage, task] = self._tick
                self.counts[stage][task.kind, task.virtual_stage] += 1
                orders[stage].append(task)
            for order in orders:
                order.append(NEXT_TICK)
            self._tick += 1
        return orders

    def _first_ready(self, stage: int, wanted: Sequence[tuple[int, int]]) -> Task | None:
        """Returns the first of these kinds of tasks that the stage can run in this tick."""
        for kind, v in wanted:
            task = Task(kind, v, self.counts[stage][kind, v])
            if self._is_ready(stage, task):
                return task
        return None

    def _is_ready(self, stage: int, task: Task) -> bool:
        if task.microbatch >= self.microbatches:
            return False
        # Dependencies of the first microbatch; the others wait for the same tasks of their own.
        key = (stage, task.kind, task.virtual_stage)
        if key not in self._needs:
            first = Task(task.kind, task.virtual_stage, 0)
            self._needs[key] = dependency(self.parts, stage, first)
        needed = self._needs[key]
        if needed is None:
            return True
        other, (kind, v, _) = needed
        done = self._tick_of.get((other, Task(kind, v, task.microbatch)))
        return done is not None and done < self._tick


# Bubbles where all stages meet in every tick: (P - 1)/M for GPipe and 1F1B, (P - 1)/(v M) with v
# virtual stages (arXiv:2104.04473, section 2.2; interleaved needs M in whole groups of P, circular
# M >= P). With split backward passes stages idle P - 1 times in F and B but not in W. On the V the
# last forward passes cost nothing (M >= 2 P).
SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(_forward_then_back, bubble=lambda p, m, v, b: (p - 1) / m),
    "1f1b": PipelineSchedule(_one_f_one_b, bubble=lambda p, m, v, b: (p - 1) / m),
    "interleaved": PipelineSchedule(
        _one_f_one_b, virtual_stages=None, bubble=lambda p, m, v, b: (p - 1) / (v * m)
    ),
    "zbv": PipelineSchedule(
        _zbv,
        virtual_stages=2,
        placement=v_placement,
        bubble=lambda p, m, v, b: (p - 1) / m * (b + 0.5) / (b + 1),
    ),
    "zero_bubble": PipelineSchedule(
        _zero_bubble, bubble=lambda p, m, v, b: (p - 1) / m * (b / 2 + 1) / (b + 1)
    ),
    "circular": PipelineSchedule(
        _forward_then_back, virtual_stages=None, bubble=lambda p, m, v, b: (p - 1) / (v * m)
    ),
}


def find_schedule(name: str) -> PipelineSchedule:
    """Returns the schedule called `name`.

    It is a row of SCHEDULES, or a `PipelineSchedule` as `module:attribute`.
    Raises ConfigError with the nearest name, or where the attribute is something else.
    """
    schedule = plugins.resolve("pipeline schedule", name, SCHEDULES)
    asked = f"pipeline schedule {name!r}"
    return plugins.expect(schedule, PipelineSchedule, asked, "a meshwright PipelineSchedule")


def bubble_formula(
    name: str, stages: int, microbatches: int, virtual_stages: int, backward: float = 2.0
) -> float:
    """Returns the bubble of a schedule, idle over busy time: its formula, or that of its table.

    backward: seconds of a backward pass over those of a forward pass.
    """
    bubble = find_schedule(name).bubble
    if bubble is None:
        return build_table(name, stages, microbatches, virtual_stages).bubble(backward)
    return bubble(stages, microbatches, virtual_stages, backward)


@functools.cache
def build_table(name: str, stages: int, microbatches: int, virtual_stages: int) -> ScheduleTable:
    """Builds the table of the schedule `name`.

    virtual_stages: parts of the model on each stage, as `PipelineSchedule.virtual_stages_for` gives
    them. Raises ConfigError where the schedule's order is incomplete or its stages wait for each
    other.
    """
    table = tabulate(*_ordered(name, stages, microbatches, virtual_stages))
    if table.task_counts[FORWARD] == sum(table.task_counts.values()):
        raise ConfigError(
            f"pipeline schedule {name!r}", "it has no backward pass", "backward tasks for training"
        )
    return table


@functools.cache
def build_counts(name: str, stages: int, microbatches: int, virtual_stages: int) -> TaskCounts:
    """Counts the tasks of the schedule `name`, without buffer slots.

    `build_table` tabulates the same tasks.
    """
    return count_tasks(*_ordered(name, stages, microbatches, virtual_stages))


def _ordered(
    name: str, stages: int, microbatches: int, virtual_stages: int
) -> tuple[str, PartMap, int, Orders]:
    schedule = find_schedule(name)
    orders = schedule.order(stages, microbatches, virtual_stages)
    return name, map_parts(stages, virtual_stages, schedule.placement), microbatches, orders


@functools.cache
def build_forward_table(
    name: str, stages: int, microbatches: int, virtual_stages: int
) -> ScheduleTable:
    """Builds a table of only forward passes, for evaluation and sampling.

    Parts are where the schedule `name` puts them.
    """
    parts = map_parts(stages, virtual_stages, find_schedule(name).placement)
    return tabulate("forward", parts, microbatches, _forward_only(parts, microbatches))
