"""Moves and copies of a run's checkpoints between stores: disks, shared file systems, buckets."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from meshwright.checkpoint.inspect import list_checkpoints
from meshwright.checkpoint.steps import MANIFEST, STARTED, committed_steps, remove_checkpoint
from meshwright.errors import CheckpointError
from meshwright.storage.paths import in_bucket
from meshwright.storage.removing import remove_file
from meshwright.storage.transfer import (
    copy_files,
    copy_tree,
    files_of,
    join_segments,
    sha256_of,
)
from meshwright.storage.writing import refuse_links, write_text

_REST = "files of the run"


@dataclasses.dataclass(frozen=True)
class Moved:
    """One checkpoint of a move, or the run's other files."""

    what: str
    """`step 600`, or `files of the run`."""
    files: int
    bytes: int
    """Bytes of its tensors, or of the other files; of those in a bucket 0."""
    action: Literal["copy", "there", "left out"]
    """It is copied; the target has the same; or it stays because it is not whole."""


def plan_move(source: Path, target: Path, at: int | None) -> list[Moved]:
    """Returns what a move would do. at: step of the only checkpoint to move; None takes all.

    Raises CheckpointError where there is no such checkpoint,
    or the target has another one of the same step.
    """
    if source == target or target.is_relative_to(source) or source.is_relative_to(target):
        raise CheckpointError(
            f"moving {source} to {target}", "they are in one another", "another folder"
        )
    folder = source / "checkpoints"
    existing = committed_steps(target / "checkpoints")
    listed = [row for row in list_checkpoints(folder) if at in (None, row.step)]
    if not listed:
        there = ", ".join(map(str, committed_steps(folder))) or "none"
        asked = f"the checkpoint of step {at}" if at is not None else "the checkpoints"
        raise CheckpointError(
            f"{asked} in {source}", f"its steps are: {there}", "a step that is there"
        )
    planned: list[Moved] = []
    for row in listed:
        name = str(row.step)
        action: Literal["copy", "there", "left out"] = "copy"
        if row.state != "whole":
            action = "left out"
        elif row.step in existing:
            _check_same(folder / name, target / "checkpoints" / name, target)
            action = "there"
        planned.append(Moved(f"step {name}", len(files_of(folder / name)), row.bytes or 0, action))
    others = _other_files(source)
    size = 0
    if not in_bucket(source):
        size = sum((source / name).stat().st_size for name in others)
    return [*planned, Moved(_REST, len(others), size, "copy")]


def _check_same(checkpoint: Path, existing: Path, target: Path) -> None:
    """Raises CheckpointError where a target has another checkpoint of a step."""
    if sha256_of(checkpoint / MANIFEST) != sha256_of(existing / MANIFEST):
        truth = "it holds another checkpoint of that step"
        raise CheckpointError(f"moving step {existing.name} to {target}", truth, "another folder")


def _other_files(source: Path) -> list[str]:
    left_out = ("checkpoints/", "set-aside/")
    return [name for name in files_of(source) if name != ".lock" and not name.startswith(left_out)]


def move_checkpoints(
    source: Path,
    target: Path,
    at: int | None,
    *,
    then: Literal["delete", "keep"],
    say: Callable[[str], None],
) -> list[Moved]:
    """Copies checkpoints and files of a run, reads every copy back,
    and only then deletes the source.

    Started again after it was cut off, it continues where it was.
    Moving a single step keeps the source's other files.
    then: what becomes of the source. Raises CheckpointError or StorageError;
    the source is then as it was.
    """
    refuse_links(target, depth=5)
    planned = plan_move(source, target, at)
    steps = [
        row.what.removeprefix("step ")
        for row in planned
        if row.action != "left out" and row.what != _REST
    ]
    for step in steps:
        if in_bucket(target):
            write_text(target / "checkpoints" / STARTED / step, str(time.time()))
        copy_tree(source / "checkpoints" / step, target / "checkpoints" / step, (MANIFEST,))
        say(f"step {step}: copied and compared")
    others = _other_files(source)
    copy_files(others, source, target)
    if in_bucket(source) and not in_bucket(target):
        from meshwright.storage.bucket import is_segment  # loads a client of buckets

        join_segments([name for name in others if is_segment(name)], target)
    say(f"{len(others)} other files: copied and compared")
    if then == "delete":
        for step in steps:
            remove_checkpoint(source / "checkpoints", int(step))
        if not committed_steps(source / "checkpoints"):
            for name in others:
                remove_file(source / name, below=source, missing_ok=True)
    return planned
