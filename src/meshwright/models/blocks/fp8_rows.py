"""Rows that go to experts in float8: a byte for each element, and a power of two for each row.

DeepSeek-V3 sends activations to experts in fp8 and their outputs, like the gradients of both, in bfloat16
(arXiv:2412.19437, section 3.2.2 and 3.3.3). Here every row is rounded before it is sent, also where all experts are on
its own device, so that the numbers do not depend on the mesh; sending it then loses nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.comm.ragged import Exchange, ragged_all_to_all

_FORMAT = jnp.float8_e4m3fn
_LARGEST = 448.0


@jax.custom_jvp
def round_rows(x: jax.Array) -> jax.Array:
    """Returns the rows of x [R, D] rounded to float8 (e4m3) with a scale each; derivatives pass unchanged."""
    scale = row_scales(x)
    return ((x / scale).astype(_FORMAT).astype(jnp.float32) * scale).astype(x.dtype)


round_rows.defjvp(lambda primals, tangents: (round_rows(*primals), *tangents))


def row_scales(x: jax.Array) -> jax.Array:
    """Returns the least power of two for each row of x with which it fits the format, float32 [R, 1]; 1 for zeros.

    Powers of two times float8 are exact in bfloat16, so a rounded row is its own rounding.
    """
    largest = jnp.abs(lax.stop_gradient(x)).max(-1, keepdims=True).astype(jnp.float32)
    mantissa, exponent = jnp.frexp(jnp.where(largest > 0, largest, _LARGEST) / _LARGEST)
    # The mantissa is in [1/2, 1): a power of two has exactly 1/2.
    return jnp.ldexp(jnp.ones_like(mantissa), exponent - (mantissa == 0.5))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def exchange_rows(
    x: jax.Array,
    scale: jax.Array,
    arrived_scale: jax.Array,
    exchange: Exchange,
    axis: str,
    rows: int,
    largest: int,
) -> jax.Array:
    """Sends rounded rows as `ragged_all_to_all` does, one byte for each element; gradients come back in their own type.

    scale: of the rows here, [R, 1].  arrived_scale: of those that arrive, [rows, 1].
    """
    bits = lax.bitcast_convert_type((x / scale).astype(_FORMAT), jnp.uint8)
    arrived = lax.bitcast_convert_type(ragged_all_to_all(bits, exchange, axis, rows, largest), _FORMAT)
    return (arrived.astype(jnp.float32) * arrived_scale).astype(x.dtype)


# The number of rows is not an array, so an array of shape [rows, 0] carries it to the backward pass.
exchange_rows.defvjp(
    lambda x, scale, arrived_scale, exchange, axis, rows, largest: (
        exchange_rows(x, scale, arrived_scale, exchange, axis, rows, largest),
        (exchange, jnp.zeros((x.shape[0], 0))),
    ),
    lambda axis, rows, largest, saved, g: (
        ragged_all_to_all(g, saved[0].reversed(), axis, saved[1].shape[0], largest),
        None,
        None,
        None,
    ),
)
