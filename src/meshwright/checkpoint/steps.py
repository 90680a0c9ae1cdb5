"""Folders of checkpoints: which steps they have, and which are complete. No device is needed."""

import contextlib
from pathlib import Path

from meshwright.errors import CheckpointError, reason_of
from meshwright.storage.paths import in_bucket, path_of, remove_tree

MANIFEST = "manifest/metadata"
"""File of a checkpoint that is written last and deleted first: without it a folder is not a checkpoint."""
STARTED = "started"
"""Folder with a file for each checkpoint that was begun, and when: a bucket lists it without listing all shards."""


def committed_steps(folder: Path) -> list[int]:
    """Returns the steps with a complete checkpoint in `folder`, oldest first."""
    return [step for step, complete in _completeness(folder).items() if complete]


def partial_steps(folder: Path) -> list[int]:
    """Returns the steps whose checkpoint has no manifest, oldest first: writing or copying was cut off."""
    return [step for step, complete in _completeness(folder).items() if not complete]


def _completeness(folder: Path) -> dict[int, bool]:
    files = {step: path_of(folder) / str(step) / MANIFEST for step in sorted(all_steps(folder))}
    # An object is written completely or not at all.
    return {
        step: f.is_file() and (in_bucket(f) or f.stat().st_size > 0) for step, f in files.items()
    }


def all_steps(folder: Path) -> list[int]:
    """Returns the steps that have a folder, complete or not, in no order."""
    folder = path_of(folder)
    # In a bucket a folder that other programs copied has no such files.
    for place in (folder / STARTED, folder) if in_bucket(folder) else (folder,):
        if found := [
            int(path.name)
            for path in (place.iterdir() if place.is_dir() else ())
            if path.name.isdigit()
        ]:
            return found
    return []


def remove_checkpoint(folder: Path, step: int) -> None:
    """Deletes a checkpoint. What a kill leaves is not taken for a checkpoint, and goes at the next start of the run.

    A bucket cannot rename, so there the manifest goes first. On a disk the folder gets another name first.
    """
    checkpoint = folder / str(step)
    if in_bucket(folder):
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        remove_tree(checkpoint)
        (folder / STARTED / str(step)).unlink(missing_ok=True)
        return
    doomed = folder / f"{step}.deleted.tmp"
    remove_tree(doomed)
    with contextlib.suppress(FileNotFoundError):
        checkpoint.rename(doomed)
    remove_tree(doomed)


def unwritable(folder: Path, error: OSError) -> CheckpointError:
    """Returns the error of an output folder that cannot be written."""
    reason = reason_of(error)
    if isinstance(error, FileExistsError):
        reason = "a file, or a link that leads nowhere, has that name"
    return CheckpointError(
        f"output folder {folder}", f"it cannot be written: {reason}", "another --out"
    )
