"""Solution of problem 2: try first, three hints are free."""

import jax
from grading import mistake

from meshwright.comm.collectives import all_reduce


def reference(x):
    return all_reduce(x.mean(0), ("data",)) / 8


@mistake("result", "The sum of eight means is not a mean: divide by the number of devices.")
def a_sum(x):
    return all_reduce(x.mean(0), ("data",))


@mistake("result", "Nothing is sent: every device returns the mean of its own rows.")
def own_rows_only(x):
    return x.mean(0)


@mistake(
    "gradient",
    "The derivative of psum is psum. It adds the cotangents of eight devices, as if they were eight uses of the mean; "
    "here they are one cotangent, replicated. all_reduce of meshwright.comm.collectives passes it on unchanged.",
)
def psum(x):
    return jax.lax.psum(x.mean(0), "data") / 8


@mistake("bytes", "The rows are summed over the devices first, so B/8 x D numbers travel where D are enough.")
def rows_travel(x):
    return (all_reduce(x, ("data",)) / 8).mean(0)
