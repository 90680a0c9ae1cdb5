"""Seconds of a traced step by kind of work, and what explains where they differ from a plan."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from meshwright.bench.device_trace import DeviceTime, Event, Trace, device_time, innermost
from meshwright.formatting import format_step
from meshwright.hardware.chips import CHIPS
from meshwright.models.layer_facts import LayerSpec
from meshwright.planner.step_kinds import (
    ATTENTION_MATMULS,
    ELEMENTS,
    EXPOSED,
    FEED_FORWARD_MATMULS,
    IDLE,
    KERNEL,
    KINDS,
    MATMUL_KINDS,
    OTHER_MATMULS,
    WAITING,
    MeasuredStep,
)
from xlacensus.hlo.collectives import collective_in
from xlacensus.hlo.flops import least_flops
from xlacensus.hlo.parser import Instruction, Module
from xlacensus.schedule import CostModel

_LARGEST = 2
"""Differences that are explained."""


_AS_MEASURED = 0.995
"""Factor from which kinds count as they were measured: it prints as 1.00."""

Operations = dict[str, dict[str, float]]
"""Seconds of each operation in a step of one device, by kind and name."""


@dataclasses.dataclass(frozen=True)
class KindsOfTrace:
    """A traced step by kind, and the operations of each kind."""

    step: MeasuredStep
    longest: Mapping[str, Sequence[tuple[str, float]]]
    """The longest operations of each kind, with the seconds of each in a step of one device. Those
    of a kind add up to its seconds."""
    slowest: str
    """The device that computes longest, and how much longer than the median;
    empty where devices have no lanes."""
    notes: tuple[str, ...] = ()
    """What was scaled, and what the trace has nothing of."""


def kinds_of_trace(
    trace: Trace,
    module: Module,
    layers: Iterable[LayerSpec],
    labels: Mapping[str, str],
    *,
    devices: int,
    local_devices: int,
    steps: int,
    seconds: float,
) -> KindsOfTrace:
    """Returns the seconds of a traced step by kind.

    Where devices have lanes, operations that compute take together the time in which something
    computes, and collectives that in which only they run: each kind has its part of the sum of its
    operations.

        compute:  |== up ==|  |== out ==|           two operations at once share their time
                     |= down =|
        exposed:                         |== all-reduce ==|

    Collectives take as long as the device takes that reaches each of them last; what the others
    spend above that is waiting. Threads of simulated devices share cores: where they have more
    seconds than a step, they are scaled to it.

    layers: of the model, whose scopes tell the halves.
    labels: kind and axes of collectives by instruction.
    devices: of the mesh.
    local_devices: of them those of this process, of which the trace is.
    steps: in the trace.
    seconds: wall time of all steps.
    """
    devices_of_trace = len(trace.devices) or local_devices
    share = 1.0 / (devices_of_trace * steps)
    kinds = kinds_of_instructions(module, layers)
    operations, notes = _operations(trace, kinds, labels, devices_of_trace, share)
    step = seconds / steps
    busy = _total(operations)
    if busy > step:
        notes += _note_of_step(busy, step)
        operations = _scaled(operations, step)
    devices_elsewhere = devices - local_devices
    if devices_elsewhere:
        notes.append(
            f"waits for the {devices_elsewhere} devices of other processes count as exposed "
            "communication"
        )
    sums = {kind: sum(operations[kind].values()) for kind in KINDS}
    sums[IDLE] = step - min(busy, step)
    flops: dict[str, float] = {str(rate): n for rate, n in least_flops(module).items()}
    return KindsOfTrace(
        step=MeasuredStep(
            sums, devices_of_trace * steps, KERNEL in kinds.values(), flops, devices_elsewhere
        ),
        longest={kind: _longest_first(found) for kind, found in operations.items()},
        slowest=_slowest([(time.device, time.compute) for time in _device_times(trace)]),
        notes=tuple(notes),
    )


def _operations(
    trace: Trace,
    kinds: Mapping[str, str],
    labels: Mapping[str, str],
    devices: int,
    share: float,
) -> tuple[Operations, list[str]]:
    """Returns the seconds of the operations of a device and step, scaled where devices have lanes
    to the time in which something computes or only collectives run; and notes of what was scaled.

    devices: of the trace.
    share: of one device and step in all seconds of the trace.
    """
    lanes = [lane for device in trace.devices.values() for lane in device] or trace.host
    events = [event for lane in lanes for event in innermost(lane)]
    computation = _computation(events, kinds, share)
    communication = _communication(events, labels, devices, share)
    notes: list[str] = []
    times = _device_times(trace)
    if times:
        compute = sum(time.compute for time in times) * share
        exposed = sum(time.exposed for time in times) * share
        notes += _note_of_streams(computation, compute)
        computation = _scaled(computation, compute)
        communication = _scaled(communication, exposed)
    return computation | communication, notes


def _device_times(trace: Trace) -> list[DeviceTime]:
    """Returns the time of each device that has lanes."""
    return [
        device_time(name, lanes, trace.flights.get(name, ()))
        for name, lanes in trace.devices.items()
    ]


def _longest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns operations with their seconds, the longest first."""
    return sorted(seconds.items(), key=lambda item: -item[1])


def _total(operations: Operations) -> float:
    """Returns the seconds of all operations together."""
    return sum(sum(found.values()) for found in operations.values())


def _scaled(operations: Operations, seconds: float) -> Operations:
    """Returns the operations with the seconds of each multiplied by one factor,
    so that they add up to `seconds`."""
    total = _total(operations)
    if not total:
        return operations
    factor = seconds / total
    return {
        kind: {name: value * factor for name, value in found.items()}
        for kind, found in operations.items()
    }


def _note_of_streams(computation: Operations, compute: float) -> list[str]:
    """Returns how much less than the sum of its operations a device computes;
    empty where they are equal."""
    total = _total(computation)
    if not total or compute / total >= _AS_MEASURED:
        return []
    return [
        f"operations that compute at once share their time: each counts {compute / total:.2f} of "
        "its seconds"
    ]


def _note_of_step(busy: float, step: float) -> list[str]:
    """Returns by how much kinds are scaled to a step; empty where it is nothing."""
    if step / busy >= _AS_MEASURED:
        return []
    return [
        f"operations take {format_step(busy)} of a device in a step of {format_step(step)}: each "
        f"counts {step / busy:.2f} of its seconds"
    ]


def _computation(events: Iterable[Event], kinds: Mapping[str, str], share: float) -> Operations:
    """Returns the seconds of each operation that computes, by kind, in a step of one device.

    kinds: of the instructions.  share: of one step of one device in the trace.
    """
    operations: Operations = {kind: collections.defaultdict(float) for kind in KINDS}
    for event in events:
        if not event.communicates:
            name = event.instruction or event.name
            operations[kinds.get(name, ELEMENTS)][name] += event.seconds * share
    return operations


def _communication(
    events: Iterable[Event], labels: Mapping[str, str], devices: int, share: float
) -> Operations:
    """Returns the seconds of each collective in a step of one device, waiting and exposed,
    by its label."""
    times_of = collections.defaultdict[str, list[float]](list)
    for event in events:
        if event.communicates:
            times_of[event.instruction or event.name].append(event.seconds)
    waiting = collections.defaultdict[str, float](float)
    exposed = collections.defaultdict[str, float](float)
    for name, times in times_of.items():
        waits = _waiting(times, devices) * share
        label = labels.get(name, name)
        waiting[label] += waits
        exposed[label] += sum(times) * share - waits
    return {WAITING: waiting, EXPOSED: exposed}


def kinds_of_instructions(module: Module, layers: Iterable[LayerSpec]) -> dict[str, str]:
    """Returns the kind of every instruction that computes.
    layers: of the model, whose scopes tell the halves."""
    halves: dict[str, str] = {}
    for layer in layers:
        halves[layer.attention_scope] = ATTENTION_MATMULS
        halves[layer.feed_forward_scope] = FEED_FORWARD_MATMULS
    model = CostModel(_ANY_CHIP, _ANY_CHIP.efficiency)
    return {
        instruction.name: _kind_of(instruction, model, halves)
        for instruction in module
        if collective_in(instruction) is None
    }


_ANY_CHIP = CHIPS["h100"]
"""Chip of the cost model: an instruction has the same kind on all."""


def _kind_of(instruction: Instruction, model: CostModel, halves: Mapping[str, str]) -> str:
    kind = model.cost_of(instruction).kind
    if kind == "attention":
        return KERNEL
    if kind != "matmul":
        return ELEMENTS
    found = [halves[scope] for scope in instruction.scopes if scope in halves]
    return found[-1] if found else OTHER_MATMULS


def _waiting(times: Sequence[float], devices: int) -> float:
    """Returns the seconds that the executions of a collective take above those
    of the last device to reach it.

    Of so many executions one in `devices` is the last to arrive: the shortest are taken for those.
    """
    last = sorted(times)[: max(1, len(times) // devices)]
    return sum(times) - statistics.fmean(last) * len(times)


def _slowest(compute: Sequence[tuple[str, float]]) -> str:
    if len(compute) < 2:
        return ""
    name, seconds = max(compute, key=lambda item: item[1])
    median = statistics.median(value for _, value in compute)
    return f"{name} computes {seconds / median - 1:.0%} longer than the median device"


def explain_differences(found: KindsOfTrace, planned: Mapping[str, float]) -> list[str]:
    """Returns a sentence for each of the largest differences between a trace
    and a plan: what it is, and of what."""
    measured = found.step.seconds
    ordered = sorted(KINDS, key=lambda kind: -abs(measured.get(kind, 0.0) - planned.get(kind, 0.0)))
    return [
        _explain(kind, measured.get(kind, 0.0), planned.get(kind, 0.0), found)
        for kind in ordered[:_LARGEST]
        if measured.get(kind, 0.0) != planned.get(kind, 0.0)
    ]


def _explain(kind: str, measured: float, planned: float, found: KindsOfTrace) -> str:
    difference = measured - planned
    sign = "more" if difference > 0 else "less"
    text = (
        f"{kind}: {format_step(measured)} measured, {format_step(planned)} planned, "
        f"{format_step(abs(difference))} {sign}"
    )
    longest = [f"{name} {format_step(seconds)}" for name, seconds in found.longest[kind][:3]]
    if kind == IDLE:
        return f"{text}: the host; no operation runs on the device (launches, input, checkpoints)"
    if kind == WAITING:
        cause = "a straggler: devices do not reach their collectives together"
        return "; ".join([f"{text}: {cause}", *filter(None, [found.slowest]), *longest])
    if kind == EXPOSED:
        return "; ".join([f"{text}: collectives by axis", *longest])
    cause = "kernels" if kind in (*MATMUL_KINDS, KERNEL) else "kernels that move memory"
    return "; ".join([f"{text}: {cause}, the longest", *longest])
