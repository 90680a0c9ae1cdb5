"""Gradient step of an MLP whose batch is sharded and whose layers are whole.

After https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html
"""

import itertools

import jax
import jax.numpy as jnp
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, batch=8)
    sizes = [784, 512, 512, 10]
    params = [(array(mesh, (m, n)), array(mesh, (n,))) for m, n in itertools.pairwise(sizes)]
    batch = (array(mesh, (256, 784), "batch"), array(mesh, (256, 10), "batch"))

    def loss(params, batch):
        x, targets = batch
        for w, b in params[:-1]:
            x = jnp.tanh(x @ w + b)
        logits = x @ params[-1][0] + params[-1][1]
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * targets, axis=1))

    @jax.jit
    def update(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))

    return update, (params, batch)
