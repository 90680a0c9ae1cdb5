"""Checks of a run's compiled step against what the run asks for: low-precision matmuls
and its attention kernel."""

import re
from collections import Counter
from collections.abc import Iterator

from xlacensus.findings import Finding
from xlacensus.hlo.flops import is_call, kernel_work
from xlacensus.hlo.loops import walk
from xlacensus.hlo.parser import Module, arrays_of

_LIBRARY_MATMUL = re.compile("gemm|matmul|ScaledDot")


def lint_precision(module: Module, scope: str, asked: str) -> Iterator[Finding]:
    """Reports matmuls of a low-precision run whose operands are wider than one byte
    in the compiled program.

    A compiler simplifies a quantise-dequantise pair away,
    and converts operands that its hardware does not multiply.

    scope: named scope of the matmuls that are meant to be in low precision.
    asked: the run's precision.
    """
    total, excess, wide, line = 0, 0.0, Counter[str](), ""
    for context, instruction in walk(module):
        library = instruction.opcode == "custom-call" and (
            _LIBRARY_MATMUL.search(instruction.target)
            or kernel_work(instruction).kind == "grouped matmul"
        )
        if not (
            library or instruction.opcode in ("dot", "convolution")
        ) or scope not in context.op_name(instruction):
            continue
        operands = [
            array for operand in instruction.operands[:2] for array in arrays_of(operand.shape)
        ]
        total += 1
        if any(a.bytes > a.elements for a in operands):
            wide[" x ".join(a.dtype for a in operands)] += 1
            excess += context.count * sum(a.bytes - min(a.bytes, a.elements) for a in operands)
            line = line or instruction.line
    if wide or not total:
        types = ", ".join(f"{n} of {text}" for text, n in wide.items())
        found = (
            f"{wide.total()} of {total} matmuls of the compiled program have wider operands: "
            f"{types}"
        )
        yield Finding(
            "precision",
            f"matmuls of --training.matmul-precision {asked}",
            f"the Run asks for {asked}, and "
            f"{found if total else 'the compiled program has no such matmul'}",
            "operands of the low precision in the dot_general itself, on a chip that multiplies "
            "them",
            int(excess),
            line,
        )


def lint_attention_kernel(module: Module, name: str) -> Iterator[Finding]:
    """Reports the fused attention kernel `name`, which a run uses,
    if its compiled program does not contain one."""
    if not any(is_call(i) and kernel_work(i).kind == "attention" for _, i in walk(module)):
        yield Finding(
            "kernel",
            f"attention by {name}",
            "the run uses this kernel, and the compiled program has no attention kernel: scores go "
            "through HBM",
            "name it in --training.attention-kernel, which refuses shapes that it does not take",
            0,
        )
