"""Liveness of a compiled program's buffers, and the peak of temporary memory.

A scheduled program fixes the order of its instructions, so a buffer is live from the instruction
that defines it to the last that reads it, through tuples and loops. If XLA provides its buffer
assignment (CPU and GPU), sizes and offsets are its own and buffers that share memory are counted
once; otherwise (TPU) sizes are those of the shapes.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from xlacensus.hlo.parser import Array, Computation, Instruction, Module, Shape

Index = tuple[int, ...]
"""Path to one array of a tuple shape."""
_Place = tuple[Instruction, Index]
"""One array of an instruction's result."""


@dataclasses.dataclass(frozen=True)
class AssignedValue:
    """A value that XLA placed in an allocation of temporaries."""

    instruction: str
    """Name of the instruction that defines it."""
    index: Index
    """Which array of the instruction's result it is."""
    offset: int
    """First byte in the temporary memory; the allocations follow each other."""
    size: int


@dataclasses.dataclass(frozen=True)
class BufferAssignment:
    """Temporary memory of a program, as XLA assigned it."""

    temporary: int
    """Bytes of all allocations of temporaries."""
    values: tuple[AssignedValue, ...]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and the value of every field of a serialised message,
    whose schema is not needed for it."""
    for field in UnknownFieldSet(Empty.FromString(data)):
        yield field.field_number, field.data


def _integer(data: bytes, number: int) -> int:
    return next((v for k, v in _fields(data) if k == number and isinstance(v, int)), 0)


def _messages(data: bytes, number: int) -> list[bytes]:
    return [v for k, v in _fields(data) if k == number and isinstance(v, bytes)]


def read_assignment(assignment: bytes, module: bytes) -> BufferAssignment:
    """Reads a serialised BufferAssignmentProto and HloModuleProto (xla/service/hlo.proto gives
    the field numbers)."""
    names: dict[int, str] = {}
    for computation in _messages(module, 3):
        for instruction in _messages(computation, 2):
            names[_integer(instruction, 35)] = _messages(instruction, 1)[0].decode()
    definitions: dict[int, tuple[str, Index]] = {}
    for buffer in _messages(assignment, 1):
        for location in _messages(buffer, 3):
            packed = b"".join(_messages(location, 3))
            # Small indices take one byte each in the packed form; a single one is not packed.
            index = tuple(packed) or tuple(
                v for k, v in _fields(location) if k == 3 and isinstance(v, int)
            )
            definitions[_integer(buffer, 1)] = (names.get(_integer(location, 4), ""), index)
    values: list[AssignedValue] = []
    total = 0
    for allocation in _messages(assignment, 3):
        # Arguments, results, constants and thread-local stack space are not temporaries.
        if any(_integer(allocation, number) for number in (3, 5, 7, 12)):
            continue
        offset = total
        total += _integer(allocation, 2)
        for part in _messages(allocation, 9):
            name, index = definitions.get(_integer(part, 1), ("", ()))
            values.append(AssignedValue(name, index, offset + _integer(part, 2), _integer(part, 3)))
    return BufferAssignment(total, tuple(values))


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One value in memory."""

    instruction: Instruction
    """Instruction that defines it."""
    index: Index
    """Which array of the instruction's result it is."""
    array: Array
    size: int
    offset: int | None
    """First byte in the temporary memory; None if the compiler does not report it."""
    start: int
    end: int
    """First and last moment at which it is live, on the clock of the program."""


class _Clock:
    """Start and end of every instruction that runs, in steps of the schedule;
    a loop's body lies within its loop."""

    def __init__(self, module: Module):
        self.starts: dict[Instruction, int] = {}
        self.ends: dict[Instruction, int] = {}
        self.callers: defaultdict[Computation, list[Instruction]] = defaultdict(list)
        self._now = 0
        self._visit(module.entry)

    def _visit(self, computation: Computation) -> None:
        for instruction in computation:
            self._now += 1
            self.starts[instruction] = self._now
            if instruction.opcode in ("while", "call", "conditional", "async-start", "call-start"):
                for callee in instruction.called:
                    self.callers[callee].append(instruction)
                    self._visit(callee)
                self._now += 1
            self.ends[instruction] = self._now


def buffers_of(module: Module, assignment: BufferAssignment | None) -> list[Buffer]:
    """Lists every temporary of a scheduled program with its live range."""
    clock = _Clock(module)
    computations = dict.fromkeys(instruction.computation for instruction in clock.starts)
    running = {i.name: i for computation in computations for i in computation}
    if assignment is None:
        return list(_estimated_buffers(clock, running.values()))
    return list(_assigned_buffers(clock, running, assignment))


def _assigned_buffers(
    clock: _Clock, running: Mapping[str, Instruction], assignment: BufferAssignment
) -> Iterator[Buffer]:
    """Yields the buffers that the compiler reports."""
    for value in assignment.values:
        instruction = running.get(value.instruction)
        if instruction is None:
            continue
        array = dict(_leaves(instruction.shape)).get(value.index)
        if array is not None:
            start, end = _live_range(clock, (instruction, value.index))
            yield Buffer(instruction, value.index, array, value.size, value.offset, start, end)


def _estimated_buffers(clock: _Clock, instructions: Iterable[Instruction]) -> Iterator[Buffer]:
    """Yields the arrays of all results as buffers of their own sizes, where nothing is reported."""
    for instruction in instructions:
        if _NO_MEMORY.fullmatch(instruction.opcode) or _in_place(instruction):
            continue
        is_result = any(user.is_root for user in instruction.users)
        if instruction.computation.is_entry and is_result:
            continue
        for index, array in _leaves(instruction.shape):
            if array.memory_space == 0 and array.bytes:
                start, end = _live_range(clock, (instruction, index))
                yield Buffer(instruction, index, array, array.bytes, None, start, end)


_NO_MEMORY = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|while|conditional|call|after-all"
    "|partition-id|replica-id|opt-barrier"
    "|(copy|all-gather|all-reduce|collective-permute|async|call)-done|(async|call)-update"
)
"""Opcodes whose result takes no memory of its own."""


def _in_place(instruction: Instruction) -> bool:
    """Whether the result overwrites an operand, as an update of a slice does."""
    if "output_to_operand_aliasing" in instruction.attribute_text:
        return True
    if instruction.opcode == "dynamic-update-slice" or "dynamic-update-slice" in instruction.name:
        return any(operand.shape == instruction.shape for operand in instruction.operands)
    return False


def _leaves(shape: Shape, prefix: Index = ()) -> Iterator[tuple[Index, Array]]:
    if isinstance(shape, Array):
        yield prefix, shape
    else:
        for i, part in enumerate(shape):
            yield from _leaves(part, (*prefix, i))


def _live_range(clock: _Clock, value: _Place) -> tuple[int, int]:
    """Returns the first and last moment at which the value,
    or a tuple or loop that carries it, is accessed."""
    start, end = clock.starts[value[0]], clock.ends[value[0]]
    pending = [value]
    visited: set[_Place] = set()
    while pending:
        place = pending.pop()
        if place in visited:
            continue
        visited.add(place)
        holder, index = place
        if holder.opcode != "while":
            start = min(start, clock.starts[holder])
        if holder.is_root:
            for caller in clock.callers[holder.computation]:
                end = max(end, clock.ends[caller])
                if caller.opcode == "while":
                    if (
                        caller.attributes.get("condition", "").lstrip("%")
                        == holder.computation.name
                    ):
                        continue
                    pending.append((holder.computation.parameters[0], index))
                pending.append((caller, index))
        for user in holder.users:
            if user.opcode not in ("tuple", "get-tuple-element", "bitcast"):
                end = max(end, clock.ends[user])
            for number, operand in enumerate(user.operands):
                if operand is holder:
                    pending += _forwarded(user, number, index)
    return start, end


def _forwarded(user: Instruction, operand: int, index: Index) -> Iterator[_Place]:
    """Yields the instructions through which `user` passes on a value that it does not change."""
    opcode = user.opcode
    if opcode == "get-tuple-element":
        if index and int(user.attributes["index"]) == index[0]:
            yield user, index[1:]
    elif opcode == "tuple":
        yield user, (operand, *index)
    elif opcode == "while":
        yield user, index
        yield from ((inner.parameters[0], index) for inner in user.called)
    elif opcode in ("call", "async-start"):
        yield from (
            (inner.parameters[operand], index)
            for inner in user.called
            if operand in inner.parameters
        )
    elif opcode == "conditional":
        yield from (
            (inner.parameters[0], index) for inner in user.called[operand - 1 : operand] if operand
        )
    elif opcode.endswith("-done"):
        yield user, index[1:]
    elif opcode in ("bitcast", "opt-barrier") or (operand == 0 and _in_place(user)):
        yield user, index


def op_names_written_into(buffer: Buffer) -> Iterator[str]:
    """Yields JAX's names of the operations that a loop writes
    into a buffer it carries, such as saved activations."""
    pending: list[_Place] = [(buffer.instruction, buffer.index)]
    for _ in range(20):
        if not pending:
            return
        holder, index = pending.pop()
        uses = (
            (user, i)
            for user in holder.users
            for i, operand in enumerate(user.operands)
            if operand is holder
        )
        for user, number in uses:
            if user.opcode == "while" and index:
                writer = user.called[0].root.operand(index[0])
                if writer is not None:
                    yield from (i.op_name for body in writer.called for i in body)
                    yield writer.op_name
                    yield from (operand.op_name for operand in writer.operands)
            elif user.opcode in ("tuple", "bitcast", "copy"):
                pending.append((user, (number, *index) if user.opcode == "tuple" else index))


@dataclasses.dataclass(frozen=True)
class Peak:
    """Moment at which temporaries use most memory."""

    moment: int
    live_bytes: int
    """Bytes of live buffers; the compiler's allocation is larger if it packs them with gaps."""
    parts: tuple[tuple[Buffer, int], ...]
    """Live buffers, each with the bytes that no other buffer accounts for."""


def peak_of(buffers: list[Buffer]) -> Peak:
    """Finds the peak of live bytes; memory shared by several values is counted once."""
    best = Peak(0, 0, ())
    for moment in sorted({buffer.start for buffer in buffers}):
        live = [b for b in buffers if b.start <= moment <= b.end]
        if sum(b.size for b in live) <= best.live_bytes:
            continue
        parts = _disjoint(live)
        total = sum(n for _, n in parts)
        if total > best.live_bytes:
            best = Peak(moment, total, tuple(parts))
    return best


def _disjoint(live: list[Buffer]) -> list[tuple[Buffer, int]]:
    """Assigns every byte of memory to one buffer; the longest-lived buffers come first."""
    parts = [(b, b.size) for b in live if b.offset is None]
    covered: list[tuple[int, int]] = []
    for buffer in sorted(live, key=lambda b: (b.start - b.end, -b.size)):
        if buffer.offset is None:
            continue
        low, high = buffer.offset, buffer.offset + buffer.size
        uncovered = high - low - sum(max(0, min(high, b) - max(low, a)) for a, b in covered)
        if uncovered > 0:
            parts.append((buffer, uncovered))
            covered = union([*covered, (low, high)])
    return parts


def union[T: float](intervals: Iterable[tuple[T, T]]) -> list[tuple[T, T]]:
    """Returns the same set of points as intervals that do not overlap, in order."""
    merged: list[tuple[T, T]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
