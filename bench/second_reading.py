"""A second reading of a compiled TPU program, kept apart from meshwright's: `python bench/second_reading.py CHIP FILE`.

It imports nothing of meshwright and nothing of JAX, so that one fault cannot be in both readings. It parses the
scheduled HLO text, walks it in order and prices each instruction by rules that fit on this page:

- a matmul takes the compiler's `estimated_cycles` at the chip's clock, and never less than its FLOPs at the peak;
- any other fusion or copy takes its bytes of HBM at full bandwidth, or the compiler's cycles where they are fewer;
- an attention kernel takes its causal FLOPs at ATTENTION of the peak;
- a collective takes its bytes over all links that its group can use, without latency. From its start to its done it
  runs beside what stands between them, one collective at a time (permutes: one in each direction);
- a loop takes its body times `known_trip_count`, or the trips that its condition and its step give together: one that
  steps by two (windowed einsum) runs half as often as its bound says.

CHIP is a name and a torus, such as v5p:2x2x4. Rates are the datasheets', not fitted: the result is no forecast, but one
yardstick for two programs.
"""

import argparse
import dataclasses
import functools
import gzip
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from hlo_lines import (
    ARRAY,
    NAME,
    Line,
    bytes_of,
    convolution_flops,
    group_size,
    grouped_flops,
    parse,
    trips,
)

ATTENTION = 0.5
"""Fraction of peak that an attention kernel is taken to reach, on every chip and for both sides."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Datasheet of one chip, and the torus of the slice."""

    peak: float
    hbm: float
    clock: float
    link: float
    host: float
    torus: tuple[int, ...]

    def ring_bandwidth(self, devices: int) -> float:
        """Returns bytes/s of a ring collective over `devices`: the fewest torus dimensions whose sizes multiply to it.

        A dimension of a 3-D torus that is a multiple of four, or one of sixteen in 2-D, closes to a ring.
        """
        closes = 4 if len(self.torus) == 3 else 16
        for count in range(1, len(self.torus) + 1):
            fitting = [
                d for d in itertools.combinations(self.torus, count) if math.prod(d) == devices
            ]
            if fitting:
                whole = math.prod(self.torus) >= closes ** len(self.torus)
                return max(
                    sum(self.link * (2 if whole and size % closes == 0 else 1) for size in d)
                    for d in fitting
                )
        return self.link


_CHIPS = {
    "v5p": (459e12, 2.765e12, 1.75e9, 90e9, 16e9), "v6e": (918e12, 1.64e12, 1.75e9, 90e9, 32e9),
    "v5e": (197e12, 0.81e12, 1.5e9, 45e9, 16e9),
}  # fmt: skip
"""Peak bfloat16 FLOP/s, HBM bytes/s, clock, bytes/s of a link in one direction, bytes/s to the host."""

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
_FREE = frozenset(
    (
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "iota",
        "opt-barrier",
    )
)


def machine_of(text: str) -> Machine:
    """Reads a machine such as `v5p:4x4x8`."""
    name, _, torus = text.partition(":")
    return Machine(*_CHIPS[name], tuple(int(n) for n in torus.split("x")))


@dataclasses.dataclass
class Reading:
    """Time, work and traffic of one execution of a computation on one device."""

    seconds: float = 0.0
    exposed: float = 0.0
    """Seconds that the device waits for a collective."""
    sent: float = 0.0
    """Bytes that the device sends to others."""
    flops: float = 0.0
    by_kind: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of matmul, attention, memory, and of waiting for the host or for copies between memories."""
    doubts: list[str] = dataclasses.field(default_factory=list)
    """What could not be priced: loops without a trip count, kernels that are not known."""

    def add(self, other: "Reading", times: float = 1.0) -> None:
        """Adds another computation, executed `times`."""
        self.seconds += other.seconds * times
        self.exposed += other.exposed * times
        self.sent += other.sent * times
        self.flops += other.flops * times
        for kind, seconds in other.by_kind.items():
            self.by_kind[kind] = self.by_kind.get(kind, 0.0) + seconds * times
        self.doubts += [doubt for doubt in other.doubts if doubt not in self.doubts]

    def spend(self, kind: str, seconds: float) -> None:
        """Adds seconds of one kind."""
        self.seconds += seconds
        self.by_kind[kind] = self.by_kind.get(kind, 0.0) + seconds


class Program:
    """A compiled program, priced on a machine."""

    def __init__(self, text: str, machine: Machine):
        self.computations, self.entry = parse(text)
        self.machine = machine
        self.run = functools.cache(self._run)

    def read(self) -> Reading:
        """Prices one step."""
        return self.run(self.entry)

    # Time of a computation.

    def _run(self, name: str) -> Reading:
        out, flying, busy = Reading(), dict[str, tuple[str, float]](), dict[str, float]()
        body = self.computations[name]
        for line in body.values():
            self._step(body, line, out, flying, busy)
        for handle in list(flying):
            self._wait(handle, out, flying)
        return out

    def _step(
        self, body: dict[str, Line], line: Line, out: Reading, flying: dict[str, tuple[str, float]],
        busy: dict[str, float],
    ) -> None:  # fmt: skip
        if line.opcode == "while":
            times = trips(self.computations, body, line)
            if times is None:
                out.doubts.append(f"loop {line.name} has no trip count and counts once")
            out.add(self.run(line.attribute("body")), times if times is not None else 1)
        elif line.opcode == "call":
            out.add(self.run(line.attribute("to_apply") or line.attribute("calls")))
        elif line.opcode == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", line.rest)
            pair = [line.attribute("true_computation"), line.attribute("false_computation")]
            names = NAME.findall(listed[1]) if listed else pair
            out.add(
                max((self.run(n) for n in names if n), key=lambda r: r.seconds, default=Reading())
            )
        elif line.opcode.endswith("-done") or line.name.startswith("async-collective-done"):
            self._wait(_handle(body, line, flying), out, flying)
        else:
            self._work(body, line, out, flying, busy)

    def _work(
        self, body: dict[str, Line], line: Line, out: Reading, flying: dict[str, tuple[str, float]],
        busy: dict[str, float],
    ) -> None:  # fmt: skip
        start = self._started(body, line)
        if start is not None:
            kind, channel, seconds, sent = start
            begins = max(out.seconds, busy.get(channel, 0.0))
            busy[channel] = begins + seconds
            out.sent += sent
            flying[line.name] = (kind, busy[channel])
            asynchronous = line.opcode.endswith(("-start", "-update")) or line.name.startswith(
                "async-collective-start"
            )
            if not asynchronous:
                # Half of its channel until it or all that is in flight there has ended.
                for other, (of, ends) in flying.items():
                    if of == kind and ends > out.seconds and other != line.name:
                        flying[other] = of, ends + min(ends - out.seconds, seconds)
                flying[line.name] = kind, out.seconds + seconds + min(begins - out.seconds, seconds)
                self._wait(line.name, out, flying)
        elif line.opcode not in _FREE and not line.opcode.endswith(("-start", "-update")):
            kind, seconds, flops = self._compute(body, line, out)
            out.flops += flops
            out.spend(kind, seconds)

    def _wait(self, handle: str, out: Reading, flying: dict[str, tuple[str, float]]) -> None:
        kind, ends = flying.pop(handle, ("", 0.0))
        late = max(0.0, ends - out.seconds)
        if late and kind == "collective":
            out.exposed += late
        if late:
            out.spend("wait: " + kind, late)

    def _started(self, body: dict[str, Line], line: Line) -> tuple[str, str, float, float] | None:
        """Reads a transfer that begins here: its kind, the channel it occupies, its seconds, the bytes sent."""
        if line.opcode in ("copy-start", "slice-start"):
            moved = min(
                bytes_of(match[0]) for match in itertools.islice(ARRAY.finditer(line.shape), 2)
            )
            host = "S(5)" in line.shape
            return ("host", "host", moved / self.machine.host, 0.0) if host else (
                "copy", "copy", moved / self.machine.hbm, 0.0)  # fmt: skip
        piece = line.attribute("calls").startswith("async_collective_fusion")
        origin = line
        if line.opcode.endswith("-update"):
            origin = body.get(line.operands[0], line)
            if origin.operands or len(line.operands) < 2:
                return None  # the start has begun the transfer
        elif (
            line.opcode in ("call-start", "custom-call-start", "async-start") and not line.operands
        ):
            return None  # its update begins the transfer
        found = None if piece else self._collective(origin)
        if found is None:
            return None
        where, inner, fused = found
        return self._price_collective(where, inner, fused)

    def _collective(self, line: Line) -> tuple[dict[str, Line], Line, str] | None:
        """Finds the collective that an instruction is or calls: its computation, itself, the name of what calls it."""
        opcode = line.opcode.removesuffix("-start")
        if opcode in _COLLECTIVES:
            return next(c for c in self.computations.values() if c.get(line.name) is line), line, ""
        if opcode not in ("fusion", "async", "call", "custom-call"):
            return None
        names = [line.attribute(key) for key in ("calls", "to_apply", "called_computations")]
        for name in names:
            for inner in self.computations.get(name, {}).values():
                if inner.opcode.removesuffix("-start") in _COLLECTIVES:
                    return self.computations[name], inner, name
        return None

    def _price_collective(
        self, body: dict[str, Line], line: Line, fused: str
    ) -> tuple[str, str, float, float]:
        kind = line.opcode.removesuffix("-start")
        if fused.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        given = sum(bytes_of(body[name].shape) for name in line.operands if name in body)
        if kind == "collective-permute":
            pairs = re.findall(r"\{(\d+),(\d+)\}", line.rest)
            forward = sum(int(b) > int(a) for a, b in pairs) * 2 >= len(pairs)
            return "collective", f"permute {forward}", given / self.machine.link, given
        n = group_size(line.rest, math.prod(self.machine.torus))
        bandwidth = self.machine.ring_bandwidth(n)
        whole = given * n if kind == "all-gather" else given
        passes = 2 if kind == "all-reduce" else 1
        sent = passes * whole * (n - 1) / n
        if kind.endswith("all-to-all"):
            # On a ring a block travels a quarter of the way round on average.
            return "collective", "links", given * n / 4 / bandwidth if n > 1 else 0.0, sent
        return "collective", "links", sent / bandwidth, sent

    # Work of one instruction.

    def _compute(self, body: dict[str, Line], line: Line, out: Reading) -> tuple[str, float, float]:
        """Returns the kind, seconds and FLOPs of an instruction that is no transfer and no loop."""
        machine, memory = self.machine, self._traffic(body, line) / self.machine.hbm
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line.rest)
        estimate = int(cycles[1]) / machine.clock if cycles and int(cycles[1]) < 10**15 else None
        if line.opcode == "custom-call":
            return self._kernel(body, line, memory, out)
        flops = self.flops(body, line)
        if flops:
            return (
                "matmul",
                max(flops / machine.peak, estimate if estimate is not None else memory),
                flops,
            )
        return "memory", memory if estimate is None else min(memory, estimate), 0.0

    def _kernel(
        self, body: dict[str, Line], line: Line, memory: float, out: Reading
    ) -> tuple[str, float, float]:
        if "tpu_custom_call" not in line.rest:
            return "memory", 0.0, 0.0  # AllocateBuffer and hints
        name, shapes = line.name, [body[n].arrays()[0] for n in line.operands if n in body]
        floats = [
            sizes for kind, sizes, _ in shapes if kind in ("bf16", "f32", "f16") and len(sizes) >= 3
        ]
        if "splash" in name or "flash" in name or "attention" in name:
            queries, keys = floats[0], floats[1]
            products = 4 if "dkv" in name else 3 if "dq" in name else 2
            products = 5 if "dkv" in name and "fused" in name else products
            flops = products * 2.0 * math.prod(queries) * keys[-2] / 2  # causal: half
            return "attention", max(flops / (ATTENTION * self.machine.peak), memory), flops
        if "gmm" in name or "grouped" in name or "ragged" in name:
            flops = grouped_flops(shapes, line.arrays()[0][1])
            return "matmul" if flops else "memory", max(flops / self.machine.peak, memory), flops
        out.doubts.append(f"kernel {re.sub(r'[.0-9]+$', '', name)} counts its bytes alone")
        return "memory", memory, 0.0

    def flops(self, body: dict[str, Line], line: Line) -> float:
        """Counts the FLOPs of the matmuls in an instruction and what it fuses."""
        if line.opcode == "dot":
            left = body[line.operands[0]].arrays()[0][1]
            found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
            contracted = math.prod(left[int(d)] for d in found[1].split(",") if d) if found else 1
            return 2.0 * math.prod(line.arrays()[0][1]) * contracted
        if line.opcode == "convolution":
            left, right = (body[name].arrays()[0][1] for name in line.operands[:2])
            return convolution_flops(left, right, line.arrays()[0][1], line.rest)
        if line.opcode != "fusion":
            return 0.0
        inner = self.computations.get(line.attribute("calls"), {})
        return sum(self.flops(inner, instruction) for instruction in inner.values())

    def _traffic(self, body: dict[str, Line], line: Line) -> float:
        """Counts the bytes of HBM that an instruction reads and writes; of a slice of an array, the slice."""
        operands = [body[name].shape for name in line.operands if name in body]
        inner = (
            self.computations.get(line.attribute("calls"), {}) if line.opcode == "fusion" else {}
        )
        if line.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * bytes_of(line.shape, hbm=True)
        if line.opcode == "dynamic-update-slice":
            return 2 * bytes_of(operands[1], hbm=True)
        if not inner:
            return bytes_of(line.shape, hbm=True) + sum(
                bytes_of(shape, hbm=True) for shape in operands
            )
        parameters = {int(i.inside): i.name for i in inner.values() if i.opcode == "parameter"}
        read = sum(
            min(bytes_of(shape, hbm=True), self._read(inner, parameters[number]))
            for number, shape in enumerate(operands) if number in parameters
        )  # fmt: skip
        root = next((i for i in inner.values() if i.root), None)
        return read + (self._written(inner, root, line.shape) if root is not None else 0.0)

    def _read(self, inner: dict[str, Line], name: str) -> float:
        """Counts the bytes that a fusion reads of one operand; infinity for all of it."""
        total = 0.0
        for user in inner.values():
            if name not in user.operands:
                continue
            nested = (
                self.computations.get(user.attribute("calls"), {})
                if user.opcode == "fusion"
                else {}
            )
            if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                total += bytes_of(user.shape)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue
            elif user.opcode in ("bitcast", "get-tuple-element"):
                total += self._read(inner, user.name) if not user.root else math.inf
            elif nested:
                inputs = {int(i.inside): i.name for i in nested.values() if i.opcode == "parameter"}
                total += sum(
                    self._read(nested, inputs[k]) for k, n in enumerate(user.operands) if n == name
                )
            else:
                return math.inf
        return total

    def _written(self, inner: dict[str, Line], root: Line, shape: str) -> float:
        """Counts the bytes that a fusion writes: of an update in place, the slice."""
        if root.opcode == "tuple":
            parts = [m[0] for m in ARRAY.finditer(shape)]
            return sum(
                self._written(inner, inner[n], p)
                for n, p in zip(root.operands, parts, strict=False)
            )
        if root.opcode == "bitcast" and root.operands and root.operands[0] in inner:
            return self._written(inner, inner[root.operands[0]], shape)
        if root.opcode == "dynamic-update-slice":
            return bytes_of(inner[root.operands[1]].shape)
        nested = (
            self.computations.get(root.attribute("calls"), {}) if root.opcode == "fusion" else {}
        )
        last = next((i for i in nested.values() if i.root), None)
        return self._written(nested, last, shape) if last is not None else bytes_of(shape, hbm=True)


def _handle(body: dict[str, Line], done: Line, flying: dict[str, tuple[str, float]]) -> str:
    """Finds the transfer in flight that a done ends."""
    if done.name.startswith("async-collective-done"):
        return "async-collective-start" + done.name.removeprefix("async-collective-done")
    name = done.operands[0] if done.operands else ""
    while name in body and name not in flying and body[name].operands:
        name = body[name].operands[0]
    return name


def read_program(text: str, machine: str) -> dict[str, Any]:
    """Reads a program; the step is at least its FLOPs at the peak, which is checked here."""
    on = machine_of(machine)
    reading = Program(text, on).read()
    return {
        **dataclasses.asdict(reading), "floor": reading.flops / on.peak,
        "above_floor": reading.seconds >= reading.flops / on.peak,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("machine", help="such as v5p:2x2x4")
    parser.add_argument("file", type=Path, help="HLO text, plain or .gz")
    given = parser.parse_args()
    content = given.file.read_bytes()
    text = (gzip.decompress(content) if given.file.suffix == ".gz" else content).decode()
    print(json.dumps(read_program(text, given.machine), indent=1))


if __name__ == "__main__":
    main()
