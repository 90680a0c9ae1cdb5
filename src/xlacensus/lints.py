"""Checks of a compiled program: what wastes memory, bytes or time, and what to change.

Each check yields findings of what it reads of a program; `census.census` runs those of every
program. A finding without a line is given that of the function's definition.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xlacensus.determinism import nondeterminism_of, sums_in_order
from xlacensus.findings import Finding
from xlacensus.formatting import format_count
from xlacensus.hlo.ledger import LedgerEntry
from xlacensus.hlo.loops import walk
from xlacensus.hlo.parser import Array, Instruction, Module, arrays_of
from xlacensus.jaxprs import products_needed
from xlacensus.peak_memory import Argument

_HOST_OPCODES = ("infeed", "outfeed", "send", "recv")


def lint_host(module: Module) -> Iterator[Finding]:
    """Reports operations for which a device waits for its host."""
    for context, instruction in walk(module):
        host = instruction.opcode in _HOST_OPCODES or "callback" in instruction.target
        if not host or "_xla_megascale" in instruction.attribute_text:
            continue
        size = sum(i.shape.bytes for i in instruction.operands if isinstance(i.shape, Array))
        yield Finding(
            "host",
            instruction.op_name.rpartition("/")[2] or instruction.opcode,
            f"{instruction.target or instruction.opcode} runs on the host {context.count} x in a "
            "step; the device waits",
            "take the callback out of the step, and read its value from the results",
            size * context.count,
            instruction.line,
        )


_TUNED = re.compile(
    r'"kind":"__(?:triton_\w*gemm|cudnn\$fusion)|custom_call_target="__(?:cublas|cudnn\$conv)'
)
"""Matmuls and convolutions whose kernels XLA:GPU chooses by timing them."""
_EXACT = ("add", "multiply", "minimum", "maximum", "and", "or", "xor")
"""Combiners that give integers the same result in any order;
of floats, `minimum` and `maximum` do."""
_MAY_DIFFER = {
    "scatter": "its updates may meet, and they are applied in another order in every run",
    "kernel": "it adds by atomics, in another order in every run",
    "autotuned": "its kernel is chosen by timing, anew in every process: another one adds in "
    "another order",
    "sum": (
        "NCCL chooses the algorithm of the sum, and some add in another order in every run "
        "(NCCL_ALGO)"
    ),
}


def lint_determinism(
    module: Module, ledger: Sequence[LedgerEntry], options: Mapping[str, Any]
) -> Iterator[Finding]:
    """Reports the instructions of a program for GPUs whose results may differ between two runs,
    by cause and line.

    options: of the compilation.
    """
    uses_atomics, is_tuned = nondeterminism_of(options)
    instructions = {instruction.name: instruction for instruction in module}
    found = defaultdict[tuple[str, str], list[str]](list)
    for instruction in instructions.values():
        cause = _cause_of_difference(instruction, uses_atomics, is_tuned)
        if cause:
            found[cause, instruction.line].append(instruction.name)
    for entry in () if sums_in_order() else ledger:
        # Two numbers have the same sum in either order.
        reduces = entry.kind in ("all-reduce", "reduce-scatter") and entry.group_size > 2
        if not reduces or entry.instruction not in instructions:
            continue
        if _depends_on_order(instructions[entry.instruction]):
            found["sum", entry.line].append(entry.instruction)
    for (cause, line), names in found.items():
        yield Finding(
            "determinism",
            f"{cause}: {', '.join(names)}",
            _MAY_DIFFER[cause],
            "unique_indices=True where indices differ, XLA_FLAGS=--xla_gpu_deterministic_ops=true, "
            "and NCCL_ALGO=Ring",
            0,
            line,
        )


def _cause_of_difference(instruction: Instruction, uses_atomics: bool, is_tuned: bool) -> str:
    """Returns why an instruction's result may differ between runs: a key of _MAY_DIFFER, or ""."""
    attributes = instruction.attribute_text
    if instruction.opcode == "select-and-scatter":
        return "scatter"
    if instruction.opcode == "scatter" and "unique_indices=true" not in attributes:
        return "scatter" if _depends_on_order(instruction) else ""
    is_atomic = "atomic" in attributes or _adds_by_atomics(instruction, uses_atomics)
    if instruction.opcode == "custom-call" and is_atomic:
        return "kernel"
    if is_tuned and _TUNED.search(attributes):
        return "autotuned"
    return ""


def _depends_on_order(instruction: Instruction) -> bool:
    """Whether an instruction that combines values by a computation gives another result
    in another order."""
    computations = instruction.computation.module.computations
    combiner = computations.get(instruction.attributes.get("to_apply", "").lstrip("%"))
    if combiner is None:
        return True
    if combiner.root.opcode in ("minimum", "maximum"):
        return False
    has_integers = all(a.dtype[0] in "sup" for a in arrays_of(combiner.root.shape))
    return not has_integers or combiner.root.opcode not in _EXACT


def _adds_by_atomics(call: Instruction, allowed: bool) -> bool:
    """Whether a call of cuDNN is attention's backward pass without its deterministic form."""
    backward = call.target.startswith("__cudnn$fmha") and call.target.endswith("Backward")
    return allowed and backward and '"force_deterministic":true' not in call.attribute_text


_TWICE = 1.8
"""FLOPs of all devices over those of the function from which work counts as done more than once."""
_MIN_DUPLICATED_FLOPS = 2**30
"""FLOPs on all devices that are done more than once from which they are reported."""


def lint_duplicated_work(
    jaxpr: Any, flops: float, arguments: Sequence[Argument], mesh: Mapping[str, int]
) -> Iterator[Finding]:
    """Reports a program whose devices together multiply far more than its function has to.

    jaxpr: closed; None if there is none.  flops: matrix products of one device.
    """
    devices = math.prod(mesh.values())
    if jaxpr is None or devices == 1:
        return
    needed = products_needed(jaxpr.jaxpr)
    if needed and devices * flops >= max(_TWICE * needed, needed + _MIN_DUPLICATED_FLOPS):
        axes = ", ".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1)
        split = sorted({a.path for a in arguments if a.local_shape != a.shape})
        arguments_split = "no argument is split over them"
        if split:
            arguments_split = f"split over them are {', '.join(split[:3])}"
        yield Finding(
            "duplicated",
            f"matrix products of {format_count(devices * flops)} FLOPs on all devices",
            f"the function has {format_count(needed)}: devices of {axes} compute the same products "
            f"{devices * flops / needed:.1f} times; {arguments_split}",
            "shard the batch, or a dimension of the weights, over every axis",
            0,
        )
