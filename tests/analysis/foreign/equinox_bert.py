"""Encoder of a masked language model with Equinox's attention.

After https://docs.kidger.site/equinox/examples/bert/
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on, without_filter


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list
    mlp: eqx.nn.MLP

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, 128, key=a)
        self.norms = [eqx.nn.LayerNorm(128), eqx.nn.LayerNorm(128)]
        self.mlp = eqx.nn.MLP(128, 128, 512, 1, activation=jax.nn.gelu, key=b)

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Encoder(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list

    def __init__(self, key):
        a, *rest = jax.random.split(key, 4)
        self.embedding, self.blocks = eqx.nn.Embedding(512, 128, key=a), [Block(k) for k in rest]

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.T


def build(devices):
    mesh = mesh_of(devices, data=8)
    model = eqx.filter_eval_shape(Encoder, jax.random.PRNGKey(0))

    def step(model, tokens):
        @eqx.filter_value_and_grad
        def loss(model):
            logits = jax.vmap(model)(tokens)
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))

        value, grads = loss(model)
        return value, eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    jitted, arrays = without_filter(step, mesh, model)
    return jitted, (arrays, on(mesh, jax.ShapeDtypeStruct((16, 64), "int32"), P("data")))
