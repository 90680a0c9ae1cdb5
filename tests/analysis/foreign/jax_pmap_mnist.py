"""Data parallelism by pmap, gradients summed by axis name.

After https://github.com/jax-ml/jax/blob/main/examples/spmd_mnist_classifier_fromscratch.py
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on


def build(devices):
    mesh = mesh_of(devices, batch=8)
    shapes = [(784, 256), (256,), (256, 10), (10,)]

    def step(params, batch):
        def loss(params):
            x, y = batch
            w, b, v, c = params
            return -jnp.mean(jnp.sum(jax.nn.log_softmax(jnp.tanh(x @ w + b) @ v + c) * y, axis=1))

        grads = [jax.lax.psum(g, "batch") for g in jax.grad(loss)(params)]
        return [p - 0.001 * g for p, g in zip(params, grads, strict=True)]

    def stacked(shape):
        return on(mesh, jax.ShapeDtypeStruct((8, *shape), "float32"), P("batch"))

    mapped = jax.pmap(step, axis_name="batch", devices=list(devices))
    return mapped, ([stacked(s) for s in shapes], (stacked((16, 784)), stacked((16, 10))))
