"""A placed run on a machine, priced: seconds of a step and bytes of a device, by arithmetic alone.

Compute, HBM and links each take their time; communication that can overlap with computation is overlapped up to the
fraction that the chip's `Efficiency` states. A pipeline's ticks come from its schedule table.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from meshwright.config import Remat, StageSaves
from meshwright.hardware.axis_mapping import AxisMapping, map_axes
from meshwright.hardware.chips import Chip, Torus
from meshwright.hardware.interconnect import Route, route
from meshwright.hardware.targets import Target
from meshwright.models.flops import training_flops_per_token
from meshwright.models.kernels.choose import Hardware, kernels_of
from meshwright.planner.engines import MESHWRIGHT, Engine
from meshwright.planner.memory_model import (
    FRAGMENTATION,
    gathers_ahead,
    keeps_stages,
    kept_bytes,
    memory_by_category,
    offloaded_bytes,
    sharded_elements,
    state_bytes,
)
from meshwright.planner.optimizer_work import update_matmuls
from meshwright.planner.traffic import Movement, movements
from meshwright.planner.work import Matmul, Work, recomputed_roles, work_of
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.schedules import build_counts

PASSES = ("forward", "recomputation", "backward")

ATTENTION_BACKWARD = 3.5
"""Backward pass of splash attention, in forward passes: seven matmuls for two (kernels/splash.py)."""
UPDATE_BYTES = {"adamw": 32, "lion": 24, "sgd": 24, "muon": 40, "adafactor": 24}
"""HBM bytes that a built-in update reads and writes per parameter, with gradients, norm and clipping."""
QUANTISE_BYTES = 5
"""HBM bytes per element that is quantised: read for the maximum, read and written for the conversion, bfloat16."""
_UPDATE_BASE = 16
"""HBM bytes per parameter of any other update, without its state, which is read and written on top."""
RESIDUAL_COPIES = {"forward": 10, "recomputation": 8, "backward": 20}
"""Copies of the residual stream that a layer's norms, sums and rotations read and write besides its matmuls."""


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
    peak: float
    """Peak FLOP/s of the device."""
    tokens: int
    """Tokens of a step, over all devices."""
    devices: int
    axis_mapping: AxisMapping

    @property
    def bytes(self) -> float:
        """Live bytes at the peak."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the heap, with its fragmentation, has room."""
        return self.bytes * FRAGMENTATION <= self.hbm_bytes

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
        """Largest share of the step: compute, HBM, pipeline bubble, host transfers, or the links of an axis."""
        kinds = {
            "compute": self.parts["matmul"] + self.parts["attention"] + self.parts["recomputation"],
            "HBM": self.parts["elementwise"] + self.parts["optimizer"],
            "bubble": self.parts["bubble"],
            "host": self.parts["host"],
        }
        kinds |= {f"{axes} over {self.routes[axes]}": n for axes, n in self.exposed.items()}
        return max(kinds, key=lambda kind: kinds[kind])


def estimate(placed: PlacedRun, target: Target, engine: Engine = MESHWRIGHT) -> Estimate:
    """Predicts a step of `placed` on `target`. engine: whose pipeline and whose split attention is priced."""
    saved = placed.run.training.saved_layers / max(1, len(placed.spec.layers))
    if not saved:
        return _estimate(placed, target, engine)
    others, saving = (
        _estimate(with_remat(placed, remat), target, engine) for remat in (placed.run.training.remat, "projections")
    )
    return _mixed(others, saving, saved)


def with_remat(
    placed: PlacedRun, remat: Remat, saved_layers: int = 0, stage_saves: StageSaves | None = None
) -> PlacedRun:
    """Returns the placed run with another remat policy, on which no placement depends; `stage_saves` of None stays."""
    training = dataclasses.replace(
        placed.run.training,
        remat=remat,
        saved_layers=saved_layers,
        stage_saves=stage_saves or placed.run.training.stage_saves,
    )
    return dataclasses.replace(placed, run=dataclasses.replace(placed.run, training=training))


def _mixed(others: Estimate, saving: Estimate, fraction: float) -> Estimate:
    """Returns the estimate of a run in which a `fraction` of the layers are those of `saving`."""

    def mix(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {name: (1 - fraction) * value + fraction * b.get(name, 0.0) for name, value in a.items()}

    parts = mix(others.parts, saving.parts)
    memory = {name: max(n, saving.memory.get(name, 0.0)) for name, n in others.memory.items()}
    memory["activations"] = mix(others.memory, saving.memory)["activations"]
    return dataclasses.replace(
        others,
        seconds=sum(parts.values()),
        parts=parts,
        exposed=mix(others.exposed, saving.exposed),
        busy=mix(others.busy, saving.busy),
        memory=memory,
    )


def _estimate(placed: PlacedRun, target: Target, engine: Engine) -> Estimate:
    run, shape, chip = placed.run, placed.shape, target.chip
    training, microbatches = run.training, run.training.microbatches
    if training.matmul_precision != "compute":
        from meshwright.models.quantisation import check_chip  # loaded for runs that ask for it

        check_chip(training.matmul_precision, chip)
    work, again, mapping = work_of(placed), recomputed_roles(training.remat), map_axes(shape, target)
    tasks = None
    if shape.stage > 1:
        tasks = build_counts(training.pipeline_schedule, shape.stage, microbatches, placed.virtual_stages)
    score_bytes = engine.score_bytes
    if score_bytes:
        kernels = kernels_of(
            training, placed.spec, placed.sequence, Hardware(platform_of(chip), chip.name, installed=True)
        )
        score_bytes = {} if kernels.fused else score_bytes
    compute = {name: _layers_seconds(work, again, name, target, score_bytes.get(name, 0)) for name in PASSES}
    # A stage copies what it keeps into the slot of the microbatch, and out of it.
    copied = 2 * engine.copies_kept * kept_bytes(placed, work) / (chip.hbm_bandwidth * target.efficiency.hbm)
    for name in ("forward", "backward"):
        compute[name]["elementwise"] += copied
    unembedding = _unembedding_seconds(work, target)
    busy = {name: sum(compute[name].values()) for name in PASSES}
    busy["stage"] = busy["forward"] if tasks is not None and not keeps_stages(placed) else 0.0
    exposed, links, routes = _communication(
        movements(placed, work, again), mapping, target, _overlap_room(busy, unembedding, microbatches)
    )
    host = 2 * offloaded_bytes(placed, work) * microbatches / chip.host_bandwidth
    both = [compute["forward"], compute["backward"]]
    parts = {
        "matmul": microbatches * (sum(seconds["matmul"] for seconds in both) + unembedding),
        "attention": microbatches * sum(seconds["attention"] for seconds in both),
        "recomputation": microbatches * busy["recomputation"],
        "elementwise": microbatches * sum(seconds["elementwise"] for seconds in both),
        "optimizer": _update_seconds(placed, target),
        "exposed": sum(exposed.values()),
        "host": max(0.0, host - target.efficiency.overlap * microbatches * sum(busy.values())),
        "bubble": 0.0,
    }
    in_flight = 1.0
    if tasks is not None:
        parts, in_flight = engine.pipeline_time(parts, tasks, busy), float(tasks.live_inputs)
    tokens = training.batch * training.seq
    return Estimate(
        target=target,
        seconds=sum(parts.values()),
        parts=parts,
        exposed=exposed,
        busy=links,
        routes=routes,
        memory=memory_by_category(placed, work, in_flight, gathers_ahead(placed, target, mapping)),
        hbm_bytes=chip.hbm_bytes,
        model_flops=training_flops_per_token(run.model, training.seq) * tokens / shape.size,
        peak=chip.flops_bf16,
        tokens=tokens,
        devices=shape.size,
        axis_mapping=mapping,
    )


def platform_of(chip: Chip) -> str:
    """Returns `jax.Device.platform` of a chip: TPUs have a torus, other chips count as NVIDIA GPUs."""
    return "tpu" if isinstance(chip.interconnect, Torus) else "cuda"


def _overlap_room(busy: dict[str, float], unembedding: float, microbatches: int) -> dict[str, float]:
    """Seconds of computation that communication of each pass can overlap with."""
    return {
        "forward": microbatches * (busy["forward"] + unembedding / 3),
        "recomputation": microbatches * (busy["recomputation"] + busy["stage"]),
        "backward": microbatches * (busy["backward"] + busy["recomputation"] + busy["stage"] + unembedding * 2 / 3),
        "step": 0.0,
    }


def _communication(
    traffic: list[Movement], mapping: AxisMapping, target: Target, room: dict[str, float]
) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Exposed seconds, busy seconds and links, each by axes."""
    efficiency = target.efficiency
    timed, routes = _route_movements(traffic, mapping, target)
    exposed, busy = defaultdict[str, float](float), defaultdict[str, float](float)
    overlappable = defaultdict[str, float](float)
    for movement, seconds in timed:
        axes = "+".join(movement.axes)
        busy[axes] += seconds
        if movement.blocking:
            # Tensor parallelism overlaps in pieces with the matmuls that it opens and closes (collective matmul).
            exposed[axes] += seconds * (1 - efficiency.tensor_overlap if movement.axes == ("tensor",) else 1)
        else:
            overlappable[movement.during] += seconds
    for name, seconds in overlappable.items():
        left = seconds - efficiency.overlap * min(seconds, room[name])
        for movement, own in timed:
            if movement.during == name and not movement.blocking:
                exposed["+".join(movement.axes)] += left * own / seconds
    return dict(exposed), dict(busy), routes


def _layers_seconds(work: Work, again: frozenset[str], name: str, target: Target, score_bytes: int) -> dict[str, float]:
    """Seconds of one microbatch's layers in a pass. score_bytes: HBM bytes that attention moves per score."""
    chip, efficiency = target.chip, target.efficiency
    bandwidth = chip.hbm_bandwidth * efficiency.hbm
    factor = 2.0 if name == "backward" else 1.0
    chosen = [m for m in work.matmuls if name != "recomputation" or m.role in again]
    matmul = sum(factor * _matmul_seconds(m, target) for m in chosen)
    passes = {"forward": 1.0, "backward": ATTENTION_BACKWARD, "recomputation": 1.0 if "attention" in again else 0.0}
    attention = passes[name] * work.attention / (chip.flops_bf16 * efficiency.attention)
    if passes[name]:
        attention = max(attention, work.scores * score_bytes / bandwidth)
    copies = RESIDUAL_COPIES[name] if name != "recomputation" or again - {"scores"} else 0
    elementwise = (
        copies * work.tokens * work.width * 2 * work.layers + _quantising_bytes(work, name, again)
    ) / bandwidth
    return {"matmul": matmul, "attention": attention, "elementwise": elementwise}


def _quantising_bytes(work: Work, name: str, again: frozenset[str]) -> float:
    """HBM bytes of quantising activations (forward, and where layers are recomputed) or gradients (backward)."""
    recomputed = work.quantised_inputs if again - {"scores"} else 0.0
    elements = {"forward": work.quantised_inputs, "recomputation": recomputed, "backward": work.quantised_gradients}
    return QUANTISE_BYTES * elements[name]


def _matmul_seconds(m: Matmul, target: Target) -> float:
    """A matmul is as fast as the matrix unit or the HBM lets it be."""
    chip, efficiency = target.chip, target.efficiency
    reached: float = (
        getattr(chip, f"flops_{m.rate}") * efficiency.matmul * shape_efficiency(m.m, m.k, m.n, efficiency.tile)
    )
    reached *= efficiency.grouped_matmul if m.grouped else 1.0
    return max(m.flops / reached, m.bytes(2) / (chip.hbm_bandwidth * efficiency.hbm))


def shape_efficiency(m: float, k: float, n: float, tile: int) -> float:
    """Returns the fraction of a large matmul's rate that [m, k] x [k, n] reaches: partial tiles, pipelines filling."""

    def full(size: float) -> float:
        return size / (-(-size // tile) * tile)

    filling = (m / (m + tile)) * (k / (k + tile)) * (n / (n + tile))
    return max(0.02, full(k) * full(n) * filling)


def _unembedding_seconds(work: Work, target: Target) -> float:
    """Logits in the forward pass, again in the backward pass, and two matmuls for the gradients."""
    m, efficiency = work.unembedding, target.efficiency
    rate = target.chip.flops_bf16 * efficiency.matmul * shape_efficiency(m.m, m.k, m.n, efficiency.tile)
    return 4 * m.flops / rate


def _update_seconds(placed: PlacedRun, target: Target) -> float:
    """Seconds of the optimizer update, which is bound by HBM, and of its matrix products."""
    products = sum(_matmul_seconds(m, target) for m in update_matmuls(placed))
    params, name = sharded_elements(placed), placed.run.optimizer.name
    known = UPDATE_BYTES.get(name)
    moved = params * _UPDATE_BASE + 2 * state_bytes(placed) if known is None else params * known
    return products + moved / (target.chip.hbm_bandwidth * target.efficiency.hbm)


def _route_movements(
    traffic: list[Movement], mapping: AxisMapping, target: Target
) -> tuple[list[tuple[Movement, float]], dict[str, str]]:
    """Seconds of each movement, and the links of its axes."""
    routes: dict[tuple[str, ...], Route] = {}
    timed = []
    for movement in traffic:
        if movement.axes not in routes:
            span = mapping.span(movement.axes)
            if span is None:
                continue
            routes[movement.axes] = route(target.chip, target.topology, span, target.efficiency)
        seconds = movement.count * routes[movement.axes].seconds(movement.kind, movement.payload)
        timed.append((movement, seconds))
    return timed, {"+".join(axes): r.medium for axes, r in routes.items()}
