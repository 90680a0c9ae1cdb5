"""Checks of a function's jaxpr: grouped matmuls, products and types that cost more
than they need."""

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from xlacensus.findings import MIN_REPLICATED_BYTES, Finding
from xlacensus.formatting import format_count
from xlacensus.hlo.flops import matmul_flops
from xlacensus.hlo.loops import walk
from xlacensus.hlo.parser import Instruction, Module
from xlacensus.jaxprs import (
    all_jaxprs,
    lines_of,
    nested_jaxprs,
    product_flops,
    user_frames,
)
from xlacensus.layout_lints import padded_dims

_GROUPED = "ragged_dot_general"
_FAR_OVER = 1.5
"""FLOPs over those needed from which the grouped matmuls of a program are reported."""


@dataclasses.dataclass(frozen=True)
class GroupedProducts:
    """FLOPs of a program's grouped matmuls, in one execution on one device."""

    needed: float
    """FLOPs where each row is multiplied by the weights of its own group."""
    dense: float
    """FLOPs of the products of all groups with all rows; 0 where the backend has a kernel."""
    line: str
    """FILE:LINE of the first of those."""

    @property
    def excess(self) -> float:
        """FLOPs for rows of other groups."""
        return max(0.0, self.dense - self.needed) if self.dense else 0.0


def grouped_products(module: Module, jaxpr: Any) -> GroupedProducts:
    """Compares the grouped matmuls of a closed jaxpr with the products
    that the compiler made of them.

    TPUs run `jax.lax.ragged_dot` as a kernel that multiplies each row by the weights of its own
    group. On CPU and GPU it becomes one product of all rows with the weights of all E groups, and
    masks: E times the FLOPs. A product belongs to a grouped matmul if it has its name (GPU) or its
    source line (CPU).
    """
    if jaxpr is None:
        return GroupedProducts(0.0, 0.0, "")
    needed = 0.0
    source_lines = set[tuple[str, int]]()
    for inner, times in all_jaxprs(jaxpr.jaxpr):
        for equation in inner.eqns:
            if equation.primitive.name == _GROUPED:
                needed += times * _needed_flops(equation)
                source_lines.update(user_frames(equation)[:1])
    if not needed:
        return GroupedProducts(0.0, 0.0, "")
    dense = 0.0
    line = ""
    for context, instruction in walk(module):
        if _is_grouped_product(instruction, source_lines):
            dense += context.count * matmul_flops(instruction)
            line = line or instruction.line
    return GroupedProducts(needed, dense, line)


def _needed_flops(equation: Any) -> float:
    """Returns the FLOPs of one `ragged_dot_general` that multiplies each row by its own group.

    [M, K] x [E, K, N] -> [M, N], or [M, K] x [M, N] -> [E, K, N]: either needs 2 M K N. The three
    sizes multiply to E (M K N)^2, and the third input holds the E group sizes.
    """
    operands = equation.invars[:2]
    sizes = math.prod(v.aval.size for v in (*operands, *equation.outvars))
    groups = equation.invars[2].aval.shape[-1]
    return 2.0 * math.sqrt(sizes / groups)


def _is_grouped_product(instruction: Instruction, source_lines: set[tuple[str, int]]) -> bool:
    """Whether an instruction is a product that the compiler made of a grouped matmul."""
    if instruction.opcode not in ("dot", "convolution"):
        return False
    if _GROUPED in instruction.op_name:
        return True
    return any((frame.file, frame.line) in source_lines for frame in instruction.stack[:1])


def lint_grouped_matmuls(products: GroupedProducts) -> Iterator[Finding]:
    """Reports grouped matmuls that multiply every row by the weights of every group."""
    if products.dense > _FAR_OVER * products.needed:
        factor = f"{products.dense / products.needed:.1f} times" if products.needed else "more than"
        yield Finding(
            "experts",
            f"ragged_dot, {format_count(products.dense)} FLOPs",
            f"this backend multiplies every row by every group's weights: {factor} the "
            f"{format_count(products.needed)} FLOPs that are needed",
            "a kernel for grouped matmuls, or a capacity for each expert, which makes them one "
            "batched matmul",
            0,
            products.line,
        )


_MIN_WIDE = 0.01
"""Fraction of a function's FLOPs from which wide products are reported."""


@dataclasses.dataclass(frozen=True)
class _Site:
    equation: Any
    times: int
    widened: tuple[bool, ...]
    """For each input, whether it comes from 16 bits through elementwise operations
    in this jaxpr or its callers."""

    @property
    def line(self) -> str:
        """FILE:LINE outside of JAX that traced it."""
        return next(iter(lines_of(self.equation)), "")


def _sites(jaxpr: Any, times: int = 1, widened: frozenset[Any] = frozenset()) -> Iterator[_Site]:
    """Yields all equations of an open jaxpr.
    widened: inputs that were converted from 16 bits to float32."""
    wide = set(widened)
    for equation in jaxpr.eqns:
        inputs = tuple(not isinstance(v, core.Literal) and v in wide for v in equation.invars)
        yield _Site(equation, times, inputs)
        if _widens(equation, inputs):
            wide |= set(equation.outvars)
        if equation.primitive.name == "pallas_call":
            continue  # a kernel has its own reasons
        for nested, n in nested_jaxprs(equation):
            widened_inputs = frozenset[Any]()
            if len(nested.invars) == len(inputs):
                pairs = zip(nested.invars, inputs, strict=True)
                widened_inputs = frozenset(v for v, was_widened in pairs if was_widened)
            yield from _sites(nested, times * n, widened_inputs)


def _widens(equation: Any, inputs: tuple[bool, ...]) -> bool:
    """Whether an equation converts 16 bits to float32, or passes such a value on in its shape."""
    out: Any = equation.outvars[0].aval if equation.outvars else None
    if getattr(out, "dtype", None) != jnp.float32:
        return False
    sources = [v.aval for v in equation.invars]
    if equation.primitive.name == "convert_element_type":
        return inputs[0] or (
            jnp.issubdtype(sources[0].dtype, jnp.floating) and sources[0].dtype.itemsize <= 2
        )
    return any(w and a.shape == out.shape for w, a in zip(inputs, sources, strict=True))


def lint_source(jaxpr: Any) -> Iterator[Finding]:
    """Reports the constraints of a closed jaxpr that do not divide, float32 products
    and float64 values that leak."""
    sites = list(_sites(jaxpr.jaxpr))
    for site in sites:
        if site.equation.primitive.name == "sharding_constraint":
            aval = site.equation.outvars[0].aval
            sharding = site.equation.params["sharding"]
            if hasattr(sharding, "mesh"):
                name = f"constraint of {aval.str_short()}"
                size = aval.size * aval.dtype.itemsize
                mesh = sharding.mesh.shape
                yield from padded_dims(name, aval.shape, size, sharding.spec, mesh, site.line)
    yield from _wide_products(sites)
    yield from itertools.islice(_float64(jaxpr, sites), 1)


def _wide_products(sites: list[_Site]) -> Iterator[Finding]:
    """Reports float32 products of values that had 16 bits, in a function that has 16-bit products.

    Products of values that never had 16 bits, such as an optimizer's, and `precision=HIGHEST` are
    taken as meant.
    """
    narrow = 0.0
    wide = defaultdict[str, float](float)
    excess_bytes = Counter[str]()
    for site in sites:
        if site.equation.primitive.name != "dot_general":
            continue
        operands = [v.aval for v in site.equation.invars]
        flops = site.times * product_flops(site.equation)
        if max(a.dtype.itemsize for a in operands) <= 2:
            narrow += flops
        elif any(site.widened) and not _is_highest(site.equation.params["precision"]):
            wide[site.line] += flops
            excess_bytes[site.line] += site.times * sum(2 * a.size for a in operands)
    if not narrow:
        return
    total = narrow + sum(wide.values())
    for line, flops in wide.items():
        if flops > _MIN_WIDE * total:
            yield Finding(
                "precision",
                f"float32 product of {format_count(flops)} FLOPs",
                f"{flops / total:.0%} of the FLOPs are of float32 operands, beside "
                f"{format_count(narrow)} of 16 bits",
                "cast the operands, with preferred_element_type=float32 for the sums; or "
                "precision=HIGHEST if it is meant",
                excess_bytes[line],
                line,
            )


def _is_highest(precision: Any) -> bool:
    values = precision if isinstance(precision, tuple) else (precision,)
    return any(value not in (None, lax.Precision.DEFAULT) for value in values)


def _float64(jaxpr: Any, sites: list[_Site]) -> Iterator[Finding]:
    """Reports float64 in a function that is given none: a numpy array or a Python number
    in 64-bit mode."""
    if any(_is_float64(v) for v in jaxpr.jaxpr.invars):
        return
    for site in sites:
        wide = [v.aval for v in site.equation.outvars if _is_float64(v)]
        size = max((a.size * a.dtype.itemsize for a in wide), default=0)
        if size >= MIN_REPLICATED_BYTES and site.line:
            yield Finding(
                "precision",
                f"float64 of {size} bytes",
                "the function computes in float64, and none of its arguments is float64",
                "give constants the dtype of what they meet, such as jnp.asarray(x, y.dtype)",
                size // 2,
                site.line,
            )


def _is_float64(variable: Any) -> bool:
    return getattr(variable.aval, "dtype", None) == jnp.float64
