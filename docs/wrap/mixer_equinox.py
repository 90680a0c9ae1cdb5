"""A diffusion model in Equinox: an MLP-mixer that predicts the noise of 16 x 16 images."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw


def batches(step: int) -> np.ndarray:
    rng = np.random.default_rng(step)
    place, x = rng.uniform(4, 12, (32, 2, 1)), np.arange(16)
    rows, columns = np.exp(-((x - place[:, 0]) ** 2) / 8), np.exp(-((x - place[:, 1]) ** 2) / 8)
    return (rows[:, None, :, None] * columns[:, None, None, :]).astype(np.float32)


class MixerBlock(eqx.Module):
    patches: eqx.nn.MLP
    channels: eqx.nn.MLP
    norms: list

    def __init__(self, patches, width, key):
        first, second = jax.random.split(key)
        self.patches = eqx.nn.MLP(patches, patches, 64, 1, key=first)
        self.channels = eqx.nn.MLP(width, width, 128, 1, key=second)
        self.norms = [eqx.nn.LayerNorm((width, patches)), eqx.nn.LayerNorm((patches, width))]

    def __call__(self, y):  # [width, patches]
        y = y + jax.vmap(self.patches)(self.norms[0](y))
        return y + jax.vmap(self.channels)(self.norms[1](y.T)).T


class Mixer(eqx.Module):
    into: eqx.nn.Conv2d
    out: eqx.nn.ConvTranspose2d
    blocks: list

    def __init__(self, key, *, width=64, layers=2):
        keys = jax.random.split(key, layers + 2)
        self.into = eqx.nn.Conv2d(2, width, 4, stride=4, key=keys[0])
        self.out = eqx.nn.ConvTranspose2d(width, 1, 4, stride=4, key=keys[1])
        self.blocks = [MixerBlock(16, width, k) for k in keys[2:]]

    def __call__(self, t, y):  # time, and [1, 16, 16]
        y = self.into(jnp.concatenate([y, jnp.broadcast_to(t, y.shape)]))
        shape, y = y.shape, y.reshape(y.shape[0], -1)
        for block in self.blocks:
            y = block(y)
        return self.out(y.reshape(shape))


def loss(model, batch, key):
    times, noise = jax.random.split(key)
    t = jax.random.uniform(times, (batch.shape[0],))
    noise = jax.random.normal(noise, batch.shape)
    mixed = jnp.sqrt(1 - t)[:, None, None, None] * batch + jnp.sqrt(t)[:, None, None, None] * noise
    return jnp.mean((jax.vmap(model)(t, mixed) - noise) ** 2)


model = mw.wrap(Mixer, loss, batches, held_out=[batches(10**6)])


def mixer_equinox() -> mw.Run:
    """The mixer on eight devices: a recipe."""
    return model.run(mesh="fsdp=8", steps=50, learning_rate=1e-3)


if __name__ == "__main__":
    print(mw.train(mixer_equinox()).held_out_loss)
