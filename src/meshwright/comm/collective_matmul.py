"""Collective matmul: gathers and scatters of the sequence, overlapped with the matmuls they serve.

In tensor parallelism, a column-parallel matmul needs the full sequence, of which each device of
`tensor` has a chunk. Instead of gathering first, the chunks travel around a ring, and each is
multiplied while the next is on its way (Wang et al. 2023, doi:10.1145/3567955.3567959). A
row-parallel matmul computes the chunks that others wait for first, and their sums travel around the
ring. Half of every chunk goes each way, so that both directions of a link are in use.

Device 0 of four over time, in one direction; device i sends to device i + 1:

    column_parallel   matmul    f(x0)        f(x3)         f(x2)         f(x1)
                      link      x3 arrives   x2 arrives    x1 arrives

    row_parallel      matmul    f(y3)        f(y2)         f(y1)         f(y0)
                      link                   sum 2 arrives sum 1 arrives sum 0 arrives

In a row-parallel step, the device adds its product to the sum that arrives and sends the result on.
The last sum is that of its own chunk.

The gradient of the weights is one matmul over the full sequence, whose chunks the forward pass has
collected.
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


class _TensorRing:
    """Ring over `tensor`, and the part of the sequence that a device has or needs in each step.

    A part is what travels in one direction: half of a chunk, or a chunk where all travel in the
    same direction. Parts are counted along the sequence: chunk c has parts 2c and 2c + 1, of which
    the first travels forward and the second backward.
    """

    def __init__(self, chunk: int):
        self.size = lax.axis_size("tensor")
        self.index = lax.axis_index("tensor")
        # A ring of two has one link, and an odd chunk no halves.
        self.directions = (1, -1) if self.size > 2 and chunk % 2 == 0 else (1,)
        self.part = chunk // len(self.directions)

    def start(self, shifts: int, direction: int) -> jax.Array:
        """Returns the position at which the part starts that arrives after `shifts` shifts."""
        chunk = (self.index - direction * shifts) % self.size
        return (chunk * len(self.directions) + self.directions.index(direction)) * self.part

    def shift(self, parts: list[jax.Array]) -> list[jax.Array]:
        """Sends the part of each direction to the next device in that direction.

        Returns the parts that arrive.
        """
        return [
            ring_shift(part, "tensor", direction)
            for part, direction in zip(parts, self.directions, strict=True)
        ]

    def take(self, tree: Any, start: jax.Array) -> Any:
        """Slices the part at `start` from full sequences."""
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, start, self.part, _SEQUENCE), tree
        )

    def arrivals(self, x: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Gathers a chunk around the ring: yields each part of the full sequence and its start."""
        parts = jnp.split(x, len(self.directions), axis=_SEQUENCE)
        for step in range(self.size):
            # The next parts leave before these are used. XLA removes the shift of the last step.
            arriving = self.shift(parts)
            for part, direction in zip(parts, self.directions, strict=True):
                yield part, self.start(step, direction)
            parts = arriving

    def scatter(self, part_at: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Sums `part_at(start)` over the ring for every start.

        Returns the sums of this device's chunk.
        """
        sums: list[jax.Array] = []
        for step in range(self.size):
            # The sums of this step reach the device of their chunk after the shifts of the
            # remaining steps.
            shifts = step + 1 - self.size
            starts = [self.start(shifts, direction) for direction in self.directions]
            if not sums:
                sums = [part_at(start) for start in starts]
                continue
            # Without barriers XLA computes the parts of all steps before most sums have left, and
            # fuses the addition into the matmul, which then waits for the sum. The barriers make
            # the matmuls of a step the work that overlaps the transfer of its sums.
            sums, starts = lax.optimization_barrier((sums, starts))
            arriving = self.shift(sums)
            products = lax.optimization_barrier([part_at(start) for start in starts])
            sums = [a + p for a, p in zip(arriving, products, strict=True)]
        return jnp.concatenate(sums, axis=_SEQUENCE)


def _write(full: Any, part: Any, start: jax.Array) -> Any:
    """Writes a part into full sequences at `start`."""
    return jax.tree.map(
        lambda x, p: lax.dynamic_update_slice_in_dim(x, p, start, _SEQUENCE), full, part
    )


def _empty(parts: Any, seq: int) -> Any:
    """Returns uninitialised arrays shaped like `parts`, with sequences of length `seq`."""
    return jax.tree.map(lambda p: lax.empty((p.shape[0], seq, *p.shape[2:]), p.dtype), parts)


def _input_gradient(f: TokenFunction, x: jax.Array, weights: Any, g: Any) -> jax.Array:
    """Returns `(df/dx)^T g`."""
    _, vjp = jax.vjp(lambda x: f(x, weights), x)
    (g_x,) = vjp(g)
    return g_x


def _weight_gradient(f: TokenFunction, x: jax.Array, weights: Any, g: Any) -> Any:
    """Returns `(df/dweights)^T g`."""
    _, vjp = jax.vjp(lambda weights: f(x, weights), weights)
    (g_weights,) = vjp(g)
    return g_weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def column_parallel(f: TokenFunction, x_BTD: jax.Array, weights: Any) -> Any:
    """Returns `f(sequence_all_gather(x), weights)`: a Megatron pair opens.

    With G = sequence_all_gather and S = sequence_reduce_scatter, its transpose:

        out = f(G x, w)

    x_BTD: this device's chunk of the sequence. Sends V(n-1)/n forward and backward, for V bytes of
    the full sequence.
    """
    return _column_forward(f, x_BTD, weights)[0]


def _column_forward(f: TokenFunction, x_BTD: jax.Array, weights: Any) -> Any:
    ring = _TensorRing(x_BTD.shape[_SEQUENCE])
    seq = x_BTD.shape[_SEQUENCE] * ring.size
    gathered = _empty(x_BTD, seq)
    out: Any = None
    for part, start in ring.arrivals(x_BTD):
        result = f(part, weights)
        if out is None:
            out = _empty(result, seq)
        out = _write(out, result, start)
        gathered = _write(gathered, part, start)
    return out, (gathered, weights)


def _column_backward(f: TokenFunction, saved: Any, g: Any) -> tuple[jax.Array, Any]:
    gathered, weights = saved
    ring = _TensorRing(gathered.shape[_SEQUENCE] // lax.axis_size("tensor"))

    def gradient_at(start: jax.Array) -> jax.Array:
        return _input_gradient(f, ring.take(gathered, start), weights, ring.take(g, start))

    g_x = ring.scatter(gradient_at)
    return g_x, _weight_gradient(f, gathered, weights, g)


column_parallel.defvjp(_column_forward, _column_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def row_parallel(f: TokenFunction, y_BTF: jax.Array, weights: Any) -> jax.Array:
    """Returns `sequence_reduce_scatter(f(y, weights))`: a Megatron pair closes.

    With S = sequence_reduce_scatter and G = sequence_all_gather, its transpose:

        out = S f(y, w)     grad_y = (df/dy)^T G grad_out     grad_w = (df/dw)^T G grad_out

    y_BTF: the full sequence, features split over `tensor`. Sends V(n-1)/n forward and backward, for
    V bytes of `f(y, w)`.
    """
    return _row_forward(f, y_BTF, weights)[0]


def _row_forward(f: TokenFunction, y_BTF: jax.Array, weights: Any) -> Any:
    ring = _TensorRing(y_BTF.shape[_SEQUENCE] // lax.axis_size("tensor"))
    out_BTD = ring.scatter(lambda start: f(ring.take(y_BTF, start), weights))
    return out_BTD, (y_BTF, weights)


def _row_backward(f: TokenFunction, saved: Any, g_BTD: jax.Array) -> tuple[jax.Array, Any]:
    y_BTF, weights = saved
    ring = _TensorRing(g_BTD.shape[_SEQUENCE])
    g_y = lax.empty(y_BTF.shape, y_BTF.dtype)
    gathered = _empty(g_BTD, y_BTF.shape[_SEQUENCE])
    for g_part, start in ring.arrivals(g_BTD):
        g_y_part = _input_gradient(f, ring.take(y_BTF, start), weights, g_part)
        g_y = _write(g_y, g_y_part, start)
        gathered = _write(gathered, g_part, start)
    return g_y, _weight_gradient(f, y_BTF, weights, gathered)


row_parallel.defvjp(_row_forward, _row_backward)

RING = types.SimpleNamespace(column_parallel=column_parallel, row_parallel=row_parallel)
"""Matmuls of a run with `tensor_strategy` ring."""
