"""L-BFGS with a line search: loops that end on data.

After https://optax.readthedocs.io/en/latest/_collections/examples/lbfgs.html
"""

import jax
import jax.numpy as jnp
import optax
from placed import array, mesh_of, on


def build(devices):
    mesh = mesh_of(devices, data=8)
    w, x = array(mesh, (256, 16)), array(mesh, (128, 256), "data")
    tx = optax.lbfgs(memory_size=4)
    state = on(mesh, jax.eval_shape(tx.init, w))

    @jax.jit
    def step(w, state, x, y):
        loss = lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2)  # noqa: E731
        value, grad = optax.value_and_grad_from_state(loss)(w, state=state)
        updates, state = tx.update(grad, state, w, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(w, updates), state

    return step, (w, state, x, array(mesh, (128, 16), "data"))
