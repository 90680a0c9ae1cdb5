"""Attention and its output projection in pieces of the batch: the sums of one travel while the next attends.

The projection is too short a matmul to hide its own sums over `tensor`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


def in_pieces(
    attends: Sequence[Callable[..., jax.Array]],
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    project: Callable[[jax.Array], jax.Array],
    factor_BTNH: jax.Array | None = None,
) -> jax.Array:
    """Returns `project(attend(q, k, v))` of every piece of the batch, joined: [B, T/tensor, D].

    attends: attention of each piece.  qkv: queries, keys and values of the whole batch.  project: attention output to
    the residual stream, summed over `tensor`.  factor_BTNH: multiplies the attention output; None is 1.
    """
    factors = [None] * len(attends) if factor_BTNH is None else jnp.split(factor_BTNH, len(attends))
    arrays = (jnp.split(x, len(attends)) for x in qkv)
    done: list[jax.Array] = []
    for attend, factor, q, k, v in zip(attends, factors, *arrays, strict=True):
        if len(done) > 1:
            # XLA would attend to all pieces first and send all sums after.
            q, done[-2] = jax.lax.optimization_barrier((q, done[-2]))
        out = attend(q, k, v)
        done.append(project(out if factor is None else out * factor))
    return jnp.concatenate(done)
