"""Ledger of a compiled program's collectives: payload, mesh axes, execution count, source line
and overlap of each."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from xlacensus.formatting import format_bytes
from xlacensus.hlo.collectives import (
    COLLECTIVE_TEXT,
    done_of,
    group_label,
    group_of,
    is_wrapper,
    kind_of,
    looks_collective,
    overlapped_work,
    payload_of,
    transfer_start,
)
from xlacensus.hlo.loops import ExecutionContext, walk
from xlacensus.hlo.parser import Frame, Instruction, Module, parse_module
from xlacensus.hlo.scopes import plain_path


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """One collective instruction."""

    kind: str
    """One of COLLECTIVE_KINDS."""
    axes: tuple[str, ...] | None
    """Mesh axes that its groups span;
    None if the groups are no product of axes, or no mesh was given."""
    group_size: int
    payload: int
    """Bytes of the whole array that one group gathers or reduces; the block that one device
    exchanges or passes on."""
    count: int
    """Executions in one run of the program; the trip counts of loops are multiplied."""
    exact: bool
    """Whether the trip counts of all loops around it are known;
    a loop without one is counted once."""
    conditional: bool
    """Whether it is inside a conditional of unknown frequency; `count` is then an upper bound."""
    operands: tuple[str, ...]
    """Types and shapes of the operands on one device."""
    tensor: str
    """Parameter or named scope that it belongs to; empty if the program does not record one."""
    line: str
    """FILE:LINE of the Python that asked for it; empty if the program does not record it."""
    op_name: str
    asynchronous: bool
    """Whether it is a pair of a start and a done."""
    overlapped: tuple[str, ...]
    """Instructions scheduled between its start and its done; none for exposed communication."""
    instruction: str = ""
    """Name in the program's text."""

    @property
    def total(self) -> int:
        """Payload bytes of all executions."""
        return self.payload * self.count

    @property
    def sent(self) -> float:
        """Bytes that one device sends in all executions, on a ring; a permutation is one hop."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload * self.count
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.payload * (self.group_size - 1) / self.group_size * self.count

    @property
    def axes_label(self) -> str:
        """Axes as text: `fsdp+tensor`, `8 devices` if they are unknown, `itself` for groups
        of one device."""
        if self.axes is None:
            return f"{self.group_size} devices"
        return "+".join(self.axes) or "itself"


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Every collective of a compiled program.

    Example: an all-reduce of four devices.

        >>> text = '''HloModule m, num_partitions=4
        ...
        ... add {
        ...   x = f32[] parameter(0)
        ...   y = f32[] parameter(1)
        ...   ROOT sum = f32[] add(x, y)
        ... }
        ...
        ... ENTRY main {
        ...   p = f32[256]{0} parameter(0)
        ...   ROOT r = f32[256]{0} all-reduce(p), replica_groups={{0,1,2,3}}, to_apply=add
        ... }
        ... '''
        >>> ledger = Ledger.read(text, {"data": 4})
        >>> [(entry.kind, entry.axes_label, entry.payload, entry.sent) for entry in ledger]
        [('all-reduce', 'data', 1024, 1536.0)]
    """

    entries: tuple[LedgerEntry, ...]
    """Collectives in program order."""
    unread: tuple[str, ...] = ()
    """Instructions that look like a collective and are not in the ledger;
    empty if it is complete."""

    @classmethod
    def read(cls, program: str | Module, mesh: Mapping[str, int] | None = None) -> "Ledger":
        """Reads the ledger of a program, or of its text (`compiled.as_text()`).

        mesh: degree of each axis, outermost first, in the order of the program's devices.
        Raises CensusError if the text is not that of an XLA program.
        """
        module = parse_module(program) if isinstance(program, str) else program
        entries = read_ledger(module, None if mesh is None else dict(mesh))
        return cls(tuple(entries), tuple(unread_collectives(module)))

    def traffic(self) -> list[dict[str, Any]]:
        """Sums the ledger by kind and axes: executions, payload bytes,
        and bytes sent by one device."""
        return traffic(self.entries)

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        header = ("kind", "axes", "times", "payload", "sent", "tensor", "line")
        lines = [header, *map(_columns, self.entries)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(_aligned(line, widths) for line in lines)


def _columns(entry: LedgerEntry) -> tuple[str, ...]:
    """Returns one line of a ledger as text."""
    times = f"{entry.count}" if entry.exact else f"{entry.count} or more"
    payload = format_bytes(entry.payload)
    sent = format_bytes(entry.sent)
    return (entry.kind, entry.axes_label, times, payload, sent, entry.tensor, entry.line)


def _aligned(cells: Iterable[str], widths: Iterable[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


def read_ledger(
    module: Module,
    mesh: dict[str, int] | None = None,
    library_files: tuple[str, ...] = (),
    sent_rows: Mapping[str, int] | None = None,
) -> list[LedgerEntry]:
    """Lists the collectives of a program, in program order.

    mesh: degree of each axis, outermost first, in the order of the program's devices.
    library_files: ends of file names that are skipped
    when a source line is chosen, such as `collectives.py`.
    sent_rows: as `Skipped` has them.
    """
    entries: list[LedgerEntry] = []
    counted: set[tuple[str, ...]] = set()
    for context, instruction in walk(module):
        kind = kind_of(instruction)
        if kind is None:
            continue
        chain = _chain_of(context, instruction)
        if chain in counted:
            continue
        if chain is not None:
            counted.add(chain)
        groups, axes = group_of(instruction, mesh)
        size = max(len(group) for group in groups)
        start = _start_of_pair(context, instruction)
        scopes = instruction.scopes
        tensor = scopes[-1] if scopes else plain_path(_source_argument(context, instruction))
        entries.append(
            LedgerEntry(
                kind="reduce-scatter" if _is_fused_scatter(context) else kind,
                axes=axes,
                group_size=size,
                payload=payload_of(instruction, kind, size, group_label(groups, axes), sent_rows),
                count=context.count,
                exact=context.exact,
                conditional=context.conditional,
                operands=tuple(map(str, instruction.operand_arrays)),
                tensor=tensor,
                line=_line_of(_nearest_stack(context, instruction), library_files),
                op_name=instruction.op_name,
                asynchronous=start is not None,
                overlapped=() if start is None else overlapped_work(start),
                instruction=instruction.name,
            )
        )
    return entries


def _chain_of(context: ExecutionContext, instruction: Instruction) -> tuple[str, ...] | None:
    """Identifies an asynchronous collective that a v5e program prints once per piece fused
    with other work.

    None for a collective that is printed once.
    """
    chain = re.search(r'chain_id="(\d+)"', instruction.attribute_text)
    if chain is None:
        return None
    callers = [caller.name for caller in context.callers[:-1]]
    return (*callers, chain[1], instruction.attributes.get("channel_id", ""))


def _start_of_pair(context: ExecutionContext, instruction: Instruction) -> Instruction | None:
    """Returns the start of an asynchronous collective: its own,
    or that of the computation around it; else None."""
    if instruction.opcode.endswith("-start"):
        return instruction
    wrappers = filter(is_wrapper, reversed(context.callers))
    return next(wrappers, None)


def _is_fused_scatter(context: ExecutionContext) -> bool:
    """Whether a collective is in a fusion of an all-reduce and a slice,
    as which older TPUs reduce and scatter."""
    fusions = [caller for caller in context.callers if caller.opcode == "fusion"]
    return any(
        body.name.startswith("all-reduce-scatter") for fusion in fusions for body in fusion.called
    )


def _line_of(stack: Sequence[Frame], library_files: tuple[str, ...]) -> str:
    """Returns FILE:LINE that called for a movement: the innermost outside of libraries,
    if the program records one."""
    for frame in stack:
        if not frame.file.endswith(library_files):
            return frame.location
    return stack[0].location if stack else ""


def unread_collectives(module: Module) -> list[str]:
    """Lists the instructions that look like a collective and are not in the ledger;
    empty if it is complete.

    Candidates are all instructions of the text, reached by the walk or not, and lines that the
    parser does not understand: opcodes of collectives, replica groups, offloaded collectives,
    kernels that communicate.
    """
    entered: set[Instruction] = set()
    for context, instruction in walk(module):
        if kind_of(instruction) is not None:
            entered.update((instruction, *context.callers))
    unread = [
        f"{instruction.name} ({instruction.opcode}) in {instruction.computation.name}"
        for instruction in module
        if looks_collective(instruction) and instruction not in entered
    ]
    return unread + [line[:120] for line in module.unparsed if COLLECTIVE_TEXT.search(line)]


def _nearest_stack(context: ExecutionContext, instruction: Instruction) -> tuple[Frame, ...]:
    """Returns the instruction's Python stack,
    or that of a neighbour if the compiler inserted it without one.

    Neighbours are what it moves and what takes it, also around the fusion or asynchronous
    computation that contains it.
    """
    around = [instruction, *instruction.operands, *instruction.users]
    start = context.callers[-1] if context.callers else instruction
    if start.opcode == "fusion" or is_wrapper(start):
        begin = transfer_start(start)
        around += [begin, *begin.operands, *(done_of(start) or start).users]
    return next((i.stack for i in around if i.stack), ())


def _source_argument(context: ExecutionContext, instruction: Instruction) -> str:
    """Names the program argument that reaches the instruction through copies alone;
    empty if there is none."""
    callers, current = list(context.callers), instruction.operand()
    while current is not None:
        if current.opcode == "parameter":
            if not callers:
                return current.op_name
            caller = callers.pop()
            current = (
                None if caller.opcode == "while" else caller.operand(int(current.operand_text))
            )
        elif current.opcode in ("copy", "bitcast", "convert", "reshape", "transpose"):
            current = current.operand()
        else:
            return ""
    return ""


def traffic(entries: Iterable[LedgerEntry]) -> list[dict[str, Any]]:
    """Sums a ledger by kind and axes: executions, payload bytes, and bytes sent by one device."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for e in entries:
        zero = {"kind": e.kind, "axes": e.axes_label, "count": 0, "total": 0, "sent": 0.0}
        row = sums.setdefault((e.kind, e.axes_label), zero)
        row |= {
            "count": row["count"] + e.count,
            "total": row["total"] + e.total,
            "sent": row["sent"] + e.sent,
        }
    return list(sums.values())
