"""A vision transformer in Flax NNX, its feed-forward layers split over `tensor` by the module's own annotations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshwright as mw

PATTERNS = np.random.default_rng(0).normal(size=(10, 32, 32, 3)).astype(np.float32)


def batches(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 10, 32)
    return {"image": PATTERNS[labels] + rng.normal(size=(32, 32, 32, 3)).astype(np.float32), "label": labels}


def split(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, kernel_init=split(None, "mlp"), rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=split("mlp", None), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class VisionTransformer(nnx.Module):
    def __init__(self, rngs, *, width=64, layers=2, heads=4, patch=8):
        self.patches = nnx.Conv(3, width, (patch, patch), strides=(patch, patch), padding="VALID", rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, (32 // patch) ** 2, width)))
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def loss(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


model = mw.wrap(lambda key: VisionTransformer(nnx.Rngs(key)), loss, batches, axes={"mlp": "tensor"})


def vit_nnx() -> mw.Run:
    """The vision transformer on eight devices: a recipe."""
    return model.run(mesh="data=2,fsdp=2,tensor=2", steps=50, learning_rate=1e-3)


if __name__ == "__main__":
    print(mw.train(vit_nnx()).loss)
