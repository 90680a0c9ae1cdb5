"""Checkpoints of a training run: written by Orbax, committed atomically, verified by fingerprints.

Orbax restores a flipped bit, a zeroed block or another dtype without an error. So the fingerprint of every tensor is
stored in the checkpoint's manifest and compared after the restore. Fingerprints do not depend on the layout: a
checkpoint written on one mesh is verified on another, and each device reads and hashes only its own shards.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.checkpoint.orbax_reports import orbax_reports_suppressed
from meshwright.errors import CheckpointError
from meshwright.sharding.params import named_leaves
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State


class Checkpoints:
    """Checkpoints in one folder. Close it, or use it in a `with` statement, so that the last one is committed."""

    def __init__(self, folder: Path, *, max_to_keep: int | None):
        """Opens `folder`. max_to_keep: checkpoints to keep when another is saved; None opens it for reading alone."""
        self.folder = folder.absolute()
        # Suppresses Orbax's reports while a commit is in progress.
        self._commit = contextlib.ExitStack()
        with self._explained("opening checkpoints"):
            # One that reads leaves alone what a run beside it is writing.
            options = ocp.CheckpointManagerOptions(read_only=True)
            if max_to_keep is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                options = ocp.CheckpointManagerOptions(
                    max_to_keep=max_to_keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
                )
            self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""
        self._manager.reload()
        return sorted(self._manager.all_steps())

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
            self._wait_for_commit()
            self._commit.enter_context(orbax_reports_suppressed())
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(tensors), manifest=ocp.args.JsonSave(manifest.to_dict())
                ),
                force=True,
            )

    def wait(self) -> None:
        """Waits until every save is committed. Raises CheckpointError where one could not be written."""
        with self._explained("saving"):
            self._wait_for_commit()

    def close(self) -> None:
        """Waits like `wait` and releases Orbax's threads."""
        with self._explained("saving"):
            self._manager.close()
            self._commit.close()

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
        return restore_state(self._manager, self.folder, manifest, device_run), manifest

    def restore_params(self, device_run: DeviceRun, step: int | None = None) -> tuple[Any, Manifest]:
        """Returns the verified parameters of `step`, or of the last whole checkpoint, without the optimizer state.

        A checkpoint of another type is converted after it is verified.
        """
        from meshwright.checkpoint.restore import restore_params

        manifest = self.manifest(step)
        return restore_params(self._manager, self.folder, manifest, device_run), manifest

    def set_aside(self, after: int) -> None:
        """Moves checkpoints newer than `after`, whole or not, into the folder `set-aside`: training continues there."""
        from meshwright.checkpoint.restore import set_aside

        set_aside(self.folder, after)
        self._manager.reload()

    def _wait_for_commit(self) -> None:
        self._manager.wait_until_finished()
        self._commit.close()

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Raises an error of Orbax or the file system as one that names the folder and the last intact checkpoint."""
        with orbax_reports_suppressed():
            try:
                yield
            except Exception as error:
                from meshwright.checkpoint.late_reports import drain_reports
                from meshwright.checkpoint.write_errors import write_error

                drain_reports(error)
                self._commit.close()

                raise write_error(action, self.folder, error) from error


def saved_fields(state: State) -> dict[str, Any]:
    """Fields of the state that a checkpoint has; `healthy` is not saved, because only a healthy state is."""
    fields = {"step": state.step, "params": state.params, "optimizer": state.optimizer}
    return fields | ({"variables": state.variables} if state.variables else {})


def named_tensors(state: State) -> dict[str, Any]:
    """Returns the tensors that a checkpoint of `state` has, by dotted name."""
    return named_leaves(saved_fields(state))


def committed_steps(folder: Path) -> list[int]:
    """Returns the steps with a whole checkpoint in `folder`, oldest first; no device is needed."""
    return sorted(set(all_steps(folder)) - set(partial_steps(folder)))


def partial_steps(folder: Path) -> list[int]:
    """Returns the steps whose checkpoint lacks what every one has, oldest first: a copy that was cut off."""
    names = ("manifest/metadata", "state/_METADATA")
    return sorted(step for step in all_steps(folder) if not all(_has(folder / str(step) / name) for name in names))


def all_steps(folder: Path) -> list[int]:
    """Returns the steps that have a folder, whole or not, in no order."""
    return [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []


def _has(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


def check_disk_space(folder: Path, device_run: DeviceRun, max_to_keep: int) -> None:
    """Raises CheckpointError where `folder` cannot be written or has no space for `max_to_keep` + 1 checkpoints."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"output folder {folder}", f"it cannot be written: {error.strerror or error}", "another --out"
        ) from error
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in named_tensors(device_run.abstract).values())
    free = shutil.disk_usage(folder).free
    if free < size * (max_to_keep + 1):
        raise CheckpointError(
            f"output folder {folder}",
            f"a checkpoint takes up to {size / 2**20:.1f} MiB, {max_to_keep} are kept while another is written, "
            f"and {free / 2**20:.1f} MiB are free",
            "a folder with more space, or a smaller --training.max-to-keep",
        )


def rows_permuted(device_run: DeviceRun) -> bool:
    """Whether rows of stacked parameters are not in the order of the layers: uneven or interleaved pipelines."""
    return any(p.order is not None for p in named_leaves(device_run.params).values())
