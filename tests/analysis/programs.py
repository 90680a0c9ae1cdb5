"""Small programs whose collectives are counted by hand: (kind, axes) -> (count, payload bytes of all executions).

The mesh is fsdp=4, tensor=2; every array is float32, so an element is 4 bytes. A payload is that of the whole array
that one group of devices moves.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
    ring_shift,
)

F, T = "fsdp", "tensor"
AXES = {F: 4, T: 2}
Counts = dict[tuple[str, str], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays on the mesh, and what it sends."""

    body: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    out: Any
    sends: Counts
    manual: bool = True
    exact: bool = True
    branch: bool = False

    def build(self, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
        """The jitted function and its abstract arguments."""
        arguments = tuple(
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(self.shapes, self.specs, strict=True)
        )
        if self.manual:
            body = jax.shard_map(
                self.body, mesh=mesh, in_specs=self.specs, out_specs=self.out, check_vma=False
            )
            return jax.jit(body), arguments
        return jax.jit(self.body, out_shardings=NamedSharding(mesh, self.out)), arguments


def _fsdp(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ all_gather(w, (F,), 0)


def _fsdp_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jnp.sin(x @ all_gather(w, (F,), 0)).sum())(w)


def _layers(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.sin(x @ all_gather(w, (F,), 0)), None), x, w)[0]


def _layers_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.grad(lambda w: _layers(x, w).sum())(w)


def _megatron(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return all_reduce(jnp.sin(x @ up) @ down, (T,))


def _sequence(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
    def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.sin(reduce_scatter(jnp.sin(all_gather(x, (T,), 0) @ up) @ down, (T,), 0)).sum()

    return jax.grad(loss, (0, 1, 2))(x, up, down)


def _both(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    h = jnp.sin(x @ all_gather(up, (F,), 0))
    return all_reduce(h @ all_gather(down, (F,), 1), (T,))


def _ring(x: jax.Array) -> jax.Array:
    def turn(carry: Any, _: None) -> Any:
        block, total = carry
        return (ring_shift(block, F, 1), total + jnp.sin(block)), None

    return lax.scan(turn, (x, jnp.zeros_like(x)), None, length=4)[0][1]


def _exchange(x: jax.Array) -> jax.Array:
    return all_to_all(jnp.sin(all_to_all(x, (F,), 1, 0)), (F,), 0, 1)


def _nested(x: jax.Array) -> jax.Array:
    def inner(x: jax.Array, _: None) -> Any:
        return jnp.sin(all_reduce(x, (T,))), None

    def outer(x: jax.Array, _: None) -> Any:
        return ring_shift(lax.scan(inner, x, None, length=5)[0], F, 1), None

    return lax.scan(outer, x, None, length=3)[0]


def _accumulate(x: jax.Array, w: jax.Array) -> jax.Array:
    def one(total: jax.Array, x: jax.Array) -> Any:
        return total + jax.grad(lambda w: jnp.sin(x @ all_gather(w, (F,), 0)).sum())(w), None

    return all_reduce(lax.scan(one, jnp.zeros_like(w), x)[0], (T,))


def _everywhere(x: jax.Array) -> jax.Array:
    return all_reduce(jnp.sin(x).sum(), (F, T))


def _two_arrays(x: jax.Array, y: jax.Array) -> Any:
    return all_reduce((x, y), (F,))


def _sent_around(x: jax.Array) -> jax.Array:
    return broadcast(x, (T,), 1)


def _perhaps(x: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] > 0, lambda x: all_reduce(x, (F,)), lambda x: x * 2, x)


def _until(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda x: x[0, 0] < 3.0, lambda x: all_reduce(jnp.abs(x) + 1, (T,)), x)


def _automatic(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


# Every hand count: elements * 4 bytes, times how often.
PROGRAMS: dict[str, Program] = {
    # w [16, 8] is whole after the gather: 16 * 8 * 4 = 512.
    "fsdp": Program(_fsdp, ((8, 16), (16, 8)), (P(F), P(F)), P(F), {("all-gather", F): (1, 512)}),
    # The gradient is reduce-scattered; the gather of the forward pass is still needed for sin's argument.
    "fsdp gradient": Program(
        _fsdp_gradient, ((8, 16), (16, 8)), (P(F), P(F)), P(F),
        {("all-gather", F): (1, 512), ("reduce-scatter", F): (1, 512)},
    ),
    # Five layers of w [16, 16]: 5 * 16 * 16 * 4 = 5120.
    "fsdp layers": Program(
        _layers, ((8, 16), (5, 16, 16)), (P(F), P(None, F)), P(F), {("all-gather", F): (5, 5120)}
    ),
    # y [8, 16] summed: 8 * 16 * 4 = 512.
    "megatron": Program(
        _megatron, ((8, 16), (16, 32), (32, 16)), (P(), P(None, T), P(T)), P(), {("all-reduce", T): (1, 512)}
    ),
    # x [8, 16] gathered, y [8, 16] scattered; backwards y's cotangent gathered, x's scattered. 512 each.
    "megatron with the sequence": Program(
        _sequence, ((8, 16), (16, 32), (32, 16)), (P(T), P(None, T), P(T)), (P(T), P(None, T), P(T)),
        {("all-gather", T): (2, 1024), ("reduce-scatter", T): (2, 1024)},
    ),
    # A device of tensor=2 gathers up [16, 16] and down [16, 16] over fsdp (1024 each) and sums y [2, 16] (128).
    "fsdp x tensor": Program(
        _both, ((8, 16), (16, 32), (32, 16)), (P(F), P(F, T), P(T, F)), P(F),
        {("all-gather", F): (2, 2048), ("all-reduce", T): (1, 128)},
    ),
    # Four turns, each passing on a block of [2, 16]: 4 * 128.
    "ring": Program(_ring, ((8, 16),), (P(F),), P(F), {("collective-permute", F): (4, 512)}),
    # A device holds [2, 16] (128 bytes) and exchanges it there and back.
    "all-to-all": Program(_exchange, ((8, 16),), (P(F),), P(F), {("all-to-all", F): (2, 256)}),
    # 3 * 5 sums and 3 shifts of [2, 16].
    "nested loops": Program(
        _nested, ((8, 16),), (P(F),), P(F),
        {("all-reduce", T): (15, 15 * 128), ("collective-permute", F): (3, 3 * 128)},
    ),
    # Three microbatches scatter w's gradient [16, 8] (512 bytes); what is left is summed once: [4, 8], 128 bytes. The
    # gather is the same for all, and XLA:CPU takes it out of the loop.
    "accumulation": Program(
        _accumulate, ((3, 8, 16), (16, 8)), (P(None, T), P(F)), P(F),
        {("all-gather", F): (1, 512), ("reduce-scatter", F): (3, 1536), ("all-reduce", T): (1, 128)},
    ),
    "all axes": Program(_everywhere, ((8, 16),), (P(F, T),), P(), {("all-reduce", "fsdp+tensor"): (1, 4)}),
    # One collective moves a tuple of [2, 16] and [3]: 128 + 12.
    "two arrays": Program(_two_arrays, ((8, 16), (12,)), (P(F), P(F)), (P(), P()), {("all-reduce", F): (1, 140)}),
    "broadcast": Program(_sent_around, ((8, 16),), (P(F),), P(F), {("all-reduce", T): (1, 128)}),
    # At most once: it stands in a branch.
    "branch": Program(_perhaps, ((8, 16),), (P(F),), P(F), {("all-reduce", F): (1, 128)}, branch=True),
    # The trips hang on the data: counted once, and said to be inexact.
    "unknown trips": Program(_until, ((8, 16),), (P(F),), P(F), {("all-reduce", T): (1, 128)}, exact=False),
    # Left to the compiler: both contract over tensor, so [8, 16] must be summed; a device has [2, 16].
    "automatic": Program(
        _automatic, ((8, 32), (32, 16)), (P(F, T), P(T)), P(F), {("all-reduce", T): (1, 128)}, manual=False
    ),
    # Large enough for the compilers of real chips to overlap: 3 layers of w [512, 512], gathered (and kept for the
    # backward pass) and scattered: 3 * 512 * 512 * 4 bytes each.
    "large layers": Program(
        _layers_gradient, ((512, 512), (3, 512, 512)), (P(F), P(None, F)), P(None, F),
        {("all-gather", F): (3, 3 * 2**20), ("reduce-scatter", F): (3, 3 * 2**20)},
    ),
}  # fmt: skip

# "large layers" at a size at which a v5p moves the reduce-scatters to its SparseCores: 3 layers of w [4096, 4096],
# gathered in bfloat16 (2 bytes) and scattered in float32.
OFFLOADED = Program(
    _layers_gradient, ((4096, 4096), (3, 4096, 4096)), (P(F), P(None, F)), P(None, F),
    {("all-gather", F): (3, 3 * 2 * 2**24), ("reduce-scatter", F): (3, 3 * 4 * 2**24)},
)  # fmt: skip
