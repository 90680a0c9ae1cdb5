"""Training programs whose published measurements are priced.

The planner prices this package's step. `Software` says what another program does otherwise, and `estimate_program` prices
its step with the planner's own parts, of which the classes here replace what differs. Constants are relative to those
of this package's step, which XLA compiles (planner/physics.py).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax.numpy as jnp

from meshwright.hardware.targets import Target
from meshwright.planner.attention import AttentionKernel, rates_of_bundles
from meshwright.planner.compute import Computation
from meshwright.planner.estimate import Estimate, StepModel, estimate
from meshwright.planner.memory_model import SavedInputs, StepMemory, sharded_elements
from meshwright.planner.physics import PHYSICS, Physics
from meshwright.planner.pipeline import MicrobatchSeconds, PipelineSeconds
from meshwright.planner.traffic import Movement, Traffic, between_stages
from meshwright.planner.work import LowPrecision, Work, low_precision
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.schedule_table import TaskCounts
from meshwright.sharding.schedules import bubble_formula

Context = Callable[[PlacedRun, Work, float, int, frozenset[str]], list[Movement]]
"""`(run, work, layers, bytes of an element, recomputed roles) -> collectives of context parallelism`."""


@dataclasses.dataclass(frozen=True)
class Software:
    """How much of a chip a training program uses, and how it carries out a step."""

    name: str
    kernel: AttentionKernel
    """Attention on GPUs; on TPUs programs have splash unless `own_kernel_on_tpu`."""
    own_kernel_on_tpu: bool = False
    """Whether `kernel` runs on TPUs too."""
    attention_again: bool = False
    """Whether the backward pass runs the forward kernel of attention again whatever the remat policy keeps."""
    launch: float = 4e-6
    """Seconds between two kernels that a GPU's host can launch: 3.8 us in a row of short ones (NVIDIA, "Getting Started
    with CUDA Graphs"); about 10 us where an interpreter dispatches each (an assumption)."""
    elementwise: float = 1.0
    """HBM traffic of norms, activation functions, residuals and quantisation on GPUs over what the planner counts."""
    sorting: float = 1.0
    """HBM traffic of the rows of experts over what the planner counts."""
    overlap: float = 1.0
    """Overlapped communication on GPUs over what the chip can overlap (`Efficiency.overlap`)."""
    tensor_overlap: float = 1.0
    """The same over `tensor` (`Efficiency.tensor_overlap`): 0 where no collective is cut into pieces."""
    splits_sequence: bool = True
    """Whether `tensor` splits the residual stream too (sequence parallelism)."""
    logit_bytes: int = 4
    """Bytes of a logit, and of its gradient while it is computed."""
    sends_beside: bool = False
    """Whether a ring's keys and an interleaved pipeline's activations and rows of experts travel beside computation."""
    rows_by: Literal["expert", "device"] = "expert"
    """What a token is sent to once: each of its experts, or each device (over the network each node) with some."""
    context: Context | None = None
    """Collectives of context parallelism; None takes the planner's."""
    transformer_engine: bool = False
    """Whether experts have low precision too, and one kernel quantises an input for all products, which is kept so."""

    @property
    def physics(self) -> Physics:
        """Constants of the planner that differ in its step."""
        return dataclasses.replace(
            PHYSICS,
            gpu_launch_seconds=self.launch,
            gpu_elementwise=self.elementwise,
            sorting=self.sorting,
            gpu_overlap=self.overlap,
            tensor_overlap=self.tensor_overlap,
            logit_bytes=self.logit_bytes,
            overlapped_compute=0.0,
        )

    @property
    def step(self) -> StepModel:
        """Parts that price its step."""
        return StepModel(
            physics=self.physics,
            computation=functools.partial(OtherComputation, program=self),
            traffic=functools.partial(OtherTraffic, program=self),
            memory=functools.partial(OtherMemory, program=self),
            pipeline_time=free_running,
        )


def estimate_program(placed: PlacedRun, target: Target, program: Software) -> Estimate:
    """Predicts a step of a program on a target."""
    return estimate(placed, target, program.step)


BLOCK_BYTES = 4
"""HBM bytes per element that is quantised to MXFP8 where one kernel finds the maxima and writes rows and columns
(TransformerEngine)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherComputation(Computation):
    """Computation of another program: its layers are no rows of stacks, and its last stage has the loss."""

    program: Software

    @functools.cached_property
    def kernel(self) -> AttentionKernel:
        """Kernel of attention."""
        if self.on_gpu or self.program.own_kernel_on_tpu:
            return self.program.kernel
        rates = rates_of_bundles(self.settled)
        return AttentionKernel(self.settled.kernels.backward, flops_per_second=rates)

    def _attention_passes(self, name: str) -> float:
        """Returns how often a pass computes attention, in forward passes of it."""
        if name == "recomputation" and self.program.attention_again:
            return 1.0
        return super()._attention_passes(name)

    @functools.cached_property
    def low(self) -> LowPrecision | None:
        """Low precision of experts; None where they stay in the compute dtype."""
        return low_precision(self.settled) if self.program.transformer_engine else None

    @functools.cached_property
    def quantise_bytes(self) -> int:
        """HBM bytes that quantising an element moves."""
        if self.low is not None and self.low.rate == "mxfp8":
            return BLOCK_BYTES
        return self.physics.quantise_bytes

    @functools.cached_property
    def quantised_gradients(self) -> float:
        """Gradients of dense products, quantised once for both of their products by TransformerEngine."""
        if self.low is None:
            return self.work.quantised_gradients
        return self.work.quantised_gradients / self.low.gradient_passes

    @functools.cached_property
    def expert_gradient_quantisations(self) -> int:
        """Times that a gradient of experts is quantised."""
        return 1

    @functools.cached_property
    def expert_input_quantisations(self) -> float:
        """Times that an input of gate or up is quantised, which share it."""
        return 0.5

    @functools.cached_property
    def buffered(self) -> float:
        """Rows of the experts' buffers over rows that are sent: no padding."""
        return 1.0

    @functools.cached_property
    def residual_shards(self) -> int:
        """Devices over which the residual stream of a token is split."""
        return self.settled.layout.shape.tensor if self.program.splits_sequence else 1

    @functools.cached_property
    def chunk_bytes(self) -> Mapping[str, float]:
        """HBM bytes of attention by chunks: none, kernels of a ring keep their sums."""
        return {}

    @functools.cached_property
    def logit_passes(self) -> int:
        """Forward passes of the unembedding: the backward pass reads the logits."""
        preferences = self.settled.run.finetune.objective == "preferences"
        return 2 if preferences else 1

    @functools.cached_property
    def copied_bytes(self) -> dict[str, float]:
        """HBM bytes of the sum of gradients only."""
        return {"backward": self.summed_bytes}

    @functools.cached_property
    def unembedding_seconds(self) -> float:
        """Seconds of a microbatch's logits on the last stage, which has all columns of the table.

        The other stages wait for it, less the time of the layers that it has fewer.
        """
        shape = self.settled.layout.shape
        unembedding = self.work.unembedding
        unembedding = dataclasses.replace(unembedding, n=unembedding.n * shape.stage)
        seconds = self.logit_seconds(unembedding)
        if shape.stage == 1 or not unembedding.n:
            return seconds
        stages = self.settled.layout.stages
        layers = sum(one_pass.total for one_pass in self.passes.values())
        most = max(stages.cost_fraction(stage) for stage in range(shape.stage))
        fewer = layers * (1 - stages.cost_fraction(stages.last_stage) / most)
        return max(0.0, seconds - fewer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherTraffic(Traffic):
    """Collectives of another program."""

    program: Software

    @functools.cached_property
    def low_precision_experts(self) -> bool:
        """Whether weights of experts are gathered in low precision."""
        return False

    @functools.cached_property
    def receivers(self) -> int:
        """Nodes, or inside a node devices, that a token is sent to once each; 1 sends it to each of its experts."""
        if self.program.rows_by == "expert":
            return 1
        nodes = self.settled.expert_nodes
        if nodes > 1:
            return nodes
        degrees = self.settled.layout.shape.degrees()
        return math.prod(degrees[axis] for axis in self.settled.layout.expert_axes)

    @functools.cached_property
    def exchange_is_blocking(self) -> bool:
        """Whether the next operation waits for the rows of experts."""
        return not (self.program.sends_beside and self.settled.layout.stages.virtual_stages > 1)

    @functools.cached_property
    def gradients_during(self) -> str:
        """Pass in which replicas sum their gradients: the last backward pass."""
        return "backward"

    def context(self) -> list[Movement]:
        """Returns what context parallelism moves."""
        if self.settled.layout.shape.context == 1 or self.program.context is None:
            return super().context()
        return self.program.context(
            self.settled, self.work, self.layers, self.compute_bytes, self.recomputed
        )

    def stages(self) -> list[Movement]:
        """Returns what pipeline stages send; the first and the last stage have embedding and loss."""
        if self.tasks is None:
            return []
        return between_stages(self.tasks, self.residual / self.settled.layout.shape.tensor)

    def movements(self) -> list[Movement]:
        """Returns all collectives, those that travel beside computation as such."""
        result = super().movements()
        if self.program.sends_beside:
            return [self._beside(m) for m in result]
        return result

    def _beside(self, m: Movement) -> Movement:
        if m.kind != "collective-permute" or m.blocking:
            return m
        if m.axes == ("stage",) and self.settled.layout.stages.virtual_stages == 1:
            return m
        return m._replace(blocking=True, overlap=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherMemory(StepMemory):
    """Memory of another program: it holds pointers to layers, adds gradients in place, gathers weights again, and keeps
    the outputs of norms as sequence parallelism splits them."""

    program: Software

    @functools.cached_property
    def saved_inputs(self) -> SavedInputs:
        """Form in which inputs of matmuls are saved: TransformerEngine keeps them quantised."""
        precision = self.settled.run.training.matmul_precision
        low = self.program.transformer_engine and precision != "compute"
        return SavedInputs(gathered=False, projected=low, in_one_byte=low)

    @functools.cached_property
    def keeps_weights(self) -> bool:
        """Whether gathered weights are saved for the backward pass."""
        return False

    @functools.cached_property
    def gathered_weights(self) -> float:
        """Bytes of gathered weights that are saved."""
        return 0.0

    @functools.cached_property
    def gradients(self) -> float:
        """Bytes of the gradients that a device keeps."""
        training = self.settled.run.training
        param = jnp.dtype(training.param_dtype).itemsize
        _, trained = sharded_elements(self.settled.layout)
        return trained * max(param, jnp.dtype(training.reduce_dtype).itemsize)

    @functools.cached_property
    def late_gradients(self) -> float:
        """Bytes of gradients that are there before they are added to the sum."""
        return 0.0

    @functools.cached_property
    def stage_inputs(self) -> float:
        """Bytes of the inputs of microbatches, besides what a stage saves of them."""
        return 0.0

    @functools.cached_property
    def loss(self) -> float:
        """Bytes of the loss; layers have no gradients yet where one microbatch has them all."""
        loss = super().loss
        return loss if self.sums_microbatches else loss - self.gradients

    @functools.cached_property
    def layer_weights(self) -> float:
        """Bytes of a layer's gathered weights and their gradients; none where nothing is gathered."""
        if all(where.at_rest == where.in_use for _, _, where in self.settled.layout.leaves):
            return 0.0
        return super().layer_weights

    @functools.cached_property
    def tied_gradient(self) -> float:
        """Bytes of a tied table's gradient besides the others."""
        return 0.0


def free_running(tasks: TaskCounts, seconds: MicrobatchSeconds) -> PipelineSeconds:
    """Prices Megatron's pipeline: a stage waits only for its neighbours (arXiv:2104.04473, 2.2).

    Layers wait for their collectives in the microbatches that fill and drain it too. The first stage holds its warm-up:
    P microbatches, or with V virtual stages (V + 1) P - 1 inputs of one each.
    """
    microbatch = seconds.forward + seconds.recomputation + seconds.backward + seconds.exposed
    live = tasks.stages
    if tasks.virtual_stages > 1:
        live = (tasks.virtual_stages + 1) * tasks.stages - 1
    idle = bubble_formula(tasks.name, tasks.stages, tasks.microbatches, tasks.virtual_stages)
    return PipelineSeconds(
        bubble=tasks.microbatches * microbatch * idle,
        recomputation=tasks.microbatches * seconds.recomputation,
        live_inputs=float(min(live, tasks.microbatches * tasks.virtual_stages)),
    )


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
_XLA = Software("MaxText", CHIPS_OWN, elementwise=1.1, overlap=0.35, logit_bytes=2)
# Releases of NeMo up to 26.04 sort and quantise the rows of experts in kernels of their own.
_MEGATRON = Software(
    "Megatron-Core",
    CHIPS_OWN,
    launch=1e-5,
    elementwise=1.48,
    tensor_overlap=1.12,
    sends_beside=True,
    transformer_engine=True,
    sorting=3.3,
)
_MEGATRON_LM = Software("Megatron-LM", UNFUSED, launch=1e-5, elementwise=1.84, tensor_overlap=0.0)
# Rounded output of `bench/foresight/fit.py`, but for the zeros: those programs cut no collective into pieces.
SOFTWARE = {
    software.name: software
    for software in (
        _XLA,
        dataclasses.replace(_XLA, name="PAX", elementwise=3.1),
        _MEGATRON,
        dataclasses.replace(_MEGATRON, name="Megatron-Core 2026.06", sorting=0.5),
        _MEGATRON_LM,
        dataclasses.replace(_MEGATRON_LM, name="vTrain", launch=4e-5),
        Software(
            "torchtitan",
            FLASH2,
            launch=1e-5,
            elementwise=3.2,
            tensor_overlap=0.1,
            context=gathered_ring,
        ),
        # Composer's loss (flash-attn, csrc/xentropy) reads logits in bfloat16, and writes their gradient so.
        Software(
            "PyTorch",
            TRITON,
            launch=1e-5,
            elementwise=2.84,
            overlap=0.54,
            tensor_overlap=0.0,
            logit_bytes=2,
        ),
        Software("Meta", CHIPS_OWN, launch=1e-5, tensor_overlap=0.0),
    )
}
"""Programs by name."""
