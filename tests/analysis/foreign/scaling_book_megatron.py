"""Megatron MLP block with FSDP: gathers over X, sums over Y.

After https://jax-ml.github.io/scaling-book/training/
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, X=4, Y=2)
    weights = (
        array(mesh, (4, 256, 512), None, "X", "Y"),
        array(mesh, (4, 512, 256), None, "Y", "X"),
    )

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(None, "X", "Y"), P(None, "Y", "X"), P("X", "Y")),
        out_specs=P("X", "Y"),
    )
    def forward(up, down, x):
        def layer(x, w):
            up, down = w
            whole = jax.lax.all_gather(x, "Y", axis=1, tiled=True)
            hidden = jax.nn.gelu(whole @ jax.lax.all_gather(up, "X", axis=0, tiled=True))
            out = hidden @ jax.lax.all_gather(down, "X", axis=1, tiled=True)
            return x + jax.lax.psum_scatter(out, "Y", scatter_dimension=1, tiled=True), None

        return jax.lax.scan(layer, x, (up, down))[0]

    loss = lambda weights, x: jnp.mean(forward(*weights, x) ** 2)  # noqa: E731
    return jax.jit(jax.grad(loss)), (weights, array(mesh, (128, 256), "X", "Y"))
