"""Residual blocks with batch norm and momentum, a step of the ImageNet example.

After https://github.com/google/flax/tree/main/examples/imagenet
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on


class Block(nn.Module):
    filters: int
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        norm = lambda y: nn.BatchNorm(use_running_average=False)(y)  # noqa: E731
        y = nn.relu(norm(nn.Conv(self.filters, (3, 3), self.strides, use_bias=False)(x)))
        y = norm(nn.Conv(self.filters, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm(nn.Conv(self.filters, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(
            nn.relu(nn.Conv(32, (7, 7), (2, 2))(x)), (3, 3), strides=(2, 2), padding="SAME"
        )
        for filters, strides in ((32, (1, 1)), (64, (2, 2))):
            x = Block(filters, strides)(x)
        return nn.Dense(100)(x.mean((1, 2)))


def build(devices):
    mesh = mesh_of(devices, data=8)
    model, tx = ResNet(), optax.sgd(0.1, momentum=0.9, nesterov=True)
    images, labels = (
        jax.ShapeDtypeStruct((16, 32, 32, 3), "float32"),
        jax.ShapeDtypeStruct((16,), "int32"),
    )
    variables = jax.eval_shape(model.init, jax.random.PRNGKey(0), images)
    state = jax.eval_shape(tx.init, variables["params"])

    @jax.jit
    def train_step(variables, state, images, labels):
        def loss(params):
            given = {"params": params, "batch_stats": variables["batch_stats"]}
            logits, new = model.apply(given, images, mutable=["batch_stats"])
            cost = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            decay = 0.5e-4 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
            return cost + decay, new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, after = tx.update(grads, state, variables["params"])
        return {"params": optax.apply_updates(variables["params"], updates), **new}, after, value

    placed = (on(mesh, images, P("data")), on(mesh, labels, P("data")))
    return train_step, (on(mesh, variables), on(mesh, state), *placed)
