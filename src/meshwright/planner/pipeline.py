"""Time that a pipeline's stages wait for each other."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    TaskCounts,
    lockstep_seconds,
)


@dataclasses.dataclass(frozen=True)
class MicrobatchSeconds:
    """Seconds of one microbatch on the stage with the most work."""

    forward: float
    recomputation: float
    backward: float
    repeated: float
    """The forward pass that a backward task repeats from its saved input;
    0 where the stage keeps its activations."""
    exposed: float
    """What its layers wait for: collectives over `tensor`, `context` and `expert`."""


class PipelineSeconds(NamedTuple):
    """Waits and recomputation of a pipeline, and the inputs that it holds."""

    bubble: float
    """Seconds of a step that a stage waits."""
    recomputation: float
    """Seconds of a step that it recomputes."""
    live_inputs: float
    """Most inputs of virtual stages that a stage holds."""


PipelineTime = Callable[[TaskCounts, MicrobatchSeconds], PipelineSeconds]
"""How the stages of a pipeline wait for each other."""


def lockstep(tasks: TaskCounts, seconds: MicrobatchSeconds) -> PipelineSeconds:
    """Prices this package's pipeline, whose stages all finish a tick together (step/pipeline.py).

    A tick lasts as long as the tasks of its busiest stage. Two stages, F = 1 and B = 3 (3 of
    recomputation and backward):

        tick      0   1      2      3
        stage 0   F   F      B      B       step = 1 + 3 + 3 + 3
        stage 1   .   F B    B ...          bubble = step - own tasks
    """
    virtual_stages = tasks.virtual_stages
    # A backward task recomputes what its stage and the remat policy did not save. Weight gradients
    # need the gradients of all activations, which they compute again.
    recomputation = seconds.repeated + seconds.recomputation
    task_seconds = {
        FORWARD: seconds.forward / virtual_stages,
        BACKWARD: (recomputation + seconds.backward) / virtual_stages,
        BACKWARD_INPUT: (recomputation + seconds.backward / 2) / virtual_stages,
        BACKWARD_WEIGHT: (recomputation + seconds.backward) / virtual_stages,
    }
    ticks = lockstep_seconds(tasks.concurrent_tasks, task_seconds)
    busy = sum(count * task_seconds[kind] for kind, count in tasks.task_counts.items())
    recomputed = busy - tasks.microbatches * (seconds.forward + seconds.backward)
    return PipelineSeconds(
        bubble=max(0.0, ticks - busy),
        recomputation=max(0.0, recomputed),
        live_inputs=float(tasks.most_live_inputs),
    )
