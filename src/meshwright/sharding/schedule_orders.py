"""Orders of tasks of the built-in pipeline schedules: `(stages, microbatches, virtual_stages) -> tasks of each stage`.

`schedules.py` describes them and loads this file for runs with stages alone.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from meshwright.sharding.schedule_builder import can_run
from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NEXT_TICK,
    PLACE,
    Task,
    dependency,
)
from meshwright.sharding.stages import PartMap, map_parts, v_placement

Counts = Counter[tuple[int, int]]
"""Microbatches that a stage has run, by kind of task and virtual stage."""


def gpipe(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns all forward passes, then all backward passes."""
    forward, backward = ([Task(kind, 0, m) for m in range(microbatches)] for kind in (FORWARD, BACKWARD))
    return [[*forward, NEXT_TICK, *backward]] * stages


def one_f_one_b(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns one forward and one backward pass in turn, after as many forward passes as a backward pass is behind."""
    return [_alternating(stages, microbatches, 1, 2 * (stages - s) - 1) for s in range(stages)]


def interleaved(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns 1F1B over virtual stages, in groups of P microbatches."""
    parts = map_parts(stages, virtual_stages)
    # A last group of fewer microbatches than stages comes around before its first microbatch can go on, so it needs a
    # longer warm-up; some sizes need more than the group lacks, or the stages would wait for each other.
    for extra in itertools.count(-microbatches % stages * (virtual_stages - 1), stages):
        warmup = [2 * (stages - s) - 1 + (virtual_stages - 1) * stages + extra for s in range(stages)]
        orders = [_alternating(stages, microbatches, virtual_stages, ahead) for ahead in warmup]
        if can_run(parts, microbatches, orders):
            return orders
    raise AssertionError("a warm-up of all forward passes can always run")


def _alternating(stages: int, microbatches: int, virtual_stages: int, ahead: int) -> list[Task]:
    """Returns `ahead` forward passes (warm-up), then forward and backward in turn, then the rest (cool-down)."""
    forward = list(_in_groups(stages, microbatches, virtual_stages, FORWARD))
    backward = list(_in_groups(stages, microbatches, virtual_stages, BACKWARD))
    steady = itertools.zip_longest(forward[ahead:], backward)
    return forward[:ahead] + [task for pair in steady for task in pair if task is not None]


def _in_groups(stages: int, microbatches: int, virtual_stages: int, kind: int) -> Iterator[Task]:
    """Yields tasks in groups of P microbatches, which pass one virtual stage before they go on to the next."""
    for first in range(0, microbatches, stages):
        for v in range(virtual_stages):
            for m in range(first, min(first + stages, microbatches)):
                yield Task(kind, v if kind == FORWARD else virtual_stages - 1 - v, m)


def circular(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns all microbatches through one virtual stage after another, then back."""
    forward = [Task(FORWARD, v, m) for v in range(virtual_stages) for m in range(microbatches)]
    backward = [Task(BACKWARD, v, m) for v in reversed(range(virtual_stages)) for m in range(microbatches)]
    return [[*forward, NEXT_TICK, *backward]] * stages


def zero_bubble(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns ZB-H1: 1F1B whose weight gradients run in the same tick on all stages, when stage 0 can run them."""

    def order(stage: int) -> list[Task]:
        # A tick with a weight gradient on any stage takes as long as one with a weight gradient on all.
        starts = {FORWARD: stage, BACKWARD_INPUT: 2 * stages - 1 - stage, BACKWARD_WEIGHT: 2 * stages - 1}
        ticks = {
            Task(kind, 0, m): (m + start, PLACE[kind]) for kind, start in starts.items() for m in range(microbatches)
        }
        return sorted(ticks, key=ticks.__getitem__)

    return [order(stage) for stage in range(stages)]


def zbv(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns 1F1B on a V by greedy choice, the second part of a stage before its first part.

    A stage holds at most 2P + 1 inputs. When the bottom of the V has run its forward passes, the last ones climb to
    stage 0 beside backward passes of other stages. A stage that ran both would make that tick longer: running only the
    forward pass saves P - 1 forward passes of a part.
    """

    def choices(stage: int, counts: Sequence[Counts]) -> list[list[tuple[int, int]]]:
        live = sum(counts[stage][FORWARD, v] - counts[stage][BACKWARD, v] for v in (0, 1))
        forward = [(FORWARD, 1)] + ([(FORWARD, 0)] if live <= 2 * stages else [])
        backward = [(BACKWARD, 1), (BACKWARD, 0)]
        climbing = counts[-1][FORWARD, 1] == microbatches
        return [forward + backward] if climbing else [forward, backward]

    return _greedy(map_parts(stages, 2, v_placement), microbatches, 2, choices)


def forward_only(parts: PartMap, microbatches: int) -> list[list[Task]]:
    """Returns forward passes by greedy choice: in each tick a stage runs its last virtual stage that has an input."""
    choice = [(FORWARD, v) for v in reversed(range(parts.virtual_stages))]
    return _greedy(parts, microbatches, 1, lambda stage, counts: [choice])


def _greedy(
    parts: PartMap, microbatches: int, passes: int,
    choices: Callable[[int, Sequence[Counts]], Sequence[Sequence[tuple[int, int]]]],
) -> list[list[Task]]:  # fmt: skip
    """Returns orders in which a stage runs, in each tick, the first task that it can of each list of choices.

    passes: tasks of a part and microbatch.  choices: `(stage, counts of all stages) -> lists of (kind, virtual stage)`.
    """
    done, tick = dict[tuple[int, Task], int](), 0
    orders: list[list[Task]] = [[] for _ in range(parts.stages)]
    counts = [Counts() for _ in range(parts.stages)]

    def ready(stage: int, task: Task) -> bool:
        needed = dependency(parts, stage, task)
        return task.microbatch < microbatches and (needed is None or done.get(needed, tick) < tick)

    while min(sum(own.values()) for own in counts) < passes * microbatches * parts.virtual_stages:
        chosen: list[tuple[int, Task]] = []
        for stage, own in enumerate(counts):
            for wanted in choices(stage, counts):
                tasks = (Task(kind, v, own[kind, v]) for kind, v in wanted)
                chosen += [(stage, task) for task in tasks if ready(stage, task)][:1]
        for stage, task in chosen:
            done[stage, task] = tick
            orders[stage].append(task)
            counts[stage][task.kind, task.virtual_stage] += 1
        for order in orders:
            order.append(NEXT_TICK)
        tick += 1
    return orders
