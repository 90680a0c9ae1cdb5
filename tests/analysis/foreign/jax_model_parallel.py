"""Gradients of an MLP sharded over batch and model axes, left to the compiler.

After https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, batch=4, model=2)
    params = {
        "up": array(mesh, (512, 1024), None, "model"),
        "down": array(mesh, (1024, 512), "model"),
        "out": array(mesh, (512, 128)),
    }
    x = array(mesh, (256, 512), "batch")

    def loss(params, x):
        hidden = jnp.sin(x @ params["up"])
        hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, P("batch", "model")))
        return jnp.square(jnp.sin(hidden @ params["down"]) @ params["out"]).mean()

    return jax.jit(jax.value_and_grad(loss)), (params, x)
