"""Solution of problem 7: try first, three hints are free."""

import jax.numpy as jnp
from grading import mistake

from meshwright.comm.collectives import all_gather, all_reduce, axis_index, local_shard, reduce_scatter

DATA = ("data",)


def updated(w, m, mean):
    """Updates the device's rows; mean: the mean gradient of these rows."""
    m = 0.9 * m + mean
    return local_shard(w, DATA, 0) - 0.1 * m, m


def reference(w, m, g):
    rows, m = updated(w, m, reduce_scatter(g[0], DATA, 0) / 8)
    return all_gather(rows, DATA, 0), m


@mistake("result", "The gradients are summed; the rule takes their mean.")
def summed(w, m, g):
    rows, m = updated(w, m, reduce_scatter(g[0], DATA, 0))
    return all_gather(rows, DATA, 0), m


@mistake("result", "Every device updates its own rows of w and never hears of the others: after a step, eight models.")
def never_gathered(w, m, g):
    rows, m = updated(w, m, reduce_scatter(g[0], DATA, 0) / 8)
    return w.at[axis_index(DATA) * rows.shape[0] + jnp.arange(rows.shape[0])].set(rows), m


@mistake(
    "bytes",
    "An all-reduce, of which seven eighths are thrown away, then a gather: 3 V (n-1)/n. reduce_scatter is the half of "
    "the all-reduce that you need.",
)
def all_reduce_then_slice(w, m, g):
    rows, m = updated(w, m, local_shard(all_reduce(g[0], DATA), DATA, 0) / 8)
    return all_gather(rows, DATA, 0), m


@mistake("bytes", "The momentum is gathered, and every device updates all rows: 3 V (n-1)/n, and the state is whole.")
def momentum_gathered(w, m, g):
    whole = 0.9 * all_gather(m, DATA, 0) + all_reduce(g[0], DATA) / 8
    return w - 0.1 * whole, local_shard(whole, DATA, 0)
