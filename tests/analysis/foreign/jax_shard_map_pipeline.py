"""Pipeline of stages by hand: microbatches shift by permutes from stage to stage.

After https://docs.jax.dev/en/latest/notebooks/shard_map.html
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, stages=8)
    weights, x = array(mesh, (8, 256, 256), "stages"), array(mesh, (16, 32, 256), "stages")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("stages"), P("stages")), out_specs=P("stages")
    )
    def pipeline(weights, inputs):
        stages, stage = jax.lax.axis_size("stages"), jax.lax.axis_index("stages")
        microbatches = stages * inputs.shape[0]
        outputs, state = jnp.zeros_like(inputs), jnp.zeros_like(inputs)
        around = [(i, (i + 1) % stages) for i in range(stages)]
        for tick in range(microbatches + stages - 1):
            row = tick % inputs.shape[0]
            state = state.at[row].set(jnp.where(stage == 0, inputs[row], state[row]))
            state = state.at[row].set(jax.nn.relu(state[row] @ weights[0]))
            outputs = outputs.at[row].set(jnp.where(stage == stages - 1, state[row], outputs[row]))
            state = jax.lax.ppermute(state, "stages", around)
        return outputs

    def loss(weights, x):
        return jnp.mean(pipeline(weights, x) ** 2)

    return jax.jit(jax.grad(loss)), (weights, x)
