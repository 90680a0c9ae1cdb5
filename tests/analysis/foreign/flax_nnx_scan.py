"""Layers made by nnx.vmap and run by nnx.scan.

After https://flax.readthedocs.io/en/latest/guides/transforms.html
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(128, 128, rngs=rngs), nnx.LayerNorm(128, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.norm(self.linear(x)))


def build(devices):
    mesh = mesh_of(devices, data=8)

    def create():
        @nnx.split_rngs(splits=5)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs):
            return Layer(rngs)

        return layers(nnx.Rngs(0))

    graph, state = nnx.split(nnx.eval_shape(create))

    @jax.jit
    def step(state, x):
        def loss(state):
            layers = nnx.merge(graph, state)
            forward = nnx.scan(
                lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )
            return jnp.mean(forward(x, layers) ** 2)

        return jax.value_and_grad(loss)(state)

    return step, (on(mesh, state), on(mesh, jax.ShapeDtypeStruct((64, 128), "float32"), P("data")))
