"""Plans of a wrapped model: memory and time of a step by arithmetic, over the meshes of a machine."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, MeshwrightError, divisors
from meshwright.formatting import format_bytes
from meshwright.hardware.chips import Nodes
from meshwright.hardware.interconnect import map_axes
from meshwright.hardware.targets import Target
from meshwright.planner.bounds import ELEMENTWISE, MATMULS, OPERANDS
from meshwright.planner.estimate import Estimate, overlapped, update_seconds
from meshwright.planner.layer_time import matmul_seconds
from meshwright.planner.optimizer_state import optimizer_state_bytes
from meshwright.planner.search import Plan
from meshwright.planner.software import MESHWRIGHT
from meshwright.planner.traffic import Movement
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.placement import axes_of
from meshwright.wrapped.flops import training_flops
from meshwright.wrapped.model import Wrapped
from meshwright.wrapped.placing import place_wrapped
from meshwright.wrapped.work import LossWork, work_of_loss


def plan_wrapped(run: Run, targets: Sequence[Target], *, at_most: int) -> list[Plan]:
    """Returns the best plans of a wrapped model, the fastest predicted step first.

    Meshes of `data` and `fsdp` are tried, with the run's own degree of `tensor`, which only its author can choose.
    Raises ConfigError where no mesh of the machines has the memory, or divides batch and parameters.
    """
    plans: list[Plan] = []
    small: list[Plan] = []
    refused: list[str] = []
    tensor = run.mesh.tensor if run.mesh else 1
    run = dataclasses.replace(run, model=cast(Wrapped, run.model).named())
    for target in targets:
        for shape in _meshes(target, tensor):
            try:
                placed = place_wrapped(run, shape)
            except MeshwrightError as error:
                refused.append(error.truth)
                continue
            plan = Plan(placed, estimate_wrapped(placed, target))
            (plans if plan.estimate.fits else small).append(plan)
    if not plans:
        closest = min((p.estimate for p in small), key=lambda e: e.bytes / e.hbm_bytes, default=None)
        if closest is not None:
            truth = f"the smallest needs {format_bytes(closest.bytes)} of {format_bytes(closest.hbm_bytes)}"
        else:
            truth = f"every mesh is refused: {refused[-1] if refused else f'tensor={tensor} does not divide it'}"
        raise ConfigError(f"{run.name} on {', '.join(map(str, targets))}", truth, "more devices, or another batch")
    return sorted(plans, key=lambda p: p.estimate.seconds)[:at_most]


def _meshes(target: Target, tensor: int) -> list[MeshShape]:
    replicas, rest = divmod(target.devices, tensor)
    if rest:
        return []
    slices = target.slices if not isinstance(target.chip.interconnect, Nodes) else 1
    shapes = []
    for data in divisors(replicas):
        axis = "data" if data % slices == 0 else "fsdp"
        if (data if axis == "data" else replicas // data) % slices == 0:
            shapes.append(MeshShape(data=data, fsdp=replicas // data, tensor=tensor, slices=slices, dcn_axis=axis))
    return shapes


def price_wrapped(run: Run, target: Target) -> Plan:
    """Prices a wrapped model on its own mesh, or on `fsdp` over all devices."""
    run = dataclasses.replace(run, model=cast(Wrapped, run.model).named())
    placed = place_wrapped(run, run.mesh or MeshShape(fsdp=target.devices))
    return Plan(placed, estimate_wrapped(placed, target))


def estimate_wrapped(placed: PlacedRun, target: Target) -> Estimate:
    """Predicts a step: matmuls of the jaxpr at the chip's rates, what is kept through HBM, and the step's collectives.

    What is kept for the backward pass is written and read once; other elementwise work is taken to be fused.
    """
    run, shape, chip = placed.run, placed.shape, target.chip
    parts, microbatches = cast(Wrapped, run.model).parts, run.training.microbatches
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
    exposed, links, routes = overlapped(_movements(placed, work), mapping, target, MESHWRIGHT, room)
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


def _elements(placed: PlacedRun) -> list[tuple[str, float, tuple[str, ...], tuple[str, ...]]]:
    """Name, elements in use on a device, axes over which it is gathered, and axes over which its gradient is summed."""
    found = []
    for name, p, where in placed.leaves:
        elements = p.size / placed.shape.over(axes_of(where.in_use))
        gathered = tuple(a for a in axes_of(where.at_rest) if a not in axes_of(where.in_use))
        summed = tuple(
            a for a in BATCH_AXES if a not in axes_of(where.optimizer) and placed.shape.degrees()[a] > 1
        )  # fmt: skip
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
        result.append(
            Movement("all-reduce", ("tensor",), work.tensor_bytes, times, "forward", True, "activations")
        )  # fmt: skip
    return result


def _own_sizes(placed: PlacedRun) -> dict[str, int]:
    """Bytes of an element of each parameter as the loss gets it."""
    compute = placed.run.training.compute_dtype
    own = cast(Wrapped, placed.run.model).parts.params
    return {n: x.dtype.itemsize if compute == "float32" else jnp.dtype(compute).itemsize for n, x in own.items()}


def _memory(placed: PlacedRun, work: LossWork) -> dict[str, float]:
    """Bytes of a device by category, at the end of the forward pass and the beginning of the backward pass."""
    run, shape, training = placed.run, placed.shape, placed.run.training
    param, reduce = jnp.dtype(training.param_dtype).itemsize, jnp.dtype(training.reduce_dtype).itemsize
    sizes, parts = _own_sizes(placed), cast(Wrapped, run.model).parts
    at_rest = sum(p.size / shape.over(axes_of(where.at_rest)) for _, p, where in placed.leaves)
    batch = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(parts.source.example)) / shape.over(BATCH_AXES)
    variables = sum(x.size * x.dtype.itemsize for x in parts.variables.values())
    elements = _elements(placed)
    gathered = sum(n * sizes[name] for name, n, axes, _ in elements if axes)
    largest = max((n * reduce for _, n, axes, _ in elements if axes), default=0.0)
    return {
        "parameters": at_rest * param + variables,
        "optimizer state": float(
            optimizer_state_bytes(run.optimizer, training, placed.params, placed.placements, shape)
        ),
        "gradients": at_rest * reduce + largest,
        "gathered parameters": gathered,
        "activations": 0.0 if training.remat == "full" else work.kept_bytes,
        "batch": batch,
    }
