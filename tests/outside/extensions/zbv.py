"""ZB-V, a zero-bubble pipeline schedule (Qi et al. 2024, arXiv:2405.15362), for ticks of one task of each kind."""

from collections import Counter

from meshwright.sharding.layer_cuts import map_parts, v_placement
from meshwright.sharding.schedule_table import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NEXT_TICK,
    Task,
    dependency,
)
from meshwright.sharding.schedules import PipelineSchedule


def zbv_order(stages: int, microbatches: int, virtual_stages: int) -> list[list[Task]]:
    """Returns the tasks of each stage, by greedy choice.

    The model is a V: stage s has part s on the way down and part 2P-1-s on the way up. In each tick a stage runs F, of
    its second part if it can, else of its first part while fewer than 3P inputs are live; B (the gradient of its
    input); and W (the gradient of its weights).
    """
    parts = map_parts(stages, virtual_stages, v_placement)
    counts = [Counter[tuple[int, int]]() for _ in range(stages)]
    orders: list[list[Task]] = [[] for _ in range(stages)]
    done, tick = dict[tuple[int, Task], int](), 0

    def choose(stage: int) -> list[Task]:
        own = counts[stage]
        live = sum(own[FORWARD, v] - own[BACKWARD_WEIGHT, v] for v in (0, 1))
        wanted = {
            FORWARD: [1, 0] if live < 3 * stages else [1],
            BACKWARD_INPUT: [1, 0],
            BACKWARD_WEIGHT: [1, 0],
        }
        tasks = ([Task(kind, v, own[kind, v]) for v in chosen] for kind, chosen in wanted.items())
        return [task for row in tasks for task in [t for t in row if can_run(stage, t)][:1]]

    def can_run(stage: int, task: Task) -> bool:
        needed = dependency(parts, stage, task)
        return task.microbatch < microbatches and (needed is None or done.get(needed, tick) < tick)

    while min(sum(own.values()) for own in counts) < 6 * microbatches:
        for stage, task in [(s, task) for s in range(stages) for task in choose(s)]:
            done[stage, task] = tick
            orders[stage].append(task)
            counts[stage][task.kind, task.virtual_stage] += 1
        for order in orders:
            order.append(NEXT_TICK)
        tick += 1
    return orders


zbv = PipelineSchedule(zbv_order, virtual_stages=2, placement=v_placement)
