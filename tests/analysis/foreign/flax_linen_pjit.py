"""Linen layers with partitioned parameters in nn.scan.

After https://flax-linen.readthedocs.io/en/latest/guides/parallel_training/flax_on_pjit.html
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on


class DotReluDot(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        init = nn.initializers.xavier_normal()
        up = nn.Dense(256, kernel_init=nn.with_partitioning(init, (None, "model")), use_bias=False)
        y = jax.nn.relu(up(x))
        down = self.param("down", nn.with_partitioning(init, ("model", None)), (256, x.shape[-1]))
        return jnp.dot(y, down), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            nn.remat(DotReluDot), variable_axes={"params": 0}, split_rngs={"params": True}, length=4,
            metadata_params={nn.PARTITION_NAME: None},
        )  # fmt: skip
        return scanned()(x, None)[0]


def build(devices):
    mesh = mesh_of(devices, data=2, model=4)
    model, x = Stack(), jax.ShapeDtypeStruct((64, 128), "float32")
    boxed = jax.eval_shape(model.init, jax.random.PRNGKey(0), x)
    specs, params = nn.get_partition_spec(boxed), nn.unbox(boxed)
    params = jax.tree.map(
        lambda spec, leaf: on(mesh, leaf, spec), specs, params, is_leaf=lambda s: isinstance(s, P)
    )

    @jax.jit
    def step(params, x, y):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None)))
        loss = lambda params: jnp.mean((model.apply(params, x) - y) ** 2)  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    x = on(mesh, x, P("data"))
    return step, (params, x, x)
