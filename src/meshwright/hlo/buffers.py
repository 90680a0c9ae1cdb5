"""Liveness of a compiled program's buffers, and the peak of temporary memory.

A scheduled program fixes the order of its instructions, so a buffer is live from the instruction that defines it to
the last that reads it, through tuples and loops. If XLA provides its buffer assignment (CPU and GPU), sizes and offsets
are its own and buffers that share memory are counted once; otherwise (TPU) sizes are those of the shapes.
"""

import dataclasses
from collections.abc import Iterator

from meshwright.hlo.buffer_assignment import BufferAssignment, Index
from meshwright.hlo.parser import Array, Computation, Instruction, Module, Shape


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
    """Start and end of every instruction, in steps of the schedule; a loop's body lies within its loop."""

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
                for name in instruction.called:
                    if name in self._module.computations:
                        self.callers.setdefault(name, []).append((computation, instruction))
                        self._visit(self._module.computations[name])
                self._now += 1
            self.ends[key] = self._now


def buffers_of(module: Module, assignment: BufferAssignment | None) -> list[Buffer]:
    """Lists every temporary of a scheduled program with its live range."""
    clock = _Clock(module)
    computations = {
        instruction.name: computation
        for name in dict.fromkeys(key[0] for key in clock.starts)
        for computation in [module.computations[name]]
        for instruction in computation.instructions.values()
    }
    if assignment is None:
        return list(_buffers_of_shapes(module, clock, computations))
    buffers: list[Buffer] = []
    for value in assignment.values:
        computation = computations.get(value.instruction)
        if computation is None:
            continue
        instruction = computation.instructions[value.instruction]
        array = _part(instruction.shape, value.index)
        if array is not None:
            start, end = _live_range(module, clock, computation, instruction, value.index)
            buffers.append(Buffer(instruction, computation, value.index, array, value.size, value.offset, start, end))
    return buffers


def _buffers_of_shapes(module: Module, clock: _Clock, computations: dict[str, Computation]) -> Iterator[Buffer]:
    """Yields the buffers of a program without a buffer assignment, with the sizes of their shapes."""
    for name, computation in computations.items():
        instruction = computation.instructions[name]
        if instruction.opcode in _NO_MEMORY or _in_place(instruction, computation):
            continue
        for index, array in _leaves(instruction.shape):
            if array.memory_space == 0 and array.bytes and not _is_result(computation, instruction):
                start, end = _live_range(module, clock, computation, instruction, index)
                yield Buffer(instruction, computation, index, array, array.bytes, None, start, end)


_NO_MEMORY = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "copy-done",
        "all-gather-done",
        "all-reduce-done",
        "collective-permute-done",
        "async-done",
        "call-done",
        "async-update",
        "call-update",
    }
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


def _part(shape: Shape, index: Index) -> Array | None:
    """Returns the array at `index` of a tuple shape; None if it is not an array."""
    for i in index:
        if isinstance(shape, Array) or i >= len(shape):
            return None
        shape = shape[i]
    return shape if isinstance(shape, Array) else None


def _live_range(
    module: Module, clock: _Clock, computation: Computation, instruction: Instruction, index: Index
) -> tuple[int, int]:
    """Returns the first and last moment at which the value, or a tuple or loop that carries it, is accessed."""
    key = (computation.name, instruction.name)
    start, end = clock.starts[key], clock.ends[key]
    pending: list[tuple[Computation, Instruction, Index]] = [(computation, instruction, index)]
    visited: set[tuple[str, str, Index]] = set()
    while pending:
        current, holder, part = pending.pop()
        if (current.name, holder.name, part) in visited:
            continue
        visited.add((current.name, holder.name, part))
        if holder.opcode != "while":
            start = min(start, clock.starts[current.name, holder.name])
        if holder.is_root:
            for outer, caller in clock.callers.get(current.name, ()):
                end = max(end, clock.ends[outer.name, caller.name])
                if caller.opcode == "while":
                    if caller.attributes.get("condition", "").lstrip("%") == current.name:
                        continue
                    pending.append((current, current.parameters[0], part))
                pending.append((outer, caller, part))
        for user in current.users[holder.name]:
            if user.opcode not in ("tuple", "get-tuple-element", "bitcast"):
                end = max(end, clock.ends[current.name, user.name])
            for k, operand in enumerate(user.operands):
                if operand == holder.name:
                    pending += _forwarded(module, current, user, k, part)
    return start, end


def _forwarded(
    module: Module, computation: Computation, user: Instruction, operand: int, index: Index
) -> Iterator[tuple[Computation, Instruction, Index]]:
    """Yields the instructions through which `user` passes on a value that it does not change."""
    if user.opcode == "get-tuple-element":
        if index and int(user.attributes["index"]) == index[0]:
            yield computation, user, index[1:]
    elif user.opcode == "tuple":
        yield computation, user, (operand, *index)
    elif user.opcode in ("bitcast", "opt-barrier"):
        yield computation, user, index
    elif user.opcode == "while":
        yield computation, user, index
        for name in user.called:
            inner = module.computations[name]
            yield inner, inner.parameters[0], index
    elif user.opcode in ("call", "async-start"):
        for name in user.called:
            inner = module.computations[name]
            if operand in inner.parameters:
                yield inner, inner.parameters[operand], index
    elif user.opcode == "conditional" and operand > 0:
        names = [n for n in user.called if n in module.computations]
        if operand - 1 < len(names):
            inner = module.computations[names[operand - 1]]
            yield inner, inner.parameters[0], index
    elif user.opcode.endswith("-done"):
        yield computation, user, index[1:]
    elif _in_place(user, computation) and operand == 0:
        yield computation, user, index


def op_names_written_into(module: Module, buffer: Buffer) -> Iterator[str]:
    """Yields JAX's names of the operations that a loop writes into a buffer it carries, such as saved activations."""
    pending: list[tuple[Computation, Instruction, Index]] = [(buffer.computation, buffer.instruction, buffer.index)]
    for _ in range(20):
        if not pending:
            return
        computation, holder, index = pending.pop()
        for user in computation.users[holder.name]:
            for k, operand in enumerate(user.operands):
                if operand != holder.name:
                    continue
                if user.opcode == "while" and index:
                    body = module.computations[user.attributes["body"].lstrip("%")]
                    yield from _op_names(module, body, body.root.operands[index[0]])
                elif user.opcode in ("tuple", "bitcast", "copy"):
                    pending += [(computation, user, (k, *index) if user.opcode == "tuple" else index)]


def _op_names(module: Module, body: Computation, name: str) -> Iterator[str]:
    """Yields the names of an instruction, of the instructions fused into it, and of its operands."""
    writer = body.instructions.get(name)
    if writer is None:
        return
    for inner in (module.computations[c] for c in writer.called if c in module.computations):
        yield from (i.op_name for i in inner.instructions.values())
    yield writer.op_name
    yield from (body.instructions[o].op_name for o in writer.operands if o in body.instructions)


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
    placed = [b for b in live if b.offset is not None]
    covered: list[tuple[int, int]] = []
    for buffer in sorted(placed, key=lambda b: (b.start - b.end, -b.size)):
        assert buffer.offset is not None
        low, high = buffer.offset, buffer.offset + buffer.size
        uncovered = high - low - sum(max(0, min(high, b) - max(low, a)) for a, b in covered)
        if uncovered > 0:
            parts.append((buffer, uncovered))
            covered = _merge([*covered, (low, high)])
    return parts


def _merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges overlapping spans of bytes."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged
