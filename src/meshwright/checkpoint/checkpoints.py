"""Checkpoints of a training run: written by Orbax or in shards, committed atomically, verified by fingerprints.

Orbax restores a flipped bit, a zeroed block or another dtype without an error. So the fingerprint of every tensor is
stored in the checkpoint's manifest and compared after the restore. Fingerprints do not depend on the layout: a
checkpoint written on one mesh is verified on another, and each device reads and hashes only its own shards.
"""

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, Literal, Protocol

import jax

from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.checkpoint.orbax_reports import orbax_reports_suppressed
from meshwright.errors import StorageError
from meshwright.sharding.params import named_leaves
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State
from meshwright.storage.paths import path_of, store_of

Reach = Literal["shared", "process"]


class Writer(Protocol):
    """A folder of checkpoints as its kind of store writes and reads it: `OrbaxWriter`, or `ShardWriter`."""

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""

    def save(self, step: int, tensors: dict[str, jax.Array], manifest: dict[str, Any]) -> None:
        """Starts to write tensors and manifest, and returns as soon as the tensors' buffers may be donated."""

    def restore(self, step: int, abstract: dict[str, Any], other_shape: Set[str]) -> dict[str, jax.Array]:
        """Returns tensors as `abstract` describes them. other_shape: those that are stored in another shape."""

    def wait(self) -> None:
        """Waits until the last save is committed; raises its error."""

    def failed(self) -> bool:
        """Whether the save in progress has failed; `wait` then raises its error at once."""

    def close(self) -> None:
        """Waits, and releases threads."""

    def abandon(self) -> None:
        """Gives up a save that failed."""


class Checkpoints:
    """Checkpoints in one folder. Close it, or use it in a `with` statement, so that the last one is committed."""

    def __init__(self, folder: Path, *, max_to_keep: int | None, reach: Reach = "shared"):
        """Opens `folder`. max_to_keep: checkpoints to keep when another is saved; None opens it for reading alone.

        reach: `process` for a folder of this process alone, which has its shards (`trainer.tiers`).
        """
        self.folder = path_of(folder).absolute()
        with self._explained("opening checkpoints"):
            if reach == "shared" and store_of(self.folder).renames:
                from meshwright.checkpoint.orbax_writer import OrbaxWriter  # a bucket needs none of it

                self._writer: Writer = OrbaxWriter(self.folder, max_to_keep)
            else:
                from meshwright.checkpoint.shard_writer import ShardWriter  # most runs are on file systems

                self._writer = ShardWriter(self.folder, max_to_keep, reach)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""
        return self._writer.steps()

    def save(
        self,
        state: State,
        device_run: DeviceRun,
        *,
        step: int,
        cursor: int,
        skipped: tuple[tuple[int, int], ...] = (),
        data: Any = None,
        corpus: dict[str, Any] | None = None,
    ) -> None:
        """Starts to write `state` and returns as soon as its buffers may be donated.

        cursor: global index of the next training sample.  skipped, data, corpus: as of `Manifest`.
        Raises CheckpointError where this save or the one before it fails.
        """
        tensors = named_tensors(state)
        permuted: dict[str, jax.Array] = {}
        if rows_permuted(device_run):
            from meshwright.checkpoint.layer_order import to_layer_order  # loaded for uneven pipelines alone

            tensors, permuted = to_layer_order(tensors, device_run.params, lambda x: fingerprints({"": x})[""])
        in_order = {name: x for name, x in tensors.items() if name not in permuted}
        hashes = jax.device_get(fingerprints(in_order) | permuted)
        records = {
            name: TensorRecord(x.shape, str(x.dtype), (int(hashes[name][0]), int(hashes[name][1])))
            for name, x in tensors.items()
        }
        manifest = Manifest(step, cursor, device_run.run, records, data, corpus, skipped)
        with self._explained(f"saving step {step}"):
            self._writer.save(step, tensors, manifest.to_dict())

    def save_locally(self, state: State, device_run: DeviceRun, **place: Any) -> None:
        """Writes to the hosts' own disks where the run has such checkpoints (`trainer.tiers`)."""

    def forget_local(self, after: int = -1) -> None:
        """Deletes the checkpoints on the hosts' own disks where the run has such."""

    def wait(self) -> None:
        """Waits until every save is committed. Raises CheckpointError where one could not be written."""
        with self._explained("saving"):
            self._writer.wait()

    def check(self) -> None:
        """Raises CheckpointError where a save in progress has failed on this host; the others wait for it."""
        if self._writer.failed():
            self.wait()

    def close(self) -> None:
        """Waits like `wait` and releases the writer's threads."""
        with self._explained("saving"):
            self._writer.close()

    def manifest(self, step: int | None = None) -> Manifest:
        """Returns the manifest of the checkpoint of `step`, or of the last whole one; no device is needed."""
        from meshwright.checkpoint.restore import manifest_of  # a new run restores nothing

        return manifest_of(self.folder, step)

    def restore(self, device_run: DeviceRun, step: int | None = None) -> tuple[State, Manifest]:
        """Returns the state of `step`, or of the last whole checkpoint, in the shardings of `device_run`, verified.

        Raises CheckpointError naming the first tensor that differs from the model's in shape or type, or is damaged.
        """
        from meshwright.checkpoint.restore import restore_state

        manifest = self.manifest(step)
        return restore_state(self._writer, self.folder, manifest, device_run), manifest

    def restore_params(self, device_run: DeviceRun, step: int | None = None) -> tuple[Any, Manifest]:
        """Returns the verified parameters of `step`, or of the last whole checkpoint, without the optimizer state.

        A checkpoint of another type is converted after it is verified.
        """
        from meshwright.checkpoint.restore import restore_params

        manifest = self.manifest(step)
        return restore_params(self._writer, self.folder, manifest, device_run), manifest

    def set_aside(self, after: int) -> None:
        """Moves checkpoints newer than `after`, whole or not, into the folder `set-aside`: training continues there."""
        from meshwright.checkpoint.restore import set_aside

        set_aside(self.folder, after)
        self._writer.steps()

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Raises an error of Orbax or the file system as one that names the folder and the last intact checkpoint."""
        with orbax_reports_suppressed():
            try:
                yield
            except StorageError:
                raise
            except Exception as error:
                from meshwright.checkpoint.late_reports import drain_reports
                from meshwright.checkpoint.write_errors import write_error

                drain_reports(error)
                self._writer.abandon()
                raise write_error(action, self.folder, error) from error


def saved_fields(state: State) -> dict[str, Any]:
    """Fields of the state that a checkpoint has; `healthy` is not saved, because only a healthy state is."""
    fields = {"step": state.step, "params": state.params, "optimizer": state.optimizer}
    return fields | ({"variables": state.variables} if state.variables else {})


def named_tensors(state: State) -> dict[str, Any]:
    """Returns the tensors that a checkpoint of `state` has, by dotted name."""
    return named_leaves(saved_fields(state))


def check_room(folder: Path, device_run: DeviceRun, max_to_keep: int) -> None:
    """Raises CheckpointError (of a bucket: StorageError) where `folder` cannot take `max_to_keep` + 1 checkpoints."""
    if not store_of(folder).limited:
        from meshwright.storage.bucket import check_bucket

        check_bucket(folder)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        from meshwright.checkpoint.write_errors import unwritable

        raise unwritable(folder, error) from error
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in named_tensors(device_run.abstract).values())
    if (free := shutil.disk_usage(folder).free) < size * (max_to_keep + 1):
        from meshwright.checkpoint.write_errors import no_room

        raise no_room(folder, size, max_to_keep, free)


def rows_permuted(device_run: DeviceRun) -> bool:
    """Whether rows of stacked parameters are not in the order of the layers: uneven or interleaved pipelines."""
    return any(p.order is not None for p in named_leaves(device_run.params).values())
