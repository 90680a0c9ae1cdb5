"""Which parameters a loss has a gradient of, read from its jaxpr."""

from typing import Any

import jax.numpy as jnp
from jax.extend import core

_STOPS = ("stop_gradient",)
"""Primitives that pass a value on and no gradient."""


def reached(jaxpr: Any, given: list[int]) -> list[int]:
    """Returns for each output of an open jaxpr the inputs that it has a gradient of, as a set of bits.

    given: such a set for each input.  A gradient passes through floating-point values alone. Of loops without a known
    body every output depends on every input, so a parameter may be named that has none.
    """
    known: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
    for equation in jaxpr.eqns:
        inputs = [known.get(v, 0) if isinstance(v, core.Var) else 0 for v in equation.invars]
        outputs = [0] * len(equation.outvars) if equation.primitive.name in _STOPS else _through(equation, inputs)
        for variable, bits in zip(equation.outvars, outputs, strict=True):
            known[variable] = bits if jnp.issubdtype(variable.aval.dtype, jnp.inexact) else 0
    return [known.get(v, 0) if isinstance(v, core.Var) else 0 for v in jaxpr.outvars]


def _through(equation: Any, inputs: list[int]) -> list[int]:
    every = 0
    for bits in inputs:
        every |= bits
    name, count = equation.primitive.name, len(equation.outvars)
    if not every:
        return [0] * count
    if name == "cond":
        branches = [reached(branch.jaxpr, inputs[1:]) for branch in equation.params["branches"]]
        return [_union(bits) for bits in zip(*branches, strict=True)]
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    if not isinstance(inner, core.Jaxpr) or len(inner.invars) != len(inputs) or len(inner.outvars) != count:
        return [every] * count
    if name != "scan":
        return reached(inner, inputs)
    consts, carried = scan_parts(equation, inner)
    while True:
        outputs = reached(inner, inputs)
        carry = [a | b for a, b in zip(inputs[consts : consts + carried], outputs, strict=False)]
        if carry == inputs[consts : consts + carried]:
            return outputs
        inputs = [*inputs[:consts], *carry, *inputs[consts + carried :]]


def scan_parts(equation: Any, body: Any) -> tuple[int, int]:
    """Returns how many inputs of a scan are constants, and how many are carried; the rest is scanned over."""
    # What is carried has the same shape outside as in the body, and what is scanned over one dimension more.
    carried = sum(_rank(a) == _rank(b) for a, b in zip(equation.outvars, body.outvars, strict=True))
    scanned = sum(_rank(a) != _rank(b) for a, b in zip(equation.invars, body.invars, strict=True))
    return len(equation.invars) - carried - scanned, carried


def _rank(variable: Any) -> int:
    return len(variable.aval.shape)


def _union(sets: tuple[int, ...]) -> int:
    total = 0
    for bits in sets:
        total |= bits
    return total
