"""Scan over rematerialised layers.

After https://docs.jax.dev/en/latest/gradient-checkpointing.html
"""

import functools

import jax
import jax.numpy as jnp
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, data=8)
    params = (array(mesh, (6, 256, 256)), array(mesh, (6, 256)))

    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    def layer(x, wb):
        w, b = wb
        return jnp.sin(jnp.sin(x @ w + b) @ w), None

    def loss(params, x):
        return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)

    return jax.jit(jax.grad(loss)), (params, array(mesh, (128, 256), "data"))
