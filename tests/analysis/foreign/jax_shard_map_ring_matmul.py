"""All-gather before a matrix product, written as a ring of permutes beside partial products.

After https://docs.jax.dev/en/latest/notebooks/shard_map.html
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, i=8)

    def product(rows, block):
        size, here = jax.lax.axis_size("i"), jax.lax.axis_index("i")
        width = rows.shape[1] // size

        def columns(step):
            return jax.lax.dynamic_slice_in_dim(rows, (here + step) % size * width, width, 1)

        total = columns(0) @ block
        for step in range(1, size):
            block = jax.lax.ppermute(block, "i", [(n, (n - 1) % size) for n in range(size)])
            total = total + columns(step) @ block
        return jnp.tanh(total)

    mapped = jax.shard_map(product, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P("i"))
    return jax.jit(mapped), (array(mesh, (512, 1024), "i"), array(mesh, (1024, 256), "i"))
