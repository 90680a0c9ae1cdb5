"""Stack of products sharded over data and model, with constraints on activations.

After https://flax.readthedocs.io/en/latest/guides/flax_gspmd.html
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on

SPECS = {"up": P(None, "model"), "down": P("model", None)}


class DotReluDot(nnx.Module):
    def __init__(self, mesh, rngs):
        self.up = nnx.Param(rngs.params.normal((256, 256)))
        self.down = nnx.Param(rngs.params.normal((256, 256)))
        self.mesh = mesh

    def __call__(self, x):
        y = jax.lax.with_sharding_constraint(
            nnx.relu(x @ self.up[...]), NamedSharding(self.mesh, P("data", "model"))
        )
        return jax.lax.with_sharding_constraint(
            y @ self.down[...], NamedSharding(self.mesh, P("data", None))
        )


class Stack(nnx.Module):
    def __init__(self, mesh, rngs):
        self.layers = nnx.List([DotReluDot(mesh, rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build(devices):
    mesh = mesh_of(devices, data=2, model=4)
    graph, state = nnx.split(nnx.eval_shape(lambda: Stack(mesh, nnx.Rngs(0)).layers), nnx.Param)[:2]
    place = lambda path, leaf: on(mesh, leaf, SPECS[next(k for k in SPECS if k in str(path))])  # noqa: E731
    state = jax.tree_util.tree_map_with_path(place, state)

    @jax.jit
    def step(state, x, y):
        def loss(state):
            hidden = x
            for layer in nnx.merge(graph, state):
                hidden = layer(hidden)
            return jnp.mean((hidden - y) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    x = on(mesh, jax.ShapeDtypeStruct((64, 256), "float32"), P("data"))
    return step, (state, x, x)
