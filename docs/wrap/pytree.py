"""A plain pytree: a regression by a stack of layers in one array, split by rules."""

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw


def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(step).uniform(-2, 2, (64, 8)).astype(np.float32)
    return x, np.sin(x).sum(1)


def params(key):
    first, second, last = jax.random.split(key, 3)
    return {
        "in": jax.random.normal(first, (8, 128)) / 3,
        "layers": {"w": jax.random.normal(second, (4, 128, 128)) / 11, "b": jnp.zeros((4, 128))},
        "out": jax.random.normal(last, (128,)) / 11,
    }


def loss(params, batch):
    x, y = batch

    def layer(x, p):
        return x + jnp.tanh(x @ p["w"] + p["b"]), None

    x = jax.lax.scan(layer, x @ params["in"], params["layers"])[0]
    return jnp.mean((x @ params["out"] - y) ** 2)


model = mw.wrap(params, loss, batches, rules={r"layers\.w": (None, "fsdp", "tensor"), "in": (None, "tensor")})


def pytree() -> mw.Run:
    """The regression on eight devices: a recipe."""
    return model.run(mesh="data=2,fsdp=2,tensor=2", steps=50, learning_rate=1e-2)


if __name__ == "__main__":
    print(mw.train(pytree()).loss)
