"""Checkpoints of a training run: written by Orbax, committed atomically, verified by fingerprints.

Orbax restores a flipped bit, a zeroed block or another dtype without an error. So the fingerprint of every tensor is
stored in the checkpoint's manifest and compared after the restore. Fingerprints do not depend on the layout: a
checkpoint written on one mesh is verified on another, and each device reads and hashes only its own shards.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.manifest import Manifest, TensorRecord, check_no_other_tensors, check_tensors
from meshwright.checkpoint.orbax_reports import drain_reports, orbax_reports_suppressed
from meshwright.errors import CheckpointError
from meshwright.sharding.params import named_leaves
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State

_FLOATING = ("float32", "bfloat16")


class Checkpoints:
    """Checkpoints in one folder. Close it, or use it in a `with` statement, so that the last one is committed."""

    def __init__(self, folder: Path, *, max_to_keep: int):
        self.folder = folder.absolute()
        # Suppresses Orbax's reports while a commit is in progress.
        self._commit = contextlib.ExitStack()
        with self._explained("opening checkpoints"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=max_to_keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
                ),
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""
        self._manager.reload()
        return sorted(self._manager.all_steps())

    def save(self, state: State, device_run: DeviceRun, *, step: int, cursor: int, data: Any = None) -> None:
        """Starts to write `state` and returns as soon as its buffers may be donated.

        cursor: global index of the next training sample.  data: position of the data, as JSON. Raises CheckpointError
        where this save or the one before it fails.
        """
        tensors = _named_tensors(state)
        permuted: dict[str, jax.Array] = {}
        if _rows_permuted(device_run):
            from meshwright.checkpoint.layer_order import to_layer_order  # loaded for uneven pipelines alone

            tensors, permuted = to_layer_order(tensors, device_run.params, lambda x: fingerprints({"": x})[""])
        in_order = {name: x for name, x in tensors.items() if name not in permuted}
        hashes = jax.device_get(fingerprints(in_order) | permuted)
        records = {
            name: TensorRecord(x.shape, str(x.dtype), (int(hashes[name][0]), int(hashes[name][1])))
            for name, x in tensors.items()
        }
        manifest = Manifest(step, cursor, device_run.run, records, data)
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
        """Returns the manifest of the checkpoint of `step`, or of the last one; no device is needed."""
        step = self._choose(step)
        try:
            file = self.folder / str(step) / "manifest" / "metadata"
            return Manifest.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(step, "its manifest cannot be read", error) from error

    def restore(self, device_run: DeviceRun, step: int | None = None) -> tuple[State, Manifest]:
        """Returns the state of `step`, or of the last checkpoint, in the shardings of `device_run`, verified.

        Raises CheckpointError naming the first tensor that differs from the model's in shape or type, or is damaged.
        """
        manifest = self.manifest(step)
        expected = _named_tensors(device_run.abstract)
        if "step" not in manifest.tensors:
            truth = "it has weights alone, and no optimizer state: they were converted"
            fix = f"--init-from {self.folder.parent} and another --out, which starts at step 0"
            raise CheckpointError(f"resuming from {self.folder}", truth, fix)
        tensors = self._read_tensors(manifest, expected, device_run, check_no_other_tensors)
        healthy = jax.device_put(np.ones((), np.bool_), device_run.abstract.healthy.sharding)
        tree = jax.tree.unflatten(jax.tree.structure(_saved_fields(device_run.abstract)), list(tensors.values()))
        return State(healthy=healthy, **tree), manifest

    def restore_params(self, device_run: DeviceRun, step: int | None = None) -> tuple[Any, Manifest]:
        """Returns the verified parameters of `step`, or of the last checkpoint, without the optimizer state.

        A checkpoint of another type is converted after it is verified.
        """
        manifest = self.manifest(step)
        wanted = {name: x for name, x in _named_tensors(device_run.abstract).items() if name.startswith("params.")}
        types = {name: np.dtype(t.dtype) for name, t in manifest.tensors.items() if t.dtype in _FLOATING}
        expected = {name: x.update(dtype=types.get(name, x.dtype)) for name, x in wanted.items()}
        tensors = self._read_tensors(manifest, expected, device_run)
        converted = [x.astype(wanted[name].dtype) for name, x in tensors.items()]
        return jax.tree.unflatten(jax.tree.structure(device_run.abstract.params), converted), manifest

    def _read_tensors(
        self, manifest: Manifest, expected: dict[str, Any], device_run: DeviceRun, *checks: Callable[..., None]
    ) -> dict[str, jax.Array]:
        """Returns the tensors of a checkpoint in the rows and shardings of `expected`, verified."""
        permuted, abstract = _rows_permuted(device_run), expected
        if permuted:
            from meshwright.checkpoint.layer_order import abstract_in_layer_order, to_row_order

            abstract = abstract_in_layer_order(expected, device_run.params)
        check_tensors(manifest, abstract, device_run.params)
        for check in checks:
            check(manifest, abstract)
        tensors = self._read(manifest, abstract)
        if permuted:
            return to_row_order(tensors, expected, device_run.params)
        return {name: tensors[name] for name in expected}  # the order of the state's leaves, not of the file's

    def set_aside(self, after: int) -> None:
        """Moves checkpoints newer than `after` into the folder `set-aside`, so that training can continue there."""
        from meshwright.checkpoint.set_aside import set_aside  # loaded to continue from an earlier step

        set_aside(self.folder, [step for step in self.steps() if step > after])
        self._manager.reload()

    def _choose(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"a checkpoint in {self.folder}", "none was committed there", "another folder")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise CheckpointError(
                f"the checkpoint of step {step}",
                "the folder has those of steps " + ", ".join(map(str, steps)),
                f"--at {steps[-1]}",
            )
        return step

    def _wait_for_commit(self) -> None:
        self._manager.wait_until_finished()
        self._commit.close()

    def _read(self, manifest: Manifest, abstract: dict[str, Any]) -> dict[str, jax.Array]:
        """Reads the tensors `abstract`, which have one row per layer, and verifies their fingerprints."""
        restore_args = {
            name: ocp.ArrayRestoreArgs(
                sharding=x.sharding,
                global_shape=x.shape,
                dtype=x.dtype,
                # A vocabulary that was padded otherwise is cut or padded with zeros.
                strict=manifest.tensors[name].shape == x.shape,
            )
            for name, x in abstract.items()
        }
        args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
        with orbax_reports_suppressed():
            try:
                tensors = self._manager.restore(manifest.step, args=ocp.args.Composite(state=args))["state"]
            except Exception as error:  # TensorStore raises several types, with pages of text
                text = str(error)
                name = next((name for name in abstract if name in text), None)
                damage = "a file is damaged" if name is None else f"tensor {name!r} cannot be read"
                drain_reports(error)
                raise self._damaged(manifest.step, damage, error) from error
        hashes = jax.device_get(fingerprints(tensors))
        changed = [n for n in abstract if tuple(int(v) for v in hashes[n]) != manifest.tensors[n].fingerprint]
        if changed:
            damage = f"tensor {changed[0]!r} is not what was saved ({len(changed)} of {len(abstract)} differ)"
            raise self._damaged(manifest.step, damage, None)
        return dict(tensors)

    def _damaged(self, step: int, damage: str, error: Exception | None) -> CheckpointError:
        from meshwright.checkpoint.failures import damaged  # loaded for a checkpoint that cannot be read

        return damaged(self.folder, step, [s for s in self.steps() if s < step], damage, error)

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Raises an error of Orbax or the file system as one that names the folder and the last intact checkpoint."""
        with orbax_reports_suppressed():
            try:
                yield
            except Exception as error:
                drain_reports(error)
                self._commit.close()
                from meshwright.checkpoint.failures import write_error  # loaded for a save that fails

                raise write_error(action, self.folder, error, committed_steps(self.folder)) from error


def _saved_fields(state: State) -> dict[str, Any]:
    """Fields of the state that a checkpoint has; `healthy` is not saved, because only a healthy state is."""
    fields = {"step": state.step, "params": state.params, "optimizer": state.optimizer}
    return fields | ({"variables": state.variables} if state.variables else {})


def _named_tensors(state: State) -> dict[str, Any]:
    return named_leaves(_saved_fields(state))


def committed_steps(folder: Path) -> list[int]:
    """Returns the steps with a committed checkpoint in `folder`, oldest first; no device is needed."""
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


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
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in _named_tensors(device_run.abstract).values())
    free = shutil.disk_usage(folder).free
    if free < size * (max_to_keep + 1):
        raise CheckpointError(
            f"output folder {folder}",
            f"a checkpoint takes up to {size / 2**20:.1f} MiB, {max_to_keep} are kept while another is written, "
            f"and {free / 2**20:.1f} MiB are free",
            "a folder with more space, or a smaller --training.max-to-keep",
        )


def _rows_permuted(device_run: DeviceRun) -> bool:
    """Whether rows of stacked parameters are not in the order of the layers: uneven or interleaved pipelines."""
    return any(p.order is not None for p in named_leaves(device_run.params).values())
