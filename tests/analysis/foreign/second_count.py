"""Second count of a compiled program: collectives and FLOPs, read line by line from its text.

It shares nothing with `xlacensus.hlo`: no parser, no algebra of loop counters. A loop without an annotated trip count
is counted by running the scalars of its condition and body until the condition is false.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator

KINDS = "all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf"({KINDS})(-start)?$")
_MOST_TRIPS = 100_000

# One FLOP for each element of the result; XLA counts transcendental functions apart.
_ELEMENTWISE = (
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "and", "or", "xor", "not", "negate", "abs",
    "compare", "select", "clamp", "sign", "floor", "ceil", "round-nearest-afz", "round-nearest-even", "remainder",
    "shift-left", "shift-right-logical", "shift-right-arithmetic", "is-finite", "real", "imag", "complex", "popcnt",
    "convert", "count-leading-zeros", "reduce-precision", "stochastic-convert",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Line:
    """One instruction."""

    name: str
    shape: str
    opcode: str
    given: list[str]
    """Names of the operands."""
    rest: str
    """Operands and attributes, as text."""
    root: bool

    def called(self) -> list[str]:
        """Computations that run once, or for a loop once per trip; reducers are left out."""
        if self.opcode.endswith(("-done", "-update")):
            return []
        keys = "calls|body|condition|true_computation|false_computation|branch_computations|called_computations"
        if self.opcode in ("call", "async-start", "call-start"):
            keys += "|to_apply"
        found = re.findall(rf"\b(?:{keys})=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
        return [name for text in found for name in re.findall(r"[\w.\-]+", text)]


@dataclasses.dataclass
class Count:
    """Sums of one execution of a program."""

    collectives: dict[str, tuple[int, int]]
    """Kind -> executions and payload bytes."""
    matmul: float
    """FLOPs of matrix products and convolutions, loops multiplied out, of a conditional the largest branch."""
    matmul_once: float
    """The same with every loop's body counted once, as XLA's cost analysis does."""
    elementwise_once: float
    """Elementwise operations and reductions, every loop's body counted once."""
    unpriced: set[str]
    """Custom calls without known FLOPs."""


def dims_of(text: str) -> list[tuple[str, list[int]]]:
    """Returns types and sizes of the arrays in the text of a shape."""
    return [
        (t, [int(n.strip("<= ")) for n in d.split(",") if n.strip()])
        for t, d in re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", text)
    ]


def size_of(text: str) -> int:
    """Returns the bytes of the arrays in the text of a shape."""
    total = 0
    for dtype, dims in dims_of(text):
        bits = (
            8
            if dtype == "pred" or dtype.startswith("f8")
            else int((re.findall(r"\d+", dtype) or ["0"])[0])
        )
        total += -(-bits * math.prod(dims) // 8)
    return total


def elements_of(text: str) -> int:
    return sum(math.prod(dims) for _, dims in dims_of(text))


class Program:
    """Lines of a program's text by computation."""

    def __init__(self, text: str):
        text = re.sub(r"kernel_metadata=\{\n.*?\n\}", "", text, flags=re.DOTALL)
        self.lines: dict[str, list[Line]] = {}
        self.by_name: dict[str, Line] = {}
        self.home: dict[str, str] = {}
        self.entry, here = "", ""
        self.devices = math.prod(
            int(n)
            for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.splitlines()[0])
        )
        for row in text.splitlines()[1:]:
            row = re.sub(r"/\*.*?\*/", "", row)
            header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", row) or re.match(
                r"(ENTRY )?%?([\w.\-]+) \{$", row
            )
            if header:
                here = header[2]
                self.lines[here] = []
                self.entry = here if header[1] else self.entry
            elif (match := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$", row)) and here:
                self._add(here, bool(match[1]), match[2], match[3])

    def _add(self, here: str, root: bool, name: str, text: str) -> None:
        op = (
            re.search(r"(?:^|[\s)}\]])([a-z][\w\-]*)\(", text)
            if not text.startswith("(")
            else re.search(r"\) ([a-z][\w\-]*)\(", text)
        )
        if op is None:
            return
        rest = text[op.end() :]
        given = re.findall(r"%([\w.\-]+)", rest[: rest.index(")")]) if ")" in rest else []
        line = Line(name, text[: op.start(1)], op[1], given, rest, root)
        self.lines[here].append(line)
        self.by_name[f"{here}/{name}"] = line
        self.home[name] = here

    def find(self, here: str, name: str) -> Line:
        return self.by_name[f"{here}/{name}"]

    def root(self, here: str) -> Line:
        return next((line for line in self.lines[here] if line.root), self.lines[here][-1])

    def trips(self, here: str, loop: Line) -> int:
        """Returns the trips of a loop; 1 where they hang on data."""
        written = re.search(r'known_trip_count"?[^\d]{1,12}(\d+)', loop.rest)
        return int(written[1]) if written else self._trips(here, loop) or 1

    def _trips(self, here: str, loop: Line) -> int | None:
        body, condition = (
            re.search(rf"{key}=%?([\w.\-]+)", loop.rest)[1] for key in ("body", "condition")
        )
        state = loop.given[0]
        values: dict[int, object] = {}

        def first(index: int) -> object:
            return self._element(here, state, index, lambda _: None)

        for trip in range(_MOST_TRIPS):
            known: dict[int, object] = {}
            before = dict(values)

            def now(index: int, known=known, before=before, trip=trip) -> object:
                if index not in known:
                    previous = (lambda i: before[i] if i in before else first(i)) if trip else None
                    known[index] = (
                        first(index)
                        if trip == 0
                        else self._element(body, self.root(body).name, index, previous)
                    )
                return known[index]

            going = self._value(condition, self.root(condition).name, now)
            if going is None:
                return None
            if not going:
                return trip
            values = dict(known)
        return None

    def _element(
        self,
        here: str,
        name: str,
        index: int,
        state: Callable[[int], object],
        args: list | None = None,
    ) -> object:
        """Runs one element of a tuple."""
        line = self.find(here, name)
        if line.opcode == "parameter":
            if args is None:
                return state(index)
            value = args[int(re.match(r"\d+", line.rest)[0])]
            return value(index) if callable(value) else None
        if line.opcode == "tuple":
            return self._value(here, line.given[index], state, args)
        if line.opcode in ("copy", "opt-barrier", "optimization-barrier", "bitcast"):
            return self._element(here, line.given[0], index, state, args)
        if line.opcode in ("fusion", "call"):
            callee = line.called()[0]
            return self._element(
                callee, self.root(callee).name, index, state, self._args(here, line, state, args)
            )
        return None

    def _args(
        self, here: str, line: Line, state: Callable[[int], object], args: list | None
    ) -> list:
        def argument(name: str) -> object:
            if self.find(here, name).shape.strip().startswith("("):
                return lambda index: self._element(here, name, index, state, args)
            return self._value(here, name, state, args)

        return [argument(name) for name in line.given]

    def _value(
        self, here: str, name: str, state: Callable[[int], object], args: list | None = None
    ) -> object:
        """Runs one scalar; None where it is data."""
        line = self.find(here, name)
        if line.opcode == "constant":
            text = line.rest.partition(")")[0].strip()
            return {"true": True, "false": False}.get(
                text, int(text) if re.fullmatch(r"-?\d+", text) else None
            )
        if line.opcode == "parameter":
            return None if args is None else args[int(re.match(r"\d+", line.rest)[0])]
        if line.opcode == "get-tuple-element":
            return self._element(
                here, line.given[0], int(re.search(r"index=(\d+)", line.rest)[1]), state, args
            )
        if not re.fullmatch(r"(pred|[su]\d+)\[(1(,1)*)?\].*", line.shape.strip()):
            return None
        if line.opcode in ("fusion", "call"):
            callee = line.called()[0]
            return self._value(
                callee, self.root(callee).name, state, self._args(here, line, state, args)
            )
        given = [self._value(here, operand, state, args) for operand in line.given]
        if any(value is None for value in given) or not given:
            return None
        return _run(line, given)

    def groups(self, line: Line) -> int:
        """Returns the devices of a group."""
        text = re.search(r"replica_groups=(\S.*?)(?:, \w+=|$)", line.rest)
        if not text:
            return self.devices
        if match := re.match(r"\[\d+,(\d+)\]", text[1]):
            return int(match[1])
        if match := re.match(r"\{\{([\d,]*)\}", text[1]):
            return len(match[1].split(","))
        if match := re.match(r"mesh\[(.*?)\],? *\{(.*?)\}", text[1]):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
            parts = [re.search(r"\)(\d+)$", axis) for axis in match[2].split(",")]
            names = [re.search(r"'(\w+)'", axis)[1] for axis in match[2].split(",")]
            return math.prod(
                int(p[1]) if p else int(sizes[n]) for p, n in zip(parts, names, strict=True)
            )
        return self.devices


def _run(line: Line, given: list) -> object:
    a, b = given[0], given[-1]
    direction = re.search(r"direction=(\w+)", line.rest)
    order = {"LT": a < b, "LE": a <= b, "GT": a > b, "GE": a >= b, "EQ": a == b, "NE": a != b}
    results = {
        "add": lambda: a + b, "subtract": lambda: a - b, "multiply": lambda: a * b, "minimum": lambda: min(a, b),
        "maximum": lambda: max(a, b), "and": lambda: a & b, "or": lambda: a | b, "copy": lambda: a,
        "bitcast": lambda: a,
        "convert": lambda: a, "reshape": lambda: a, "not": lambda: not a if isinstance(a, bool) else ~a,
        "negate": lambda: -a, "select": lambda: given[1] if a else given[2], "broadcast": lambda: a,
        "compare": lambda: order[direction[1]],
    }  # fmt: skip
    return results[line.opcode]() if line.opcode in results else None


def _places(
    program: Program, here: str, times: int, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, int, tuple[str, ...], Line]]:
    """Yields every instruction of the program with its executions and the instructions around it."""
    for line in program.lines[here]:
        yield here, times, path, line
        inner = times * (program.trips(here, line) if line.opcode == "while" else 1)
        for name in line.called():
            if name in program.lines:
                yield from _places(program, name, inner, (*path, f"{line.name}>{name}"))


def count(text: str) -> Count:
    """Counts a program."""
    program = Program(text)
    sums: dict[str, tuple[int, int]] = {}
    pieces: set[tuple[str, ...]] = set()
    for here, times, path, line in _places(program, program.entry, 1):
        match = _COLLECTIVE.match(line.opcode)
        if not match:
            continue
        chain = re.search(r'chain_id="(\d+)"', line.rest)
        if chain:  # v5e prints a gather once for every piece of work that it runs beside
            channel = re.search(r"channel_id=(\d+)", line.rest)
            piece = (*path[:-1], chain[1], channel[1] if channel else "")
            if piece in pieces:
                continue
            pieces.add(piece)
        kind = match[1]
        if any(
            ">all-reduce-scatter" in step and "fusion" not in step.partition(">")[2]
            for step in path
        ):
            kind = "reduce-scatter"  # older TPUs: a fusion of an all-reduce and a slice
        given = line.given[:1] if kind == "ragged-all-to-all" else line.given
        payload = sum(size_of(program.find(here, name).shape) for name in given)
        payload *= program.groups(line) if match[1] == "all-gather" else 1
        n, total = sums.get(kind, (0, 0))
        sums[kind] = (n + times, total + times * payload)
    return Count(sums, *_flops(program))


def _flops(program: Program) -> tuple[float, float, float, set[str]]:
    unpriced: set[str] = set()
    cache: dict[str, tuple[float, float, float]] = {}

    def of(here: str) -> tuple[float, float, float]:
        """Returns matmul FLOPs, those with loops once, and elementwise ones of a computation."""
        if here in cache:
            return cache[here]
        sums = [0.0, 0.0, 0.0]
        for line in program.lines[here]:
            product = _product(program, here, line, unpriced)
            sums[0] += product
            sums[1] += product
            sums[2] += _vector(program, here, line, of)
            called = [of(name) for name in line.called() if name in program.lines]
            if line.opcode == "conditional" and called:
                called = [tuple(max(c[i] for c in called) for i in range(3))]
            trips = program.trips(here, line) if line.opcode == "while" else 1
            for inner in called:
                sums[0] += trips * inner[0]
                sums[1] += inner[1]
                # The analysis does not look into what runs on a TPU's other cores.
                sums[2] += 0.0 if line.opcode in ("call-start", "custom-call-start") else inner[2]
        cache[here] = (sums[0], sums[1], sums[2])
        return cache[here]

    return (*of(program.entry), unpriced)


def _vector(
    program: Program, here: str, line: Line, of: Callable[[str], tuple[float, float, float]]
) -> float:
    if line.opcode in _ELEMENTWISE:
        return elements_of(line.shape)
    if line.opcode == "all-reduce":
        return elements_of(line.shape)  # as XLA counts it
    reducer = re.search(r"to_apply=%?([\w.\-]+)", line.rest)
    if line.opcode == "reduce" and reducer:
        arrays = line.given[: len(line.given) // 2]
        each = sum(of(reducer[1])[2:])
        return each * (
            elements_of(program.find(here, arrays[0]).shape) - elements_of(line.shape) / len(arrays)
        )
    if line.opcode == "reduce-window" and ":T(" in line.shape:
        return 0.0  # TPUs write a reduction that is broadcast again as a window, and their analysis does not count it
    if line.opcode == "reduce-window" and reducer:
        window = math.prod(int(n) for n in re.search(r"size=([\dx]+)", line.rest)[1].split("x"))
        arrays = len(dims_of(line.shape))
        return of(reducer[1])[2] * elements_of(line.shape) / arrays * (window - 1)
    if line.opcode in ("scatter", "select-and-scatter") and (reducer or "scatter=" in line.rest):
        name = reducer[1] if reducer else re.search(r"scatter=%?([\w.\-]+)", line.rest)[1]
        return of(name)[2] * elements_of(program.find(here, line.given[-1 if reducer else 1]).shape)
    return 0.0


def _product(program: Program, here: str, line: Line, unpriced: set[str]) -> float:
    """Returns the FLOPs of a dot, a convolution or a library's matrix product."""
    if line.opcode == "dot":
        left = dims_of(program.find(here, line.given[0]).shape)[0][1]
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
        return (
            2.0 * elements_of(line.shape) * math.prod(left[int(d)] for d in axes[1].split(",") if d)
        )
    if line.opcode == "convolution":
        return _convolution(program, here, line)
    if line.opcode not in ("custom-call", "custom-call-start") or any(
        n in program.lines for n in line.called()
    ):
        return 0.0
    target = re.search(r'custom_call_target="([^"]*)"', line.rest)[1]
    axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.rest)
    if re.search("gemm|matmul", target) and axes:
        left = dims_of(program.find(here, line.given[0]).shape)[0][1]
        out = math.prod(dims_of(line.shape)[0][1])
        return 2.0 * out * math.prod(left[int(d.strip('" '))] for d in axes[1].split(","))
    if target.startswith("__cudnn$conv"):
        # The labels are those of the forward convolution, of which one array is the result.
        first, second = (dims_of(program.find(here, name).shape)[0][1] for name in line.given[:2])
        result = dims_of(line.shape)[0][1]
        order = {
            "BackwardFilter": (first, result, second),
            "BackwardInput": (result, second, first),
        }
        return _positions(
            line, *order.get(target.removeprefix("__cudnn$conv"), (first, second, result))
        )
    unpriced.add(target)
    return 0.0


def _convolution(program: Program, here: str, line: Line) -> float:
    lhs, rhs = (dims_of(program.find(here, name).shape)[0][1] for name in line.given[:2])
    return _positions(line, lhs, rhs, dims_of(line.shape)[0][1])


def _positions(line: Line, lhs: list[int], rhs: list[int], out: list[int]) -> float:
    """Counts a convolution by hand: for every output position, the kernel's positions that meet an element."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest)
    window = dict(
        re.findall(
            r"(\w+)=([\w\-]+)", (re.search(r"window=\{([^}]*)\}", line.rest) or [""])[0].strip("{}")
        )
    )
    total = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * rhs[labels[2].index("i")]
    for place, label in enumerate(sorted(c for c in labels[1] if c.isdigit())):
        part = {
            key: value.split("x")[place].split("_")
            for key, value in window.items()
            if value[:1].isdigit() or value[:1] == "-"
        }
        step, low = int(part.get("stride", ["1"])[0]), int(part.get("pad", ["0"])[0])
        holes, spread = int(part.get("lhs_dilate", ["1"])[0]), int(part.get("rhs_dilate", ["1"])[0])
        size = lhs[labels[1].index(label)]
        met = 0
        for position in range(out[labels[3].index(label)]):
            for tap in range(rhs[labels[2].index(label)]):
                where = position * step + tap * spread - low
                met += 0 <= where <= (size - 1) * holes and where % holes == 0
        total *= met
    return total


def kinds(entries: list) -> dict[str, tuple[int, int]]:
    """Returns a ledger of `meshwright` as `Count.collectives`."""
    executions, payload = Counter(), Counter()
    for entry in entries:
        executions[entry.kind] += entry.count
        payload[entry.kind] += entry.total
    return {kind: (executions[kind], payload[kind]) for kind in executions}
