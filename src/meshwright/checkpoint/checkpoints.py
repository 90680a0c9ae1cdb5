"""Checkpoints of a training run: written in the background, committed atomically, verified by fingerprints.

The fingerprint of every tensor is stored in the checkpoint's manifest and compared after the restore. Fingerprints do
not depend on the layout: a checkpoint written on one mesh is verified on another, and each device reads and hashes only
its own shards.
"""

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.layer_order import abstract_in_layer_order, permuted_in_layer_order, permuted_params
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.checkpoint.restore import manifest_of, named_tensors, restore_params, restore_state, set_aside
from meshwright.checkpoint.steps import committed_steps
from meshwright.checkpoint.write_errors import no_room, unwritable, write_error
from meshwright.checkpoint.writer import Reach, ShardWriter, host_shards
from meshwright.errors import MeshwrightError
from meshwright.step.device_run import DeviceRun, State
from meshwright.storage.bucket import check_bucket
from meshwright.storage.paths import path_of, store_of


class Checkpoints:
    """Checkpoints in one folder. Close it, or use it in a `with` statement, so that the last one is committed."""

    def __init__(self, folder: Path, *, max_to_keep: int | None, reach: Reach = "shared"):
        """Opens `folder`. max_to_keep: checkpoints to keep when another is saved; None opens it for reading alone.

        reach: `process` for a folder of this process alone, which has its shards (`trainer.tiers`).
        """
        self.folder = path_of(folder).absolute()
        with self._explained("opening checkpoints"):
            self._writer = ShardWriter(self.folder, max_to_keep, reach)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""
        return committed_steps(self.folder)

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
        self.wait()  # the host's memory has the shards of one checkpoint at a time
        tensors, owned = named_tensors(state), self._writer.reach == "shared"
        permuted = permuted_params(tensors, device_run.params)
        in_order = {name: x for name, x in tensors.items() if name not in permuted}
        hashes = jax.device_get(fingerprints(in_order))
        shards = host_shards(in_order, owned=owned)
        # One tensor after another is on the devices in the order of the layers, beside the state.
        for name, x in permuted_in_layer_order(tensors, device_run.params):
            hashes |= jax.device_get(fingerprints({name: x}))
            shards |= host_shards({name: x}, owned=owned)
        abstract = abstract_in_layer_order(tensors, device_run.params)
        records = {
            name: TensorRecord(x.shape, str(x.dtype), (int(hashes[name][0]), int(hashes[name][1])))
            for name, x in abstract.items()
        }
        manifest = Manifest(step, cursor, device_run.run, records, data, corpus, skipped)
        with self._explained(f"saving step {step}"):
            self._writer.save(step, abstract, shards, manifest.to_dict())

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
        return manifest_of(self.folder, step)

    def restore(self, device_run: DeviceRun, step: int | None = None) -> tuple[State, Manifest]:
        """Returns the state of `step`, or of the last whole checkpoint, in the shardings of `device_run`, verified.

        Raises CheckpointError naming the first tensor that differs from the model's in shape or type, or is damaged.
        """
        manifest = self.manifest(step)
        return restore_state(self._writer, self.folder, manifest, device_run), manifest

    def restore_params(self, device_run: DeviceRun, step: int | None = None) -> tuple[Any, Manifest]:
        """Returns the verified parameters of `step`, or of the last whole checkpoint, without the optimizer state.

        A checkpoint of another type is converted after it is verified.
        """
        manifest = self.manifest(step)
        return restore_params(self._writer, self.folder, manifest, device_run), manifest

    def set_aside(self, after: int) -> None:
        """Moves checkpoints newer than `after`, whole or not, into the folder `set-aside`: training continues there."""
        set_aside(self.folder, after)

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Raises an error of the store as one that names the folder and the last intact checkpoint."""
        try:
            yield
        except MeshwrightError:
            raise
        except Exception as error:
            raise write_error(action, self.folder, error) from error


def check_room(folder: Path, device_run: DeviceRun, max_to_keep: int) -> None:
    """Raises CheckpointError (of a bucket: StorageError) where `folder` cannot take `max_to_keep` + 1 checkpoints."""
    if not store_of(folder).limited:
        check_bucket(folder)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise unwritable(folder, error) from error
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in named_tensors(device_run.abstract).values())
    if (free := shutil.disk_usage(folder).free) < size * (max_to_keep + 1):
        raise no_room(folder, size, max_to_keep, free)
