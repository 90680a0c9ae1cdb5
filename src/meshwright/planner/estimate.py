"""A placed run on a machine, priced: seconds of a step and bytes of a device, by arithmetic alone.

Compute, HBM and links each take their time; communication that can overlap with computation is overlapped up to the
fraction that the chip's `Efficiency` states. A pipeline's ticks come from its schedule table.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping

import jax.numpy as jnp

from meshwright.config import Remat, StageSaves
from meshwright.hardware.interconnect import AxisMapping, Route, route
from meshwright.hardware.machine import machine_of_target
from meshwright.hardware.targets import Target
from meshwright.models.families import addition
from meshwright.models.flops import training_flops_per_token
from meshwright.models.model import Model
from meshwright.planner.bounds import OPTIMIZER, TOKEN_BYTES, add_bounds, bounds_of_pass, largest_bound
from meshwright.planner.layer_time import LayerTime, attention_kernel, matmul_seconds, shape_efficiency
from meshwright.planner.memory_model import (
    keeps_stages,
    kept_bytes,
    memory_by_category,
    offloaded_bytes,
    param_bytes,
    saved_bytes,
    sharded_elements,
    state_bytes,
    trained_elements,
)
from meshwright.planner.optimizer_work import update_matmuls
from meshwright.planner.software import MESHWRIGHT, Software
from meshwright.planner.traffic import Movement, movements
from meshwright.planner.work import Work, recomputed_roles, work_of
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.settle import Settled
from meshwright.sharding.schedules import build_counts

PASSES = ("forward", "recomputation", "backward")

UPDATE_BYTES = {"adamw": 32, "lion": 24, "sgd": 24, "muon": 40, "adafactor": 24}
"""HBM bytes that a built-in update reads and writes per parameter, with gradients, norm and clipping."""
_UPDATE_BASE = 16
"""HBM bytes per parameter of any other update, without its state, which is read and written on top."""


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
    """Seconds of computation, recomputed included, by what bounds it: a name of planner/bounds.py."""
    peak: float
    """Peak FLOP/s of the device."""
    tokens: int
    """Tokens of a step, over all devices."""
    devices: int
    axis_mapping: AxisMapping
    saved: float = 0.0
    """Bytes of a checkpoint per device: what its host has in memory while one is written."""

    @property
    def bytes(self) -> float:
        """Live bytes at the peak."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the heap, with its fragmentation, has room."""
        return self.bytes * self.target.chip.fragmentation <= self.hbm_bytes

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
        """Resource that takes most of the step (`bounds.largest_bound`)."""
        return largest_bound(self.seconds_by_bound)

    @property
    def seconds_by_bound(self) -> dict[str, float]:
        """Seconds of the step by what bounds them; they add up to `seconds`, but for the input, which runs beside."""
        kinds = {**self.bounds, OPTIMIZER: self.parts["optimizer"], "bubble": self.parts["bubble"]}
        kinds |= {"host": self.parts["host"]}
        kinds |= {f"{axes} over {self.routes[axes]}": n for axes, n in self.exposed.items()}
        # Tokens are read ahead: they count where reading them takes longer than the step.
        waiting = self.tokens * TOKEN_BYTES / self.devices / self.target.chip.network_bandwidth
        return {**kinds, "input": waiting} if waiting > self.seconds else kinds


def estimate(placed: PlacedRun, target: Target, software: Software = MESHWRIGHT) -> Estimate:
    """Predicts a step of `placed` on `target`. software: whose program is priced."""
    return estimate_model(placed.run.model, placed, target, software)


@functools.singledispatch
def estimate_model(model: Model, placed: PlacedRun, target: Target, software: Software) -> Estimate:
    """Predicts a step of a model family; another kind of model registers its own function (`wrapped`)."""
    saved = placed.run.training.saved_layers / max(1, len(placed.spec.layers))
    if not saved:
        return _estimate(placed, target, software)
    others, saving = (
        _estimate(with_remat(placed, remat), target, software) for remat in (placed.run.training.remat, "projections")
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
        bounds=mix(others.bounds, saving.bounds),
    )


def _estimate(placed: PlacedRun, target: Target, software: Software) -> Estimate:
    run, shape, chip = placed.run, placed.shape, target.chip
    training, microbatches = run.training, run.training.microbatches
    machine = machine_of_target(target, shape)
    if training.matmul_precision != "compute":
        addition("check_precision")(training.matmul_precision, machine)
    settled, mapping = Settled(placed, machine), machine.mapping
    assert mapping is not None  # machine_of_target fills it in
    work, again = work_of(placed), recomputed_roles(training.remat)
    tasks = None
    if shape.stage > 1:
        tasks = build_counts(training.pipeline_schedule, shape.stage, microbatches, placed.virtual_stages)
    compute = _compute_seconds(settled, work, again, target, software)
    bounds = {name: bounds_of_pass(seconds) for name, seconds in compute.items()}
    for seconds in compute.values():
        del seconds["operands"], seconds["scores"]
    busy = {name: sum(compute[name].values()) for name in PASSES}
    unembedding = _unembedding_seconds(placed, work, target, software, sum(busy.values()))
    busy["stage"] = busy["forward"] if tasks is not None and not keeps_stages(placed) else 0.0
    exposed, links, routes = overlapped(
        movements(placed, work, again, tasks, software),
        mapping,
        target,
        software,
        _overlap_room(busy, unembedding, microbatches),
    )
    host = 2 * offloaded_bytes(placed, work) * microbatches / chip.host_bandwidth
    both = [compute["forward"], compute["backward"]]
    parts = {
        "matmul": microbatches * (sum(seconds["matmul"] for seconds in both) + unembedding),
        "attention": microbatches * sum(seconds["attention"] for seconds in both),
        "recomputation": microbatches * busy["recomputation"],
        "elementwise": microbatches * sum(seconds["elementwise"] for seconds in both),
        "optimizer": update_seconds(placed, target),
        "exposed": sum(exposed.values()),
        "host": max(0.0, host - target.efficiency.overlap * microbatches * sum(busy.values())),
        "bubble": 0.0,
    }
    in_flight = 1.0
    if tasks is not None:
        parts, in_flight = software.pipeline_time(parts, tasks, busy), float(tasks.live_inputs)
    tokens = training.batch * training.seq
    return Estimate(
        target=target,
        seconds=sum(parts.values()),
        parts=parts,
        exposed=exposed,
        busy=links,
        routes=routes,
        memory=memory_by_category(settled, work, in_flight),
        hbm_bytes=chip.hbm_bytes,
        model_flops=training_flops_per_token(run.model, training.seq, run.finetune.method) * tokens / shape.size,
        bounds=add_bounds(bounds, microbatches, unembedding, parts["recomputation"], stages_repeat=busy["stage"] > 0),
        peak=chip.flops_bf16,
        tokens=tokens,
        devices=shape.size,
        axis_mapping=mapping,
        saved=saved_bytes(placed),
    )


def _compute_seconds(
    settled: Settled, work: Work, again: frozenset[str], target: Target, software: Software
) -> dict[str, dict[str, float]]:
    """Returns the seconds of each pass over a microbatch by kind, as `LayerTime.seconds` does, with copies."""
    layers = LayerTime(settled, work, again, target, software, attention_kernel(settled, software))
    compute = {name: layers.seconds(name) for name in PASSES}
    for name, copied in _copied_bytes(settled.placed, work, software).items():
        compute[name]["elementwise"] += copied / (target.chip.hbm_bandwidth * target.efficiency.hbm)
    return compute


def _overlap_room(busy: dict[str, float], unembedding: float, microbatches: int) -> dict[str, float]:
    """Seconds of computation that communication of each pass can overlap with."""
    return {
        "forward": microbatches * (busy["forward"] + unembedding / 3),
        "recomputation": microbatches * (busy["recomputation"] + busy["stage"]),
        "backward": microbatches * (busy["backward"] + busy["recomputation"] + busy["stage"] + unembedding * 2 / 3),
        "step": 0.0,
    }


def overlapped(
    traffic: list[Movement], mapping: AxisMapping, target: Target, software: Software, room: dict[str, float]
) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Exposed seconds, busy seconds and links, each by axes."""
    overlap = target.efficiency.overlap * (software.overlap if not target.chip.on_torus else 1.0)
    tensor_overlap = target.efficiency.tensor_overlap * software.tensor_overlap
    timed, routes = _route_movements(traffic, mapping, target)
    exposed, busy = defaultdict[str, float](float), defaultdict[str, float](float)
    overlappable = defaultdict[str, float](float)
    for movement, seconds in timed:
        axes = "+".join(movement.axes)
        busy[axes] += seconds
        if movement.blocking:
            # Tensor parallelism overlaps in pieces with the matmuls that it opens and closes (collective matmul).
            exposed[axes] += seconds * (1 - tensor_overlap if movement.axes == ("tensor",) else 1)
        else:
            overlappable[movement.during] += seconds
    for name, seconds in overlappable.items():
        left = seconds - overlap * min(seconds, room[name])
        for movement, own in timed:
            if movement.during == name and not movement.blocking:
                exposed["+".join(movement.axes)] += left * own / seconds
    return dict(exposed), dict(busy), routes


def _copied_bytes(placed: PlacedRun, work: Work, software: Software) -> dict[str, float]:
    """HBM bytes that a microbatch's weights, gradients and kept activations take besides their matmuls, by pass."""
    training, trained = placed.run.training, trained_elements(placed.layout)
    compute, reduce = (jnp.dtype(t).itemsize for t in (training.compute_dtype, training.reduce_dtype))
    # Gradients are summed over microbatches: the sum is read and written.
    summed = 2.0 * reduce * trained if training.microbatches > 1 or placed.shape.stage > 1 else 0.0
    if not software.copies:
        return {"backward": summed}
    # Cut out of its stack, a layer's weights are read, converted and written; its gradients are read to be summed.
    weights = param_bytes(placed.layout, training.param_dtype) + compute * sharded_elements(placed.layout)
    # A stage copies what it keeps into the slot of the microbatch, and out of it.
    kept = 2.0 * kept_bytes(placed, work)
    return {"forward": weights + kept, "backward": weights + kept + summed * (1 + compute / (2 * reduce))}


def _unembedding_seconds(
    placed: PlacedRun, work: Work, target: Target, software: Software, layers: float
) -> float:  # fmt: skip
    """Logits in the forward pass, again in the backward pass, and two matmuls for the gradients.

    layers: seconds of a microbatch's layers on the stage with the most. Where the last pipeline stage has all of the
    unembedding, the other stages wait for it, but for the time of the layers that it has fewer.
    """
    m, efficiency, stages = work.unembedding, target.efficiency, placed.stages
    rate = target.chip.flops_bf16 * efficiency.matmul * shape_efficiency(m.m, m.k, m.n, efficiency.tile)
    # A frozen table has no gradient.
    tuning = placed.run.finetune
    passes = (3 if tuning.method == "lora" else 4) + (1 if tuning.objective == "preferences" else 0)
    seconds = passes * m.flops / rate
    if placed.shape.stage == 1 or software.vocab_over_stages:
        return seconds
    most = max(stages.cost_fraction(stage) for stage in range(placed.shape.stage))
    fewer = layers * (1 - stages.cost_fraction(stages.last_stage) / most)
    return max(0.0, 3 / 4 * seconds * placed.shape.stage - fewer)


def update_seconds(placed: PlacedRun, target: Target) -> float:
    """Seconds of the optimizer update, which is bound by HBM, and of its matrix products."""
    products = sum(max(matmul_seconds(m, target)) for m in update_matmuls(placed))
    params, name = trained_elements(placed.layout), placed.run.optimizer.name
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
        path = _route_of(movement.axes, mapping, target)
        if path is not None:
            routes[movement.axes] = path
            timed.append((movement, movement.count * path.seconds(movement.kind, movement.payload)))
    return timed, {"+".join(axes): r.medium for axes, r in routes.items()}


_ROUTES: dict[tuple[int, tuple[str, ...]], tuple[AxisMapping, Route | None]] = {}
_MAX_ROUTES = 65536


def _route_of(axes: tuple[str, ...], mapping: AxisMapping, target: Target) -> Route | None:
    """Returns the path over some axes, None where all have degree 1.

    A search prices each mesh with many remat policies: the mapping, which `map_axes` makes once for a mesh and a
    target, is the key. It is kept, so that no other object can have its id.
    """
    key = (id(mapping), axes)
    if key not in _ROUTES:
        if len(_ROUTES) >= _MAX_ROUTES:
            _ROUTES.clear()
        span = mapping.span(axes)
        path = None if span is None else route(target.chip, target.topology, span, target.efficiency)
        _ROUTES[key] = (mapping, path)
    return _ROUTES[key][1]
