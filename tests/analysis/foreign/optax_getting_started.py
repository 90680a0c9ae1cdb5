"""Linear fit of Optax's introduction, with donated state.

After https://optax.readthedocs.io/en/latest/getting_started.html
"""

import jax
import jax.numpy as jnp
import optax
from placed import array, mesh_of, on


def build(devices):
    mesh = mesh_of(devices, data=8)
    params = {"w": array(mesh, (512, 512)), "b": array(mesh, (512,))}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    state = on(mesh, jax.eval_shape(tx.init, params))

    def step(params, state, x, y):
        loss = lambda p: jnp.mean(optax.l2_loss(x @ p["w"] + p["b"], y))  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    x = array(mesh, (256, 512), "data")
    return jax.jit(step, donate_argnums=(0, 1)), (params, state, x, x)
