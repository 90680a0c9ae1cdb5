"""One mean, known to all

Eight devices have eight parts of a batch. Each has to know the mean over all rows, and later the gradient has to flow
back through it. `mean[D]` is used in the same way by every device, so its cotangent is the same on all of them.

The collectives of the package have their own derivatives, `jax.lax.psum` has another: try both.
"""

from grading import Problem

PROBLEM = Problem(
    lesson="2_collectives",
    mesh="data=8",
    takes="x[B/data, D]",
    gives="mean[D]",
    gradients="x",
    small="B=16 D=6",
    other="B=24 D=10",
    full="B=8192 D=262144",
    predict="sent: MB that a device sends, forward and backward together",
    arithmetic="2 * 4 * D * 7/8",
    because="A ring all-reduce sends V (n-1)/n twice: once to scatter the sums, once to gather them. Only means "
    "are sent, never rows. Backward sends nothing: every device has the cotangent already.",
    hints=(
        "How does a mean of equally many rows relate to the mean of all? What is the least that must be sent for it?",
        "Take the mean of your own rows first, then one collective on D numbers, and divide.",
        "The values come out with psum and with all_reduce. Backward, psum adds up eight cotangents that are the same; "
        "all_reduce passes its one cotangent on.",
    ),
)


def one_device(x):
    """The mean of all rows."""
    return x.mean(0)


PREDICTION = None


def answer(x):
    """x: the rows of this device, [B/8, D]. Returns the mean over the rows of all devices, [D]."""
    raise NotImplementedError
