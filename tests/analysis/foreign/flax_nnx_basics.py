"""Module with batch norm and dropout, its state split from its graph.

After https://flax.readthedocs.io/en/latest/nnx_basics.html
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(128, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(256, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.dropout(self.norm(self.up(x)))))


def build(devices):
    mesh = mesh_of(devices, data=8)
    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    @jax.jit
    def step(state, x, y):
        model = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        nnx.update(model, params)
        return value, nnx.state(model)

    x, y = jax.ShapeDtypeStruct((64, 128), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    return step, (on(mesh, state), on(mesh, x, P("data")), on(mesh, y, P("data")))
