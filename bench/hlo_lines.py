"""A small parser of scheduled HLO text, for `second_reading.py`: instructions, sizes, trips of loops, FLOPs.

It shares nothing with xlacensus's parser (src/xlacensus/hlo), so that a fault of the one is not in the other.
"""

import dataclasses
import functools
import math
import re

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4,
    "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Line:
    """One instruction, as text in its parts."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    inside: str
    """What stands between the operand parentheses: the value of a constant, the number of a parameter."""
    rest: str
    root: bool

    def arrays(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Element type, sizes and layout of each array of the result."""
        return _arrays(self.shape)

    def attribute(self, name: str) -> str:
        """Returns the computation that an attribute names; empty if there is none."""
        found = re.search(rf"\b{name}=\{{?%([\w.\-]+)", self.rest)
        return found[1] if found else ""


@functools.lru_cache(maxsize=100_000)
def _arrays(shape: str) -> list[tuple[str, tuple[int, ...], str]]:
    found = ARRAY.findall(shape)
    return [
        (kind, tuple(int(n) for n in sizes.split(",") if n), layout)
        for kind, sizes, layout in found
    ]


def bytes_of(shape: str, *, hbm: bool = False) -> float:
    """Sums the bytes of a shape; with `hbm` only of arrays that are in no other memory."""
    return float(sum(
        _BYTES.get(kind, 0) * math.prod(sizes)
        for kind, sizes, layout in _arrays(shape)
        if not (hbm and re.search(r"S\(\d+\)", layout))
    ))  # fmt: skip


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def parse_line(text: str) -> Line | None:
    """Parses `[ROOT] %name = shape opcode(operands)rest`; None for any other line."""
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", text)
    if head is None:
        return None
    at = head.end()
    end = _closing(text, at) + 1 if text[at] == "(" else text.index(" ", at)
    opcode = re.compile(r" ([a-z][\w\-]*)\(").match(text, end)
    if opcode is None:
        return None
    close = _closing(text, opcode.end() - 1)
    inside = text[opcode.end() : close]
    return Line(
        head[2],
        text[at:end],
        opcode[1],
        tuple(NAME.findall(inside)),
        inside,
        text[close + 1 :],
        bool(head[1]),
    )


_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_ELEMENT = re.compile(r"%([\w.\-]+)#(\d+)")


def with_elements(text: str) -> str:
    """Returns a dumped program with an instruction for each element of a tuple, which a dump writes `%tuple#2`."""
    written: list[str] = []
    shapes: dict[str, str] = {}
    for line in text.splitlines():
        if _COMPUTATION.match(line):
            shapes.clear()
        while (element := _ELEMENT.search(line)) is not None:
            name = f"{element[1]}.element.{element[2]}"
            if name not in shapes:
                shapes[name] = _parts_of(shapes[element[1]])[int(element[2])]
                written.append(
                    f"  %{name} = {shapes[name]} get-tuple-element(%{element[1]}), index={element[2]}"
                )
            line = f"{line[: element.start()]}%{name}{line[element.end() :]}"
        written.append(line)
        parsed = parse_line(line)
        if parsed is not None:
            shapes[parsed.name] = parsed.shape
    return "\n".join(written) + "\n"


def _parts_of(shape: str) -> list[str]:
    """Splits the shape of a tuple at its outermost commas."""
    parts, depth, begin = [], 0, 1
    for at, letter in enumerate(shape):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(re.sub(r"/\*.*?\*/", "", shape[begin:at]).strip())
            begin = at + 1
    return parts


Computations = dict[str, dict[str, Line]]
"""Instructions by name, of each computation by name."""


def parse(text: str) -> tuple[Computations, str]:
    """Returns the instructions of each computation by name, and the name of the entry."""
    computations: Computations = {}
    body: dict[str, Line] = {}
    entry = ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None:
            body = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif (parsed := parse_line(line)) is not None:
            body[parsed.name] = parsed
    return computations, entry


def trips(computations: Computations, body: dict[str, Line], loop: Line) -> int | None:
    """Returns how often a loop runs: the compiler's count, or that of `i = first; while i < last; i += step`."""
    known = re.search(r'known_trip_count[\\"]*:\{[\\"]*n[\\"]*:[\\"]*(\d+)', loop.rest)
    if known:
        return int(known[1])
    condition, inside = (computations.get(loop.attribute(k), {}) for k in ("condition", "body"))
    compare = next((i for i in condition.values() if i.root), None)
    if compare is not None and compare.opcode == "fusion":
        fused = computations.get(compare.attribute("calls"), {})
        outer, compare = compare, next((i for i in fused.values() if i.root), None)
        condition = _with_arguments(fused, condition, outer.operands)
    result = next((i for i in inside.values() if i.root), None)
    given = body.get(loop.operands[0])
    if compare is None or compare.opcode != "compare" or result is None or given is None:
        return None
    counter, last = (
        _counter(condition, compare.operands[0]),
        _constant(condition, compare.operands[1]),
    )
    if counter is None or given.opcode != "tuple" or result.opcode != "tuple":
        return None
    if last is None:  # the bound is carried by the loop, unchanged
        bound = _counter(condition, compare.operands[1])
        if bound is None or _counter(inside, result.operands[bound]) != bound:
            return None
        last = _constant(body, given.operands[bound])
    first = _constant(body, given.operands[counter])
    step = _step_of(computations, inside, result.operands[counter], counter)
    if None in (first, last, step) or not step:
        return None
    more = 1 if "direction=LE" in compare.rest else 0
    if not re.search(r"direction=(LT|LE|NE)\b", compare.rest):
        return None
    return max(0, -(-(last - first + more) // step))  # type: ignore[operator]


def _step_of(
    computations: Computations, body: dict[str, Line], name: str, counter: int
) -> int | None:
    """Returns what a loop's body adds to its counter."""
    line = body.get(name)
    if line is None:
        return None
    if line.opcode in ("copy", "bitcast"):
        return _step_of(computations, body, line.operands[0], counter)
    if line.opcode == "fusion":
        inner = computations.get(line.attribute("calls"), {})
        merged = _with_arguments(inner, body, line.operands)
        root = next((i for i in inner.values() if i.root), None)
        return None if root is None else _step_of(computations, merged, root.name, counter)
    if line.opcode != "add":
        return None
    for one, other in (line.operands, line.operands[::-1]):
        step = _constant(body, other)
        if step is not None:
            # A sum of sums: unrolled loops add one several times.
            return (
                step
                if _counter(body, one) == counter
                else _plus(_step_of(computations, body, one, counter), step)
            )
    return None


def _plus(before: int | None, more: int) -> int | None:
    return None if before is None else before + more


def _with_arguments(
    inner: dict[str, Line], outer: dict[str, Line], operands: tuple[str, ...]
) -> dict[str, Line]:
    """Returns a fused computation in which each parameter stands for the operand that the fusion passes."""
    merged = {**outer, **inner}
    for line in inner.values():
        if line.opcode == "parameter" and int(line.inside) < len(operands):
            merged[line.name] = dataclasses.replace(
                line, opcode="bitcast", operands=(operands[int(line.inside)],)
            )
    return merged


def _constant(body: dict[str, Line], name: str) -> int | None:
    line = body.get(name)
    while line is not None and line.opcode in ("copy", "bitcast", "convert") and line.operands:
        line = body.get(line.operands[0])
    if line is None or line.opcode != "constant" or not re.fullmatch(r"-?\d+", line.inside):
        return None
    return int(line.inside)


def _counter(body: dict[str, Line], name: str) -> int | None:
    """Returns which element of the loop's state a value is."""
    line = body.get(name)
    while line is not None and line.opcode in ("copy", "bitcast", "convert") and line.operands:
        line = body.get(line.operands[0])
    if line is None or line.opcode != "get-tuple-element":
        return None
    found = re.search(r"index=(\d+)", line.rest)
    return int(found[1]) if found else None


def group_size(rest: str, devices: int) -> int:
    """Reads how many devices a collective's groups have, in any of the three ways in which XLA writes them."""
    mesh = re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", rest)
    if mesh:
        degrees = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        wanted = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or degrees[name]) for name, part in wanted) if wanted else 1
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest)
    if iota:
        return int(iota[2])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    return len(listed[1].split(",")) if listed else devices


def convolution_flops(
    left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...], rest: str
) -> float:
    """Counts the FLOPs of a convolution; taps that fall on padding multiply nothing and count nothing."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    if labels is None:
        return 0.0
    window = re.search(r"window=\{([^}]*)\}", rest)
    settings = dict(part.split("=", 1) for part in window[1].split()) if window else {}
    spatial = sorted(c for c in labels[1] if c.isdigit())

    def numbers(key: str, default: str) -> list[str]:
        return settings[key].split("x") if key in settings else [default] * len(spatial)

    pads, strides = numbers("pad", "0_0"), numbers("stride", "1")
    spread_left, spread_right = numbers("lhs_dilate", "1"), numbers("rhs_dilate", "1")
    total = 2.0 * right[labels[2].index("i")]
    total *= out[labels[3].index("b")] * out[labels[3].index("f")]
    for number, label in enumerate(spatial):
        sizes = (
            left[labels[1].index(label)],
            right[labels[2].index(label)],
            out[labels[3].index(label)],
        )
        spread = (int(spread_left[number]), int(spread_right[number]))
        total *= _taps(*sizes, int(pads[number].split("_")[0]), int(strides[number]), spread)
    groups = re.search(r"batch_group_count=(\d+)", rest)
    return total / (int(groups[1]) if groups else 1)


@functools.cache
def _taps(size: int, window: int, out: int, pad: int, stride: int, spread: tuple[int, int]) -> int:
    """Counts pairs of an output and a tap of the window that meet an element of the input."""
    count = 0
    for tap in range(window):
        # position = o * stride + tap * spread[1] - pad lies in [0, (size - 1) * spread[0]] on a multiple of spread[0]
        offset = tap * spread[1] - pad
        if spread[0] == 1:
            low, high = max(0, -(offset // stride)), (size - 1 - offset) // stride
            count += max(0, min(out - 1, high) - low + 1)
        else:
            count += sum(
                0 <= o * stride + offset <= (size - 1) * spread[0]
                and (o * stride + offset) % spread[0] == 0
                for o in range(out)
            )
    return count


def grouped_flops(shapes: list[tuple[str, tuple[int, ...], str]], out: tuple[int, ...]) -> float:
    """Counts the FLOPs of a grouped matmul over all rows: [M, K] x [E, K, N], or the [E, K, N] of [M, K] and [M, N]."""
    floats = [
        sizes for kind, sizes, _ in shapes if kind in ("bf16", "f32", "f16") and len(sizes) >= 2
    ]
    if len(floats) < 2:
        return 0.0
    if len(out) == 3:
        rows = math.sqrt(math.prod(floats[0]) * math.prod(floats[1]) / (out[-1] * out[-2]))
        return 2.0 * rows * out[-1] * out[-2]
    return 2.0 * math.prod(out) * (math.prod(floats[0]) / max(1, math.prod(out[:-1])))
