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
from xlacensus.hlo.parser import Instruction, Module
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
    """Peak of live bytes that the compiler reports;
    the heap that holds them is larger by its gaps."""
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
        """Bytes that the program allocates: arguments, results
        that do not overwrite arguments, temporaries."""
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

    Arguments have the category that they come with. Temporaries live at the peak are sorted by the
    operation that defines them: values of the forward pass that outlive it are saved activations,
    gathered parameters are weights in use, values of the backward pass with as many elements as a
    parameter are gradients. Bytes that the compiler allocates beyond the live buffers are
    "packing": gaps, and on TPU the padding of tiles.
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
    # Without a buffer assignment the sizes are estimates: they are scaled
    # to what the compiler allocates.
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
    """Sums the live temporaries at each moment, and lists the largest at the peak.

    Bytes that several share count once where the compiler reports offsets. scale: bytes that the
    compiler allocates over those of the live buffers.
    """
    sums = _live_bytes(buffers)
    # Values that share memory are counted more than once in a sum, and no moment has more than the
    # peak.
    levels = tuple(int(min(n, peak.live_bytes) * scale) for n in sums.values())
    largest = sorted(peak.parts, key=lambda part: -part[1])[:_BUFFERS]
    rows = tuple(_peak_buffer(buffer, size, classifier, scale) for buffer, size in largest)
    return MemoryProfile(tuple(sums), levels, peak.moment, classifier.first_backward, rows)


def _live_bytes(buffers: Sequence[Buffer]) -> dict[int, int]:
    """Returns the most bytes live in each of at most _MOMENTS spans, by the span's first moment."""
    changes: Counter[int] = Counter()
    for buffer in buffers:
        changes[buffer.start] += buffer.size
        changes[buffer.end + 1] -= buffer.size
    end = max(changes, default=0)
    length = max(1, -(-end // _MOMENTS))
    most_live: dict[int, int] = {}
    live = 0
    for first in range(0, end + length, length):
        most = live
        for moment in range(first, first + length):
            live += changes.get(moment, 0)
            most = max(most, live)
        most_live[first] = most
    return most_live


def _peak_buffer(buffer: Buffer, size: int, classifier: "_Classifier", scale: float) -> PeakBuffer:
    category, module = classifier.classify(buffer)
    return PeakBuffer(
        category,
        module,
        array=str(buffer.array),
        bytes=int(size * scale),
        instruction=buffer.instruction.name,
        op_name=buffer.instruction.op_name,
        line=buffer.instruction.line,
        start=buffer.start,
        end=buffer.end,
    )


GRADIENTS = "gradients"
"""Usual named scope in which gradients are reduced: its values are gradients,
and it is not a module."""
_REDUCTIONS = ("all-reduce", "reduce-scatter", "all-reduce-start", "reduce-scatter-start")


def _sizes_of(parameters: Sequence[Argument]) -> set[int]:
    """Returns the elements of each parameter and of one layer of it, global and local."""
    sizes: set[int] = set()
    for parameter in parameters:
        for shape in (parameter.shape, parameter.local_shape):
            sizes.add(math.prod(shape))
            if len(shape) > 1:
                sizes.add(math.prod(shape[1:]))
    return sizes - {1}


class _Classifier:
    """Category and module of temporaries, from the names of their operations and the shapes
    of the parameters."""

    def __init__(self, module: Module, buffers: Sequence[Buffer], arguments: Sequence[Argument]):
        self._module = module
        self.first_backward = self._first_backward(buffers)
        self._argument_category = {a.path: a.category for a in arguments}
        parameters = [a for a in arguments if a.category == "parameters"]
        self._parameter_sizes = _sizes_of(parameters)
        self._module_of_scope: dict[str, str] = {}
        for parameter in parameters:
            if parameter.module:
                # The scope of a parameter is its path without the name of the argument.
                start = parameter.path.index(f".{parameter.module}") + 1
                self._module_of_scope[parameter.path[start:]] = parameter.module

    def _first_backward(self, buffers: Sequence[Buffer]) -> int | None:
        """Returns the moment at which the backward pass begins; None if there is none."""
        starts: list[int] = []
        for buffer in buffers:
            if buffer.array.elements > 1 and self._needs_backward(buffer.instruction.op_name):
                starts.append(buffer.start)
        return min(starts, default=None)

    def _needs_backward(self, op_name: str) -> bool:
        """Whether an operation can run only once the backward pass has begun;
        zeros of sums come earlier."""
        early = op_name.endswith(("broadcast_in_dim", "/while", "iota"))
        return phase_of(op_name, self._module.branches) in ("backward", "recomputed") and not early

    def classify(self, buffer: Buffer) -> tuple[str, str]:
        """Returns the category and module of a temporary."""
        instruction = buffer.instruction
        copied = self._copied_argument(instruction)
        if copied:
            return f"copies of {copied}", ""
        scopes = instruction.scopes
        phase = phase_of(instruction.op_name, self._module.branches)
        module = self._module_of(scopes)
        is_weight = any(scope in self._module_of_scope for scope in scopes)
        if phase in ("forward", "recomputed") and is_weight and "gather" in instruction.op_name:
            return "weights in use", module
        outlives_forward = (
            self.first_backward is not None and buffer.start < self.first_backward < buffer.end
        )
        if phase == "forward" and outlives_forward:
            return "saved activations", module
        is_gradient = is_weight or buffer.array.elements in self._parameter_sizes
        if phase == "update" and outlives_forward and not scopes:
            return self._loop_buffer(buffer, is_gradient)
        is_reduced = GRADIENTS in scopes or instruction.opcode in _REDUCTIONS
        if is_gradient and (phase == "backward" or is_reduced):
            return "gradients", "" if module == GRADIENTS else module
        if phase == "recomputed":
            return "recomputed activations", module
        return "temporaries", "" if module == GRADIENTS else module

    def _copied_argument(self, instruction: Instruction) -> str:
        """Returns the category of the argument that an instruction copies; empty if it does not."""
        if instruction.opcode != "copy" or not instruction.operands:
            return ""
        source = instruction.operands[0]
        if source.opcode != "parameter" or not source.computation.is_entry:
            return ""
        return self._argument_category.get(plain_path(source.op_name), "arguments")

    def _module_of(self, scopes: Sequence[str]) -> str:
        """Returns the first scope that is not a parameter's,
        or else the first parameter's module."""
        for scope in scopes:
            if scope and scope not in self._module_of_scope:
                return scope
        return self._module_of_scope[scopes[0]] if scopes else ""

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
