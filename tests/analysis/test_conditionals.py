"""Of a conditional a step runs one branch: the census prices the taken one where it is known, else the largest."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from xlacensus.hlo.flops import least_flops, read_matmuls
from xlacensus.hlo.parser import parse_module
from xlacensus.hlo.scopes import BranchScope
from xlacensus.program_census import ProgramFacts

N = 32
ONE = 2 * N**3
"""FLOPs of one product of two N x N matrices."""


def products(x: Any, count: int) -> Any:
    for _ in range(count):
        x = jnp.tanh(x @ x)
    return x


def two(x: jax.Array, flag: jax.Array) -> jax.Array:
    return jax.lax.cond(flag, lambda x: products(x, 3), lambda x: products(x, 2), x)


def in_a_loop(x: jax.Array, flag: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (two(x, flag), None), x, None, length=5)[0]


def nested(x: jax.Array, flag: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] > 0, lambda x: two(x, flag) @ x, lambda x: products(x, 1), x)


def switch(x: jax.Array, flag: jax.Array) -> jax.Array:
    branches = [lambda x, n=n: products(x, n) for n in (1, 4, 2)]
    return jax.lax.switch(flag.astype(jnp.int32), branches, x)


def scoped(x: jax.Array, flag: jax.Array) -> jax.Array:
    def packed(x: jax.Array) -> jax.Array:
        with jax.named_scope("packed"):
            return products(x, 3)

    def whole(x: jax.Array) -> jax.Array:
        with jax.named_scope("whole"):
            return products(x, 2)

    return jax.lax.cond(flag, packed, whole, x)


@pytest.mark.parametrize(
    ("function", "most", "least"),
    [(two, 3, 2), (in_a_loop, 15, 10), (nested, 4, 1), (switch, 4, 1)],
)
def test_one_branch_counts(function: Any, most: int, least: int) -> None:
    """The most FLOPs a step may have is the largest branch of each conditional, the least the smallest; never a sum."""
    x, flag = jax.ShapeDtypeStruct((N, N), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)
    census = mw.census(function, x, flag)
    assert census.flops.compiled == most * ONE
    assert least_flops(parse_module(census.text)) == {"bf16": least * ONE}


def test_branches_of_known_frequency_count_as_often_as_they_are_taken() -> None:
    x, flag = jax.ShapeDtypeStruct((N, N), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)
    taken = {"packed": BranchScope(1, 4), "whole": BranchScope(3, 4)}

    def looped(x, flag):
        return jax.lax.scan(lambda x, _: (scoped(x, flag), None), x, None, length=4)[0]

    assert (
        mw.census(looped, x, flag, facts=ProgramFacts(branches=taken)).flops.compiled
        == (3 + 3 * 2) * ONE
    )


CONSTANT = """HloModule m

%big (p: f32[32,32]) -> f32[32,32] {
  %p = f32[32,32] parameter(0)
  %d = f32[32,32] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %e = f32[32,32] dot(%d, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%small (q: f32[32,32]) -> f32[32,32] {
  %q = f32[32,32] parameter(0)
  ROOT %f = f32[32,32] dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[32,32]) -> f32[32,32] {
  %x = f32[32,32] parameter(0)
  %which = SELECTOR
  ROOT %out = f32[32,32] conditional(%which, %x, %x), BRANCHES
}
"""
_BY_NUMBER, _BY_FLAG = (
    "branch_computations={%big, %small}",
    "true_computation=%big, false_computation=%small",
)


@pytest.mark.parametrize(
    ("selector", "branches", "count"),
    [
        ("s32[] constant(0)", _BY_NUMBER, 2),
        ("s32[] constant(1)", _BY_NUMBER, 1),
        ("s32[] constant(9)", _BY_NUMBER, 1),  # out of range: the last
        ("pred[] constant(true)", _BY_FLAG, 2),
        ("pred[] constant(false)", _BY_FLAG, 1),
        ("s32[] parameter(1)", _BY_NUMBER, 2),
    ],
)
def test_a_constant_selects_the_branch(selector: str, branches: str, count: int) -> None:
    module = parse_module(CONSTANT.replace("SELECTOR", selector).replace("BRANCHES", branches))
    assert sum(m.flops for m in read_matmuls(module)) == count * ONE
