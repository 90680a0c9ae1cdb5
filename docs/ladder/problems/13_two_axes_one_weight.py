"""Two axes, one weight

`w1[D/data, F/tensor]` is split by both axes. One of them must be gathered for use (FSDP), the other stays split while
the layer computes (tensor parallel). Activations are split too, and stay so: `x` and `y` by rows over `data`, by
columns over `tensor`.

    y = gelu(x @ w1) @ w2
"""

from grading import Problem

PROBLEM = Problem(
    lesson="7_fsdp_x_tensor",
    mesh="data=4, tensor=2",
    takes="x[B/data, D/tensor]; w1[D/data, F/tensor]; w2[F/tensor, D/data]",
    gives="y[B/data, D/tensor]",
    gradients="x w1 w2",
    small="B=8 D=8 F=16",
    other="B=16 D=16 F=24",
    full="B=16384 D=4096 F=16384",
    predict="sent: MB that a device sends over both axes, forward and backward together",
    arithmetic="4 * (4 * D * F/2 * 3/4) + 4 * (4 * B/4 * D * 1/2)",
    because="Over `data` the half of each of two weights is gathered forward, and its gradient scattered backward: "
    "four times D F / 2 x 3/4. Over `tensor` x is gathered and y scattered, and the reverse backward: four times "
    "B/4 x D x 1/2.",
    hints=(
        "After the gathers over data, w1 is [D, F/2] and w2 [F/2, D] on a device. What must x be for x @ w1?",
        "Each device of tensor ends with an addend of y, [B/4, D], and keeps half of the columns of the sum.",
        "all_gather(x, ('tensor',), 1), all_gather(w1, ('data',), 0), all_gather(w2, ('data',), 1), and a "
        "reduce_scatter over tensor along dimension 1: all derivatives come by themselves.",
    ),
)


def one_device(x, w1, w2):
    """The pair with whole arrays."""
    import jax

    return jax.nn.gelu(x @ w1) @ w2


PREDICTION = None


def answer(x, w1, w2):
    """Each array is this device's block. Returns its block of y, [B/4, D/2]."""
    raise NotImplementedError
