"""Parser of compiled XLA programs, from the text that `compiled.as_text()` returns on CPU, GPU and TPU.

XLA prints one instruction per line, grouped into computations (OpenXLA, "Operation semantics"). The text is parsed
instead of JAX's private objects because it has the same form for every backend, in memory or in a file, and because
`jaxlib._hlo` aborts the process on some TPU programs.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import CensusError
from meshwright.hlo.scopes import Branches

_WIDTH = re.compile(r"(?:[suc]|b?f)(\d+)")
"""First number of an element type: its bits, as in `s4`, `bf16`, `f8e4m3fn`."""


@dataclasses.dataclass(frozen=True)
class Array:
    """Element type, dimensions and memory space of one array; the layout is dropped."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0
    """Number in the layout's `S(n)`: 0 is the default memory (HBM), 1 a TPU's VMEM, 5 the host."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding. Raises CensusError for an unknown element type."""
        width = _WIDTH.match(self.dtype)
        bits = int(width[1]) if width else {"pred": 8, "token": 0, "opaque": 0}.get(self.dtype)
        if bits is None:
            raise CensusError(
                f"the size of an array of {self.dtype}",
                "the parser has no size for this element type",
                "add it to Array.bytes in meshwright/hlo/parser.py",
            )
        return -(-self.elements * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape = Array | tuple["Shape", ...]


def arrays_of(shape: Shape) -> Iterator[Array]:
    """Yields the arrays of a shape; nested tuples are flattened in order."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from arrays_of(part)


def bytes_of(shape: Shape) -> int:
    """Sums the bytes of all arrays of a shape."""
    return sum(array.bytes for array in arrays_of(shape))


_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"[\w.\-]+")
_BARE = re.compile(r"^(?:[\w\[\],{}:()*]+ )?([A-Za-z_][\w.\-]*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
# The metadata of a Pallas kernel spans several lines; it is not read.
_KERNEL = re.compile(r"kernel_metadata=\{\n.*?\n\}", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
"""Quoted text, in which brackets and commas do not count; a bracket; a comma."""


def _tokens(text: str, start: int = 0) -> Iterator[tuple[re.Match[str], int]]:
    """Yields the tokens from `start` on, each with the number of brackets open after it."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token[0] in ("(", "[", "{")) - (token[0] in (")", "]", "}"))
        yield token, depth


def closing(text: str, start: int) -> int:
    """Finds the index of the bracket that closes the one at `start`."""
    for token, depth in _tokens(text, start):
        if not depth:
            return token.start()
    raise CensusError(
        "parsing a line of the program",
        f"a bracket is not closed: {text[start : start + 80]}",
        "pass the complete text of the program",
    )


def split_list(text: str) -> list[str]:
    """Splits `text` at its top-level commas; those inside brackets and quotes do not count."""
    parts, last = [], 0
    for token, depth in _tokens(text):
        if token[0] == "," and not depth:
            parts.append(text[last : token.start()].strip())
            last = token.end()
    tail = text[last:].strip()
    return [*parts, tail] if tail else parts


def parse_shape(text: str) -> Shape:
    """Parses `f32[4,8]{1,0:T(8,128)}`, or a parenthesised tuple of shapes."""
    text = text.strip()
    if text.startswith("("):
        return tuple(parse_shape(part) for part in split_list(text[1 : closing(text, 0)]))
    match = _ARRAY.match(text)
    if not match:
        return Array("token", ())
    # A bounded dynamic dimension prints as <=8; memory is allocated for the bound.
    dims = tuple(int(d.strip().removeprefix("<=")) for d in match[2].split(",") if d.strip())
    space = _SPACE.search(match[3] or "")
    return Array(match[1], dims, int(space[1]) if space else 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: Shape
    opcode: str
    operand_text: str
    """Text between the parentheses: the operands, a constant's value, or a parameter's number."""
    attribute_text: str
    """Text after the parentheses: the attributes."""
    is_root: bool
    """Whether its result is the computation's result."""

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        names = _NAME.findall(self.operand_text)
        if not names and self.operand_text.strip():
            bare = [_BARE.match(part) for part in split_list(self.operand_text)]
            names = [m[1] for m in bare if m]
        return tuple(names)

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Values of the attributes by name, as text: `channel_id` -> `1`."""
        values: dict[str, str] = {}
        for part in split_list(self.attribute_text):
            key, equals, value = part.partition("=")
            if equals:
                values[key.strip()] = value.strip()
        return values

    @functools.cached_property
    def op_name(self) -> str:
        """Name that JAX gave the operation, `jit(f)/shard_map/psum`; empty if there is none."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attribute_text)
        return match[1].replace("\\'", "'") if match else ""

    @functools.cached_property
    def target(self) -> str:
        """Target of a custom call: the routine, or `tpu_custom_call` for every TPU kernel; empty for others."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attribute_text)
        return match[1] if match else ""

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction runs: of a fusion, a loop, a branch; reducers are left out."""
        if self.opcode.endswith(("-done", "-update")):
            return ()  # they repeat the computation of their start
        keys = ["calls", "body", "condition", "true_computation", "false_computation", "branch_computations"]
        if self.opcode.startswith("custom-call"):
            keys.append("called_computations")
        if self.opcode in ("call", "async-start", "call-start"):
            keys.append("to_apply")
        return tuple(name for key in keys for name in _COMPUTATION.findall(self.attributes.get(key, "")))


@dataclasses.dataclass(frozen=True)
class Computation:
    """Sequence of instructions; a scheduled program runs them in this order."""

    name: str
    instructions: dict[str, Instruction]
    is_entry: bool
    """Whether the program starts here."""

    @functools.cached_property
    def root(self) -> Instruction:
        """Instruction whose result is the computation's result."""
        return next((i for i in self.instructions.values() if i.is_root), list(self.instructions.values())[-1])

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter instructions by their number."""
        return {int(i.operand_text): i for i in self.instructions.values() if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instructions that take each instruction as an operand, by its name."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                if operand in users:
                    users[operand].append(instruction)
        return users

    def operand(self, instruction: Instruction, number: int = 0) -> Instruction | None:
        """Returns the instruction that makes an operand; None if there is none."""
        names = instruction.operands
        return self.instructions.get(names[number]) if number < len(names) else None

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        """Returns the shapes of an instruction's operands."""
        return [self.instructions[name].shape for name in instruction.operands if name in self.instructions]

    def operand_arrays(self, instruction: Instruction) -> list[Array]:
        """Returns the arrays of an instruction's operands; tuples are flattened."""
        return [array for shape in self.operand_shapes(instruction) for array in arrays_of(shape)]


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of the Python stack that traced an instruction."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def location(self) -> str:
        """FILE:LINE without the folders."""
        return f"{Path(self.file).name}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Module:
    """Parsed program."""

    name: str
    header: str
    computations: dict[str, Computation]
    frames: dict[int, tuple[Frame, ...]]
    """Python stack of each stack_frame_id, innermost frame first."""
    unparsed: tuple[str, ...] = ()
    """Lines inside computations that the parser does not understand."""
    branches: Branches = dataclasses.field(default_factory=dict)
    """How often the branches of its conditionals are taken, as far as the caller knows."""

    @functools.cached_property
    def entry(self) -> Computation:
        """Computation at which the program starts."""
        return next(c for c in self.computations.values() if c.is_entry)

    @property
    def num_devices(self) -> int:
        """Number of devices that run the program together."""
        matches = [re.search(rf"\b{key}=(\d+)", self.header) for key in ("num_partitions", "replica_count")]
        return math.prod(int(match[1]) for match in matches if match)

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yields every instruction of the text with its computation, whether the program runs it or not."""
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                yield computation, instruction

    def called_by(self, instruction: Instruction) -> list[Computation]:
        """Returns the computations that an instruction runs."""
        return [self.computations[name] for name in instruction.called if name in self.computations]

    def line(self, instruction: Instruction) -> str:
        """Returns FILE:LINE of the Python that traced an instruction; empty if it is not recorded."""
        stack = self.source_stack(instruction)
        return stack[0].location if stack else ""

    def source_stack(self, instruction: Instruction) -> tuple[Frame, ...]:
        """Returns the Python stack that traced an instruction, innermost frame first; empty if it is not recorded."""
        text = instruction.attribute_text
        frame = re.search(r"stack_frame_id=(\d+)", text)
        if frame and int(frame[1]) in self.frames:
            return self.frames[int(frame[1])]
        file, line = (re.search(rf"source_{key}=\"?([^\"\s}}]+)", text) for key in ("file", "line"))
        return (Frame(file[1], int(line[1]), ""),) if file and line else ()


_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_LINE = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")


def _parse_instruction(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if not match:
        return None
    text = match[3]
    end = closing(text, 0) + 1 if text.startswith("(") else (text + " ").index(" ")
    opcode = _OPCODE.match(text, end)
    if not opcode:
        return None
    close = closing(text, opcode.end() - 1)
    shape = parse_shape(text[:end])
    return Instruction(match[2], shape, opcode[1], text[opcode.end() : close], text[close + 1 :], bool(match[1]))


def _parse_tables(lines: list[str]) -> dict[int, tuple[Frame, ...]]:
    """Parses the tables of source locations that precede the first computation."""
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] = {}
    for line in lines:
        if line.strip() in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line.strip(), {})
        elif (row := re.match(r"^(\d+) (.*)$", line)) is not None:
            current[int(row[1])] = row[2]
    numbers = {
        name: {i: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", row)} for i, row in tables.get(name, {}).items()}
        for name in ("FileLocations", "StackFrames")
    }
    names = {t: {i: v.strip('"') for i, v in tables.get(t, {}).items()} for t in ("FileNames", "FunctionNames")}
    frames: dict[int, tuple[Frame, ...]] = {}
    # XLA prints the parent's number plus one: a frame without a parent has 1, and some would be their own parent.
    offset = int(any(row.get("parent_frame_id") == i for i, row in numbers["StackFrames"].items()))
    for i in sorted(numbers["StackFrames"]):
        ids = numbers["StackFrames"][i]
        location = numbers["FileLocations"].get(ids.get("file_location_id", 0), {})
        frame = Frame(
            names["FileNames"].get(location.get("file_name_id", 0), "?"),
            location.get("line", 0),
            names["FunctionNames"].get(location.get("function_name_id", 0), ""),
        )
        frames[i] = (frame, *frames.get(ids.get("parent_frame_id", 0) - offset, ()))
    return frames


def parse_module(text: str) -> Module:
    """Parses the text of a compiled program. Raises CensusError if it is not the text of an XLA program."""
    lines = _COMMENT.sub("", _KERNEL.sub("kernel_metadata={}", text)).splitlines()
    if not lines or not lines[0].startswith("HloModule"):
        raise CensusError(
            "parsing the text of a program", "it does not begin with HloModule", "pass what compiled.as_text() returns"
        )
    computations: dict[str, Computation] = {}
    tables: list[str] = []
    unparsed: list[str] = []
    name, is_entry, body = "", False, None
    for line in lines[1:]:
        if body is None:
            header = _HEADER.match(line) if not line.startswith((" ", "\t")) else None
            if header:
                name, is_entry, body = header[2], bool(header[1]), dict[str, Instruction]()
            else:
                tables.append(line)
        elif line.startswith("}"):
            computations[name] = Computation(name, body, is_entry)
            body = None
        elif (instruction := _parse_instruction(line)) is not None:
            body[instruction.name] = instruction
        elif "=" in line:
            unparsed.append(line.strip())
    if not any(c.is_entry for c in computations.values()):
        raise CensusError(
            "parsing the text of a program",
            "it has no ENTRY computation",
            "pass all of what compiled.as_text() returns",
        )
    title = re.match(r"HloModule ([\w.\-]+)", lines[0])
    return Module(title[1] if title else "", lines[0], computations, _parse_tables(tables), tuple(unparsed))
