"""Check, before it runs, that a compiled step fits the memory of its devices."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from meshwright.errors import TrainingError
from meshwright.formatting import format_bytes


@dataclasses.dataclass(frozen=True)
class Room:
    """Memory of one kind of place."""

    bytes: int
    where: str
    """What has it, as an error names it."""


class OutOfDeviceMemory(TrainingError):
    """Step that needs more memory than there is."""

    def __init__(self, asked: str, needed: int | None, available: Room | None, fix: str):
        self.needed = needed
        self.available = available
        truth = "a device ran out of memory"
        if needed is not None and available is not None:
            missing = format_bytes(needed - available.bytes)
            truth = (
                f"it needs {format_bytes(needed)}, and {available.where} has "
                f"{format_bytes(available.bytes)}: {missing} too much"
            )
        super().__init__(asked, truth, fix)


def shard_bytes(tree: Any) -> int:
    """Returns the bytes of a tree's arrays on one device.

    tree: arrays or `ShapeDtypeStruct`s with shardings.
    """
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def check_memory(compiled: Any, devices: Sequence[Any], asked: str, resident: int = 0) -> None:
    """Raises OutOfDeviceMemory where a step and its arguments exceed the devices' memory.

    compiled: `jax.stages.Compiled`.  devices: those that it runs on.  asked: the request, for the
    error.  resident: bytes of a device that are in memory besides its arguments. TPU compilers
    refuse such a program themselves. Nothing is checked where the memory of a device is not known.
    """
    parts = _parts_of(compiled)
    if parts is not None:
        arguments, inside = parts
        _check(inside, arguments + resident, devices, asked, "less at a time: see meshwright prove")


def step_bytes(compiled: Any) -> int | None:
    """Returns the bytes of a device that a step takes, its arguments among them;
    None where its compiler does not say.

    compiled: `jax.stages.Compiled`.
    """
    parts = _parts_of(compiled)
    return None if parts is None else sum(parts)


def _parts_of(compiled: Any) -> tuple[int, int] | None:
    """Returns the bytes of a step's arguments on a device, and those that it takes besides."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    new_outputs = max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes)
    return stats.argument_size_in_bytes, stats.temp_size_in_bytes + new_outputs


def check_state(state: Any, devices: Sequence[Any], asked: str, fix: str) -> None:
    """Raises OutOfDeviceMemory where parameters and optimizer state exceed the devices' memory.

    state: arrays or `ShapeDtypeStruct`s with shardings.
    """
    _check(shard_bytes(state), 0, devices, asked, fix)


def _check(new: int, arguments: int, devices: Sequence[Any], asked: str, fix: str) -> None:
    """Raises OutOfDeviceMemory where a device lacks memory for `new` bytes.

    arguments: bytes that are allocated.
    """
    local = [d for d in devices if d.process_index == d.client.process_index()]
    if not local:
        return
    if local[0].platform == "cpu":
        # All its devices share the host's memory, in which the arguments are already.
        needed = new * len(local)
        available = _host_memory()
    else:
        needed = new + arguments
        available = _device_memory(local[0])
    if available is not None and needed > available.bytes:
        raise OutOfDeviceMemory(asked, needed, available, fix)


def _device_memory(device: Any) -> Room | None:
    """Returns the memory of an accelerator; None if it is not known."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return Room(limit, f"each {device.device_kind}") if limit else None


def _host_memory() -> Room | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as opened:
            fields = dict(line.split(":") for line in opened)
    except (OSError, ValueError):
        return None
    available = fields.get("MemAvailable", "").split()
    if not available:
        return None
    return Room(int(available[0]) * 1024, "this host, which simulates the devices,")
