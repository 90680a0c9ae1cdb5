"""Collectives written in a function, read from its jaxpr: those that the compiled program is expected to contain."""

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import jax
from jax.extend import core

_KIND_OF_PRIMITIVE = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}


CONSTRAINED = "constrained"
"""Kind of a product or sum whose result has a sharding constraint: partial results are summed where it stands."""
_SUMS = ("dot_general", "reduce_sum", "reduce_max", "conv_general_dilated")
_MAX_STEPS = 6
"""Operations between a product and the constraint on its result: a bias, an activation function, a residual."""


@dataclasses.dataclass(frozen=True)
class JaxprCollective:
    """Collectives of one kind over one set of mesh axes, written at one place."""

    kind: str
    """HLO name of the collective; `reshard` for `jax.sharding.reshard`, which may become any; CONSTRAINED."""
    axes: tuple[str, ...]
    """Mesh axes with more than one device, in the mesh's order; all of them for a reshard."""
    count: int
    """Executions; the lengths of scans are multiplied."""
    payload: int
    """Bytes of all executions, counted as in the ledger."""
    lines: frozenset[str] = frozenset()
    """FILE:LINE of every frame outside of JAX that traced it."""


def read_jaxpr_collectives(jaxpr: Any, mesh: dict[str, int]) -> list[JaxprCollective]:
    """Lists the collective primitives of a closed jaxpr by kind, axes and place; axes of degree 1 are left out."""
    sums: dict[tuple[str, tuple[str, ...], frozenset[str]], Counter[str]] = {}
    _read(jaxpr.jaxpr, 1, mesh, sums)
    return [JaxprCollective(kind, axes, c["count"], c["payload"], lines) for (kind, axes, lines), c in sums.items()]


_JAX = str(Path(jax.__file__).parent)


def user_frames(equation: Any) -> list[tuple[str, int]]:
    """Lists file and line of the frames outside of JAX that traced an equation, innermost first."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return [(f.file_name, f.line_num) for f in frames if not f.file_name.startswith(_JAX)]


def _lines(equation: Any) -> frozenset[str]:
    return frozenset(f"{Path(file).name}:{line}" for file, line in user_frames(equation))


def _constrained_lines(jaxpr: Any) -> frozenset[str]:
    """Returns the lines of products and sums of an open jaxpr whose results have a sharding constraint."""
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    found: set[str] = set()
    pending = [(v, 0) for e in jaxpr.eqns if e.primitive.name == "sharding_constraint" for v in e.invars]
    seen: set[Any] = set()
    while pending:
        variable, steps = pending.pop()
        maker = None if isinstance(variable, core.Literal) or variable in seen else makers.get(variable)
        if maker is None:
            continue
        seen.add(variable)
        if maker.primitive.name in _SUMS:
            found |= _lines(maker)
        elif steps < _MAX_STEPS and maker.primitive.name != "sharding_constraint":
            pending += [(v, steps + 1) for v in maker.invars]
    return frozenset(found)


def _read(jaxpr: Any, count: int, mesh: dict[str, int], sums: dict[Any, Counter[str]]) -> None:
    constrained = _constrained_lines(jaxpr)
    if constrained:
        everywhere = tuple(a for a in mesh if mesh[a] > 1)
        sums.setdefault((CONSTRAINED, everywhere, constrained), Counter())["count"] += count
    for equation in jaxpr.eqns:
        lines = _lines(equation)
        if equation.primitive.name == "reshard":
            sums.setdefault(("reshard", tuple(a for a in mesh if mesh[a] > 1), lines), Counter())["count"] += count
        kind = _KIND_OF_PRIMITIVE.get(equation.primitive.name)
        if kind is not None:
            names = equation.params.get("axes") or equation.params.get("axis_name") or ()
            names = names if isinstance(names, tuple) else (names,)
            axes = tuple(axis for axis in mesh if axis in names and mesh[axis] > 1)
            if not axes:
                continue
            size = math.prod(mesh[axis] for axis in axes)
            operands = equation.invars[:1] if kind == "ragged-all-to-all" else equation.invars
            payload = sum(v.aval.size * v.aval.dtype.itemsize for v in operands if hasattr(v.aval, "dtype"))
            entry = sums.setdefault((kind, axes, lines), Counter())
            entry["count"] += count
            entry["payload"] += count * payload * (size if kind == "all-gather" else 1)
        inner = count * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for value in itertools.chain.from_iterable(
            v if isinstance(v, (tuple, list)) else (v,) for v in equation.params.values()
        ):
            # A closed jaxpr wraps an open one.
            nested = getattr(value, "jaxpr", value)
            if isinstance(nested, core.Jaxpr):
                _read(nested, inner, mesh, sums)
