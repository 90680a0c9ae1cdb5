"""Manifest: the description of a checkpoint, stored beside its tensors as JSON, and which
checkpoints a folder has."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import msgspec
import numpy as np

from meshwright.checkpoint.steps import MANIFEST, committed_steps, partial_steps
from meshwright.documents import LARGE, check_inside, read_json, seal
from meshwright.errors import CheckpointError, DamagedError, by_class, reason_of
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_from_dict, run_to_dict
from meshwright.storage.attempts import attempt
from meshwright.storage.paths import in_bucket
from meshwright.storage.writing import make_folder, write_atomically

_FORMAT = 2
"""Version of the manifest."""


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """Shape, type and fingerprint of a tensor."""

    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    dtype: str
    fingerprint: tuple[int, int]

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


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
    norms: tuple[float, ...] = ()
    """Gradient norms of the last steps, of which a spike is a multiple (`Faults.spike`)."""
    identity: str = ""
    """Identity of the run, made when it began; "" of checkpoints that have none."""
    began: tuple[int, int] | None = None
    """Step and cursor from which `cursor` counts: of the start that wrote the checkpoint,
    or to which it returned."""

    def write(self, step_folder: Path) -> None:
        """Writes the manifest into the folder of a checkpoint,
        whose tensors are written: this completes it."""
        file = step_folder / MANIFEST
        make_folder(file.parent.parent, file.parent.name)
        write_atomically(file, json.dumps(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """Returns the manifest as JSON-compatible values, with the versions of the libraries."""
        return seal(
            {
                "format": _FORMAT,
                "versions": {"jax": jax.__version__, "numpy": np.__version__},
                **vars(self),
                "run": run_to_dict(self.run),
                "tensors": {
                    name: dataclasses.asdict(tensor) for name, tensor in self.tensors.items()
                },
            }
        )


def read_document(step_folder: Path) -> dict[str, Any]:
    """Reads the JSON of a manifest, and looks for links that leave its folder.
    Raises OSError, ValueError, KeyError."""
    check_inside(step_folder.parent, [step_folder])
    if not in_bucket(step_folder):  # a bucket has no links
        attempt(lambda: _check_links(step_folder))
    data: dict[str, Any] = read_json(step_folder / MANIFEST, LARGE)
    found = data["format"]
    if found != _FORMAT:
        raise ValueError(f"it is of format {found}, and this version reads {_FORMAT}")
    if seal(data) != data:
        raise ValueError("it is not what was saved: its checksum differs")
    return data


def _parse(data: dict[str, Any], step_folder: Path) -> Manifest:
    known = {
        field.name: field.type for field in dataclasses.fields(Manifest) if field.name != "run"
    }
    fields: Any = {
        name: msgspec.convert(data[name], kind) for name, kind in known.items() if name in data
    }
    return Manifest(run=run_from_dict(data["run"], str(step_folder / MANIFEST)), **fields)


def _check_links(folder: Path) -> None:
    """Raises ValueError naming a link in `folder` that leaves it,
    or an entry that is neither file nor folder."""
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():  # known from the listing, without a request for each file
                    check_inside(folder, [path])
                elif entry.is_dir():
                    pending.append(path)
                elif not entry.is_file():
                    raise ValueError(f"{path.relative_to(folder)} is neither a file nor a folder")


Send = Callable[[Callable[[], Any]], Any]
"""Calls a function and returns its JSON; with several processes, in process 0 for all
(`answer_of_the_first`)."""


def manifest_of(folder: Path, step: int | None, send: Send = lambda read: read()) -> Manifest:
    """Returns the manifest of a checkpoint in the folder `folder`: that of `step`,
    or of the last complete one.

    Raises CheckpointError where there is none, DamagedError where it is not what was written, and
    UnavailableError where this host cannot read it for now.
    """

    def read() -> list[Any]:
        taken = steps_to_take(folder, step)[0]
        with _damage_explained(folder, taken):
            return [taken, read_document(folder / str(taken))]

    taken, document = send(read)
    with _damage_explained(folder, taken):
        return _parse(document, folder / str(taken))


def steps_to_take(folder: Path, step: int | None) -> list[int]:
    """Returns the complete checkpoints in a folder, newest first; `step` alone where that is given.

    One that is newer and not complete is left out with a line on standard error.
    Raises CheckpointError.
    """
    steps = committed_steps(folder)
    partial = partial_steps(folder)
    if step in partial:
        raise damaged(folder, step, "it is not whole: its writing or copying was cut off", None)
    if not steps:
        raise CheckpointError(
            f"a checkpoint in {folder}", "none was committed there", "another folder"
        )
    if step is None:
        for newer in (s for s in partial if s > steps[-1]):
            print(
                f"{folder / str(newer)}: left out, it is not whole; step {steps[-1]} is taken",
                file=sys.stderr,
            )
    elif step not in steps:
        truth = "the folder has those of steps " + ", ".join(map(str, steps))
        raise CheckpointError(f"the checkpoint of step {step}", truth, f"--at {steps[-1]}")
    return steps[::-1] if step is None else [step]


@contextlib.contextmanager
def _damage_explained(folder: Path, step: int) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        refusal = damaged(folder, step, "its manifest cannot be read", error)
        raise by_class(error, refusal) from error


def damaged(folder: Path, step: int, damage: str, error: Exception | None) -> DamagedError:
    """Returns the error for a checkpoint that cannot be read, with the one before it."""
    earlier = [s for s in committed_steps(folder) if s < step]
    if error is not None:
        damage += f" ({reason_of(error)})"
    fix = "no earlier checkpoint exists: start a new run"
    if earlier:
        fix = f"the one before it: --at {earlier[-1]}"
    return DamagedError(f"the checkpoint of step {step} in {folder}", damage, fix)
