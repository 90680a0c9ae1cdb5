"""Character-level language model of Optax's examples.

After https://optax.readthedocs.io/en/latest/_collections/examples/nanolm.html
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on


class NanoLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        seq = tokens.shape[1]
        x = nn.Embed(65, 128)(tokens) + nn.Embed(seq, 128)(jnp.arange(seq))
        for _ in range(2):
            mask = nn.make_causal_mask(tokens)
            x = x + nn.MultiHeadDotProductAttention(4, qkv_features=128)(
                nn.LayerNorm()(x), mask=mask
            )
            x = x + nn.Dense(128)(nn.relu(nn.Dense(512)(nn.LayerNorm()(x))))
        return nn.Dense(65)(nn.LayerNorm()(x))


def build(devices):
    mesh = mesh_of(devices, data=8)
    model, tx = NanoLM(), optax.lion(1e-4)
    tokens = jax.ShapeDtypeStruct((32, 64), "int32")
    params = jax.eval_shape(model.init, jax.random.PRNGKey(0), tokens)

    @jax.jit
    def step(params, state, tokens):
        def loss(params):
            logits = model.apply(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = on(mesh, jax.eval_shape(tx.init, params))
    return step, (
        on(mesh, params),
        state,
        on(mesh, jax.ShapeDtypeStruct((32, 65), "int32"), P("data")),
    )
