"""Matrix product of which each device sums a part, scattered by psum_scatter.

After https://docs.jax.dev/en/latest/notebooks/shard_map.html
"""

import jax
from jax.sharding import PartitionSpec as P
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, x=4, y=2)

    def product(a, b):
        return jax.lax.psum_scatter(a @ b, "y", tiled=True)

    mapped = jax.shard_map(
        product, mesh=mesh, in_specs=(P("x", "y"), P("y", None)), out_specs=P(("x", "y"))
    )
    return jax.jit(mapped), (array(mesh, (256, 512), "x", "y"), array(mesh, (512, 384), "y"))
