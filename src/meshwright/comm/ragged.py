"""Ragged all-to-all of rows: the token exchange of expert parallelism, in blocks of any size.

Accelerators use `lax.ragged_all_to_all`, which sends only the rows that exist. XLA:CPU has no such
operation; there, blocks of full size are sent, mostly padding. The rows that arrive are the same.

A device sends another one update for each group of rows there (for each expert): they arrive sorted
by group, and nothing has to sort them. Two devices with two groups each; `b0` is a row that device
0 sends to group b:

                 device 0 (groups a, b)     device 1 (groups c, d)
    x            a0 a0 b0 c0                a1 b1 b1 d1 d1
    arrives      a0 a0 a1 b0 b1 b1          c0 d1 d1
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.comm.hierarchical import Level

# Inside a node XLA:GPU copies each update by a block of 128 threads, and latency limits what one
# block moves: with 32 updates for each of 16 peers, a step on GB200 spent 0.78 s where one for each
# took 13.8 (github.com/marin-community/marin, pull 8081). Between nodes NCCL sends each update on
# its own, at about 12 us (github.com/openxla/xla, issue 46982).
THREAD_BLOCKS = 512
"""Least updates of an exchange inside a node."""
LEAST_ROWS = 16
"""Least rows of such an update at an even load."""

MOST_RANKS = 128
"""Most devices of one NVLink domain that XLA:GPU's exchange kernel takes: the compare instruction
of `LaunchMultiGpuBarrierWithNccl` in jax-cuda13-pjrt 0.12.0 and 0.12.0.1 (openxla/xla, pull
47889)."""
MOST_RANKS_BEFORE_0_12 = 32
"""The same before 0.12.0, where nothing is compared and more devices write past the kernel's memory
(openxla/xla, issue 47283)."""


def most_ranks(jaxlib_version: str) -> int:
    """Returns the most devices of one NVLink domain that can send each other rows at a time."""
    major, minor = jaxlib_version.split(".")[:2]
    if (int(major), int(minor)) < (0, 12):
        return MOST_RANKS_BEFORE_0_12
    return MOST_RANKS


class Exchange(NamedTuple):
    """Updates, which are blocks of rows, that the n devices of a group send each other.

    Each field is int32 [n, updates], by the other device and by the group that the rows belong to.
    The first four are the sizes and offsets that `lax.ragged_all_to_all` takes.
    """

    sizes: jax.Array
    """Rows of each update that this device sends."""
    starts: jax.Array
    """First row of each update sent, in the input of this device."""
    remote_starts: jax.Array
    """First row of each update sent, in the output of the other device."""
    arriving_sizes: jax.Array
    """Rows of each update that this device receives."""
    arriving_starts: jax.Array
    """First row of each update received, in the output of this device."""
    arriving_from: jax.Array
    """First row of each update received, in the input of the other device."""

    def reversed(self) -> "Exchange":
        """Returns the exchange that sends every row back to where it came from."""
        return Exchange(
            sizes=self.arriving_sizes,
            starts=self.arriving_starts,
            remote_starts=self.arriving_from,
            arriving_sizes=self.sizes,
            arriving_starts=self.starts,
            arriving_from=self.remote_starts,
        )

    def split(self, pieces: int) -> "Exchange":
        """Returns the exchange with every update in `pieces` consecutive ones.

        The last of them may be empty.
        """
        sent = _piece_offsets(self.sizes, pieces)
        arriving = _piece_offsets(self.arriving_sizes, pieces)
        return Exchange(
            sizes=_piece_sizes(self.sizes, sent),
            starts=_piece_starts(self.starts, sent),
            remote_starts=_piece_starts(self.remote_starts, sent),
            arriving_sizes=_piece_sizes(self.arriving_sizes, arriving),
            arriving_starts=_piece_starts(self.arriving_starts, arriving),
            arriving_from=_piece_starts(self.arriving_from, arriving),
        )


def _piece_offsets(sizes: jax.Array, pieces: int) -> jax.Array:
    """Returns the first row of each piece, from that of its update: [n, updates, pieces]."""
    piece_size = -(-sizes // pieces)
    return jnp.minimum(jnp.arange(pieces) * piece_size[..., None], sizes[..., None])


def _piece_sizes(sizes: jax.Array, offsets: jax.Array) -> jax.Array:
    """Returns the rows of each piece, int32 [n, updates * pieces]."""
    piece_sizes = jnp.diff(offsets, append=sizes[..., None])
    return piece_sizes.reshape(len(sizes), -1).astype(jnp.int32)


def _piece_starts(starts: jax.Array, offsets: jax.Array) -> jax.Array:
    """Returns the first row of each piece in a buffer, int32 [n, updates * pieces]."""
    piece_starts = starts[..., None] + offsets
    return piece_starts.reshape(len(starts), -1).astype(jnp.int32)


def plan_exchange(sent: jax.Array, level: Level, capacity: int | jax.Array) -> Exchange:
    """Fits the rows that devices send each other into buffers of `capacity` rows.

    Gathers the numbers of all rows.

    sent: rows for each group on each device, [n, groups]; they lie in this order. They arrive
    sorted by group, and within a group by device. A device takes its own rows first, then those of
    the devices after it around the axis. Rows that find no room are not sent: the last rows of a
    device.
    """
    # Arrays are by sender, receiver and group. Not an all-gather: XLA would combine those of two
    # batch pieces.
    copies = jnp.broadcast_to(sent, (level.size, *sent.shape))
    wanted = lax.all_to_all(copies, level.axes, 0, 0, axis_index_groups=level.groups, tiled=True)
    starts = _exclusive_sums(wanted)
    sizes = _sizes_with_room(wanted, _room(wanted, capacity))
    # A receiver's buffer is sorted by group, then by sender.
    by_receiver = _exclusive_sums(sizes.transpose(1, 2, 0))
    remote_starts = by_receiver.transpose(2, 0, 1)
    index = level.index()
    return Exchange(
        sizes=sizes[index],
        starts=starts[index],
        remote_starts=remote_starts[index],
        arriving_sizes=sizes[:, index],
        arriving_starts=remote_starts[:, index],
        arriving_from=starts[:, index],
    )


def _exclusive_sums(sizes: jax.Array) -> jax.Array:
    """Returns the rows before each block of [n, ..], int32: sums over the earlier ones."""
    ends = jnp.cumsum(sizes.reshape(len(sizes), -1), 1).reshape(sizes.shape)
    return (ends - sizes).astype(jnp.int32)


def _room(wanted: jax.Array, capacity: int | jax.Array) -> jax.Array:
    """Returns the rows of each sender that each receiver has room for, [sender, receiver].

    wanted: rows to be sent, by sender, receiver and group.

    A receiver r takes the senders in the order r, r + 1, ... around the axis. With w[s], the rows
    that s has for r:

        room[s, r] = clip(capacity - sum of w over the senders before s, 0, w[s])
    """
    n = len(wanted)
    # Sender that each receiver takes at each step, [receiver, step].
    senders = (np.arange(n)[:, None] + np.arange(n)) % n
    in_order = jnp.take_along_axis(wanted.sum(2).T, senders, 1)
    room_in_order = jnp.clip(capacity - jnp.cumsum(in_order, 1) + in_order, 0, in_order)
    return jnp.take_along_axis(room_in_order, np.argsort(senders, 1), 1).T


def _sizes_with_room(wanted: jax.Array, room: jax.Array) -> jax.Array:
    """Returns the rows of each update that are sent, int32: the first `room` of a sender's rows."""
    limit = room[..., None]
    ends = jnp.cumsum(wanted, 2)
    starts = ends - wanted
    sizes = jnp.minimum(ends, limit) - jnp.minimum(starts, limit)
    return sizes.astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def ragged_all_to_all(
    x: jax.Array, exchange: Exchange, level: Level, capacity: int, largest: int
) -> jax.Array:
    """Sends blocks of rows of x [.., D] to other devices.

    Returns [capacity, D], zero where no row arrived.

        grad_x = ragged_all_to_all(grad_y, exchange.reversed(), level, rows of x, largest)

    largest: a bound on the rows that one device sends another. Sends the rows that belong to other
    devices.
    """
    pieces = pieces_of(exchange.sizes.size, level, x.shape[0])
    padded = functools.partial(_padded, level=level, capacity=capacity, largest=largest)
    ragged = functools.partial(_ragged, level=level, capacity=capacity)
    return lax.platform_dependent(
        x, exchange, cpu=padded, cuda=functools.partial(ragged, pieces=pieces), default=ragged
    )


def pieces_of(updates: int, level: Level, rows: int) -> int:
    """Returns the pieces that a GPU sends each update in, a power of two, which XLA balances."""
    if level.crosses_dcn:
        return 1
    wanted = -(-THREAD_BLOCKS // updates)
    most = max(1, rows // (LEAST_ROWS * updates))
    return 1 << min((wanted - 1).bit_length(), most.bit_length() - 1)


def _padded(
    x: jax.Array, exchange: Exchange, *, level: Level, capacity: int, largest: int
) -> jax.Array:
    """Computes `ragged_all_to_all` as an all-to-all of padded blocks [largest, D].

    In a block the updates follow each other without gaps, and zeros fill the rest.
    """
    starts_in_block = _starts_in_block(exchange.sizes)
    i = jnp.arange(largest)[None, :, None] - starts_in_block[:, None]
    row, is_sent = _row_at(i, exchange.sizes[:, None], exchange.starts[:, None])
    blocks = jnp.where(is_sent[..., None], x[row], 0)
    blocks = lax.all_to_all(blocks, level.axes, 0, 0, axis_index_groups=level.groups, tiled=True)

    i = jnp.arange(capacity)[:, None] - exchange.arriving_starts.reshape(-1)
    first_of_block = largest * jnp.arange(level.size)[:, None]
    starts = first_of_block + _starts_in_block(exchange.arriving_sizes)
    row, has_arrived = _row_at(i, exchange.arriving_sizes.reshape(-1), starts.reshape(-1))
    return jnp.where(has_arrived[:, None], blocks.reshape(-1, x.shape[1])[row], 0)


def _starts_in_block(sizes: jax.Array) -> jax.Array:
    """Returns the first row of each update in the block of its device. sizes: [n, updates]."""
    return jnp.cumsum(sizes, 1) - sizes


def _row_at(i: jax.Array, sizes: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the source row of each target row, and whether an update has it.

    i: target row counted from the first row of each update, [.., updates]; at most one of them has
    it.
    """
    in_update = (i >= 0) & (i < sizes)
    return jnp.where(in_update, i + starts, 0).sum(-1), in_update.any(-1)


def _ragged(
    x: jax.Array, exchange: Exchange, *, level: Level, capacity: int, pieces: int = 1
) -> jax.Array:
    split = exchange.split(pieces)
    sizes = split.sizes.reshape(-1)
    # Zeros that the compiler does not know: constant ones would be shared by exchanges, and copied
    # for each.
    zero = jnp.minimum(sizes[0], 0).astype(x.dtype)
    return lax.ragged_all_to_all(
        x,
        jnp.broadcast_to(zero, (capacity, x.shape[1])),
        split.starts.reshape(-1),
        sizes,
        split.remote_starts.reshape(-1),
        split.arriving_sizes.reshape(-1),
        axis_name=level.axes,
        axis_index_groups=level.groups,
    )


def _forward(
    x: jax.Array, exchange: Exchange, *static: Any
) -> tuple[jax.Array, tuple[Exchange, jax.Array]]:
    # The number of rows is not an array, so an array of shape [rows, 0] carries it to the backward
    # pass.
    carrier = jnp.zeros((x.shape[0], 0))
    return ragged_all_to_all(x, exchange, *static), (exchange, carrier)


def _backward(
    level: Level, capacity: int, largest: int, saved: tuple[Exchange, jax.Array], g: jax.Array
) -> tuple[jax.Array, None]:
    exchange, carrier = saved
    rows = carrier.shape[0]
    return ragged_all_to_all(g, exchange.reversed(), level, rows, largest), None


ragged_all_to_all.defvjp(_forward, _backward)
