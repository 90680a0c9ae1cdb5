"""Checkpoints on disk, without devices: which there are, what they hold, whether they are intact, how two differ."""

import collections
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from meshwright.checkpoint.manifest import manifest_of
from meshwright.checkpoint.steps import MANIFEST, all_steps, committed_steps, partial_steps
from meshwright.checkpoint.tensors import StoredTensors
from meshwright.errors import CheckpointError
from meshwright.hardware.agreement import flatten
from meshwright.runs.run_file import run_to_dict
from meshwright.storage.paths import in_bucket, path_of


@dataclasses.dataclass(frozen=True)
class Listed:
    """One checkpoint of an output folder."""

    step: int
    samples: int | None
    """Samples read; None where the manifest cannot be read."""
    tensors: int
    bytes: int
    """Bytes of the tensors."""
    written: float | None
    """Time of its manifest, in seconds since 1970; None in a bucket, whose driver does not tell."""
    state: str
    """`whole`, or what is wrong with it."""


def find_checkpoints(out: Path) -> Path:
    """Returns the folder of checkpoints of the output folder `out`, or `out` where it is one itself.

    Raises CheckpointError where there are none.
    """
    out = path_of(out)
    folder = out / "checkpoints" if (out / "checkpoints").is_dir() else out
    if not all_steps(folder):
        raise CheckpointError(f"the checkpoints in {out}", "there are none", "the output folder of a run")
    return folder


def list_checkpoints(folder: Path) -> list[Listed]:
    """Returns the checkpoints in a folder, oldest first, those that are not whole included."""
    listed = [
        Listed(step, None, 0, 0, None, "not whole: its writing or copying was cut off")
        for step in partial_steps(folder)
    ]
    for step in committed_steps(folder):
        file = folder / str(step) / MANIFEST
        written = None if in_bucket(file) else file.stat().st_mtime
        try:
            manifest = manifest_of(folder, step)
            size = sum(record.bytes for record in manifest.tensors.values())
            listed.append(Listed(step, manifest.cursor, len(manifest.tensors), size, written, "whole"))
        except CheckpointError as error:
            listed.append(Listed(step, None, 0, 0, written, error.truth))
    return sorted(listed, key=lambda row: row.step)


def verify_checkpoint(tensors: StoredTensors, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Reads every tensor of a checkpoint block by block and compares its fingerprint; returns what is damaged.

    say: called with a line about each tensor.
    """
    records, damaged = tensors.manifest.tensors, []
    for number, (name, record) in enumerate(records.items(), 1):
        verdict = "as saved"
        try:
            collections.deque(tensors.blocks(name), maxlen=0)
        except CheckpointError as error:
            verdict = error.truth
            damaged.append(f"{name}: {verdict}")
        say(f"{number}/{len(records)} {name} {record.dtype}{list(record.shape)}: {verdict}")
    return damaged


def compare_checkpoints(first: StoredTensors, second: StoredTensors) -> tuple[list[str], dict[str, str]]:
    """Returns the fields in which two checkpoints differ, and of each tensor that does how much, by name.

    Tensors with equal fingerprints are equal and are not read; of the others the values are compared, block by block.
    """
    both = [one.manifest for one in (first, second)]
    fields, others = (
        flatten({"step": m.step, "cursor": m.cursor, "data": m.corpus, "run": run_to_dict(m.run)}) for m in both
    )
    changed = [
        f"{name}: {fields.get(name, 'absent')} -> {others.get(name, 'absent')}"
        for name in {**fields, **others}
        if fields.get(name) != others.get(name)
    ]
    names = {**both[0].tensors, **both[1].tensors}
    return changed, {name: text for name in names if (text := _difference(name, first, second)) is not None}


def _difference(name: str, first: StoredTensors, second: StoredTensors) -> str | None:
    a, b = (one.manifest.tensors.get(name) for one in (first, second))
    if a is None or b is None:
        return "only in the second" if a is None else "only in the first"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype}{list(a.shape)} -> {b.dtype}{list(b.shape)}"
    if a.fingerprint == b.fingerprint:
        return None
    changed, largest, squares = 0, 0.0, 0.0
    array, _ = second.open(name)
    for index, one in first.blocks(name):
        other = np.asarray(array[index].read().result())
        difference = np.abs(one.astype(np.float64) - other.astype(np.float64))
        changed += int(np.count_nonzero(one != other))
        largest, squares = max(largest, float(difference.max(initial=0.0))), squares + float(np.sum(difference**2))
    count = math.prod(a.shape)
    root = math.sqrt(squares / max(count, 1))
    return f"{changed:,} of {count:,} elements differ, by at most {largest:.3g}, root mean square {root:.3g}"
