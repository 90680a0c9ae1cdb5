"""FLOPs of a compiled program, counted from its matrix products and those of its kernels."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from meshwright.hlo.convolutions import convolution_flops
from meshwright.hlo.kernels import ALL_ROWS, Rate, Skipped, computed_flops, is_call, kernel_work, rate_of
from meshwright.hlo.loops import Choice, ExecutionContext, branches_of, known_branch, walk
from meshwright.hlo.parser import Array, Computation, Instruction, Module
from meshwright.hlo.scopes import Phase, phase_of, scopes_of
from meshwright.hlo.trip_count import trip_count


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


def _products(module: Module, skipped: Skipped, branch: Callable[..., Computation]) -> Iterator[_Product]:
    """Yields every `dot`, `convolution` and custom call with FLOPs that one execution of the program runs.

    branch: `max` or `min`: of the branches of a conditional that are not known, the one with the most or the fewest
    FLOPs counts.
    """
    for context in walk(module, _branch_by_flops(module, skipped, branch)):
        for instruction in context.computation.instructions.values():
            priced = _price(module, context.computation, instruction, skipped)
            if priced is not None:
                yield _Product(context, instruction, *priced)


def _price(
    module: Module, computation: Computation, instruction: Instruction, skipped: Skipped
) -> tuple[float, Rate] | None:
    """Returns the FLOPs of one execution and their peak; None of an instruction without matrix products."""
    if instruction.opcode in ("dot", "convolution"):
        operands = [shape for shape in computation.operand_shapes(instruction)[:2] if isinstance(shape, Array)]
        return matmul_flops(computation, instruction), rate_of(operands)
    if not is_call(instruction, module):
        return None
    work = kernel_work(computation, instruction)
    return (computed_flops(work, instruction, skipped), work.rate) if work.flops else None


def _branch_by_flops(module: Module, skipped: Skipped, branch: Callable[..., Computation]) -> Choice:
    """Returns the choice of one branch of a conditional, of which a step runs one: never the sum of all.

    A program for GPUs has two forms of attention, for sequences with and without document boundaries.
    """

    @functools.cache
    def total(name: str) -> float:
        """Returns the FLOPs of one execution of a computation."""
        computation, flops = module.computations[name], 0.0
        for instruction in computation.instructions.values():
            priced = _price(module, computation, instruction, skipped)
            flops += priced[0] if priced else 0.0
            if instruction.opcode == "conditional":
                flops += _conditional_flops(branches_of(module, computation, instruction))
                continue
            trips = trip_count(module, computation, instruction) if instruction.opcode == "while" else 1
            called = (n for n in instruction.called if n in module.computations)
            flops += (1 if trips is None else trips) * sum(map(total, called))
        return flops

    def _conditional_flops(branches: Sequence[Computation]) -> float:
        known = [(b, taken) for b in branches if (taken := known_branch(module, b)) is not None]
        sums = sum(total(b.name) * taken.taken / taken.executions for b, taken in known)
        others = [b for b in branches if all(b is not k for k, _ in known)]
        return sums + sum(total(b.name) for b in choose(others))

    def choose(branches: Sequence[Computation]) -> Sequence[Computation]:
        return [branch(branches, key=lambda b: total(b.name))] if branches else []

    return choose


def read_matmuls(module: Module, skipped: Skipped = ALL_ROWS) -> list[CompiledMatmul]:
    """Counts the FLOPs of every `dot`, `convolution` and kernel: 2 per multiply-add, times the trip counts of loops.

    Of a conditional whose branch is not known, the branch with the most FLOPs counts, and no other. A program without a
    backward pass is one forward pass.  skipped: what kernels leave out of their operands.
    """
    totals: Counter[tuple[Phase, str]] = Counter()
    for product in _products(module, skipped, max):
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
    """Returns the FLOPs that a step cannot avoid, by the peak they run at.

    Of a conditional whose branch is not known, the branch with the fewest counts; beside branches of known frequency,
    the others count as never taken.  skipped: what kernels leave out of their operands.
    """
    totals: Counter[Rate] = Counter()
    for product in _products(module, skipped, min):
        if not product.context.conditional or _sole(module, product.context):
            totals[product.rate] += int(product.flops * product.context.count)
    return {rate: float(n) for rate, n in totals.items()}


def _sole(module: Module, context: ExecutionContext) -> bool:
    """Whether no conditional around a computation has branches of known frequency beside one of unknown frequency."""
    for computation, caller in context.callers:
        if caller.opcode != "conditional":
            continue
        known = [known_branch(module, branch) is not None for branch in branches_of(module, computation, caller)]
        if any(known) and not all(known):
            return False
    return True


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
    return convolution_flops(instruction, left.dims, right.dims, out.dims)
