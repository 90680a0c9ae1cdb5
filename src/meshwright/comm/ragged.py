"""Ragged all-to-all of rows: the token exchange of expert parallelism, in blocks of any size.

Accelerators use `lax.ragged_all_to_all`, which sends only the rows that exist. XLA:CPU has no such operation; there,
blocks of full size are sent, mostly padding. The rows that arrive are the same.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Exchange(NamedTuple):
    """Blocks of rows that the n devices of an axis send each other; each field is int32 [n], by the other device."""

    sizes: jax.Array
    """Rows for each device."""
    starts: jax.Array
    """First row here of those for each device."""
    remote_starts: jax.Array
    """First row there of those for each device."""
    arriving_sizes: jax.Array
    """Rows from each device."""
    arriving_starts: jax.Array
    """First row here of those from each device."""
    arriving_from: jax.Array
    """First row there of those from each device."""

    def reversed(self) -> "Exchange":
        """Returns the exchange that sends every row back to where it came from."""
        return Exchange(*self[3:5], self.arriving_from, *self[:2], self.remote_starts)


def plan_exchange(sent: jax.Array, received: jax.Array, axis: str, capacity: int) -> Exchange:
    """Fits the rows that devices send each other into buffers of `capacity` rows; sends a few integers.

    sent: rows for each device, [n]; they lie in this order.  received: rows from each device, [n]. A device takes its
    own rows first, then those of the devices after it around the axis. What finds no room is not sent: the last rows
    of a block.
    """
    here = lax.axis_index(axis)
    from_here = jnp.roll(received, -here)
    ends = jnp.minimum(jnp.cumsum(from_here), capacity)
    first = jnp.minimum(jnp.cumsum(from_here) - from_here, capacity)
    arriving_sizes, arriving_starts = jnp.roll(ends - first, here), jnp.roll(first, here)
    starts = jnp.cumsum(sent) - sent
    # Only the receiver knows where rows go and how many have room; only the sender knows where they were.
    sizes, remote_starts, arriving_from = all_to_all_counts(
        jnp.stack([arriving_sizes, arriving_starts, starts], 1).astype(jnp.int32), axis
    ).T
    return Exchange(sizes, starts, remote_starts, arriving_sizes, arriving_starts, arriving_from)


def all_to_all_counts(counts: jax.Array, axis: str) -> jax.Array:
    """Sends row `d` of each device's counts [n, ...] to device `d`; row `s` of the result comes from device `s`."""
    return lax.all_to_all(counts, axis, 0, 0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def ragged_all_to_all(x: jax.Array, exchange: Exchange, axis: str, rows: int, largest: int) -> jax.Array:
    """Sends blocks of rows of x [.., D] to other devices; returns [rows, D], zero where no row arrived.

    largest: a bound on the rows of a block. Its derivative is the reversed exchange. Sends the rows that belong to
    other devices.
    """
    padded = functools.partial(_padded, axis=axis, rows=rows, largest=largest)
    return lax.platform_dependent(x, exchange, cpu=padded, default=functools.partial(_ragged, axis=axis, rows=rows))


def _padded(x: jax.Array, exchange: Exchange, *, axis: str, rows: int, largest: int) -> jax.Array:
    i = jnp.arange(largest)
    row = jnp.clip(exchange.starts[:, None] + i, 0, x.shape[0] - 1)
    blocks = jnp.where((i < exchange.sizes[:, None])[..., None], x[row], 0)
    blocks = lax.all_to_all(blocks, axis, 0, 0, tiled=True)
    place = jnp.arange(rows)[:, None] - exchange.arriving_starts
    arrives = (place >= 0) & (place < exchange.arriving_sizes)
    source = jnp.argmax(arrives, 1)
    place = jnp.take_along_axis(place, source[:, None], 1)[:, 0]
    return jnp.where(arrives.any(1)[:, None], blocks[source, jnp.clip(place, 0, largest - 1)], 0)


def _ragged(x: jax.Array, exchange: Exchange, *, axis: str, rows: int) -> jax.Array:
    out = jnp.zeros((rows, x.shape[1]), x.dtype)
    return lax.ragged_all_to_all(
        x, out, exchange.starts, exchange.sizes, exchange.remote_starts, exchange.arriving_sizes, axis_name=axis
    )


def _forward(x: jax.Array, exchange: Exchange, axis: str, rows: int, largest: int) -> tuple[jax.Array, Any]:
    # Residuals are arrays: an array of shape [rows, 0] carries the number of rows to the backward pass.
    return ragged_all_to_all(x, exchange, axis, rows, largest), (exchange, jnp.zeros((x.shape[0], 0)))


def _backward(axis: str, rows: int, largest: int, saved: Any, g: jax.Array) -> tuple[jax.Array, None]:
    exchange, like = saved
    return ragged_all_to_all(g, exchange.reversed(), axis, like.shape[0], largest), None


ragged_all_to_all.defvjp(_forward, _backward)
