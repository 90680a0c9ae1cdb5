"""Bad steps: what is kept of them, the samples that are left out, and how the run continues (`faults.Faults`)."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.documents import read_json, write_atomically
from meshwright.errors import CheckpointError, TrainingError
from meshwright.sharding.params import named_leaves
from meshwright.step.device_run import DeviceRun, State
from meshwright.trainer.meter import BadStep
from meshwright.trainer.prepare import Position, Trainable

_SKIPPED = "skipped.json"
"""File of an output folder with the samples that its run leaves out."""


def handle_bad_step(
    out: Path, prepared: Trainable, bad: BadStep, state: State, batch: Any, position: Position, count: int
) -> State | Position:
    """Keeps the evidence of a bad step. Returns the state to continue with, or the place to roll back to.

    state: after the step, which changed it where the step is finite.  position: before the step, by which the samples
    of its batch are known.  count: bad steps so far, this one included. Raises TrainingError where the run stops.
    """
    device_run = prepared.device_run
    faults = device_run.run.faults
    before = state if not bad.finite and (count == 1 or faults.bad_step == "stop") else None
    folder = _keep_evidence(out, device_run, bad, before, position.cursor, batch)
    stops = faults.bad_step == "stop" or count > faults.most_skipped
    if stops or batch is None:
        kept = "the state before it and its batch are" if before is not None else "its batch is"
        more = f"; {count} steps were bad, and --faults.most-skipped is {faults.most_skipped}" if count > 1 else ""
        raise TrainingError(
            f"step {bad.step}",
            f"{bad.reason}: its loss is {bad.values['loss']} and its gradient norm {bad.values['gradient norm']}; "
            f"{kept} saved in {folder}{more}",
            f"a lower --lr, more --optimizer.warmup-steps, a look at that batch, or {_way_on(prepared, bad)}",
        )
    if faults.bad_step == "skip":
        _say(f"step {bad.step}: {bad.reason}; its update is left out, and {folder} has its batch")
        return healed(state, bad.step)
    part = (_stream_index(position), jax.tree.leaves(batch)[0].shape[0])
    if jax.process_index() == 0:
        record = {"first": part[0], "number": part[1], "step": bad.step, "reason": bad.reason, "evidence": folder.name}
        _add_skipped(out, record)
    _say(
        f"step {bad.step}: {bad.reason}; the run returns to its last checkpoint and leaves out samples {part[0]} to "
        f"{part[0] + part[1] - 1}; {folder} has them"
    )
    return position._replace(skipped=tuple(sorted({*position.skipped, part})))


def _way_on(prepared: Trainable, bad: BadStep) -> str:
    """Returns the option with which this run continues after such a step."""
    faults = prepared.device_run.run.faults
    if faults.bad_step != "stop":
        return "a higher --faults.most-skipped"
    if prepared.fingerprint() is not None:
        return "--faults.bad-step roll_back, which leaves its samples out"
    # The samples of an author's own batches have no index by which they could be left out.
    if bad.finite:
        return "a higher --faults.spike"
    spike = " --faults.spike 0" if faults.spike else ""
    return f"--faults.bad-step skip{spike}, which leaves its update out"


def _stream_index(position: Position) -> int:
    """Returns the index in the stream of the next sample."""
    sample = position.cursor
    for first, count in position.skipped:
        sample += count if sample >= first else 0
    return sample


def healed(state: State, step: int) -> State:
    """Returns a state that an unhealthy step left, as if that step had been taken without its update."""
    where = state.step.sharding, state.healthy.sharding
    steps, healthy = jax.device_put((np.int32(step), np.ones((), np.bool_)), where)
    return dataclasses.replace(state, step=steps, healthy=healthy)


def _keep_evidence(
    out: Path, device_run: DeviceRun, bad: BadStep, state: State | None, cursor: int, batch: Any
) -> Path:
    """Writes batch and metrics of a bad step into the output folder, and the state before it; returns their folder.

    state: None keeps none.  cursor: samples read before the step.
    """
    folder = _new_folder(out, bad.step)
    if state is not None:
        with Checkpoints(folder / "checkpoints", max_to_keep=1) as checkpoints:
            checkpoints.save(state, device_run, step=bad.step - 1, cursor=cursor)
    folder.mkdir(parents=True, exist_ok=True)
    if batch is not None:
        with (folder / f"batch-process-{jax.process_index()}.npz").open("wb") as file:
            np.savez(file, **_local_rows(batch))
    if jax.process_index() == 0:
        values = {name: value if math.isfinite(value) else str(value) for name, value in bad.values.items()}
        record = {"step": bad.step, "reason": bad.reason, **values}
        (folder / "metrics.json").write_text(json.dumps(record, indent=1, allow_nan=False), encoding="utf-8")
    return folder


def _new_folder(out: Path, step: int) -> Path:
    """Returns a folder that does not exist, the same on all processes."""
    number = 0
    while (out / (name := f"evidence-step-{step}" + (f".{number}" if number else ""))).exists():
        number += 1
    if jax.process_count() > 1:
        number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
        name = f"evidence-step-{step}" + (f".{number}" if number else "")
    return out / name


def read_skipped(out: Path) -> list[tuple[int, int]]:
    """Returns the samples that the run in `out` leaves out. Raises CheckpointError for a file that is damaged."""
    if not (out / _SKIPPED).is_file():
        return []
    try:
        return [(int(part["first"]), int(part["number"])) for part in read_json(out / _SKIPPED)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the samples that {out} leaves out", f"{_SKIPPED} cannot be read: {error}", "repair or remove it"
        ) from error


def _add_skipped(out: Path, record: Mapping[str, Any]) -> None:
    """Adds samples to the file of those that are left out. record: `first`, `number`, and why."""
    file = out / _SKIPPED
    records = read_json(file) if file.is_file() else []
    write_atomically(file, json.dumps([*records, dict(record)], indent=1) + "\n")


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def _local_rows(batch: Any) -> dict[str, Any]:
    """The rows of the batch on this process, by field."""
    return {
        name or "batch": np.concatenate(
            [np.asarray(shard.data) for shard in field.addressable_shards if shard.replica_id == 0]
        )
        for name, field in named_leaves(batch).items()
    }
