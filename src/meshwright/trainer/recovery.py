"""How a run goes on: from its last checkpoint, and after a bad step (`faults.Faults`).

Of a bad step its batch, its metrics and, where it is known, the state before it are kept in the
output folder. Samples that a run leaves out from then on are listed in `skipped.json`.

A checkpoint has the identity of its run, the Run, and fingerprints of what that names. A resume
compares them with what it would train now.
"""

import contextlib
import dataclasses
import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
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
from meshwright.errors import CheckpointError, ConfigError, TrainingError, by_class, reason_of
from meshwright.hardware.agreement import answer_of_the_first, flatten, versions_of_program
from meshwright.reporters.files import last_start, last_step
from meshwright.runs.fields import may_change
from meshwright.runs.run import Run
from meshwright.runs.run_file import fields_to_compare
from meshwright.sharding.params import named_leaves
from meshwright.signs import waiting
from meshwright.step.device_run import DeviceRun
from meshwright.step.optimizers import build_lr_schedule
from meshwright.step.state import State
from meshwright.storage.writing import make_folder_below, open_file, write_atomically, write_text
from meshwright.trainer.meter import BadStep
from meshwright.trainer.prepare import Position, Trainable
from meshwright.trainer.relations import SKIPPED, check_accepted, parts_of
from meshwright.trainer.tiers import Tiers, say


class Change(NamedTuple):
    """One difference between a checkpoint and the run that resumes from it."""

    name: str
    text: str
    refused: bool
    """Whether the model would compute something else or read other data, so that it has to be
    meant."""


class Resumed(NamedTuple):
    """State and place with which a run starts, and its changes since the checkpoint."""

    state: State
    position: Position
    changes: dict[str, str]
    log_every: int
    """Most steps between two lines of metrics so far."""


def begin(out: Path) -> Position:
    """Returns the place at which a run begins, with a new identity that all processes share."""
    if (out / SKIPPED).is_file():
        say(f"{out / SKIPPED} is of another run: this one leaves no samples out")
    return Position(0, 0, identity=answer_of_the_first(lambda: uuid.uuid4().hex))


def run_identity(out: Path) -> str:
    """Returns the identity of the run in a folder, by its events or newest checkpoint, or "".

    A folder without events and checkpoints has no run, whatever is on the hosts' own disks.
    """
    identity = str(last_start(out).get("identity", ""))
    if identity:
        return identity
    for step in reversed(committed_steps(out / "checkpoints")):
        with contextlib.suppress(CheckpointError):
            return manifest_of(out / "checkpoints", step).identity
    return ""


def resume(
    prepared: Trainable,
    checkpoints: Tiers,
    at: int | None,
    accept: Sequence[str],
    record: dict[str, Any] | None = None,
) -> Resumed:
    """Returns the state of the newest checkpoint that all hosts can read, and what changed since.

    accept: names of changes that are meant, or of what holds them (`model`). What changes the
    function of the model or its data is refused without; every other change is printed.  record:
    takes the step that is restored, and how many steps are taken again. Raises CheckpointError,
    ConfigError.
    """
    run = prepared.device_run.run
    out = checkpoints.folder.parent
    fingerprint = prepared.fingerprint()
    check_accepted(run, accept)
    folder = _FolderRecords.read(out)
    comparison = _Comparison(out, run, fingerprint, folder, accept)
    state, manifest = checkpoints.restore(prepared.device_run, at, comparison.check)

    last = max(folder.last_step, *checkpoints.newer, manifest.step)
    taken_again = last - manifest.step
    _say_resumed(manifest.step, last, comparison)
    checkpoints.set_aside(after=manifest.step)
    if record is not None:
        record |= {"restored": manifest.step, "taken again": taken_again}
    log_every = max(run.training.log_every, manifest.run.training.log_every)
    changes = {change.name: change.text for change in comparison.changes}
    return Resumed(state, _position_after(manifest, folder), changes, log_every)


class _FolderRecords(NamedTuple):
    """Records of a run in its output folder, besides its checkpoints; equal in all processes."""

    identity: str
    """Identity in the events; "" if there is none."""
    skipped: list[tuple[int, int, str]]
    """Samples that are left out: first, number and run."""
    last_step: int
    """Last step with metrics."""
    versions: dict[str, str]
    """Versions of what has computed its last steps; empty if the events have none."""

    @classmethod
    def read(cls, out: Path) -> "_FolderRecords":
        """Reads the records in process 0. Raises CheckpointError."""

        def read() -> list[Any]:
            start = last_start(out)
            return [
                start.get("identity", ""),
                _left_out(out),
                last_step(out),
                start.get("versions"),
            ]

        identity, skipped, step, versions = answer_of_the_first(read)
        known = versions if isinstance(versions, dict) else {}
        return cls(str(identity), skipped, int(step), {n: str(v) for n, v in known.items()})


class _Comparison:
    """Comparison of the run with the checkpoint that a resume tries, the last of them."""

    def __init__(
        self,
        out: Path,
        run: Run,
        fingerprint: Mapping[str, Any] | None,
        folder: _FolderRecords,
        accept: Sequence[str],
    ):
        self._out = out
        self._run = run
        self._fingerprint = fingerprint
        self._folder = folder
        self._accept = set(accept)
        self.changes: list[Change] = []
        self.unknown: list[str] = []
        """What could not be compared."""

    def check(self, manifest: Manifest) -> None:
        """Compares a checkpoint. Raises ConfigError where it has changes that are refused."""
        folder = self._folder
        self.changes, self.unknown = compare(
            manifest, self._run, self._fingerprint, folder.identity, folder.skipped
        )
        self.changes += changed_versions(folder.versions, versions_of_program())
        refused = [change for change in self.changes if self._is_refused(change)]
        if not refused:
            return
        names = dict.fromkeys(change.name for change in refused)
        raise ConfigError(
            f"resuming from step {manifest.step} of {self._out}",
            "; ".join(change.text for change in refused),
            "what it was before, in the recipe, the run file, the options and the data; or "
            "--accept " + " ".join(names) + ", if the change is meant",
        )

    def _is_refused(self, change: Change) -> bool:
        """Returns whether a change that has to be meant was not accepted."""
        return change.refused and self._accept.isdisjoint(parts_of(change.name))


def _say_resumed(step: int, last: int, comparison: _Comparison) -> None:
    """Prints from which step a run goes on, and what has changed since."""
    repeated = f"; steps {step + 1} to {last} are taken again" if last > step else ""
    say(f"going on from step {step}{repeated}")
    if comparison.changes:
        texts = "; ".join(change.text for change in comparison.changes)
        say(f"resuming from step {step} with changes: {texts}")
    if comparison.unknown:
        say(f"resuming from step {step} without comparing: {'; '.join(comparison.unknown)}")


def _position_after(manifest: Manifest, folder: _FolderRecords) -> Position:
    """Returns the position of a checkpoint.

    It leaves out the samples of the folder's `skipped.json` as well.
    """
    skipped = {*manifest.skipped}
    skipped.update((first, number) for first, number, _ in folder.skipped)
    identity = manifest.identity or folder.identity
    if not identity:
        identity = answer_of_the_first(lambda: uuid.uuid4().hex)
    return Position(
        manifest.step,
        manifest.cursor,
        tuple(sorted(skipped)),
        manifest.data,
        manifest.norms,
        identity,
    )


def _left_out(out: Path) -> list[tuple[int, int, str]]:
    """Returns the samples that `skipped.json` leaves out: first, number and run.

    Raises CheckpointError.
    """
    return [(r["first"], r["number"], r["identity"]) for r in _skipped_records(out)]


def _skipped_records(out: Path) -> list[dict[str, Any]]:
    """Returns the records of `skipped.json`: `first`, `number` and `identity` of the run.

    Raises CheckpointError.
    """
    file = out / SKIPPED
    try:
        if not file.is_file():
            return []
        records = [dict(record) for record in read_json(file)]
        for record in records:
            record["first"] = int(record["first"])
            record["number"] = int(record["number"])
            record["identity"] = str(record.get("identity", ""))
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        truth = f"{SKIPPED} cannot be read: {reason_of(error)}"
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
    """Returns what differs between a checkpoint and a run, and what cannot be compared.

    data: fingerprint of what the run reads.  identity: of the run whose metrics the folder has; ""
    if unknown.
    skipped: samples that the folder leaves out, each with its run.
    """
    comparison = _Differences(changed_fields(manifest.run, run), [])
    jump = describe_rate_jump(manifest.run, run, manifest.step)
    if jump is not None:
        comparison.changes.append(Change("learning rate", jump, refused=False))
    _compare_identity(manifest, identity, comparison)
    _compare_cursor(manifest, comparison)
    _compare_skipped(manifest, skipped, comparison)
    _compare_data(manifest.corpus or {}, data or {}, run, comparison)
    return comparison.changes, comparison.unknown


class _Differences(NamedTuple):
    """Differences between a checkpoint and a run that were found so far."""

    changes: list[Change]
    unknown: list[str]
    """What cannot be compared."""

    def add(self, name: str, text: str) -> None:
        """Adds a change that has to be meant."""
        self.changes.append(Change(name, text, refused=True))


def changed_fields(before: Run, now: Run) -> list[Change]:
    """Returns the fields that differ between two Runs."""
    fields_before = flatten(fields_to_compare(before))
    fields_now = flatten(fields_to_compare(now))
    changes: list[Change] = []
    for name in dict.fromkeys((*fields_before, *fields_now)):
        old = fields_before.get(name, "absent")
        new = fields_now.get(name, "absent")
        if old != new:
            text = f"{name} was {old} and is {new}"
            changes.append(Change(name, text, refused=not may_change(now, name)))
    return changes


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Returns the packages and sources that are others than those of the steps so far.

    before: empty where they are not known.
    """
    changes: list[Change] = []
    for name in dict.fromkeys((*before, *now)) if before else ():
        old = before.get(name, "absent")
        new = now.get(name, "absent")
        if old != new:
            text = f"the version of {name} was {old} and is {new}"
            changes.append(Change(f"version of {name}", text, refused=False))
    return changes


def _compare_identity(manifest: Manifest, identity: str, comparison: _Differences) -> None:
    """Compares the run that wrote a checkpoint with that of the folder's events."""
    if not manifest.identity or not identity:
        unnamed = "the folder's events.jsonl" if manifest.identity else "the checkpoint"
        comparison.unknown.append(f"whether it is of this run, as {unnamed} has no identity of one")
    elif manifest.identity != identity:
        comparison.add(
            "identity",
            f"it is of the run {manifest.identity[:8]}, and metrics and events are of "
            f"{identity[:8]}",
        )


def _compare_cursor(manifest: Manifest, comparison: _Differences) -> None:
    """Compares the cursor of a checkpoint with the samples that its steps read."""
    if manifest.began is None:
        return
    step, cursor = manifest.began
    ramp = ramp_of(manifest.run.training)
    read = ramp.read_before(manifest.step) - ramp.read_before(step)
    if manifest.cursor != cursor + read:
        comparison.add(
            "cursor",
            f"its cursor is {manifest.cursor}, and steps {step + 1} to {manifest.step} read "
            f"{read} samples "
            f"from {cursor} on",
        )


def _compare_skipped(
    manifest: Manifest, skipped: Sequence[tuple[int, int, str]], comparison: _Differences
) -> None:
    """Adds the samples that a folder leaves out for another run."""
    if not manifest.identity:
        return
    for first, number, owner in skipped:
        if owner == manifest.identity or (first, number) in manifest.skipped:
            continue
        run = f"of the run {owner[:8]}" if owner else "of no run that is known"
        comparison.add(
            SKIPPED, f"{SKIPPED} leaves out samples {first} to {first + number - 1}, {run}"
        )


_DATA_TEXTS = {
    "tokenizer": "the tokenizer is another: the same tokens would stand for other text",
    "loss": "the loss, as it is traced, is another",
    "batches": "the first batch of the data is another",
}
"""What is said of fingerprints that differ."""


def _compare_data(
    before: Mapping[str, Any], now: Mapping[str, Any], run: Run, comparison: _Differences
) -> None:
    """Compares the fingerprints of what a checkpoint's run read with those of this run."""
    for name, new in now.items():
        if name not in before:
            comparison.unknown.append(f"its {name}, of which it has no fingerprint")
            continue
        old = before[name]
        if name == "sources":
            _compare_sources(old, new, run, comparison)
        elif name == "loss" and old[0] != new[0]:
            comparison.unknown.append(f"its loss, which was traced by JAX {old[0]}")
        elif name == "batches" and (old is None or new is None):
            comparison.unknown.append("its batches, which are others each time they are read")
        elif old != new:
            text = _DATA_TEXTS.get(name, f"data.{name} was {old} and is {new}")
            comparison.add(name, text)


def _compare_sources(before: list[Any], now: list[Any], run: Run, comparison: _Differences) -> None:
    """Compares text and weight of each source: `[fingerprint, weight]`."""
    if len(before) != len(now):
        comparison.add("text", f"there were {len(before)} sources and there are {len(now)}")
        return
    for path, (old_text, old_weight), (text, weight) in zip(
        run.data.paths, before, now, strict=True
    ):
        if old_text != text:
            comparison.add("text", f"the text or the tokens of {path} have changed")
        if old_weight != weight:
            comparison.add("weights", f"the weight of {path} was {old_weight:g} and is {weight:g}")


def describe_rate_jump(before: Run, now: Run, step: int) -> str | None:
    """Describes how the learning rate jumps where `now` goes on from `before` after `step` steps.

    The result is None where the next step has the fraction of the peak that it would have had;
    after the last step of `before` that is the fraction of its last. Another peak or schedule is a
    field of the Run, and said as such.
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
        f"the learning rate of step {step + 1} is {found:.3g} of the peak and not "
        f"{expected:.3g}, {was}: "
        f"the schedule {now.optimizer.lr_schedule} is over {now.training.steps} steps and was over "
        f"{before.training.steps}"
    )


def _fraction_of_peak(run: Run, step: int) -> float:
    rate = build_lr_schedule(run.optimizer, run.training.steps)
    return float(rate(step)) / run.optimizer.learning_rate


def handle_bad_step(
    out: Path,
    prepared: Trainable,
    bad: BadStep,
    state: State,
    batch: Any,
    position: Position,
    count: int,
) -> State | Position:
    """Keeps the evidence of a bad step.

    Returns the state to continue with, or the place to roll back to.

    state: after the step, which changed it where the step is finite.  position: before the step, by
    which the samples of its batch are known.  count: bad steps so far, this one included. Raises
    TrainingError where the run stops.
    """
    device_run = prepared.device_run
    faults = device_run.run.faults
    before = None
    if not bad.finite and (count == 1 or faults.bad_step == "stop"):
        before = state
    folder = _keep_evidence(out, device_run, bad, before, position.cursor, batch)
    if faults.bad_step == "stop" or count > faults.most_skipped or batch is None:
        raise _stopped(prepared, bad, count, before is not None, folder)
    if faults.bad_step == "skip":
        say(f"step {bad.step}: {bad.reason}; its update is left out, and {folder} has its batch")
        return healed(state, bad.step)

    first = index_in_stream(position)
    number = jax.tree.leaves(batch)[0].shape[0]
    if jax.process_index() == 0:
        record = {
            "first": first,
            "number": number,
            "step": bad.step,
            "reason": bad.reason,
            "evidence": folder.name,
            "identity": position.identity,
        }
        records = [r for r in _skipped_records(out) if r["identity"] == position.identity]
        records.append(record)
        write_atomically(out / SKIPPED, json.dumps(records, indent=1) + "\n")
    say(
        f"step {bad.step}: {bad.reason}; the run returns to its last checkpoint and leaves out "
        f"samples {first} to "
        f"{first + number - 1}; {folder} has them"
    )
    skipped = {*position.skipped, (first, number)}
    return position._replace(skipped=tuple(sorted(skipped)))


def _stopped(
    prepared: Trainable, bad: BadStep, count: int, state_is_kept: bool, folder: Path
) -> TrainingError:
    """Returns the error with which a run stops at a bad step."""
    kept = "the state before it and its batch are" if state_is_kept else "its batch is"
    limit = ""
    if count > 1:
        most = prepared.device_run.run.faults.most_skipped
        limit = f"; {count} steps were bad, and --faults.most-skipped is {most}"
    return TrainingError(
        f"step {bad.step}",
        f"{bad.reason}: its loss is {bad.values['loss']} and its gradient norm "
        f"{bad.values['gradient norm']}; "
        f"{kept} saved in {folder}{limit}",
        "a lower --lr, more --optimizer.warmup-steps, a look at that batch, or "
        f"{_way_on(prepared, bad)}",
    )


def index_in_stream(position: Position) -> int:
    """Returns the index of the next sample: the cursor does not count those that are left out."""
    index = position.cursor
    for first, number in position.skipped:
        if index >= first:
            index += number
    return index


def _way_on(prepared: Trainable, bad: BadStep) -> str:
    faults = prepared.device_run.run.faults
    if faults.bad_step != "stop":
        return "a higher --faults.most-skipped"
    if prepared.tokenizer is not None:
        return "--faults.bad-step roll_back, which leaves its samples out"
    # The samples of an author's own batches have no index by which they could be left out.
    if bad.finite:
        return "a higher --faults.spike"
    spike = " --faults.spike 0" if faults.spike else ""
    return f"--faults.bad-step skip{spike}, which leaves its update out"


def healed(state: State, step: int) -> State:
    """Returns a state that an unhealthy step left, as if it had been taken without its update."""
    shardings = (state.step.sharding, state.healthy.sharding)
    steps, healthy = jax.device_put((np.int32(step), np.ones((), np.bool_)), shardings)
    return dataclasses.replace(state, step=steps, healthy=healthy)


def _keep_evidence(
    out: Path, device_run: DeviceRun, bad: BadStep, state: State | None, cursor: int, batch: Any
) -> Path:
    """Writes batch, metrics and the state before a bad step, if there is one, into a new folder."""

    folder = out / f"evidence-step-{bad.step}{_free_suffix(out, bad.step)}"
    if state is not None:
        with Checkpoints(folder / "checkpoints", max_to_keep=1) as checkpoints:
            checkpoints.save(state, device_run, step=bad.step - 1, cursor=cursor)
    make_folder_below(out, folder.name)
    if batch is not None:
        arrays = _shards_of_this_process(batch)
        with open_file(folder / f"batch-process-{jax.process_index()}.npz", "wb") as file:
            np.savez(file, **arrays)
    if jax.process_index() == 0:
        record: dict[str, Any] = {"step": bad.step, "reason": bad.reason}
        for name, value in bad.values.items():
            # JSON has no number that is not finite.
            record[name] = value if math.isfinite(value) else str(value)
        text = json.dumps(record, indent=1, allow_nan=False)
        write_text(folder / "metrics.json", text)
    return folder


def _free_suffix(out: Path, step: int) -> str:
    """Returns what distinguishes a new folder of evidence from earlier ones of a step."""
    number = 0
    while os.path.lexists(out / f"evidence-step-{step}{_suffix(number)}"):
        number += 1
    if jax.process_count() > 1:
        with waiting("the devices"):
            number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    return _suffix(number)


def _suffix(number: int) -> str:
    return f".{number}" if number else ""


def _shards_of_this_process(batch: Any) -> dict[str, Any]:
    """Returns the rows of a batch that this process has, each once, by name."""
    arrays: dict[str, Any] = {}
    for name, x in named_leaves(batch).items():
        # A stage may have nothing but copies of the rows of another process.
        rows = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        arrays[name or "batch"] = np.concatenate(
            [np.asarray(rows[start]) for start in sorted(rows)]
        )
    return arrays
