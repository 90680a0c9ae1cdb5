"""Pipeline schedules as tables: which tasks each stage runs in each tick (`step/pipeline.py` executes them).

A task is the forward pass, the backward pass, or half the backward pass of one part of the model for one microbatch. In
a tick a stage runs a forward and a backward pass at most, each of a microbatch and a part of its own. What it computes
in a tick, its neighbour can use in the next. A schedule gives the order of tasks on each stage; the table runs every
task as early as its inputs allow.

- `gpipe`: all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965).
- `1f1b`: one forward, one backward (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1). Stage s runs microbatch m
  forward in tick m + s and backward in tick m + 2P - 1 - s, so at most 2P microbatches are live.
- `interleaved`: 1F1B over several virtual stages per stage, with a smaller bubble (section 2.2.2 of the same paper).
- `zbv`: the V-shaped placement of ZB-V and DualPipeV (Qi et al. 2024, arXiv:2405.15362), with whole backward passes.
- `zero_bubble`: the backward pass is split into the gradient of the input (B), which the previous stage waits for, and
  the gradient of the weights (W), which needs no neighbour (ZB-H1: Qi et al. 2023, arXiv:2401.10241, section 2.3).
- `circular`: all microbatches go around the ring of stages once per virtual stage, then back (breadth-first:
  Lamy-Poirier 2022, arXiv:2211.05953; the circular pipeline of praxis and MaxText).

A schedule from outside the package is a `PipelineSchedule`, named as `module:attribute` in a Run.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshwright import plugins
from meshwright.errors import ConfigError
from meshwright.sharding.stages import PartPlacement, loop_placement, map_parts, v_placement

if TYPE_CHECKING:
    from meshwright.sharding.schedule_table import ScheduleTable, Task, TaskCounts


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """Pipeline schedule: the order of tasks on each stage, and the stage of each part of the model."""

    order: "Callable[[int, int, int], Sequence[Sequence[Task]]]"
    """`(stages, microbatches, virtual_stages) -> tasks of each stage, in order`. Every part of the model runs FORWARD
    once per microbatch, and then either BACKWARD, or BACKWARD_INPUT and later BACKWARD_WEIGHT. FORWARD, a backward pass
    and BACKWARD_WEIGHT that follow each other in this order share a tick, unless NEXT_TICK is between them."""
    virtual_stages: int | None = 1
    """Virtual stages per stage that the order needs; None takes `training.virtual_stages`."""
    placement: PartPlacement = loop_placement
    """Stage of each part: `loop_placement`, `v_placement`, or a function `(part, stages) -> stage` of your own."""
    bubble: Callable[[int, int, int, float], float] | None = None
    """Bubble `(stages, microbatches, virtual_stages, backward) -> idle over busy time`, `backward` being seconds of a
    backward pass over those of a forward pass; None counts the ticks of the table."""

    def virtual_stages_for(self, asked: int) -> int:
        """Returns the virtual stages per stage of a run whose `training.virtual_stages` is `asked`."""
        return asked if self.virtual_stages is None else self.virtual_stages


def _order(name: str) -> "Callable[[int, int, int], Sequence[Sequence[Task]]]":
    """Returns a function of `schedule_orders`."""

    def order(stages: int, microbatches: int, virtual_stages: int) -> "Sequence[Sequence[Task]]":
        from meshwright.sharding import schedule_orders  # loaded for runs with stages alone

        orders: Sequence[Sequence[Task]] = getattr(schedule_orders, name)(stages, microbatches, virtual_stages)
        return orders

    return order


# Bubbles where all stages meet in every tick: (P - 1)/M for GPipe and 1F1B, (P - 1)/(v M) with v virtual stages
# (arXiv:2104.04473, section 2.2; interleaved needs M in whole groups of P, circular M >= P). With split backward passes
# stages idle P - 1 times in F and B but not in W. On the V the last forward passes cost nothing (M >= 2 P).
SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(_order("gpipe"), bubble=lambda p, m, v, b: (p - 1) / m),
    "1f1b": PipelineSchedule(_order("one_f_one_b"), bubble=lambda p, m, v, b: (p - 1) / m),
    "interleaved": PipelineSchedule(
        _order("interleaved"), virtual_stages=None, bubble=lambda p, m, v, b: (p - 1) / (v * m)
    ),
    "zbv": PipelineSchedule(
        _order("zbv"),
        virtual_stages=2,
        placement=v_placement,
        bubble=lambda p, m, v, b: (p - 1) / m * (b + 0.5) / (b + 1),
    ),
    "zero_bubble": PipelineSchedule(
        _order("zero_bubble"), bubble=lambda p, m, v, b: (p - 1) / m * (b / 2 + 1) / (b + 1)
    ),
    "circular": PipelineSchedule(_order("circular"), virtual_stages=None, bubble=lambda p, m, v, b: (p - 1) / (v * m)),
}


def find_schedule(name: str) -> PipelineSchedule:
    """Returns the schedule called `name`: a row of SCHEDULES, or a `PipelineSchedule` named as `module:attribute`.

    Raises ConfigError with the nearest name, or where the attribute is something else.
    """
    schedule = plugins.resolve("pipeline schedule", name, SCHEDULES)
    if not isinstance(schedule, PipelineSchedule):
        raise ConfigError(
            f"pipeline schedule {name!r}", f"it is a {type(schedule).__name__}", "a meshwright PipelineSchedule"
        )
    return schedule


def bubble_formula(name: str, stages: int, microbatches: int, virtual_stages: int, backward: float = 2.0) -> float:
    """Returns the bubble of a schedule, idle over busy time: its formula, or that of its table.

    backward: seconds of a backward pass over those of a forward pass.
    """
    bubble = find_schedule(name).bubble
    if bubble is None:
        return build_table(name, stages, microbatches, virtual_stages).bubble(backward)
    return bubble(stages, microbatches, virtual_stages, backward)


@functools.cache
def build_table(name: str, stages: int, microbatches: int, virtual_stages: int) -> "ScheduleTable":
    """Builds the table of the schedule `name`.

    virtual_stages: parts of the model on each stage, as `PipelineSchedule.virtual_stages_for` gives them. Raises
    ConfigError where the schedule's order is incomplete or its stages wait for each other.
    """
    from meshwright.sharding.schedule_builder import tabulate

    schedule = find_schedule(name)
    parts = map_parts(stages, virtual_stages, schedule.placement)
    table = tabulate(name, parts, microbatches, schedule.order(stages, microbatches, virtual_stages))
    if not table.trains:
        raise ConfigError(f"pipeline schedule {name!r}", "it has no backward pass", "backward tasks for training")
    return table


@functools.cache
def build_counts(name: str, stages: int, microbatches: int, virtual_stages: int) -> "TaskCounts":
    """Counts the tasks of the schedule `name`, as `build_table` would tabulate them, without buffer slots."""
    from meshwright.sharding.schedule_builder import count_tasks

    schedule = find_schedule(name)
    parts = map_parts(stages, virtual_stages, schedule.placement)
    return count_tasks(name, parts, microbatches, schedule.order(stages, microbatches, virtual_stages))


@functools.cache
def build_forward_table(name: str, stages: int, microbatches: int, virtual_stages: int) -> "ScheduleTable":
    """Builds a table of forward passes alone (evaluation, sampling), with parts where the schedule `name` puts them."""
    from meshwright.sharding.schedule_builder import tabulate
    from meshwright.sharding.schedule_orders import forward_only

    parts = map_parts(stages, virtual_stages, find_schedule(name).placement)
    return tabulate("forward", parts, microbatches, forward_only(parts, microbatches))
