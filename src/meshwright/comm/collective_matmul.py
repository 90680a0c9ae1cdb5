"""Collective matmul: tensor parallelism's gathers and scatters of the sequence, overlapped with the matmuls they serve.

A column-parallel matmul needs the full sequence, of which each device of `tensor` has a chunk. Instead of gathering
first, the chunks travel around a ring, and each is multiplied while the next is on its way (Wang et al. 2023,
doi:10.1145/3567955.3567959). A row-parallel matmul computes the chunks that others wait for first, and their sums
travel around the ring. Half of every chunk goes each way, so that both directions of a link are in use.

The gradient of the weights is one matmul over the full sequence, whose chunks the forward pass has collected.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.comm.collectives import TokenFunction, ring_shift

_SEQUENCE = 1
"""Dimension of the sequence."""


class _Ring:
    """Ring over `tensor`, and which part of the sequence a device has, or needs, in each step.

    A part is one direction's half of a chunk. Parts are counted along the sequence: chunk c has parts 2c and 2c + 1,
    of which the first travels forward and the second backward.
    """

    def __init__(self, chunk: int):
        self.size, self.place = lax.axis_size("tensor"), lax.axis_index("tensor")
        # A ring of two has one link, and an odd chunk no halves.
        self.directions = (1, -1) if self.size > 2 and chunk % 2 == 0 else (1,)
        self.part = chunk // len(self.directions)

    def start(self, shifts: int, direction: int) -> jax.Array:
        """Returns where in the sequence the part starts that is here after `shifts` shifts in a direction."""
        chunk = (self.place - direction * shifts) % self.size
        return (chunk * len(self.directions) + self.directions.index(direction)) * self.part

    def shift(self, tree: Any, direction: int) -> Any:
        """Sends values to the next device of the ring in a direction."""
        return jax.tree.map(lambda x: ring_shift(x, "tensor", direction), tree)

    def take(self, tree: Any, start: jax.Array) -> Any:
        """Takes the part at `start` of full sequences."""
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, start, self.part, _SEQUENCE), tree
        )

    def arrivals(self, x: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Gathers a chunk around the ring: yields each part of the full sequence, and where it starts."""
        parts = jnp.split(x, len(self.directions), axis=_SEQUENCE)
        for step in range(self.size):
            # The next parts leave before these are used.
            leaving = [self.shift(p, d) for p, d in zip(parts, self.directions, strict=True)]
            for part, direction in zip(parts, self.directions, strict=True):
                yield part, self.start(step, direction)
            if step < self.size - 1:
                parts = leaving

    def scatter(self, part_at: Callable[[jax.Array], Any]) -> jax.Array:
        """Sums `part_at(start)` over the ring, each part where it belongs; returns this device's chunk."""
        sums: list[Any] = []
        for step in range(self.size):
            # After all other steps these sums are at home.
            starts = [self.start(step + 1 - self.size, direction) for direction in self.directions]
            if not sums:
                sums = [part_at(start) for start in starts]
                continue
            # Left to itself, XLA computes the parts of all steps before most sums have left, and fuses the addition
            # into the matmul, which then waits for the sum. The barriers make a step's matmuls the work beside which
            # its sums travel.
            sums, starts = lax.optimization_barrier((sums, starts))
            arriving = [
                self.shift(total, d) for total, d in zip(sums, self.directions, strict=True)
            ]
            own = lax.optimization_barrier([part_at(start) for start in starts])
            sums = [a + o for a, o in zip(arriving, own, strict=True)]
        return jnp.concatenate(sums, axis=_SEQUENCE)


def _write(full: Any, part: Any, start: jax.Array) -> Any:
    return jax.tree.map(
        lambda x, p: lax.dynamic_update_slice_in_dim(x, p, start, _SEQUENCE), full, part
    )


def _empty(parts: Any, seq: int) -> Any:
    return jax.tree.map(lambda p: lax.empty((p.shape[0], seq, *p.shape[2:]), p.dtype), parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def column_parallel(f: TokenFunction, x_BTD: jax.Array, weights: Any) -> Any:
    """Returns `f(sequence_all_gather(x), weights)`: a Megatron pair opens.

    x_BTD: this device's chunk of the sequence. Sends V(n-1)/n forward and backward, for V bytes of the full sequence.
    """
    return _column_forward(f, x_BTD, weights)[0]


def _column_forward(f: TokenFunction, x_BTD: jax.Array, weights: Any) -> Any:
    links = _Ring(x_BTD.shape[_SEQUENCE])
    seq = x_BTD.shape[_SEQUENCE] * links.size
    full, out = _empty(x_BTD, seq), None
    for part, start in links.arrivals(x_BTD):
        result = f(part, weights)
        out = _write(_empty(result, seq) if out is None else out, result, start)
        full = _write(full, part, start)
    return out, (full, weights)


def _column_backward(f: TokenFunction, saved: Any, g: Any) -> tuple[jax.Array, Any]:
    full, weights = saved
    links = _Ring(full.shape[_SEQUENCE] // lax.axis_size("tensor"))

    def gradient_at(start: jax.Array) -> jax.Array:
        vjp = jax.vjp(lambda x: f(x, weights), links.take(full, start))[1]
        return vjp(links.take(g, start))[0]

    g_x = links.scatter(gradient_at)
    return g_x, jax.vjp(lambda w: f(full, w), weights)[1](g)[0]


column_parallel.defvjp(_column_forward, _column_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def row_parallel(f: TokenFunction, y_BTF: jax.Array, weights: Any) -> jax.Array:
    """Returns `sequence_reduce_scatter(f(y, weights))`: a Megatron pair closes.

    y_BTF: the full sequence, features split over `tensor`.
    """
    return _row_forward(f, y_BTF, weights)[0]


def _row_forward(f: TokenFunction, y_BTF: jax.Array, weights: Any) -> Any:
    links = _Ring(y_BTF.shape[_SEQUENCE] // lax.axis_size("tensor"))
    return links.scatter(lambda start: f(links.take(y_BTF, start), weights)), (y_BTF, weights)


def _row_backward(f: TokenFunction, saved: Any, g_BTD: jax.Array) -> tuple[jax.Array, Any]:
    y_BTF, weights = saved
    links, seq = _Ring(g_BTD.shape[_SEQUENCE]), y_BTF.shape[_SEQUENCE]
    g_y, g_full = lax.empty(y_BTF.shape, y_BTF.dtype), _empty(g_BTD, seq)
    for part, start in links.arrivals(g_BTD):
        vjp = jax.vjp(lambda y: f(y, weights), links.take(y_BTF, start))[1]
        g_y = _write(g_y, vjp(part)[0], start)
        g_full = _write(g_full, part, start)
    return g_y, jax.vjp(lambda w: f(y_BTF, w), weights)[1](g_full)[0]


row_parallel.defvjp(_row_forward, _row_backward)

RING = types.SimpleNamespace(column_parallel=column_parallel, row_parallel=row_parallel)
"""What a run with `tensor_strategy` ring has."""
