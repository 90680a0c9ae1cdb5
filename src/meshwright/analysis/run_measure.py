"""Measured memory of a few real train steps, beside the census's prediction."""

import dataclasses
import gc
from pathlib import Path

import jax
import numpy as np

from meshwright.analysis.census import Census
from meshwright.analysis.memory import LiveMemory, live_memory
from meshwright.analysis.run_census import abstract_batch
from meshwright.data.batch import Batch
from meshwright.models.model import vocab_size
from meshwright.step.device_run import DeviceRun
from meshwright.step.train_step import build_train_step


@dataclasses.dataclass(frozen=True)
class MeasuredMemory:
    """Memory of a few real steps and the census's peak."""

    steps: int
    live: LiveMemory
    """Live arrays between steps."""
    predicted_peak: int
    """Peak bytes by the census, of all devices of this process together."""
    resident_growth: int | None
    """Growth of the process's resident memory, from before the state exists to its peak; None without /proc."""


def measure_steps(device_run: DeviceRun, census: Census, *, steps: int, profile: Path | None = None) -> MeasuredMemory:
    """Runs `steps` steps on random tokens and measures memory between them.

    profile: file for JAX's device memory profile, which `pprof` reads.
    """
    step = build_train_step(device_run).lower(device_run.abstract, abstract_batch(device_run)).compile()
    gc.collect()
    before = _resident_bytes()
    state, batch = device_run.initial_state(), _random_batch(device_run)
    for _ in range(steps):
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
    after = _peak_resident_bytes()
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


def _resident_bytes() -> int | None:
    """Returns the process's resident memory and resets its high-water mark; None without /proc."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_bytes("VmRSS:")


def _peak_resident_bytes() -> int | None:
    """Returns the high-water mark of resident memory since the last `_resident_bytes`; None without /proc."""
    return _status_bytes("VmHWM:")


def _status_bytes(field: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
