"""Time, bandwidth and correctness of every collective over every axis of a mesh, at several sizes.

Sizes and bandwidths follow nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md). The size is that of the whole array:
the output of an all-gather, the input of a reduction, one device's buffer in an all-to-all. Algorithm bandwidth is
size over time. Bus bandwidth multiplies it by the fraction of the size that crosses a device's links with any
algorithm, so that it can be compared with the bandwidth of the hardware.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.bench.clock import median_seconds
from meshwright.comm import collectives
from meshwright.errors import ConfigError, nearest


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective, the layout and size of its operands, and its expected result."""

    run: Callable[[jax.Array, str], jax.Array]
    """Function inside a shard_map: (this device's block, axis) -> this device's result."""
    output_spec: Callable[[str], P]
    """Layout of the result over the axis."""
    expected: Callable[[np.ndarray], np.ndarray]
    """Expected result, as one array, from the blocks [devices, elements] of all devices."""
    local_elements: Callable[[int, int], int]
    """(elements of the size, devices) -> elements of one device's input."""
    bus_factor: Callable[[int], float]
    """Devices -> bus bandwidth over algorithm bandwidth."""


def _transposed(blocks: np.ndarray) -> np.ndarray:
    """Exchanges block j of device i with block i of device j."""
    n = len(blocks)
    return blocks.reshape(n, n, -1).transpose(1, 0, 2).reshape(-1)


COLLECTIVES: dict[str, Collective] = {
    "all-gather": Collective(
        lambda x, a: collectives.all_gather(x, (a,), 0),
        lambda a: P(None),
        lambda x: x.reshape(-1),
        lambda m, n: m // n,
        lambda n: (n - 1) / n,
    ),
    "reduce-scatter": Collective(
        lambda x, a: collectives.reduce_scatter(x, (a,), 0),
        P,
        lambda x: x.sum(0),
        lambda m, n: m,
        lambda n: (n - 1) / n,
    ),
    "all-reduce": Collective(
        lambda x, a: collectives.all_reduce(x, (a,)),
        lambda a: P(None),
        lambda x: x.sum(0),
        lambda m, n: m,
        lambda n: 2 * (n - 1) / n,
    ),
    "all-to-all": Collective(
        lambda x, a: collectives.all_to_all(x, (a,), 0, 0), P, _transposed, lambda m, n: m, lambda n: (n - 1) / n
    ),
    "ring-shift": Collective(
        lambda x, a: collectives.ring_shift(x, a, 1),
        P,
        lambda x: np.roll(x, 1, 0).reshape(-1),
        lambda m, n: m,
        lambda n: 1.0,
    ),
    "broadcast": Collective(
        lambda x, a: collectives.broadcast(x, (a,), 0), lambda a: P(None), lambda x: x[0], lambda m, n: m, lambda n: 1.0
    ),
}
"""Collectives that can be timed, by the name that `--kinds` takes; `ring-shift` is a collective-permute to the next
device."""


@dataclasses.dataclass(frozen=True)
class CollectiveTiming:
    """Time and bandwidth of one collective over one axis at one size."""

    kind: str
    """Name of the collective in COLLECTIVES."""
    axis: str
    """Mesh axis."""
    devices: int
    """Devices along the axis."""
    bytes: int
    """Size by nccl-tests' convention."""
    seconds: float
    """Median seconds of a call."""
    calls: int
    """Timed calls."""
    algorithm_bandwidth: float
    """Size over time, in bytes/s."""
    bus_bandwidth: float
    """Bandwidth of a device's links, in bytes/s."""
    correct: bool
    """Whether the result equals the expected one."""


def time_collectives(
    mesh: Mesh, kinds: tuple[str, ...], sizes: tuple[int, ...], over: tuple[str, ...] | None = None
) -> Iterator[CollectiveTiming]:
    """Times the collectives `kinds` over every axis of `mesh` that has more than one device.

    sizes: bytes, each rounded up to a multiple of 4 * devices^2.  over: some of the axes; None takes all.
    Raises ConfigError for an unknown collective or a mesh of one device.
    """
    for kind in kinds:
        if kind not in COLLECTIVES:
            raise ConfigError(f"timing {kind!r}", "no collective has that name", nearest(kind, COLLECTIVES))
    axes = [str(axis) for axis, n in mesh.shape.items() if n > 1 and (over is None or axis in over)]
    if not axes:
        raise ConfigError(
            "timing collectives on one device", "a mesh of one device sends nothing", "for example --mesh data=8"
        )
    for axis in axes:
        for kind in kinds:
            for size in sizes:
                yield _time(mesh, axis, kind, size)


def _time(mesh: Mesh, axis: str, kind: str, size: int) -> CollectiveTiming:
    collective, n = COLLECTIVES[kind], mesh.shape[axis]
    elements = max(n * n, -(-size // (4 * n * n)) * n * n)
    local = collective.local_elements(elements, n)
    # Small integers: their sums are exact in float32 in any order.
    blocks = (np.arange(n * local, dtype=np.int64) * 2654435761 % 251).astype(np.float32).reshape(n, local)
    x = jax.device_put(blocks.reshape(-1), NamedSharding(mesh, P(axis)))

    def run(block: jax.Array) -> jax.Array:
        return collective.run(block, axis)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=P(axis), out_specs=collective.output_spec(axis), check_vma=False)
    compiled: Any = jax.jit(sharded).lower(x).compile()
    result, expected = compiled(x), collective.expected(blocks)
    # Each process sees the blocks of its own devices.
    correct = all(np.array_equal(np.asarray(shard.data), expected[shard.index]) for shard in result.addressable_shards)
    seconds, calls = median_seconds(compiled, x)
    bandwidth = 4 * elements / seconds
    return CollectiveTiming(
        kind=kind,
        axis=axis,
        devices=n,
        bytes=4 * elements,
        seconds=seconds,
        calls=calls,
        algorithm_bandwidth=bandwidth,
        bus_bandwidth=bandwidth * collective.bus_factor(n),
        correct=correct,
    )
