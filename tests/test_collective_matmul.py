"""Collective matmul: the ring gives what a gather before the matmul and a scatter after it give, and its gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshwright.comm.collective_matmul import column_parallel, row_parallel
from meshwright.comm.collectives import sequence_all_gather, sequence_reduce_scatter
from meshwright.hardware.machine import ring_order

B, D, F = 2, 8, 12


def products(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
    return [x @ w for w in weights]


def loss_of(strategy: str, x: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array]:
    """A feed-forward half, in a ring, or with a gather before it and a scatter after it."""
    if strategy == "ring":
        first, second = column_parallel(products, x, weights["in"])
        y = row_parallel(lambda h, w: h @ w, jnp.tanh(first) * second, weights["out"])
    else:
        first, second = products(sequence_all_gather(x, 1), weights["in"])
        y = sequence_reduce_scatter((jnp.tanh(first) * second) @ weights["out"], 1)
    return (y**2).sum(), y


@functools.cache
def values_and_gradients(strategy: str, tensor: int, chunk: int) -> Any:
    """The output, and the gradients of the sequence and of the weights, over `tensor` devices."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((B, tensor * chunk, D), np.float32)
    weights = {
        "in": [rng.standard_normal((D, F * tensor), np.float32) for _ in range(2)],
        "out": rng.standard_normal((F * tensor, D), np.float32),
    }
    specs = (P(None, "tensor"), {"in": [P(None, "tensor")] * 2, "out": P("tensor")})

    def body(x: jax.Array, weights: Any) -> Any:
        (_, y), gradients = jax.value_and_grad(
            functools.partial(loss_of, strategy), (0, 1), has_aux=True
        )(x, weights)
        return y, gradients

    mesh = Mesh(np.array(jax.devices()[:tensor]), ("tensor",))
    out = (P(None, "tensor"), specs)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))(
        x, weights
    )


# Three of a chunk are no two halves: one direction.
@pytest.mark.parametrize(("tensor", "chunk"), [(2, 4), (4, 4), (4, 3), (8, 2)])
def test_the_ring_gives_the_values_and_gradients_of_one_collective(tensor: int, chunk: int) -> None:
    ring, expected = (
        jax.tree.leaves(values_and_gradients(s, tensor, chunk)) for s in ("ring", "gather")
    )
    for array, other in zip(ring, expected, strict=True):
        np.testing.assert_allclose(array, other, atol=2e-6 * np.abs(other).max())


@given(degrees=st.lists(st.integers(2, 6), min_size=1, max_size=3))
def test_neighbours_of_the_ring_are_neighbours_on_the_torus(degrees: list[int]) -> None:
    order = ring_order(tuple(degrees))
    assert sorted(order) == list(range(int(np.prod(degrees))))
    coordinates = np.array(np.unravel_index(order, degrees)).T
    steps = np.abs(coordinates - np.roll(coordinates, -1, axis=0))
    steps = np.minimum(steps, np.array(degrees) - steps).sum(
        1
    )  # the last of a dimension is next to the first
    # An odd first dimension may leave the two ends apart.
    assert (steps[:-1] == 1).all()
    if degrees[0] % 2 == 0 or len(degrees) == 1:
        assert (steps == 1).all()
