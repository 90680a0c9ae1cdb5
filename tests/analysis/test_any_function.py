"""The census of functions as people write them: numbers, static and keyword arguments, references, every stage."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 4), jnp.float32)
PRODUCT = 2 * 8 * 16 * 4


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))


def step(x: Any, w: Any, factor: Any = 1.0, transposed: bool = False) -> Any:
    return (x.T if transposed else x) @ w * factor


class Callable:
    def __call__(self, x: Any, w: Any) -> Any:
        return x @ w


@pytest.mark.parametrize(
    ("function", "arguments", "keywords"),
    [
        (step, (X, W, 2.0), {}),
        (step, (X, W, 3), {}),
        (step, (X, W), {"factor": 2.0}),
        (step, (), {"x": X, "w": W}),
        (jax.jit(step, static_argnums=3), (X, W, 1.0, False), {}),
        (jax.jit(step, static_argnames="transposed"), (X, W), {"transposed": False}),
        (
            jax.jit(step, static_argnames=("factor", "transposed")),
            (X, W, 2.0),
            {"transposed": False},
        ),
        (
            jax.jit(lambda mode, x, w: x @ w if mode == "plain" else x, static_argnums=0),
            ("plain", X, W),
            {},
        ),
        (functools.partial(step, factor=2.0), (X, W), {}),
        (Callable(), (X, W), {}),
        (lambda x, w, none: x @ w, (X, W, None), {}),
        (
            lambda tree: tree["x"] @ tree["w"],
            ({"x": np.ones((8, 16), np.float32), "w": jnp.ones((16, 4))},),
            {},
        ),
        (jax.jit(step).trace(X, W), (), {}),
        (jax.jit(step).lower(X, W), (), {}),
        (jax.jit(step).lower(X, W).compile(), (), {}),
    ],
)
def test_each_way_to_write_a_product(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    census = mw.census(function, *arguments, **keywords)
    assert census.flops.compiled == PRODUCT and census.findings == ()
    names = {category for category, size in census.memory.by_category().items() if size}
    assert any(name.startswith("argument") for name in names) and census.name
    # Arguments, results and temporaries are those of the compiler, to the byte.
    assert sum(census.memory.by_category().values()) == census.memory.compiled.peak


def test_arguments_are_named_as_the_function_names_them() -> None:
    census = mw.census(jax.jit(step, static_argnames="transposed"), X, w=W, transposed=False)
    assert {"argument x", "argument w"} <= set(census.memory.by_category())


def test_references_are_state() -> None:
    def accumulate(total: Any, x: jax.Array) -> jax.Array:
        total[...] += x.sum(0)
        return x @ total[...]

    census = mw.census(jax.jit(accumulate), jax.new_ref(jnp.zeros(16)), jnp.ones((8, 16)))
    assert census.memory.by_category()["argument total"] == 64


def test_a_pure_callback_waits_for_the_host() -> None:
    def rounded(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.round, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert [f.kind for f in mw.census(rounded, X).findings] == ["host"]


def test_the_mesh_of_shardings_of_the_jit(mesh: Mesh) -> None:
    shardings = (NamedSharding(mesh, P(None, "tensor")), NamedSharding(mesh, P("tensor")))
    jitted = jax.jit(lambda x, w: x @ w, in_shardings=shardings)
    (entry,) = mw.census(jitted, X, W).ledger
    assert (entry.kind, entry.axes) == ("all-reduce", ("tensor",))
    for stage in (jitted.lower(X, W), jitted.lower(X, W).compile()):
        census = mw.census(stage)
        assert dict(census.mesh) == dict(mesh.shape) and census.ledger[0].axes == ("tensor",)


def test_the_mesh_of_the_source(mesh: Mesh) -> None:
    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("data"))).sum()

    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    for function in (constrained, mapped):
        census = mw.census(function, jnp.ones((8, 16)))
        assert dict(census.mesh) == dict(mesh.shape)
        assert [entry.axes for entry in census.ledger] == [("data",)] and census.findings == ()


def test_a_mapped_function() -> None:
    census = mw.census(jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i"), jnp.ones((8, 4)))
    assert dict(census.mesh) == {"i": 8} and census.ledger[0].axes == ("i",)


def test_modules_of_equinox_and_flax() -> None:
    import equinox
    from flax import nnx

    census = mw.census(
        equinox.filter_jit(lambda m, x: x @ m["w"]),
        {"w": jnp.ones((16, 4)), "name": "linear"},
        jnp.ones((8, 16)),
    )
    assert census.flops.compiled == PRODUCT
    linear = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    assert (
        mw.census(nnx.jit(lambda m, x: m(x)), linear, jnp.ones((8, 16))).flops.compiled == PRODUCT
    )
