# %% [markdown]
# # Your own model
#
# Train a model that knows nothing of Meshwright on eight devices: any function of a key that makes a tree of arrays, a
# loss, and batches. `mw.wrap` works alike for Flax NNX, Flax Linen and Equinox ([page](../wrap.md)).

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import meshwright as mw

# %% [markdown]
# ## The model, as it is
#
# A residual network that learns the sum of sines. Nothing here names a device.

# %%


def batches(step):
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


# %% [markdown]
# ## Wrapped
#
# One line. Arrays are split by size over `fsdp`; `rules` place some of them over `tensor` too.

# %%
model = mw.wrap(params, loss, batches, rules={r"layers\.w": (None, "fsdp", "tensor"), "in": (None, "tensor")})
run = model.run(mesh="data=2,fsdp=2,tensor=2", steps=30, learning_rate=1e-2)
folder = Path(tempfile.mkdtemp())
summary = mw.train(run, out=folder / "run", progress="none", cache=folder / "cache")
before = float(loss(params(jax.random.key(0)), batches(0)))
print(f"loss before {before:.2f}, after {summary.steps} steps {summary.loss:.2f}")

# %% [markdown]
# ## The same numbers on one device?
#
# `mw.parity` trains the same batches on both meshes, and compares losses and parameters.

# %%
same = mw.parity(run, against="data=1")
for step in same.steps:
    ours, alone = step.losses
    print(f"step {step.step}: loss {ours:.4f} and {alone:.4f}")
print("gradients differ by less than 1e-5:", max(step.gradient_difference for step in same.steps) < 1e-5)

# %% [markdown]
# ## Would it fit elsewhere?
#
# It is a Run like any other, so it is planned for hardware that is not here. The loss is traced once, for its FLOPs.

# %%
best = mw.plan(run, on="v5p:2x2x2")[0]
print(best.mesh, f"{best.estimate.bytes / 2**20:.0f} MiB of a device")

# %% [markdown]
# ## Back as your arrays

# %%
trained = model.restore(folder / "run")
print(jax.tree.map(jnp.shape, trained))
