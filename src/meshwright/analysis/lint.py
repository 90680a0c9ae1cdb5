"""Findings in a compiled program: what wastes memory, bytes or time, and what to change."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.analysis.expected_sharding import ExpectedSharding, spec_of
from meshwright.analysis.memory import Argument
from meshwright.hlo.flops import is_call, kernel_work
from meshwright.hlo.loops import walk
from meshwright.hlo.parser import Frame, Module, arrays_of, parse_shape

MIN_REPLICATED_BYTES = 2**20
"""Size from which a replicated array, or a parameter with padded tiles, is reported."""
_MAX_PADDING = 0.1
"""Fraction of padding from which an array is reported."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to change in a program."""

    kind: str
    """layout, replicated, duplicated, rematerialised, unexpected, overlap, padding, precision, donation, experts,
    kernel, or host."""
    subject: str
    """Array or operation that it is about."""
    reason: str
    """Explanation, with the arithmetic."""
    fix: str
    """Change that removes it."""
    bytes: int
    """Bytes that a device stores or sends unnecessarily in one execution."""
    line: str = ""
    """FILE:LINE, if the program records it."""


def _format_spec(spec: PartitionSpec | None) -> str:
    return "no NamedSharding" if spec is None else str(spec).replace("PartitionSpec", "P")


_DimAxes = tuple[tuple[str, ...], ...]


def _dim_axes(spec: PartitionSpec | None) -> _DimAxes:
    """Returns the mesh axes of each dimension; trailing unsharded dimensions are left out."""
    if spec is None:
        return ()
    dims = [() if p is None else p if isinstance(p, tuple) else (p,) for p in spec]
    while dims and not dims[-1]:
        dims.pop()
    return tuple(dims)


def _nontrivial(dims: _DimAxes, mesh: Mapping[str, int]) -> _DimAxes:
    """Drops the axes of degree 1."""
    kept = [tuple(axis for axis in axes if mesh.get(axis, 1) > 1) for axes in dims]
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


def _num_shards(dims: Iterable[tuple[str, ...]], mesh: Mapping[str, int]) -> int:
    return math.prod(mesh.get(axis, 1) for axes in dims for axis in axes)


def lint_layouts(
    compiled: Mapping[str, Any],
    declared: Mapping[str, PartitionSpec],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    line: str,
) -> list[Finding]:
    """Reports arguments and results not sharded as declared, and large undeclared ones that are replicated.

    compiled: sharding by path.  sizes: bytes of the whole array by path.  line: where the function is defined.
    """
    findings: list[Finding] = []
    for path, sharding in compiled.items():
        spec = spec_of(sharding)
        shards, devices = _num_shards(_dim_axes(spec), mesh), len(sharding.device_set)
        if path in declared:
            want = declared[path]
            if _nontrivial(_dim_axes(spec), mesh) != _nontrivial(_dim_axes(want), mesh):
                excess = sizes[path] // shards - sizes[path] // _num_shards(_dim_axes(want), mesh)
                findings.append(
                    Finding(
                        "layout",
                        path,
                        f"declared {_format_spec(want)}, compiled {_format_spec(spec)}",
                        "pass the array in its declared sharding (jax.device_put, or in_shardings)",
                        max(excess, 0),
                        line,
                    )
                )
        elif shards == 1 and sizes[path] >= MIN_REPLICATED_BYTES and devices > 1:
            findings.append(
                Finding(
                    "replicated",
                    path,
                    f"replicated on each of {devices} devices without a declaration",
                    "shard it, or declare it as P() if it is meant to be replicated",
                    sizes[path],
                    line,
                )
            )
    return findings


def lint_expected_shardings(values: Sequence[ExpectedSharding], mesh: Mapping[str, int]) -> list[Finding]:
    """Reports values that the compiler sharded other than expected, and those whose dimensions it had to pad."""
    findings: list[Finding] = []
    for value in values:
        spec = spec_of(value.compiled)
        size = value.itemsize * math.prod(value.shape)
        shards, wanted = _num_shards(_dim_axes(spec), mesh), _num_shards(_dim_axes(value.declared), mesh)
        if _nontrivial(_dim_axes(spec), mesh) != _nontrivial(_dim_axes(value.declared), mesh):
            findings.append(
                Finding(
                    "replicated" if shards == 1 and wanted > 1 else "layout",
                    value.name,
                    f"declared {_format_spec(value.declared)}, compiled {_format_spec(spec)}",
                    f"jax.lax.with_sharding_constraint(x, {_format_spec(value.declared)}) where it is computed",
                    max(size // shards - size // wanted, 0),
                    value.line,
                )
            )
        findings += _padded_dims(value, _dim_axes(spec), mesh)
    return findings


def _padded_dims(value: ExpectedSharding, dims: _DimAxes, mesh: Mapping[str, int]) -> list[Finding]:
    """Reports dimensions that the mesh does not divide and of which a large fraction is padding."""
    size = value.itemsize * math.prod(value.shape)
    findings: list[Finding] = []
    for dim, axes in enumerate(dims):
        n, degree = value.shape[dim], _num_shards([axes], mesh)
        local = -(-n // degree)
        padded = local * degree
        if padded > n and (padded - n) / n > _MAX_PADDING:
            findings.append(
                Finding(
                    "padding",
                    value.name,
                    f"dimension {dim} of {n} over {degree} is padded to {padded} = {degree} * {local}: "
                    f"{(padded - n) / n:.0%} padding",
                    f"a dimension of {n // degree * degree or degree} or {padded}",
                    (padded - n) * size // n // degree,
                    value.line,
                )
            )
    return findings


_REMATERIALISATION = re.compile(
    r"from sharding \{(.*?)\} to \{(.*?)\}(?: efficiently| without)?.*? for HLO operation %?(\S+) = (\S+)"
)


def lint_rematerialisation(module: Module, warnings: Sequence[str]) -> list[Finding]:
    """Reports the partitioner's "involuntary full rematerialization" warnings with source line and bytes."""
    findings: list[Finding] = []
    for text in dict.fromkeys(warnings):
        match = _REMATERIALISATION.search(text)
        if not match:
            continue
        tiles = re.match(r"devices=\[([\d,]+)\]", match[1])
        local = parse_shape(match[4])
        dims = getattr(local, "dims", ())
        shards = math.prod([int(n) for n in tiles[1].split(",")][: len(dims)]) if tiles else 1
        size = getattr(local, "bytes", 0) * shards
        name = re.search(r'op_name="([^"]*)"', text)
        findings.append(
            Finding(
                "rematerialised",
                f"{match[3]}, {local} on each of {shards}",
                f"from {{{match[1]}}} to {{{match[2]}}} the partitioner can only gather the whole array: "
                f"{size} bytes on every device",
                "constrain the value once, to one of the two shardings, or go through one that differs in one axis",
                size,
                _line_of_warning(module, text, name[1] if name else ""),
            )
        )
    return findings


def _line_of_warning(module: Module, text: str, op_name: str) -> str:
    """Finds the source line of a warning: from its text, its stack frame, or an instruction of the same name."""
    direct = re.search(r'source_file="([^"]+)" source_line=(\d+)', text)
    if direct:
        return f"{Path(direct[1]).name}:{direct[2]}"
    frame = re.search(r"stack_frame_id=(\d+)", text)
    stack = module.frames.get(int(frame[1]), ()) if frame else ()
    if not stack and op_name:
        for context in walk(module):
            for instruction in context.computation.instructions.values():
                if instruction.op_name == op_name and module.source_stack(instruction):
                    stack = module.source_stack(instruction)
    return stack[0].location if stack else ""


_HOST_OPCODES = ("infeed", "outfeed", "send", "recv")


def lint_host(module: Module) -> list[Finding]:
    """Reports operations for which a device waits for its host."""
    findings: list[Finding] = []
    for context in walk(module):
        for instruction in context.computation.instructions.values():
            target = instruction.attributes.get("custom_call_target", "").strip('"')
            host = instruction.opcode in _HOST_OPCODES or "callback" in target
            if not host or "_xla_megascale" in instruction.attribute_text:
                continue
            size = sum(getattr(shape, "bytes", 0) for shape in context.computation.operand_shapes(instruction))
            stack = module.source_stack(instruction)
            findings.append(
                Finding(
                    "host",
                    instruction.op_name.rpartition("/")[2] or instruction.opcode,
                    f"{target or instruction.opcode} runs on the host {context.count} x in a step; the device waits",
                    "take the callback out of the step, and read its value from the results",
                    size * context.count,
                    stack[0].location if stack else "",
                )
            )
    return findings


def lint_precision(module: Module, scope: str, asked: str) -> list[Finding]:
    """Reports matmuls of a low-precision run whose operands are wider than one byte in the compiled program.

    A compiler simplifies a quantise-dequantise pair away, and converts operands that its hardware does not multiply.

    scope: named scope of the matmuls that are meant to be in low precision.  asked: the run's precision.
    """
    total, excess, wide = 0, 0.0, dict[str, int]()
    stack: tuple[Frame, ...] = ()
    for context in walk(module):
        for instruction in context.computation.instructions.values():
            library = instruction.opcode == "custom-call" and _LIBRARY_MATMUL.search(instruction.attribute_text)
            names = (instruction.op_name, *(i.op_name for _, i in reversed(context.callers)))
            if not (library or instruction.opcode in ("dot", "convolution")):
                continue
            if scope not in next((name for name in names if name), ""):
                continue
            operands = [a for s in context.computation.operand_shapes(instruction)[:2] for a in arrays_of(s)]
            total += 1
            if any(a.bytes > a.elements for a in operands):
                types = " x ".join(a.dtype for a in operands)
                wide[types] = wide.get(types, 0) + 1
                excess += context.count * sum(a.bytes - min(a.bytes, a.elements) for a in operands)
                stack = stack or module.source_stack(instruction)
    if total and not wide:
        return []
    types = ", ".join(f"{n} of {text}" for text, n in wide.items())
    found = f"{sum(wide.values())} of {total} matmuls of the compiled program have wider operands: {types}"
    return [
        Finding(
            "precision",
            f"matmuls of --training.matmul-precision {asked}",
            f"the Run asks for {asked}, and {found if total else 'the compiled program has no such matmul'}",
            "operands of the low precision in the dot_general itself, on a chip that multiplies them",
            int(excess),
            stack[0].location if stack else "",
        )
    ]


def lint_attention_kernel(module: Module, name: str) -> list[Finding]:
    """Reports a fused attention kernel that a run uses and its compiled program does not contain.

    name: of the kernel that was chosen for the run.
    """
    for context in walk(module):
        for instruction in context.computation.instructions.values():
            if is_call(instruction, module) and kernel_work(context.computation, instruction).kind == "attention":
                return []
    return [
        Finding(
            "kernel",
            f"attention by {name}",
            "the run uses this kernel, and the compiled program has no attention kernel: scores go through HBM",
            "name it in --training.attention-kernel, which refuses shapes that it does not take",
            0,
        )
    ]


_LIBRARY_MATMUL = re.compile(r'custom_call_target="[^"]*(gemm|matmul|ScaledDot)')


# The last two dimensions of an array in TPU memory are tiled by 8 x 128 words of 32 bits; narrower types pack more rows
# into a tile (OpenXLA, "Tiled layout").
_LANES, _SUBLANES = 128, 8


def lint_tiles(arguments: Sequence[Argument], itemsize: Mapping[str, int], line: str) -> list[Finding]:
    """Reports parameters whose local shards leave much of a TPU's tiles empty.

    itemsize: bytes per element by path.  line: where the function that takes them is defined.
    """
    findings: list[Finding] = []
    for a in arguments:
        if len(a.local_shape) < 2 or a.bytes < MIN_REPLICATED_BYTES:
            continue
        rows, cols = a.local_shape[-2:]
        sublanes = _SUBLANES * (4 // itemsize[a.path] or 1)
        padded_rows, padded_cols = -(-rows // sublanes) * sublanes, -(-cols // _LANES) * _LANES
        padding = padded_rows * padded_cols / (rows * cols) - 1
        if padding > _MAX_PADDING:
            last = padded_cols / cols > padded_rows / rows
            findings.append(
                Finding(
                    "padding",
                    a.path,
                    f"local shards of {rows} x {cols} in tiles of {sublanes} x {_LANES} are padded to "
                    f"{padded_rows} x {padded_cols}, {padding:.0%} padding",
                    f"{'last' if last else 'second-last'} dimension on each device of "
                    f"{_LANES if last else sublanes} or a multiple: a lower degree of the axis that divides it",
                    int(a.bytes * padding),
                    line,
                )
            )
    return findings
