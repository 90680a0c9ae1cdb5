"""Checkpoints on disk, without devices: which there are, and whether they are intact."""

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint.blocks import StoredTensors
from meshwright.checkpoint.manifest import manifest_of
from meshwright.checkpoint.steps import MANIFEST, STARTED, all_steps, committed_steps, partial_steps
from meshwright.errors import CheckpointError
from meshwright.storage.paths import in_bucket, path_of


@dataclasses.dataclass(frozen=True)
class Listed:
    """One checkpoint of an output folder."""

    step: int
    samples: int | None
    """Samples read; None where the manifest cannot be read."""
    tensors: int
    bytes: int | None
    """Bytes of the tensors; None where the manifest cannot be read."""
    written: float | None
    """Time of its manifest, in a bucket of its beginning, in seconds since 1970;
    None where that is unknown."""
    state: str
    """`whole`, or what is wrong with it."""


def find_checkpoints(out: Path) -> Path:
    """Returns the folder of checkpoints of the output folder `out`,
    or `out` where it is one itself.

    Raises CheckpointError where there are none.
    """
    out = path_of(out)
    folder = out / "checkpoints" if (out / "checkpoints").is_dir() else out
    if not all_steps(folder):
        raise CheckpointError(
            f"the checkpoints in {out}", "there are none", "the output folder of a run"
        )
    return folder


def list_checkpoints(folder: Path) -> list[Listed]:
    """Returns the checkpoints in a folder, oldest first, those that are not whole included."""
    listed = [
        Listed(step, None, 0, None, None, "not whole: its writing or copying was cut off")
        for step in partial_steps(folder)
    ]
    for step in committed_steps(folder):
        file = folder / str(step) / MANIFEST
        written = (
            _begun_at(folder / STARTED / str(step)) if in_bucket(file) else file.stat().st_mtime
        )
        try:
            manifest = manifest_of(folder, step)
            size = sum(record.bytes for record in manifest.tensors.values())
            listed.append(
                Listed(step, manifest.cursor, len(manifest.tensors), size, written, "whole")
            )
        except CheckpointError as error:
            listed.append(Listed(step, None, 0, None, written, error.truth))
    return sorted(listed, key=lambda row: row.step)


def _begun_at(file: Path) -> float | None:
    """Returns the time in a file of `STARTED`: a bucket's driver does not tell that
    of an object."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None


def verify_checkpoint(
    tensors: StoredTensors, say: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Reads every tensor of a checkpoint block by block and compares its fingerprint;
    returns what is damaged.

    say: called with a line about each tensor.
    """
    records = tensors.manifest.tensors
    damaged: list[str] = []
    for number, (name, record) in enumerate(records.items(), 1):
        verdict = "as saved"
        try:
            collections.deque(tensors.blocks(name), maxlen=0)
        except CheckpointError as error:
            verdict = error.truth
            damaged.append(f"{name}: {verdict}")
        say(f"{number}/{len(records)} {name} {record.dtype}{list(record.shape)}: {verdict}")
    return damaged
