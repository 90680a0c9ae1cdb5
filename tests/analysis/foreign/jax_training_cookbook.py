"""Transformer of the training cookbook: explicit FSDP and state in references.

After https://docs.jax.dev/en/latest/the-training-cookbook.html
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from placed import mesh_of, traced

LAYERS, VOCAB, SEQ, D, F, N, H = 2, 256, 128, 256, 1024, 4, 64
SPECS = {
    "embed": ((VOCAB, D), P()), "positions": ((SEQ, D), P()), "qkv": ((LAYERS, 3, D, N, H), P(None, None, "fsdp")),
    "out": ((LAYERS, N, H, D), P(None, None, None, "fsdp")), "up": ((LAYERS, D, F), P(None, "fsdp")),
    "down": ((LAYERS, F, D), P(None, None, "fsdp")), "unembed": ((D, VOCAB), P("fsdp")),
}  # fmt: skip


def forward(params, tokens):
    x = params["embed"].at[tokens].get(out_sharding=P("fsdp")) + params["positions"]
    for layer in range(LAYERS):
        qkv = jnp.einsum("bsd,cdnh->bscnh", x, params["qkv"][layer], out_sharding=P("fsdp"))
        heads = jax.nn.dot_product_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True
        )
        x = x + jnp.einsum("bsnh,nhd->bsd", heads, params["out"][layer], out_sharding=P("fsdp"))
        x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        hidden = jax.nn.gelu(
            jnp.einsum("bsd,df->bsf", x, params["up"][layer], out_sharding=P("fsdp"))
        )
        x = x + jnp.einsum("bsf,fd->bsd", hidden, params["down"][layer], out_sharding=P("fsdp"))
    return jnp.einsum("bsd,dv->bsv", x, params["unembed"], out_sharding=P("fsdp"))


def build(devices):
    mesh = mesh_of(devices, explicit=True, fsdp=8)

    def abstract(shape, spec, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    params = {name: abstract(*given) for name, given in SPECS.items()}
    tokens = abstract((16, SEQ), P("fsdp"), "int32")

    def train_step(params, mu, nu, tokens, targets):
        refs = [jax.tree.map(jax.new_ref, tree) for tree in (params, mu, nu)]

        def loss(params):
            logits = forward(params, tokens)
            return -(jax.nn.one_hot(targets, VOCAB) * jax.nn.log_softmax(logits)).sum(-1).mean()

        value, grads = jax.value_and_grad(loss)(jax.tree.map(lambda ref: ref[...], refs[0]))
        for name, grad in grads.items():
            p, m, v = (tree[name] for tree in refs)
            m[...] = 0.9 * m[...] + 0.1 * grad
            v[...] = 0.999 * v[...] + 0.001 * grad**2
            p[...] = p[...] - 1e-4 * m[...] / (jnp.sqrt(v[...]) + 1e-8)
        return value, [jax.tree.map(jax.freeze, tree) for tree in refs]

    return traced(train_step, mesh, params, params, params, tokens, tokens)
