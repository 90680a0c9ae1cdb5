"""How a loss grows with the number of examples, read from its jaxpr at two batch sizes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from meshwright.wrapped.reach import scan_parts

Degree = float | None
"""Power of the number of examples that a value grows by, where every example is there more often; None: not known."""
_ZERO = -math.inf
"""Degree of zeros, which stay zero in products and change no sum."""

_LINEAR = frozenset({
    "abs", "broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "expand_dims", "gather", "name", "neg",
    "optimization_barrier", "psum", "psum_invariant", "pvary", "reduce_max", "reduce_min", "reduce_precision",
    "reshape", "rev", "sharding_constraint", "slice", "squeeze", "stop_gradient", "transpose",
})  # fmt: skip
"""Primitives whose result grows as their first operand does."""
_SUMS = frozenset({"add", "add_any", "sub", "max", "min", "concatenate", "select_n"})
"""Primitives whose result grows as the fastest of their operands does."""


def growth(first: Any, second: Any, given: Sequence[Degree]) -> list[Degree]:
    """Returns the degree of each output of a jaxpr.

    first, second: the same function, traced with a batch and with one of twice the size.  given: of each input.
    Products, quotients, sums and the functions that programs are nested in are followed; of what is not known, such as
    the logarithm of a sum over the examples, no degree is known. A mean has 0, and a sum over the examples 1.
    """
    (first, consts), (second, more) = _opened(first), _opened(second)
    known: dict[Any, Degree] = dict(zip(first.invars, given, strict=True))
    if len(first.eqns) != len(second.eqns) or len(consts) != len(more):
        return [None] * len(first.outvars)
    known |= {v: _constant(a, b) for v, a, b in zip(first.constvars, consts, more, strict=True)}

    def degree(one: Any, other: Any) -> Degree:
        if isinstance(one, core.Literal):
            return _constant(one.val, other.val) if isinstance(other, core.Literal) else None
        return known.get(one)

    for one, other in zip(first.eqns, second.eqns, strict=True):
        if one.primitive is not other.primitive or len(one.invars) != len(other.invars):
            return [None] * len(first.outvars)
        degrees = [degree(a, b) for a, b in zip(one.invars, other.invars, strict=True)]
        known |= dict(zip(one.outvars, _through(one, other, degrees), strict=True))
    return [degree(a, b) for a, b in zip(first.outvars, second.outvars, strict=True)]


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns an open jaxpr and its constants; of one that was open already they are not known."""
    if hasattr(jaxpr, "consts"):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, [None] * len(jaxpr.constvars)


def _constant(first: Any, second: Any) -> Degree:
    if first is None or np.shape(first) != np.shape(second):
        return None
    if np.dtype(getattr(first, "dtype", type(first))).kind not in "biuf":
        return 0
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if not one.any() and not other.any():
        return _ZERO
    for degree in (0, 1, -1):
        if np.array_equal(one * 2.0**degree, other, equal_nan=True):
            return degree
    return None


def _through(one: Any, other: Any, degrees: list[Degree]) -> list[Degree]:
    """Returns the degrees of an equation's outputs. one, other: the equation at both batch sizes."""
    name, count = one.primitive.name, len(one.outvars)
    scaled = [_scaled(a, b) for a, b in zip(one.invars, other.invars, strict=True)]
    inner, its = (_body(equation) for equation in (one, other))
    if inner is not None:
        if name == "scan":
            return _scan(one, other, inner, its, degrees)
        bodies = len(_opened(inner)[0].invars), len(_opened(inner)[0].outvars)
        return growth(inner, its, degrees) if bodies == (len(degrees), count) else [None] * count
    found: Degree = None
    if name in _LINEAR:
        found = degrees[0]
    elif name in _SUMS:
        taken = degrees[1:] if name == "select_n" else degrees
        found = None if None in taken else max(d for d in taken if d is not None)
    elif None in degrees:
        found = None
    elif name == "reduce_sum":
        found = _sum(degrees) + len(scaled[0] & set(one.params["axes"]))
    elif name == "mul":
        found = _sum(degrees)
    elif name == "div":
        found = _sum(degrees[:1]) - _sum(degrees[1:])
    elif name == "square" or (name == "integer_pow" and one.params["y"] > 0):
        found = _sum(degrees) * one.params.get("y", 2)
    elif name == "dot_general":
        (contracted, _), _ = one.params["dimension_numbers"]
        found = _sum(degrees) + len(scaled[0] & set(contracted))
    elif set(degrees) <= {0, _ZERO} and name != "iota":
        lost = max(map(len, scaled), default=0) > len(_scaled(one.outvars[0], other.outvars[0]))
        found = None if lost else 0
    return [found] * count


def _scan(one: Any, other: Any, inner: Any, its: Any, degrees: list[Degree]) -> list[Degree]:
    """Returns the degrees of a scan's outputs; those of a carry over the examples are not known, unless it is kept."""
    consts, carries = scan_parts(one, _opened(inner)[0])
    kept = one.params["length"] == other.params["length"]
    same = degrees[consts : consts + carries] if kept else [None] * carries
    while True:
        after = growth(inner, its, [*degrees[:consts], *same, *degrees[consts + carries :]])
        # Zeros become what is added to them; what else grows in the loop is not known.
        grown = [a if b in (_ZERO, a) else None for a, b in zip(after, same, strict=False)]
        if grown == same:
            break
        same = grown
    return [*same, *after[carries:]]


def _body(equation: Any) -> Any:
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def _scaled(one: Any, other: Any) -> set[int]:
    """Returns the dimensions of an array that have twice the size at twice the batch."""
    shapes = zip(one.aval.shape, other.aval.shape, strict=True)
    return {i for i, (a, b) in enumerate(shapes) if a and b == 2 * a}


def _sum(degrees: Sequence[Degree]) -> float:
    return sum(d for d in degrees if d is not None)
