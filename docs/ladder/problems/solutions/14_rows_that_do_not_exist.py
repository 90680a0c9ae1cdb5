"""Solution of problem 14: try first, three hints are free."""

import jax
import jax.numpy as jnp
from grading import mistake

from meshwright.comm.collectives import all_gather, all_reduce, axis_index

PADDING, DATA = 6, ("data",)


def real_rows(x):
    rows = axis_index(DATA) * x.shape[0] + jnp.arange(x.shape[0])
    return rows < 8 * x.shape[0] - PADDING


def norms(x, w):
    return jnp.sqrt(((x * w) ** 2).sum(-1))


def masked(x, w):
    """Sum over the real rows of this device, with its gradient."""
    real = real_rows(x)
    safe = jnp.where(real[:, None], x, 1.0)
    return jax.value_and_grad(lambda w: jnp.where(real, norms(safe, w), 0).sum())(w)


def over(results, count):
    return jax.tree.map(lambda v: v / count, all_reduce(results, DATA))


def reference(x, w):
    return over(masked(x, w), 8 * x.shape[0] - PADDING)


@mistake("result", "The padding is not in the sum, but it is in the count: divide by the real rows.")
def counts_padding(x, w):
    return over(masked(x, w), 8 * x.shape[0])


@mistake(
    "result",
    "A mean of means: a device with two real rows counts as much as one with four. Sum over devices, then divide once.",
)
def mean_of_means(x, w):
    here = jnp.maximum(real_rows(x).sum(), 1)
    return over(jax.tree.map(lambda v: v / here, masked(x, w)), 8)


@mistake(
    "gradient",
    "The mask comes after the square root. Its derivative at a row of zeros is infinite, and infinity times the mask's "
    "zero is NaN. Replace the rows before anything can go wrong with them.",
)
def mask_too_late(x, w):
    real = real_rows(x)
    return over(jax.value_and_grad(lambda w: jnp.where(real, norms(x, w), 0).sum())(w), 8 * x.shape[0] - PADDING)


@mistake("bytes", "All rows are gathered, and every device computes the loss of all of them.")
def gather_the_rows(x, w):
    rows = all_gather(x, DATA, 0)[:-PADDING]
    return jax.value_and_grad(lambda w: norms(rows, w).mean())(w)
