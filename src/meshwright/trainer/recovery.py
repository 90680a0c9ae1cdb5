"""How a run goes on: from its last checkpoint, and after a bad step (`faults.Faults`).

Of a bad step its batch, its metrics and, where it is known, the state before it are kept in the output folder. Samples
that a run leaves out from then on are listed in `skipped.json`.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.manifest import Manifest
from meshwright.documents import read_json, write_atomically
from meshwright.errors import CheckpointError, TrainingError
from meshwright.runs.run import Run
from meshwright.sharding.params import named_leaves
from meshwright.step.device_run import DeviceRun, State
from meshwright.trainer.meter import BadStep
from meshwright.trainer.prepare import Position, Trainable
from meshwright.trainer.tiers import Tiers

_SKIPPED = "skipped.json"
"""File of an output folder with the samples that its run leaves out."""


def resume(
    device_run: DeviceRun,
    checkpoints: Tiers,
    at: int | None,
    data: Mapping[str, Any] | None,
    policy: Literal["same", "new"],
) -> tuple[State, Position]:
    """Returns the state of the newest checkpoint that all hosts can read, or of step `at`, and its place.

    data: fingerprint of the data that the run reads now.  policy: `new` accepts data that differ.
    Raises CheckpointError.
    """

    def accept(manifest: Manifest) -> None:
        if policy == "same" and data is not None:
            _check_data(manifest, data, device_run.run)

    state, manifest = checkpoints.restore(device_run, at, accept)
    checkpoints.set_aside(after=manifest.step)
    file = checkpoints.folder.parent / _SKIPPED
    try:
        records = read_json(file) if file.is_file() else []
        skipped = {*manifest.skipped, *((int(part["first"]), int(part["number"])) for part in records)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the samples that {file.parent} leaves out",
            f"{_SKIPPED} cannot be read: {error}",
            "repair or remove it",
        ) from error
    return state, Position(manifest.step, manifest.cursor, tuple(sorted(skipped)), manifest.data, manifest.norms)


def _check_data(manifest: Manifest, data: Mapping[str, Any], run: Run) -> None:
    """Raises CheckpointError naming what differs between the data of a checkpoint and those of the run that resumes."""
    if manifest.corpus is None:  # written by an earlier version
        return
    before = {**data, **manifest.corpus}
    differences, restored = [], []
    if len(before["sources"]) != len(data["sources"]):
        differences.append(f"there were {len(before['sources'])} sources and there are {len(data['sources'])}")
    else:
        for path, was, now in zip(run.data.paths, before["sources"], data["sources"], strict=True):
            if was[0] != now[0]:
                differences.append(f"the text or the tokens of {path} have changed")
            elif was[1] != now[1]:
                differences.append(f"the weight of {path} was {was[1]:g} and is {now[1]:g}")
    if before["tokenizer"] != data["tokenizer"]:
        differences.append("the tokenizer is another: the same tokens would stand for other text")
    if differences:
        restored.append("the data that it was trained on")
    for option, name in {"--seq": "sequence", "--seed": "seed", "--data.held-out": "held_out"}.items():
        if before[name] != data[name]:
            differences.append(f"{option} was {before[name]} and is {data[name]}")
            restored.append(f"{option} {before[name]}")
    if differences:
        raise CheckpointError(
            f"resuming from step {manifest.step} on the data of this run",
            "; ".join(differences),
            f"{' and '.join(restored)}, or --new-data if the change is meant",
        )


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
    first, number = position.cursor, jax.tree.leaves(batch)[0].shape[0]
    for start, length in position.skipped:  # `first` becomes an index in the stream
        first += length if first >= start else 0
    if jax.process_index() == 0:
        file = out / _SKIPPED
        record = {"first": first, "number": number, "step": bad.step, "reason": bad.reason, "evidence": folder.name}
        records = [*(read_json(file) if file.is_file() else []), record]
        write_atomically(file, json.dumps(records, indent=1) + "\n")
    _say(
        f"step {bad.step}: {bad.reason}; the run returns to its last checkpoint and leaves out samples {first} to "
        f"{first + number - 1}; {folder} has them"
    )
    return position._replace(skipped=tuple(sorted({*position.skipped, (first, number)})))


def _way_on(prepared: Trainable, bad: BadStep) -> str:
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


def healed(state: State, step: int) -> State:
    """Returns a state that an unhealthy step left, as if that step had been taken without its update."""
    where = state.step.sharding, state.healthy.sharding
    steps, healthy = jax.device_put((np.int32(step), np.ones((), np.bool_)), where)
    return dataclasses.replace(state, step=steps, healthy=healthy)


def _keep_evidence(
    out: Path, device_run: DeviceRun, bad: BadStep, state: State | None, cursor: int, batch: Any
) -> Path:
    """Writes batch and metrics of a bad step into a new folder, and the state before it where there is one."""

    def numbered(number: int) -> Path:
        return out / (f"evidence-step-{bad.step}" + (f".{number}" if number else ""))

    number = 0
    while numbered(number).exists():
        number += 1
    if jax.process_count() > 1:
        number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    folder = numbered(number)
    if state is not None:
        with Checkpoints(folder / "checkpoints", max_to_keep=1) as checkpoints:
            checkpoints.save(state, device_run, step=bad.step - 1, cursor=cursor)
    folder.mkdir(parents=True, exist_ok=True)
    if batch is not None:
        rows: dict[str, Any] = {  # those of this process
            name or "batch": np.concatenate([np.asarray(s.data) for s in x.addressable_shards if s.replica_id == 0])
            for name, x in named_leaves(batch).items()
        }
        with (folder / f"batch-process-{jax.process_index()}.npz").open("wb") as file:
            np.savez(file, **rows)
    if jax.process_index() == 0:
        values = {name: value if math.isfinite(value) else str(value) for name, value in bad.values.items()}
        record = {"step": bad.step, "reason": bad.reason, **values}
        (folder / "metrics.json").write_text(json.dumps(record, indent=1, allow_nan=False), encoding="utf-8")
    return folder


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)
