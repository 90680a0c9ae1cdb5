"""An MLP classifier in Flax Linen, 784-512-10 with dropout and batch norm."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw

CENTRES = np.random.default_rng(0).normal(size=(10, 784)).astype(np.float32)


def batches(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 10, 64)
    return {"image": CENTRES[labels] + rng.normal(size=(64, 784)).astype(np.float32) * 4, "label": labels}


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(512)(x)
        # `axis_name` makes statistics those of the whole batch; without it each device has its own examples'.
        x = nn.BatchNorm(use_running_average=not train, axis_name=("data", "fsdp"))(x)
        x = nn.Dropout(0.1, deterministic=not train)(nn.silu(x))
        return nn.Dense(10)(x)


def loss(model, batch):
    logits = model(batch["image"], train=model.training)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


model = mw.wrap(Mlp(), loss, batches, held_out=[batches(10**6 + i) for i in range(4)])


def mlp_linen() -> mw.Run:
    """The MLP on eight devices: a recipe."""
    return model.run(mesh="data=2,fsdp=4", steps=50, learning_rate=1e-3)


if __name__ == "__main__":
    print(mw.train(mlp_linen()).held_out_loss)
