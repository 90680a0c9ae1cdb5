"""Grouped matmuls (`jax.lax.ragged_dot`) that a backend turns into every expert times every row.

TPUs run them as kernels that multiply each row by the weights of its own group. On CPU and GPU they become one product
of all rows with the weights of all E groups, and masks: E times the FLOPs.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.extend import core

from meshwright.analysis.lint import Finding
from meshwright.formatting import format_count
from meshwright.hlo.flops import matmul_flops
from meshwright.hlo.loops import walk
from meshwright.hlo.parser import Module

_PRIMITIVE = "ragged_dot_general"
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
    """Compares the grouped matmuls that a closed jaxpr contains with the products that the compiler made of them.

    A product belongs to a grouped matmul if it has its name (GPU) or its source line (CPU).
    """
    written = list(_grouped_matmuls(jaxpr.jaxpr, 1))
    if not written:
        return GroupedProducts(0.0, 0.0, "")
    lines = {line for line, _ in written}
    dense, first = 0.0, ""
    for context in walk(module):
        for instruction in context.computation.instructions.values():
            if instruction.opcode not in ("dot", "convolution"):
                continue
            stack = module.source_stack(instruction)
            place = (stack[0].file, stack[0].line) if stack else None
            if place in lines or _PRIMITIVE in instruction.op_name:
                dense += context.count * matmul_flops(context.computation, instruction)
                first = first or (stack[0].location if stack else "")
    return GroupedProducts(sum(flops for _, flops in written), dense, first)


_Line = tuple[str, int]
"""File and line."""


def _grouped_matmuls(jaxpr: Any, times: int) -> Iterator[tuple[_Line, float]]:
    """Yields source line and FLOPs, 2 M K N, of each grouped matmul of an open jaxpr. times: its executions."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == _PRIMITIVE:
            # [M, K] x [E, K, N] -> [M, N], or [M, K] x [M, N] -> [E, K, N]: the sizes multiply to E (M K N)^2.
            sizes = math.prod(v.aval.size for v in (*equation.invars[:2], *equation.outvars))
            yield _user_line(equation), times * 2.0 * math.sqrt(sizes / equation.invars[2].aval.shape[-1])
        inner = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for value in itertools.chain.from_iterable(
            v if isinstance(v, (tuple, list)) else (v,) for v in equation.params.values()
        ):
            nested = getattr(value, "jaxpr", value)
            if isinstance(nested, core.Jaxpr):
                yield from _grouped_matmuls(nested, inner)


_JAX = str(Path(jax.__file__).parent)


def _user_line(equation: Any) -> _Line:
    """Returns the innermost line outside of JAX that traced an equation, as the compiled program records it."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return next(((f.file_name, f.line_num) for f in frames if not f.file_name.startswith(_JAX)), ("", 0))


def lint_grouped_matmuls(products: GroupedProducts) -> list[Finding]:
    """Reports grouped matmuls that multiply every row by the weights of every group."""
    if products.dense <= _FAR_OVER * products.needed:
        return []
    factor = f"{products.dense / products.needed:.1f} times" if products.needed else "more than"
    return [
        Finding(
            "experts",
            f"ragged_dot, {format_count(products.dense)} FLOPs",
            f"this backend multiplies every row by every group's weights: {factor} the "
            f"{format_count(products.needed)} FLOPs that are needed",
            "a kernel for grouped matmuls, or a capacity for each expert, which makes them one batched matmul",
            0,
            products.line,
        )
    ]
