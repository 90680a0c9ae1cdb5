"""Attention over a sequence split over devices, keys and values around a ring in a scan.

After https://docs.jax.dev/en/latest/notebooks/shard_map.html (collectives), with the online softmax of arXiv:2310.01889
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from placed import array, mesh_of


def build(devices):
    mesh = mesh_of(devices, seq=8)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"), check_vma=False
    )
    def attend(q, k, v):
        around = [(i, (i + 1) % 8) for i in range(8)]

        def turn(carry, _):
            out, top, total, k, v = carry
            scores = jnp.einsum("bqnh,bknh->bnqk", q, k)
            new = jnp.maximum(top, scores.max(-1))
            weights, scale = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
            out = out * scale[..., None] + jnp.einsum("bnqk,bknh->bnqh", weights, v)
            k, v = jax.lax.ppermute((k, v), "seq", around)
            return (out, new, total * scale + weights.sum(-1), k, v), None

        b, t, n, h = q.shape
        start = (jnp.zeros((b, n, t, h)), jnp.full((b, n, t), -jnp.inf), jnp.zeros((b, n, t)), k, v)
        out, _, total, _, _ = jax.lax.scan(turn, start, None, length=8)[0]
        return jnp.swapaxes(out / total[..., None], 1, 2)

    loss = lambda q, k, v: jnp.square(attend(q, k, v)).sum()  # noqa: E731
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))), (
        array(mesh, (2, 512, 4, 64), None, "seq"),
    ) * 3
