"""Slow devices of a traced step: by their own computation, since all devices end a
collective together.

device 4    | compute 3.0 | collective 3.0            | compute 1.0 |
device 5    | compute 4.0         | collective 2.0    | compute 1.0 |   a fourth longer: others wait
device 6    | compute 3.0 | collective 3.0            | compute 1.0 |
"""

import dataclasses
import statistics
from collections.abc import Sequence

from meshwright.bench.device_trace import Trace, device_time
from meshwright.formatting import format_step
from meshwright.step.device_run import DeviceRun

FACTOR = 1.2
"""Computation of a device over the median of all, above which it is slow."""
FEWEST = 3
"""Devices of which a median tells the usual one."""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Computation of one device."""

    device: str
    """As a person finds it: `GPU:3 of process 0 (node7)`."""
    seconds: float
    """In one step, in which an operation other than a collective ran."""


def devices_have_equal_work(device_run: DeviceRun) -> bool:
    """Returns whether devices can be compared: stages compute different layers."""
    return device_run.layout.shape.stage == 1


def computations(trace: Trace, *, steps: int, process: int, host: str) -> list[Computation]:
    """Returns the computation of each device in the trace of one process;
    none of simulated devices."""
    found = []
    for plane, lanes in trace.devices.items():
        name = plane.removeprefix("/device:")
        seconds = device_time(plane, lanes).compute / steps
        found.append(Computation(f"{name} of process {process} ({host})", seconds))
    return found


def name_slow_devices(devices: Sequence[Computation]) -> list[str]:
    """Returns a sentence for each device that computes longer than most.
    devices: of all processes."""
    if len(devices) < FEWEST:
        return []
    median = statistics.median(device.seconds for device in devices)
    slow = [device for device in devices if median and device.seconds > FACTOR * median]
    slow.sort(key=lambda device: -device.seconds)
    return [
        f"{device.device} computes {format_step(device.seconds)} of a step besides collectives, "
        f"{device.seconds / median:.2f} times the median of {len(devices)} devices: the others "
        "wait for it, which is slow (clock, heat) or has more to do (tokens of its experts)"
        for device in slow
    ]
