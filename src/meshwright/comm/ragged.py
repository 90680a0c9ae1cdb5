"""Ragged all-to-all of rows: the token exchange of expert parallelism, in blocks of any size.

Accelerators use `lax.ragged_all_to_all`, which sends only the rows that exist. XLA:CPU has no such operation; there,
blocks of full size are sent, mostly padding. The rows that arrive are the same.

A device sends another one update for each group of rows there (for each expert): they arrive sorted by group, and
nothing has to sort them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.comm.hierarchical import Level

THREAD_BLOCKS, LEAST_ROWS = 512, 16
"""Least updates of an exchange inside a node, and least rows of one at an even load.

There XLA:GPU copies each update by a block of 128 threads, and latency limits what one block moves: with 32 updates for
each of 16 peers, a step on GB200 spent 0.78 s where one for each took 13.8 (github.com/marin-community/marin, pull
8081). Between nodes NCCL sends each update on its own, at about 12 us (github.com/openxla/xla, issue 46982)."""


class Exchange(NamedTuple):
    """Updates, which are blocks of rows, that the n devices of a group send each other.

    Each field is int32 [n, updates], by the other device and by the group that the rows belong to.
    """

    sizes: jax.Array
    """Rows of each update to another device."""
    starts: jax.Array
    """First row of it here."""
    remote_starts: jax.Array
    """First row of it there."""
    arriving_sizes: jax.Array
    """Rows of each update from another device."""
    arriving_starts: jax.Array
    """First row of it here."""
    arriving_from: jax.Array
    """First row of it there."""

    def reversed(self) -> "Exchange":
        """Returns the exchange that sends every row back to where it came from."""
        return Exchange(*self[3:5], self.arriving_from, *self[:2], self.remote_starts)

    def split(self, pieces: int) -> "Exchange":
        """Returns the exchange with every update in `pieces` consecutive ones; the last of them may be empty."""

        def divide(sizes: jax.Array, *starts: jax.Array) -> list[jax.Array]:
            offsets = jnp.minimum(jnp.arange(pieces) * -(-sizes // pieces)[..., None], sizes[..., None])
            divided = (jnp.diff(offsets, append=sizes[..., None]), *(start[..., None] + offsets for start in starts))
            return [x.reshape(len(sizes), -1).astype(jnp.int32) for x in divided]

        return Exchange(*divide(*self[:3]), *divide(*self[3:]))


def plan_exchange(sent: jax.Array, received: jax.Array, level: Level, capacity: int) -> Exchange:
    """Fits the rows that devices send each other into buffers of `capacity` rows; sends a few integers.

    sent: rows for each group on each device, [n, groups]; they lie in this order.  received: rows from each device for
    each group here, [n, groups]; they will lie by group, those of a group by device. A device takes its own rows first,
    then those of the devices after it around the axis. What finds no room is not sent: the last rows of a device.
    """
    here = level.index()
    from_here = jnp.roll(received.sum(1), -here)
    room = jnp.roll(jnp.clip(capacity - jnp.cumsum(from_here) + from_here, 0, from_here), here)[:, None]
    ends = jnp.cumsum(received, 1)
    arriving_sizes = jnp.minimum(ends, room) - jnp.minimum(ends - received, room)
    by_group = arriving_sizes.T.reshape(-1)
    arriving_starts = (jnp.cumsum(by_group) - by_group).reshape(received.T.shape).T
    starts = (jnp.cumsum(sent) - sent.reshape(-1)).reshape(sent.shape)
    # Only the receiver knows where rows go and how many have room; only the sender knows where they were.
    known = jnp.stack([arriving_sizes, arriving_starts, starts], 1).astype(jnp.int32)
    sizes, remote_starts, arriving_from = jnp.moveaxis(all_to_all_counts(known, level), 1, 0)
    return Exchange(sizes, starts, remote_starts, arriving_sizes, arriving_starts, arriving_from)


def all_to_all_counts(counts: jax.Array, level: Level) -> jax.Array:
    """Sends row `d` of each device's counts [n, ...] to device `d`; row `s` of the result comes from device `s`."""
    return lax.all_to_all(counts, level.axis, 0, 0, axis_index_groups=level.groups, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def ragged_all_to_all(x: jax.Array, exchange: Exchange, level: Level, rows: int, largest: int) -> jax.Array:
    """Sends blocks of rows of x [.., D] to other devices; returns [rows, D], zero where no row arrived.

    largest: a bound on the rows that one device sends another. Its derivative is the reversed exchange. Sends the rows
    that belong to other devices.
    """
    forms = {
        "cpu": functools.partial(_padded, level=level, rows=rows, largest=largest),
        "cuda": functools.partial(
            _ragged, level=level, rows=rows, pieces=pieces_of(exchange.sizes.size, level, x.shape[0])
        ),
    }
    return lax.platform_dependent(x, exchange, **forms, default=functools.partial(_ragged, level=level, rows=rows))


def pieces_of(updates: int, level: Level, rows: int) -> int:
    """Returns the pieces that a GPU sends each update in, a power of two: XLA balances such numbers of them."""
    if level.crosses_dcn:
        return 1
    wanted, most = -(-THREAD_BLOCKS // updates), max(1, rows // (LEAST_ROWS * updates))
    return 1 << min((wanted - 1).bit_length(), most.bit_length() - 1)


def _padded(x: jax.Array, exchange: Exchange, *, level: Level, rows: int, largest: int) -> jax.Array:
    def inside(sizes: jax.Array) -> jax.Array:
        """First row of each update in the block of its device."""
        return jnp.cumsum(sizes, 1) - sizes

    def rows_of(place: jax.Array, sizes: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Row that each place is in, and whether there is one: place [.., updates] counts from each update's first."""
        there = (place >= 0) & (place < sizes)
        return jnp.where(there, place + starts, 0).sum(-1), there.any(-1)

    i = jnp.arange(largest)[None, :, None] - inside(exchange.sizes)[:, None]
    row, sent = rows_of(i, exchange.sizes[:, None], exchange.starts[:, None])
    blocks = jnp.where(sent[..., None], x[row], 0)
    blocks = lax.all_to_all(blocks, level.axis, 0, 0, axis_index_groups=level.groups, tiled=True)
    place = jnp.arange(rows)[:, None] - exchange.arriving_starts.reshape(-1)
    block = largest * jnp.arange(level.size)[:, None] + inside(exchange.arriving_sizes)
    row, arrived = rows_of(place, exchange.arriving_sizes.reshape(-1), block.reshape(-1))
    return jnp.where(arrived[:, None], blocks.reshape(-1, x.shape[1])[row], 0)


def _ragged(x: jax.Array, exchange: Exchange, *, level: Level, rows: int, pieces: int = 1) -> jax.Array:
    sizes, starts, remote_starts, arriving_sizes, *_ = (field.reshape(-1) for field in exchange.split(pieces))
    return lax.ragged_all_to_all(
        x,
        jnp.zeros((rows, x.shape[1]), x.dtype),
        starts,
        sizes,
        remote_starts,
        arriving_sizes,
        axis_name=level.axis,
        axis_index_groups=level.groups,
    )


def _forward(x: jax.Array, exchange: Exchange, level: Level, rows: int, largest: int) -> tuple[jax.Array, Any]:
    # Residuals are arrays: an array of shape [rows, 0] carries the number of rows to the backward pass.
    return ragged_all_to_all(x, exchange, level, rows, largest), (exchange, jnp.zeros((x.shape[0], 0)))


def _backward(level: Level, rows: int, largest: int, saved: Any, g: jax.Array) -> tuple[jax.Array, None]:
    exchange, like = saved
    return ragged_all_to_all(g, exchange.reversed(), level, like.shape[0], largest), None


ragged_all_to_all.defvjp(_forward, _backward)
