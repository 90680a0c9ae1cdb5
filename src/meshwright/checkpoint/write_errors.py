"""Errors of a save: what the file system refused, and which checkpoint is intact."""

import shutil
from pathlib import Path

from meshwright.checkpoint.checkpoints import committed_steps
from meshwright.errors import CheckpointError


def write_error(action: str, folder: Path, error: Exception) -> CheckpointError:
    """Returns the error of an operation that Orbax or the file system refused. action: what was done."""
    text = str(error)
    full = any(sign in text for sign in ("No space left", "RESOURCE_EXHAUSTED", "Disk quota", "File too large"))
    lines = text.splitlines() or [type(error).__name__]
    reason = "the disk is full" if full else (getattr(error, "strerror", None) or lines[0][:300])
    intact = committed_steps(folder)
    last = f"the checkpoint of step {intact[-1]} is intact" if intact else "no checkpoint was committed"
    return CheckpointError(
        f"{action} in {folder}",
        f"{reason}; {last}",
        f"free some space ({_free_bytes(folder) / 2**20:.0f} MiB are free), or another --out",
    )


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
