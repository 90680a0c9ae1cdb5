"""Two tiers of checkpoints: each host's own disk, often, and the output folder, rarely (`LocalCheckpoints`).

Of the local tier every process has a folder of its own with the shards on its devices: saving and restoring send
nothing over the network. A resume takes the newest checkpoint that is committed in the output folder, or on every host
for the layout of the run. After a host is lost or replaced, that is the output folder's.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.checkpoint.checkpoints import LAYOUT, Checkpoints, named_tensors
from meshwright.checkpoint.layer_order import abstract_in_layer_order
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.steps import committed_steps
from meshwright.checkpoint.tensors import layout_of
from meshwright.documents import read_json
from meshwright.errors import CheckpointError
from meshwright.step.device_run import DeviceRun, State
from meshwright.storage.paths import remove_tree
from meshwright.storage.tiers import LocalCheckpoints

_MOST = 64
"""Newest steps of the local tier that hosts compare."""


class Tiers(Checkpoints):
    """Checkpoints of the output folder, and those on the hosts' own disks, which must have the layout of the run."""

    def __init__(self, out: Path, device_run: DeviceRun, *, max_to_keep: int, local: LocalCheckpoints):
        super().__init__(out / "checkpoints", max_to_keep=max_to_keep)
        assert local.path is not None
        self._layout = layout_of(abstract_in_layer_order(named_tensors(device_run.abstract), device_run.params))
        # The folder `local.path` may be shared by several runs and processes.
        name = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:16]
        folder = Path(local.path) / f"{out.name}-{name}" / f"process-{jax.process_index()}"
        self._local = Checkpoints(folder, max_to_keep=local.max_to_keep, reach="process")

    def save_locally(self, state: State, device_run: DeviceRun, **place: Any) -> None:
        """Starts to write the state to the hosts' disks. place: as of `save`."""
        self._local.save(state, device_run, **place)

    def forget_local(self, after: int = -1) -> None:
        """Deletes the hosts' checkpoints of steps above `after`: they are of another run, or of one that was left."""
        self._local.wait()
        for step in committed_steps(self._local.folder):
            if step > after:
                remove_tree(self._local.folder / str(step))

    def steps(self) -> list[int]:
        """Returns the steps of both tiers, oldest first."""
        return sorted({*super().steps(), *self._local_steps()})

    def manifest(self, step: int | None = None) -> Manifest:
        """Returns the manifest of the checkpoint that `restore` takes."""
        for candidate in self._candidates(step):
            try:
                return self._local.manifest(candidate)
            except CheckpointError as error:
                _say(candidate, error)
        return super().manifest(step)

    def restore(self, device_run: DeviceRun, step: int | None = None) -> tuple[State, Manifest]:
        """Returns the newest state of both tiers, or that of `step`, verified; of equal ones the hosts'.

        A hosts' checkpoint that is damaged is skipped with a line on standard error.
        """
        for candidate in self._candidates(step):
            try:
                state, manifest = self._local.restore(device_run, candidate)
            except CheckpointError as error:
                _say(candidate, error)
                continue
            if jax.process_index() == 0:
                print(f"step {candidate} is restored from the hosts' own disks", file=sys.stderr)
            return state, manifest
        return super().restore(device_run, super().manifest(step).step)

    def set_aside(self, after: int) -> None:
        """Moves newer checkpoints of the output folder into `set-aside`, and deletes those of the hosts."""
        super().set_aside(after)
        self.forget_local(after)

    def wait(self) -> None:
        """Waits until every save is committed, on the hosts and in the output folder."""
        self._local.wait()
        super().wait()

    def check(self) -> None:
        """Raises CheckpointError where a save of either tier has failed on this host."""
        self._local.check()
        super().check()

    def close(self) -> None:
        """Waits like `wait`, and releases the threads of both."""
        try:
            self._local.close()
        finally:
            super().close()

    def _candidates(self, step: int | None) -> list[int]:
        """Steps of the local tier to try, newest first: those that are not older than the output folder's newest."""
        shared = super().steps()
        if step is not None:
            return [step] if step in self._local_steps() and step not in shared else []
        return [s for s in reversed(self._local_steps()) if s >= max(shared, default=-1)]

    def _local_steps(self) -> list[int]:
        """Steps of the local tier that are committed on every host, for the layout of this run."""

        def fits(step: int) -> bool:
            try:
                return bool(read_json(self._local.folder / str(step) / LAYOUT)["layout"] == self._layout)
            except (OSError, ValueError, KeyError, TypeError):
                return False

        mine = [step for step in committed_steps(self._local.folder) if fits(step)]
        if jax.process_count() == 1:
            return mine
        row = np.full(_MOST, -1, np.int64)
        row[: len(mine[-_MOST:])] = mine[-_MOST:]
        rows = multihost_utils.process_allgather(row)
        return sorted(set.intersection(*({int(s) for s in host if s >= 0} for host in rows)))


def _say(step: int, error: CheckpointError) -> None:
    if jax.process_index() == 0:
        print(f"step {step} on the hosts' own disks is left out: {error.truth}", file=sys.stderr)
