"""Shardings in types: a product with an out_sharding, and a reshard.

After https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from placed import array, mesh_of, traced


def build(devices):
    mesh = mesh_of(devices, explicit=True, X=4, Y=2)

    def step(x, w, v):
        hidden = jnp.einsum("bd,df->bf", x, w, out_sharding=P("X", "Y"))
        hidden = jax.sharding.reshard(jnp.tanh(hidden), P("X", None))
        return jnp.einsum("bf,fd->bd", hidden, v, out_sharding=P("X", None)).sum()

    arguments = (
        array(mesh, (256, 512), "X"),
        array(mesh, (512, 512), None, "Y"),
        array(mesh, (512, 256)),
    )
    return traced(jax.grad(step, argnums=(1, 2)), mesh, *arguments)
