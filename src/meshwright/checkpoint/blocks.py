"""Tensors of a checkpoint, read and written block by block
without devices: blocks bound the memory of a conversion."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.checkpoint.fingerprints import SALTS, sum_of_hashes
from meshwright.checkpoint.manifest import Manifest, manifest_of
from meshwright.checkpoint.tensors import Index, block_shape, check_array, new_array, open_array
from meshwright.errors import CheckpointError, by_class, reason_of
from meshwright.storage.attempts import result_of

Fingerprint = tuple[int, int]


def blocks_of(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterator[Index]:
    """Yields the blocks of a tensor, in order."""
    starts_by_dim = [range(0, size, step) for size, step in zip(shape, block, strict=True)]
    for starts in itertools.product(*starts_by_dim):
        yield tuple(
            slice(start, min(start + step, size))
            for start, step, size in zip(starts, block, shape, strict=True)
        )


def write_tensor(
    state: Path,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    read: Callable[[Index], np.ndarray],
) -> Fingerprint:
    """Writes one tensor into the folder `state` of a checkpoint; returns its fingerprint.

    read: returns a block of it. Raises CheckpointError where the disk is full or cannot be written.
    """
    block = block_shape(shape, dtype.itemsize)
    total = (0, 0)
    try:
        # The conversion is synchronised once, before it is moved to its name, and not file by file.
        array = new_array(
            state, name, shape, block, dtype, create=True, delete_existing=True, sync=False
        )
        for index in blocks_of(shape, block):
            values = read(index)
            total = add_fingerprints(total, block_fingerprint(values, index, shape))
            part = array[index]
            result_of(state, functools.partial(part.write, values))
    except (OSError, ValueError) as error:
        refusal = CheckpointError(
            f"writing {name} into {state}", reason_of(error), "a folder that can be written"
        )
        raise by_class(error, refusal) from error
    return total


@dataclasses.dataclass(frozen=True)
class StoredTensors:
    """Tensors of a committed checkpoint, read block by block and verified."""

    step_folder: Path
    manifest: Manifest

    def blocks(
        self, name: str, shape: tuple[int, ...] | None = None
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """Yields the blocks of a tensor, without its rows beyond `shape` where that is given.

        Raises CheckpointError where a block cannot be read, and after the last one where the tensor
        is not what was saved: what was done with the blocks is then worthless.
        """
        if name not in self.manifest.tensors:
            raise self._damaged(f"it has no tensor {name!r}", "another checkpoint of the run")
        record = self.manifest.tensors[name]
        state = self.step_folder / "state"
        total = (0, 0)
        try:
            array, chunk = self.open(name)
            block = block_shape(record.shape, array.dtype.numpy_dtype.itemsize)
            for index in blocks_of(record.shape, _round_up(block, chunk)):
                part = array[index]
                values = np.asarray(result_of(state, part.read))
                total = add_fingerprints(total, block_fingerprint(values, index, record.shape))
                index, values = _within(shape or record.shape, index, values)
                if values.size:
                    yield index, values
        except (OSError, ValueError) as error:
            refusal = self._damaged(f"tensor {name!r} cannot be read: {reason_of(error)}")
            raise by_class(error, refusal) from error
        if total != record.fingerprint:
            raise self._damaged(f"tensor {name!r} is not what was saved")

    def open(self, name: str) -> tuple[Any, tuple[int, ...]]:
        """Opens the array of a tensor with TensorStore; returns it, and the shape of its chunks.

        Raises OSError, and ValueError where it is not the array of the manifest.
        """
        state = self.step_folder / "state"
        array = result_of(state, lambda: open_array(state, name))
        return array, check_array(name, array, self.manifest.tensors[name])

    def read(self, name: str) -> np.ndarray:
        """Returns all of a tensor. Raises CheckpointError."""
        blocks = self.blocks(name)
        tensor = np.empty(())
        record = self.manifest.tensors.get(name)
        if record is not None:
            tensor = np.empty(record.shape, np.dtype(record.dtype))
        for index, block in blocks:
            tensor[index] = block
        return tensor

    def _damaged(
        self, damage: str, fix: str = "another checkpoint of the run: --at STEP"
    ) -> CheckpointError:
        return CheckpointError(f"the checkpoint in {self.step_folder}", damage, fix)


def _round_up(block: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a block of complete chunks, so that no chunk is read twice."""
    return tuple(-(-size // step) * step for size, step in zip(block, chunk, strict=True))


def _within(shape: tuple[int, ...], index: Index, values: np.ndarray) -> tuple[Index, np.ndarray]:
    """Returns the part of a block that is inside of `shape`, and its index; it may be empty."""
    stops = [min(part.stop, size) for part, size in zip(index, shape, strict=True)]
    inside = tuple(
        slice(part.start, max(part.start, stop)) for part, stop in zip(index, stops, strict=True)
    )
    return inside, values[tuple(slice(0, part.stop - part.start) for part in inside)]


def stored_tensors(folder: Path, at: int | None) -> StoredTensors:
    """Returns the tensors of the checkpoint of step `at` in a folder of checkpoints,
    or of the last complete one."""
    manifest = manifest_of(folder, at)
    return StoredTensors(folder / str(manifest.step), manifest)


def add_fingerprints(a: Fingerprint, b: Fingerprint) -> Fingerprint:
    """Returns the sum of two fingerprints."""
    return (a[0] + b[0]) % 2**32, (a[1] + b[1]) % 2**32


def block_fingerprint(
    block: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]
) -> Fingerprint:
    """Returns what a block adds to the fingerprint of its tensor;
    the sums over all blocks are the fingerprint.

    index: of the block in the tensor.  shape: of the tensor.
    """
    strides = [math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))]
    offset = sum(part.start * stride for part, stride in zip(index, strides, strict=True)) % 2**32
    sums = _block_sums(block, np.array(strides, np.uint32), np.uint32(offset))
    return int(sums[0]), int(sums[1])


@jax.jit
def _block_sums(block: jax.Array, strides: jax.Array, offset: jax.Array) -> jax.Array:
    index = jnp.full(block.shape, offset, jnp.uint32)
    for dim in range(block.ndim):
        index += strides[dim] * jax.lax.broadcasted_iota(jnp.uint32, block.shape, dim)
    return jnp.stack([sum_of_hashes(block, index, salt) for salt in SALTS])
