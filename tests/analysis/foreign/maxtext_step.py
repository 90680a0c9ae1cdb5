"""Decoder like MaxText's: scanned and rematerialised layers, FSDP and tensor axes by constraints, AdamW, donated state.

After https://github.com/AI-Hypercomputer/maxtext/blob/main/src/MaxText/train.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import array, mesh_of, on

LAYERS, VOCAB, D, F, N, H = 4, 1024, 256, 512, 4, 64
SHAPES = {
    "embed": ((VOCAB, D), ("tensor", "fsdp")), "query": ((LAYERS, D, N, H), (None, "fsdp", "tensor")),
    "key": ((LAYERS, D, N, H), (None, "fsdp", "tensor")), "value": ((LAYERS, D, N, H), (None, "fsdp", "tensor")),
    "out": ((LAYERS, N, H, D), (None, "tensor", None, "fsdp")), "gate": ((LAYERS, D, F), (None, "fsdp", "tensor")),
    "up": ((LAYERS, D, F), (None, "fsdp", "tensor")), "down": ((LAYERS, F, D), (None, "tensor", "fsdp")),
    "scale": ((LAYERS, 2, D), ()),
}  # fmt: skip


def build(devices):
    mesh = mesh_of(devices, fsdp=4, tensor=2)
    params = {name: array(mesh, shape, *spec) for name, (shape, spec) in SHAPES.items()}
    tx = optax.adamw(1e-3)
    state = jax.eval_shape(tx.init, params)
    moments = [on(mesh, state[0].count), *({n: params[n] for n in params} for _ in range(2))]
    state = (optax.ScaleByAdamState(*moments), *state[1:])

    def shard(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def norm(x, scale):
        return (
            x
            * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-5)
            * (1 + scale)
        )

    def layer(x, w):
        y = norm(x, w["scale"][0]).astype(jnp.bfloat16)
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", y, w[n].astype(jnp.bfloat16))
            for n in ("query", "key", "value")
        )
        heads = shard(jax.nn.dot_product_attention(q, k, v, is_causal=True), "fsdp", None, "tensor")
        x = shard(x + jnp.einsum("btnh,nhd->btd", heads, w["out"].astype(jnp.bfloat16)), "fsdp")
        y = norm(x, w["scale"][1]).astype(jnp.bfloat16)
        gate, up = (jnp.einsum("btd,df->btf", y, w[n].astype(jnp.bfloat16)) for n in ("gate", "up"))
        hidden = shard(jax.nn.silu(gate) * up, "fsdp", None, "tensor")
        return shard(
            x + jnp.einsum("btf,fd->btd", hidden, w["down"].astype(jnp.bfloat16)), "fsdp"
        ), None

    def loss(params, tokens):
        rows = jax.nn.one_hot(
            tokens[:, :-1], VOCAB, dtype=jnp.bfloat16
        )  # its option use_iota_embed
        x = shard(jnp.einsum("btv,vd->btd", rows, params["embed"].astype(jnp.bfloat16)), "fsdp")
        stacked = {name: w for name, w in params.items() if name != "embed"}
        x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, stacked)
        logits = shard(
            jnp.einsum("btd,vd->btv", x, params["embed"].astype(jnp.bfloat16)),
            "fsdp",
            None,
            "tensor",
        )
        logits = logits.astype(jnp.float32)
        one_hot = jax.nn.one_hot(tokens[:, 1:], VOCAB)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * one_hot, -1))

    def train_step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(train_step, donate_argnums=(0, 1)), (
        params,
        state,
        array(mesh, (16, 129), "fsdp", dtype="int32"),
    )
