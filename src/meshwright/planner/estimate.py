"""A placed run on a machine, priced by arithmetic: seconds of a step and bytes of a device.

Compute, HBM and links each take their time; communication that can overlap with computation is overlapped up to the
fraction that the chip's `Efficiency` states. A pipeline's ticks come from its schedule table. Constants of the chip are
peaks and achieved fractions (hardware/chips.toml) and latencies of links (hardware/interconnect.py); of the program its
launches, its HBM traffic and what it overlaps (planner/software.py); of the arithmetic the copies and bytes below.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from meshwright.config import Remat, StageSaves, Training
from meshwright.formatting import format_bytes
from meshwright.hardware.chips import Efficiency
from meshwright.hardware.interconnect import AxisMapping, machine_of_target
from meshwright.hardware.machine import AUTO
from meshwright.hardware.targets import Target
from meshwright.models.flops import training_flops_per_token
from meshwright.models.kernels.blocked import block_size
from meshwright.models.model import AttentionSpec
from meshwright.models.quantisation import check_precision
from meshwright.planner.memory_model import (
    PhaseMemory,
    keeps_stages,
    kept_bytes,
    memory_by_category,
    offloaded_bytes,
    param_bytes,
    phase_memory,
    rounded_elements,
    sharded_elements,
)
from meshwright.planner.optimizer import update_bytes_moved, update_matmuls
from meshwright.planner.software import (
    MESHWRIGHT,
    SCORE_BYTES,
    SCORE_BYTES_OF_TPU,
    AttentionKernel,
    Software,
)
from meshwright.planner.traffic import (
    TO_EXPERTS,
    Movement,
    movements,
    runs_experts_in_low_precision,
)
from meshwright.planner.work import (
    LowPrecision,
    Matmul,
    Work,
    low_precision,
    recomputed_roles,
    tokens_per_device,
    work_of,
)
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.settle import Settled, settle
from meshwright.sharding.schedules import build_counts

PASSES = ("forward", "recomputation", "backward")
MATMULS, ATTENTION = "matmuls", "attention"
OPERANDS, SCORES = "HBM: matmul operands", "HBM: attention scores"
ELEMENTWISE, OPTIMIZER = "HBM: norms and activations", "HBM: optimizer"
"""Resources that bound a step: the matrix unit by kind of work, HBM by what it moves. Others are links and waits."""
_COMPUTE, _HBM = (MATMULS, ATTENTION), (OPERANDS, SCORES, ELEMENTWISE, OPTIMIZER)
_TOKEN_BYTES = 4
"""Bytes of a token that a device reads."""
QUANTISE_BYTES = 5
"""HBM bytes per element that is quantised: read for the maximum, read and written for the conversion, bfloat16."""
BLOCK_BYTES = 4
"""The same in MXFP8 where one kernel finds the maxima and writes rows and columns (TransformerEngine)."""
RESIDUAL_COPIES = {"forward": 10, "recomputation": 8, "backward": 20}
"""Copies of the residual stream that a layer's norms, sums and rotations read and write besides its matmuls.

With sequence parallelism each device has its part of them over `tensor`. Each takes a launch where nothing fuses it."""
HIDDEN_COPIES = {"forward": 1.5, "recomputation": 1.5, "backward": 3.0}
"""Copies of the feed-forward's first outputs, gate and up together, that a GPU moves in the activation function.

SwiGLU reads two and writes one; its gradient reads three and writes three, the product among them. On TPUs the matmuls
have it fused."""
SORTING_COPIES = {"forward": 6, "recomputation": 3, "backward": 10}
"""Copies of the rows of experts that are read and written besides their matmuls: sorted by expert, scaled by the
router's weight, sent back and summed."""
CHUNK_BYTES = {
    "ring": {"forward": 11, "backward": 23},
    "all_gather": {"forward": 23, "backward": 46},
}
"""HBM bytes per element of queries, for each device of `context`, in which a GPU sums attention to each chunk of keys
in float32, by `context_strategy`. Counted in one program each, Qwen3-235B on 64 B200 with `context=4`, and divided by
`MESHWRIGHT.elementwise`; where attention is computed again the forward pass' once more."""
COLLECTIVE_LAUNCHES = 3
"""Launches that a collective of GPUs takes besides its bytes and hops: its event, its kernel, and the last device's."""
LOSS_BYTES = 24
"""HBM bytes per logit that the loss moves on a GPU: float32 logits written, read for their log-sum-exp and for their
gradient, and the gradient, written and read by two matmuls; TPUs have it fused."""
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tiles of a GPU's matmul, rows by columns (NVIDIA, "Matrix Multiplication Background User's Guide")."""
TILE_REUSE = 16
"""Rows of a tile at which loading its operands takes as long as multiplying them."""


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
    """Seconds of computation, recomputed included, by what bounds it: MATMULS, OPERANDS and so on."""
    peak: float
    """Peak FLOP/s of the device."""
    tokens: int
    """Tokens of a step, over all devices."""
    devices: int
    axis_mapping: AxisMapping
    phases: Mapping[str, PhaseMemory] = dataclasses.field(default_factory=dict)
    """Memory of each phase of a training; empty where only the step is known (wrapped models)."""

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
            f"{self.target.chip.fragmentation - 1:.0%} of fragmentation, of {format_bytes(self.hbm_bytes)}; "
            f"{format_bytes(parts[largest])} of it {largest}"
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
        """Seconds of the step by what bounds them; they add up to `seconds`, except the input, which overlaps."""
        kinds = {**self.bounds, OPTIMIZER: self.parts["optimizer"]}
        kinds |= {"bubble": self.parts["bubble"], "host": self.parts["host"]}
        kinds |= {f"{axes} over {self.routes[axes]}": n for axes, n in self.exposed.items()}
        # Tokens are read ahead: they count where reading them takes longer than the step.
        waiting = self.tokens * _TOKEN_BYTES / self.devices / self.target.chip.network_bandwidth
        return {**kinds, "input": waiting} if waiting > self.seconds else kinds


def largest_bound(seconds: Mapping[str, float]) -> str:
    """Names what takes most of a step: of matrix unit, HBM, each link and each wait the largest, then its kind.

    HBM is one resource: what moves through it is added before it is compared, and its largest kind is named.
    """
    groups: dict[str, tuple[str, ...]] = {
        kind: (kind,) for kind in seconds if kind not in (*_COMPUTE, *_HBM)
    }
    groups |= {MATMULS: _COMPUTE, OPERANDS: _HBM}
    largest = max(groups.values(), key=lambda kinds: sum(seconds.get(kind, 0.0) for kind in kinds))
    return max(largest, key=lambda kind: seconds.get(kind, 0.0))


def estimate(placed: PlacedRun, target: Target, software: Software = MESHWRIGHT) -> Estimate:
    """Predicts a step of `placed` on `target`. software: whose program is priced."""
    saved = placed.run.training.saved_layers / max(1, len(placed.layout.spec.layers))
    if not saved:
        return _estimate(placed, target, software)
    others, saving = (
        _estimate(with_remat(placed, remat), target, software)
        for remat in (placed.run.training.remat, "projections")
    )
    return _mixed(others, saving, saved)


def with_remat(
    placed: PlacedRun, remat: Remat, saved_layers: int = 0, stage_saves: StageSaves | None = None
) -> PlacedRun:
    """Returns the placed run with another remat policy, on which no placement depends; `stage_saves` of None stays."""
    saves = stage_saves or placed.run.training.stage_saves
    training = training_with(
        placed.run.training, remat=remat, saved_layers=saved_layers, stage_saves=saves
    )
    return dataclasses.replace(placed, run=dataclasses.replace(placed.run, training=training))


@functools.lru_cache(maxsize=4096)
def training_with(training: Training, **changes: Any) -> Training:
    """Returns options of training with some changed. Searches repeat the same changes on thousands of meshes."""
    return dataclasses.replace(training, **changes)


def _mixed(others: Estimate, saving: Estimate, fraction: float) -> Estimate:
    """Returns the estimate of a run in which a `fraction` of the layers are those of `saving`."""

    def mix(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {
            name: (1 - fraction) * value + fraction * b.get(name, 0.0) for name, value in a.items()
        }

    mixed: dict[str, Any] = {
        name: mix(getattr(others, name), getattr(saving, name))
        for name in ("parts", "exposed", "busy", "bounds")
    }
    # The layers that save are the first: their backward pass comes when the activations of the others are gone.
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


def _estimate(placed: PlacedRun, target: Target, software: Software) -> Estimate:
    run, shape, chip = placed.run, placed.layout.shape, target.chip
    training, microbatches = run.training, run.training.microbatches
    machine = machine_of_target(target, shape)
    if training.matmul_precision != "compute":
        check_precision(training.matmul_precision, machine)
    settled, mapping = settle(placed, machine), machine.mapping
    compiled = _with_options(target) if AUTO in training.compiler_options else target
    assert mapping is not None  # machine_of_target fills it in
    work, again = work_of(placed), recomputed_roles(training.remat)
    again |= work.outputs_read if again - {"scores"} else frozenset()
    tasks = None
    if shape.stage > 1:
        tasks = build_counts(
            training.pipeline_schedule,
            shape.stage,
            microbatches,
            placed.layout.stages.virtual_stages,
        )
    compute = _compute_seconds(settled, work, again, compiled, software)
    busy = {
        name: sum(n[kind] for kind in ("matmul", "attention", "elementwise"))
        for name, n in compute.items()
    }
    unembedding = _unembedding_seconds(placed, work, compiled, software, sum(busy.values()))
    busy["stage"] = busy["forward"] if tasks is not None and not keeps_stages(placed) else 0.0
    exposed, links, routes = overlapped(
        movements(settled, work, again, tasks, software),
        mapping,
        target,
        software,
        {
            "forward": microbatches * (busy["forward"] + unembedding / 3),
            "recomputation": microbatches * (busy["recomputation"] + busy["stage"]),
            "backward": microbatches
            * (busy["backward"] + busy["recomputation"] + busy["stage"] + unembedding * 2 / 3),
            "step": 0.0,
        },
        software.beside if settled.scheduled_by_price else 0.0,
    )
    host = 2 * offloaded_bytes(placed, work) * microbatches / chip.host_bandwidth
    both = [compute["forward"], compute["backward"]]
    parts = {
        "matmul": microbatches * (sum(seconds["matmul"] for seconds in both) + unembedding),
        "attention": microbatches * sum(seconds["attention"] for seconds in both),
        "recomputation": microbatches * busy["recomputation"],
        "elementwise": microbatches * sum(seconds["elementwise"] for seconds in both),
        "optimizer": sum(max(matmul_seconds(m, target)) for m in update_matmuls(placed))
        + update_bytes_moved(placed, sharded_elements(placed.layout)[1])
        / (chip.hbm_bandwidth * target.efficiency.hbm),
        "exposed": sum(exposed.values()),
        "host": max(0.0, host - target.efficiency.overlap * microbatches * sum(busy.values())),
        "bubble": 0.0,
    }
    in_flight = 1.0
    if tasks is not None:
        in_layers = [
            n for axes, n in exposed.items() if not {"data", "fsdp", "stage"} & {*axes.split("+")}
        ]
        busy["exposed"] = sum(in_layers) / microbatches
        parts, in_flight = software.pipeline_time(parts, tasks, busy)
    tokens, memory = (
        training.batch * placed.units,
        memory_by_category(settled, work, in_flight, software),
    )
    return Estimate(
        target=target,
        seconds=sum(parts.values()),
        parts=parts,
        exposed=exposed,
        busy=links,
        routes=routes,
        memory=memory,
        hbm_bytes=chip.hbm_bytes,
        model_flops=training_flops_per_token(run.model, training.seq, run.finetune.method)
        * tokens
        / shape.size,
        bounds=_bounds(
            compute, microbatches, unembedding, parts["recomputation"], busy["stage"] > 0
        ),
        peak=chip.flops_bf16,
        tokens=tokens,
        devices=shape.size,
        axis_mapping=mapping,
        phases=phase_memory(settled, work, memory) if work.layers else {},
    )


@functools.lru_cache
def _with_options(target: Target) -> Target:
    """Returns the target with the rate of matmuls that the chip's compiler options reach."""
    plain = target.efficiency
    faster = dataclasses.replace(
        plain, matmul=min(1.0, plain.matmul * plain.options_gain), options_gain=1.0
    )
    return dataclasses.replace(target, given_efficiency=faster)


def _compute_seconds(
    settled: Settled, work: Work, again: frozenset[str], target: Target, software: Software
) -> dict[str, dict[str, float]]:
    """Returns the seconds of each pass over a microbatch by kind: matmul, attention, elementwise.

    Of the first two also those that HBM bounds rather than the matrix unit, by what it moves: operands, scores.
    """
    computation = _Computation(settled, work, again, target, software)
    return {name: computation.seconds(name) for name in PASSES}


@dataclasses.dataclass(frozen=True)
class _Computation:
    """Computation of a microbatch on a device, priced by pass and by what it waits for.

    matmul        the larger of FLOPs / rate, operands / HBM and a kernel's launch, for each product
    attention     the larger of FLOPs / rate, scores / HBM and the launches of its kernels
    elementwise   bytes / HBM of residuals, hidden features, chunks of a split sequence, quantisation and sorting
    """

    settled: Settled
    work: Work
    again: frozenset[str]
    """Roles of the products that the backward pass computes again."""
    target: Target
    software: Software

    @functools.cached_property
    def gpu(self) -> bool:
        """Whether kernels are launched one by one."""
        return not self.settled.machine.on_tpu

    @functools.cached_property
    def launch(self) -> float:
        """Seconds that a kernel takes at least."""
        return self.software.launch if self.gpu else 0.0

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes of HBM per second."""
        return self.target.chip.hbm_bandwidth * self.target.efficiency.hbm

    @functools.cached_property
    def kernel(self) -> AttentionKernel:
        """Kernel of attention."""
        return _attention_kernel(self.settled, self.software)

    @functools.cached_property
    def is_ours(self) -> bool:
        """Whether the step is this package's own."""
        return self.software.name == MESHWRIGHT.name

    @functools.cached_property
    def rounds_experts(self) -> bool:
        """Whether this package's own experts multiply in low precision."""
        return runs_experts_in_low_precision(self.settled, self.software)

    @functools.cached_property
    def low(self) -> LowPrecision | None:
        """Low precision of the products; None where they are in the compute dtype."""
        if self.software.transformer_engine or self.rounds_experts:
            return low_precision(self.settled)
        return None

    @functools.cached_property
    def rounds_once(self) -> bool:
        """Whether a gradient is quantised once for both of its products."""
        return self.software.transformer_engine and self.low is not None

    @functools.cached_property
    def recomputed(self) -> frozenset[str]:
        """Roles that are computed again, besides the scores of attention."""
        return self.again - {"scores"}

    @functools.cached_property
    def buffered(self) -> float:
        """Rows of the experts' buffers for each row that they have: our experts compute all of them."""
        sorted_rows = self.work.expert_tokens * self.work.experts
        if not self.is_ours or not sorted_rows:
            return 1.0
        return max(1.0, self.work.expert_rows / sorted_rows)

    def seconds(self, name: str) -> dict[str, float]:
        """Returns the seconds of one pass by kind."""
        matmul, operands = self._matmul(name)
        attention, scores = self._attention(name)
        copies = self._residual_copies(name)
        calls = self.work.layers * self.kernel.kernels * math.ceil(self._repeats(name))
        elementwise = self._elementwise_bytes(name) / self.bandwidth
        seconds = {
            "matmul": matmul,
            "attention": max(attention, scores, self.launch * calls),
            "elementwise": max(elementwise, self.launch * self.work.layers * copies),
            "operands": operands,
            "scores": scores if scores > attention else 0.0,
        }
        # The reference of preferences is one more forward pass.
        preferences = self.settled.run.finetune.objective == "preferences"
        times = 2.0 if preferences and name == "forward" else 1.0
        seconds = {kind: value * times for kind, value in seconds.items()}
        seconds["elementwise"] += self._copied.get(name, 0.0) / self.bandwidth
        return seconds

    @functools.cached_property
    def _copied(self) -> Mapping[str, float]:
        """Bytes by pass of weights and gradients that are copied."""
        return _copied_bytes(self.settled, self.work, self.software)

    def _recomputes(self, name: str) -> bool:
        return name == "recomputation"

    def _repeats(self, name: str) -> float:
        """Returns how often a pass computes attention, in forward passes of it."""
        if name == "forward":
            return 1.0
        if name == "backward":
            return self.kernel.backward
        computed = {"attention", "scores"} if self.kernel.keeps_scores else {"attention"}
        return 1.0 if computed & self.again else 0.0

    def _matmul(self, name: str) -> tuple[float, float]:
        """Returns the seconds of all products of a pass, and those of them that operands bound."""
        seconds = operands = 0.0
        for m, forward, backward in self._products:
            # Linear attention is computed again from its inputs, whatever the policy keeps.
            if self._recomputes(name) and m.role not in self.again and m.role != "delta":
                continue
            for at_peak, moved in backward if name == "backward" else (forward,):
                seconds += max(at_peak, moved, m.count * self.launch)
                operands += moved if moved > at_peak else 0.0
        return seconds, operands

    @functools.cached_property
    def _products(self) -> Any:
        """Each product with its seconds forward and backward (`_product_seconds`)."""
        rate = self.low.rate if self.low else None
        return _product_seconds(self.work.matmuls, self.target, rate)

    def _attention(self, name: str) -> tuple[float, float]:
        """Returns the seconds of attention by its FLOPs, and by the scores that pass through HBM."""
        chip, efficiency, repeats = self.target.chip, self.target.efficiency, self._repeats(name)
        rate = chip.flops_bf16 * self.kernel.speed * getattr(efficiency, self.kernel.rate)
        attention = repeats * self.work.attention / rate
        scores = 0.0
        if repeats:
            scores = self.work.scores * self.kernel.score_bytes.get(name, 0) / self.bandwidth
        return attention, scores * self._fusion

    @functools.cached_property
    def _fusion(self) -> float:
        """Factor on elementwise bytes: compilers of TPUs fuse them, other programs for GPUs differ."""
        return self.software.elementwise if self.gpu else 1.0

    def _residual_copies(self, name: str) -> float:
        """Returns how often a pass reads or writes the residual stream of a layer."""
        if self._recomputes(name) and not self.recomputed:
            return 0
        return RESIDUAL_COPIES[name]

    def _elementwise_bytes(self, name: str) -> float:
        """Returns the bytes that norms, residuals, activations, quantisation and sorting move in a pass."""
        work, recomputes = self.work, self._recomputes(name)
        residual = work.tokens * work.width * 2 * work.layers
        residual /= self.settled.layout.shape.tensor if self.software.splits_sequence else 1
        moved = self._residual_copies(name) * residual + (0.0 if recomputes else work.kept_bytes)
        if self.gpu and (not recomputes or "ffn_in" in self.again):
            moved += HIDDEN_COPIES[name] * 2 * self._hidden
        if self._chunked and self._repeats(name):
            queries = (
                self.settled.layout.shape.context * work.tokens * work.layers * work.widths.query
            )
            moved += self._chunked["backward" if name == "backward" else "forward"] * queries
        moved *= self._fusion
        if recomputes and not self.recomputed:
            return moved
        moved += self._quantise_bytes * self._quantised[name]
        sorted_rows = work.expert_tokens * work.experts
        sorted_rows *= work.expert_layers * (1 + self.buffered) / 2
        moved += SORTING_COPIES[name] * 2 * sorted_rows * work.width * self.software.sorting
        return moved

    @functools.cached_property
    def _hidden(self) -> float:
        """Elements of the feed-forward's hidden features, of all layers."""
        return sum(
            m.m * m.n * m.count * (self.buffered if m.groups else 1)
            for m in self.work.matmuls
            if m.role == "ffn_in"
        )

    @functools.cached_property
    def _chunked(self) -> Mapping[str, float]:
        """Bytes by direction for each query, where attention of a split sequence is computed by pairs of chunks."""
        by_chunks = self.gpu and self.is_ours and self.settled.sequence.groups > 1
        if not by_chunks or self.kernel.score_bytes:
            return {}
        return CHUNK_BYTES.get(self.settled.run.training.context_strategy, {})

    @functools.cached_property
    def _quantise_bytes(self) -> int:
        """Bytes that quantising an element moves."""
        blocks = self.low is not None and self.rounds_once and self.low.rate == "mxfp8"
        return BLOCK_BYTES if blocks else QUANTISE_BYTES

    @functools.cached_property
    def _quantised(self) -> dict[str, float]:
        """Elements that each pass quantises."""
        work, low = self.work, self.low
        quantised = {
            "forward": work.quantised_inputs,
            "recomputation": work.quantised_inputs if self.recomputed else 0.0,
            "backward": work.quantised_gradients,
        }
        quantised["backward"] /= low.gradient_passes if low and self.rounds_once else 1
        if not low:
            return quantised
        for m in work.matmuls:
            if m.groups:
                # Gate and up share their rows, which ours round before they are copied for experts. Gradients are
                # quantised once, or for each of their two products.
                shared = (0.0 if self.rounds_experts else 0.5) if m.role == "ffn_in" else 1.0
                quantised["forward"] += self.buffered * shared * m.m * m.k * m.count
                times = 1 if self.rounds_once else 2
                quantised["backward"] += self.buffered * times * m.m * m.n * m.count
        return quantised


def _product_seconds(
    matmuls: tuple[Matmul, ...], target: Target, expert_rate: str | None
) -> list[tuple[Matmul, tuple[float, float], list[tuple[float, float]]]]:
    """Seconds as of `matmul_seconds`, of each matmul and of its gradients. expert_rate: of experts; None for theirs."""
    result = []
    for m in matmuls:
        rated = dataclasses.replace(m, rate=expert_rate) if m.groups and expert_rate else m
        result.append(
            (m, matmul_seconds(rated, target), [matmul_seconds(g, target) for g in rated.gradients])
        )
    return result


def _attention_kernel(settled: Settled, software: Software) -> AttentionKernel:
    if software.kernel is not None and not settled.machine.on_tpu:
        return software.kernel
    if not settled.layout.spec.layers:
        return AttentionKernel(0.0)
    unfused = settled.layout.spec.attention and not (settled.kernels.fused or software.kernel)
    return AttentionKernel(
        settled.kernels.backward, score_bytes=_blocked_bytes(settled) if unfused else {}
    )


def visited_positions(attention: AttentionSpec, seq: int, block: int) -> float:
    """Returns the positions that are computed for a token in blocks of `block` queries and keys, averaged."""
    seq, window = min(seq, attention.chunk or seq), attention.window or seq
    hidden = sum(max(0, i - window + 1) // block for i in range(0, seq, block))
    blocks = seq // block
    return block * (blocks * (blocks + 1) / 2 - hidden) / blocks


def _blocked_bytes(settled: Settled) -> dict[str, float]:
    """HBM bytes that blocked attention moves per visible score, by pass: of all scores of the blocks that it visits."""
    table = SCORE_BYTES_OF_TPU if settled.machine.on_tpu else SCORE_BYTES
    split, attention, seq = (
        settled.sequence,
        settled.layout.spec.attention,
        settled.run.training.seq,
    )
    heads = max(a.heads for a in attention) / (settled.layout.shape.tensor * split.group)
    sequences = tokens_per_device(settled) * settled.layout.shape.context / seq
    tokens = seq if split.groups == 1 else seq // (2 * split.groups)
    block = block_size(tokens, max(1, int(4 * sequences * heads)))
    visible = sum(a.heads * a.causal_positions(seq) for a in attention)
    visited = sum(a.heads * visited_positions(a, seq, block) for a in attention) / visible
    elements = max(a.head_size for a in attention) / block
    return {name: visited * (scores + rows * elements) for name, (scores, rows) in table.items()}


def _bounds(
    passes: Mapping[str, Mapping[str, float]],
    microbatches: int,
    unembedding: float,
    recomputation: float,
    stages_repeat: bool,
) -> dict[str, float]:
    """Returns the seconds of a step's computation by what bounds them.

    passes: of a microbatch. unembedding: seconds of a microbatch. recomputation: seconds of a step.
    stages_repeat: whether backward tasks repeat their stage's forward pass, which recomputation then includes.
    """
    bounds = {
        name: {
            MATMULS: seconds["matmul"] - seconds["operands"],
            ATTENTION: seconds["attention"] - seconds["scores"],
            OPERANDS: seconds["operands"],
            SCORES: seconds["scores"],
            ELEMENTWISE: seconds["elementwise"],
        }
        for name, seconds in passes.items()
    }
    total = {
        kind: microbatches * (n + bounds["backward"][kind]) for kind, n in bounds["forward"].items()
    }
    total[MATMULS] += microbatches * unembedding
    repeated = {
        kind: n + stages_repeat * bounds["forward"][kind]
        for kind, n in bounds["recomputation"].items()
    }
    sum_of_kinds = sum(repeated.values())
    for kind, n in repeated.items():
        total[kind] += recomputation * n / sum_of_kinds if sum_of_kinds else 0.0
    return total


def overlapped(
    traffic: list[Movement],
    mapping: AxisMapping,
    target: Target,
    software: Software,
    room: dict[str, float],
    beside: float,
) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Exposed seconds, busy seconds and links, each by axes.

    room: seconds of computation by pass.  beside: fraction of it that has transfers beside; 0 for the chip's overlap.
    """
    overlap = target.efficiency.overlap * (software.overlap if not target.chip.on_torus else 1.0)
    if beside:
        overlap = (
            software.exchange_overlap if any(m.purpose == TO_EXPERTS for m in traffic) else 1.0
        )
    tensor_overlap = target.efficiency.tensor_overlap * software.tensor_overlap
    launches = 0.0 if target.chip.on_torus else COLLECTIVE_LAUNCHES * software.launch
    timed, routes = [], dict[str, str]()
    for movement in traffic:
        path = mapping.route(movement.axes)
        if path is not None:
            routes["+".join(movement.axes)] = path.medium
            each = path.seconds(movement.kind, movement.payload) + launches
            timed.append((movement, movement.times * each))
    exposed, busy = defaultdict[str, float](float), defaultdict[str, float](float)
    overlappable, in_pieces = defaultdict[str, float](float), defaultdict[str, float](float)
    for movement, seconds in timed:
        in_pieces[movement.during] += seconds * movement.overlap
    for movement, seconds in timed:
        axes = "+".join(movement.axes)
        busy[axes] += seconds
        if movement.blocking:
            # Tensor parallelism overlaps in pieces with the matmuls that it opens and closes (collective matmul).
            exchange = movement.kind == "all-to-all" or movement.axes != ("tensor",)
            fraction = movement.overlap if exchange else tensor_overlap
            if movement.overlap:  # with all of the pass at most
                fraction *= min(1.0, room[movement.during] / in_pieces[movement.during])
            exposed[axes] += seconds * (1 - fraction)
        else:
            overlappable[movement.during] += seconds
    for name, seconds in overlappable.items():
        beside_them = room[name]
        if target.chip.on_torus:
            # Near the end of a pass less is left to compute than to send, the more so the closer the two are.
            beside_them *= seconds / (math.hypot(seconds, room[name]) or 1.0)
        left = seconds - min(overlap * seconds, (beside or overlap) * beside_them)
        for movement, own in timed:
            if movement.during == name and not movement.blocking:
                exposed["+".join(movement.axes)] += left * own / seconds
    return dict(exposed), dict(busy), routes


def _copied_bytes(settled: Settled, work: Work, software: Software) -> dict[str, float]:
    """HBM bytes that a microbatch's weights, gradients and kept activations take besides their matmuls, by pass."""
    training, (kept, trained) = settled.run.training, sharded_elements(settled.layout)
    param, compute, reduce = (
        jnp.dtype(t).itemsize
        for t in (training.param_dtype, training.compute_dtype, training.reduce_dtype)
    )
    # Gradients are summed over microbatches: the sum is read and written.
    summed = (
        2.0 * reduce * trained
        if training.microbatches > 1 or settled.layout.shape.stage > 1
        else 0.0
    )
    if not (software.copies and work.layers):
        return {"backward": summed}
    # Cut out of its stack, a layer's weights are read, converted and written, those that are rounded already in a byte
    # each; its gradients are read to be summed.
    weights = param_bytes(settled.layout, training.param_dtype) + compute * kept
    weights -= (param + compute - 2) * rounded_elements(settled)
    # A stage copies what it keeps into the slot of the microbatch, and out of it.
    copied = 2.0 * kept_bytes(settled, work)
    return {
        "forward": weights + copied,
        "backward": weights + copied + summed * (1 + compute / (2 * reduce)),
    }


def _unembedding_seconds(
    placed: PlacedRun, work: Work, target: Target, software: Software, layers: float
) -> float:
    """Returns the seconds of a microbatch's logits, their loss and their gradients.

    layers: seconds of a microbatch's layers on the stage with the most. Where the last pipeline stage has all of the
    unembedding, the other stages wait for it, less the time of the layers that it has fewer.
    """
    m, chip, stages, tuning = (
        work.unembedding,
        target.chip,
        placed.layout.stages,
        placed.run.finetune,
    )
    if not m.n:
        return 0.0
    m = (
        m
        if software.vocab_over_stages
        else dataclasses.replace(m, n=m.n * placed.layout.shape.stage)
    )
    forward = 1 + (tuning.objective == "preferences") + software.recomputes_logits
    # A frozen table has no gradient.
    frozen = dataclasses.replace(m, frozen=True) if tuning.method == "lora" else m
    ((_, once, gradients),) = _product_seconds((frozen,), target, None)
    seconds = sum(at_peak for at_peak, _ in [once] * forward + gradients)
    if not chip.on_torus:
        seconds += LOSS_BYTES * m.m * m.n / (chip.hbm_bandwidth * target.efficiency.hbm)
    if placed.layout.shape.stage == 1 or software.vocab_over_stages:
        return seconds
    most = max(stages.cost_fraction(stage) for stage in range(placed.layout.shape.stage))
    fewer = layers * (1 - stages.cost_fraction(stages.last_stage) / most)
    return max(0.0, seconds - fewer)


def matmul_seconds(m: Matmul, target: Target) -> tuple[float, float]:
    """Seconds of a matmul at the matrix unit's rate, and of its bytes at that of the HBM; it takes the longer."""
    chip, efficiency = target.chip, target.efficiency
    reached: float = getattr(chip, f"flops_{m.rate}") * efficiency.matmul
    reached *= shape_efficiency(m.m, m.k, m.n, efficiency, chip.multiprocessors, m.groups)
    # The groups of a wrapped model's product are a batch dimension, of equal rows.
    reached *= efficiency.grouped_matmul if m.groups and m.role != "projection" else 1.0
    return m.flops / reached, m.bytes(2) / (chip.hbm_bandwidth * efficiency.hbm)


def shape_efficiency(
    m: float, k: float, n: float, efficiency: Efficiency, multiprocessors: int = 0, groups: int = 0
) -> float:
    """Returns the fraction of a large matmul's rate that [m, k] x [k, n] reaches, m rows being shared by `groups`.

    A TPU has whole tiles along K and N. On a GPU each multiprocessor computes a tile of the result at a time, all of
    them in waves, of which the last is half full on average; of the tiles the fastest is taken.
    """
    tile, groups = efficiency.tile, max(1, groups)
    rows, filling = m / groups, k / (k + tile)

    def full(size: float, step: int) -> float:
        return size / (-(-size // step) * step)

    if not multiprocessors:
        filling *= rows / (rows + tile) * (n / (n + tile))
        return max(0.02, full(k, tile) * full(n, tile) * filling)
    best = 0.0
    for tall, wide in TILES:
        count = groups * -(-rows // tall) * -(-n // wide)
        waves = count / multiprocessors
        used = min(waves, waves / (waves + 0.5)) * full(rows, tall) * full(n, wide)
        best = max(
            best,
            used
            * (1 + TILE_REUSE / 128 + TILE_REUSE / 256)
            / (1 + TILE_REUSE / tall + TILE_REUSE / wide),
        )
    # Rows of other than 16 bytes, 8 elements, are loaded in shorter pieces.
    return max(0.02, best * filling * math.sqrt(math.gcd(int(n), 8) / 8))
