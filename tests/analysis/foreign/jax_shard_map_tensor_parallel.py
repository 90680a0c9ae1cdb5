"""Tensor parallel MLP by hand: each layer's sum is scattered over features.

After https://docs.jax.dev/en/latest/notebooks/shard_map.html
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, batch=2, feats=4)
    sizes = [256, 512, 256]
    params = [
        (array(mesh, (m, n), "feats"), array(mesh, (n,), "feats"))
        for m, n in itertools.pairwise(sizes)
    ]
    batch = (array(mesh, (64, 256), "batch", "feats"), array(mesh, (64, 256), "batch", "feats"))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("feats"), P("batch", "feats")),
        out_specs=P("batch", "feats"),
    )
    def forward(params, x):
        for w, b in params:
            x = jax.nn.relu(
                jax.lax.psum_scatter(x @ w, "feats", scatter_dimension=1, tiled=True) + b
            )
        return x

    def loss(params, batch):
        return jnp.mean(jnp.sum((forward(params, batch[0]) - batch[1]) ** 2, -1))

    return jax.jit(jax.value_and_grad(loss)), (params, batch)
