"""Time, rate and correctness of collectives over every axis of a mesh,
and of matrix products on one device.

Sizes and bandwidths of collectives follow nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md). The
size is that of the whole array: the output of an all-gather, the input of a reduction, one device's
buffer in an all-to-all. Algorithm bandwidth is size over time. Bus bandwidth multiplies it by the
fraction of the size that crosses a device's links with any algorithm, so that it can be compared
with the bandwidth of the hardware.
"""

import csv
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.comm import collectives
from meshwright.errors import ConfigError, nearest

_TOTAL_SECONDS = 0.25
"""Seconds of measurement after which repetition stops, once there are `_MIN_CALLS`."""
_MIN_CALLS, _MAX_CALLS = 5, 50
_CALLS_TOGETHER = 20
"""Calls where several processes take part, which must make equally many."""
_ROUND = 16
"""Calls of a round on an accelerator, which follow each other on the device: the host takes about
0.1 ms to start one and to see its end. Simulated devices finish each call first: their threads
would wait for each other."""


def median_seconds(function: Callable[..., Any], *arguments: Any) -> tuple[float, int]:
    """Returns the median seconds of a call, over rounds of calls that are awaited together,
    and the calls timed."""
    jax.block_until_ready(function(*arguments))
    times: list[float] = []
    together = 1 if jax.default_backend() == "cpu" else _ROUND
    least, most = (_CALLS_TOGETHER, 0) if jax.process_count() > 1 else (_MIN_CALLS, _MAX_CALLS)
    while together * len(times) < least or (
        together * sum(times) < _TOTAL_SECONDS and together * len(times) < most
    ):
        start = time.perf_counter()
        for _ in range(together):
            result = function(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / together)
    return statistics.median(times), together * len(times)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective, the layout and size of its operands, and its expected result."""

    run: Callable[[jax.Array, str], jax.Array]
    """Function inside a shard_map: (this device's block, axis) -> this device's result."""
    output_spec: Callable[[str], P]
    """Layout of the result over the axis."""
    expected: Callable[[np.ndarray], np.ndarray]
    """Expected result, as one array, from the blocks [devices, elements] of all devices."""
    local_elements: Callable[[int, int], int] = lambda elements, devices: elements
    """(elements of the size, devices) -> elements of one device's input."""
    bus_factor: Callable[[int], float] = lambda devices: (devices - 1) / devices
    """Devices -> bus bandwidth over algorithm bandwidth."""


def _transposed(blocks: np.ndarray) -> np.ndarray:
    """Exchanges block j of device i with block i of device j."""
    n = len(blocks)
    return blocks.reshape(n, n, -1).transpose(1, 0, 2).reshape(-1)


def _replicated(axis: str) -> P:
    return P(None)


COLLECTIVES: dict[str, Collective] = {
    "all-gather": Collective(
        lambda x, a: collectives.all_gather(x, (a,), 0),
        _replicated,
        lambda x: x.reshape(-1),
        lambda m, n: m // n,
    ),
    "reduce-scatter": Collective(
        lambda x, a: collectives.reduce_scatter(x, (a,), 0), P, lambda x: x.sum(0)
    ),
    "all-reduce": Collective(
        lambda x, a: collectives.all_reduce(x, (a,)),
        _replicated,
        lambda x: x.sum(0),
        bus_factor=lambda n: 2 * (n - 1) / n,
    ),
    "all-to-all": Collective(lambda x, a: collectives.all_to_all(x, (a,), 0, 0), P, _transposed),
    "ring-shift": Collective(
        lambda x, a: collectives.ring_shift(x, a, 1),
        P,
        lambda x: np.roll(x, 1, 0).reshape(-1),
        bus_factor=lambda n: 1.0,
    ),
    "broadcast": Collective(
        lambda x, a: collectives.broadcast(x, (a,), 0),
        _replicated,
        lambda x: x[0],
        bus_factor=lambda n: 1.0,
    ),
}
"""Collectives that can be timed, by the name that `--kinds` takes; `ring-shift` is a
collective-permute to the next device."""


@dataclasses.dataclass(frozen=True)
class CollectiveTiming:
    """Median time and bandwidth of one collective over one axis at one size."""

    kind: str
    axis: str
    devices: int
    bytes: int
    """Size by nccl-tests' convention."""
    seconds: float
    calls: int
    algorithm_bandwidth: float
    """Size over time, in bytes/s."""
    bus_bandwidth: float
    """Bandwidth of a device's links, in bytes/s."""
    correct: bool


def time_collectives(
    mesh: Mesh, kinds: tuple[str, ...], sizes: tuple[int, ...]
) -> Iterator[CollectiveTiming]:
    """Times the collectives `kinds` over every axis of `mesh` that has more than one device.

    sizes: bytes, each rounded up to a multiple of 4 * devices^2.
    Raises ConfigError for an unknown collective or a mesh of one device.
    """
    for kind in kinds:
        if kind not in COLLECTIVES:
            raise ConfigError(
                f"timing {kind!r}", "no collective has that name", nearest(kind, COLLECTIVES)
            )
    axes = [str(axis) for axis, n in mesh.shape.items() if n > 1]
    if not axes:
        raise ConfigError(
            "timing collectives on one device",
            "a mesh of one device sends nothing",
            "for example --mesh data=8",
        )
    for axis, kind, size in itertools.product(axes, kinds, sizes):
        yield time_collective(mesh, axis, kind, size)


def time_collective(mesh: Mesh, axis: str, kind: str, size: int) -> CollectiveTiming:
    """Times one collective over one axis.
    size: bytes, rounded up to a multiple of 4 * devices^2."""
    collective = COLLECTIVES[kind]
    n = mesh.shape[axis]
    elements = max(n * n, -(-size // (4 * n * n)) * n * n)
    blocks = _small_integers(n, collective.local_elements(elements, n))
    x = jax.device_put(blocks.reshape(-1), NamedSharding(mesh, P(axis)))
    compiled = _compiled_collective(collective, mesh, axis, x)
    result = compiled(x)
    expected = collective.expected(blocks)
    # Each process sees the blocks of its own devices.
    correct = all(
        np.array_equal(np.asarray(shard.data), expected[shard.index])
        for shard in result.addressable_shards
    )
    seconds, calls = median_seconds(compiled, x)
    bandwidth = 4 * elements / seconds
    return CollectiveTiming(
        kind,
        axis,
        n,
        4 * elements,
        seconds,
        calls,
        bandwidth,
        bandwidth * collective.bus_factor(n),
        correct,
    )


def _small_integers(devices: int, elements: int) -> np.ndarray:
    """Returns integers below 251 as float32 [devices, elements]: their sums are exact
    in any order."""
    numbers = np.arange(devices * elements, dtype=np.int64) * 2654435761 % 251
    return numbers.astype(np.float32).reshape(devices, elements)


def _compiled_collective(collective: Collective, mesh: Mesh, axis: str, x: jax.Array) -> Any:
    """Compiles a collective of blocks of x over an axis of the mesh."""

    def run(block: jax.Array) -> jax.Array:
        return collective.run(block, axis)

    out_specs = collective.output_spec(axis)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=P(axis), out_specs=out_specs, check_vma=False)
    return jax.jit(sharded).lower(x).compile()


_CHECKED_ROWS = 4
"""Rows of a product that are compared with numpy's."""
_RELATIVE_ERROR = {"bfloat16": 1e-2, "float16": 2e-3}
"""Largest relative error by dtype: the result is rounded to 8 and 11 significant bits;
others are exact."""


@dataclasses.dataclass(frozen=True)
class MatmulTiming:
    """Median time and FLOP rate of a matrix multiplication [m, k] x [k, n] on one device."""

    m: int
    k: int
    n: int
    dtype: str
    """Element type of operands and result."""
    seconds: float
    calls: int
    flops_per_second: float
    correct: bool
    """Whether the result agrees with numpy's within the precision of `dtype`."""


def time_matmul(m: int, k: int, n: int, dtype: str) -> MatmulTiming:
    """Times a matrix multiplication [m, k] x [k, n] in `dtype` on the first device."""
    # Small integers: their sums are exact in float32.
    x = jnp.asarray(np.arange(m * k).reshape(m, k) % 3, dtype)
    w = jnp.asarray(np.arange(k * n).reshape(k, n) % 2, dtype)
    compiled: Any = jax.jit(jnp.matmul).lower(x, w).compile()
    expected = np.asarray(x[:_CHECKED_ROWS], np.float32) @ np.asarray(w, np.float32)
    result = np.asarray(compiled(x, w)[:_CHECKED_ROWS], np.float32)
    correct = np.allclose(result, expected, rtol=_RELATIVE_ERROR.get(dtype, 1e-6))
    # Products of such integers take less power, with which an H100 keeps a higher clock.
    x_key, w_key = jax.random.split(jax.random.key(0))
    x = jax.random.normal(x_key, x.shape).astype(dtype)
    w = jax.random.normal(w_key, w.shape).astype(dtype)
    seconds, calls = median_seconds(compiled, x, w)
    return MatmulTiming(m, k, n, dtype, seconds, calls, 2.0 * m * k * n / seconds, bool(correct))


def measure_memory_bandwidth(size: int) -> float:
    """Returns the bytes/s that one device reads and writes, measured by adding 1
    to an array of `size` bytes."""
    x = jnp.zeros(size // 4, jnp.float32)
    compiled: Any = jax.jit(lambda x: x + 1).lower(x).compile()
    seconds, _ = median_seconds(lambda: compiled(x))
    return 2 * x.nbytes / seconds


def write_csv(rows: Sequence[Any], file: Path) -> None:
    """Writes one line per dataclass in `rows`, with the field names as headings."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [f.name for f in dataclasses.fields(rows[0])])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
