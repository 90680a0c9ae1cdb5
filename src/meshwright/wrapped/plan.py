"""Plans of a wrapped model: memory and time of a step by arithmetic, over the meshes of a machine.

The work of a loss is read from its jaxpr: matmuls with their sizes, what the backward pass keeps, and what is sent.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend import core

from meshwright.analysis.jaxprs import nested_jaxprs
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
from meshwright.planner.optimizer import state_bytes
from meshwright.planner.search import Plan, SearchResult, price_run
from meshwright.planner.software import Software
from meshwright.planner.traffic import Movement
from meshwright.planner.work import Matmul
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.placement import axes_of
from meshwright.wrapped.parts import WrappedParts, check_rows

_Origin = tuple[str, tuple[int | None, ...]]
"""Parameter that a value is, and the parameter's dimension of each dimension of the value; None where it is none."""


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
    matmuls, kept_bytes, tensor_bytes = _work_of_loss(parts, placed)
    matmul = bound = 0.0
    for m in matmuls:
        at_peak, moved = matmul_seconds(m, target)
        matmul += max(at_peak, moved)
        bound += moved if moved > at_peak else 0.0
    again = matmul if run.training.remat == "full" else 0.0
    passes = 4 if again else 3
    elementwise = 2.0 * kept_bytes / (chip.hbm_bandwidth * target.efficiency.hbm)
    forward, backward = matmul + elementwise / 2, 2 * matmul + elementwise / 2
    room = {"forward": forward * microbatches, "recomputation": 0.0, "backward": backward * microbatches, "step": 0.0}
    mapping = map_axes(shape, target)
    params = _params(placed)
    exposed, links, routes = overlapped(_movements(placed, params, tensor_bytes), mapping, target, software, room)
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
        memory=_memory(placed, params, kept_bytes),
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


@dataclasses.dataclass(frozen=True)
class _InUse:
    """A parameter on a device while the loss computes with it."""

    elements: float
    size: int
    """Bytes of an element as the loss gets it."""
    gathered: tuple[str, ...]
    """Axes over which it is gathered."""
    summed: tuple[str, ...]
    """Axes over which its gradient is summed."""


def _params(placed: PlacedRun) -> list[_InUse]:
    model: Any = placed.run.model
    compute, found = placed.run.training.compute_dtype, []
    for name, p, where in placed.leaves:
        elements = p.size / placed.shape.over(axes_of(where.in_use))
        gathered = tuple(a for a in axes_of(where.at_rest) if a not in axes_of(where.in_use))
        summed = tuple(a for a in BATCH_AXES if a not in axes_of(where.optimizer) and placed.shape.degrees()[a] > 1)
        dtype = model.parts.params[name].dtype if compute == "float32" else jnp.dtype(compute)
        found.append(_InUse(elements, dtype.itemsize, gathered, summed))
    return found


def _movements(placed: PlacedRun, params: list[_InUse], tensor_bytes: float) -> list[Movement]:
    """Collectives of a step: gathers and scatters over `fsdp`, sums over `data`, and activations over `tensor`."""
    training, shape = placed.run.training, placed.shape
    reduce, times = jnp.dtype(training.reduce_dtype).itemsize, float(training.microbatches)
    # XLA combines the collectives of small arrays: one for each set of axes, so that latencies are not overcounted.
    gathered_bytes: defaultdict[tuple[str, ...], float] = defaultdict(float)
    scattered_bytes, summed_bytes = gathered_bytes.copy(), gathered_bytes.copy()
    for p in params:
        if p.gathered:
            gathered_bytes[p.gathered] += p.elements * p.size
            scattered_bytes[p.gathered] += p.elements * reduce
        if p.summed:
            summed_bytes[p.summed] += p.elements / shape.over(p.gathered) * reduce
    result = [Movement("all-reduce", axes, n, 1.0, "step", False, "gradients") for axes, n in summed_bytes.items()]
    for axes, n in gathered_bytes.items():
        for during in ("forward", "backward") if training.remat == "auto" else ("forward",):
            result.append(Movement("all-gather", axes, n, times, during, False, "parameters"))
        scattered = scattered_bytes[axes]
        result.append(Movement("reduce-scatter", axes, scattered, times, "backward", False, "gradients"))
    if shape.tensor > 1:
        result.append(Movement("all-reduce", ("tensor",), tensor_bytes, times, "forward", True, "activations"))
    return result


def _memory(placed: PlacedRun, params: list[_InUse], kept_bytes: float) -> dict[str, float]:
    """Bytes of a device by category, at the end of the forward pass and the beginning of the backward pass."""
    shape, training, model = placed.shape, placed.run.training, cast(Any, placed.run.model)
    param = jnp.dtype(training.param_dtype).itemsize
    at_rest = sum(p.size / shape.over(axes_of(where.at_rest)) for _, p, where in placed.leaves)
    example, variables = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for tree in (model.parts.source.example, model.parts.variables)
    )
    return {
        "parameters": at_rest * param + variables,
        "optimizer state": float(state_bytes(placed)),
        # float32 at rest, and in the type of the reduction while they are scattered
        "gradients": at_rest * 4.0
        + max((p.elements for p in params if p.gathered), default=0.0) * jnp.dtype(training.reduce_dtype).itemsize,
        "gathered parameters": sum(p.elements * p.size for p in params if p.gathered),
        "activations": 0.0 if training.remat == "full" else kept_bytes,
        "batch": example / shape.over(BATCH_AXES),
    }


def training_flops(parts: WrappedParts) -> float:
    """Returns the model FLOPs of a step on the whole batch: three times those of the forward pass."""
    function, arguments = parts.traced(train=True)
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return 3.0 * sum(m.flops for m in _Reader(None).matmuls(jaxpr, {}, 1.0))


def _work_of_loss(parts: WrappedParts, placed: PlacedRun) -> tuple[list[Matmul], float, float]:
    """Returns the work of a microbatch on a device: forward matmuls, and bytes of activations.

    The backward pass has two matmuls of the size of each. The bytes are those that are kept for the backward pass,
    parameters excepted, and those that are summed over `tensor`. A matmul whose parameter is split over `tensor` is
    divided by its degree; all others count in full.
    """
    rows = placed.run.training.batch // (placed.shape.over(BATCH_AXES) * placed.run.training.microbatches)
    if rows < parts.source.batch_size:
        check_rows(parts, rows, rows if parts.held_out is not None else 0)
    function, arguments = parts.traced(True, rows)

    def kept(params: Any, variables: Any, batch: Any, words: Any) -> list[Any]:
        backward = jax.vjp(lambda params: function(params, variables, batch, words)[0], params)[1]
        own = {id(x) for x in jax.tree.leaves((params, batch))}
        return [x for x in jax.tree.leaves(backward) if id(x) not in own]

    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    origins: dict[Any, _Origin] = {
        variable: (name, tuple(range(parts.params[name].ndim)))
        for name, variable in zip(sorted(parts.params), jaxpr.invars, strict=False)
    }
    reader = _Reader(placed)
    matmuls = list(reader.matmuls(jaxpr, origins, 1.0))
    kept_bytes = float(sum(x.size * x.dtype.itemsize for x in jax.eval_shape(kept, *arguments)))
    return matmuls, kept_bytes, reader.tensor_bytes


@dataclasses.dataclass
class _Reader:
    """Matmuls of a jaxpr, each divided where its parameter is split over `tensor`."""

    placed: PlacedRun | None
    """Placement of the parameters; None splits nothing."""
    tensor_bytes: float = 0.0

    def matmuls(self, jaxpr: Any, origins: dict[Any, _Origin], times: float) -> Iterator[Matmul]:
        """Yields the matmuls of an open jaxpr. origins: values that are parameters.  times: executions of it."""
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            given = [origins.get(v) if isinstance(v, core.Var) else None for v in equation.invars]
            if name == "dot_general":
                yield self._product(equation, given, times)
            elif name == "conv_general_dilated":
                numbers, kernel = equation.params["dimension_numbers"], equation.invars[1].aval.shape
                depth = math.prod(kernel[d] for d in numbers.rhs_spec[1:])
                out, n = equation.outvars[0].aval.size, kernel[numbers.rhs_spec[0]]
                groups = equation.params.get("batch_group_count", 1)
                yield Matmul("convolution", out / n, depth, n, times / groups)
            elif name in ("convert_element_type", "copy", "transpose", "optimization_barrier") and given[0]:
                path, dims = given[0]
                order = equation.params.get("permutation", range(len(dims)))
                origins[equation.outvars[0]] = (path, tuple(dims[d] for d in order))
            yield from self._inside(equation, given, times)

    def _inside(self, equation: Any, given: list[_Origin | None], times: float) -> Iterator[Matmul]:
        name, params = equation.primitive.name, equation.params
        if name == "cond":
            branches = [list(self.matmuls(b.jaxpr, {}, times)) for b in params["branches"]]
            yield from max(branches, key=lambda found: sum(m.flops for m in found))
            return
        for inner, n in nested_jaxprs(equation):
            own = given[-len(inner.invars) :] if inner.invars else []
            if name == "scan":  # whose body gets rows of what is scanned over
                ranks = [len(v.aval.shape) for v in inner.invars]
                own = [g and (g[0], g[1][len(g[1]) - rank :]) for g, rank in zip(own, ranks, strict=True)]
            known = {v: g for v, g in zip(inner.invars, own, strict=False) if g is not None}
            yield from self.matmuls(inner, known, times * n)

    def _product(self, equation: Any, given: list[_Origin | None], times: float) -> Matmul:
        (contracted, (batched, _)) = (equation.params["dimension_numbers"][0], equation.params["dimension_numbers"][1])
        left, right = (v.aval for v in equation.invars)
        k = math.prod(left.shape[d] for d in contracted[0])
        groups = math.prod(left.shape[d] for d in batched)
        m, n = left.size / k / groups, right.size / k / groups
        degree = 1.0
        for side, origin in enumerate(given):
            if origin is None or self.placed is None:
                continue
            placement = self.placed.placements[origin[0]].in_use
            split = [i for i, d in enumerate(origin[1]) if d is not None and "tensor" in placement[d]]
            if split:
                degree = float(self.placed.shape.tensor)
                # Rows of a pair of matrices need a sum of the result forward, columns one of the input backward.
                by_rows = split[0] in contracted[side]
                other = equation.invars[1 - side].aval
                moved = equation.outvars[0].aval if by_rows else other
                self.tensor_bytes += times * moved.size * moved.dtype.itemsize
        return Matmul("matmul", m, int(k), max(1, round(n)), times * groups / degree)
