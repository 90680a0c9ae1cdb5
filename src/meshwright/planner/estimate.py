"""A placed run on a machine, priced by arithmetic: seconds of a step and bytes of a device.

Compute, HBM and links each take their time; communication that can overlap with computation is
overlapped up to the fraction that the chip's `Efficiency` states. A pipeline's ticks come from its
schedule table. Constants of the chip are peaks and achieved fractions (hardware/chips.toml) and
latencies of links (hardware/interconnect.py); of the step its launches, its HBM traffic and what it
overlaps (planner/physics.py).

    compute.py        seconds of a pass over a microbatch, by resource
    traffic.py        collectives of a step;  overlap.py: their seconds, and those that are exposed
    pipeline.py       seconds that pipeline stages wait
    memory_model.py   bytes
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.config import Remat, StageSaves, Training
from meshwright.formatting import format_bytes
from meshwright.hardware.interconnect import AxisMapping, machine_of_target
from meshwright.hardware.targets import Target
from meshwright.models.flops import training_flops_per_token
from meshwright.models.quantisation import check_precision
from meshwright.planner.compute import (
    Computation,
    PassSeconds,
    matmul_seconds,
)
from meshwright.planner.memory_model import (
    PhaseMemory,
    StepMemory,
    keeps_stages,
    offloaded_bytes,
    phase_memory,
    sharded_elements,
)
from meshwright.planner.optimizer import update_bytes_moved, update_matmuls
from meshwright.planner.overlap import Communication, overlap_communication
from meshwright.planner.physics import PHYSICS, Physics
from meshwright.planner.pipeline import (
    MicrobatchSeconds,
    PipelineSeconds,
    PipelineTime,
    lockstep,
)
from meshwright.planner.traffic import Traffic
from meshwright.planner.work import Work, recomputed_roles, work_of
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.settle import Settled, settle
from meshwright.sharding.schedule_table import TaskCounts
from meshwright.sharding.schedules import build_counts

MATMULS, ATTENTION = "matmuls", "attention"
OPERANDS, SCORES = "HBM: matmul operands", "HBM: attention scores"
ELEMENTWISE, OPTIMIZER = "HBM: norms and activations", "HBM: optimizer"
"""Resources that bound a step: the matrix unit by kind of work, HBM by what it moves.
Others are links and waits."""
_COMPUTE, _HBM = (MATMULS, ATTENTION), (OPERANDS, SCORES, ELEMENTWISE, OPTIMIZER)
_TOKEN_BYTES = 4
"""Bytes of a token that a device reads."""


_PHASE_NAMES = {
    "step": "",
    "start": " at the start",
    "evaluation": " in an evaluation",
    "save": " in a save",
    "resume": " in a resume",
}
"""Where a phase does not fit, in an error."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Predicted step of one device."""

    target: Target
    seconds: float
    """Seconds of a step."""
    parts: Mapping[str, float]
    """Seconds by part; they add up to `seconds`."""
    exposed: Mapping[str, float]
    """Exposed communication, in seconds, by the axes it goes over."""
    busy: Mapping[str, float]
    """Seconds that the links of those axes are busy, overlapped or exposed."""
    routes: Mapping[str, str]
    """Links of those axes: ICI dimensions, NVLink, DCN."""
    memory: Mapping[str, float]
    """Live bytes by category."""
    hbm_bytes: float
    """Memory of the device."""
    model_flops: float
    """Model FLOPs of a step per device."""
    bounds: Mapping[str, float]
    """Seconds of computation, recomputed included,
    by what bounds it: MATMULS, OPERANDS and so on."""
    peak: float
    """Peak FLOP/s of the device."""
    tokens: int
    """Tokens of a step, over all devices."""
    devices: int
    axis_mapping: AxisMapping
    phases: Mapping[str, PhaseMemory] = dataclasses.field(default_factory=dict)
    """Memory of each phase of a training; empty where only the step is known (wrapped models)."""
    halves: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the matmuls of each half of the layers: ATTENTION_HALF, FEED_FORWARD_HALF."""

    @property
    def bytes(self) -> float:
        """Live bytes at the peak of a step."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the heap, with its fragmentation, has room in every phase."""
        return self.fits_in(self.peak_phase)

    @property
    def peak_phase(self) -> str:
        """Phase of a training that needs most memory."""
        return max(("step", *self.phases), key=self.bytes_in)

    def bytes_in(self, phase: str) -> float:
        """Returns the most bytes of a device in a phase."""
        if phase == "step" or not self.phases:
            return self.bytes
        return self.phases[phase].device

    def fits_in(self, phase: str) -> bool:
        """Whether the heap, with its fragmentation, has room in one phase."""
        return self.bytes_in(phase) * self.target.chip.fragmentation <= self.hbm_bytes

    @property
    def shortfall(self) -> str:
        """By how much the phase that needs most memory does not fit, and what it needs it for."""
        phase = self.peak_phase
        parts = self.memory if phase == "step" else self.phases[phase].parts
        largest = max(parts, key=lambda name: parts[name])
        text = (
            f"does not fit{_PHASE_NAMES[phase]}: {format_bytes(self.bytes_in(phase))} and "
            f"{self.target.chip.fragmentation - 1:.0%} of fragmentation, of "
            f"{format_bytes(self.hbm_bytes)}; {format_bytes(parts[largest])} of it {largest}"
        )
        return text if phase == "step" else f"{text}; a step needs {format_bytes(self.bytes)}"

    @property
    def mfu(self) -> float:
        """Model-FLOP utilisation (models/flops.py)."""
        return self.model_flops / (self.seconds * self.peak)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, over all devices."""
        return self.tokens / self.seconds

    @property
    def bound_by(self) -> str:
        """Resource that takes most of the step."""
        return largest_bound(self.seconds_by_bound)

    @property
    def seconds_by_bound(self) -> dict[str, float]:
        """Seconds of the step by what bounds them;
        they add up to `seconds`, except the input, which overlaps."""
        kinds = {**self.bounds, OPTIMIZER: self.parts["optimizer"]}
        kinds |= {"bubble": self.parts["bubble"], "host": self.parts["host"]}
        kinds |= {f"{axes} over {self.routes[axes]}": n for axes, n in self.exposed.items()}
        # Tokens are read ahead: they count where reading them takes longer than the step.
        waiting = self.tokens * _TOKEN_BYTES / self.devices / self.target.chip.network_bandwidth
        return {**kinds, "input": waiting} if waiting > self.seconds else kinds


def largest_bound(seconds: Mapping[str, float]) -> str:
    """Names what takes most of a step: of matrix unit, HBM, each link
    and each wait the largest, then its kind.

    HBM is one resource: what moves through it is added before it is compared,
    and its largest kind is named.
    """
    groups: dict[str, tuple[str, ...]] = {
        kind: (kind,) for kind in seconds if kind not in (*_COMPUTE, *_HBM)
    }
    groups |= {MATMULS: _COMPUTE, OPERANDS: _HBM}
    largest = max(groups.values(), key=lambda kinds: sum(seconds.get(kind, 0.0) for kind in kinds))
    return max(largest, key=lambda kind: seconds.get(kind, 0.0))


@dataclasses.dataclass(frozen=True)
class StepModel:
    """Parts that price a train step; this package's by default.

    Whoever prices a step that is carried out otherwise passes other parts,
    as bench/foresight does for published steps.
    """

    physics: Physics = PHYSICS
    computation: Callable[..., Computation] = Computation
    traffic: Callable[..., Traffic] = Traffic
    memory: Callable[..., StepMemory] = StepMemory
    pipeline_time: PipelineTime = lockstep


THIS_STEP = StepModel()
"""This package's train step."""


def estimate(placed: PlacedRun, target: Target, step: StepModel = THIS_STEP) -> Estimate:
    """Predicts a step of `placed` on `target`. step: what prices its parts."""
    saved = placed.run.training.saved_layers / max(1, len(placed.layout.spec.layers))
    if not saved:
        return _StepEstimate(placed, target, step).estimate()
    others = _StepEstimate(placed, target, step).estimate()
    saving = _StepEstimate(with_remat(placed, "projections"), target, step).estimate()
    return _mixed(others, saving, saved)


def with_remat(
    placed: PlacedRun, remat: Remat, saved_layers: int = 0, stage_saves: StageSaves | None = None
) -> PlacedRun:
    """Returns the placed run with another remat policy, on which no placement depends;
    `stage_saves` of None stays."""
    saves = stage_saves or placed.run.training.stage_saves
    training = training_with(
        placed.run.training, remat=remat, saved_layers=saved_layers, stage_saves=saves
    )
    return dataclasses.replace(placed, run=dataclasses.replace(placed.run, training=training))


@functools.lru_cache(maxsize=4096)
def training_with(training: Training, **changes: Any) -> Training:
    """Returns options of training with some changed.
    Searches repeat the same changes on thousands of meshes."""
    return dataclasses.replace(training, **changes)


def _mixed(others: Estimate, saving: Estimate, fraction: float) -> Estimate:
    """Returns the estimate of a run in which a `fraction` of the layers are those of `saving`."""

    def mix(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {
            name: (1 - fraction) * value + fraction * b.get(name, 0.0) for name, value in a.items()
        }

    mixed: dict[str, Any] = {
        name: mix(getattr(others, name), getattr(saving, name))
        for name in ("parts", "exposed", "busy", "bounds", "halves")
    }
    # The layers that save are the first: their backward pass comes when the activations
    # of the others are gone.
    kept = fraction * saving.memory["activations"]
    both = {**others.memory, "activations": (1 - fraction) * others.memory["activations"] + kept}
    memory = max(
        both, {**saving.memory, "activations": kept}, key=lambda kinds: sum(kinds.values())
    )
    step = PhaseMemory.of(memory, others.phases["step"].host)
    mixed |= {
        "seconds": sum(mixed["parts"].values()),
        "memory": memory,
        "phases": {**others.phases, "step": step},
    }
    return dataclasses.replace(others, **mixed)


@dataclasses.dataclass(frozen=True)
class _StepEstimate:
    """A step of a placed run on a target, whose layers all have one remat policy."""

    placed: PlacedRun
    target: Target
    step: StepModel

    def estimate(self) -> Estimate:
        """Predicts the step."""
        placed = self.placed
        shape = placed.layout.shape
        chip = self.target.chip
        training = placed.run.training
        parts = self.parts
        tokens = training.batch * placed.units
        flops = training_flops_per_token(placed.run.model, training.seq, placed.run.finetune.method)
        memory = self.step.memory(
            self.settled, self.work, self.live_inputs, physics=self.step.physics
        ).by_category()
        phases = phase_memory(self.settled, self.work, memory) if self.work.layers else {}
        return Estimate(
            target=self.target,
            seconds=sum(parts.values()),
            parts=parts,
            exposed=self.communication.exposed,
            busy=self.communication.busy,
            routes=self.communication.routes,
            memory=memory,
            hbm_bytes=chip.hbm_bytes,
            model_flops=flops * tokens / shape.size,
            bounds=self.bounds,
            peak=chip.flops_bf16,
            tokens=tokens,
            devices=shape.size,
            axis_mapping=self.mapping,
            phases=phases,
            halves=self.halves,
        )

    # The run on its machine.

    @functools.cached_property
    def settled(self) -> Settled:
        """The run with what follows from its machine.
        Raises ConfigError where the machine cannot do it."""
        machine = machine_of_target(self.target, self.placed.layout.shape)
        precision = self.placed.run.training.matmul_precision
        if precision != "compute":
            check_precision(precision, machine)
        settled = settle(self.placed, machine)
        settled.check_exchange()
        return settled

    @functools.cached_property
    def mapping(self) -> AxisMapping:
        """Links of each mesh axis."""
        mapping = self.settled.machine.mapping
        assert mapping is not None  # machine_of_target fills it in
        return mapping

    @functools.cached_property
    def work(self) -> Work:
        """Work of a microbatch on a device."""
        return work_of(self.placed)

    @functools.cached_property
    def recomputed(self) -> frozenset[str]:
        """Roles that the backward pass computes again."""
        roles = recomputed_roles(self.placed.run.training.remat)
        if roles - {"scores"}:
            roles |= self.work.outputs_read
        # The gradient of the projection out of a latent reads the output of experts, saved with
        # their hidden layer.
        if self.work.expert_latent and "ffn_in" in roles:
            roles |= {"ffn_out"}
        return roles

    @functools.cached_property
    def tasks(self) -> TaskCounts | None:
        """Tasks of the pipeline; None without one."""
        training = self.placed.run.training
        stages = self.placed.layout.shape.stage
        if stages == 1:
            return None
        return build_counts(
            training.pipeline_schedule,
            stages,
            training.microbatches,
            self.placed.layout.stages.virtual_stages,
        )

    @functools.cached_property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.placed.run.training.microbatches

    # Its resources, of a microbatch.

    @functools.cached_property
    def computation(self) -> Computation:
        """Computation of a microbatch."""
        return self.step.computation(
            self.settled, self.work, self.recomputed, self.target, physics=self.step.physics
        )

    @functools.cached_property
    def repeated(self) -> float:
        """Seconds of the forward pass that a pipeline's backward task repeats
        from its saved input."""
        if self.tasks is None or keeps_stages(self.placed):
            return 0.0
        return self.computation.passes["forward"].total

    @functools.cached_property
    def communication(self) -> Communication:
        """Communication of a step, beside the computation of its passes.

        A third of the unembedding is its forward pass, and two thirds are its gradients.
        """
        passes = self.computation.passes
        unembedding = self.computation.unembedding_seconds
        forward = passes["forward"].total
        recomputation = passes["recomputation"].total
        backward = passes["backward"].total
        seconds = {
            "forward": forward + unembedding / 3,
            "recomputation": recomputation + self.repeated,
            "backward": backward + recomputation + self.repeated + unembedding * 2 / 3,
            "step": 0.0,
        }
        traffic = self.step.traffic(
            self.settled, self.work, self.recomputed, self.tasks, physics=self.step.physics
        )
        return overlap_communication(
            traffic.movements(),
            self.mapping,
            self.target,
            self.step.physics,
            {name: self.microbatches * n for name, n in seconds.items()},
            self.settled.scheduled_by_price,
        )

    # Seconds of a step.

    @functools.cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by part."""
        parts = self._parts_without_bubble
        if self.pipeline is None:
            return parts
        waits = {"recomputation": self.pipeline.recomputation, "bubble": self.pipeline.bubble}
        return parts | waits

    @functools.cached_property
    def live_inputs(self) -> float:
        """Most inputs of virtual stages that a pipeline stage holds; 1 without a pipeline."""
        return 1.0 if self.pipeline is None else self.pipeline.live_inputs

    @functools.cached_property
    def pipeline(self) -> PipelineSeconds | None:
        """Waits and recomputation of the pipeline; None without one."""
        if self.tasks is None:
            return None
        return self.step.pipeline_time(self.tasks, self._microbatch)

    @functools.cached_property
    def _microbatch(self) -> MicrobatchSeconds:
        """Seconds of a microbatch on the stage with the most work."""
        in_layers = 0.0
        for axes, seconds in self.communication.exposed.items():
            if not {"data", "fsdp", "stage"} & {*axes.split("+")}:
                in_layers += seconds
        passes = self.computation.passes
        return MicrobatchSeconds(
            forward=passes["forward"].total,
            recomputation=passes["recomputation"].total,
            backward=passes["backward"].total,
            repeated=self.repeated,
            exposed=in_layers / self.microbatches,
        )

    @functools.cached_property
    def _parts_without_bubble(self) -> dict[str, float]:
        """Seconds of a step by part, of a pipeline whose stages never wait."""
        passes = self.computation.passes
        forward = passes["forward"]
        backward = passes["backward"]
        matmul = forward.matmul + backward.matmul + self.computation.unembedding_seconds
        return {
            "matmul": self.microbatches * matmul,
            "attention": self.microbatches * (forward.attention + backward.attention),
            "recomputation": self.microbatches * passes["recomputation"].total,
            "elementwise": self.microbatches * (forward.elementwise + backward.elementwise),
            "optimizer": self.optimizer,
            "exposed": sum(self.communication.exposed.values()),
            "host": self.host,
            "bubble": 0.0,
        }

    @functools.cached_property
    def optimizer(self) -> float:
        """Seconds of the update: its matmuls, and the state that it reads and writes."""
        matmuls = sum(max(matmul_seconds(m, self.target)) for m in update_matmuls(self.placed))
        _, trained = sharded_elements(self.placed.layout)
        bandwidth = self.target.chip.hbm_bandwidth * self.target.efficiency.hbm
        return matmuls + update_bytes_moved(self.placed, trained) / bandwidth

    @functools.cached_property
    def host(self) -> float:
        """Seconds that a step waits for activations in the host's memory,
        to and from which all are sent."""
        sent = 2 * offloaded_bytes(self.placed, self.work) * self.microbatches
        computation = sum(seconds.total for seconds in self.computation.passes.values())
        computation += self.repeated
        overlapped = self.target.efficiency.overlap * self.microbatches * computation
        return max(0.0, sent / self.target.chip.host_bandwidth - overlapped)

    @functools.cached_property
    def bounds(self) -> dict[str, float]:
        """Seconds of a step's computation by what bounds them.

        Recomputation of a step is divided as that of a microbatch,
        and the pass that a backward task repeats.
        """
        passes = {name: _seconds_by_bound(n) for name, n in self.computation.passes.items()}
        forward = passes["forward"]
        recomputed = passes["recomputation"]
        if self.repeated > 0:
            recomputed = {kind: n + forward[kind] for kind, n in recomputed.items()}
        of_microbatch = sum(recomputed.values())
        total: dict[str, float] = {}
        for kind, seconds in forward.items():
            total[kind] = self.microbatches * (seconds + passes["backward"][kind])
        total[MATMULS] += self.microbatches * self.computation.unembedding_seconds
        if of_microbatch:
            for kind, seconds in recomputed.items():
                total[kind] += self.parts["recomputation"] * seconds / of_microbatch
        return total

    @functools.cached_property
    def halves(self) -> dict[str, float]:
        """Seconds of the matmuls of each half of the layers in a step, recomputed
        as those of `bounds`.

        Nothing of a wrapped model, whose layers are not known.
        """
        if not self.placed.run.model.states_layers:
            return {}
        computation = self.computation
        forward = computation.half_seconds("forward")
        backward = computation.half_seconds("backward")
        recomputed = computation.half_seconds("recomputation")
        of_microbatch = computation.passes["recomputation"].total
        if self.repeated > 0:
            recomputed = {half: n + forward[half] for half, n in recomputed.items()}
            of_microbatch += self.repeated
        total: dict[str, float] = {}
        for half, seconds in forward.items():
            total[half] = self.microbatches * (seconds + backward[half])
            if of_microbatch:
                total[half] += self.parts["recomputation"] * recomputed[half] / of_microbatch
        return total


def _seconds_by_bound(seconds: PassSeconds) -> dict[str, float]:
    """Returns the seconds of a pass by what bounds them."""
    return {
        MATMULS: seconds.matmul - seconds.operands,
        ATTENTION: seconds.attention - seconds.scores,
        OPERANDS: seconds.operands,
        SCORES: seconds.scores,
        ELEMENTWISE: seconds.elementwise,
    }
