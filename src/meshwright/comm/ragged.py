"""Ragged all-to-all of rows: the token exchange of expert parallelism, in blocks of any size.

Accelerators use `lax.ragged_all_to_all`, which sends only the rows that exist. XLA:CPU has no such operation; there,
blocks of full size are sent, mostly padding. The rows that arrive are the same.

A device sends another one update for each group of rows there (for each expert): they arrive sorted by group, and
nothing has to sort them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
            offsets = jnp.minimum(
                jnp.arange(pieces) * -(-sizes // pieces)[..., None], sizes[..., None]
            )
            divided = (
                jnp.diff(offsets, append=sizes[..., None]),
                *(start[..., None] + offsets for start in starts),
            )
            return [x.reshape(len(sizes), -1).astype(jnp.int32) for x in divided]

        return Exchange(*divide(*self[:3]), *divide(*self[3:]))


def plan_exchange(sent: jax.Array, level: Level, capacity: int) -> Exchange:
    """Fits the rows that devices send each other into buffers of `capacity` rows; gathers the numbers of all rows.

    sent: rows for each group on each device, [n, groups]; they lie in this order. They will lie by group, those of a
    group by device. A device takes its own rows first, then those of the devices after it around the axis. What finds
    no room is not sent: the last rows of a device.
    """
    # Arrays are by the device that sends, the one it sends to, and the group. No gather: XLA would combine two pieces'.
    copies = jnp.broadcast_to(sent, (level.size, *sent.shape))
    sent_all = lax.all_to_all(copies, level.axes, 0, 0, axis_index_groups=level.groups, tiled=True)
    first = (
        jnp.cumsum(sent_all.reshape(level.size, -1), 1).reshape(sent_all.shape) - sent_all
    ).astype(jnp.int32)
    around = (np.arange(level.size)[:, None] + np.arange(level.size)) % level.size
    wanted = jnp.take_along_axis(sent_all.sum(2).T, around, 1)
    room = jnp.clip(capacity - jnp.cumsum(wanted, 1) + wanted, 0, wanted)
    room_of_sender = jnp.take_along_axis(room, np.argsort(around, 1), 1).T[..., None]
    ends = jnp.cumsum(sent_all, 2)
    sizes = (
        jnp.minimum(ends, room_of_sender) - jnp.minimum(ends - sent_all, room_of_sender)
    ).astype(jnp.int32)
    by_group = sizes.transpose(1, 2, 0)
    ends_there = jnp.cumsum(by_group.reshape(level.size, -1), 1).reshape(by_group.shape)
    there = (ends_there - by_group).transpose(2, 0, 1).astype(jnp.int32)
    here = level.index()
    by_receiver = (sizes[:, here], there[:, here], first[:, here])
    return Exchange(sizes[here], first[here], there[here], *by_receiver)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def ragged_all_to_all(
    x: jax.Array, exchange: Exchange, level: Level, rows: int, largest: int
) -> jax.Array:
    """Sends blocks of rows of x [.., D] to other devices; returns [rows, D], zero where no row arrived.

    largest: a bound on the rows that one device sends another. Its derivative is the reversed exchange. Sends the rows
    that belong to other devices.
    """
    forms = {
        "cpu": functools.partial(_padded, level=level, rows=rows, largest=largest),
        "cuda": functools.partial(
            _ragged,
            level=level,
            rows=rows,
            pieces=pieces_of(exchange.sizes.size, level, x.shape[0]),
        ),
    }
    return lax.platform_dependent(
        x, exchange, **forms, default=functools.partial(_ragged, level=level, rows=rows)
    )


def pieces_of(updates: int, level: Level, rows: int) -> int:
    """Returns the pieces that a GPU sends each update in, a power of two: XLA balances such numbers of them."""
    if level.crosses_dcn:
        return 1
    wanted, most = -(-THREAD_BLOCKS // updates), max(1, rows // (LEAST_ROWS * updates))
    return 1 << min((wanted - 1).bit_length(), most.bit_length() - 1)


def _padded(
    x: jax.Array, exchange: Exchange, *, level: Level, rows: int, largest: int
) -> jax.Array:
    def inside(sizes: jax.Array) -> jax.Array:
        """First row of each update in the block of its device."""
        return jnp.cumsum(sizes, 1) - sizes

    def rows_of(
        place: jax.Array, sizes: jax.Array, starts: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Row that each place is in, and whether there is one: place [.., updates] counts from each update's first."""
        there = (place >= 0) & (place < sizes)
        return jnp.where(there, place + starts, 0).sum(-1), there.any(-1)

    i = jnp.arange(largest)[None, :, None] - inside(exchange.sizes)[:, None]
    row, sent = rows_of(i, exchange.sizes[:, None], exchange.starts[:, None])
    blocks = jnp.where(sent[..., None], x[row], 0)
    blocks = lax.all_to_all(blocks, level.axes, 0, 0, axis_index_groups=level.groups, tiled=True)
    place = jnp.arange(rows)[:, None] - exchange.arriving_starts.reshape(-1)
    block = largest * jnp.arange(level.size)[:, None] + inside(exchange.arriving_sizes)
    row, arrived = rows_of(place, exchange.arriving_sizes.reshape(-1), block.reshape(-1))
    return jnp.where(arrived[:, None], blocks.reshape(-1, x.shape[1])[row], 0)


def _ragged(
    x: jax.Array, exchange: Exchange, *, level: Level, rows: int, pieces: int = 1
) -> jax.Array:
    sizes, starts, remote_starts, arriving_sizes, *_ = (
        field.reshape(-1) for field in exchange.split(pieces)
    )
    # Zeros that the compiler does not know: constant ones would be shared by exchanges, and copied for each.
    zero = jnp.minimum(sizes[0], 0).astype(x.dtype)
    return lax.ragged_all_to_all(
        x,
        jnp.broadcast_to(zero, (rows, x.shape[1])),
        starts,
        sizes,
        remote_starts,
        arriving_sizes,
        axis_name=level.axes,
        axis_index_groups=level.groups,
    )


# The number of rows is not an array, so an array of shape [rows, 0] carries it to the backward pass.
ragged_all_to_all.defvjp(
    lambda x, exchange, *sizes: (
        ragged_all_to_all(x, exchange, *sizes),
        (exchange, jnp.zeros((x.shape[0], 0))),
    ),
    lambda level, rows, largest, saved, g: (
        ragged_all_to_all(g, saved[0].reversed(), level, saved[1].shape[0], largest),
        None,
    ),
)
