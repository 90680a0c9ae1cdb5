"""A softmax in pieces

Each of eight devices has an eighth of the columns of the logits. The softmax needs the maximum and the sum over all
columns, and its result stays split. Unlike the mean of problem 2, the sum is used *differently* on each device: for its
own columns. Think about what that does to the derivative.
"""

from grading import Problem

PROBLEM = Problem(
    lesson="2_collectives",
    mesh="tensor=8",
    takes="logits[B, V/tensor]",
    gives="p[B, V/tensor]",
    gradients="logits",
    small="B=4 V=32",
    other="B=6 V=48",
    large="logits",
    full="B=65536 V=131072",
    predict="sent: MB that a device sends, forward and backward together",
    arithmetic="3 * 2 * 4 * B * 7/8",
    because="Three all-reduces of one number for each row: maximum and sum forward, and backward the sum of the "
    "cotangents of the sum. The width V does not appear: that is what makes it worth splitting.",
    hints=(
        "softmax(x) = exp(x - m) / sum(exp(x - m)) for any m that is the same in the whole row. Two numbers of a "
        "row are global.",
        "jax.lax.pmax has no derivative, and the maximum needs none: use stop_gradient before it.",
        "The cotangent of the sum is a different one on each device, and the right one is their sum. Whose derivative "
        "does that: psum's or all_reduce's?",
    ),
)


def one_device(logits):
    """The softmax of every row."""
    import jax

    return jax.nn.softmax(logits, axis=-1)


PREDICTION = None


def answer(logits):
    """logits: the columns of this device, [B, V/8]. Returns the same columns of the softmax over all."""
    raise NotImplementedError
