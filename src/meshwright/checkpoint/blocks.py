"""Arrays of a checkpoint: their format, and reading and writing them block by block, in bounded memory.

A tensor is a Zarr array without compression, a folder of the tensor's name in `state`. Checkpoints that Orbax wrote for
earlier versions have the arrays in a database of TensorStore (OCDBT); they are read too. A conversion writes one block
after another, so that it never has a tensor in memory and continues where it was interrupted.
"""

import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from meshwright.checkpoint.fingerprints import Fingerprint, add_fingerprints, block_fingerprint
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.documents import write_atomically
from meshwright.errors import CheckpointError
from meshwright.storage.paths import in_bucket, kvstore_of

Index = tuple[slice, ...]

BLOCK_BYTES = 16 * 2**20
"""Largest block of a tensor that is read or written at a time."""


def block_shape(shape: tuple[int, ...], itemsize: int, largest: int = BLOCK_BYTES) -> tuple[int, ...]:
    """Returns the shape of the blocks of a tensor: slowest dimensions are cut first, so blocks are contiguous."""
    block = list(shape)
    for dim in range(len(block)):
        inner = math.prod(shape[dim + 1 :]) * itemsize
        if block[dim] * inner <= largest:
            break
        block[dim] = max(1, min(block[dim], largest // max(inner, 1)))
    return tuple(block)


def blocks_of(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterator[Index]:
    """Yields the blocks of a tensor, in order."""
    steps = [range(0, size, step) for size, step in zip(shape, block, strict=True)]
    for first in itertools.product(*steps):
        yield tuple(slice(at, min(at + step, size)) for at, step, size in zip(first, block, shape, strict=True))


def write_tensor(
    state: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], read: Callable[[Index], np.ndarray]
) -> Fingerprint:
    """Writes one tensor into the folder `state` of a checkpoint; returns its fingerprint.

    read: returns a block of it. Raises CheckpointError where the disk is full or cannot be written.
    """
    block, total = block_shape(shape, dtype.itemsize), (0, 0)
    # The conversion is synchronised once, before it is moved to its name, and not file by file.
    kvstore = {"driver": "file", "path": f"{state / name}/", "file_io_sync": False}
    spec = zarr_spec(kvstore, shape, block, dtype)
    try:
        array = tensorstore.open(spec, create=True, delete_existing=True).result()
        for index in blocks_of(shape, block):
            values = read(index)
            total = add_fingerprints(total, block_fingerprint(values, index, shape))
            array[index].write(values).result()
    except ValueError as error:  # TensorStore raises it for every failure of a file
        truth = str(error).splitlines()[0][:300]
        raise CheckpointError(f"writing {name} into {state}", truth, "a folder with more space") from error
    return total


def zarr_spec(
    kvstore: dict[str, Any], shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype[Any]
) -> dict[str, Any]:
    """Returns TensorStore's description of a Zarr array without compression that is about to be written."""
    # NumPy's own types by code, the others (bfloat16, float8_e4m3fn) by name.
    code = dtype.str if dtype.isbuiltin == 1 else dtype.name
    metadata = {"shape": list(shape), "chunks": list(chunks), "dtype": code}
    return {
        "driver": "zarr",
        "kvstore": kvstore,
        "metadata": {**metadata, "compressor": None, "dimension_separator": "."},
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False,
    }


def commit(step_folder: Path, manifest: dict[str, Any]) -> None:
    """Makes the arrays in `step_folder`/state a checkpoint: writes Orbax's description of them, then the manifest."""
    tree = {
        f"('{name}',)": {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": tensor["shape"]},
        }
        for name, tensor in manifest["tensors"].items()
    }
    state = {"use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    write_json(step_folder / "state" / "_METADATA", {"tree_metadata": tree, **state, "custom_metadata": None})
    times = dict.fromkeys(("init_timestamp_nsecs", "commit_timestamp_nsecs"), time.time_ns())
    write_json(step_folder / "_CHECKPOINT_METADATA", {"item_handlers": {}, **times, "custom_metadata": {}})
    write_json(step_folder / "manifest" / "metadata", manifest)


def write_json(file: Path, document: Any) -> None:
    """Writes a JSON file atomically into a folder that may not exist yet."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(document))


@dataclasses.dataclass(frozen=True)
class StoredTensors:
    """Tensors of a committed checkpoint, read block by block and verified."""

    step_folder: Path
    manifest: Manifest

    def blocks(self, name: str, shape: tuple[int, ...] | None = None) -> Iterator[tuple[Index, np.ndarray]]:
        """Yields the blocks of a tensor, without its rows beyond `shape` where that is given.

        Raises CheckpointError where a block cannot be read, and after the last one where the tensor is not what was
        saved: what was done with the blocks is then worthless.
        """
        if name not in self.manifest.tensors:
            raise self._damaged(f"it has no tensor {name!r}", "another checkpoint of the run")
        record, total = self.manifest.tensors[name], (0, 0)
        try:
            array, chunk = self.open(name)
            # No chunk is read twice.
            block = block_shape(record.shape, array.dtype.numpy_dtype.itemsize)
            block = tuple(-(-size // step) * step for size, step in zip(block, chunk, strict=True))
            for index in blocks_of(record.shape, block):
                values = np.asarray(array[index].read().result())
                total = add_fingerprints(total, block_fingerprint(values, index, record.shape))
                inside = tuple(
                    slice(p.start, min(p.stop, s)) for p, s in zip(index, shape or record.shape, strict=True)
                )
                if all(p.start < p.stop for p in inside):
                    yield inside, values[tuple(slice(0, p.stop - p.start) for p in inside)]
        except ValueError as error:
            raise self._damaged(f"tensor {name!r} cannot be read: {str(error).splitlines()[0][:200]}") from error
        if total != record.fingerprint:
            raise self._damaged(f"tensor {name!r} is not what was saved")

    def open(self, name: str) -> tuple[Any, tuple[int, ...]]:
        """Opens the array of a tensor with TensorStore; returns it, and the shape of its chunks. Raises ValueError."""
        array = open_array(self.step_folder / "state", name).result()
        return array, _check_array(name, array, self.manifest.tensors[name])

    def read(self, name: str) -> np.ndarray:
        """Returns all of a tensor. Raises CheckpointError."""
        record = self.manifest.tensors.get(name)
        tensor = np.empty(record.shape if record else (), np.dtype(record.dtype) if record else None)
        for index, block in self.blocks(name):
            tensor[index] = block
        return tensor

    def check(self, names: Iterable[str]) -> None:
        """Raises CheckpointError where the array of a tensor is not of the shape and type in the manifest.

        Reads the arrays' descriptions, all at once, and allocates nothing of their size.
        """
        try:
            opening = {name: open_array(self.step_folder / "state", name) for name in names}
            for name, array in opening.items():
                _check_array(name, array.result(), self.manifest.tensors[name])
        except ValueError as error:
            raise self._damaged(f"tensor {name!r} cannot be read: {str(error).splitlines()[0][:200]}") from error

    def _damaged(self, damage: str, fix: str = "another checkpoint of the run: --at STEP") -> CheckpointError:
        return CheckpointError(f"the checkpoint in {self.step_folder}", damage, fix)


def open_array(state: Path, name: str) -> Any:
    """Opens the array of a tensor in the folder `state` of a checkpoint with TensorStore; returns a future."""
    if _in_one_database(state):
        base, context = kvstore_of(state)
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        kvstore, context = kvstore_of(state / name)
    return tensorstore.open({"driver": "zarr", "kvstore": kvstore}, context=context)


def _in_one_database(state: Path) -> bool:
    """Whether the tensors are in a database of TensorStore (OCDBT), as Orbax wrote them."""
    return _has_database(state) if in_bucket(state) else (state / "manifest.ocdbt").is_file()


@functools.lru_cache(maxsize=64)
def _has_database(state: Path) -> bool:
    return (state / "manifest.ocdbt").is_file()


def _check_array(name: str, array: Any, record: TensorRecord) -> tuple[int, ...]:
    """Returns the shape of the chunks of a stored array.

    Raises ValueError where its shape or type is not that of the manifest, or a chunk is larger than the array: all of a
    chunk is read, whatever part of it is asked for.
    """
    if array.dtype.name != record.dtype or tuple(array.shape) != record.shape:
        raise ValueError(f"its array is {array.dtype.name}{list(array.shape)}, not {record.dtype}{list(record.shape)}")
    chunk = tuple(int(size or 1) for size in array.chunk_layout.read_chunk.shape or record.shape)
    if any(size > max(1, total) for size, total in zip(chunk, record.shape, strict=True)):
        raise ValueError(f"its chunks are {list(chunk)}, larger than {name!r} itself, {list(record.shape)}")
    return chunk
