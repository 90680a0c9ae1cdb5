"""Sums of rows by index in one order on every platform: gradients of tables and
of routed tokens."""

import jax
import jax.numpy as jnp


def sorted_rows(x: jax.Array, index: jax.Array, rows: int) -> jax.Array:
    """Adds rows in one order on every platform: sorted by index,
    in blocks (docs/determinism.md has its time).

    A matmul sums the rows of a block that have the same index,
    so no two updates of its scatter meet.
    """
    block, x_RD = min(512, index.size), x.reshape(-1, x.shape[-1])
    index_R = jnp.pad(index.reshape(-1), (0, -index.size % block), constant_values=rows)
    order_NR = jnp.argsort(index_R, stable=True).reshape(-1, block)

    def add(sums_VD: jax.Array, order_R: jax.Array) -> tuple[jax.Array, None]:
        index, x = index_R[order_R], x_RD.at[order_R].get(mode="fill", fill_value=0)
        equal = (index[:, None] == index).astype(x.dtype)
        total = jnp.matmul(equal, x, precision="highest", preferred_element_type=jnp.float32)
        # The first row of each index adds the sum; the others are out of bounds.
        target = jnp.where(jnp.diff(index, prepend=-1) > 0, index, rows + jnp.arange(block))
        return sums_VD.at[target].add(total, mode="drop", unique_indices=True), None

    return jax.lax.scan(add, jnp.zeros((rows, x_RD.shape[1]), jnp.float32), order_NR)[0]


def few_rows(x: jax.Array, index: jax.Array, rows: int) -> jax.Array:
    """Adds rows by one matmul, in one order;
    what rows with an index out of bounds hold does not matter."""
    # Up to some 150 sums take no longer than reading x.
    equal_VR = jax.nn.one_hot(index.reshape(-1), rows, dtype=x.dtype, axis=0)
    x_RD = jnp.where((index < rows)[..., None], x, 0).reshape(-1, x.shape[-1])
    return jnp.matmul(equal_VR, x_RD, precision="highest", preferred_element_type=jnp.float32)
