"""Training software whose steps are priced: how much of a chip (hardware/chips.py) a program uses.

Programs of others, for published measurements, are in bench/foresight/other_programs.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    TaskCounts,
    lockstep_seconds,
)

PipelineTime = Callable[
    [dict[str, float], TaskCounts, dict[str, float]], tuple[dict[str, float], float]
]
"""`(seconds of a step by part, task counts, seconds of one microbatch by pass) -> (seconds by part, with the bubble;
most inputs of virtual stages that a stage holds)`.

The pass `stage` is the forward pass that a backward task repeats from its saved input; 0 where it repeats none.
`exposed` is what the layers of a microbatch wait for: collectives over `tensor`, `context` and `expert`."""


def lockstep(
    parts: dict[str, float], tasks: TaskCounts, busy: dict[str, float]
) -> tuple[dict[str, float], float]:
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
    parts = {**parts, "recomputation": max(0.0, recomputed), "bubble": max(0.0, ticks - own)}
    return parts, float(tasks.most_live_inputs)


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """Attention kernel of another program on GPUs; on TPUs all have splash."""

    backward: float = 2.5
    """Matrix products of the backward pass over those of the forward pass."""
    rate: Literal["attention", "matmul"] = "attention"
    """Fraction of peak that it reaches: a field of `Efficiency`."""
    score_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """HBM bytes that it moves per visible score, by pass; none where scores stay on the chip."""
    kernels: int = 1
    """Kernels of a forward pass."""
    keeps_scores: bool = False
    """Whether its backward pass reads the scores of the forward pass, which some remat policies compute again."""
    speed: float = 1.0
    """Its rate over `rate`."""


@dataclasses.dataclass(frozen=True)
class Software:
    """How much of a chip a training program uses."""

    name: str
    pipeline_time: PipelineTime
    """Seconds of a step with pipeline stages."""
    kernel: AttentionKernel | None = None
    """Attention on GPUs; None takes that which a run of this package chooses."""
    launch: float = 4e-6
    """Seconds between two kernels that a GPU's host can launch: 3.8 us in a row of short ones (NVIDIA, "Getting Started
    with CUDA Graphs"); about 10 us where an interpreter dispatches each (an assumption). 0 on TPUs."""
    elementwise: float = 1.0
    """HBM traffic of norms, activation functions, residuals and quantisation on GPUs, relative to what RESIDUAL_COPIES
    and HIDDEN_COPIES of the planner count; on TPUs, where one compiler writes all programs, it is 1."""
    sorting: float = 1.0
    """HBM traffic of the rows of experts, relative to what SORTING_COPIES of the planner count."""
    overlap: float = 1.0
    """Overlapped communication on GPUs over what the chip can overlap (`Efficiency.overlap`)."""
    tensor_overlap: float = 1.0
    """The same over `tensor` (`Efficiency.tensor_overlap`): 0 where no collective is cut into pieces."""
    splits_sequence: bool = True
    """Whether `tensor` splits the residual stream too (sequence parallelism)."""
    copies: bool = False
    """Whether layers are rows of stacks: weights are copied out of them, gradients and what a pipeline stage keeps of
    a microbatch into them. Programs without stacks hold pointers, add gradients in place, gather weights again, and
    keep the outputs of norms as sequence parallelism splits them."""
    logit_bytes: int = 4
    """Bytes of a logit, and of its gradient while it is computed."""
    recomputes_logits: bool = False
    """Whether the backward pass computes the logits again."""
    vocab_over_stages: bool = False
    """Whether embedding and loss are split over all pipeline stages; else the first and the last stage have them."""
    sums_gradients_last: bool = False
    """Whether replicas sum the gradients of several microbatches or of a pipeline after the last backward pass, with
    nothing beside."""
    sends_beside: bool = False
    """Whether a ring's keys and an interleaved pipeline's activations and rows of experts travel beside computation."""
    rows_by: Literal["expert", "node", "device"] = "expert"
    """What a token is sent to once: each of its experts, or over the network each node with some, or each device."""
    beside: float = 0.0
    """Fraction of a pass' computation that has transfers beside, gathers and rows in pieces of the batch alike, in
    programs that are scheduled by predicted times (`Settled.scheduled_by_price`); 0 where none is."""
    exchange_overlap: float = 0.0
    """Most of the transfers of such a program that overlap where rows of experts are among them."""
    context: Callable[..., list[Any]] | None = None
    """Collectives of context parallelism, with the arguments of the planner's own, which None takes."""
    transformer_engine: bool = False
    """Whether experts have low precision too, and one kernel quantises an input for all products, which is kept so."""


# In blocked attention XLA writes and reads scores, probabilities, and of each pair of blocks queries, keys and sums
# (models/kernels/blocked.py). Counted in one program for GPUs, Gemma 3 12B on 16 A100, and divided by
# `MESHWRIGHT.elementwise`.
SCORE_BYTES = {"forward": (24, 33), "recomputation": (24, 33), "backward": (26, 72)}
SCORE_BYTES_OF_TPU = {"forward": (14, 0), "recomputation": (14, 0), "backward": (32, 0)}
"""HBM bytes per score and per element of a block of queries, by pass, where a run of this package has no fused kernel
(`Kernels.fused`)."""
MESHWRIGHT = Software(
    "Meshwright",
    lockstep,
    elementwise=1.1,
    overlap=0.35,
    copies=True,
    recomputes_logits=True,
    vocab_over_stages=True,
    sums_gradients_last=True,
    rows_by="node",
    exchange_overlap=0.4,  # 32 to 46 % in five whole programs, compiled (docs/log.md)
    beside=0.5,  # three whole programs with more to send than to compute, compiled: 0.51 to 0.58 (docs/log.md)
)
"""This package's own step."""
