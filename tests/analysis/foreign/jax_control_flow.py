"""Power iteration until it converges, a counted loop, and a switch.

After https://docs.jax.dev/en/latest/control-flow.html
"""

import jax
import jax.numpy as jnp
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, data=8)

    def step(a, x, which):
        def more(carry):
            _, error, i = carry
            return (error > 1e-6) & (i < 100)

        def iterate(carry):
            x, _, i = carry
            y = a @ x
            y = y / jnp.linalg.norm(y)
            return y, jnp.linalg.norm(y - x), i + 1

        x, _, _ = jax.lax.while_loop(more, iterate, (x, jnp.float32(jnp.inf), 0))
        x = jax.lax.fori_loop(0, 10, lambda i, x: jnp.tanh(a @ x) + i, x)
        branches = [lambda x: a @ x, lambda x: a @ (a @ x), lambda x: x]
        return jax.lax.switch(which, branches, x)

    return jax.jit(step), (
        array(mesh, (256, 256), "data"),
        array(mesh, (256, 64)),
        array(mesh, (), dtype="int32"),
    )
