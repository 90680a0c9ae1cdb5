"""Checkpoints of a folder by step: which there are, and which are whole. No device is needed."""

from pathlib import Path

from meshwright.storage.paths import in_bucket, path_of

STARTED = "started"
"""Folder with a file for each checkpoint that was begun: a bucket lists it without listing all shards."""


def committed_steps(folder: Path) -> list[int]:
    """Returns the steps with a whole checkpoint in `folder`, oldest first."""
    steps = all_steps(folder)
    return sorted(set(steps) - set(_partial(folder, steps)))


def partial_steps(folder: Path) -> list[int]:
    """Returns the steps whose checkpoint lacks what every one has, oldest first: writing or copying was cut off."""
    return _partial(folder, all_steps(folder))


def _partial(folder: Path, steps: list[int]) -> list[int]:
    names = ("manifest/metadata", "state/_METADATA")
    folder = path_of(folder)
    return sorted(step for step in steps if not all(_has(folder / str(step) / name) for name in names))


def all_steps(folder: Path) -> list[int]:
    """Returns the steps that have a folder, whole or not, in no order."""
    folder = path_of(folder)
    if in_bucket(folder):
        started = [int(path.name) for path in (folder / STARTED).iterdir() if path.name.isdigit()]
        # A folder that other programs copied has no such files.
        return started or [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    return [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []


def _has(file: Path) -> bool:
    # An object is written as a whole.
    return file.is_file() and (in_bucket(file) or file.stat().st_size > 0)
