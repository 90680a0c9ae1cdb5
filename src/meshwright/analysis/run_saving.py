"""Memory of saving and restoring a run: its compiled programs on a device, and copies in the memory of the hosts.

A save hashes every tensor (`checkpoint.fingerprints`), and brings the rows of uneven or interleaved pipelines into the
order of the layers (`checkpoint.layer_order`); a restore does both the other way round. These programs run between two
steps, beside the state. The copies that a save writes from are in the hosts' memory until they are committed.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.layer_order import abstract_in_layer_order, permuted_params, reordering
from meshwright.checkpoint.restore import named_tensors
from meshwright.sharding.params import layers_to_rows, rows_to_layers
from meshwright.step.device_run import DeviceRun


@dataclasses.dataclass(frozen=True)
class SavingMemory:
    """Bytes that saving and restoring take, by the compiled programs."""

    state: int
    """State on a device: parameters, optimizer state, step."""
    save: int
    """Most on a device during a save, with the state."""
    save_by: str
    """Program that takes it: `fingerprints`, or the tensor whose rows are reordered."""
    restore: int
    """Most on a device during a restore, with what has been restored."""
    restore_by: str
    host: int
    """Copies in the memory of the process that has most, until a save is committed."""
    reordered: int
    """Tensors whose rows are reordered."""


@dataclasses.dataclass(frozen=True)
class _Program:
    """Bytes that a compiled program takes besides its arguments."""

    temporary: int
    output: int


def saving_memory(device_run: DeviceRun) -> SavingMemory:
    """Compiles the programs of a save and of a restore for the run's devices, here or not, and adds up their memory."""
    tensors = named_tensors(device_run.abstract)
    params = permuted_params(tensors, device_run.params)
    stored = abstract_in_layer_order(tensors, device_run.params)
    sizes, stored_sizes = ({n: _shard_bytes(x) for n, x in group.items()} for group in (tensors, stored))
    state = sum(sizes.values())
    in_order = {name: x for name, x in tensors.items() if name not in params}
    saves = {"fingerprints": state + _total(_compiled(fingerprints, in_order))}
    restores = {"fingerprints": sum(stored_sizes.values()) + _total(_compiled(fingerprints, stored))}
    known: dict[Any, _Program] = {}

    def program(convert: Any, name: str) -> _Program:
        x, p = tensors[name], params[name]
        run = reordering(convert, p, x.shape, x.sharding, stored[name].sharding)
        key = (run, x.dtype)
        if key not in known:
            known[key] = _compiled(run, x if convert is rows_to_layers else stored[name])
        return known[key]

    rest = sum(stored_sizes.values())
    for name in tensors:
        # A restore converts one tensor after another and keeps none of those that it has converted.
        if name in params:
            hashed = _compiled(fingerprints, {"": stored[name]}, known)
            there = program(rows_to_layers, name)
            saves[name] = state + there.output + max(there.temporary, _total(hashed))
            restores[name] = rest + _total(program(layers_to_rows, name))
        rest += sizes[name] - stored_sizes[name]
    by_save, by_restore = max(saves, key=saves.__getitem__), max(restores, key=restores.__getitem__)
    host = host_bytes(stored)
    return SavingMemory(state, saves[by_save], by_save, restores[by_restore], by_restore, host, len(params))


def host_bytes(stored: Mapping[str, Any]) -> int:
    """Returns the bytes of a save in the memory of the process that has most: every part of a tensor is copied by one.

    stored: tensors as a checkpoint has them, with shardings.
    """
    copied: dict[int, int] = {}
    for x in stored.values():
        size, seen = _shard_bytes(x), set()
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            part = tuple((s.start, s.stop) for s in index)
            copied[device.process_index] = copied.get(device.process_index, 0) + (part not in seen) * size
            seen.add(part)
    return max(copied.values(), default=0)


def _compiled(run: Any, argument: Any, known: dict[Any, _Program] | None = None) -> _Program:
    """Compiles a jitted function of one argument. known: programs of single tensors, by shape, type and sharding."""
    key = None
    if known is not None:
        x = argument[""]
        key = (x.shape, x.dtype, x.sharding)
        if key in known:
            return known[key]
    stats = run.lower(argument).compile().memory_analysis()
    program = _Program(int(stats.temp_size_in_bytes), int(stats.output_size_in_bytes))
    if known is not None:
        known[key] = program
    return program


def _total(program: _Program) -> int:
    return program.temporary + program.output


def _shard_bytes(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
