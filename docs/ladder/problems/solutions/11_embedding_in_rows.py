"""Solution of problem 11: try first, three hints are free."""

import jax
import jax.numpy as jnp
from grading import mistake

from meshwright.comm.collectives import all_gather, all_reduce, axis_index, local_shard


def own_rows(tokens, w):
    own = tokens - axis_index(("tensor",)) * w.shape[0]
    inside = (own >= 0) & (own < w.shape[0])
    return jnp.where(inside[:, None], w[jnp.clip(own, 0, w.shape[0] - 1)], 0)


def reference(tokens, w):
    return all_reduce(own_rows(tokens, w), ("tensor",))


@mistake("result", "Tokens of other devices are clipped to a row of this one, and all those rows are added up.")
def no_mask(tokens, w):
    own = tokens - axis_index(("tensor",)) * w.shape[0]
    return all_reduce(w[jnp.clip(own, 0, w.shape[0] - 1)], ("tensor",))


@mistake("result", "Each device has the rows of its own tokens and zeros for the others: the sum is missing.")
def no_sum(tokens, w):
    return own_rows(tokens, w)


@mistake(
    "gradient",
    "Every device uses x in the same way, so its cotangent is one, replicated: psum adds eight copies of it. "
    "all_reduce passes it on.",
)
def psum(tokens, w):
    return jax.lax.psum(own_rows(tokens, w), "tensor")


@mistake(
    "bytes",
    "The table is gathered, 131,072 rows for 16,384 tokens: every device holds all of it, and the gradient of all "
    "of it is scattered back.",
)
def gather_the_table(tokens, w):
    mine = local_shard(tokens, ("tensor",), 0)
    rows = jnp.zeros((8, mine.shape[0], w.shape[1])).at[axis_index(("tensor",))]
    return all_reduce(rows.set(all_gather(w, ("tensor",), 0)[mine]).reshape(-1, w.shape[1]), ("tensor",))


@mistake(
    "memory",
    "One-hot vectors as wide as the device's vocabulary: T x V/8 numbers, most of them zero, to pick T rows.",
)
def one_hot(tokens, w):
    own = tokens - axis_index(("tensor",)) * w.shape[0]
    return all_reduce(jax.nn.one_hot(own, w.shape[0]) @ w, ("tensor",))
