"""Contents of a function's jaxpr before it is compiled: equations
with their lines, matrix products, collectives."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend import core

from xlacensus.hlo.collectives import axes_of_groups

_JAX = str(Path(jax.__file__).parent)


def nested_jaxprs(equation: Any) -> Iterator[tuple[Any, int]]:
    """Yields the open jaxprs inside an equation, each with its executions: the length
    of a scan, otherwise 1."""
    times = equation.params["length"] if equation.primitive.name == "scan" else 1
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(part, "jaxpr", part)  # a closed jaxpr wraps an open one
            if isinstance(inner, core.Jaxpr):
                yield inner, times


def all_jaxprs(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields an open jaxpr and all those inside it, each with its executions;
    loops other than scans count once."""
    yield jaxpr, times
    for equation in jaxpr.eqns:
        for inner, n in nested_jaxprs(equation):
            yield from all_jaxprs(inner, times * n)


Origin = tuple[str, tuple[int, ...]]
"""Array that a value is, in the same or another form,
and the array's dimension of each dimension of the value."""
_VIEWS = (
    "convert_element_type",
    "copy",
    "transpose",
    "optimization_barrier",
    "slice",
    "dynamic_slice",
    "squeeze",
)
"""Operations that make of an array a part of it, or the same in another form."""


def uses(
    jaxpr: Any, origins: dict[Any, Origin], times: float = 1.0
) -> Iterator[tuple[Any, list[Origin | None], float]]:
    """Yields what computes in an open jaxpr and in those inside it.

    Each is an equation, the origin of each of its operands, and its executions.
    origins: variables that are arrays by name. A scan's body gets the rows of what it scans over;
    branches of a conditional count equally; loops of unknown length count once.
    """
    origins = dict(origins)
    for equation in jaxpr.eqns:
        operands = [origins.get(v) if isinstance(v, core.Var) else None for v in equation.invars]
        inside = list(nested_jaxprs(equation))
        is_view = equation.primitive.name in _VIEWS
        if is_view and operands and operands[0] is not None:
            origins[equation.outvars[0]] = _origin_of_view(equation, operands[0])
        elif not inside:
            yield equation, operands, times
        branches = len(inside) if equation.primitive.name == "cond" else 1
        for inner, n in inside:
            inner_origins = _origins_inside(inner, operands)
            yield from uses(inner, inner_origins, times * n / branches)


def _origin_of_view(equation: Any, source: Origin) -> Origin:
    """Returns the origin of a view: the same array, its dimensions permuted or some removed."""
    path, dims = source
    order: Sequence[int] = range(len(dims))
    if "permutation" in equation.params:
        order = equation.params["permutation"]
    elif equation.primitive.name == "squeeze":
        removed = equation.params["dimensions"]
        order = [dim for dim in order if dim not in removed]
    return path, tuple(dims[d] for d in order)


def _origins_inside(inner: Any, operands: list[Origin | None]) -> dict[Any, Origin]:
    """Returns the origins of a nested jaxpr's inputs, which are the last operands of its equation.

    An input with fewer dimensions is a row of its operand: the leading dimensions are scanned over.
    """
    if not inner.invars:
        return {}
    origins: dict[Any, Origin] = {}
    for variable, origin in zip(inner.invars, operands[-len(inner.invars) :], strict=False):
        if origin is not None:
            path, dims = origin
            origins[variable] = (path, dims[len(dims) - variable.aval.ndim :])
    return origins


def user_frames(equation: Any) -> list[tuple[str, int]]:
    """Lists file and line of the frames outside of JAX that traced an equation, innermost first."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return [(f.file_name, f.line_num) for f in frames if not f.file_name.startswith(_JAX)]


def lines_of(equation: Any) -> list[str]:
    """Lists FILE:LINE of the frames outside of JAX that traced an equation, innermost first."""
    return [f"{Path(file).name}:{line}" for file, line in user_frames(equation)]


def product_flops(equation: Any) -> float:
    """Returns the FLOPs of a `dot_general`: 2 per multiply-add."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval
    return 2.0 * equation.outvars[0].aval.size * math.prod(left.shape[d] for d in contracted)


_UNKNOWN_PRODUCTS = frozenset(
    {
        "shard_map",
        "pallas_call",
        "ragged_dot_general",
        "conv_general_dilated",
        "xla_pmap",
        "custom_call",
    }
)


def products_needed(jaxpr: Any) -> float | None:
    """Sums the FLOPs of the products of an open jaxpr on all devices; None if they are not known.

    They are not known of a function with products in loops of unknown length, or with `shard_map`,
    whose shapes are those of one device. Of a conditional the branch with the most counts.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _UNKNOWN_PRODUCTS:
            return None
        if name == "dot_general":
            total += product_flops(equation)
        parts: list[float] = []
        for inner, times in nested_jaxprs(equation):
            part = products_needed(inner)
            if part is None:
                return None
            parts.append(times * part)
        if name == "while" and any(parts):
            return None
        total += max(parts, default=0.0) if name == "cond" else sum(parts)
    return total


_PRIMITIVES = {
    "all-reduce": ("psum", "psum_invariant", "pmax", "pmin"),
    "all-gather": ("all_gather", "all_gather_invariant", "all_gather_reduced"),
    "reduce-scatter": ("reduce_scatter", "psum_scatter", "unreduced_reduce_scatter"),
    "all-to-all": ("all_to_all",),
    "ragged-all-to-all": ("ragged_all_to_all",),
    "collective-permute": ("ppermute",),
    "collective-broadcast": ("pbroadcast",),
}
_KIND_OF_PRIMITIVE = {
    primitive: kind for kind, primitives in _PRIMITIVES.items() for primitive in primitives
}
CONSTRAINED = "constrained"
"""Kind of a product or sum whose result has a sharding constraint: partial results are summed
where it stands."""
_SUMS = ("dot_general", "reduce_sum", "reduce_max", "conv_general_dilated")
_MAX_STEPS = 6
"""Operations between a product and the constraint on its result: a bias, an activation function,
a residual."""


@dataclasses.dataclass(frozen=True)
class JaxprCollective:
    """Collectives of one kind over one set of mesh axes, written at one place."""

    kind: str
    """HLO name of the collective;
    `reshard` for `jax.sharding.reshard`, which may become any; CONSTRAINED."""
    axes: tuple[str, ...]
    """Mesh axes with more than one device, in the mesh's order, or part of one;
    all of them for a reshard."""
    count: int
    """Executions; the lengths of scans are multiplied."""
    payload: int
    """Bytes of all executions, counted as in the ledger."""
    lines: frozenset[str] = frozenset()
    """FILE:LINE of every frame outside of JAX that traced it."""


def read_jaxpr_collectives(jaxpr: Any, mesh: dict[str, int]) -> list[JaxprCollective]:
    """Lists the collective primitives of a closed jaxpr by kind, axes and line.

    Axes of degree 1 are left out.
    """
    sums: dict[tuple[str, tuple[str, ...], frozenset[str]], Counter[str]] = {}
    for inner, count in all_jaxprs(jaxpr.jaxpr):
        for found in _collectives_of(inner, mesh):
            key = (found.kind, found.axes, found.lines)
            total = sums.setdefault(key, Counter())
            total.update(count=count, payload=count * found.payload)
    return [
        JaxprCollective(kind, axes, total["count"], total["payload"], lines)
        for (kind, axes, lines), total in sums.items()
    ]


def _collectives_of(jaxpr: Any, mesh: dict[str, int]) -> Iterator[JaxprCollective]:
    """Yields each collective of an open jaxpr, executed once,
    without those of the jaxprs inside."""
    everywhere = tuple(axis for axis in mesh if mesh[axis] > 1)
    constrained = _constrained_lines(jaxpr)
    if constrained:
        yield JaxprCollective(CONSTRAINED, everywhere, 1, 0, constrained)
    for equation in jaxpr.eqns:
        lines = frozenset(lines_of(equation))
        if equation.primitive.name == "reshard":
            yield JaxprCollective("reshard", everywhere, 1, 0, lines)
        kind = _KIND_OF_PRIMITIVE.get(equation.primitive.name)
        axes = _axes_of(equation, everywhere)
        if kind is None or not axes:
            continue
        degree = math.prod(mesh[axis] for axis in axes)
        groups = equation.params.get("axis_index_groups")
        if groups is not None:
            degree = len(groups[0])
            group_mesh = {axis: mesh[axis] for axis in axes}
            axes = axes_of_groups(tuple(map(tuple, groups)), group_mesh) or axes
        payload = _operand_bytes(equation, kind)
        if kind == "all-gather":
            payload *= degree
        yield JaxprCollective(kind, axes, 1, payload, lines)


def _axes_of(equation: Any, everywhere: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that a collective names, of those with more than one device."""
    names = equation.params.get("axes") or equation.params.get("axis_name") or ()
    if not isinstance(names, tuple):
        names = (names,)
    return tuple(axis for axis in everywhere if axis in names)


def _operand_bytes(equation: Any, kind: str) -> int:
    """Returns the bytes that a device passes to a collective; offsets and sizes do not count."""
    operands = equation.invars
    if kind == "ragged-all-to-all":
        operands = operands[:1]
    avals = [v.aval for v in operands if hasattr(v.aval, "dtype")]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def _constrained_lines(jaxpr: Any) -> frozenset[str]:
    """Returns the lines of products and sums of an open jaxpr
    whose results have a sharding constraint."""
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    constraints = [e for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    pending = [(variable, 0) for equation in constraints for variable in equation.invars]
    found: set[str] = set()
    seen: set[Any] = set()
    while pending:
        variable, steps = pending.pop()
        if isinstance(variable, core.Literal) or variable in seen or variable not in makers:
            continue
        seen.add(variable)
        maker = makers[variable]
        if maker.primitive.name in _SUMS:
            found.update(lines_of(maker))
        elif steps < _MAX_STEPS and maker.primitive.name != "sharding_constraint":
            pending += [(v, steps + 1) for v in maker.invars]
    return frozenset(found)
