"""Solution of problem 3: try first, three hints are free."""

import jax
import jax.numpy as jnp
from grading import mistake

from meshwright.comm.collectives import all_gather, all_reduce, local_shard


def shifted(logits):
    highest = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1, keepdims=True), "tensor")
    return jnp.exp(logits - highest)


def reference(logits):
    e = shifted(logits)
    return e / jax.lax.psum(e.sum(-1, keepdims=True), "tensor")


@mistake("result", "The sum is that of the device's own columns: every device's part adds up to 1, and all to 8.")
def own_sum(logits):
    e = shifted(logits)
    return e / e.sum(-1, keepdims=True)


@mistake(
    "result",
    "Each device subtracts its own maximum, so the exponentials have different scales and cannot be added. The maximum "
    "of the whole row must be shared first.",
)
def own_maximum(logits):
    e = jnp.exp(logits - logits.max(-1, keepdims=True))
    return e / jax.lax.psum(e.sum(-1, keepdims=True), "tensor")


@mistake(
    "gradient",
    "all_reduce passes its cotangent on, which is right where all devices use the sum alike. Here each uses it for its "
    "own columns: their cotangents must be added, which is the derivative of psum.",
)
def all_reduce_of_the_sum(logits):
    e = shifted(logits)
    return e / all_reduce(e.sum(-1, keepdims=True), ("tensor",))


@mistake("bytes", "Logits travel and are whole on every device, where two numbers for each row are enough.")
def gather_the_logits(logits):
    return local_shard(jax.nn.softmax(all_gather(logits, ("tensor",), 1), axis=-1), ("tensor",), 1)
