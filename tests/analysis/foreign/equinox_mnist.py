"""Convolutional classifier with filter_value_and_grad.

After https://docs.kidger.site/equinox/examples/mnist/
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on, without_filter


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        a, b, c, d = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=a), eqx.nn.MaxPool2d(kernel_size=2), jax.nn.relu, jnp.ravel,
            eqx.nn.Linear(1728, 512, key=b), jax.nn.sigmoid, eqx.nn.Linear(512, 64, key=c), jax.nn.relu,
            eqx.nn.Linear(64, 10, key=d), jax.nn.log_softmax,
        ]  # fmt: skip

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build(devices):
    mesh = mesh_of(devices, data=8)
    model = eqx.filter_eval_shape(CNN, jax.random.PRNGKey(0))
    optimizer = optax.adamw(3e-4)
    state = eqx.filter_eval_shape(lambda m: optimizer.init(eqx.filter(m, eqx.is_array)), model)

    def loss(model, x, y):
        predicted = jax.vmap(model)(x)
        return -jnp.mean(jnp.take_along_axis(predicted, y[:, None], axis=1))

    def step(model, state, x, y):
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    x, y = jax.ShapeDtypeStruct((64, 1, 28, 28), "float32"), jax.ShapeDtypeStruct((64,), "int32")
    jitted, arrays = without_filter(step, mesh, model, state)
    return jitted, (arrays, on(mesh, x, P("data")), on(mesh, y, P("data")))
