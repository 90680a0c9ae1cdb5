"""Training programs whose published measurements are priced, as the planner's `Software`.

Their constants are relative to Meshwright's step, which XLA compiles.
"""

import dataclasses
from collections.abc import Mapping

from meshwright.planner.software import MESHWRIGHT, AttentionKernel, Software
from meshwright.planner.traffic import Movement
from meshwright.planner.work import Work
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.schedule_table import TaskCounts
from meshwright.sharding.schedules import bubble_formula


def free_running(
    parts: dict[str, float], tasks: TaskCounts, busy: dict[str, float]
) -> tuple[dict[str, float], float]:
    """Adds the bubble of Megatron's pipeline: a stage waits only for its neighbours (arXiv:2104.04473, 2.2).

    Layers wait for their collectives in the microbatches that fill and drain it too. The first stage holds its warm-up:
    P microbatches, or with V virtual stages (V + 1) P - 1 inputs of one each.
    """
    own = tasks.microbatches * (
        busy["forward"] + busy["recomputation"] + busy["backward"] + busy["exposed"]
    )
    live = (
        tasks.stages if tasks.virtual_stages == 1 else (tasks.virtual_stages + 1) * tasks.stages - 1
    )
    live = min(live, tasks.microbatches * tasks.virtual_stages)
    return {
        **parts,
        "bubble": own
        * bubble_formula(tasks.name, tasks.stages, tasks.microbatches, tasks.virtual_stages),
    }, float(live)


def gathered_ring(
    placed: PlacedRun, work: Work, layers: float, compute: int, again: frozenset[str]
) -> list[Movement]:
    """Returns what the ring attention of PyTorch sends, which torchtitan gives keys of all heads of queries.

    torch/distributed/tensor/experimental/_attention.py (pytorch/torchtitan issue 1283): one all-gather of keys and
    values for each pass, and their gradients around the ring in float32, as often as it has devices. That nothing of
    it is beside attention is an assumption.
    """
    axes, n = ("context",), placed.layout.shape.context
    block = 2 * work.tokens * work.widths.query
    passes = ["forward", "backward", *(["recomputation"] if "attention" in again else [])]
    result = [
        Movement("all-gather", axes, block * compute * n, layers, name, True, "keys and values")
        for name in passes
    ]
    gradients = Movement(
        "collective-permute",
        axes,
        block * 4,
        n * layers,
        "backward",
        True,
        "gradients of keys and values",
    )
    return [*result, gradients]


RAMP = 600
"""Keys at which a causal kernel reaches half of its rate, forward and backward. NVIDIA/cudnn-frontend, benchmark/
(816ea45, d48a60e, 60e572b), 2,048 to 8,192 keys over 16,384 and more: FlashAttention-2 600 to 720 (GB200), cuDNN 80 to
620 (H200) and 250 to 940 (GB200, GB300)."""
RATED_KEYS = 4096
"""Keys at which a kernel has the rate of its chip, as in most of the fitted rows."""
SPEEDS = {("h100", "flash2"): 0.58, ("a100", "triton"): 0.56, ("h100", "triton"): 0.36}
"""Rate of an older kernel over that of the chip's own, by family of chips."""


@dataclasses.dataclass(frozen=True)
class FusedKernel(AttentionKernel):
    """Attention kernel that keeps its scores on the chip: of the chip, or an older one with a name in SPEEDS."""

    name: str = ""

    def at(
        self, keys: float, family: str, speeds: Mapping[tuple[str, str], float] = SPEEDS
    ) -> "FusedKernel":
        """Returns the kernel with its speed on a family of chips where a call has `keys` keys."""
        ramp = (1 + RAMP / RATED_KEYS) / (1 + RAMP / keys)
        return dataclasses.replace(self, speed=ramp * speeds.get((family, self.name), 1.0))


CHIPS_OWN = FusedKernel()
"""The kernel that was written for the chip: cuDNN, FlashAttention-3."""
FLASH2 = FusedKernel(name="flash2")
"""FlashAttention-2 (arXiv:2307.08691), which has the instructions of Ampere."""
TRITON = FusedKernel(name="triton")
"""The port of the first FlashAttention (arXiv:2205.14135) to Triton."""
# Scores, probabilities and dropout of all keys, the hidden half included, are each written and read in 16 bits.
UNFUSED = AttentionKernel(
    2.0, "matmul", {"forward": 24, "recomputation": 24, "backward": 40}, 5, True
)
"""Two matrix products and a softmax kernel between them."""
# The dot of the logits is in bfloat16 (MaxText, layers/decoders.py: `logits_dot_in_fp32` is false).
_XLA = Software("MaxText", free_running, CHIPS_OWN, elementwise=1.1, overlap=0.35, logit_bytes=2)
# Releases of NeMo up to 26.04 sort and quantise the rows of experts in kernels of their own.
_MEGATRON = Software(
    "Megatron-Core",
    free_running,
    CHIPS_OWN,
    launch=1e-5,
    elementwise=1.48,
    tensor_overlap=1.12,
    sends_beside=True,
    transformer_engine=True,
    sorting=3.3,
)
_MEGATRON_LM = Software(
    "Megatron-LM", free_running, UNFUSED, launch=1e-5, elementwise=1.84, tensor_overlap=0.0
)
# Rounded output of `bench/foresight/fit.py`, but for the zeros: those programs cut no collective into pieces.
SOFTWARE = {
    software.name: software
    for software in (
        MESHWRIGHT,
        _XLA,
        dataclasses.replace(_XLA, name="PAX", elementwise=3.1),
        _MEGATRON,
        dataclasses.replace(_MEGATRON, name="Megatron-Core 2026.06", sorting=0.5),
        _MEGATRON_LM,
        dataclasses.replace(_MEGATRON_LM, name="vTrain", launch=4e-5),
        Software(
            "torchtitan",
            free_running,
            FLASH2,
            launch=1e-5,
            elementwise=3.2,
            tensor_overlap=0.1,
            context=gathered_ring,
        ),
        # Composer's loss (flash-attn, csrc/xentropy) reads logits in bfloat16, and writes their gradient so.
        Software(
            "PyTorch",
            free_running,
            TRITON,
            launch=1e-5,
            elementwise=2.84,
            overlap=0.54,
            tensor_overlap=0.0,
            logit_bytes=2,
        ),
        Software("Meta", free_running, CHIPS_OWN, launch=1e-5, tensor_overlap=0.0),
    )
}
"""Programs by name."""
