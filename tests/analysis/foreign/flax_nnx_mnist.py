"""Convolutional classifier with nnx.jit and nnx.Optimizer.

After https://flax.readthedocs.io/en/latest/mnist_tutorial.html
"""

import functools

import jax
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1, self.conv2 = (
            nnx.Conv(1, 32, (3, 3), rngs=rngs),
            nnx.Conv(32, 64, (3, 3), rngs=rngs),
        )
        self.pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1, self.linear2 = (
            nnx.Linear(3136, 256, rngs=rngs),
            nnx.Linear(256, 10, rngs=rngs),
        )

    def __call__(self, x):
        x = self.pool(nnx.relu(self.conv1(x)))
        x = self.pool(nnx.relu(self.conv2(x)))
        return self.linear2(nnx.relu(self.linear1(x.reshape(x.shape[0], -1))))


def build(devices):
    mesh = mesh_of(devices, data=8)

    def create():
        model = CNN(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(create)
    for node in (model, optimizer):
        nnx.update(node, on(mesh, nnx.state(node)))

    @nnx.jit
    def train_step(model, optimizer, images, labels):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    images = on(mesh, jax.ShapeDtypeStruct((32, 28, 28, 1), "float32"), P("data"))
    return train_step, (
        model,
        optimizer,
        images,
        on(mesh, jax.ShapeDtypeStruct((32,), "int32"), P("data")),
    )
