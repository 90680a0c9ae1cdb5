"""How a run goes on: from its last checkpoint, and after a bad step (`faults.Faults`).

Of a bad step its batch, its metrics and, where it is known, the state before it are kept in the output folder. Samples
that a run leaves out from then on are listed in `skipped.json`.

A checkpoint has the identity of its run, the Run, and fingerprints of what that names. A resume compares them with what
it would train now.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.manifest import Manifest, manifest_of
from meshwright.checkpoint.steps import committed_steps
from meshwright.data.batch import ramp_of
from meshwright.documents import read_json
from meshwright.errors import CheckpointError, ConfigError, TrainingError, by_class
from meshwright.hardware.agreement import answer_of_the_first, flatten
from meshwright.reporters.files import last_start, last_step
from meshwright.runs.fields import may_change
from meshwright.runs.run import Run
from meshwright.runs.run_file import fields_to_compare
from meshwright.sharding.params import named_leaves
from meshwright.signs import waiting
from meshwright.step.device_run import DeviceRun, State
from meshwright.step.optimizers import build_lr_schedule
from meshwright.storage.writing import make_folder_below, open_file, write_atomically, write_text
from meshwright.trainer.meter import BadStep
from meshwright.trainer.prepare import Position, PreparedRun, Trainable
from meshwright.trainer.relations import SKIPPED, check_accepted, parts_of
from meshwright.trainer.tiers import Tiers, say


class Change(NamedTuple):
    """One difference between a checkpoint and the run that resumes from it."""

    name: str
    text: str
    refused: bool
    """Whether the model would compute something else or read other data, so that it has to be meant."""


class Resumed(NamedTuple):
    """State and place with which a run starts, and how it differs from the one that wrote its checkpoint."""

    state: State
    position: Position
    changes: dict[str, str]
    log_every: int
    """Most steps between two lines of metrics so far."""


def begin(out: Path) -> Position:
    """Returns the place at which a run begins in `out`, with a new identity, the same in every process."""
    if (out / SKIPPED).is_file():
        say(f"{out / SKIPPED} is of another run: this one leaves no samples out")
    return Position(0, 0, identity=answer_of_the_first(lambda: uuid.uuid4().hex))


def run_identity(out: Path) -> str:
    """Returns the identity of the run in an output folder, by its events or its newest checkpoint; "" if it has none.

    A folder without events and checkpoints has no run, whatever is on the hosts' own disks.
    """
    known = str(last_start(out).get("identity", ""))
    for step in [] if known else reversed(committed_steps(out / "checkpoints")):
        with contextlib.suppress(CheckpointError):
            return manifest_of(out / "checkpoints", step).identity
    return known


def resume(
    prepared: Trainable,
    checkpoints: Tiers,
    at: int | None,
    accept: Sequence[str],
    record: dict[str, Any] | None = None,
) -> Resumed:
    """Returns the state of the newest checkpoint that all hosts can read, or of step `at`, and what changed since.

    accept: names of changes that are meant, or of what holds them (`model`). What changes the function of the model or
    its data is refused without; every other change is printed.  record: takes the step that is restored, and how many
    steps are taken again. Raises CheckpointError, ConfigError.
    """
    run, out, fingerprint = (
        prepared.device_run.run,
        checkpoints.folder.parent,
        prepared.fingerprint(),
    )
    check_accepted(run, accept)
    identity, records, reached = answer_of_the_first(
        lambda: [last_start(out).get("identity", ""), _left_out(out), last_step(out)]
    )
    changes, unknown = list[Change](), list[str]()

    def check(manifest: Manifest) -> None:
        changes[:], unknown[:] = compare(manifest, run, fingerprint, str(identity), records)
        refused = [c for c in changes if c.refused and not {*parts_of(c.name)} & {*accept}]
        if refused:
            raise ConfigError(
                f"resuming from step {manifest.step} of {out}",
                "; ".join(change.text for change in refused),
                "what it was before, in the recipe, the run file, the options and the data; or --accept "
                + " ".join(dict.fromkeys(change.name for change in refused))
                + ", if the change is meant",
            )

    state, manifest = checkpoints.restore(prepared.device_run, at, check)
    last = max(int(reached), *checkpoints.newer, manifest.step)
    taken_again = last - manifest.step
    again = f"; steps {manifest.step + 1} to {last} are taken again" if taken_again else ""
    say(f"going on from step {manifest.step}{again}")
    for what, texts in (
        ("with changes", [change.text for change in changes]),
        ("without comparing", unknown),
    ):
        if texts:
            say(f"resuming from step {manifest.step} {what}: {'; '.join(texts)}")
    checkpoints.set_aside(after=manifest.step)
    skipped = tuple(sorted({*manifest.skipped, *((first, number) for first, number, _ in records)}))
    identity = manifest.identity or str(identity) or answer_of_the_first(lambda: uuid.uuid4().hex)
    position = Position(
        manifest.step, manifest.cursor, skipped, manifest.data, manifest.norms, identity
    )
    if record is not None:
        record |= {"restored": manifest.step, "taken again": taken_again}
    every = max(run.training.log_every, manifest.run.training.log_every)
    return Resumed(state, position, {change.name: change.text for change in changes}, every)


def _left_out(out: Path) -> list[tuple[int, int, str]]:
    """Returns the samples that `skipped.json` leaves out: first, number and run. Raises CheckpointError."""
    return [(r["first"], r["number"], r["identity"]) for r in _skipped_records(out)]


def _skipped_records(out: Path) -> list[dict[str, Any]]:
    """Returns the records of `skipped.json`, samples that are left out: `first`, `number` and `identity` of the run.

    Raises CheckpointError.
    """
    file = out / SKIPPED
    try:
        records = [dict(record) for record in (read_json(file) if file.is_file() else [])]
        for record in records:
            record["first"] = int(record["first"])
            record["number"] = int(record["number"])
            record["identity"] = str(record.get("identity", ""))
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        truth = f"{SKIPPED} cannot be read: {error}"
        raise by_class(
            error,
            CheckpointError(f"the samples that {out} leaves out", truth, "repair or remove it"),
        ) from error
    return records


def compare(
    manifest: Manifest,
    run: Run,
    data: Mapping[str, Any] | None,
    identity: str,
    skipped: Sequence[tuple[int, int, str]],
) -> tuple[list[Change], list[str]]:
    """Compares a checkpoint with the run that would resume from it: returns what differs, and what cannot be compared.

    data: fingerprint of what the run reads.  identity: of the run whose metrics the folder has; "" if unknown.
    skipped: samples that the folder leaves out, each with its run.
    """
    before, now = flatten(fields_to_compare(manifest.run)), flatten(fields_to_compare(run))
    changes, unknown = [], []
    for name in dict.fromkeys((*before, *now)):
        was, given = before.get(name, "absent"), now.get(name, "absent")
        if was != given:
            text = f"{name} was {was} and is {given}"
            changes.append(Change(name, text, refused=not may_change(run, name)))
    if (jump := describe_rate_jump(manifest.run, run, manifest.step)) is not None:
        changes.append(Change("learning rate", jump, refused=False))

    def differs(name: str, text: str) -> None:
        changes.append(Change(name, text, refused=True))

    if not manifest.identity or not identity:
        who = "the checkpoint" if not manifest.identity else "the folder's events.jsonl"
        unknown.append(f"whether it is of this run, as {who} has no identity of one")
    elif manifest.identity != identity:
        differs(
            "identity",
            f"it is of the run {manifest.identity[:8]}, and metrics and events are of {identity[:8]}",
        )
    if manifest.began is not None:
        (step, cursor), ramp = manifest.began, ramp_of(manifest.run.training)
        read = ramp.read_before(manifest.step) - ramp.read_before(step)
        if manifest.cursor != cursor + read:
            found = f"its cursor is {manifest.cursor}, and steps {step + 1} to {manifest.step} read {read} samples"
            differs("cursor", f"{found} from {cursor} on")
    for first, number, owner in skipped:
        if (
            manifest.identity
            and owner != manifest.identity
            and (first, number) not in manifest.skipped
        ):
            whose = f"of the run {owner[:8]}" if owner else "of no run that is known"
            differs(
                SKIPPED, f"{SKIPPED} leaves out samples {first} to {first + number - 1}, {whose}"
            )
    saved = manifest.corpus or {}
    for name, value in (data or {}).items():
        if name not in saved:
            unknown.append(f"its {name}, of which it has no fingerprint")
        elif name == "sources":
            _compare_sources(saved[name], value, run, differs)
        elif name == "loss" and saved[name][0] != value[0]:
            unknown.append(f"its loss, which was traced by JAX {saved[name][0]}")
        elif None in (saved[name], value) and name == "batches":
            unknown.append("its batches, which are others each time they are read")
        elif saved[name] != value:
            texts = {
                "tokenizer": "the tokenizer is another: the same tokens would stand for other text",
                "loss": "the loss, as it is traced, is another",
                "batches": "the first batch of the data is another",
            }
            differs(name, texts.get(name, f"data.{name} was {saved[name]} and is {value}"))
    return changes, unknown


def describe_rate_jump(before: Run, now: Run, step: int) -> str | None:
    """Describes how the learning rate jumps where `now` goes on from the first `step` steps of `before`.

    None where the next step has the fraction of the peak that it would have had; after the last step of `before` that
    is the fraction of its last. Another peak or schedule is a field of the Run, and said as such.
    """
    if before.optimizer.lr_schedule != now.optimizer.lr_schedule:
        return None
    if not 0 < step < now.training.steps:
        return None
    expected, found = (_fraction_of_peak(run, step) for run in (before, now))
    if math.isclose(expected, found, rel_tol=1e-4):
        return None
    ended = step >= before.training.steps
    was = "the fraction of the last step" if ended else "the fraction it would have had"
    return (
        f"the learning rate of step {step + 1} is {found:.3g} of the peak and not {expected:.3g}, {was}: "
        f"the schedule {now.optimizer.lr_schedule} is over {now.training.steps} steps and was over "
        f"{before.training.steps}"
    )


def _fraction_of_peak(run: Run, step: int) -> float:
    rate = build_lr_schedule(run.optimizer, run.training.steps)
    return float(rate(step)) / run.optimizer.learning_rate


def _compare_sources(
    before: list[Any], now: list[Any], run: Run, differs: Callable[[str, str], None]
) -> None:
    if len(before) != len(now):
        differs("text", f"there were {len(before)} sources and there are {len(now)}")
        return
    for path, was, given in zip(run.data.paths, before, now, strict=True):
        if was[0] != given[0]:
            differs("text", f"the text or the tokens of {path} have changed")
        if was[1] != given[1]:
            differs("weights", f"the weight of {path} was {was[1]:g} and is {given[1]:g}")


def handle_bad_step(
    out: Path,
    prepared: Trainable,
    bad: BadStep,
    state: State,
    batch: Any,
    position: Position,
    count: int,
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
        more = (
            f"; {count} steps were bad, and --faults.most-skipped is {faults.most_skipped}"
            if count > 1
            else ""
        )
        raise TrainingError(
            f"step {bad.step}",
            f"{bad.reason}: its loss is {bad.values['loss']} and its gradient norm {bad.values['gradient norm']}; "
            f"{kept} saved in {folder}{more}",
            f"a lower --lr, more --optimizer.warmup-steps, a look at that batch, or {_way_on(prepared, bad)}",
        )
    if faults.bad_step == "skip":
        say(f"step {bad.step}: {bad.reason}; its update is left out, and {folder} has its batch")
        return healed(state, bad.step)
    first, number = position.cursor, jax.tree.leaves(batch)[0].shape[0]
    for start, length in position.skipped:  # `first` becomes an index in the stream
        first += length if first >= start else 0
    if jax.process_index() == 0:
        file = out / SKIPPED
        record = {
            "first": first,
            "number": number,
            "step": bad.step,
            "reason": bad.reason,
            "evidence": folder.name,
        }
        others = [r for r in _skipped_records(out) if r["identity"] == position.identity]
        records = [*others, {**record, "identity": position.identity}]
        write_atomically(file, json.dumps(records, indent=1) + "\n")
    say(
        f"step {bad.step}: {bad.reason}; the run returns to its last checkpoint and leaves out samples {first} to "
        f"{first + number - 1}; {folder} has them"
    )
    return position._replace(skipped=tuple(sorted({*position.skipped, (first, number)})))


def _way_on(prepared: Trainable, bad: BadStep) -> str:
    faults = prepared.device_run.run.faults
    if faults.bad_step != "stop":
        return "a higher --faults.most-skipped"
    if isinstance(prepared, PreparedRun):
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

    number = next(n for n in itertools.count() if not os.path.lexists(numbered(n)))
    if jax.process_count() > 1:
        with waiting("the devices"):
            number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    folder = numbered(number)
    if state is not None:
        with Checkpoints(folder / "checkpoints", max_to_keep=1) as checkpoints:
            checkpoints.save(state, device_run, step=bad.step - 1, cursor=cursor)
    make_folder_below(out, folder.name)
    if batch is not None:
        rows: dict[str, Any] = {  # those of this process
            name or "batch": np.concatenate(
                [np.asarray(s.data) for s in x.addressable_shards if s.replica_id == 0]
            )
            for name, x in named_leaves(batch).items()
        }
        rows_file = folder / f"batch-process-{jax.process_index()}.npz"
        with open_file(rows_file, "wb") as file:
            np.savez(file, **rows)
    if jax.process_index() == 0:
        values = {
            name: value if math.isfinite(value) else str(value)
            for name, value in bad.values.items()
        }
        record = {"step": bad.step, "reason": bad.reason, **values}
        text = json.dumps(record, indent=1, allow_nan=False)
        write_text(folder / "metrics.json", text)
    return folder
