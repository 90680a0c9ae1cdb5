"""Errors of a save: what the file system refused, and which checkpoint is intact."""

import contextlib
import math
import shutil
from pathlib import Path

import jax.numpy as jnp

from meshwright.checkpoint.restore import manifest_of
from meshwright.checkpoint.steps import committed_steps
from meshwright.errors import CheckpointError
from meshwright.storage.paths import store_of

_REASONS = {
    "File too large": "a file would be larger than `ulimit -f` or the file system allows",
    "Disk quota": "the disk quota is used up",
    "No space left": "the disk is full",
    "RESOURCE_EXHAUSTED": "the disk is full",
}
"""Reasons for which a file system takes no more bytes, by text of its error; the first that is found."""


def write_error(action: str, folder: Path, error: Exception) -> CheckpointError:
    """Returns the error of an operation that the store refused. action: what was done."""
    if store_of(folder).limited and not folder.is_dir():
        truth = "the folder is gone: it was removed, or its disk unmounted, while the run wrote into it"
        return CheckpointError(f"{action} in {folder}", truth, "another --out, or the same with its folder there")
    text = str(error)
    lines = text.splitlines() or [type(error).__name__]
    known = [reason for sign, reason in _REASONS.items() if sign in text]
    reason = known[0] if known else (getattr(error, "strerror", None) or lines[0][:300])
    intact = committed_steps(folder)
    last = f"the checkpoint of step {intact[-1]} is intact" if intact else "no checkpoint was committed"
    if intact and known:
        with contextlib.suppress(CheckpointError):
            last += f" and takes {_bytes_of(folder, intact[-1]) / 2**20:.1f} MiB"
    return CheckpointError(
        f"{action} in {folder}",
        f"{reason}; {last}",
        f"free some space ({_free_bytes(folder) / 2**20:.1f} MiB are free), or another --out"
        if store_of(folder).limited
        else "another --out",
    )


def _bytes_of(folder: Path, step: int) -> int:
    """Bytes of the tensors of a checkpoint, by its manifest."""
    records = manifest_of(folder, step).tensors.values()
    return sum(math.prod(record.shape) * jnp.dtype(record.dtype).itemsize for record in records)


def unwritable(folder: Path, error: OSError) -> CheckpointError:
    """Returns the error of an output folder that cannot be written."""
    reason = error.strerror or str(error)
    if isinstance(error, FileExistsError):
        reason = "a file, or a link that leads nowhere, has that name"
    return CheckpointError(f"output folder {folder}", f"it cannot be written: {reason}", "another --out")


def no_room(folder: Path, size: int, max_to_keep: int, free: int) -> CheckpointError:
    """Returns the error of an output folder without space for its checkpoints. size, free: in bytes."""
    return CheckpointError(
        f"output folder {folder}",
        f"a checkpoint takes up to {size / 2**20:.1f} MiB, {max_to_keep} are kept while another is written, "
        f"and {free / 2**20:.1f} MiB are free",
        "a folder with more space, or a smaller --training.max-to-keep",
    )


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
