"""Manifest: the description of a checkpoint, stored beside its tensors as JSON."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from meshwright.config import Run
from meshwright.errors import CheckpointError
from meshwright.runs.run_file import run_from_dict, run_to_dict
from meshwright.sharding.params import Tree, named_leaves

_FORMAT = 1


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

    def to_dict(self) -> dict[str, Any]:
        """Returns the manifest as JSON-compatible values, with the versions of the libraries."""
        return {
            "format": _FORMAT,
            "step": self.step,
            "cursor": self.cursor,
            "data": self.data,
            "run": run_to_dict(self.run),
            "versions": {"jax": jax.__version__, "orbax": ocp.__version__, "numpy": np.__version__},
            "tensors": {
                name: {"shape": list(t.shape), "dtype": t.dtype, "fingerprint": list(t.fingerprint)}
                for name, t in self.tensors.items()
            },
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Manifest":
        """Reads what `to_dict` returned. Raises KeyError, TypeError, ValueError or ConfigError for anything else."""
        tensors = {name: _read_record(record) for name, record in data["tensors"].items()}
        return cls(int(data["step"]), int(data["cursor"]), run_from_dict(data["run"]), tensors, data.get("data"))


def _read_record(record: dict[str, Any]) -> TensorRecord:
    first, second = record["fingerprint"]
    return TensorRecord(tuple(record["shape"]), str(record["dtype"]), (int(first), int(second)))


def check_tensors(manifest: Manifest, expected: dict[str, Any], params: Tree) -> None:
    """Raises CheckpointError naming the first of the `expected` tensors whose name, shape or type differs.

    Tables that differ only in the padding of the vocabulary agree. expected: arrays or ShapeDtypeStructs by dotted
    name, with one row per layer. params: descriptions of the model's parameters.
    """
    padded = {name: p.rows for name, p in named_leaves(params).items() if p.rows is not None}
    # Parameters first: a parameter that differs makes its optimizer state differ too.
    for name, x in sorted(expected.items(), key=lambda item: not item[0].startswith("params.")):
        record = manifest.tensors.get(name)
        if record is None:
            raise _mismatch(manifest, f"the model has a tensor {name!r}, and the checkpoint does not")
        rows = next((rows for param, rows in padded.items() if name.endswith(f".{param}")), None)
        other_padding = (
            rows is not None and record.shape[1:] == x.shape[1:] and min(record.shape[0], x.shape[0]) >= rows
        )
        if record.dtype != str(x.dtype) or (record.shape != x.shape and not other_padding):
            raise _mismatch(
                manifest,
                f"{name!r} is {record.dtype}{list(record.shape)} in the checkpoint and {x.dtype}{list(x.shape)} in "
                "the model",
            )


def check_no_other_tensors(manifest: Manifest, expected: Iterable[str]) -> None:
    """Raises CheckpointError naming the first tensor of the checkpoint that is not `expected`."""
    expected = set(expected)
    other = next((name for name in manifest.tensors if name not in expected), None)
    if other is not None:
        raise _mismatch(manifest, f"the checkpoint has a tensor {other!r}, and the model does not")


def _mismatch(manifest: Manifest, truth: str) -> CheckpointError:
    fix = "the recipe that wrote this checkpoint, or another folder"
    return CheckpointError(f"the checkpoint of step {manifest.step} for this model", truth, fix)
