"""A data parallel step

Each device has its part of the batch and all of the weight. Return the loss of the whole batch and its gradient, both
complete on every device, as an optimizer needs them.
"""

from grading import Problem

PROBLEM = Problem(
    lesson="3_data_parallel",
    mesh="data=8",
    takes="x[B/data, D]; t[B/data, F]; w[D, F]",
    gives="loss[]; dw[D, F]",
    small="B=16 D=6 F=5",
    other="B=24 D=5 F=7",
    full="B=65536 D=4096 F=4096",
    predict="sent: MB that a device sends in the step",
    arithmetic="2 * 4 * D * F * 7/8",
    because="One all-reduce of the gradient, and a few bytes for the loss. It does not depend on the batch: a "
    "larger batch pays for the same bytes with more computation, which is why data parallelism likes large batches.",
    hints=(
        "jax.value_and_grad of the loss of your own rows needs no collective. What is missing then?",
        "The mean over all rows is the mean over devices of the means of their rows; so is its gradient.",
        "One all_reduce takes a tuple: all_reduce((loss, dw), ('data',)), then divide both by 8.",
    ),
)


def loss_fn(w, x, t):
    """The loss of these rows: use it in your answer."""
    return ((x @ w - t) ** 2).mean()


def one_device(x, t, w):
    """Loss and gradient of the whole batch."""
    import jax

    return jax.value_and_grad(loss_fn)(w, x, t)


PREDICTION = None


def answer(x, t, w):
    """x, t: the rows of this device; w: the whole weight. Returns (loss, dw) of the whole batch."""
    raise NotImplementedError
