"""Tensors of a checkpoint: their format, written and read by the shards of devices.

A tensor is a Zarr array without compression, a folder of the tensor's name in `state`. A shard is
one chunk of it, or several. `checkpoint.blocks` reads and writes them without devices.
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
    """Returns the shape of the blocks of a tensor: slowest dimensions are cut first,
    so blocks are contiguous."""
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
    repeated = dict(how)
    if how.get("create") and not how.get("delete_existing"):
        repeated["open"] = True
    attempts = iter([how])
    return result_of(
        state, lambda: tensorstore.open(spec | next(attempts, repeated), context=context)
    )


def write_shards(
    state: Path,
    abstract: dict[str, Any],
    shards: Shards,
    *,
    creates: bool,
    wrote: Callable[[], None],
) -> None:
    """Writes the shards of this process.
    creates: writes the arrays' descriptions too, which one process does.

    abstract: shapes, types and shardings of the tensors.  wrote: called after each shard.
    """
    # The others do not wait for the descriptions.
    how = {"create": True} if creates else {"open": True, "assume_metadata": True}
    writing = []
    for name, x in abstract.items():
        if not creates and not shards[name]:
            continue
        shard, _, _ = _division(x.shape, x.dtype.itemsize, x.sharding)
        chunk = _chunk_shape(shard, x.dtype.itemsize)
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
    """Returns a digest of which slices of which tensors this process has: its shards serve no
    other layout.

    tensors: arrays or ShapeDtypeStructs with shardings, by name.
    """
    layout: list[Any] = [[], ""]
    if jax.process_count() > 1:
        slices = {name: sorted(_slices_held(x)) for name, x in sorted(tensors.items())}
        layout = [[jax.process_index(), jax.process_count()], slices]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def host_shards(tensors: dict[str, jax.Array], *, owned: bool) -> Shards:
    """Returns copies in the host's memory of the shards on this process's devices, one
    of each slice of a tensor.

    owned: only what this process writes.
    Of a slice that several processes have, each writes a part (`_owned_part`).
    """
    copying: dict[str, dict[Bounds, jax.Array]] = {}
    shards: Shards = {name: [] for name in tensors}
    for name, x in tensors.items():
        slices = _slices_on_devices(x, owned=owned)
        for data in slices.values():
            data.copy_to_host_async()
        _, parts, _ = _division(x.shape, x.dtype.itemsize, x.sharding)
        if owned and parts > 1:
            # Its parts are copies on the devices: of one tensor at a time.
            shards[name] = _on_host(slices)
        else:
            copying[name] = slices
        del slices  # before those of the next tensor are made
    for name, slices in copying.items():
        shards[name] = _on_host(slices)
    return shards


def _slices_on_devices(x: jax.Array, *, owned: bool) -> dict[Bounds, jax.Array]:
    """Returns the slices of a tensor on this process's devices, each once.
    owned: as of `host_shards`."""
    slices: dict[Bounds, jax.Array] = {}
    for shard in x.addressable_shards:
        bounds: Bounds | None = _bounds(shard.index, x.shape)
        if owned:
            bounds = _owned_part(x, shard.index, shard.replica_id)
        if bounds is None or bounds in slices:
            continue
        slices[bounds] = _part_of_shard(shard, bounds)
    return slices


def _part_of_shard(shard: jax.Shard, bounds: Bounds) -> jax.Array:
    """Returns a part of a shard, whose bounds in the tensor are given."""
    shape = tuple(stop - start for start, stop in bounds)
    if shape == shard.data.shape:
        return shard.data
    offsets = [
        start - (index.start or 0) for (start, _), index in zip(bounds, shard.index, strict=True)
    ]
    return jax.lax.dynamic_slice(shard.data, offsets, shape)


def _on_host(slices: dict[Bounds, jax.Array]) -> list[tuple[Index, np.ndarray]]:
    """Returns index and values of each slice."""
    shards = []
    for bounds, x in slices.items():
        index = tuple(slice(start, stop) for start, stop in bounds)
        shards.append((index, _copied(x)))
    return shards


def _copied(x: jax.Array) -> np.ndarray:
    """Values in memory of the host's own: an array in a host's memory shares that
    of the device's, which is donated."""
    values = np.asarray(x)
    accelerator = x.sharding.memory_kind == "device" and next(iter(x.devices())).platform != "cpu"
    return values if accelerator or values.flags.owndata else values.copy()


@functools.lru_cache(maxsize=4096)
def _division(
    shape: tuple[int, ...], itemsize: int, sharding: Any
) -> tuple[tuple[int, ...], int, int]:
    """Shape of the parts in which the replicas of a slice divide it, their number,
    and that of replicas."""
    local = sharding.shard_shape(shape)
    devices = sharding.device_set
    processes = {device.process_index for device in devices}
    replicas = len(devices) * math.prod(local) // max(1, math.prod(shape))
    writers = replicas if len(processes) > 1 else 1
    divided_dim, count = replica_parts(local, itemsize, writers)
    part = list(local)
    if count > 1:
        part[divided_dim] //= count
    return tuple(part), count, replicas


def _owned_part(x: Any, index: Index, replica: int) -> Bounds | None:
    """Returns what one of the replicas of a slice writes of it; None for nothing.

    x: array, or a ShapeDtypeStruct with its sharding.  index: of the slice.
    """
    shape, count, replicas = _division(x.shape, x.dtype.itemsize, x.sharding)
    part = next((i for i in range(count) if i * replicas // count == replica), None)
    if part is None:
        return None
    bounds = []
    for size, (start, stop) in zip(shape, _bounds(index, x.shape), strict=True):
        if size < stop - start:  # the dimension that is divided
            start += part * size
        bounds.append((start, start + size))
    return tuple(bounds)


def _bounds(index: Index, shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _chunk_shape(shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of the chunks of a shard,
    which divides it: no two processes write into one chunk."""
    largest = block_shape(shard, itemsize, _CHUNK)
    return tuple(_largest_divisor(size, most) for size, most in zip(shard, largest, strict=True))


def _largest_divisor(size: int, most: int) -> int:
    return max((n for n in range(1, most + 1) if size % n == 0), default=1)


def read_shards(state: Path, name: str, x: Any, record: TensorRecord, *, owned: bool) -> jax.Array:
    """Reads the slices of a tensor that the devices of this process need, all at once,
    into shape and sharding of `x`.

    What is beyond the stored array is zero: a vocabulary may be padded otherwise. owned: slices
    that another process has too are read by the first of them, and are zero in the others
    (`from_first_replica`). Raises ValueError where the array is not that of `record`.
    """
    reading = _start_reading(state, name, record, _slices_read(x, owned=owned))
    slices: dict[Bounds, np.ndarray] = {}
    for bounds in _slices_held(x):
        shape = tuple(stop - start for start, stop in bounds)
        values = None
        if bounds in reading:
            values = _read_part(state, *reading[bounds])
        slices[bounds] = _padded_with_zeros(values, shape, x.dtype)
    return jax.make_array_from_callback(
        x.shape, x.sharding, lambda index: slices[_bounds(index or (), x.shape)]
    )


def _slices_held(x: Any) -> list[Bounds]:
    """Returns the slices of a tensor that the devices of this process need, each once."""
    indices = x.sharding.addressable_devices_indices_map(x.shape).values()
    return list(dict.fromkeys(_bounds(index or (), x.shape) for index in indices))


def _slices_read(x: Any, *, owned: bool) -> list[Bounds]:
    """Returns those of the slices that this process reads. owned: as of `read_shards`."""
    axes: tuple[str, ...] = ()
    if owned:
        axes = _replica_axes(x.sharding)
    if not axes:
        return _slices_held(x)
    first_replica = {device.id for device in _replicas(x.sharding.mesh, axes)[0]}
    slices: dict[Bounds, None] = {}
    for device, index in x.sharding.addressable_devices_indices_map(x.shape).items():
        if device.id in first_replica:
            slices[_bounds(index or (), x.shape)] = None
    return list(slices)


def _start_reading(
    state: Path, name: str, record: TensorRecord, slices: list[Bounds]
) -> dict[Bounds, tuple[Any, Any]]:
    """Starts to read slices of a stored array;
    returns the part of the array and the future of each.

    A slice that is beyond the stored array is not read.
    """
    if not slices:
        return {}
    array = result_of(state, lambda: open_array(state, name))
    check_array(name, array, record)
    reading: dict[Bounds, tuple[Any, Any]] = {}
    for bounds in slices:
        inside = tuple(
            slice(start, min(stop, size))
            for (start, stop), size in zip(bounds, array.shape, strict=True)
        )
        if all(part.start < part.stop for part in inside):
            reading[bounds] = (array[inside], array[inside].read())
    return reading


def _padded_with_zeros(values: np.ndarray | None, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns values in a larger shape, zero where there are none."""
    if values is not None and values.shape == shape:
        return values
    padded = np.zeros(shape, dtype)
    if values is not None:
        padded[tuple(slice(0, size) for size in values.shape)] = values
    return padded


def _read_part(state: Path, part: Any, started: Any) -> np.ndarray:
    """Returns a part of an array whose reading has started,
    and reads it again where that failed for now."""
    futures = iter([started])
    values: np.ndarray = result_of(state, lambda: next(futures, None) or part.read())
    note_progress()
    return values


def from_first_replica(x: jax.Array, sharding: Any) -> jax.Array:
    """Returns a tensor in which the slices that several processes have are those
    of the first of them, bit by bit."""
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
    """Returns the mesh axes over which a tensor is repeated,
    where that is in several processes; else none."""
    if jax.process_count() == 1 or not isinstance(sharding, NamedSharding):
        return ()
    split_axes: set[str] = set()
    for axes_of_dim in sharding.spec:
        if isinstance(axes_of_dim, str):
            split_axes.add(axes_of_dim)
        else:
            split_axes.update(axes_of_dim or ())
    repeated = [
        axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in split_axes
    ]
    axes = tuple(repeated)
    replicas_of_one_slice = _replicas(sharding.mesh, axes)[:, 0]
    processes = {device.process_index for device in replicas_of_one_slice}
    return axes if len(processes) > 1 else ()


def _replicas(mesh: Any, axes: tuple[str, ...]) -> np.ndarray:
    """Returns the devices of a mesh, [replica, slice],
    of a tensor that is repeated over some of its axes."""
    dims = [mesh.axis_names.index(axis) for axis in axes]
    replicas = math.prod(mesh.shape[axis] for axis in axes)
    return np.moveaxis(mesh.devices, dims, range(len(dims))).reshape(replicas, -1)


def open_array(state: Path, name: str) -> Any:
    """Opens the array of a tensor in the folder `state` of a checkpoint with TensorStore;
    returns a future."""
    kvstore, context = kvstore_of(state / name)
    return tensorstore.open({"driver": "zarr", "kvstore": kvstore}, context=context)


def check_array(name: str, array: Any, record: TensorRecord) -> tuple[int, ...]:
    """Returns the shape of the chunks of a stored array.

    Raises ValueError where its shape or type is not that of the manifest, or a chunk is larger than
    the array: all of a chunk is read, whatever part of it is asked for.
    """
    if array.dtype.name != record.dtype or tuple(array.shape) != record.shape:
        raise ValueError(
            f"its array is {array.dtype.name}{list(array.shape)}, not "
            f"{record.dtype}{list(record.shape)}"
        )
    chunk = tuple(int(size or 1) for size in array.chunk_layout.read_chunk.shape or record.shape)
    if any(size > max(1, total) for size, total in zip(chunk, record.shape, strict=True)):
        raise ValueError(
            f"its chunks are {list(chunk)}, larger than {name!r} itself, {list(record.shape)}"
        )
    return chunk
