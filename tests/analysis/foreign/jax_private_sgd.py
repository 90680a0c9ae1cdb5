"""Differentially private gradients: one for each example, clipped, summed, with noise.

After https://github.com/jax-ml/jax/blob/main/examples/differentially_private_sgd.py
"""

import jax
import jax.numpy as jnp
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, data=8)
    params = {"w": array(mesh, (256, 128)), "v": array(mesh, (128, 10))}
    batch = (array(mesh, (64, 256), "data"), array(mesh, (64, 10), "data"))

    def loss(params, example):
        x, y = example
        return -jnp.sum(jax.nn.log_softmax(jnp.tanh(x @ params["w"]) @ params["v"]) * y)

    def clipped(params, example):
        grads = jax.grad(loss)(params, example)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)

    def step(params, batch, key):
        grads = jax.tree.map(lambda g: g.sum(0), jax.vmap(clipped, (None, 0))(params, batch))
        keys = dict(zip(grads, jax.random.split(key, len(grads)), strict=True))
        return {
            k: params[k] - 0.01 * (g + jax.random.normal(keys[k], g.shape))
            for k, g in grads.items()
        }

    return jax.jit(step), (params, batch, array(mesh, (2,), dtype="uint32"))
