"""Trace of JAX's profiler read back: how long each device computed, communicated, and waited.

The operations of a device lie on lanes of its plane in the trace (xplane): one lane of operations on a TPU, a lane for
each stream on a GPU. Communication is exposed while no lane of the device computes. On a TPU's single lane of
operations every collective is exposed by construction: an asynchronous one appears there as its start and as the time
that its done waits. Which operations are collectives is read from the compiled program, whose instructions have the
names of the events; a GPU's events are kernels, of which NCCL's have its name.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from meshwright.hlo.async_pairs import is_fused_done, start_of
from meshwright.hlo.collectives import is_collective
from meshwright.hlo.parser import Instruction, Module

Interval = tuple[float, float]
"""Start and end, in seconds."""

_NCCL = re.compile(r"nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|all[-_]?to[-_]?all", re.IGNORECASE)
"""Names of kernels that communicate: those of NCCL, and of XLA's own collectives inside a node."""
_DEVICE = re.compile(r"/device:(TPU|GPU):\d+")
_GPU_LANE, _TPU_LANE = "Stream", "XLA Ops"
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


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Seconds of one device in a trace."""

    device: str
    window: float
    """From the first operation to the end of the last."""
    compute: float
    """In which an operation computed."""
    communication: float
    """In which a collective ran or was awaited."""
    exposed: float
    """In which a collective ran or was awaited, and nothing computed."""
    idle: float
    """In which nothing ran."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Operations of a profile, by plane and lane."""

    devices: dict[str, list[list[Event]]]
    """Lanes of each device."""
    host: list[list[Event]]
    """Threads of the host that ran instructions of the program, as simulated devices do."""


def read_trace(folder: Path, module: Module) -> Trace:
    """Reads the newest profile below `folder`. module: the program that ran."""
    from jax.profiler import ProfileData

    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    planes = list(ProfileData.from_file(str(files[-1])).planes) if files else []
    collective = collective_names(module)
    known = frozenset(name for c in module.computations.values() for name in c.instructions)
    devices, host = dict[str, list[list[Event]]](), list[list[Event]]()
    for plane in planes:
        lines = list(plane.lines)
        if _DEVICE.match(plane.name):
            devices[plane.name] = [_events(line, collective) for line in _lanes_of_operations(lines)]
        elif plane.name.startswith("/host:"):
            threads = [[event for event in _events(line, collective) if event.name in known] for line in lines]
            host += [thread for thread in threads if thread]
    return Trace({name: lanes for name, lanes in devices.items() if any(lanes)}, host)


def collective_names(module: Module) -> frozenset[str]:
    """Returns the names of the instructions that communicate, or wait for communication."""
    names = set[str]()
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            # A fusion that holds one piece of a collective computes meanwhile.
            if instruction.opcode != "fusion" and _communicates(module, instruction):
                names.add(instruction.name)
            elif instruction.opcode.endswith(("-done", "-update")) or is_fused_done(instruction):
                start = computation.instructions.get(start_of(computation, instruction))
                if start is not None and _communicates(module, start):
                    names.add(instruction.name)
    return frozenset(names)


def _communicates(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction is a collective, or has one inside its fusion or asynchronous computation."""
    if is_collective(instruction):
        return True
    if instruction.opcode in ("fusion", "custom-call") or instruction.opcode.endswith("-start"):
        called = (module.computations[name] for name in instruction.called if name in module.computations)
        return any(is_collective(inner) for body in called for inner in body.instructions.values())
    return False


def _lanes_of_operations(lines: Sequence[Any]) -> list[Any]:
    """Returns the lanes on which a device's operations run, of those that the profiler derives from them."""
    streams = [line for line in lines if line.name.startswith(_GPU_LANE)]
    return streams or [line for line in lines if line.name == _TPU_LANE]


def _events(line: Any, collective: frozenset[str]) -> list[Event]:
    events = []
    kernels = line.name.startswith(_GPU_LANE)
    for event in line.events:
        # On TPUs an event's name is the whole instruction: `%all-gather-done.3 = bf16[...] all-gather-done(...)`.
        name = event.name.partition(" = ")[0].lstrip("%")
        communicates = name in collective or (kernels and bool(_NCCL.search(name)))
        events.append(Event(name, event.start_ns * _NANOSECOND, event.duration_ns * _NANOSECOND, communicates))
    return events


def device_time(device: str, lanes: Iterable[Sequence[Event]]) -> DeviceTime:
    """Returns the seconds in which a device computes, communicates and waits."""
    events = [event for lane in lanes for event in innermost(lane)]
    compute = union((e.start, e.start + e.seconds) for e in events if not e.communicates)
    communication = union((e.start, e.start + e.seconds) for e in events if e.communicates)
    busy = union([*compute, *communication])
    window = busy[-1][1] - busy[0][0] if busy else 0.0
    total, computing = length(busy), length(compute)
    return DeviceTime(device, window, computing, length(communication), total - computing, window - total)


def innermost(lane: Sequence[Event]) -> list[Event]:
    """Returns the events of a lane that contain no other: a loop's event contains those of its body."""
    ordered = sorted(lane, key=lambda e: (e.start, -e.seconds))
    return [
        event
        for i, event in enumerate(ordered)
        if i + 1 == len(ordered) or not _contains(event, ordered[i + 1])
    ]  # fmt: skip


def _contains(outer: Event, inner: Event) -> bool:
    rounding = 1e-10
    return inner.start + inner.seconds <= outer.start + outer.seconds + rounding and inner.seconds < outer.seconds


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same set of moments as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Returns the seconds of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
