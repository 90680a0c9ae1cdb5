"""Parser of compiled XLA programs, from the text that `compiled.as_text()` returns
on CPU, GPU and TPU.

XLA prints one instruction per line, grouped into computations (OpenXLA, "Operation semantics"). The
text is parsed instead of JAX's private objects because it has the same form for every backend, in
memory or in a file, and because `jaxlib._hlo` aborts the process on some TPU programs.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path

from xlacensus.errors import CensusError
from xlacensus.hlo.scopes import Branches, scopes_of

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
                "add it to Array.bytes in xlacensus/hlo/parser.py",
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


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation."""

    computation: "Computation" = dataclasses.field(repr=False)
    name: str
    shape: Shape
    opcode: str
    operand_text: str
    """Text between the parentheses: the operands, a constant's value, or a parameter's number."""
    attribute_text: str
    """Text after the parentheses: the attributes."""
    is_root: bool

    @functools.cached_property
    def operands(self) -> tuple["Instruction", ...]:
        """Instructions that make the operands."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        names = _NAME.findall(self.operand_text)
        if not names:
            names = [
                match[1] for part in split_list(self.operand_text) if (match := _BARE.match(part))
            ]
        known = self.computation.instructions
        return tuple(known[name] for name in names if name in known)

    def operand(self, number: int = 0) -> "Instruction | None":
        """Returns the instruction that makes an operand; None if there is none."""
        return self.operands[number] if number < len(self.operands) else None

    @property
    def operand_arrays(self) -> list[Array]:
        """Arrays of the operands; tuples are flattened."""
        return [array for operand in self.operands for array in arrays_of(operand.shape)]

    @property
    def users(self) -> list["Instruction"]:
        """Instructions that take it as an operand."""
        return self.computation.users[self.name]

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Values of the attributes by name, as text: `channel_id` -> `1`."""
        pairs = (part.partition("=") for part in split_list(self.attribute_text))
        return {key.strip(): value.strip() for key, equals, value in pairs if equals}

    @functools.cached_property
    def op_name(self) -> str:
        """Name that JAX gave the operation, `jit(f)/shard_map/psum`; empty if there is none."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attribute_text)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def scopes(self) -> tuple[str, ...]:
        """Names given by `jax.named_scope`, outermost first."""
        return scopes_of(self.op_name, self.computation.module.branches)

    @functools.cached_property
    def target(self) -> str:
        """Target of a custom call: the routine, or `tpu_custom_call` for every TPU kernel;
        empty for others."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attribute_text)
        return match[1] if match else ""

    @functools.cached_property
    def called(self) -> tuple["Computation", ...]:
        """Computations that the instruction runs: of a fusion, a loop, a branch;
        reducers are left out."""
        if self.opcode.endswith(("-done", "-update")):
            return ()  # they repeat the computation of their start
        keys = [
            "calls",
            "body",
            "condition",
            "true_computation",
            "false_computation",
            "branch_computations",
        ]
        if self.opcode.startswith("custom-call"):
            keys.append("called_computations")
        if self.opcode in ("call", "async-start", "call-start"):
            keys.append("to_apply")
        names = (
            name for key in keys for name in _COMPUTATION.findall(self.attributes.get(key, ""))
        )
        known = self.computation.module.computations
        return tuple(known[name] for name in names if name in known)

    @functools.cached_property
    def stack(self) -> tuple["Frame", ...]:
        """Python stack that traced the instruction, innermost frame first;
        empty if it is not recorded."""
        frames, text = self.computation.module.frames, self.attribute_text
        frame = re.search(r"stack_frame_id=(\d+)", text)
        if frame and int(frame[1]) in frames:
            return frames[int(frame[1])]
        file, line = (re.search(rf"source_{key}=\"?([^\"\s}}]+)", text) for key in ("file", "line"))
        return (Frame(file[1], int(line[1]), ""),) if file and line else ()

    @property
    def line(self) -> str:
        """FILE:LINE of the Python that traced the instruction; empty if it is not recorded."""
        return self.stack[0].location if self.stack else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Sequence of instructions; a scheduled program runs them in this order."""

    module: "Module" = dataclasses.field(repr=False)
    name: str
    is_entry: bool
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @functools.cached_property
    def root(self) -> Instruction:
        """Instruction whose result is the computation's result."""
        return next((i for i in self if i.is_root), list(self)[-1])

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter instructions by their number."""
        return {int(i.operand_text): i for i in self if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instructions that take each instruction as an operand, by its name."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self:
            for operand in dict.fromkeys(instruction.operands):
                users[operand.name].append(instruction)
        return users


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of the Python stack that traced an instruction."""

    file: str
    line: int
    function: str

    @property
    def location(self) -> str:
        """FILE:LINE without the folders."""
        return f"{Path(self.file).name}:{self.line}"


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """Parsed program."""

    name: str
    header: str
    branches: Branches
    """How often the branches of its conditionals are taken, as far as the caller knows."""
    computations: dict[str, Computation] = dataclasses.field(default_factory=dict)
    frames: dict[int, tuple[Frame, ...]] = dataclasses.field(default_factory=dict)
    """Python stack of each stack_frame_id, innermost frame first."""
    unparsed: list[str] = dataclasses.field(default_factory=list)
    """Lines inside computations that the parser does not understand."""

    @functools.cached_property
    def entry(self) -> Computation:
        """Computation at which the program starts."""
        return next(c for c in self.computations.values() if c.is_entry)

    @property
    def num_devices(self) -> int:
        """Number of devices that run the program together."""
        matches = [
            re.search(rf"\b{key}=(\d+)", self.header) for key in ("num_partitions", "replica_count")
        ]
        return math.prod(int(match[1]) for match in matches if match)

    def __iter__(self) -> Iterator[Instruction]:
        """Yields every instruction of the text, whether the program runs it or not."""
        return itertools.chain.from_iterable(self.computations.values())


_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_LINE = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")


def _parse_instruction(computation: Computation, line: str) -> Instruction | None:
    match = _LINE.match(line)
    if not match:
        return None
    text = match[3]
    end = closing(text, 0) + 1 if text.startswith("(") else (text + " ").index(" ")
    opcode = _OPCODE.match(text, end)
    if not opcode:
        return None
    close = closing(text, opcode.end() - 1)
    operands, attributes = text[opcode.end() : close], text[close + 1 :]
    return Instruction(
        computation,
        match[2],
        parse_shape(text[:end]),
        opcode[1],
        operands,
        attributes,
        bool(match[1]),
    )


def _parse_frames(lines: list[str]) -> dict[int, tuple[Frame, ...]]:
    """Returns the stack of each frame by its number, innermost first, from a program's tables.

    FileNames and FunctionNames number texts; FileLocations and StackFrames number rows that refer
    to them as NAME=NUMBER.
    """
    tables = _tables(lines)
    files = _texts(tables["FileNames"])
    functions = _texts(tables["FunctionNames"])
    locations = _references(tables["FileLocations"])
    calls = _references(tables["StackFrames"])
    frames: dict[int, tuple[Frame, ...]] = {}
    # XLA prints the parent's number plus one: a frame without a parent has 1, and some would be
    # their own parent.
    offset = int(any(row.get("parent_frame_id") == i for i, row in calls.items()))
    for i, call in sorted(calls.items()):
        location = locations.get(call.get("file_location_id", 0), {})
        file = files.get(location.get("file_name_id", 0), "?")
        function = functions.get(location.get("function_name_id", 0), "")
        parents = frames.get(call.get("parent_frame_id", 0) - offset, ())
        frames[i] = (Frame(file, location.get("line", 0), function), *parents)
    return frames


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def _tables(lines: list[str]) -> dict[str, dict[int, str]]:
    """Returns the numbered rows of each of _TABLES."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current: dict[int, str] = {}
    for line in lines:
        row = re.match(r"^(\d+) (.*)$", line)
        if line.strip() in tables:
            current = tables[line.strip()]
        elif row is not None:
            current[int(row[1])] = row[2]
    return tables


def _texts(table: dict[int, str]) -> dict[int, str]:
    return {number: text.strip('"') for number, text in table.items()}


def _references(table: dict[int, str]) -> dict[int, dict[str, int]]:
    """Reads rows such as `{file_name_id=1 function_name_id=2 line=3}`."""
    references: dict[int, dict[str, int]] = {}
    for number, row in table.items():
        references[number] = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
    return references


def parse_module(text: str, branches: Branches | None = None) -> Module:
    """Parses the text of a compiled program.
    branches: how often those of its conditionals are taken, if known.

    Raises CensusError if it is not the text of an XLA program.
    """
    lines = _COMMENT.sub("", _KERNEL.sub("kernel_metadata={}", text)).splitlines()
    if not lines or not lines[0].startswith("HloModule"):
        raise CensusError(
            "parsing the text of a program",
            "it does not begin with HloModule",
            "pass what compiled.as_text() returns",
        )
    title = re.match(r"HloModule ([\w.\-]+)", lines[0])
    module = Module(title[1] if title else "", lines[0], branches or {})
    tables: list[str] = []
    body: Computation | None = None
    for line in lines[1:]:
        if body is None:
            header = _HEADER.match(line) if not line.startswith((" ", "\t")) else None
            if header:
                body = Computation(module, header[2], bool(header[1]))
            else:
                tables.append(line)
        elif line.startswith("}"):
            module.computations[body.name], body = body, None
        elif (instruction := _parse_instruction(body, line)) is not None:
            body.instructions[instruction.name] = instruction
        elif "=" in line:
            module.unparsed.append(line.strip())
    if not any(c.is_entry for c in module.computations.values()):
        raise CensusError(
            "parsing the text of a program", "it has no ENTRY computation", "pass the complete text"
        )
    module.frames.update(_parse_frames(tables))
    return module
