"""Recurrent classifier: a scan of a GRU cell.

After https://docs.kidger.site/equinox/examples/train_rnn/
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on, without_filter


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.cell, self.linear = eqx.nn.GRUCell(2, 64, key=a), eqx.nn.Linear(64, 1, key=b)

    def __call__(self, x):
        hidden, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(64), x)
        return jax.nn.sigmoid(self.linear(hidden))


def build(devices):
    mesh = mesh_of(devices, data=8)
    model = eqx.filter_eval_shape(RNN, jax.random.PRNGKey(0))
    optimizer = optax.adam(3e-3)
    state = eqx.filter_eval_shape(lambda m: optimizer.init(eqx.filter(m, eqx.is_array)), model)

    def loss(model, x, y):
        predicted = jax.vmap(model)(x)[:, 0]
        return -jnp.mean(y * jnp.log(predicted) + (1 - y) * jnp.log(1 - predicted))

    def step(model, state, x, y):
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return value, eqx.apply_updates(model, updates), state

    x, y = jax.ShapeDtypeStruct((32, 16, 2), "float32"), jax.ShapeDtypeStruct((32,), "float32")
    jitted, arrays = without_filter(step, mesh, model, state)
    return jitted, (arrays, on(mesh, x, P("data")), on(mesh, y, P("data")))
