"""Rematerialised layers whose activations go to host memory.

After https://docs.jax.dev/en/latest/notebooks/host-offloading.html
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, data=8)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.remat, policy=policy)
    def layer(x, w):
        up, down = w
        x = checkpoint_name(x, "x")
        return jnp.tanh(jax.nn.relu(x @ up) @ down), None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    weights = (array(mesh, (4, 256, 512)), array(mesh, (4, 512, 256)))
    return jax.jit(jax.grad(loss)), (weights, array(mesh, (256, 256), "data"))
