"""Pipeline time and attention traffic of a training engine: Meshwright's own, and Megatron's for published rows."""

import dataclasses
from collections.abc import Callable, Mapping

from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    TaskCounts,
    lockstep_seconds,
)
from meshwright.sharding.schedules import bubble_formula

PipelineTime = Callable[[dict[str, float], TaskCounts, dict[str, float]], dict[str, float]]
"""`(seconds of a step by part, task counts, seconds of one microbatch by pass) -> seconds by part, with the bubble`.

The pass `stage` is the forward pass that a backward task repeats from its saved input; 0 where it repeats none."""


def lockstep(parts: dict[str, float], tasks: TaskCounts, busy: dict[str, float]) -> dict[str, float]:
    """Adds the bubble of Meshwright's pipeline: all stages finish a tick together (step/pipeline.py).

    A tick lasts as long as the tasks of its busiest stage.
    """
    virtual_stages = tasks.virtual_stages
    forward, backward = busy["forward"], busy["backward"]
    # A backward task recomputes what its stage and the remat policy did not save. Weight gradients need the gradients
    # of all activations, which they compute again.
    recomputation = busy["stage"] + busy["recomputation"]
    task_seconds = {
        FORWARD: forward / virtual_stages,
        BACKWARD: (recomputation + backward) / virtual_stages,
        BACKWARD_INPUT: (recomputation + backward / 2) / virtual_stages,
        BACKWARD_WEIGHT: (recomputation + backward) / virtual_stages,
    }
    ticks = lockstep_seconds(tasks.concurrent_tasks, task_seconds)
    own = sum(count * task_seconds[kind] for kind, count in tasks.task_counts.items())
    recomputed = own - tasks.microbatches * (forward + backward)
    return {**parts, "recomputation": max(0.0, recomputed), "bubble": max(0.0, ticks - own)}


def free_running(parts: dict[str, float], tasks: TaskCounts, busy: dict[str, float]) -> dict[str, float]:
    """Adds the bubble of Megatron's pipeline: a stage waits only for its neighbours (arXiv:2104.04473, 2.2)."""
    own = tasks.microbatches * (busy["forward"] + busy["recomputation"] + busy["backward"])
    return {**parts, "bubble": own * bubble_formula(tasks.name, tasks.stages, tasks.microbatches, tasks.virtual_stages)}


@dataclasses.dataclass(frozen=True)
class Engine:
    """Training engine whose step is priced."""

    pipeline_time: PipelineTime
    """Seconds of a step with pipeline stages."""
    score_bytes: Mapping[str, int]
    """HBM bytes that attention moves per score, by pass, where no fused kernel runs (`Kernels.fused`)."""
    copies_kept: bool = True
    """Whether a pipeline stage copies what it keeps of a microbatch into a buffer, and out of it."""


# In blocked attention XLA writes and reads the scores: float32, and probabilities in the compute dtype
# (models/kernels/blocked.py).
MESHWRIGHT = Engine(lockstep, {"forward": 14, "recomputation": 14, "backward": 32})
"""This package's own step."""
MEGATRON = Engine(free_running, {}, copies_kept=False)
"""Megatron's pipeline with fused attention everywhere, as in the trainers whose measurements are published."""
