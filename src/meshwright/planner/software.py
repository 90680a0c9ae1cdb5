"""Training software whose steps are priced: Meshwright's own, and that of others for published measurements.

What a chip can do is in hardware/chips.py; a `Software` states how much of that a program uses. Its constants are
relative to Meshwright's step, which XLA compiles.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

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
class AttentionKernel:
    """Attention kernel of another program on GPUs; on TPUs all have splash."""

    backward: float = 2.5
    """Matrix products of the backward pass over those of the forward pass."""
    rate: Literal["attention", "flash2", "triton", "matmul"] = "attention"
    """Fraction of peak that it reaches: a field of `Efficiency`; `flash2` and `triton` are relative to `attention`."""
    score_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """HBM bytes that it moves per visible score, by pass; none where scores stay on the chip."""
    keeps_scores: bool = False
    """Whether its backward pass reads the scores of the forward pass, which some remat policies compute again."""


CHIPS_OWN = AttentionKernel()
"""The kernel that was written for the chip: cuDNN, FlashAttention-3."""
FLASH2 = AttentionKernel(rate="flash2")
"""FlashAttention-2 (arXiv:2307.08691), which has the instructions of Ampere."""
TRITON = AttentionKernel(rate="triton")
"""The port of the first FlashAttention (arXiv:2205.14135) to Triton."""
# Scores, probabilities and dropout of all keys, the hidden half included, are each written and read in 16 bits.
UNFUSED = AttentionKernel(2.0, "matmul", {"forward": 24, "recomputation": 24, "backward": 40}, keeps_scores=True)
"""Two matrix products and a softmax kernel between them."""


@dataclasses.dataclass(frozen=True)
class Software:
    """How much of a chip a training program uses."""

    name: str
    kernel: AttentionKernel | None = CHIPS_OWN
    """Attention on GPUs; None takes that which a run of this package chooses."""
    pipeline_time: PipelineTime = free_running
    """Seconds of a step with pipeline stages."""
    elementwise: float = 1.0
    """HBM traffic of norms, activation functions, residuals and quantisation on GPUs, relative to what RESIDUAL_COPIES
    and HIDDEN_COPIES of the planner count; on TPUs, where one compiler writes all programs, it is 1."""
    overlap: float = 1.0
    """Overlapped communication on GPUs over what the chip can overlap (`Efficiency.overlap`)."""
    tensor_overlap: float = 1.0
    """The same over `tensor` (`Efficiency.tensor_overlap`): 0 where no collective is cut into pieces."""
    copies: bool = False
    """Whether layers are rows of stacks: weights are copied out of them, gradients and what a pipeline stage keeps of
    a microbatch into them. Programs without stacks hold pointers."""
    vocab_over_stages: bool = False
    """Whether embedding and loss are split over all pipeline stages; else the first and the last stage have them."""
    sums_gradients_last: bool = False
    """Whether replicas sum the gradients of several microbatches or of a pipeline after the last backward pass, with
    nothing beside."""
    overlaps_experts: bool = False
    """Whether interleaved pipelines send tokens to experts beside another microbatch's computation."""
    experts_in_low_precision: bool = False
    """Whether the matmuls of experts run in the run's low precision too."""


# In blocked attention XLA writes and reads the scores: float32, and probabilities in the compute dtype
# (models/kernels/blocked.py).
SCORE_BYTES = {"forward": 14, "recomputation": 14, "backward": 32}
"""HBM bytes per score, by pass, where a run of this package has no fused kernel (`Kernels.fused`)."""
_XLA = Software("MaxText", elementwise=1.1, overlap=0.35)
MESHWRIGHT = dataclasses.replace(
    _XLA,
    name="Meshwright",
    kernel=None,
    pipeline_time=lockstep,
    copies=True,
    vocab_over_stages=True,
    sums_gradients_last=True,
)
"""This package's own step."""
# Rounded output of `bench/foresight/fit.py`, but for the zeros: those programs cut no collective into pieces.
SOFTWARE = {
    software.name: software
    for software in (
        MESHWRIGHT,
        _XLA,
        dataclasses.replace(_XLA, name="PAX", elementwise=3.1),
        Software("Megatron-Core", tensor_overlap=1.3, overlaps_experts=True, experts_in_low_precision=True),
        Software("Megatron-LM", UNFUSED, elementwise=1.5, tensor_overlap=0.0),
        Software("torchtitan", FLASH2, elementwise=2.4, tensor_overlap=0.1),
        Software("PyTorch", TRITON, elementwise=2.8, overlap=0.3, tensor_overlap=0.0),
        Software("Meta", tensor_overlap=0.0),
    )
}
"""Programs by name; those of others price the published measurements of bench/foresight."""
