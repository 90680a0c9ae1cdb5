"""Checkpoints on a file system that all hosts share, written and read by Orbax."""

import contextlib
import sys
import threading
from collections.abc import Set
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from meshwright.checkpoint.orbax_reports import orbax_reports_suppressed


class OrbaxWriter:
    """Orbax's manager of one folder: a checkpoint is written beside its name and renamed when it is whole."""

    def __init__(self, folder: Path, max_to_keep: int | None):
        # Suppresses Orbax's reports while a commit is in progress.
        self._commit = contextlib.ExitStack()
        self._owner, self._failed = threading.current_thread(), False
        # One that reads leaves alone what a run beside it is writing.
        options = ocp.CheckpointManagerOptions(read_only=True)
        if max_to_keep is not None:
            folder.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=max_to_keep, cleanup_tmp_directories=True, enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(barrier_sync_fn=self._barrier),
            )  # fmt: skip
        self._manager = ocp.CheckpointManager(folder, options=options)

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""
        self._manager.reload()
        return sorted(self._manager.all_steps())

    def save(self, step: int, tensors: dict[str, jax.Array], manifest: dict[str, Any]) -> None:
        """Starts to write tensors and manifest, and returns as soon as the tensors' buffers may be donated."""
        self.wait()
        self._commit.enter_context(orbax_reports_suppressed())
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(tensors), manifest=ocp.args.JsonSave(manifest))
        self._manager.save(step, args=args, force=True)

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the other processes; raises the error of a save that failed here instead.

        Orbax's thread comes here with the error in flight, to wait for processes that in turn wait for the shards that
        this one could not write: up to `timeout_ms` (20 minutes), without an error on any host.
        """
        error = sys.exception()
        if error is not None and threading.current_thread() is not self._owner:
            self._failed = True
            raise error
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def failed(self) -> bool:
        """Whether the save in progress has failed; `wait` then raises its error at once."""
        return self._failed

    def restore(self, step: int, abstract: dict[str, Any], other_shape: Set[str]) -> dict[str, jax.Array]:
        """Returns tensors in the shapes and shardings of `abstract`.

        other_shape: those that are cut, or padded with zeros, because they are stored in another shape.
        """
        restore_args = {
            name: ocp.ArrayRestoreArgs(
                sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=name not in other_shape
            )
            for name, x in abstract.items()
        }
        args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
        return dict(self._manager.restore(step, args=ocp.args.Composite(state=args))["state"])

    def wait(self) -> None:
        """Waits until the last save is committed; raises its error."""
        self._manager.wait_until_finished()
        self._commit.close()

    def close(self) -> None:
        """Waits, and releases Orbax's threads."""
        self._manager.close()
        self._commit.close()

    def abandon(self) -> None:
        """Gives up a save that failed."""
        self._commit.close()
        self._failed = False
