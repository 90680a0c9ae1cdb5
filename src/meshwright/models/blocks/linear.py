"""Linear layer: the matrix product of activations and a weight."""

import math
from typing import Any

import jax


def linear(x: jax.Array, w: Any, *, contract: int = 1) -> jax.Array:
    """Multiplies `x` by `w`, contracting the last `contract` dimensions of x with the first ones of w.

    w: an array, or an object that multiplies itself: it has a method `linear(x, contract)`, as the quantised weights of
    `--training.matmul-precision` do (quantised.py).

    Both are flattened to two dimensions first: XLA:CPU transposes a weight gradient that contracts batch and sequence
    as two dimensions by copies, which takes the step of a small GPT from 32 to 48 ms.
    """
    if hasattr(w, "linear"):
        result: jax.Array = w.linear(x, contract)
        return result
    inner = math.prod(w.shape[:contract])
    lead, out = x.shape[: x.ndim - contract], w.shape[contract:]
    return (x.reshape(-1, inner) @ w.reshape(inner, -1)).reshape(*lead, *out)
