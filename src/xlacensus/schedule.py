"""Simulated schedule: a predicted timeline of a scheduled program on one chip.

Instructions run in the order of the schedule, one after another. A collective between its start and
its done overlaps with the instructions between them and occupies the links that its group spans,
which carry first what was started first. A loop's body is simulated once and multiplied by its trip
count. The compiler fixes the order; every time is predicted, none is measured.

An instruction takes the time of its FLOPs or of its bytes. TPU programs have the compiler's own
estimate of every fusion in cycles. It is used for matrix products; for elementwise work it is
several times too high, and bytes over HBM bandwidth are an upper bound. GPU programs have no
estimates: FLOPs and bytes are divided by the achieved peak.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from xlacensus.chips import AchievedFractions, Chip, Efficiency, Torus
from xlacensus.hlo.collectives import (
    Groups,
    collective_in,
    done_of,
    expand,
    group_label,
    group_of,
    is_fused_done,
    kind_of,
    payload_of,
    start_of,
    transfer_start,
)
from xlacensus.hlo.flops import (
    ALL_ROWS,
    Rate,
    Skipped,
    computed_flops,
    kernel_work,
    least_flops,
    matmul_flops,
    rate_of,
    unpriced_kernels,
)
from xlacensus.hlo.loops import branches_of, known_branch, scope_of_branch, trip_count
from xlacensus.hlo.parser import Array, Computation, Instruction, Module, Shape, arrays_of
from xlacensus.interconnect import (
    DeviceCoordinates,
    Route,
    all_coordinates,
    messages_on_links,
    route,
    span_of_group,
)
from xlacensus.kernel_bundles import kernel_of, kernel_seconds, pairs_of_fraction

_FREE = re.compile(
    "parameter|constant|get-tuple-element|tuple|bitcast|after-all|partition-id|replica-id"
    "|opt-barrier|add-dependency|domain|iota|.*-(done|update)"
)
"""Opcodes that cost nothing."""
_HOST, _VMEM = 5, 1
"""Memory spaces of the host and of VMEM in a TPU's layouts."""
_NO_ESTIMATE = 10**15
"""Cycles from which the compiler's estimate is a placeholder."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Time of one execution of one instruction."""

    kind: str
    """matmul, attention, memory, collective, or host."""
    seconds: float


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Roofline cost of instructions on one chip."""

    chip: Chip
    efficiency: Efficiency
    skipped: Skipped = ALL_ROWS

    def cost_of(self, instruction: Instruction) -> Cost:
        """Returns how long an instruction keeps the chip busy;
        collectives and loops are not covered."""
        if _FREE.fullmatch(instruction.opcode):
            return Cost("memory", 0.0)
        if instruction.opcode == "custom-call":
            return self._custom_call(instruction)
        compute, memory = (
            self._matmul_seconds(instruction),
            self.memory_seconds(hbm_bytes_accessed(instruction)),
        )
        match = re.search(r'"estimated_cycles":"(\d+)"', instruction.attribute_text)
        cycles = int(match[1]) if match and int(match[1]) < _NO_ESTIMATE else 0
        estimate = cycles / self.chip.clock_hz if cycles and self.chip.clock_hz else None
        if compute:
            return Cost("matmul", max(compute if estimate is None else estimate, memory))
        return Cost("memory", memory if estimate is None else min(estimate, memory))

    def _matmul_seconds(self, instruction: Instruction) -> float:
        """Seconds of a matrix product, or of those in a fusion, nested ones included,
        at the peaks of their types."""
        if instruction.opcode in ("dot", "convolution"):
            rate = rate_of(instruction.operand_arrays[:2])
            return matmul_flops(instruction) / (
                peak_flops(self.chip, rate) * self.efficiency.matmul
            )
        body = _fused_body(instruction) if instruction.opcode == "fusion" else None
        return sum(map(self._matmul_seconds, body or ()))

    def memory_seconds(self, num_bytes: float) -> float:
        """Returns the time to move bytes to or from HBM."""
        return num_bytes / (self.chip.hbm_bandwidth * self.efficiency.hbm)

    def _custom_call(self, instruction: Instruction) -> Cost:
        """Prices a kernel by its FLOPs and its bytes;
        one whose FLOPs are not known only by its bytes."""
        work = kernel_work(instruction)
        if work.kind == "hint":
            return Cost("memory", 0.0)
        memory = self.memory_seconds(hbm_bytes_accessed(instruction))
        peak, flops = (
            peak_flops(self.chip, work.rate),
            computed_flops(work, instruction, self.skipped),
        )
        if work.kind == "attention":
            seconds = self._bundle_seconds(instruction, flops / work.flops)
            if seconds is None:
                seconds = flops / (peak * self.efficiency.attention)
            return Cost("attention", max(seconds, memory))
        reached = self.efficiency.matmul * (
            self.efficiency.grouped_matmul if work.kind == "grouped matmul" else 1.0
        )
        return Cost("matmul" if flops else "memory", max(flops / (peak * reached), memory))

    def _bundle_seconds(self, instruction: Instruction, visible: float) -> float | None:
        """Returns the seconds of an attention kernel by its bundles; None where they are not known.

        visible: fraction of the pairs of a query and a key that are visible.
        """
        bundles = kernel_of(instruction, self.chip.name)
        if bundles is None or self.chip.clock_hz is None:
            return None
        operands = (a for a in instruction.operand_arrays if a.dtype == "bf16" and len(a.dims) > 2)
        queries, keys = itertools.islice(operands, 2)
        heads = queries.elements / (queries.dims[-2] * queries.dims[-1])
        tokens = queries.dims[-2]
        length = keys.dims[-2]
        pairs = pairs_of_fraction(visible, tokens // bundles.q, length // bundles.kv)
        return heads * kernel_seconds(bundles, self.chip.clock_hz, tokens, length, pairs)


def peak_flops(chip: Chip, rate: Rate) -> float:
    """Returns the peak FLOP/s of a chip for products of these types;
    that of bfloat16 where it has no other."""
    special = {"fp8": chip.flops_fp8, "int8": chip.flops_int8, "mxfp8": chip.flops_mxfp8}.get(rate)
    return special or chip.flops_bf16


def hbm_bytes_accessed(instruction: Instruction) -> float:
    """Counts the bytes of HBM that an instruction reads and writes;
    of a slice of a larger array, only the slice."""
    shapes, body = [operand.shape for operand in instruction.operands], _fused_body(instruction)
    if body is None:
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2.0 * _hbm_bytes(instruction.shape)
        if instruction.opcode == "dynamic-update-slice":
            return 2.0 * _hbm_bytes(shapes[1])
        if instruction.opcode == "scatter":
            return 3.0 * _hbm_bytes(shapes[-1]) + _hbm_bytes(shapes[-2])
        return _hbm_bytes(instruction.shape) + sum(map(_hbm_bytes, shapes))
    total = 0.0
    for number, shape in enumerate(shapes):
        parameter = body.parameters.get(number)
        total += min(_hbm_bytes(shape), math.inf if parameter is None else _bytes_read(parameter))
    # The shape of a start begins with its operands' shapes (XLA:GPU).
    result = instruction.shape
    if instruction.opcode.endswith("-start") and not isinstance(result, Array) and len(result) > 1:
        result = result[1]
    return total + _bytes_written(body.root, result)


def _fused_body(instruction: Instruction) -> Computation | None:
    """Returns the computation that a fusion or an asynchronous start runs;
    None for any other instruction."""
    return (
        next(iter(instruction.called), None)
        if not instruction.opcode.startswith("custom-call")
        else None
    )


def _hbm_bytes(shape: Shape) -> float:
    return float(
        sum(array.bytes for array in arrays_of(shape) if array.memory_space not in (_VMEM, _HOST))
    )


def _bytes_read(value: Instruction, callers: tuple[Instruction, ...] = ()) -> float:
    """Counts the bytes that a fusion reads of an operand, through fusions nested in it;
    infinity for all of it.

    callers: fusions around a nested one, outermost first.
    """
    total = 0.0
    if value.is_root:
        # The value leaves the fusion unchanged: a nested one passes it to its users.
        total += _bytes_read(callers[-1], callers[:-1]) if callers else math.inf
    for user in value.users:
        nested = _fused_body(user)
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            total += sum(array.bytes for array in arrays_of(user.shape))
        elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] is value:
            continue
        elif user.opcode in (
            "bitcast",
            "copy",
        ):  # in a fusion a copy is another layout of what its users read
            total += _bytes_read(user, callers)
        elif nested is not None:
            numbers = [
                i
                for i, operand in enumerate(user.operands)
                if operand is value and i in nested.parameters
            ]
            total += sum(_bytes_read(nested.parameters[i], (*callers, user)) for i in numbers)
        else:
            return math.inf
    return total


def _bytes_written(root: Instruction, shape: Shape) -> float:
    if root.opcode == "tuple" and not isinstance(shape, Array):
        return sum(map(_bytes_written, root.operands, shape))
    if root.opcode == "bitcast" and root.operands:
        return _bytes_written(root.operands[0], shape)
    nested = _fused_body(root)
    if nested is not None:
        return _bytes_written(nested.root, shape)
    if root.opcode == "dynamic-update-slice":
        return float(sum(array.bytes for array in arrays_of(root.operands[1].shape)))
    if root.opcode == "scatter" and root.operands[0].opcode == "parameter":
        return 2.0 * sum(
            array.bytes for array in arrays_of(root.operands[-1].shape)
        )  # rows are read and written
    return _hbm_bytes(shape)


_OFFLOADED = ("call-start", "custom-call-start")
"""Opcodes that start a computation on another core;
those without a collective are gathers and scatters."""
_ROUNDING = 1e-6
"""Relative error of sums of floating-point times."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Interval of the timeline, in seconds from the beginning of the step."""

    name: str
    kind: str
    """matmul, attention, memory, collective, host, or `loop`."""
    start: float
    seconds: float
    count: int
    """Executions that this span stands for: a loop's body is drawn once."""
    depth: int
    """Number of loops around it."""
    axes: str = ""
    exposed: float = 0.0
    """Seconds of a collective in which nothing else ran."""

    @property
    def instruction(self) -> str:
        """Name of the instruction, without the scopes in front of it."""
        return self.name.rpartition(": ")[2]


class _Timeline:
    def __init__(self) -> None:
        self.now = self.bubble = 0.0
        self.by_kind, self.exposed, self.link_seconds = (
            defaultdict[str, float](float) for _ in range(3)
        )
        self.spans: list[Span] = []
        self._in_flight: dict[str, tuple[Span, Collection[str]]] = {}
        self._free: defaultdict[str, float] = defaultdict(float)

    def run(self, name: str, cost: Cost) -> None:
        """Runs work on the compute units."""
        if cost.seconds > 0:
            self.by_kind[cost.kind] += cost.seconds
            self.spans.append(Span(name, cost.kind, self.now, cost.seconds, 1, 0))
            self.now += cost.seconds

    def enter(self, name: str, inner: "_Timeline", times: float) -> None:
        """Runs a loop, a call or a branch, `times` executions of its body."""
        if inner.now * times <= 0:
            return
        start, count = self.now, max(1, round(times))
        self.spans.append(Span(name, "loop", start, inner.now * times, count, 0))
        self.spans += [
            dataclasses.replace(s, start=start + s.start, count=s.count * count, depth=s.depth + 1)
            for s in inner.spans
        ]
        self.bubble += inner.bubble * times
        for sums in ("by_kind", "exposed", "link_seconds"):
            for key, value in getattr(inner, sums).items():
                getattr(self, sums)[key] += value * times
        self.now = start + inner.now * times

    def begin(
        self, key: str, kind: str, links: Collection[str], seconds: float, axes: str, name: str
    ) -> None:
        """Starts a transfer that overlaps with what follows;
        its links carry first what was started before."""
        if kind != "memory":
            self.link_seconds[axes or kind] += seconds
        ends = max([self.now, *(self._free[link] for link in links)]) + seconds
        self._free.update(dict.fromkeys(links, ends))
        self._in_flight[key] = Span(name, kind, self.now, ends - self.now, 1, 0, axes), links

    def transfer(
        self, key: str, kind: str, links: Collection[str], seconds: float, axes: str, name: str
    ) -> None:
        """Runs a transfer with nothing beside but those in flight,
        which have half of its links until either ends."""
        behind = max([0.0, *(self._free[link] - self.now for link in links)])
        for other, (span, shared) in self._in_flight.items():
            left = span.start + span.seconds - self.now
            if left > 0 and not set(links).isdisjoint(shared):
                self._in_flight[other] = (
                    dataclasses.replace(span, seconds=span.seconds + min(left, seconds)),
                    shared,
                )
        self.begin(key, kind, links, seconds, axes, name)
        self._in_flight[key] = (
            Span(name, kind, self.now, seconds + min(behind, seconds), 1, 0, axes),
            links,
        )
        self.wait(key)

    def wait(self, key: str) -> None:
        """Waits until a transfer has ended; the waiting time is exposed communication."""
        span, _ = self._in_flight.pop(key, (None, ()))
        if span is not None:
            waited = max(0.0, span.start + span.seconds - self.now)
            if waited:
                self.by_kind["exposed"] += waited
                self.exposed[span.axes or span.kind] += waited
                self.now += waited
            self.spans += (
                [] if span.kind == "memory" else [dataclasses.replace(span, exposed=waited)]
            )

    def wait_for_all(self) -> None:
        """Waits for every transfer in flight."""
        for key in list(self._in_flight):
            self.wait(key)


Ticks = Mapping[frozenset[frozenset[str]], float]
"""Ticks of a pipeline schedule: scopes of the branches that each stage takes
in a tick -> number of such ticks."""


@dataclasses.dataclass(frozen=True)
class TargetDevices:
    """Devices that a schedule is simulated on."""

    chip: Chip
    topology: tuple[int, ...]
    """Chips along each dimension of a slice."""
    coordinates: tuple[DeviceCoordinates, ...]
    """Coordinates of each device of the mesh, in its order."""
    efficiency: Efficiency

    @classmethod
    def grid(
        cls,
        chip: Chip,
        topology: tuple[int, ...],
        slices: int = 1,
        efficiency: Efficiency | None = None,
    ) -> "TargetDevices":
        """Returns all devices of whole slices or nodes, the last coordinate fastest.

        topology: chips along each dimension of a slice; `(devices of a node,)` for GPUs.
        slices: slices or nodes.
        efficiency: achieved fractions of the chip's peaks; None takes the peaks.

        Example: sixteen GPUs in two nodes.

            >>> from xlacensus import ChipRates, Nodes, TargetDevices
            >>> gpu = ChipRates("GPU", 989e12, 3.35e12, Nodes(450e9, 8), 50e9, 55e9)
            >>> TargetDevices.grid(gpu, (8,), slices=2).coordinates[9]
            (1, 1)
        """
        coordinates = tuple(all_coordinates(chip, topology, slices))
        return cls(chip, topology, coordinates, efficiency or AchievedFractions())


@dataclasses.dataclass(frozen=True)
class SimulatedSchedule:
    """Predicted step of one device; every time is simulated, none is measured."""

    chip: str
    step_seconds: float
    by_kind: Mapping[str, float]
    """Seconds of compute and memory by kind,
    and `exposed`: seconds in which the device only waits for a transfer."""
    exposed: Mapping[str, float]
    """Seconds of exposed communication by mesh axes."""
    link_seconds: Mapping[str, float]
    """Seconds that the links of those axes are busy, overlapped or exposed."""
    routes: Mapping[str, str]
    """Medium of those axes: ICI, NVLink, DCN or network."""
    bubble: float
    """Seconds of pipeline bubble: stages wait for each other."""
    spans: tuple[Span, ...]
    floor_seconds: float = 0.0
    """Time of the program's matrix products at the chip's peak
    for their types: no step is faster."""
    unpriced: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Executions of the kernels whose FLOPs are not known, by name;
    they are priced by their bytes alone."""

    @property
    def by_collective(self) -> dict[str, tuple[float, float]]:
        """Seconds in flight and exposed seconds of each collective instruction, all
        executions together."""
        sums: dict[str, tuple[float, float]] = {}
        for span in (span for span in self.spans if span.kind == "collective"):
            seconds, exposed = sums.get(span.instruction, (0.0, 0.0))
            sums[span.instruction] = (
                seconds + span.seconds * span.count,
                exposed + span.exposed * span.count,
            )
        return sums

    @property
    def profile(self) -> bytes:
        """Times of the instructions as XLA's scheduler takes them (`ProfiledInstructionsProto`,
        as text)."""
        seconds = {span.instruction: span.seconds for span in self.spans}
        return "\n".join(
            f'costs {{ name: "{name}" cost_us: {1e6 * s:.3f} }}' for name, s in seconds.items()
        ).encode()

    @property
    def doubt(self) -> str:
        """Reason not to trust the step time: it is below the time of its FLOPs at the peak.
        Empty if it is not."""
        if self.step_seconds >= self.floor_seconds * (1 - _ROUNDING):
            return ""
        return (
            f"the simulated step of {self.step_seconds:.4g} s is shorter than its matrix products "
            f"take at the peak of {self.chip}, {self.floor_seconds:.4g} s: the schedule prices an "
            "instruction too low"
        )


def simulate_schedule(
    module: Module,
    target: TargetDevices,
    mesh: Mapping[str, int],
    skipped: Skipped = ALL_ROWS,
    ticks: Ticks | None = None,
) -> SimulatedSchedule:
    """Simulates the program of one device.

    mesh: degree of each axis, outermost first.  skipped: what kernels leave out of their operands.
    ticks: of a pipeline; the stages wait in a tick for the one whose branches take longest.
    """
    simulator = _Simulator(target, dict(mesh), skipped, ticks or {})
    timeline = simulator.run(module.entry)
    floor = sum(
        n / peak_flops(target.chip, rate) for rate, n in least_flops(module, skipped).items()
    )
    return SimulatedSchedule(
        target.chip.name,
        timeline.now,
        dict(timeline.by_kind),
        dict(timeline.exposed),
        dict(timeline.link_seconds),
        simulator.routes,
        timeline.bubble,
        tuple(timeline.spans),
        floor,
        unpriced_kernels(module),
    )


class _Simulator:
    """Simulation of one program; computations and collectives are simulated once and cached."""

    def __init__(self, target: TargetDevices, mesh: dict[str, int], skipped: Skipped, ticks: Ticks):
        self.target, self.mesh, self.ticks = target, mesh, ticks
        self.cost_model = CostModel(target.chip, target.efficiency, skipped)
        self.routes: dict[str, str] = {}
        self.run = functools.cache(self._run)
        self._transfer = functools.cache(self._price_transfer)

    def _run(self, computation: Computation) -> _Timeline:
        timeline = _Timeline()
        for instruction in computation:
            self._instruction(instruction, timeline)
        timeline.wait_for_all()
        bubble = self._bubble(computation) if self.ticks else 0.0
        timeline.bubble += bubble
        timeline.now += bubble
        return timeline

    def _instruction(self, instruction: Instruction, timeline: _Timeline) -> None:
        opcode = instruction.opcode
        if opcode in ("while", "call"):
            timeline.enter(
                _label(instruction), self.run(instruction.called[0]), trip_count(instruction) or 1
            )
        elif opcode == "conditional":
            # The longest branch that is taken, as often as it is.
            taken = {body: known_branch(instruction, body) for body in branches_of(instruction)}
            bodies = [body for body, known in taken.items() if known is None or known.taken]
            if bodies:
                longest = max(bodies, key=lambda body: self.run(body).now)
                known = taken[longest]
                timeline.enter(
                    _label(instruction),
                    self.run(longest),
                    known.taken / known.executions if known else 1.0,
                )
        elif opcode.endswith(("-done", "-update")) or is_fused_done(instruction):
            start = start_of(instruction)
            # An update that passes the operands of a start begins it.
            if start is not None and not (
                transfer_start(start) is instruction and self._begin(timeline, start)
            ):
                timeline.wait(start.name)
        elif collective_in(instruction) is not None or opcode in _OFFLOADED:
            if transfer_start(instruction) is instruction:
                self._begin(timeline, instruction)
        elif opcode in ("copy-start", "slice-start"):
            seconds, medium = self._copy(instruction)
            timeline.begin(instruction.name, medium, (medium,), seconds, "", _label(instruction))
        elif not _FREE.fullmatch(opcode):
            timeline.run(_label(instruction), self.cost_model.cost_of(instruction))

    def _begin(self, timeline: _Timeline, start: Instruction) -> bool:
        """Adds a collective, or work on another core; False for any other instruction."""
        if collective_in(start) is not None:
            self._communicate(timeline, start)
        elif start.opcode in _OFFLOADED:
            self._offload(timeline, start)
        else:
            return False
        return True

    def _offload(self, timeline: _Timeline, start: Instruction) -> None:
        """Begins a gather or scatter on a SparseCore: it moves HBM beside the other cores
        until its done."""
        done = done_of(start)
        operands = [
            operand.shape for operand in transfer_start(start).operands if operand is not start
        ]
        # A gather reads and writes its rows;
        # a scatter reads its updates, and reads and writes the rows they change.
        scattered = 3 * _hbm_bytes(operands[-1]) if operands else 0.0
        moved = scattered if "scatter" in start.name or done is None else 2 * _hbm_bytes(done.shape)
        seconds = self.cost_model.memory_seconds(moved)
        timeline.begin(start.name, "memory", ("memory",), seconds, "", _label(start))

    def _bubble(self, computation: Computation) -> float:
        """Returns the mean seconds for which a stage waits for the others, in a pipeline's tick.

        A tick lasts as long as the slowest stage's branches in it:
        (sum over ticks of the slowest stage - time of the branches that are taken) / ticks.
        What is not in a branch takes all stages the same time. 0 for any other computation.
        """
        seconds = self._seconds_of_branches(computation)
        if not seconds:
            return 0.0
        lockstep = 0.0
        for stages, count in self.ticks.items():
            busy = [sum(seconds.get(scope, 0.0) for scope in scopes) for scopes in stages]
            lockstep += count * max(busy, default=0.0)
        branches = computation.module.branches
        taken = sum(branches[scope].taken * time for scope, time in seconds.items())
        ticks = max(branches[scope].executions for scope in seconds)
        return max(0.0, lockstep - taken) / ticks

    def _seconds_of_branches(self, computation: Computation) -> dict[str, float]:
        """Returns the seconds of each branch that the pipeline's ticks name, by its scope."""
        scopes_of_ticks = {scope for stages in self.ticks for scopes in stages for scope in scopes}
        seconds: dict[str, float] = {}
        for conditional in computation:
            if conditional.opcode != "conditional":
                continue
            for body in conditional.called:
                scope = scope_of_branch(conditional, body)
                if scope is not None and scope in scopes_of_ticks:
                    seconds[scope] = self.run(body).now
        return seconds

    def _communicate(self, timeline: _Timeline, instruction: Instruction) -> None:
        """Adds a collective: overlapped until its done if it is asynchronous, exposed otherwise."""
        axes, seconds, links = self._transfer(instruction)
        name = instruction.name
        asynchronous = instruction.opcode.endswith("-start") or name.startswith(
            "async-collective-start"
        )
        is_piece = any(
            inner.name.startswith("async_collective_fusion") for inner in instruction.called
        )
        if instruction.opcode == "fusion" and not asynchronous and is_piece:
            # Computation fused with one piece of a collective that was started elsewhere.
            timeline.run(_label(instruction), self.cost_model.cost_of(instruction))
            return
        run = timeline.begin if asynchronous else timeline.transfer
        run(name, "collective", links, seconds, axes, _label(instruction))

    def _price_transfer(self, instruction: Instruction) -> tuple[str, float, Collection[str]]:
        """Returns the label of a collective's axes, its seconds, and the links that it occupies."""
        inner = collective_in(instruction)
        assert inner is not None
        groups, axes = group_of(inner, self.mesh)
        kind = kind_of(inner) or "all-reduce"
        is_fused = instruction is not inner
        names = [called.name for called in instruction.called]
        if is_fused and any(name.startswith("all-reduce-scatter") for name in names):
            kind = "reduce-scatter"
        path = self._route(groups)
        label = group_label(groups, axes)
        self.routes[label] = path.medium
        payload = payload_of(inner, kind, path.devices, label, self.cost_model.skipped.sent_rows)
        pairs = inner.attributes.get("source_target_pairs")
        if pairs is None:
            return label, path.seconds(kind, payload), path.links
        torus = self.target.chip.interconnect
        if isinstance(torus, Torus) and path.medium.startswith("ICI"):
            return self._price_permute(label, torus, payload, pairs, path.hop_latency)
        # Links are full duplex: two permutes in opposite directions of a ring do not wait for each
        # other.
        return label, path.seconds(kind, payload), [f"{link} {pairs}" for link in path.links]

    def _price_permute(
        self, label: str, torus: Torus, payload: float, pairs: str, hop_latency: float
    ) -> tuple[str, float, Collection[str]]:
        """Returns as _price_transfer, for a permute on a torus: the most loaded link decides."""
        coordinates = self.target.coordinates
        moves = [(coordinates[source], coordinates[goal]) for source, goal in expand(pairs, 1)]
        messages = messages_on_links(torus, self.target.topology, moves)
        bandwidth = torus.link_bandwidth * self.target.efficiency.links
        seconds = payload * max(messages.values()) / bandwidth + hop_latency
        return label, seconds, list(messages)

    def _route(self, groups: Groups) -> Route:
        """Returns the slowest path of any group.

        All groups of an axis are alike unless a slice is cut unevenly: three are looked at.
        """
        sample = groups
        if len(groups) > 3:
            sample = (groups[0], groups[len(groups) // 2], groups[-1])
        target = self.target
        paths: list[Route] = []
        for group in sample:
            span = span_of_group(target.chip, [target.coordinates[i] for i in group])
            paths.append(route(target.chip, target.topology, span, target.efficiency))
        return min(paths, key=lambda path: path.bandwidth)

    def _copy(self, instruction: Instruction) -> tuple[float, str]:
        """Returns the time of an asynchronous copy and what carries it: `host` or `memory`."""
        arrays = list(arrays_of(instruction.shape))
        moved = max((a.bytes for a in arrays[:2]), default=0)
        if any(a.memory_space == _HOST and a.bytes for a in arrays):
            return moved / self.target.chip.host_bandwidth, "host"
        return self.cost_model.memory_seconds(moved), "memory"


def _label(instruction: Instruction) -> str:
    scopes = instruction.scopes
    return f"{'/'.join(scopes[-2:])}: {instruction.name}" if scopes else instruction.name
