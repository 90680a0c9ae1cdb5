"""MultiSteps: every fourth step a conditional applies the accumulated gradients.

After https://optax.readthedocs.io/en/latest/_collections/examples/gradient_accumulation.html
"""

import jax
import jax.numpy as jnp
import optax
from placed import array, mesh_of, on


def build(devices):
    mesh = mesh_of(devices, data=8)
    params = {"w": array(mesh, (256, 256)), "v": array(mesh, (256, 64))}
    tx = optax.MultiSteps(optax.contrib.muon(1e-2), every_k_schedule=4)
    state = on(mesh, jax.eval_shape(tx.init, params))

    @jax.jit
    def step(params, state, x, y):
        loss = lambda p: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2)  # noqa: E731
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, state, array(mesh, (64, 256), "data"), array(mesh, (64, 64), "data"))
