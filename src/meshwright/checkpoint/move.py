"""Moves and copies of a run's checkpoints between stores: disks, shared file systems, buckets."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from meshwright.checkpoint.inspect import list_checkpoints
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.steps import STARTED, committed_steps
from meshwright.errors import CheckpointError
from meshwright.storage.paths import in_bucket, remove_tree
from meshwright.storage.transfer import copy_file, copy_tree, files_of, sha256_of


@dataclasses.dataclass(frozen=True)
class Moved:
    """One checkpoint of a move, or the run's other files."""

    what: str
    """`step 600`, or `files of the run`."""
    files: int
    bytes: int
    """Bytes of the files; of a checkpoint in a bucket those of its tensors, of other files there 0."""
    action: Literal["copy", "there", "left out"]
    """It is copied; the target has the same; or it stays because it is not whole."""


def plan_move(source: Path, target: Path, at: int | None) -> list[Moved]:
    """Returns what a move would do. at: step of the only checkpoint to move; None takes all.

    Raises CheckpointError where there is no such checkpoint, or the target has another one of the same step.
    """
    if source == target or target.is_relative_to(source) or source.is_relative_to(target):
        raise CheckpointError(f"moving {source} to {target}", "they are in one another", "another folder")
    listed = [row for row in list_checkpoints(source / "checkpoints") if at in (None, row.step)]
    if not listed:
        there = ", ".join(map(str, committed_steps(source / "checkpoints"))) or "none"
        asked = f"the checkpoint of step {at}" if at is not None else "the checkpoints"
        raise CheckpointError(f"{asked} in {source}", f"its steps are: {there}", "a step that is there")
    existing = committed_steps(target / "checkpoints")
    planned = []
    for row in listed:
        names = files_of(source / "checkpoints" / str(row.step))
        action: Literal["copy", "there", "left out"] = "copy" if row.state == "whole" else "left out"
        if row.step in existing and action == "copy":
            manifests = [folder / "checkpoints" / str(row.step) / MANIFEST for folder in (source, target)]
            if sha256_of(manifests[0]) != sha256_of(manifests[1]):
                truth = "it holds another checkpoint of that step"
                raise CheckpointError(f"moving step {row.step} to {target}", truth, "another folder")
            action = "there"
        planned.append(Moved(f"step {row.step}", len(names), row.bytes, action))
    others = _other_files(source)
    size = 0 if in_bucket(source) else sum((source / name).stat().st_size for name in others)
    return [*planned, Moved("files of the run", len(others), size, "copy")]


def _other_files(source: Path) -> list[str]:
    left_out = ("checkpoints/", "set-aside/")
    return [name for name in files_of(source) if name != ".lock" and not name.startswith(left_out)]


def move_checkpoints(
    source: Path, target: Path, at: int | None, *, then: Literal["delete", "keep"], say: Callable[[str], None]
) -> list[Moved]:
    """Copies checkpoints and files of a run, reads every copy back, and only then deletes the source.

    Started again after it was cut off, it continues where it was. Moving a single step keeps the source's other files.
    then: what becomes of the source. Raises CheckpointError or StorageError; the source is then as it was.
    """
    planned = plan_move(source, target, at)
    steps = [int(row.what.removeprefix("step ")) for row in planned if row.action != "left out" and "step" in row.what]
    for step in steps:
        if in_bucket(target):
            (target / "checkpoints" / STARTED / str(step)).write_text(str(step))
        copy_tree(source / "checkpoints" / str(step), target / "checkpoints" / str(step), (MANIFEST,))
        say(f"step {step}: copied and compared")
    others = _other_files(source)
    for name in others:
        digest, _ = copy_file(source / name, target / name)
        if sha256_of(target / name)[0] != digest:
            raise CheckpointError(f"copying {source / name}", f"{target / name} is not what was written", "try again")
    say(f"{len(others)} other files: copied and compared")
    if then == "delete":
        for step in steps:
            folder = source / "checkpoints" / str(step)
            (folder / MANIFEST).unlink(missing_ok=True)
            remove_tree(folder)
            (source / "checkpoints" / STARTED / str(step)).unlink(missing_ok=True)
        if not committed_steps(source / "checkpoints"):
            for name in others:
                (source / name).unlink(missing_ok=True)
    return planned
