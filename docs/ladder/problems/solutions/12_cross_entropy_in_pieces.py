"""Solution of problem 12: try first, three hints are free."""

import jax
import jax.numpy as jnp
from grading import mistake

from meshwright.comm.collectives import all_gather, all_reduce, axis_index

TENSOR = ("tensor",)


@jax.custom_vjp
def f(x):
    return x


f.defvjp(lambda x: (x, None), lambda _, g: (all_reduce(g, TENSOR),))


def label_logit(logits, labels):
    own = labels - axis_index(TENSOR) * logits.shape[1]
    picked = jnp.take_along_axis(logits, jnp.clip(own, 0, logits.shape[1] - 1)[:, None], 1)[:, 0]
    return jnp.where((own >= 0) & (own < logits.shape[1]), picked, 0)


def log_sum_exp(logits, share=lambda m: jax.lax.pmax(m, "tensor")):
    highest = share(jax.lax.stop_gradient(logits).max(-1))
    return highest + jnp.log(all_reduce(jnp.exp(logits - highest[:, None]).sum(-1), TENSOR))


def reference(h, w, labels):
    logits = f(h) @ w.T
    return (log_sum_exp(logits) - all_reduce(label_logit(logits, labels), TENSOR)).mean()


@mistake("result", "Each device subtracts its own maximum, so that sums of different scales are added.")
def own_maximum(h, w, labels):
    logits = f(h) @ w.T
    return (log_sum_exp(logits, lambda m: m) - all_reduce(label_logit(logits, labels), TENSOR)).mean()


@mistake("result", "Labels of other devices are clipped to a word of this one: the logits of eight words are added.")
def no_mask(h, w, labels):
    logits = f(h) @ w.T
    own = jnp.clip(labels - axis_index(TENSOR) * w.shape[0], 0, w.shape[0] - 1)
    picked = jnp.take_along_axis(logits, own[:, None], 1)[:, 0]
    return (log_sum_exp(logits) - all_reduce(picked, TENSOR)).mean()


@mistake("gradient", "f is missing: each device has the gradient of h from its own words only.")
def no_f(h, w, labels):
    logits = h @ w.T
    return (log_sum_exp(logits) - all_reduce(label_logit(logits, labels), TENSOR)).mean()


@mistake(
    "bytes",
    "The logits are gathered: T x V numbers on every device, and back again as gradients. Three numbers for each token "
    "are enough.",
)
def gather_the_logits(h, w, labels):
    logits = all_gather(f(h) @ w.T, TENSOR, 1)
    own = jnp.arange(labels.shape[0]) // -(-labels.shape[0] // 8) == axis_index(TENSOR)
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return all_reduce(jnp.where(own, nll, 0).sum(), TENSOR) / labels.shape[0]
