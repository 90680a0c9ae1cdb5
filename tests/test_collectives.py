"""Every collective does what its picture shows, and its derivative is the transpose that its docstring names."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshwright.comm import collectives as c

N, M = 4, 8
"""Devices along the axis, elements on each of them."""


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(N, 2), ("ring", "other"))


def over_devices(mesh: Mesh, body: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """Runs `body` on each device's row of [N, ...] arrays; returns the results of all devices, stacked."""

    def local(*rows: jax.Array) -> Any:
        return jax.tree.map(lambda y: y[None], body(*(row[0] for row in rows)))

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"), check_vma=False)
    )(*arrays)


def transposed_blocks(x: np.ndarray) -> np.ndarray:
    return x.reshape(N, N, -1).transpose(1, 0, 2).reshape(N, -1)


def in_pairs(x: np.ndarray) -> np.ndarray:
    """Exchanges halves between devices 0 and 1, and between 2 and 3."""
    return x.reshape(2, 2, 2, -1).transpose(0, 2, 1, 3).reshape(N, -1)


def sum_at(x: np.ndarray, source: int) -> np.ndarray:
    return np.where(np.arange(N)[:, None] == source, x.sum(0), 0.0)


# name: collective on one device's row, its result on all rows, its transpose on cotangents [N, ...].
COLLECTIVES: dict[str, tuple[Callable[[jax.Array], jax.Array], Callable[..., Any], Callable[..., Any]]] = {
    "all_gather": (
        lambda x: c.all_gather(x, ("ring",), 0),
        lambda x: np.tile(x.reshape(-1), (N, 1)),
        lambda g: g.sum(0).reshape(N, -1),
    ),
    "reduce_scatter": (
        lambda x: c.reduce_scatter(x, ("ring",), 0),
        lambda x: x.sum(0).reshape(N, -1),
        lambda g: np.tile(g.reshape(-1), (N, 1)),
    ),
    "all_to_all": (lambda x: c.all_to_all(x, ("ring",), 0, 0), transposed_blocks, transposed_blocks),
    "grouped_all_to_all": (
        lambda x: c.grouped_all_to_all(x, "ring", 2, 0, 0), lambda x: in_pairs(x), lambda g: in_pairs(g),
    ),
    "ring_shift": (lambda x: c.ring_shift(x, "ring", 1), lambda x: np.roll(x, 1, 0), lambda g: np.roll(g, -1, 0)),
    "ring_shift back": (lambda x: c.ring_shift(x, "ring", -3), lambda x: np.roll(x, -3, 0), lambda g: np.roll(g, 3, 0)),
    "broadcast": (
        lambda x: c.broadcast(x, ("ring",), 2), lambda x: np.tile(x[2], (N, 1)), lambda g: sum_at(g, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_result_and_transpose(name: str, mesh: Mesh) -> None:
    collective, result, transpose = COLLECTIVES[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, M)).astype(np.float32)
    np.testing.assert_allclose(over_devices(mesh, collective, x), result(x), rtol=1e-6)
    # Each device weights its result differently: the cotangents of its loss are its weights.
    weights = rng.normal(size=result(x).shape).astype(np.float32)
    gradients = over_devices(
        mesh, lambda x, w: jax.grad(lambda x: (collective(x) * w).sum())(x), x, weights
    )
    np.testing.assert_allclose(gradients, transpose(weights), rtol=1e-5, atol=1e-6)
    # The inner products of a linear map and its transpose agree: <f(x), w> = <x, transpose(w)> over all devices.
    np.testing.assert_allclose(
        (result(x) * weights).sum(), (x * transpose(weights)).sum(), rtol=1e-4
    )


def test_all_reduce_passes_its_cotangent_to_each_addend(mesh: Mesh) -> None:
    x = np.random.default_rng(0).normal(size=(N, M)).astype(np.float32)

    def loss(x: jax.Array) -> jax.Array:
        total = c.all_reduce({"a": x, "b": x[:2]}, ("ring",))
        return jnp.sin(total["a"]).sum() + total["b"].sum()

    gradients = over_devices(mesh, jax.grad(loss), x)
    wanted = jax.grad(lambda x: jnp.sin(x.sum(0)).sum() + x.sum(0)[:2].sum())(x)
    np.testing.assert_allclose(gradients, wanted, rtol=1e-5)


def test_first_of_two_axes_is_outermost(mesh: Mesh) -> None:
    x = jnp.arange(8.0)

    def body(x: jax.Array) -> jax.Array:
        whole = c.all_gather(x, ("ring", "other"), 0)
        return c.local_shard(whole, ("ring", "other"), 0) + 100 * c.axis_index(("ring", "other"))

    spec = P(("ring", "other"))
    out = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x)
    np.testing.assert_array_equal(out, x + 100 * np.arange(8))


def test_reduction_of_sharded_and_replicated_gradients(mesh: Mesh) -> None:
    """Gradients of sharded parameters stay as they are; those of replicated ones are summed."""
    grads = {
        "whole": np.arange(N * M, dtype=np.float32).reshape(N, M),
        "split": np.ones((N, M), np.float32),
    }
    lacking = {"whole": ("ring",), "split": ()}

    def body(whole: jax.Array, split: jax.Array) -> Any:
        return c.sum_gradients({"whole": whole, "split": split}, lacking)

    out = over_devices(mesh, body, grads["whole"], grads["split"])
    np.testing.assert_allclose(out["whole"], np.tile(np.sum(grads["whole"], 0), (N, 1)), rtol=1e-6)
    np.testing.assert_array_equal(out["split"], grads["split"])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_axis_of_one_device_sends_nothing(name: str) -> None:
    single = Mesh(np.array(jax.devices()[:1]), ("ring",))
    # The arguments of these name devices that a single one does not have.
    single_device = {
        "broadcast": lambda x: c.broadcast(x, ("ring",), 0),
        "grouped_all_to_all": lambda x: c.grouped_all_to_all(x, "ring", 1, 0, 0),
    }
    collective = single_device.get(name, COLLECTIVES[name][0])
    program = jax.jit(
        jax.shard_map(collective, mesh=single, in_specs=P(), out_specs=P(), check_vma=False)
    )
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(program(x), x)
    text = program.lower(x).compile().as_text()
    assert not any(
        f" {kind}(" in text
        for kind in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute")
    )
