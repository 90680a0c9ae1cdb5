"""Memory of one device at a program's peak, by category and module."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from xlacensus.hlo.buffers import (
    Buffer,
    BufferAssignment,
    Peak,
    buffers_of,
    op_names_written_into,
    peak_of,
)
from xlacensus.hlo.parser import Module
from xlacensus.hlo.scopes import phase_of, plain_path, scopes_of


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array that the program takes."""

    path: str
    """Path in the arguments, such as `state.params.blocks.query`."""
    category: str
    """Category of its memory: parameters, optimizer state, batch, or one that the caller names."""
    module: str
    shape: tuple[int, ...]
    """Shape of the whole array."""
    local_shape: tuple[int, ...]
    bytes: int
    """Bytes of the local shard."""


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """The compiler's own figures in bytes of one device (`compiled.memory_analysis()`)."""

    arguments: int
    results: int
    aliased: int
    """Results that overwrite arguments."""
    temporary: int
    code: int
    reported_live: int | None = None
    """Peak of live bytes that the compiler reports; the heap that holds them is larger by its gaps."""
    host: int = 0
    """Temporaries in the host's memory."""

    @classmethod
    def of(cls, executable: Any) -> "CompiledMemory":
        """Returns the figures of a compiled program."""
        stats = executable.memory_analysis()
        host, peak = (
            getattr(stats, "host_temp_size_in_bytes", 0),
            getattr(stats, "peak_memory_in_bytes", 0),
        )
        return cls(
            arguments=stats.argument_size_in_bytes,
            results=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporary=stats.temp_size_in_bytes,
            code=stats.generated_code_size_in_bytes,
            # With offloading the reported peak is that of the host's memory.
            reported_live=peak if peak and not host else None,
            host=host,
        )

    @property
    def added(self) -> int:
        """Bytes that the program allocates besides its arguments."""
        return self.temporary + self.results - self.aliased

    @property
    def peak(self) -> int:
        """Bytes that the program allocates: arguments, results that do not overwrite arguments, temporaries."""
        return self.arguments + self.added

    @property
    def live(self) -> int:
        """Peak of live bytes; the allocated bytes if the compiler does not report it."""
        return self.peak if self.reported_live is None else min(self.reported_live, self.peak)


@dataclasses.dataclass(frozen=True)
class MemoryPart:
    """Bytes of one category in one module at the peak."""

    category: str
    module: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class PeakBuffer:
    """One temporary that is live at the peak."""

    category: str
    module: str
    array: str
    bytes: int
    instruction: str
    op_name: str
    line: str
    """FILE:LINE of the Python that made it; empty if the program does not record it."""
    start: int
    """First moment at which it is live, on the clock of the schedule."""
    end: int


@dataclasses.dataclass(frozen=True)
class MemoryProfile:
    """Temporaries over the schedule; the clock counts instructions, a loop's body once."""

    moments: tuple[int, ...]
    live_bytes: tuple[int, ...]
    """Most bytes of live temporaries from each moment to the next."""
    peak: int
    backward: int | None
    """Moment at which the backward pass begins; None for a program without one."""
    buffers: tuple[PeakBuffer, ...]
    """Largest temporaries at the peak."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one device at the program's peak."""

    compiled: CompiledMemory
    parts: tuple[MemoryPart, ...]
    """Bytes by category and module; they add up to `compiled.peak`."""
    largest: tuple[tuple[str, str, str, int], ...]
    """Largest temporaries at the peak: category, module, type and shape, bytes."""
    profile: MemoryProfile | None = None
    """Temporaries over the schedule, and which of them make the peak."""

    def by_category(self) -> dict[str, int]:
        """Sums the bytes by category, arguments first."""
        return dict(self._sums("category"))

    def by_module(self) -> dict[str, int]:
        """Sums the bytes by module, largest first."""
        return dict(self._sums("module").most_common())

    def _sums(self, field: str) -> Counter[str]:
        sums: Counter[str] = Counter()
        for part in self.parts:
            sums[getattr(part, field)] += part.bytes
        return sums


def read_memory(
    module: Module,
    compiled: CompiledMemory,
    assignment: BufferAssignment | None,
    arguments: Sequence[Argument],
) -> Memory:
    """Assigns every byte of the program's peak to a category and a module.

    Arguments have the category that they come with. Temporaries live at the peak are sorted by the operation that
    defines them: values of the forward pass that outlive it are saved activations, gathered parameters are weights in
    use, values of the backward pass with as many elements as a parameter are gradients. Bytes that the compiler
    allocates beyond the live buffers are "packing": gaps, and on TPU the padding of tiles.
    """
    sums: Counter[tuple[str, str]] = Counter()
    for argument in arguments:
        sums[argument.category, argument.module] += argument.bytes
    given = sum(argument.bytes for argument in arguments)
    if compiled.arguments != given:
        sums["alignment of arguments", ""] += compiled.arguments - given
    sums["results", ""] += compiled.results - compiled.aliased
    buffers = buffers_of(module, assignment)
    peak = peak_of(buffers)
    classifier = _Classifier(module, buffers, arguments)
    largest: Counter[tuple[str, str, str]] = Counter()
    # Without a buffer assignment the sizes are estimates: they are scaled to what the compiler allocates.
    scale = min(1.0, compiled.temporary / peak.live_bytes) if peak.live_bytes else 1.0
    for buffer, size in peak.parts:
        category, part = classifier.classify(buffer)
        sums[category, part] += int(size * scale)
        largest[category, part, str(buffer.array)] += int(size * scale)
    sums["packing", ""] += compiled.temporary - sum(int(size * scale) for _, size in peak.parts)
    parts = tuple(MemoryPart(category, part, n) for (category, part), n in sums.items() if n)
    profile = _profile(buffers, peak, classifier, scale)
    return Memory(compiled, parts, tuple((*key, n) for key, n in largest.most_common(12)), profile)


_MOMENTS, _BUFFERS = 400, 40
"""Most moments of a profile, and temporaries that explain its peak."""


def _profile(
    buffers: Sequence[Buffer], peak: Peak, classifier: "_Classifier", scale: float
) -> MemoryProfile:
    """Sums the live temporaries at each moment, bytes that several share once where the compiler reports offsets."""
    changes: Counter[int] = Counter()
    for buffer in buffers:
        changes[buffer.start] += buffer.size
        changes[buffer.end + 1] -= buffer.size
    end = max(changes, default=0)
    every = max(1, -(-end // _MOMENTS))
    sums: dict[int, int] = {}
    now = 0
    for moment in range(0, end + every, every):
        most = now
        for each in range(moment, moment + every):
            now += changes.get(each, 0)
            most = max(most, now)
        sums[moment] = most
    rows = [
        PeakBuffer(
            *classifier.classify(buffer),
            array=str(buffer.array),
            bytes=int(size * scale),
            instruction=buffer.instruction.name,
            op_name=buffer.instruction.op_name,
            line=buffer.instruction.line,
            start=buffer.start,
            end=buffer.end,
        )
        for buffer, size in sorted(peak.parts, key=lambda part: -part[1])[:_BUFFERS]
    ]
    # Values that share memory are counted more than once in a sum, and no moment has more than the peak.
    levels = tuple(int(min(n, peak.live_bytes) * scale) for n in sums.values())
    return MemoryProfile(tuple(sums), levels, peak.moment, classifier.first_backward, tuple(rows))


GRADIENTS = "gradients"
"""Usual named scope in which gradients are reduced: its values are gradients, and it is not a module."""
_REDUCTIONS = ("all-reduce", "reduce-scatter", "all-reduce-start", "reduce-scatter-start")


class _Classifier:
    """Category and module of temporaries, from the names of their operations and the shapes of the parameters."""

    def __init__(self, module: Module, buffers: Sequence[Buffer], arguments: Sequence[Argument]):
        self._module = module
        starts = (
            b.start
            for b in buffers
            if b.array.elements > 1 and self._needs_backward(b.instruction.op_name)
        )
        self.first_backward: int | None = min(starts, default=None)
        parameters = [a for a in arguments if a.category == "parameters"]
        sizes = {math.prod(shape) for a in parameters for shape in (a.shape, a.local_shape)}
        # One layer of a stack, whole or local.
        sizes |= {
            math.prod(s[1:]) for a in parameters for s in (a.shape, a.local_shape) if len(s) > 1
        }
        self._parameter_sizes = sizes - {1}
        self._argument_category = {a.path: a.category for a in arguments}
        # The scope of a parameter is its path without the name of the argument that holds it.
        self._module_of_scope = {
            a.path[a.path.index(f".{a.module}") + 1 :]: a.module for a in parameters if a.module
        }

    def _needs_backward(self, op_name: str) -> bool:
        """Whether an operation can run only once the backward pass has begun; zeros of sums come earlier."""
        early = op_name.endswith(("broadcast_in_dim", "/while", "iota"))
        return phase_of(op_name, self._module.branches) in ("backward", "recomputed") and not early

    def classify(self, buffer: Buffer) -> tuple[str, str]:
        """Returns the category and module of a temporary."""
        instruction, branches = buffer.instruction, self._module.branches
        if instruction.opcode == "copy" and instruction.operands:
            source = instruction.operands[0]
            if source.opcode == "parameter" and source.computation.is_entry:
                return (
                    f"copies of {self._argument_category.get(plain_path(source.op_name), 'arguments')}",
                    "",
                )
        scopes, phase = instruction.scopes, phase_of(instruction.op_name, branches)
        known = self._module_of_scope
        part = next((s for s in scopes if s not in known), "") or (
            known[scopes[0]] if scopes else ""
        )
        is_weight = any(s in known for s in scopes)
        if phase in ("forward", "recomputed") and is_weight and "gather" in instruction.op_name:
            return "weights in use", part
        is_gradient = is_weight or buffer.array.elements in self._parameter_sizes
        spans_turn = (
            self.first_backward is not None and buffer.start < self.first_backward < buffer.end
        )
        if phase == "forward" and spans_turn:
            return "saved activations", part
        if phase == "update" and spans_turn and not scopes:
            return self._loop_buffer(buffer, is_gradient)
        if is_gradient and (
            phase == "backward" or GRADIENTS in scopes or instruction.opcode in _REDUCTIONS
        ):
            return "gradients", "" if part == GRADIENTS else part
        if phase == "recomputed":
            return "recomputed activations", part
        return "temporaries", "" if part == GRADIENTS else part

    def _loop_buffer(self, buffer: Buffer, is_gradient: bool) -> tuple[str, str]:
        branches = self._module.branches
        names = op_names_written_into(buffer)
        written = next((n for n in names if scopes_of(n, branches)), "")
        part = next(iter(scopes_of(written, branches)), "")
        if written:
            is_gradient = phase_of(written, branches) == "backward"
        return ("gradients" if is_gradient else "saved activations"), self._module_of_scope.get(
            part, part
        )
