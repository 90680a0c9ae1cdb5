"""Liveness of a compiled program's buffers, and the peak of temporary memory.

A scheduled program fixes the order of its instructions, so a buffer is live from the instruction that defines it to
the last that reads it, through tuples and loops. If XLA provides its buffer assignment (CPU and GPU), sizes and offsets
are its own and buffers that share memory are counted once; otherwise (TPU) sizes are those of the shapes.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

from meshwright.hlo.parser import Array, Computation, Instruction, Module, Shape

Index = tuple[int, ...]
"""Path to one array of a tuple shape."""
_Place = tuple[Computation, Instruction, Index]
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
    """Bytes."""


@dataclasses.dataclass(frozen=True)
class BufferAssignment:
    """Temporary memory of a program, as XLA assigned it."""

    temporary: int
    """Bytes of all allocations of temporaries."""
    values: tuple[AssignedValue, ...]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the field numbers and values of a protocol buffer."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        key = varint()
        wire_type = key & 7
        if wire_type == 0:
            yield key >> 3, varint()
            continue
        length = varint() if wire_type == 2 else 8 if wire_type == 1 else 4
        yield key >> 3, data[position : position + length]
        position += length


def _integer(data: bytes, number: int, default: int = 0) -> int:
    return next((v for k, v in _fields(data) if k == number and isinstance(v, int)), default)


def _messages(data: bytes, number: int) -> list[bytes]:
    return [v for k, v in _fields(data) if k == number and isinstance(v, bytes)]


def read_assignment(assignment: bytes, module: bytes) -> BufferAssignment:
    """Reads a serialised BufferAssignmentProto and HloModuleProto (xla/service/hlo.proto gives the field numbers)."""
    names: dict[int, str] = {}
    for computation in _messages(module, 3):
        for instruction in _messages(computation, 2):
            names[_integer(instruction, 35)] = _messages(instruction, 1)[0].decode()
    definitions: dict[int, tuple[str, Index]] = {}
    for buffer in _messages(assignment, 1):
        for location in _messages(buffer, 3):
            packed = b"".join(_messages(location, 3))
            # Small indices take one byte each in the packed form; a single one is not packed.
            index = tuple(packed) or tuple(v for k, v in _fields(location) if k == 3 and isinstance(v, int))
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
    computation: Computation
    """Computation of that instruction."""
    index: Index
    """Which array of the instruction's result it is."""
    array: Array
    size: int
    """Bytes."""
    offset: int | None
    """First byte in the temporary memory; None if the compiler does not report it."""
    start: int
    end: int
    """First and last moment at which it is live, on the clock of the program."""


class _Clock:
    """Start and end of every instruction that runs, in steps of the schedule; a loop's body lies within its loop."""

    def __init__(self, module: Module):
        self.starts: dict[tuple[str, str], int] = {}
        self.ends: dict[tuple[str, str], int] = {}
        self.callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        self._module, self._now = module, 0
        self._visit(module.entry)

    def _visit(self, computation: Computation) -> None:
        for instruction in computation.instructions.values():
            key = (computation.name, instruction.name)
            self._now += 1
            self.starts[key] = self._now
            if instruction.opcode in ("while", "call", "conditional", "async-start", "call-start"):
                for callee in self._module.called_by(instruction):
                    self.callers.setdefault(callee.name, []).append((computation, instruction))
                    self._visit(callee)
                self._now += 1
            self.ends[key] = self._now


def buffers_of(module: Module, assignment: BufferAssignment | None) -> list[Buffer]:
    """Lists every temporary of a scheduled program with its live range."""
    clock = _Clock(module)
    running = [module.computations[name] for name in dict.fromkeys(computation for computation, _ in clock.starts)]
    computations = {name: computation for computation in running for name in computation.instructions}
    if assignment is None:
        return list(_buffers_of_shapes(module, clock, computations))
    buffers: list[Buffer] = []
    for value in assignment.values:
        computation = computations.get(value.instruction)
        if computation is None:
            continue
        instruction = computation.instructions[value.instruction]
        array = dict(_leaves(instruction.shape)).get(value.index)
        if array is not None:
            start, end = _live_range(module, clock, (computation, instruction, value.index))
            buffers.append(Buffer(instruction, computation, value.index, array, value.size, value.offset, start, end))
    return buffers


def _buffers_of_shapes(module: Module, clock: _Clock, computations: dict[str, Computation]) -> Iterator[Buffer]:
    """Yields the buffers of a program without a buffer assignment, with the sizes of their shapes."""
    for name, computation in computations.items():
        instruction = computation.instructions[name]
        if _NO_MEMORY.fullmatch(instruction.opcode) or _in_place(instruction, computation):
            continue
        for index, array in _leaves(instruction.shape):
            if array.memory_space == 0 and array.bytes and not _is_result(computation, instruction):
                start, end = _live_range(module, clock, (computation, instruction, index))
                yield Buffer(instruction, computation, index, array, array.bytes, None, start, end)


_NO_MEMORY = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|while|conditional|call|after-all|partition-id|replica-id"
    "|opt-barrier|(copy|all-gather|all-reduce|collective-permute|async|call)-done|(async|call)-update"
)
"""Opcodes whose result takes no memory of its own."""


def _in_place(instruction: Instruction, computation: Computation) -> bool:
    """Whether the result overwrites an operand, as an update of a slice does."""
    if "output_to_operand_aliasing" in instruction.attribute_text:
        return True
    if instruction.opcode == "dynamic-update-slice" or "dynamic-update-slice" in instruction.name:
        return any(shape == instruction.shape for shape in computation.operand_shapes(instruction))
    return False


def _is_result(computation: Computation, instruction: Instruction) -> bool:
    return computation.is_entry and any(user.is_root for user in computation.users[instruction.name])


def _leaves(shape: Shape, prefix: Index = ()) -> Iterator[tuple[Index, Array]]:
    if isinstance(shape, Array):
        yield prefix, shape
    else:
        for i, part in enumerate(shape):
            yield from _leaves(part, (*prefix, i))


def _live_range(module: Module, clock: _Clock, value: _Place) -> tuple[int, int]:
    """Returns the first and last moment at which the value, or a tuple or loop that carries it, is accessed."""
    key = (value[0].name, value[1].name)
    start, end = clock.starts[key], clock.ends[key]
    pending = [value]
    visited: set[tuple[str, str, Index]] = set()
    while pending:
        current, holder, index = pending.pop()
        if (current.name, holder.name, index) in visited:
            continue
        visited.add((current.name, holder.name, index))
        if holder.opcode != "while":
            start = min(start, clock.starts[current.name, holder.name])
        if holder.is_root:
            for outer, caller in clock.callers.get(current.name, ()):
                end = max(end, clock.ends[outer.name, caller.name])
                if caller.opcode == "while":
                    if caller.attributes.get("condition", "").lstrip("%") == current.name:
                        continue
                    pending.append((current, current.parameters[0], index))
                pending.append((outer, caller, index))
        for user in current.users[holder.name]:
            if user.opcode not in ("tuple", "get-tuple-element", "bitcast"):
                end = max(end, clock.ends[current.name, user.name])
            for number, operand in enumerate(user.operands):
                if operand == holder.name:
                    pending += _forwarded(module, current, user, number, index)
    return start, end


def _forwarded(
    module: Module, computation: Computation, user: Instruction, operand: int, index: Index
) -> Iterator[_Place]:
    """Yields the instructions through which `user` passes on a value that it does not change."""
    bodies = module.called_by(user)
    if user.opcode == "get-tuple-element":
        if index and int(user.attributes["index"]) == index[0]:
            yield computation, user, index[1:]
    elif user.opcode == "tuple":
        yield computation, user, (operand, *index)
    elif user.opcode in ("bitcast", "opt-barrier"):
        yield computation, user, index
    elif user.opcode == "while":
        yield computation, user, index
        yield from ((inner, inner.parameters[0], index) for inner in bodies)
    elif user.opcode in ("call", "async-start"):
        yield from ((inner, inner.parameters[operand], index) for inner in bodies if operand in inner.parameters)
    elif user.opcode == "conditional":
        yield from ((inner, inner.parameters[0], index) for inner in bodies[operand - 1 : operand] if operand)
    elif user.opcode.endswith("-done"):
        yield computation, user, index[1:]
    elif operand == 0 and _in_place(user, computation):
        yield computation, user, index


def op_names_written_into(module: Module, buffer: Buffer) -> Iterator[str]:
    """Yields JAX's names of the operations that a loop writes into a buffer it carries, such as saved activations."""
    pending: list[_Place] = [(buffer.computation, buffer.instruction, buffer.index)]
    for _ in range(20):
        if not pending:
            return
        computation, holder, index = pending.pop()
        for user in computation.users[holder.name]:
            for number, operand in enumerate(user.operands):
                if operand != holder.name:
                    continue
                if user.opcode == "while" and index:
                    body = module.called_by(user)[0]
                    writer = body.operand(body.root, index[0])
                    if writer is not None:
                        for inner in module.called_by(writer):
                            yield from (i.op_name for i in inner.instructions.values())
                        yield writer.op_name
                        yield from (body.instructions[o].op_name for o in writer.operands if o in body.instructions)
                elif user.opcode in ("tuple", "bitcast", "copy"):
                    pending.append((computation, user, (number, *index) if user.opcode == "tuple" else index))


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
