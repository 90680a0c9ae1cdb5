"""Findings in a traced function: constraints that do not divide, and values wider than the rest of it."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from meshwright.analysis.jaxpr_collectives import user_frames
from meshwright.analysis.lint import MIN_REPLICATED_BYTES, Finding
from meshwright.formatting import format_count

_MIN_FLOPS = 0.01
"""Fraction of a function's FLOPs from which wide products are reported."""
_MAX_PADDING = 0.1
"""Fraction of padding from which a constraint is reported."""


@dataclasses.dataclass(frozen=True)
class _Site:
    """One equation, with the executions of the loops around it."""

    equation: Any
    times: int
    widened: tuple[bool, ...]
    """For each input, whether it comes from 16 bits through elementwise operations in this jaxpr or its callers."""

    @property
    def line(self) -> str:
        """FILE:LINE outside of JAX that traced it."""
        frames = user_frames(self.equation)
        return f"{Path(frames[0][0]).name}:{frames[0][1]}" if frames else ""


def _sites(jaxpr: Any, times: int = 1, widened: frozenset[Any] = frozenset()) -> Iterator[_Site]:
    """Yields all equations of an open jaxpr. widened: inputs that were converted from 16 bits to float32."""
    wide = set(widened)
    for equation in jaxpr.eqns:
        inputs = tuple(not isinstance(v, core.Literal) and v in wide for v in equation.invars)
        yield _Site(equation, times, inputs)
        if _widens(equation, inputs):
            wide |= set(equation.outvars)
        if equation.primitive.name == "pallas_call":
            continue  # a kernel has its own reasons
        inner = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for value in itertools.chain.from_iterable(
            v if isinstance(v, (tuple, list)) else (v,) for v in equation.params.values()
        ):
            nested = getattr(value, "jaxpr", value)
            if isinstance(nested, core.Jaxpr):
                same = len(nested.invars) == len(inputs)
                given = frozenset(v for v, w in zip(nested.invars, inputs, strict=True) if w) if same else frozenset()
                yield from _sites(nested, inner, given)


def _widens(equation: Any, inputs: tuple[bool, ...]) -> bool:
    """Whether an equation converts 16 bits to float32, or passes such a value on in its shape."""
    out: Any = equation.outvars[0].aval if equation.outvars else None
    if getattr(out, "dtype", None) != jnp.float32:
        return False
    sources = [v.aval for v in equation.invars]
    if equation.primitive.name == "convert_element_type":
        return inputs[0] or (jnp.issubdtype(sources[0].dtype, jnp.floating) and sources[0].dtype.itemsize <= 2)
    return any(w and a.shape == out.shape for w, a in zip(inputs, sources, strict=True))


def lint_source(jaxpr: Any) -> list[Finding]:
    """Reports the constraints of a closed jaxpr that do not divide, float32 products and float64 values that leak."""
    sites = list(_sites(jaxpr.jaxpr))
    return [*_uneven_constraints(sites), *_wide_products(sites), *_float64(jaxpr, sites)]


def _uneven_constraints(sites: list[_Site]) -> list[Finding]:
    findings: list[Finding] = []
    for site in sites:
        if site.equation.primitive.name != "sharding_constraint":
            continue
        aval, sharding = site.equation.outvars[0].aval, site.equation.params["sharding"]
        mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", ())
        for dim, axes in enumerate(spec):
            if mesh is None or not isinstance(axes, (str, tuple)):
                continue
            degree = math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes))
            n = aval.shape[dim]
            padded = -(-n // degree) * degree
            if n and padded / n - 1 > _MAX_PADDING:
                wasted = (padded - n) * aval.size * aval.dtype.itemsize // n // degree
                reason = f"dimension {dim} of {n} over {degree} is padded to {padded}: {padded / n - 1:.0%} padding"
                fix = f"a dimension of {n // degree * degree or degree} or {padded}, or another axis"
                findings.append(Finding("padding", f"constraint of {aval.str_short()}", reason, fix, wasted, site.line))
    return findings


def product_flops(equation: Any) -> float:
    """Returns the FLOPs of a `dot_general`: 2 per multiply-add."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval
    return 2.0 * equation.outvars[0].aval.size * math.prod(left.shape[d] for d in contracted)


def _wide_products(sites: list[_Site]) -> list[Finding]:
    """Reports float32 products of values that had 16 bits, beside products of 16 bits.

    Products of values that never had 16 bits, such as an optimizer's, and `precision=HIGHEST` are taken as meant.
    """
    narrow, wide = 0.0, dict[str, float]()
    excess = dict[str, int]()
    for site in sites:
        if site.equation.primitive.name != "dot_general":
            continue
        operands = [v.aval for v in site.equation.invars]
        flops, sizes = site.times * product_flops(site.equation), {a.dtype.itemsize for a in operands}
        if max(sizes) <= 2:
            narrow += flops
        elif any(site.widened) and not _is_highest(site.equation.params["precision"]):
            wide[site.line] = wide.get(site.line, 0.0) + flops
            excess[site.line] = excess.get(site.line, 0) + site.times * sum(2 * a.size for a in operands)
    total = narrow + sum(wide.values())
    return [
        Finding(
            "precision",
            f"float32 product of {format_count(flops)} FLOPs",
            f"{flops / total:.0%} of the FLOPs are of float32 operands, beside {format_count(narrow)} of 16 bits",
            "cast the operands, with preferred_element_type=float32 for the sums; or precision=HIGHEST if it is meant",
            excess[line],
            line,
        )
        for line, flops in wide.items()
        if narrow and flops > _MIN_FLOPS * total
    ]


def _is_highest(precision: Any) -> bool:
    values = precision if isinstance(precision, tuple) else (precision,)
    return any(value not in (None, lax.Precision.DEFAULT) for value in values)


def _float64(jaxpr: Any, sites: list[_Site]) -> list[Finding]:
    """Reports float64 in a function that is given none: a numpy array or a Python number in 64-bit mode."""
    if any(getattr(v.aval, "dtype", None) == jnp.float64 for v in jaxpr.jaxpr.invars):
        return []
    for site in sites:
        avals = [v.aval for v in site.equation.outvars if getattr(v.aval, "dtype", None) == jnp.float64]
        size = max((a.size * a.dtype.itemsize for a in avals), default=0)
        if size >= MIN_REPLICATED_BYTES and site.line:
            return [
                Finding(
                    "precision",
                    f"float64 of {size} bytes",
                    "the function computes in float64, and none of its arguments is float64",
                    "give constants the dtype of what they meet, such as jnp.asarray(x, y.dtype)",
                    size // 2,
                    site.line,
                )
            ]
    return []
