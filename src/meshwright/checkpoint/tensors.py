"""Tensors of a checkpoint: their format, written and read by the shards of devices.

A tensor is a Zarr array without compression, a folder of the tensor's name in `state`. A shard is one chunk of it, or
several. `checkpoint.blocks` reads and writes them without devices.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import NamedSharding

from meshwright.checkpoint.manifest import TensorRecord
from meshwright.comm.collectives import broadcast
from meshwright.hardware.agreement import note_progress
from meshwright.sharding.placement import replica_parts
from meshwright.storage.attempts import result_of
from meshwright.storage.paths import kvstore_of

BLOCK_BYTES = 16 * 2**20
"""Largest block of a tensor that is read or written at a time."""
_CHUNK = 64 * 2**20
"""Largest chunk of a shard in bytes."""

Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]
"""First index and one past the last, of each dimension of a slice."""
Shards = dict[str, list[tuple[Index, np.ndarray]]]


def block_shape(
    shape: tuple[int, ...], itemsize: int, largest: int = BLOCK_BYTES
) -> tuple[int, ...]:
    """Returns the shape of the blocks of a tensor: slowest dimensions are cut first, so blocks are contiguous."""
    block = list(shape)
    for dim in range(len(block)):
        inner = math.prod(shape[dim + 1 :]) * itemsize
        if block[dim] * inner <= largest:
            break
        block[dim] = max(1, min(block[dim], largest // max(inner, 1)))
    return tuple(block)


def new_array(
    state: Path,
    name: str,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: np.dtype[Any],
    **how: bool,
) -> Any:
    """Opens an array that is about to be written. how: options of TensorStore's `open`."""
    kvstore, context = kvstore_of(state / name)
    if how.pop("sync", True) is False:
        kvstore["file_io_sync"] = False
    # NumPy's own types by code, the others (bfloat16, float8_e4m3fn) by name.
    code = dtype.str if dtype.isbuiltin == 1 else dtype.name
    metadata = {"shape": list(shape), "chunks": list(chunks), "dtype": code}
    spec = {
        "driver": "zarr",
        "kvstore": kvstore,
        "metadata": {**metadata, "compressor": None, "dimension_separator": "."},
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False,
    }
    # A first attempt may have written the description before it failed.
    again = how | ({"open": True} if how.get("create") and not how.get("delete_existing") else {})
    attempts = iter([how])
    return result_of(state, lambda: tensorstore.open(spec | next(attempts, again), context=context))


def write_shards(
    state: Path,
    abstract: dict[str, Any],
    shards: Shards,
    *,
    creates: bool,
    wrote: Callable[[], None],
) -> None:
    """Writes the shards of this process. creates: writes the arrays' descriptions too, which one process does.

    abstract: shapes, types and shardings of the tensors.  wrote: called after each shard.
    """
    # The others do not wait for the descriptions.
    how = {"create": True} if creates else {"open": True, "assume_metadata": True}
    writing = []
    for name, x in abstract.items():
        if creates or shards[name]:
            chunk = _chunk_shape(
                _division(x.shape, x.dtype.itemsize, x.sharding)[0], x.dtype.itemsize
            )
            array = new_array(state, name, x.shape, chunk, x.dtype, **how)
            for index, values in shards[name]:
                part = array[index]
                future = part.write(values)
                future.add_done_callback(lambda _: wrote())
                writing.append((part, values, future))
    for part, values, future in writing:
        _finish(state, part, values, future)


def _finish(state: Path, part: Any, values: np.ndarray, started: Any) -> None:
    """Waits until a part of an array is written, and writes it again where that failed for now."""
    futures = iter([started])
    result_of(state, lambda: next(futures, None) or part.write(values))


def layout_of(tensors: dict[str, Any]) -> str:
    """Returns a digest of which slices of which tensors this process has: its shards serve no other layout.

    tensors: arrays or ShapeDtypeStructs with shardings, by name.
    """
    slices = {
        name: sorted(
            {
                _bounds(i, x.shape)
                for i in x.sharding.addressable_devices_indices_map(x.shape).values()
            }
        )
        for name, x in sorted(tensors.items())
    }
    place = [jax.process_index(), jax.process_count()] if jax.process_count() > 1 else []
    return hashlib.sha256(json.dumps([place, slices if place else ""]).encode()).hexdigest()


def host_shards(tensors: dict[str, jax.Array], *, owned: bool) -> Shards:
    """Returns copies in the host's memory of the shards on this process's devices, one of each slice of a tensor.

    owned: only what this process writes. Of a slice that several processes have, each writes a part (`_owned_part`).
    """
    taken: dict[str, dict[Bounds, jax.Array]] = {}
    shards: Shards = {name: [] for name in tensors}
    for name, x in tensors.items():
        slices = taken[name] = {}
        for shard in x.addressable_shards:
            part = (
                _owned_part(x, shard.index, shard.replica_id)
                if owned
                else _bounds(shard.index, x.shape)
            )
            if part is None or part in slices:
                continue
            slices[part] = shard.data
            shape = tuple(stop - start for start, stop in part)
            if shape != shard.data.shape:
                first = [
                    a - (where.start or 0) for (a, _), where in zip(part, shard.index, strict=True)
                ]
                slices[part] = jax.lax.dynamic_slice(shard.data, first, shape)
        for data in slices.values():
            data.copy_to_host_async()
        if (
            owned and _division(x.shape, x.dtype.itemsize, x.sharding)[1] > 1
        ):  # copied on the devices: one at a time
            shards[name] = _on_host(taken.pop(name))
    return shards | {name: _on_host(slices) for name, slices in taken.items()}


def _on_host(slices: dict[Bounds, jax.Array]) -> list[tuple[Index, np.ndarray]]:
    return [(tuple(slice(*part) for part in bounds), _copied(x)) for bounds, x in slices.items()]


def _copied(x: jax.Array) -> np.ndarray:
    """Values in memory of the host's own: an array in a host's memory shares that of the device's, which is donated."""
    values = np.asarray(x)
    accelerator = x.sharding.memory_kind == "device" and next(iter(x.devices())).platform != "cpu"
    return values if accelerator or values.flags.owndata else values.copy()


@functools.lru_cache(maxsize=4096)
def _division(
    shape: tuple[int, ...], itemsize: int, sharding: Any
) -> tuple[tuple[int, ...], int, int]:
    """Shape of the parts in which the replicas of a slice divide it, their number, and that of replicas."""
    local, devices = sharding.shard_shape(shape), sharding.device_set
    replicas = len(devices) * math.prod(local) // max(1, math.prod(shape))
    several = len({d.process_index for d in devices}) > 1
    dim, count = replica_parts(local, itemsize, replicas if several else 1)
    return (
        tuple(size // count if i == dim else size for i, size in enumerate(local)),
        count,
        replicas,
    )


def _owned_part(x: Any, index: Index, replica: int) -> Bounds | None:
    """Returns what one of the replicas of a slice writes of it; None for nothing.

    x: array, or a ShapeDtypeStruct with its sharding.  index: of the slice.
    """
    shape, count, replicas = _division(x.shape, x.dtype.itemsize, x.sharding)
    part = next((i for i in range(count) if i * replicas // count == replica), None)
    if part is None:
        return None
    # Only the dimension that is divided has a second part.
    starts = [
        low + part * size * (size < high - low)
        for size, (low, high) in zip(shape, _bounds(index, x.shape), strict=True)
    ]
    return tuple((start, start + size) for start, size in zip(starts, shape, strict=True))


def _bounds(index: Index, shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _chunk_shape(shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of the chunks of a shard, which divides it: no two processes write into one chunk."""
    largest = block_shape(shard, itemsize, _CHUNK)
    return tuple(
        max((n for n in range(1, most + 1) if size % n == 0), default=1)
        for size, most in zip(shard, largest, strict=True)
    )


def read_shards(state: Path, name: str, x: Any, record: TensorRecord, *, owned: bool) -> jax.Array:
    """Reads the slices of a tensor that the devices of this process need, all at once, into shape and sharding of `x`.

    What is beyond the stored array is zero: a vocabulary may be padded otherwise. owned: slices that another process
    has too are read by the first of them, and are zero in the others (`from_first_replica`).  Raises ValueError where
    the array is not that of `record`.
    """
    places = x.sharding.addressable_devices_indices_map(x.shape)
    if owned and (axes := _replica_axes(x.sharding)):
        owners = {d.id for d in _replicas(x.sharding.mesh, axes)[0]}
        places_read = [index for device, index in places.items() if device.id in owners]
    else:
        places_read = list(places.values())
    reading = {}
    if places_read:
        array = result_of(state, lambda: open_array(state, name))
        check_array(name, array, record)
        for bounds in dict.fromkeys(_bounds(index or (), x.shape) for index in places_read):
            inside = tuple(
                slice(a, min(b, size)) for (a, b), size in zip(bounds, array.shape, strict=True)
            )
            if all(part.start < part.stop for part in inside):
                reading[bounds] = (array[inside], array[inside].read())
    slices: dict[Bounds, np.ndarray] = {}
    for bounds in dict.fromkeys(_bounds(index or (), x.shape) for index in places.values()):
        shape, values = tuple(b - a for a, b in bounds), None
        if bounds in reading:
            values = _read_part(state, *reading[bounds])
        if values is None or values.shape != shape:
            padded = np.zeros(shape, x.dtype)
            if values is not None:
                padded[tuple(slice(0, size) for size in values.shape)] = values
            values = padded
        slices[bounds] = values
    return jax.make_array_from_callback(
        x.shape, x.sharding, lambda index: slices[_bounds(index or (), x.shape)]
    )


def _read_part(state: Path, part: Any, started: Any) -> np.ndarray:
    """Returns a part of an array whose reading has started, and reads it again where that failed for now."""
    futures = iter([started])
    values: np.ndarray = result_of(state, lambda: next(futures, None) or part.read())
    note_progress()
    return values


def from_first_replica(x: jax.Array, sharding: Any) -> jax.Array:
    """Returns a tensor in which the slices that several processes have are those of the first of them, bit by bit."""
    axes = _replica_axes(sharding)
    if not axes:
        return x
    on_device = NamedSharding(sharding.mesh, sharding.spec)
    return jax.device_put(_sender(on_device, axes)(jax.device_put(x, on_device)), sharding)


@functools.lru_cache(maxsize=64)
def _sender(sharding: NamedSharding, axes: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    def send(shard: jax.Array) -> jax.Array:
        if shard.dtype == jnp.bool_:
            return broadcast(shard.astype(jnp.uint8), axes, 0).astype(jnp.bool_)
        # As integers: -0.0 and the bits of a NaN do not survive a sum of floats with zeros.
        bits = jnp.dtype(f"uint{8 * shard.dtype.itemsize}")
        wide = jax.lax.bitcast_convert_type(shard, bits).astype(jnp.promote_types(bits, jnp.uint32))
        return jax.lax.bitcast_convert_type(broadcast(wide, axes, 0).astype(bits), shard.dtype)

    spec = sharding.spec
    return jax.jit(
        jax.shard_map(send, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def _replica_axes(sharding: Any) -> tuple[str, ...]:
    """Returns the mesh axes over which a tensor is repeated, where that is in several processes; else none."""
    if jax.process_count() == 1 or not isinstance(sharding, NamedSharding):
        return ()
    split = {
        axis
        for part in sharding.spec
        if part
        for axis in ((part,) if isinstance(part, str) else part)
    }
    axes = tuple(
        axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in split
    )
    of_one_slice = _replicas(sharding.mesh, axes)[:, 0]
    return axes if len({device.process_index for device in of_one_slice}) > 1 else ()


def _replicas(mesh: Any, axes: tuple[str, ...]) -> np.ndarray:
    """Returns the devices of a mesh, [replica, slice], of a tensor that is repeated over some of its axes."""
    moved = np.moveaxis(
        mesh.devices, [mesh.axis_names.index(axis) for axis in axes], range(len(axes))
    )
    return moved.reshape(math.prod(mesh.shape[axis] for axis in axes), -1)


def open_array(state: Path, name: str) -> Any:
    """Opens the array of a tensor in the folder `state` of a checkpoint with TensorStore; returns a future."""
    kvstore, context = kvstore_of(state / name)
    return tensorstore.open({"driver": "zarr", "kvstore": kvstore}, context=context)


def check_array(name: str, array: Any, record: TensorRecord) -> tuple[int, ...]:
    """Returns the shape of the chunks of a stored array.

    Raises ValueError where its shape or type is not that of the manifest, or a chunk is larger than the array: all of a
    chunk is read, whatever part of it is asked for.
    """
    if array.dtype.name != record.dtype or tuple(array.shape) != record.shape:
        raise ValueError(
            f"its array is {array.dtype.name}{list(array.shape)}, not {record.dtype}{list(record.shape)}"
        )
    chunk = tuple(int(size or 1) for size in array.chunk_layout.read_chunk.shape or record.shape)
    if any(size > max(1, total) for size, total in zip(chunk, record.shape, strict=True)):
        raise ValueError(
            f"its chunks are {list(chunk)}, larger than {name!r} itself, {list(record.shape)}"
        )
    return chunk
