"""Data parallelism by filter_shard inside the step.

After https://docs.kidger.site/equinox/examples/parallelism/
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on, without_filter


def build(devices):
    mesh = mesh_of(devices, batch=8)
    model = eqx.filter_eval_shape(
        lambda key: eqx.nn.MLP(128, 16, 256, 2, key=key), jax.random.PRNGKey(0)
    )
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))

    def step(model, x, y):
        model, (x, y) = eqx.filter_shard(model, whole), eqx.filter_shard((x, y), split)
        value, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(
            model
        )
        return eqx.filter_shard(
            eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), whole
        ), value

    x, y = jax.ShapeDtypeStruct((64, 128), "float32"), jax.ShapeDtypeStruct((64, 16), "float32")
    jitted, arrays = without_filter(step, mesh, model)
    return jitted, (arrays, on(mesh, x, P("batch")), on(mesh, y, P("batch")))
