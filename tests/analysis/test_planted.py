"""Further mistakes planted in compiled functions, one a row: each is found, at its line, with its fix.

With those of test_lint.py, test_missed_overlap.py and test_run_census.py they are the table of docs/census.md.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw


@dataclasses.dataclass(frozen=True)
class Planted:
    """A function with one mistake."""

    step: Callable[..., Any]
    arguments: Callable[[Mesh], tuple[Any, ...]]
    kind: str
    marked: str
    """Words of the line that must be named."""
    reason: str


def array(
    mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def adam(params: jax.Array, opt_state: jax.Array, batch: jax.Array) -> Any:
    grads = jax.grad(lambda w: jnp.square(batch @ w).mean())(params)
    return params - 0.1 * opt_state, 0.9 * opt_state + grads


def whole_batch(params: jax.Array, batch: jax.Array) -> Any:
    return jnp.tanh(batch @ params)


def idle_axis(w: jax.Array, x: jax.Array) -> Any:
    return jnp.square(x @ w).sum()


def reshards_heads(q: jax.Array, k: jax.Array) -> Any:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k)
    return jax.nn.softmax(scores).sum()


def concatenates_shards(x: jax.Array) -> Any:
    return jnp.sin(jnp.concatenate([x[128:], x[:128]]))


def transposes_shards(x: jax.Array) -> Any:
    return jax.lax.with_sharding_constraint(jnp.cos(x), P(None, "fsdp"))


def prints(x: jax.Array) -> Any:
    jax.debug.print("{}", x.sum())
    return jnp.sin(x)


def computes_on_the_host(x: jax.Array) -> Any:
    return jax.pure_callback(np.sort, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def wide_attention(q: jax.Array, k: jax.Array, w: jax.Array) -> Any:
    q = q @ w
    return jnp.einsum("td,sd->ts", q.astype(jnp.float32), k.astype(jnp.float32)).sum()


PLANTED = {
    "optimizer state whole beside split parameters": Planted(
        adam, lambda m: (array(m, (1024, 512), "fsdp"), array(m, (1024, 512)), array(m, (64, 1024), "tensor")),
        "replicated", "def adam", "the parameter params has [256, 512]",
    ),
    "batch whole beside split parameters": Planted(
        whole_batch, lambda m: (array(m, (1024, 256), None, "tensor"), array(m, (512, 1024))),
        "replicated", "def whole_batch", "every device has the whole batch",
    ),
    "an axis that does the work of another": Planted(
        idle_axis, lambda m: (array(m, (1024, 1024)), array(m, (1024, 1024), "tensor")),
        "duplicated", "def idle_axis", "4.0 times",
    ),
    "keys split over the sequence": Planted(
        reshards_heads, lambda m: (array(m, (4, 64, 8, 32), None, "fsdp"), array(m, (4, 64, 8, 32), None, "fsdp")),
        "unexpected", "def reshards_heads", "to reshard a value for k",
    ),
    "a roll of a sharded dimension": Planted(
        concatenates_shards, lambda m: (array(m, (512, 256), "fsdp"),), "unexpected", "jnp.concatenate", "inserted it",
    ),
    "a constraint to another dimension": Planted(
        transposes_shards, lambda m: (array(m, (256, 256), "fsdp"),), "unexpected", "with_sharding_constraint",
        "inserted it",
    ),
    "a print in the step": Planted(
        prints, lambda m: (array(m, (64, 64)),), "host", "jax.debug.print", "1 x in a step",
    ),
    "a function of NumPy in the step": Planted(
        computes_on_the_host, lambda m: (array(m, (64, 64)),), "host", "jax.pure_callback", "runs on the host",
    ),
    "scores in float32": Planted(
        wide_attention, lambda m: (*(array(m, (256, 256), "fsdp", dtype=jnp.bfloat16) for _ in range(2)),
                                   array(m, (256, 256), dtype=jnp.bfloat16)),
        "precision", 'jnp.einsum("td,sd->ts"', "float32 operands",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_at_its_line(name: str, mesh: Mesh) -> None:
    planted = PLANTED[name]
    with jax.set_mesh(mesh):
        census = mw.census(jax.jit(planted.step), *planted.arguments(mesh))
    lines, first = inspect.getsourcelines(planted.step)
    line = f"test_planted.py:{first + next(i for i, text in enumerate(lines) if planted.marked in text)}"
    found = [f for f in census.findings if f.kind == planted.kind and f.line == line]
    assert found and planted.reason in found[0].reason and found[0].fix, census.findings


def test_work_split_over_all_axes_is_not_duplicated(mesh: Mesh) -> None:
    arguments = array(mesh, (1024, 1024), None, "tensor"), array(mesh, (1024, 1024), "fsdp")
    assert "duplicated" not in {f.kind for f in mw.census(idle_axis, *arguments).findings}
    arguments = array(mesh, (1024, 1024)), array(mesh, (1024, 1024), ("fsdp", "tensor"))
    assert mw.census(jax.grad(idle_axis), *arguments).findings == ()
