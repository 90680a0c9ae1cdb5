"""Linear layer: the matrix product of activations and a weight."""

from typing import Any

import jax


def linear(x: jax.Array, w: Any, *, contract: int = 1) -> jax.Array:
    """Multiplies `x` by `w`, contracting the last `contract` dimensions of x with the first ones of w.

    w: an array, or an object that multiplies itself: it has a method `linear(x, contract)`, as the quantised weights of
    `--training.matmul-precision` do (quantised.py).

    The tokens are one dimension of the product: XLA:CPU transposes a weight gradient that contracts batch and sequence
    as two by copies, which takes the step of a small GPT from 32 to 48 ms. The weight keeps its dimensions: with heads
    and their size as one, XLA:TPU copies the gradients of queries, keys and values three times each (docs/log.md).
    """
    if hasattr(w, "linear"):
        result: jax.Array = w.linear(x, contract)
        return result
    lead, dims = x.shape[: x.ndim - contract], tuple(range(contract))
    contracted = (tuple(1 + dim for dim in dims), dims)
    out = jax.lax.dot_general(x.reshape(-1, *w.shape[:contract]), w, (contracted, ((), ())))
    return out.reshape(*lead, *w.shape[contract:])


def linears(h_BTD: jax.Array, weights: list[Any]) -> list[jax.Array]:
    """Returns the products of one input with several weights: queries, keys and values; gate and up."""
    return [linear(h_BTD, w) for w in weights]


def attention_projection(out_BTNH: jax.Array, w_NHD: Any) -> jax.Array:
    """Returns the attention output times its projection: heads and head size are contracted."""
    return linear(out_BTNH, w_NHD, contract=2)
