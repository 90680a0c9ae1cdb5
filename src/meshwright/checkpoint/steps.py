"""Folders of checkpoints: which steps they have, and which are complete. No device is needed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import CheckpointError, MeshwrightError, by_class, reason_of
from meshwright.storage.attempts import attempt, is_dir, is_file
from meshwright.storage.paths import in_bucket, path_of
from meshwright.storage.removing import remove_file, remove_tree, rename

MANIFEST = "manifest/metadata"
"""File of a checkpoint that is written last and deleted first:
without it a folder is not a checkpoint."""
STARTED = "started"
"""Folder with a file for each checkpoint that was begun,
and when: a bucket lists it without listing all shards."""


def committed_steps(folder: Path) -> list[int]:
    """Returns the steps with a complete checkpoint in `folder`, oldest first."""
    return [step for step, complete in _completeness(folder).items() if complete]


def partial_steps(folder: Path) -> list[int]:
    """Returns the steps whose checkpoint has no manifest, oldest first: writing
    or copying was cut off."""
    return [step for step, complete in _completeness(folder).items() if not complete]


def _completeness(folder: Path) -> dict[int, bool]:
    files = {step: path_of(folder) / str(step) / MANIFEST for step in sorted(all_steps(folder))}
    return {step: _is_complete(file) for step, file in files.items()}


def _is_complete(manifest: Path) -> bool:
    """Whether a manifest is there, with text in it.

    A manifest that this host cannot look at for now raises UnavailableError: a checkpoint is never
    taken for one that was cut off because a file server did not answer.
    """
    if in_bucket(manifest):
        return manifest.is_file()  # an object is written completely or not at all
    try:
        return is_file(manifest) and attempt(manifest.stat).st_size > 0
    except OSError as error:
        raise unreadable(manifest.parent.parent, error) from error


def all_steps(folder: Path) -> list[int]:
    """Returns the steps that have a folder, complete or not, in no order."""
    folder = path_of(folder)
    if in_bucket(folder):
        started = _numbers_in(folder / STARTED)
        if started:  # a folder that other programs copied has no such files
            return started
    return _numbers_in(folder)


def _numbers_in(folder: Path) -> list[int]:
    """Returns the names in a folder that are numbers."""
    return [int(name) for name in _names_in(folder) if name.isdigit()]


def _names_in(folder: Path) -> list[str]:
    """Returns the names in a folder; none where there is no such folder.
    Raises UnavailableError, CheckpointError."""
    if in_bucket(folder):
        return [path.name for path in folder.iterdir()]
    try:
        return attempt(lambda: os.listdir(folder)) if is_dir(folder) else []
    except OSError as error:
        raise unreadable(folder, error) from error


def unreadable(folder: Path, error: OSError) -> MeshwrightError:
    """Returns the error of a checkpoint or a folder of them that cannot be listed or read."""
    refusal = CheckpointError(
        f"the checkpoints in {folder}",
        f"they cannot be listed: {reason_of(error)}",
        "make that folder readable",
    )
    return by_class(error, refusal)


def remove_checkpoint(folder: Path, step: int) -> None:
    """Deletes a checkpoint. What a kill leaves is not taken for a checkpoint,
    and goes at the next start of the run.

    A bucket cannot rename, so there the manifest goes first.
    On a disk the folder gets another name first.
    """
    checkpoint = folder / str(step)
    below = folder.parent
    if in_bucket(folder):
        remove_file(checkpoint / MANIFEST, below=below, missing_ok=True)
        remove_tree(checkpoint, below=below)
        remove_file(folder / STARTED / str(step), below=below, missing_ok=True)
        return
    doomed = folder / f"{step}.deleted.tmp"
    remove_tree(doomed, below=below, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        rename(checkpoint, doomed, below=below)
    remove_tree(doomed, below=below, ignore_errors=True)


def unwritable(folder: Path, error: OSError) -> MeshwrightError:
    """Returns the error of an output folder that cannot be written."""
    reason = reason_of(error)
    if isinstance(error, FileExistsError):
        reason = "a file, or a link that leads nowhere, has that name"
    refusal = CheckpointError(
        f"output folder {folder}", f"it cannot be written: {reason}", "another --out"
    )
    return by_class(error, refusal)


@contextlib.contextmanager
def explained_writing(folder: Path) -> Iterator[None]:
    """Raises an OSError of the block as `unwritable` has it."""
    try:
        yield
    except OSError as error:
        raise unwritable(folder, error) from error
