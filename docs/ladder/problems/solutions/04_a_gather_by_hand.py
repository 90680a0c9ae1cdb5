"""Solution of problem 4: try first, three hints are free."""

import jax
import jax.numpy as jnp
from grading import mistake

from meshwright.comm.collectives import ring_shift


def passed_on(x, place, hops=7):
    """Puts the block that arrives after each hop at `place(device, hop)`."""
    i, block, y = jax.lax.axis_index("ring"), x, jnp.zeros((8, *x.shape), x.dtype)
    for hop in range(8):
        y = y.at[place(i, hop) % 8].set(block)
        block = ring_shift(block, "ring", 1) if hop < hops else block
    return y.reshape(-1, x.shape[-1]), block


def reference(x):
    return passed_on(x, lambda i, hop: i - hop)[0]


def best(x):
    """Both directions at once: four steps of two shifts; links are full duplex, so half the time."""
    i, right, left = jax.lax.axis_index("ring"), x, x
    y = jnp.zeros((8, *x.shape), x.dtype).at[i].set(x)
    for hop in range(1, 5):
        right = ring_shift(right, "ring", 1)
        y = y.at[(i - hop) % 8].set(right)
        if hop < 4:
            left = ring_shift(left, "ring", -1)
            y = y.at[(i + hop) % 8].set(left)
    return y.reshape(-1, x.shape[-1])


@mistake("result", "The blocks are in the order of their arrival: own block first, on every device another one.")
def as_they_arrive(x):
    return passed_on(x, lambda i, hop: hop)[0]


@mistake("result", "They arrive from the left: after h shifts by 1 it is the block of device i - h, not i + h.")
def from_the_wrong_side(x):
    return passed_on(x, lambda i, hop: i + hop)[0]


@mistake("bytes", "Eight shifts: the last brings the own block back home. Seven are enough.")
def once_around(x):
    y, home = passed_on(x, lambda i, hop: i - hop, 8)
    return y.at[: x.shape[0]].add(0 * home)


@mistake(
    "bytes",
    "The buffer of all blocks is passed on in every hop, mostly zeros. Pass on only the block that arrived last.",
)
def the_whole_buffer(x):
    i = jax.lax.axis_index("ring")
    own = jnp.zeros((8, *x.shape), x.dtype).at[i].set(x)
    y = own
    for _ in range(7):
        y = own + ring_shift(y, "ring", 1)
    return y.reshape(-1, x.shape[-1])
