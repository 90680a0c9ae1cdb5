"""Section `checkpoint`: bandwidth of saving and restoring the state of a sized run."""

import functools
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.bench.hardware.section import Section
from meshwright.bench.hardware.sizing import run_names, sized_run
from meshwright.bench.hardware.steps import describe_run
from meshwright.checkpoint.checkpoints import Checkpoints, check_room
from meshwright.hardware.mesh import build_mesh
from meshwright.step.device_run import place_on_devices


def measure_checkpoint(section: Section) -> None:
    """Saves and restores the smallest of the sized runs; a restore verifies every tensor."""
    name = run_names()[0]
    section.measure({name: functools.partial(_save_and_restore, name, section.folder, section.seconds)})


def _save_and_restore(name: str, folder: Path, seconds: float) -> Mapping[str, Any]:
    """Returns bytes, seconds and bandwidths. Raises CheckpointError: a full disk, a tensor that differs."""
    sized = sized_run(name, folder, seconds)
    assert sized.run.mesh is not None
    device_run = place_on_devices(sized.run, build_mesh(sized.run.mesh))
    out = folder / "checkpoint-bench"
    shutil.rmtree(out, ignore_errors=True)
    check_room(out, device_run, 1)
    state = jax.block_until_ready(device_run.initial_state())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.optimizer)))
    try:
        with Checkpoints(out, max_to_keep=1) as checkpoints:
            began = time.perf_counter()
            checkpoints.save(state, device_run, step=1, cursor=0)  # also compiles the fingerprints
            checkpoints.wait()
            first, began = time.perf_counter() - began, time.perf_counter()
            checkpoints.save(state, device_run, step=2, cursor=0)
            blocked = time.perf_counter() - began
            checkpoints.wait()
            saved = time.perf_counter() - began
            del state
            began = time.perf_counter()
            jax.block_until_ready(checkpoints.restore(device_run)[0].params)
            restored = time.perf_counter() - began
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return {
        **describe_run(sized, device_run),
        "bytes": size,
        "blocked_seconds": blocked,
        "save_seconds": saved,
        "first_save_seconds": first,
        "restore_seconds": restored,
        "save_bandwidth": size / saved,
        "restore_bandwidth": size / restored,
    }
