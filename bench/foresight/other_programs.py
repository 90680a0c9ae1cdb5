"""Training programs whose published measurements are priced, as the planner's `Software`.

Their constants are relative to Meshwright's step, which XLA compiles.
"""

import dataclasses

from meshwright.planner.software import MESHWRIGHT, AttentionKernel, Software
from meshwright.sharding.schedule_table import TaskCounts
from meshwright.sharding.schedules import bubble_formula


def free_running(parts: dict[str, float], tasks: TaskCounts, busy: dict[str, float]) -> tuple[dict[str, float], float]:
    """Adds the bubble of Megatron's pipeline: a stage waits only for its neighbours (arXiv:2104.04473, 2.2).

    The first stage holds its warm-up: P microbatches, or with V virtual stages (V + 1) P - 1 inputs of one each.
    """
    own = tasks.microbatches * (busy["forward"] + busy["recomputation"] + busy["backward"])
    live = tasks.stages if tasks.virtual_stages == 1 else (tasks.virtual_stages + 1) * tasks.stages - 1
    live = min(live, tasks.microbatches * tasks.virtual_stages)
    return {
        **parts,
        "bubble": own * bubble_formula(tasks.name, tasks.stages, tasks.microbatches, tasks.virtual_stages),
    }, float(live)


FLASH2 = AttentionKernel(rate="flash2")
"""FlashAttention-2 (arXiv:2307.08691), which has the instructions of Ampere."""
TRITON = AttentionKernel(rate="triton")
"""The port of the first FlashAttention (arXiv:2205.14135) to Triton."""
# Scores, probabilities and dropout of all keys, the hidden half included, are each written and read in 16 bits.
UNFUSED = AttentionKernel(2.0, "matmul", {"forward": 24, "recomputation": 24, "backward": 40}, 5, True)
"""Two matrix products and a softmax kernel between them."""
_XLA = Software("MaxText", free_running, elementwise=1.1, overlap=0.35)
# Releases of NeMo up to 26.04 sort and quantise the rows of experts in kernels of their own.
_MEGATRON = Software(
    "Megatron-Core",
    free_running,
    launch=1e-5,
    tensor_overlap=1.3,
    overlaps_experts=True,
    experts_in_low_precision=True,
    sorting=3,
)
_MEGATRON_LM = Software("Megatron-LM", free_running, UNFUSED, launch=1e-5, elementwise=1.84, tensor_overlap=0.0)
# Rounded output of `bench/foresight/fit.py`, but for the zeros: those programs cut no collective into pieces.
SOFTWARE = {
    software.name: software
    for software in (
        MESHWRIGHT,
        _XLA,
        dataclasses.replace(_XLA, name="PAX", elementwise=3.1),
        _MEGATRON,
        dataclasses.replace(_MEGATRON, name="Megatron-Core 2026.06", sorting=0.4),
        _MEGATRON_LM,
        dataclasses.replace(_MEGATRON_LM, name="vTrain", launch=4e-5),
        Software("torchtitan", free_running, FLASH2, launch=1e-5, elementwise=2.84, tensor_overlap=0.1),
        Software("PyTorch", free_running, TRITON, launch=1e-5, elementwise=2.84, overlap=0.3, tensor_overlap=0.0),
        Software("Meta", free_running, launch=1e-5, tensor_overlap=0.0),
    )
}
"""Programs by name."""
