"""Memory of a run: measured over a few real steps, and that of saving and restoring it, by the compiled programs.

A save hashes every tensor (`checkpoint.fingerprints`), and brings the rows of uneven or interleaved pipelines into the
order of the layers (`checkpoint.layer_order`); a restore does both the other way round. These programs run between two
steps, while the state is in memory. The copies that a save writes from are in the hosts' memory until they are
committed.
"""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.analysis.census import Census
from meshwright.analysis.memory import CompiledMemory, LiveMemory, live_memory
from meshwright.checkpoint.checkpoints import named_tensors
from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.layer_order import abstract_in_layer_order, permuted_params, reordering
from meshwright.data.batch import Batch
from meshwright.models.model import vocab_size
from meshwright.planner.memory_model import PHASES
from meshwright.sharding.params import init_program, layers_to_rows, rows_to_layers, shardings, trained_only
from meshwright.step.device_memory import shard_bytes
from meshwright.step.device_run import DeviceRun
from meshwright.step.train_step import build_eval_step, build_train_step


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


def compiled_phases(device_run: DeviceRun, census: Census) -> dict[str, int]:
    """Compiles what each phase of a training runs, for devices here or not; returns the most bytes of a device in each.

    census: of the train step.
    """
    abstract, save_and_resume = device_run.abstract, _saving(device_run)
    evaluation = _compiled(build_eval_step(device_run), abstract.params, device_run.abstract_batch)

    def most(memory: CompiledMemory) -> int:
        # Of simulated devices the reported live bytes leave out the temporaries.
        return memory.peak if device_run.settled.machine.simulated else memory.live

    step, evaluate = most(census.memory.compiled), most(evaluation) + shard_bytes(abstract.optimizer)
    return dict(zip(PHASES, (_start(device_run), step, evaluate, *save_and_resume), strict=True))


def _compiled(run: Any, *arguments: Any) -> CompiledMemory:
    return CompiledMemory.of(run.lower(*arguments).compile())


def _start(device_run: DeviceRun) -> int:
    """Most bytes of a device while parameters are drawn, or the optimizer's state is made."""
    described, params, where = device_run.params, device_run.abstract.params, device_run.state_shardings
    training, drawn = device_run.run.training, shard_bytes(params)
    if all(x.dtype not in (jnp.int8, jnp.uint8) for x in jax.tree.leaves(params)):  # others are read
        with jax.threefry_partitionable(True):
            drawn = _compiled(
                *init_program(described, where.params, seed=training.seed, dtype=training.param_dtype)
            ).peak
    split = trained_only(described, shardings(device_run.mesh, device_run.placements, "optimizer"))
    trained = trained_only(described, params)
    given = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), trained, split)
    made = _compiled(jax.jit(device_run.optimizer.init, out_shardings=where.optimizer), given).added
    # Parameters that the optimizer splits further are copied for it.
    copies = [x for x, old in zip(*map(jax.tree.leaves, (given, trained)), strict=True) if x.sharding != old.sharding]
    return max(drawn, shard_bytes(params) + shard_bytes(copies) + made)


def _saving(device_run: DeviceRun) -> tuple[int, int]:
    """Most bytes of a device in a save and in a resume."""
    tensors = named_tensors(device_run.abstract)
    params = permuted_params(tensors, device_run.params)
    stored = abstract_in_layer_order(tensors, device_run.params)
    state, rest = shard_bytes(tensors), shard_bytes(stored)
    in_order = {name: x for name, x in tensors.items() if name not in params}
    save, resume = state + _compiled(fingerprints, in_order).added, rest + _compiled(fingerprints, stored).added
    known: dict[Any, CompiledMemory] = {}

    def once(run: Any, x: Any, argument: Any) -> CompiledMemory:
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
            save = max(save, state + saved.results + max(saved.temporary, once(fingerprints, kept, {"": kept}).added))
            resume = max(resume, rest + once(reordering(layers_to_rows, *shape), kept, kept).added)
        rest += shard_bytes(x) - shard_bytes(stored[name])
    return save, resume
