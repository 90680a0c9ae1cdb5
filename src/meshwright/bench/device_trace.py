"""Trace of JAX's profiler read back: how long each device computed, communicated, and waited.

The operations of a device lie on lanes of its plane in the trace (xplane): on a TPU one lane of
operations, `XLA Ops`, and one of asynchronous operations in flight, `Async XLA Ops`; on a GPU a
lane for each stream. Communication is exposed while no lane of operations computes. On a TPU an
asynchronous collective is on the lane of operations twice, as its start and as the time that its
done waits, both of them exposed; it is in flight from the one to the other. Which operations are
collectives is read from the compiled program, whose instructions have the names of the events; a
GPU's events are kernels, which tell their instruction, and of which NCCL's have its name.
"""

import bisect
import dataclasses
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from xlacensus.hlo.buffers import union
from xlacensus.hlo.collectives import collective_in, is_done, start_of
from xlacensus.hlo.parser import Module

Interval = tuple[float, float]
"""Start and end, in seconds."""

_NCCL = re.compile(
    r"nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|all[-_]?to[-_]?all", re.IGNORECASE
)
"""Names of kernels that communicate: those of NCCL, and of XLA's own collectives inside a node."""
_DEVICE = re.compile(r"/device:(TPU|GPU):\d+")
"""Planes of devices; a TPU's SparseCores have planes
of their own, `/device:TPU:0 SparseCore 0`, which are left out."""
_GPU_LANE, _TPU_LANE, _TPU_FLIGHTS, _TPU_PROGRAMS = (
    "Stream",
    "XLA Ops",
    "Async XLA Ops",
    "XLA Modules",
)
_NANOSECOND = 1e-9


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation on a lane."""

    name: str
    start: float
    """Seconds from the beginning of the trace."""
    seconds: float

    communicates: bool
    """Whether it is a collective, or the wait for one."""
    instruction: str = ""
    """Instruction of the program that an event belongs to;
    empty where it belongs to none, or its name is it."""


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Seconds of one device in a trace."""

    device: str
    window: float
    """From the first operation to the end of the last."""
    compute: float
    """In which an operation computed."""
    communication: float
    """In which a collective ran, was in flight or was awaited."""
    exposed: float
    """In which a collective ran or was awaited, and nothing computed."""
    idle: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """Operations of a profile, by plane and lane."""

    devices: dict[str, list[list[Event]]]
    host: list[list[Event]]
    """Threads of the host that ran instructions of the program, as simulated devices do."""
    flights: dict[str, list[Interval]] = dataclasses.field(default_factory=dict)
    """Intervals in which asynchronous collectives of each device were in flight."""


def read_trace(folder: Path, module: Module) -> Trace:
    """Reads the newest profile below `folder`. module: the program that ran."""
    from jax.profiler import ProfileData

    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        return Trace({}, [])
    profile = ProfileData.from_file(str(files[-1]))  # its planes do not keep it alive
    with warnings.catch_warnings():
        # Made at its first use, the type of stats has no module;
        # where warnings are errors the process would abort.
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        return trace_of(profile.planes, module)


def trace_of(planes: Iterable[Any], module: Module) -> Trace:
    """Returns the operations in the planes of a profile. module: the program that ran."""
    program = _Program(module)
    devices, host, flights = (
        dict[str, list[list[Event]]](),
        list[list[Event]](),
        dict[str, list[Interval]](),
    )
    for plane in planes:
        lines = list(plane.lines)
        if _DEVICE.fullmatch(plane.name):
            lanes = [program.kernels(line) for line in lines if line.name.startswith(_GPU_LANE)]
            in_flight: list[Interval] = []
            if not lanes:
                lanes = _tpu_lanes(lines, program)
                in_flight = _flights(lanes, lines, program)
            if any(lanes):
                devices[plane.name], flights[plane.name] = lanes, in_flight
        elif plane.name.startswith("/host:"):
            threads = (
                [event for event in program.operations(line) if event.name in program.known]
                for line in lines
            )
            host += filter(None, threads)
    return Trace(devices, host, flights)


def collective_names(module: Module) -> frozenset[str]:
    """Returns the names of the instructions that communicate, or wait for communication."""
    names = set[str]()
    for instruction in module:
        # A fusion that holds one piece of a collective computes meanwhile.
        if instruction.opcode != "fusion" and collective_in(instruction) is not None:
            names.add(instruction.name)
        elif is_done(instruction) or instruction.opcode.endswith("-update"):
            start = start_of(instruction)
            if start is not None and collective_in(start) is not None:
                names.add(instruction.name)
    return frozenset(names)


class _Program:
    def __init__(self, module: Module):
        # A trace adds a fingerprint or number to its own name: `jit_step(123)`, `jit_step.2`.
        self._name = re.compile(rf"{re.escape(module.name)}([.(].*)?")
        self.known = {instruction.name for instruction in module}
        self.collective = collective_names(module)
        ends = ((i.name, start_of(i)) for i in module if is_done(i) and i.name in self.collective)
        self.starts = {name: start.name for name, start in ends if start is not None}
        # XLA calls the kernel of `loop_add_fusion.3` on a GPU `loop_add_fusion_3`.
        self._instruction_of_kernel = {
            re.sub(r"[^0-9A-Za-z_]", "_", name): name for name in self.known
        }

    def runs(self, name: str) -> bool:
        """Whether a trace calls this program so; True where it tells none."""
        return not name or self._name.fullmatch(name) is not None

    def operations(self, line: Any) -> list[Event]:
        """Returns the events of a lane whose names are instructions."""
        # On TPUs an event's name is the whole instruction: `%all-gather-done.3 = bf16[...]
        # all-gather-done(...)`.
        named = ((event.name.partition(" = ")[0].lstrip("%"), event) for event in line.events)
        return [
            Event(name, *_start_and_seconds(event), name in self.collective)
            for name, event in named
        ]

    def kernels(self, line: Any) -> list[Event]:
        """Returns the kernels and copies of a stream, with the instructions that they belong to.

        A kernel inside a CUDA graph (a command buffer) has no `hlo_op` of its own;
        a fusion's has the fusion's name.
        """
        events = []
        for event in line.events:
            stats = dict(event.stats)
            hlo_op = str(stats.get("hlo_op", "")).lstrip("%")
            name = event.name
            instruction = (
                hlo_op if hlo_op in self.known else self._instruction_of_kernel.get(name, hlo_op)
            )
            if not self.runs(str(stats.get("hlo_module", ""))):
                name, instruction = f"{_FOREIGN}{name}", ""
            communicates = instruction in self.collective or bool(_NCCL.search(event.name))
            events.append(Event(name, *_start_and_seconds(event), communicates, instruction))
        return events


_FOREIGN = "another program: "


def _start_and_seconds(event: Any) -> tuple[float, float]:
    return event.start_ns * _NANOSECOND, event.duration_ns * _NANOSECOND


def _tpu_lanes(lines: Sequence[Any], program: _Program) -> list[list[Event]]:
    """Returns the lane of operations of a TPU;
    those while another program ran belong to no instruction."""
    programs = (event for line in lines if line.name == _TPU_PROGRAMS for event in line.events)
    others = union(
        (event.start_ns * _NANOSECOND, (event.start_ns + event.duration_ns) * _NANOSECOND)
        for event in programs
        if not program.runs(event.name)
    )

    def owned(event: Event) -> Event:
        """Renames an operation of another program, which keeps the device busy and has no
        instruction of this one."""
        middle = event.start + event.seconds / 2
        at = bisect.bisect_right(others, (middle, float("inf"))) - 1
        is_foreign = at >= 0 and middle < others[at][1]
        return (
            dataclasses.replace(event, name=f"{_FOREIGN}{event.name}", instruction="")
            if is_foreign
            else event
        )

    return [list(map(owned, program.operations(line))) for line in lines if line.name == _TPU_LANE]


def _flights(
    lanes: Sequence[Sequence[Event]], lines: Sequence[Any], program: _Program
) -> list[Interval]:
    """Returns the intervals in which collectives of a TPU were in flight.

    Each done ends the flight of the start before it on the lane of operations. What the trace's own
    lane of asynchronous operations tells is added: collectives that the SparseCores run have no
    wait on the other.
    """
    flights = []
    for lane in lanes:
        begun: dict[str, float] = {}
        for event in sorted(lane, key=lambda e: e.start):
            begun[event.name] = event.start
            start = begun.get(program.starts.get(event.name, ""))
            if start is not None:
                flights.append((start, event.start + event.seconds))
    asynchronous = [
        event for line in lines if line.name == _TPU_FLIGHTS for event in program.operations(line)
    ]
    return union(
        [*flights, *((e.start, e.start + e.seconds) for e in asynchronous if e.communicates)]
    )


def device_time(
    device: str, lanes: Iterable[Sequence[Event]], flights: Iterable[Interval] = ()
) -> DeviceTime:
    """Returns the seconds in which a device computes, communicates and waits.

    flights: intervals in which collectives are in flight besides those in which one is on a lane.
    """
    events = [event for lane in lanes for event in innermost(lane)]
    compute = union((e.start, e.start + e.seconds) for e in events if not e.communicates)
    communication = union((e.start, e.start + e.seconds) for e in events if e.communicates)
    busy = union([*compute, *communication])
    window = busy[-1][1] - busy[0][0] if busy else 0.0
    total, computing, in_flight = (
        sum(end - start for start, end in intervals)
        for intervals in (busy, compute, union([*communication, *flights]))
    )
    return DeviceTime(device, window, computing, in_flight, total - computing, window - total)


def innermost(lane: Sequence[Event]) -> list[Event]:
    """Returns the events of a lane that contain no other: a loop's event contains those
    of its body."""
    ordered = sorted(lane, key=lambda e: (e.start, -e.seconds))

    def contains(outer: Event, inner: Event) -> bool:
        rounding = 1e-10
        return (
            inner.start + inner.seconds <= outer.start + outer.seconds + rounding
            and inner.seconds < outer.seconds
        )

    return [
        event
        for i, event in enumerate(ordered)
        if i + 1 == len(ordered) or not contains(event, ordered[i + 1])
    ]
