"""FLOPs of a compiled program, counted from its matrix products and those of its kernels."""

import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np

from meshwright.hlo.kernels import ALL_ROWS, Rate, Skipped, computed_flops, is_call, kernel_work, rate_of
from meshwright.hlo.loops import ExecutionContext, walk
from meshwright.hlo.parser import Array, Computation, Instruction, Module
from meshwright.hlo.scopes import Phase, phase_of, scopes_of


@dataclasses.dataclass(frozen=True)
class CompiledMatmul:
    """Matrix products of one named scope in one phase of the step, on one device."""

    phase: Phase
    """forward, recomputed, backward or update."""
    module: str
    """Outermost named scope; empty if there is none."""
    flops: float


@dataclasses.dataclass(frozen=True)
class _Product:
    """Matrix products of one instruction at one place of the call tree."""

    context: ExecutionContext
    instruction: Instruction
    flops: float
    """FLOPs of one execution."""
    rate: Rate


def _products(module: Module, skipped: Skipped) -> Iterator[_Product]:
    """Yields every `dot`, `convolution` and custom call with FLOPs."""
    for context in walk(module):
        computation = context.computation
        for instruction in computation.instructions.values():
            if instruction.opcode in ("dot", "convolution"):
                operands = [shape for shape in computation.operand_shapes(instruction)[:2] if isinstance(shape, Array)]
                yield _Product(context, instruction, matmul_flops(computation, instruction), rate_of(operands))
            elif is_call(instruction, module):
                work = kernel_work(computation, instruction)
                if work.flops:
                    yield _Product(context, instruction, computed_flops(work, instruction, skipped), work.rate)


def read_matmuls(module: Module, skipped: Skipped = ALL_ROWS) -> list[CompiledMatmul]:
    """Counts the FLOPs of every `dot`, `convolution` and kernel: 2 per multiply-add, times the trip counts of loops.

    A program without a backward pass is one forward pass.  skipped: what kernels leave out of their operands.
    """
    totals: Counter[tuple[Phase, str]] = Counter()
    for product in _products(module, skipped):
        names = [product.instruction.op_name, *(i.op_name for _, i in reversed(product.context.callers))]
        name = next((n for n in names if n), "")
        scopes = scopes_of(name, module.branches)
        totals[phase_of(name, module.branches), scopes[0] if scopes else ""] += int(
            product.flops * product.context.count
        )
    if not any(phase == "backward" for phase, _ in totals):
        return [CompiledMatmul("forward", scope, float(n)) for (_, scope), n in totals.items()]
    return [CompiledMatmul(phase, scope, float(n)) for (phase, scope), n in totals.items()]


def least_flops(module: Module, skipped: Skipped = ALL_ROWS) -> dict[Rate, float]:
    """Returns the FLOPs that a step cannot avoid, by the peak they run at; branches that may not be taken are left out.

    skipped: what kernels leave out of their operands.
    """
    totals: Counter[Rate] = Counter()
    for product in _products(module, skipped):
        if not product.context.conditional:
            totals[product.rate] += int(product.flops * product.context.count)
    return {rate: float(n) for rate, n in totals.items()}


def unpriced_kernels(module: Module) -> dict[str, int]:
    """Returns the executions of each custom call whose FLOPs are not known, by its name."""
    counts: Counter[str] = Counter()
    for context in walk(module):
        for instruction in context.computation.instructions.values():
            if is_call(instruction, module):
                work = kernel_work(context.computation, instruction)
                if work.kind == "unknown":
                    counts[work.name] += context.count
    return dict(counts)


def matmul_flops(computation: Computation, instruction: Instruction) -> float:
    """Counts the FLOPs of one execution of a `dot` or `convolution`."""
    left, right = (computation.instructions[name].shape for name in instruction.operands[:2])
    out = instruction.shape
    if not (isinstance(left, Array) and isinstance(right, Array) and isinstance(out, Array)):
        return 0.0
    if instruction.opcode == "dot":
        contracted = [int(d) for d in instruction.attributes["lhs_contracting_dims"].strip("{}").split(",") if d]
        inner = 1
        for d in contracted:
            inner *= left.dims[d]
        return 2.0 * out.elements * inner
    labels, _, result = instruction.attributes["dim_labels"].partition("->")
    lhs, rhs = labels.split("_")
    flops = 2.0 * out.dims[result.index("b")] * out.dims[result.index("f")] * right.dims[rhs.index("i")]
    for label in filter(str.isdigit, lhs):
        flops *= _taps(
            _window(instruction, int(label)),
            left.dims[lhs.index(label)],
            right.dims[rhs.index(label)],
            out.dims[result.index(label)],
        )
    return flops


def _window(instruction: Instruction, spatial: int) -> dict[str, tuple[int, ...]]:
    """Reads stride, padding and dilations of one spatial dimension of a convolution; defaults are left out."""
    window: dict[str, tuple[int, ...]] = {}
    for part in instruction.attributes.get("window", "{}").strip("{}").split():
        key, _, value = part.partition("=")
        window[key] = tuple(int(n) for n in value.split("x")[spatial].split("_"))
    return window


def _taps(window: dict[str, tuple[int, ...]], size: int, kernel: int, out: int) -> int:
    """Counts the pairs of output and kernel positions that read an element, not padding or a hole of a dilation.

    A TPU writes batched and per-head matrix products as convolutions in which most pairs read padding.
    """
    stride, low = window.get("stride", (1,))[0], window.get("pad", (0, 0))[0]
    lhs_dilation, rhs_dilation = window.get("lhs_dilate", (1,))[0], window.get("rhs_dilate", (1,))[0]
    position = np.arange(out)[:, None] * stride + np.arange(kernel)[None] * rhs_dilation - low
    inside = (position >= 0) & (position <= (size - 1) * lhs_dilation) & (position % lhs_dilation == 0)
    return int(inside.sum())
