"""Manifest: the description of a checkpoint, stored beside its tensors as JSON."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshwright.runs.run import Run
from meshwright.runs.run_file import run_to_dict

FORMAT = 2
"""Version of the manifest. Checkpoints of format 1 have no checksum of the manifest and no fingerprint of the data."""


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """Shape, type and fingerprint of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    fingerprint: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Step, data position, run and tensors of a checkpoint."""

    step: int
    """Steps taken."""
    cursor: int
    """Global index of the next training sample."""
    run: Run
    """Run that wrote the checkpoint."""
    tensors: dict[str, TensorRecord]
    """Tensors by dotted name, with one row per layer."""
    data: Any = None
    """Position of data that is not read by `cursor`: an iterator's own state."""
    corpus: dict[str, Any] | None = None
    """Fingerprint of the text that the run reads and of its order; None where it reads none."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Samples that the run leaves out: global index of the first, and their number."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the manifest as JSON-compatible values, with the versions of the libraries."""
        document = {
            "format": FORMAT,
            "step": self.step,
            "cursor": self.cursor,
            "run": run_to_dict(self.run),
            "versions": {"jax": jax.__version__, "numpy": np.__version__},
            "tensors": {
                name: {"shape": list(t.shape), "dtype": t.dtype, "fingerprint": list(t.fingerprint)}
                for name, t in self.tensors.items()
            },
            "data": self.data,
            "corpus": self.corpus,
            "skipped": [list(part) for part in self.skipped],
        }
        return seal(document)


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a document with a checksum of everything else in it."""
    rest = {name: value for name, value in document.items() if name != "checksum"}
    return {**rest, "checksum": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}
