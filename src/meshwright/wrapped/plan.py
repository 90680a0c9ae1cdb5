"""Plans of a wrapped model: memory and time of a step by arithmetic, over the meshes of a machine."""

import dataclasses
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, MeshwrightError, divisors
from meshwright.hardware.interconnect import map_axes
from meshwright.hardware.targets import Target
from meshwright.planner.estimate import (
    ELEMENTWISE,
    MATMULS,
    OPERANDS,
    Estimate,
    matmul_seconds,
    overlapped,
    update_seconds,
)
from meshwright.planner.optimizer import optimizer_state_bytes
from meshwright.planner.search import Plan, SearchResult, price_run
from meshwright.planner.software import Software
from meshwright.planner.traffic import Movement
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.placement import axes_of
from meshwright.wrapped.parts import WrappedParts
from meshwright.wrapped.work import LossWork, training_flops, work_of_loss


def search_wrapped(model: Any, run: Run, target: Target, include: tuple[MeshShape, ...] = ()) -> SearchResult:
    """Ranks meshes of `data` and `fsdp`, with the run's own degree of `tensor`, which only its author can choose.

    Raises ConfigError where that degree does not divide the devices.
    """
    plans: list[Plan] = []
    refused: dict[str, str] = {}
    for shape in dict.fromkeys([*_meshes(run, target), *include]):
        try:
            plans.append(price_run(dataclasses.replace(run, mesh=shape), target))
        except MeshwrightError as error:
            refused[str(shape)] = str(error)
    fitting = sorted((p for p in plans if p.estimate.fits), key=lambda p: p.estimate.seconds)
    too_large = sorted((p for p in plans if not p.estimate.fits), key=lambda p: p.estimate.bytes)
    return SearchResult(target, tuple(fitting), tuple(too_large), refused, len(plans))


def _meshes(run: Run, target: Target) -> list[MeshShape]:
    tensor = run.mesh.tensor if run.mesh else 1
    replicas, rest = divmod(target.devices, tensor)
    if rest:
        truth = f"its mesh has tensor={tensor}, and {target.devices} devices = {replicas} * {tensor} + {rest}"
        raise ConfigError(f"{run.name} on {target}", truth, "a degree of tensor that divides the devices")
    slices, shapes = target.slices, []
    for data in divisors(replicas):
        axis = "data" if data % slices == 0 else "fsdp"
        if (data if axis == "data" else replicas // data) % slices == 0:
            shapes.append(MeshShape(data=data, fsdp=replicas // data, tensor=tensor, slices=slices, dcn_axis=axis))
    return shapes


def estimate_wrapped(model: Any, placed: PlacedRun, target: Target, software: Software) -> Estimate:
    """Predicts a step: matmuls of the jaxpr at the chip's rates, what is kept through HBM, and the step's collectives.

    What is kept for the backward pass is written and read once; other elementwise work is taken to be fused.
    """
    run, shape, chip, parts = placed.run, placed.shape, target.chip, model.parts
    microbatches = run.training.microbatches
    work = work_of_loss(parts, placed)
    matmul = bound = 0.0
    for m in work.matmuls:
        at_peak, moved = matmul_seconds(m, target)
        matmul += max(at_peak, moved)
        bound += moved if moved > at_peak else 0.0
    again = matmul if run.training.remat == "full" else 0.0
    passes = 4 if again else 3
    elementwise = 2.0 * work.kept_bytes / (chip.hbm_bandwidth * target.efficiency.hbm)
    forward, backward = matmul + elementwise / 2, 2 * matmul + elementwise / 2
    room = {"forward": forward * microbatches, "recomputation": 0.0, "backward": backward * microbatches, "step": 0.0}
    mapping = map_axes(shape, target)
    exposed, links, routes = overlapped(_movements(placed, work), mapping, target, software, room)
    seconds = {
        "matmul": 3 * matmul * microbatches,
        "attention": 0.0,
        "recomputation": again * microbatches,
        "elementwise": elementwise * microbatches,
        "optimizer": update_seconds(placed, target),
        "exposed": sum(exposed.values()),
        "host": 0.0,
        "bubble": 0.0,
    }
    return Estimate(
        target=target,
        seconds=sum(seconds.values()),
        parts=seconds,
        exposed=exposed,
        busy=links,
        routes=routes,
        memory=_memory(placed, work),
        hbm_bytes=chip.hbm_bytes,
        model_flops=training_flops(parts) / shape.size,
        bounds={
            MATMULS: passes * (matmul - bound) * microbatches,
            OPERANDS: passes * bound * microbatches,
            ELEMENTWISE: elementwise * microbatches,
        },
        peak=chip.flops_bf16,
        tokens=run.training.batch,
        devices=shape.size,
        axis_mapping=mapping,
    )


def _parts(placed: PlacedRun) -> WrappedParts:
    model: Any = placed.run.model
    return model.parts


def _elements(placed: PlacedRun) -> list[tuple[str, float, tuple[str, ...], tuple[str, ...]]]:
    """Name, elements in use on a device, axes over which it is gathered, and axes over which its gradient is summed."""
    found = []
    for name, p, where in placed.leaves:
        elements = p.size / placed.shape.over(axes_of(where.in_use))
        gathered = tuple(a for a in axes_of(where.at_rest) if a not in axes_of(where.in_use))
        summed = tuple(a for a in BATCH_AXES if a not in axes_of(where.optimizer) and placed.shape.degrees()[a] > 1)
        found.append((name, elements, gathered, summed))
    return found


def _movements(placed: PlacedRun, work: LossWork) -> list[Movement]:
    """Collectives of a step: gathers and scatters over `fsdp`, sums over `data`, and activations over `tensor`."""
    training, shape = placed.run.training, placed.shape
    reduce, times = jnp.dtype(training.reduce_dtype).itemsize, float(training.microbatches)
    sizes = _own_sizes(placed)
    gathers = 2 if training.remat == "auto" else 1
    # XLA combines the collectives of small arrays: one for each set of axes, so that latencies are not overcounted.
    gathered_bytes: defaultdict[tuple[str, ...], float] = defaultdict(float)
    scattered_bytes, summed_bytes = gathered_bytes.copy(), gathered_bytes.copy()
    for name, elements, gathered, summed in _elements(placed):
        if gathered:
            gathered_bytes[gathered] += elements * sizes[name]
            scattered_bytes[gathered] += elements * reduce
        if summed:
            summed_bytes[summed] += elements / shape.over(gathered) * reduce
    result = [Movement("all-reduce", axes, n, 1.0, "step", False, "gradients") for axes, n in summed_bytes.items()]
    for axes, n in gathered_bytes.items():
        passes = ("forward", "backward")[:gathers]
        result += [Movement("all-gather", axes, n, times, during, False, "parameters") for during in passes]
        scattered = scattered_bytes[axes]
        result.append(Movement("reduce-scatter", axes, scattered, times, "backward", False, "gradients"))
    if shape.tensor > 1:
        result.append(Movement("all-reduce", ("tensor",), work.tensor_bytes, times, "forward", True, "activations"))
    return result


def _own_sizes(placed: PlacedRun) -> dict[str, int]:
    """Bytes of an element of each parameter as the loss gets it."""
    compute = placed.run.training.compute_dtype
    own = _parts(placed).params
    return {n: x.dtype.itemsize if compute == "float32" else jnp.dtype(compute).itemsize for n, x in own.items()}


def _memory(placed: PlacedRun, work: LossWork) -> dict[str, float]:
    """Bytes of a device by category, at the end of the forward pass and the beginning of the backward pass."""
    shape, training = placed.shape, placed.run.training
    param, reduce = jnp.dtype(training.param_dtype).itemsize, jnp.dtype(training.reduce_dtype).itemsize
    sizes, parts = _own_sizes(placed), _parts(placed)
    at_rest = sum(p.size / shape.over(axes_of(where.at_rest)) for _, p, where in placed.leaves)
    batch = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(parts.source.example)) / shape.over(BATCH_AXES)
    variables = sum(x.size * x.dtype.itemsize for x in parts.variables.values())
    elements = _elements(placed)
    gathered = sum(n * sizes[name] for name, n, axes, _ in elements if axes)
    largest = max((n * reduce for _, n, axes, _ in elements if axes), default=0.0)
    return {
        "parameters": at_rest * param + variables,
        "optimizer state": float(optimizer_state_bytes(placed)),
        "gradients": at_rest * reduce + largest,
        "gathered parameters": gathered,
        "activations": 0.0 if training.remat == "full" else work.kept_bytes,
        "batch": batch,
    }
