"""Writes and reads the tensors of a checkpoint: every process the shards on its devices, with TensorStore.

A shard is one chunk, or several, of a Zarr array in Orbax's format. A checkpoint is committed when the shards of all
processes are written: on a file system its folder has a temporary name (`600.tmp`) until then, and in a bucket, which
has no renames, the manifest is written last. A folder without a manifest is not a checkpoint.
"""

import concurrent.futures
import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tensorstore
from jax.experimental import multihost_utils

from meshwright.checkpoint.blocks import block_shape, commit, open_array, write_json, zarr_spec
from meshwright.checkpoint.steps import STARTED, committed_steps, partial_steps, remove_checkpoint
from meshwright.errors import CheckpointError
from meshwright.hardware.hosts import store
from meshwright.storage.paths import in_bucket, kvstore_of, remove_tree

_CHUNK = 64 * 2**20
"""Largest chunk in bytes: a shard is one file, or several."""
_READERS = 8
"""Tensors that are read at a time."""
_BARRIER_SECONDS = 1800
_saves = itertools.count()
"""Number of the next save of this process; all processes save in the same order."""
LAYOUT = "layout.json"
"""File of a checkpoint of a single process: which slices of the tensors it has."""

Reach = Literal["shared", "process"]
Bounds = tuple[tuple[int, int], ...]
"""First index and one past the last, of each dimension of a slice."""
Shards = dict[str, list[tuple[tuple[slice, ...], np.ndarray]]]


class ShardWriter:
    """Checkpoints in one folder, of which one save at a time is in progress in a thread.

    reach: `shared` for a folder that all processes write to, each the shards that it owns; `process` for a folder of
    this process, into which it writes all shards that it has.
    """

    def __init__(self, folder: Path, max_to_keep: int | None, reach: Reach = "shared"):
        self._folder, self._max_to_keep, self.reach = folder, max_to_keep, reach
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[None] | None = None
        if max_to_keep is None:
            return
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        if self._commits:  # what a writer left that died: this process holds the lock of the folder
            if in_bucket(folder):
                for step in partial_steps(folder):
                    remove_checkpoint(self._folder, step)
            else:
                for left in folder.glob("*tmp*"):  # Orbax, which wrote checkpoints once, left STEP.orbax-checkpoint-tmp
                    remove_tree(left)

    @property
    def _commits(self) -> bool:
        """Whether this process writes the descriptions of the arrays and the manifest."""
        return self.reach == "process" or jax.process_index() == 0

    def save(self, step: int, abstract: dict[str, Any], shards: Shards, manifest: dict[str, Any]) -> None:
        """Starts to write a checkpoint. abstract: shapes, types and shardings of the tensors. shards: `host_shards`."""
        assert self._thread is not None
        self.wait()
        self._pending = self._thread.submit(self._write, step, abstract, shards, manifest, next(_saves))

    def _write(
        self, step: int, abstract: dict[str, Any], shards: Shards, manifest: dict[str, Any], number: int
    ) -> None:
        folder = self._folder / (str(step) if in_bucket(self._folder) else f"{step}.tmp")
        state = folder / "state"
        if self._commits:
            if in_bucket(folder):
                (self._folder / STARTED / str(step)).write_text(str(step))
            else:
                remove_tree(folder)
            state.mkdir(parents=True, exist_ok=True)
        self._barrier(f"begun-{number}")
        if not in_bucket(folder) and not folder.is_dir():
            raise CheckpointError(
                f"saving step {step} in {self._folder}",
                f"process {jax.process_index()} does not see the folder that process 0 made",
                "an --out that all hosts share, or in a bucket",
            )
        # One process writes the description, which the others do not wait for.
        how = {"create": True} if self._commits else {"open": True, "assume_metadata": True}
        writing = []
        for name, x in abstract.items():
            if self._commits or shards[name]:
                kvstore, context = kvstore_of(state / name)
                chunk = _chunk_shape(x.sharding.shard_shape(x.shape), x.dtype.itemsize)
                spec = zarr_spec(kvstore, x.shape, chunk, x.dtype) | how
                array = tensorstore.open(spec, context=context).result()
                writing += [array[index].write(values) for index, values in shards[name]]
        for future in writing:
            future.result()
        if self.reach == "process":
            write_json(folder / LAYOUT, {"layout": layout_of(abstract)})
        self._barrier(f"written-{number}")
        if self._commits:
            commit(folder, manifest)
            if not in_bucket(folder):
                remove_checkpoint(self._folder, step)
                os.replace(folder, self._folder / str(step))
            assert self._max_to_keep is not None
            for old in committed_steps(self._folder)[: -self._max_to_keep]:
                remove_checkpoint(self._folder, old)
        self._barrier(f"committed-{number}")

    def _barrier(self, name: str) -> None:
        """Waits for the other processes, without a device: the train step is running there."""
        if self.reach == "shared" and jax.process_count() > 1:
            store().wait_at_barrier(f"meshwright/checkpoint/{name}", 1000 * _BARRIER_SECONDS)

    def restore(self, step: int, abstract: dict[str, Any]) -> dict[str, jax.Array]:
        """Returns tensors in the shapes and shardings of `abstract`; those of another shape are cut or padded."""
        state, failure = self._folder / str(step) / "state", None
        tensors: dict[str, jax.Array] = {}
        try:
            with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
                futures = {name: pool.submit(_read, state, name, x) for name, x in abstract.items()}
                tensors = {name: future.result() for name, future in futures.items()}
        except Exception as error:
            if self.reach == "shared":
                raise
            failure = error
        if self.reach == "process" and jax.process_count() > 1:  # all take it, or none
            failed = multihost_utils.process_allgather(np.array(failure is not None))
            if failure is None and failed.any():
                failure = ValueError(f"process {int(np.argmax(failed))} could not read its shards")
        if failure is not None:
            raise failure
        return tensors

    def wait(self) -> None:
        """Waits until the last save is committed; raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def failed(self) -> bool:
        """Whether the save in progress has failed; `wait` then raises its error at once."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()


def layout_of(tensors: dict[str, Any]) -> str:
    """Returns a digest of which slices of which tensors this process has: its shards serve no other layout.

    tensors: arrays or ShapeDtypeStructs with shardings, by name.
    """
    slices = {
        name: sorted({_bounds(i, x.shape) for i in x.sharding.addressable_devices_indices_map(x.shape).values()})
        for name, x in sorted(tensors.items())
    }
    place = [jax.process_index(), jax.process_count()] if jax.process_count() > 1 else []
    return hashlib.sha256(json.dumps([place, slices if place else ""]).encode()).hexdigest()


def host_shards(tensors: dict[str, jax.Array], *, owned: bool) -> Shards:
    """Returns copies in the host's memory of the shards on this process's devices, one of each slice of a tensor.

    owned: leaves out the slices that another process writes (the replica with the lowest number).
    """
    taken: dict[str, dict[Bounds, Any]] = {}
    for name, x in tensors.items():
        slices = taken[name] = {}
        for shard in x.addressable_shards:
            if not owned or shard.replica_id == 0:
                slices.setdefault(_bounds(shard.index, x.shape), shard)
        for shard in slices.values():
            shard.data.copy_to_host_async()
    return {
        name: [(tuple(slice(*part) for part in bounds), _copied(shard.data)) for bounds, shard in slices.items()]
        for name, slices in taken.items()
    }


def _copied(x: jax.Array) -> np.ndarray:
    """Values in memory of the host's own: on a CPU an array shares the memory of the device's, which is donated."""
    values = np.asarray(x)
    return values if values.flags.owndata else values.copy()


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _chunk_shape(shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of the chunks of a shard, which divides it: no two processes write into one chunk."""
    largest = block_shape(shard, itemsize, _CHUNK)
    return tuple(
        max((n for n in range(1, most + 1) if size % n == 0), default=1)
        for size, most in zip(shard, largest, strict=True)
    )


def _read(state: Path, name: str, x: Any) -> jax.Array:
    """Reads the slices of a tensor that the devices of this process need, all at once."""
    array = open_array(state, name).result()
    places = x.sharding.addressable_devices_indices_map(x.shape)
    wanted = dict.fromkeys(_bounds(index or (), x.shape) for index in places.values())
    reading = {}
    for bounds in wanted:  # without what lies beyond the stored array: a vocabulary may be padded otherwise
        inside = tuple(slice(a, min(b, size)) for (a, b), size in zip(bounds, array.shape, strict=True))
        if all(part.start < part.stop for part in inside):
            reading[bounds] = array[inside].read()
    slices: dict[Bounds, np.ndarray] = {}
    for bounds in wanted:
        shape = tuple(b - a for a, b in bounds)
        values = reading[bounds].result() if bounds in reading else None
        if values is None or values.shape != shape:
            padded = np.zeros(shape, x.dtype)
            if values is not None:
                padded[tuple(slice(0, size) for size in values.shape)] = values
            values = padded
        slices[bounds] = values
    return jax.make_array_from_callback(x.shape, x.sharding, lambda index: slices[_bounds(index or (), x.shape)])
