"""Classifier of single examples, vectorised by vmap, with static and keyword arguments.

After https://docs.jax.dev/en/latest/notebooks/neural_network_with_tfds_data.html
"""

import functools

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, data=8)
    params = [
        (array(mesh, (n, m)), array(mesh, (n,))) for m, n in ((784, 512), (512, 512), (512, 10))
    ]

    def predict(params, image):
        activations = image
        for w, b in params[:-1]:
            activations = jax.nn.relu(jnp.dot(w, activations) + b)
        logits = jnp.dot(params[-1][0], activations) + params[-1][1]
        return logits - logsumexp(logits)

    @functools.partial(jax.jit, static_argnames="step_size")
    def update(params, x, y, step_size):
        loss = lambda params: -jnp.mean(jax.vmap(predict, in_axes=(None, 0))(params, x) * y)  # noqa: E731
        return [
            (w - step_size * dw, b - step_size * db)
            for (w, b), (dw, db) in zip(params, jax.grad(loss)(params), strict=True)
        ]

    bound = functools.partial(update, step_size=0.01)
    return bound, (params, array(mesh, (128, 784), "data"), array(mesh, (128, 10), "data"))
