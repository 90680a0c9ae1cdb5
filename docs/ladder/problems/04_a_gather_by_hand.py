"""A gather by hand

An all-gather is a ring of neighbours who pass on what they last received. Write it with `ring_shift` (device i receives
from i - by) alone: after it, every device has all blocks, in order.
"""

from grading import Problem

PROBLEM = Problem(
    lesson="2_collectives",
    mesh="ring=8",
    takes="x[T/ring, D]",
    gives="y[T, D]",
    small="T=16 D=3",
    other="T=24 D=5",
    full="T=65536 D=4096",
    collectives="collective-permute",
    predict="sent: MB that a device sends",
    arithmetic="7 * 4 * T/8 * D",
    because="Each of the seven other blocks arrives once, so seven blocks are sent: V (n-1)/n, the formula of every "
    "all-gather. A ring wastes nothing; what it costs is seven hops of latency.",
    hints=(
        "After one shift by 1 you have the block of your left neighbour. After two, whose?",
        "After h shifts device i has the block of device (i - h) % 8. Put it there, not at h.",
        "y = jnp.zeros((8, *x.shape)); y.at[index].set(block) takes an index that is computed. The last block needs no "
        "shift after it: seven shifts, not eight.",
    ),
)


def one_device(x):
    """All blocks, in order."""
    return x


PREDICTION = None


def answer(x):
    """x: the block of this device, [T/8, D]. Returns all blocks in order, [T, D]. Axis: `ring`."""
    raise NotImplementedError
