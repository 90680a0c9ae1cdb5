"""Memory of a run: measured over a few real steps, and that of saving and restoring it, by the compiled programs.

A save hashes every tensor (`checkpoint.fingerprints`), and brings the rows of uneven or interleaved pipelines into the
order of the layers (`checkpoint.layer_order`); a restore does both the other way round. These programs run between two
steps, while the state is in memory. The copies that a save writes from are in the hosts' memory until they are
committed.
"""

import dataclasses
import gc
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.analysis.census import Census
from meshwright.analysis.memory import LiveMemory, live_memory
from meshwright.checkpoint.checkpoints import named_tensors
from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.layer_order import abstract_in_layer_order, permuted_params, reordering
from meshwright.data.batch import Batch
from meshwright.models.model import vocab_size
from meshwright.sharding.params import layers_to_rows, rows_to_layers
from meshwright.step.device_run import DeviceRun
from meshwright.step.train_step import build_train_step


@dataclasses.dataclass(frozen=True)
class MeasuredMemory:
    """Memory of a few real steps and the census's peak."""

    steps: int
    live: LiveMemory
    predicted_peak: int
    """Peak bytes by the census, of all devices of this process together."""
    resident_growth: int | None
    """Growth of the process's resident memory, from before the state exists to its peak; None without /proc."""


def measure_steps(device_run: DeviceRun, census: Census, *, steps: int, profile: Path | None = None) -> MeasuredMemory:
    """Runs `steps` steps on random tokens and measures memory between them.

    profile: file for JAX's device memory profile, which `pprof` reads.
    """
    step = build_train_step(device_run).lower(device_run.abstract, device_run.abstract_batch).compile()
    gc.collect()
    before = _status_bytes("VmRSS:")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    except OSError:
        before = None
    state, batch = device_run.initial_state(), _random_batch(device_run)
    for _ in range(steps):
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
    after = _status_bytes("VmHWM:")  # the high-water mark since then
    live = live_memory(parameters=state.params, optimizer_state=state.optimizer, batch=batch)
    if profile is not None:
        jax.profiler.save_device_memory_profile(str(profile))
    predicted = census.memory.compiled.peak * len(jax.local_devices()[: device_run.mesh.size])
    return MeasuredMemory(steps, live, predicted, None if before is None or after is None else after - before)


def _random_batch(device_run: DeviceRun) -> Batch:
    training = device_run.run.training
    shape = (training.batch, training.seq)
    tokens = np.random.default_rng(0).integers(0, vocab_size(device_run.run.model), shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    batch = Batch(tokens, tokens, np.zeros(shape, np.int32), positions, np.ones(shape, np.float32))
    return jax.device_put(batch, device_run.batch_sharding)


def _status_bytes(field: str) -> int | None:
    """Returns a figure of the process's memory; None without /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


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


@dataclasses.dataclass(frozen=True)
class _Program:
    temporary: int
    output: int

    @property
    def total(self) -> int:
        return self.temporary + self.output


def saving_memory(device_run: DeviceRun) -> SavingMemory:
    """Compiles the programs of a save and of a restore for the run's devices, here or not, and adds up their memory."""
    tensors = named_tensors(device_run.abstract)
    params = permuted_params(tensors, device_run.params)
    stored = abstract_in_layer_order(tensors, device_run.params)
    sizes, stored_sizes = ({n: _shard_bytes(x) for n, x in group.items()} for group in (tensors, stored))
    state, rest = sum(sizes.values()), sum(stored_sizes.values())
    in_order = {name: x for name, x in tensors.items() if name not in params}
    saves = {"fingerprints": state + _compiled(fingerprints, in_order).total}
    restores = {"fingerprints": rest + _compiled(fingerprints, stored).total}
    known: dict[Any, _Program] = {}

    def once(run: Any, x: Any, argument: Any) -> _Program:
        """Compiles programs of tensors that differ only in their names once."""
        key = (run, x.shape, x.dtype, x.sharding)
        if key not in known:
            known[key] = _compiled(run, argument)
        return known[key]

    for name, x in tensors.items():
        # A restore converts one tensor after another and keeps none of those that it has converted.
        if name in params:
            kept, shape = stored[name], (params[name], x.shape, x.sharding, stored[name].sharding)
            saved = once(reordering(rows_to_layers, *shape), x, x)
            saves[name] = state + saved.output + max(saved.temporary, once(fingerprints, kept, {"": kept}).total)
            restores[name] = rest + once(reordering(layers_to_rows, *shape), kept, kept).total
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


def _compiled(run: Any, argument: Any) -> _Program:
    stats = run.lower(argument).compile().memory_analysis()
    return _Program(int(stats.temp_size_in_bytes), int(stats.output_size_in_bytes))


def _shard_bytes(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
