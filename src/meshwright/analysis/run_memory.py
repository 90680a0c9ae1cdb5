"""Memory of each phase of a training, by the compiled programs.

A save hashes every tensor (`checkpoint.fingerprints`), and brings the rows of uneven or interleaved
pipelines into the order of the layers (`checkpoint.layer_order`); a restore does both the other way
round. These programs run between two steps, while the state is in memory. The copies that a save
writes from are in the hosts' memory until they are committed.
"""

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.activity import Activity, activity
from meshwright.analysis.programs import Census
from meshwright.checkpoint.checkpoints import named_tensors
from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.layer_order import abstract_in_layer_order, permuted_params, reordering
from meshwright.planner.memory_model import PHASES
from meshwright.sharding.initial_values import init_program
from meshwright.sharding.params import layers_to_rows, rows_to_layers, trained_only
from meshwright.sharding.placed_params import shardings
from meshwright.step.device_memory import shard_bytes
from meshwright.step.device_run import DeviceRun
from meshwright.step.eval_step import build_eval_step
from xlacensus.peak_memory import CompiledMemory


def compiled_phases(device_run: DeviceRun, census: Census) -> dict[str, int]:
    """Compiles what each phase of a training runs, for devices here or not;
    returns the most bytes of a device in each.

    census: of the train step.
    """
    abstract = device_run.abstract
    with _announced("what a start runs, for its memory"):
        start = _start(device_run)
    with _announced("an evaluation, for its memory"):
        run = build_eval_step(device_run)
        evaluation = _compiled(run, abstract.params, device_run.abstract_batch)
    with _announced("what a save and a resume run, for their memory"):
        save, resume = _saving(device_run)

    def most(memory: CompiledMemory) -> int:
        # Of simulated devices the reported live bytes leave out the temporaries.
        return memory.peak if device_run.machine.simulated else memory.live

    step, evaluate = (
        most(census.memory.compiled),
        most(evaluation) + shard_bytes(abstract.optimizer),
    )
    return dict(zip(PHASES, (start, step, evaluate, save, resume), strict=True))


def _announced(what: str) -> AbstractContextManager[Activity]:
    return activity("compile", f"compiling {what}", f"compiled {what}")


def _compiled(run: Any, *arguments: Any) -> CompiledMemory:
    return CompiledMemory.of(run.lower(*arguments).compile())


def _start(device_run: DeviceRun) -> int:
    """Most bytes of a device while parameters are drawn, or the optimizer's state is made."""
    described, params, where = (
        device_run.layout.params,
        device_run.abstract.params,
        device_run.abstract.shardings,
    )
    training, drawn = device_run.run.training, shard_bytes(params)
    if all(
        x.dtype not in (jnp.int8, jnp.uint8) for x in jax.tree.leaves(params)
    ):  # others are read
        with jax.threefry_partitionable(True):
            drawn = _compiled(
                *init_program(
                    described, where.params, seed=training.seed, dtype=training.param_dtype
                )
            ).peak
    split = trained_only(
        described, shardings(device_run.mesh, device_run.layout.placements, "optimizer")
    )
    trained = trained_only(described, params)
    given = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), trained, split)
    made = _compiled(jax.jit(device_run.optimizer.init, out_shardings=where.optimizer), given).added
    # Parameters that the optimizer splits further are copied for it.
    copies = [
        x
        for x, old in zip(*map(jax.tree.leaves, (given, trained)), strict=True)
        if x.sharding != old.sharding
    ]
    return max(drawn, shard_bytes(params) + shard_bytes(copies) + made)


def _saving(device_run: DeviceRun) -> tuple[int, int]:
    """Most bytes of a device in a save and in a resume."""
    tensors = named_tensors(device_run.abstract)
    params = permuted_params(tensors, device_run.layout.params)
    stored = abstract_in_layer_order(tensors, device_run.layout.params)
    state, rest = shard_bytes(tensors), shard_bytes(stored)
    in_order = {name: x for name, x in tensors.items() if name not in params}
    save, resume = (
        state + _compiled(fingerprints, in_order).added,
        rest + _compiled(fingerprints, stored).added,
    )
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
            save = max(
                save,
                state
                + saved.results
                + max(saved.temporary, once(fingerprints, kept, {"": kept}).added),
            )
            resume = max(resume, rest + once(reordering(layers_to_rows, *shape), kept, kept).added)
        rest += shard_bytes(x) - shard_bytes(stored[name])
    return save, resume
