"""Solution of problem 5: try first, three hints are free."""

import jax
from grading import mistake

from meshwright.comm.collectives import all_gather, all_reduce


def loss_fn(w, x, t):
    return ((x @ w - t) ** 2).mean()


def own(x, t, w):
    return jax.value_and_grad(loss_fn)(w, x, t)


def reference(x, t, w):
    return jax.tree.map(lambda v: v / 8, all_reduce(own(x, t, w), ("data",)))


@mistake("result", "Nothing is sent: each device trains on its own rows, and the eight copies of w drift apart.")
def own_rows_only(x, t, w):
    return own(x, t, w)


@mistake("result", "Loss and gradient are summed: the learning rate is eight times what it should be.")
def sums(x, t, w):
    return all_reduce(own(x, t, w), ("data",))


@mistake(
    "gradient",
    "The loss that is printed is that of the batch, and the gradient is that of the device's own rows. Nothing looks "
    "wrong in a log: all-reduce the gradient too.",
)
def only_the_loss(x, t, w):
    loss, dw = own(x, t, w)
    return all_reduce(loss, ("data",)) / 8, dw


@mistake("bytes", "The batch is gathered, and every device does the work of all eight. Send gradients, not data.")
def gather_the_batch(x, t, w):
    return own(all_gather(x, ("data",), 0), all_gather(t, ("data",), 0), w)
