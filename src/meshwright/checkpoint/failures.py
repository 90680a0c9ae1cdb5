"""Failures of checkpoints as errors that name the folder, its free space, and the last checkpoint that is intact."""

import shutil
from pathlib import Path

from meshwright.errors import CheckpointError


def write_error(action: str, folder: Path, error: Exception, intact: list[int]) -> CheckpointError:
    """Returns the error for a save that failed. intact: committed steps, oldest first."""
    text = str(error)
    full = any(sign in text for sign in ("No space left", "RESOURCE_EXHAUSTED", "Disk quota", "File too large"))
    lines = text.splitlines() or [type(error).__name__]
    reason = "the disk is full" if full else (getattr(error, "strerror", None) or lines[0][:300])
    last = f"the checkpoint of step {intact[-1]} is intact" if intact else "no checkpoint was committed"
    return CheckpointError(
        f"{action} in {folder}",
        f"{reason}; {last}",
        f"free some space ({_free_bytes(folder) / 2**20:.0f} MiB are free), or another --out",
    )


def damaged(folder: Path, step: int, earlier: list[int], damage: str, error: Exception | None) -> CheckpointError:
    """Returns the error for a checkpoint that cannot be read. earlier: committed steps before it, oldest first."""
    detail = f" ({type(error).__name__}: {str(error).splitlines()[0][:160]})" if error and str(error) else ""
    return CheckpointError(
        f"the checkpoint of step {step} in {folder}",
        damage + detail,
        f"the one before it: --at {earlier[-1]}" if earlier else "no earlier checkpoint exists: start a new run",
    )


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
