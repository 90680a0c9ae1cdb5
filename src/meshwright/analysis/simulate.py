"""Simulated schedule: a predicted timeline of a scheduled program on one chip.

Instructions run in the order of the schedule, one after another, for the times of `cost_model.py`. A collective between
its start and its done overlaps with the instructions between them and occupies the links that its group spans; a link
carries one collective at a time. A loop's body is simulated once and multiplied by its trip count. The compiler fixes
the order; every time is predicted, none is measured.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping

from meshwright.analysis.cost_model import FREE, CostModel, hbm_bytes, host_bytes, peak_flops
from meshwright.hardware.chips import Chip, Efficiency
from meshwright.hardware.interconnect import DeviceCoordinates, Route, route, span_of_group
from meshwright.hlo.collectives import (
    Groups,
    collective_in,
    done_of,
    group_label,
    group_of,
    is_fused_done,
    kind_of,
    payload_of,
    start_of,
    transfer_start,
)
from meshwright.hlo.flops import ALL_ROWS, Skipped, least_flops, unpriced_kernels
from meshwright.hlo.loops import branches_of, known_branch, scope_of_branch, trip_count
from meshwright.hlo.parser import Computation, Instruction, Module, arrays_of
from meshwright.hlo.scopes import scopes_of

_OFFLOADED = ("call-start", "custom-call-start")
"""Opcodes that start a computation on another core; those without a collective are gathers and scatters."""
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
    """Mesh axes of a collective."""
    exposed: float = 0.0
    """Seconds of a collective in which nothing else ran."""

    @property
    def instruction(self) -> str:
        """Name of the instruction, without the scopes in front of it."""
        return self.name.rpartition(": ")[2]


@dataclasses.dataclass
class _Totals:
    """Sums of one execution of a computation."""

    seconds: float = 0.0
    by_kind: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    exposed: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    link_seconds: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    bubble: float = 0.0
    spans: list[Span] = dataclasses.field(default_factory=list)

    def add(self, other: "_Totals", times: float) -> None:
        """Adds `times` executions of another computation; its spans are left out."""
        self.seconds += other.seconds * times
        self.bubble += other.bubble * times
        for sums, more in (
            (self.by_kind, other.by_kind),
            (self.exposed, other.exposed),
            (self.link_seconds, other.link_seconds),
        ):
            for key, value in more.items():
                sums[key] += value * times


class _Timeline:
    """Simulated clock of one computation, with the transfers in flight."""

    def __init__(self) -> None:
        self.now = 0.0
        self.totals = _Totals()
        self._in_flight: dict[str, tuple[float, int | None, str]] = {}
        self._link_free: defaultdict[str, float] = defaultdict(float)

    def run(self, name: str, kind: str, seconds: float) -> None:
        """Runs work on the compute units."""
        if seconds <= 0:
            return
        self.totals.by_kind[kind] += seconds
        self.totals.spans.append(Span(name, kind, self.now, seconds, 1, 0))
        self.now += seconds

    def enter(self, name: str, inner: _Totals, times: float) -> None:
        """Runs a loop, a call or a branch, `times` executions of its body."""
        if inner.seconds * times <= 0:
            return
        start = self.now
        count = max(1, round(times))
        self.totals.spans.append(Span(name, "loop", start, inner.seconds * times, count, 0))
        self.totals.spans += [
            dataclasses.replace(s, start=start + s.start, count=s.count * count, depth=s.depth + 1) for s in inner.spans
        ]
        self.totals.add(inner, times)
        self.now = start + inner.seconds * times

    def begin(self, key: str, kind: str, link: str, seconds: float, axes: str, name: str) -> None:
        """Starts a transfer that overlaps with what follows; a link carries one transfer at a time."""
        start = max(self.now, self._link_free[link])
        self._link_free[link] = start + seconds
        span = None
        if kind in ("collective", "host"):
            self.totals.link_seconds[axes or kind] += seconds
            span = len(self.totals.spans)
            self.totals.spans.append(Span(name, kind, start, seconds, 1, 0, axes))
        self._in_flight[key] = (start + seconds, span, axes or kind)

    def wait(self, key: str) -> None:
        """Waits until a transfer has ended; the waiting time is exposed communication."""
        end, span, axes = self._in_flight.pop(key, (0.0, None, ""))
        waited = end - self.now
        if waited <= 0:
            return
        self.totals.by_kind["exposed"] += waited
        self.totals.exposed[axes] += waited
        if span is not None:
            self.totals.spans[span] = dataclasses.replace(self.totals.spans[span], exposed=waited)
        self.now = end

    def wait_for_all(self) -> None:
        """Waits for every transfer in flight."""
        for key in list(self._in_flight):
            self.wait(key)


Ticks = Mapping[frozenset[frozenset[str]], int]
"""Ticks of a pipeline schedule: scopes of the branches that each stage takes in a tick -> number of such ticks."""


@dataclasses.dataclass(frozen=True)
class TargetDevices:
    """Devices that a schedule is simulated on."""

    chip: Chip
    topology: tuple[int, ...]
    """Chips along each dimension of a slice."""
    coordinates: tuple[DeviceCoordinates, ...]
    """Coordinates of each device of the mesh, in its order."""
    efficiency: Efficiency
    """Achieved fraction of the chip's peak."""


@dataclasses.dataclass(frozen=True)
class SimulatedSchedule:
    """Predicted step of one device; every time is simulated, none is measured."""

    chip: str
    step_seconds: float
    """Predicted step time."""
    by_kind: Mapping[str, float]
    """Seconds of compute and memory by kind, and `exposed`: seconds in which the device only waits for a transfer."""
    exposed: Mapping[str, float]
    """Seconds of exposed communication by mesh axes."""
    link_seconds: Mapping[str, float]
    """Seconds that the links of those axes are busy, overlapped or exposed."""
    routes: Mapping[str, str]
    """Medium of those axes: ICI, NVLink, DCN or network."""
    bubble: float
    """Seconds of pipeline bubble: stages wait for each other."""
    spans: tuple[Span, ...]
    """Timeline."""
    floor_seconds: float = 0.0
    """Time of the program's matrix products at the chip's peak for their types: no step is faster."""
    unpriced: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Executions of the kernels whose FLOPs are not known, by name; they are priced by their bytes alone."""

    @property
    def doubt(self) -> str:
        """Reason not to trust the step time: it is below the time of its FLOPs at the peak. Empty if it is not."""
        if self.step_seconds >= self.floor_seconds * (1 - _ROUNDING):
            return ""
        return (
            f"the simulated step of {self.step_seconds:.4g} s is shorter than its matrix products take at the peak of "
            f"{self.chip}, {self.floor_seconds:.4g} s: the schedule prices an instruction too low"
        )

    def mfu(self, flops: float, peak: float) -> float:
        """Returns the predicted MFU. flops: model FLOPs of one step on one device; peak: FLOP/s of the chip."""
        return flops / (self.step_seconds * peak) if self.step_seconds else 0.0


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
    simulator = _Simulator(module, target, dict(mesh), skipped, dict(ticks or {}))
    totals = simulator.run(module.entry.name)
    floor = sum(n / peak_flops(target.chip, rate) for rate, n in least_flops(module, skipped).items())
    return SimulatedSchedule(
        target.chip.name,
        totals.seconds,
        dict(totals.by_kind),
        dict(totals.exposed),
        dict(totals.link_seconds),
        simulator.routes,
        totals.bubble,
        tuple(totals.spans),
        floor,
        unpriced_kernels(module),
    )


class _Simulator:
    """Simulation of one program; computations and collectives are simulated once and cached."""

    def __init__(self, module: Module, target: TargetDevices, mesh: dict[str, int], skipped: Skipped, ticks: Ticks):
        self.module, self.target, self.mesh, self.ticks = module, target, mesh, ticks
        self.cost_model = CostModel(target.chip, target.efficiency, skipped)
        self.routes: dict[str, str] = {}
        self.run = functools.cache(self._run)
        self._transfer = functools.cache(self._price_transfer)

    def _run(self, name: str) -> _Totals:
        """Simulates one execution of a computation."""
        computation, timeline = self.module.computations[name], _Timeline()
        for instruction in computation.instructions.values():
            self._instruction(computation, instruction, timeline)
        timeline.wait_for_all()
        bubble = self._bubble(computation) if self.ticks else 0.0
        timeline.totals.bubble += bubble
        timeline.now += bubble
        timeline.totals.seconds = timeline.now
        return timeline.totals

    def _instruction(self, computation: Computation, instruction: Instruction, timeline: _Timeline) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            trips = trip_count(self.module, computation, instruction) or 1
            timeline.enter(self._label(instruction), self.run(instruction.attributes["body"].lstrip("%")), trips)
        elif opcode == "conditional":
            self._conditional(timeline, computation, instruction)
        elif opcode == "call":
            timeline.enter(self._label(instruction), self.run(instruction.called[0]), 1)
        elif opcode.endswith(("-done", "-update")) or is_fused_done(instruction):
            self._continue(timeline, computation, instruction)
        elif collective_in(self.module, instruction) is not None:
            if transfer_start(computation, instruction) is instruction:
                self._communicate(timeline, computation, instruction)
        elif opcode in _OFFLOADED:
            if transfer_start(computation, instruction) is instruction:
                self._offload(timeline, computation, instruction)
        elif opcode in ("copy-start", "slice-start"):
            seconds, medium = self._copy(instruction)
            timeline.begin(instruction.name, medium, medium, seconds, "", self._label(instruction))
        elif not FREE.fullmatch(opcode):
            cost = self.cost_model.cost_of(self.module, computation, instruction)
            timeline.run(self._label(instruction), cost.kind, cost.seconds)

    def _continue(self, timeline: _Timeline, computation: Computation, instruction: Instruction) -> None:
        """Ends a transfer; an update that passes the operands of a start begins it."""
        start = start_of(computation, instruction)
        if start is None:
            return
        begins = transfer_start(computation, start) is instruction
        if begins and collective_in(self.module, start) is not None:
            self._communicate(timeline, computation, start)
        elif begins and start.opcode in _OFFLOADED:
            self._offload(timeline, computation, start)
        else:
            timeline.wait(start.name)

    def _offload(self, timeline: _Timeline, computation: Computation, start: Instruction) -> None:
        """Begins a gather or scatter on a SparseCore: it moves HBM beside the other cores until its done."""
        begin, done = transfer_start(computation, start), done_of(computation, start)
        operands = [computation.instructions[n].shape for n in begin.operands if n != start.name]
        # A gather reads and writes its rows; a scatter reads its updates, and reads and writes the rows they change.
        scattered = 3 * hbm_bytes(operands[-1]) if operands else 0.0
        moved = scattered if "scatter" in start.name or done is None else 2 * hbm_bytes(done.shape)
        seconds = self.cost_model.memory_seconds(moved)
        timeline.begin(start.name, "memory", "memory", seconds, "", self._label(start))

    def _conditional(self, timeline: _Timeline, computation: Computation, instruction: Instruction) -> None:
        """Simulates a conditional: its longest branch, as often as it is taken."""
        bodies = branches_of(self.module, computation, instruction)
        totals = [self.run(body.name) for body in bodies]
        longest = max(range(len(bodies)), key=lambda i: totals[i].seconds)
        branch = known_branch(self.module, bodies[longest])
        timeline.enter(self._label(instruction), totals[longest], branch.taken / branch.executions if branch else 1.0)

    def _bubble(self, computation: Computation) -> float:
        """Returns the mean seconds for which a stage waits for the others, if a computation is a pipeline's tick.

        What is not in a branch takes all stages the same time.
        """
        conditionals = (i for i in computation.instructions.values() if i.opcode == "conditional")
        bodies = [body for conditional in conditionals for body in self.module.called_by(conditional)]
        in_ticks = {scope for stages in self.ticks for scopes in stages for scope in scopes}
        scoped = ((scope_of_branch(self.module, body), body) for body in bodies)
        seconds = {scope: self.run(body.name).seconds for scope, body in scoped if scope in in_ticks}
        if not seconds:
            return 0.0
        branches = {scope: self.module.branches[scope] for scope in seconds if scope is not None}
        own = sum(branch.taken * seconds[scope] for scope, branch in branches.items())
        lockstep = sum(
            count * max((sum(seconds.get(scope, 0.0) for scope in scopes) for scopes in stages), default=0.0)
            for stages, count in self.ticks.items()
        )
        return max(0.0, lockstep - own) / max(branch.executions for branch in branches.values())

    def _communicate(self, timeline: _Timeline, computation: Computation, instruction: Instruction) -> None:
        """Adds a collective: overlapped until its done if it is asynchronous, exposed otherwise."""
        axes, seconds = self._transfer(computation.name, instruction.name)
        name = instruction.name
        asynchronous = instruction.opcode.endswith("-start") or name.startswith("async-collective-start")
        is_piece = name.startswith("async_collective_fusion") or "async-collective" in name
        if instruction.opcode == "fusion" and not asynchronous and is_piece:
            # Computation fused with one piece of a collective that was started elsewhere.
            cost = self.cost_model.cost_of(self.module, computation, instruction)
            timeline.run(self._label(instruction), cost.kind, cost.seconds)
            return
        timeline.begin(name, "collective", self._links(axes, instruction), seconds, axes, self._label(instruction))
        if not asynchronous:
            timeline.wait(name)

    def _links(self, axes: str, instruction: Instruction) -> str:
        """Returns the links that a collective occupies: those of its axes; of a permute those of its direction alone.

        Links are full duplex: two permutes in opposite directions of a ring do not wait for each other.
        """
        pairs = instruction.attributes.get("source_target_pairs")
        return f"{axes} {pairs}" if pairs else axes

    def _price_transfer(self, computation: str, name: str) -> tuple[str, float]:
        """Returns the mesh axes of a collective and its time in seconds."""
        instruction = self.module.computations[computation].instructions[name]
        inner = collective_in(self.module, instruction)
        assert inner is not None
        body = next(c for c in self.module.computations.values() if inner.name in c.instructions)
        groups, axes = group_of(self.module, inner, self.mesh)
        kind = kind_of(inner) or "all-reduce"
        if instruction is not inner and any(c.startswith("all-reduce-scatter") for c in instruction.called):
            kind = "reduce-scatter"
        path, label = self._route(groups), group_label(groups, axes)
        self.routes[label] = path.medium
        return label, path.seconds(kind, payload_of(body, inner, kind, path.devices))

    def _route(self, groups: Groups) -> Route:
        """Returns the slowest path of any group; all groups of an axis are alike unless a slice is cut unevenly."""
        sample = groups if len(groups) < 4 else (groups[0], groups[len(groups) // 2], groups[-1])
        chip, target = self.target.chip, self.target
        paths = [
            route(chip, target.topology, span_of_group(chip, [target.coordinates[i] for i in group]), target.efficiency)
            for group in sample
        ]
        return min(paths, key=lambda path: path.bandwidth)

    def _copy(self, instruction: Instruction) -> tuple[float, str]:
        """Returns the time of an asynchronous copy and what carries it: `host` or `memory`."""
        parts = list(arrays_of(instruction.shape))
        moved = max((a.bytes for a in parts[:2]), default=0)
        if host_bytes(instruction.shape):
            return moved / self.target.chip.host_bandwidth, "host"
        return self.cost_model.memory_seconds(moved), "memory"

    def _label(self, instruction: Instruction) -> str:
        scopes = scopes_of(instruction.op_name, self.module.branches)
        return f"{'/'.join(scopes[-2:])}: {instruction.name}" if scopes else instruction.name
