"""Trip counts are believed where they are proved, and only there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from xlacensus.hlo.ledger import read_ledger
from xlacensus.hlo.loops import trip_count
from xlacensus.hlo.parser import Module, parse_module

STATE = "(s32[], s32[], f32[8])"
LOOP = f"""HloModule m, num_partitions=2

%fused_next (a: s32[], b: s32[]) -> s32[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %sum = s32[] add(%a, %b)
}}

%fused_less (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %less = pred[] compare(%a, %b), direction=LT
}}

%body (p: {STATE}) -> {STATE} {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %x = f32[8] get-tuple-element(%p), index=2
  %step = s32[] constant(1)
  %next = s32[] add(%i, %step)
  %y = f32[8] all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %out = {STATE} tuple(%next, %n, %y)
}}

%condition (p: {STATE}) -> pred[] {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %bound = s32[] constant(10)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}}

ENTRY %main (x: f32[8], m: s32[]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %m = s32[] parameter(1)
  %first = s32[] constant(0)
  %carried = s32[] constant(7)
  %start = {STATE} tuple(%first, %carried, %x)
  %loop = {STATE} while(%start), condition=%condition, body=%body
  ROOT %end = f32[8] get-tuple-element(%loop), index=2
}}
"""
LESS = "ROOT %less = pred[] compare(%i, %bound), direction=LT\n}\n\nENTRY"


def trips(*changes: tuple[str, str]) -> int | None:
    """Trip count of LOOP with some of its text replaced."""
    text = LOOP
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    module = parse_module(text)
    count = trip_count(module.entry.instructions["loop"])
    (entry,) = read_ledger(module, {"data": 2})
    assert (entry.count, entry.exact) == ((1, False) if count is None else (count, True))
    return count


def condition(*lines: str) -> tuple[str, str]:
    return LESS, "\n  ".join(lines) + "\n}\n\nENTRY"


def test_a_counter_that_grows_by_one() -> None:
    assert trips() == 10
    assert trips(("constant(0)", "constant(3)")) == 7
    assert trips(("constant(0)", "constant(12)")) == 0


@pytest.mark.parametrize(("step", "count"), [(2, 5), (3, 4), (7, 2), (10, 1), (11, 1)])
def test_a_counter_that_grows_by_more(step: int, count: int) -> None:
    assert trips(("constant(1)", f"constant({step})")) == count


def test_a_windowed_einsum_is_unrolled_twice() -> None:
    """XLA unrolls such a loop by two: its body adds one to the counter twice."""
    assert (
        trips(
            (
                "%next = s32[] add(%i, %step)",
                "%half = s32[] add(%i, %step)\n  %next = s32[] add(%half, %step)",
            )
        )
        == 5
    )


@pytest.mark.parametrize(
    ("direction", "first", "bound", "step", "count"),
    [
        ("LE", 0, 10, 1, 11), ("LE", 0, 10, 3, 4), ("NE", 0, 10, 2, 5), ("NE", 0, 10, 3, None), ("GT", 10, 0, -1, 10),
        ("GE", 10, 0, -2, 6), ("LT", 0, 10, -1, None), ("GT", 0, 10, 1, 0), ("EQ", 0, 10, 1, None),
        ("LT", 0, 10, 0, None),
    ],
)  # fmt: skip
def test_every_comparison(
    direction: str, first: int, bound: int, step: int, count: int | None
) -> None:
    assert (
        trips(
            ("%first = s32[] constant(0)", f"%first = s32[] constant({first})"),
            ("%bound = s32[] constant(10)", f"%bound = s32[] constant({bound})"),
            ("%step = s32[] constant(1)", f"%step = s32[] constant({step})"),
            condition(f"ROOT %less = pred[] compare(%i, %bound), direction={direction}"),
        )
        == count
    )


def test_bound_and_counter_in_fusions() -> None:
    fused = condition("ROOT %less = pred[] fusion(%i, %bound), kind=kLoop, calls=%fused_less")
    assert trips(fused) == 10
    assert (
        trips(
            fused,
            ("s32[] add(%i, %step)", "s32[] fusion(%i, %step), kind=kLoop, calls=%fused_next"),
        )
        == 10
    )
    assert trips(condition("ROOT %more = pred[] compare(%bound, %i), direction=GT")) == 10


def test_a_bound_that_the_loop_carries() -> None:
    carried = condition("ROOT %less = pred[] compare(%i, %n), direction=LT")
    assert trips(carried) == 7
    # It is no bound if the body changes it, and not known if it is an argument of the program.
    assert trips(carried, ("tuple(%next, %n, %y)", "tuple(%next, %next, %y)")) is None
    assert trips(carried, ("tuple(%first, %carried, %x)", "tuple(%first, %m, %x)")) is None


def test_a_counter_that_starts_at_an_argument() -> None:
    assert trips(("tuple(%first, %carried, %x)", "tuple(%m, %carried, %x)")) is None


def test_a_loop_on_data_has_no_trip_count() -> None:
    """`max |x| < 100`: the constant is not a number of trips."""
    largest = (
        "%size = f32[8] abs(%x)",
        "%max = f32[] reduce(%size, %zero), dimensions={0}, to_apply=%maximum",
    )
    head = (
        "%x = f32[8] get-tuple-element(%p), index=2",
        "%zero = f32[] constant(0)",
        "%limit = f32[] constant(100)",
    )
    assert (
        trips(condition(*head, *largest, "ROOT %less = pred[] compare(%max, %limit), direction=LT"))
        is None
    )


def test_a_loop_on_a_counter_and_data_has_no_trip_count() -> None:
    """`i < 10 and error > tolerance`: ten is only the most."""
    error = ("%x = f32[8] get-tuple-element(%p), index=2", "%error = pred[] custom-call(%x)")
    counter = "%under = pred[] compare(%i, %bound), direction=LT"
    assert trips(condition(*error, counter, "ROOT %both = pred[] and(%under, %error)")) is None


def test_a_counter_that_does_not_always_grow() -> None:
    sometimes = "%next = s32[] select(%flag, %grown, %i)"
    grown = "%grown = s32[] add(%i, %step)\n  %flag = pred[] custom-call(%x)\n  " + sometimes
    assert trips(("%next = s32[] add(%i, %step)", grown)) is None


def test_what_xla_annotates_is_believed() -> None:
    annotation = 'body=%body, backend_config={"known_trip_count":{"n":"4"}}'
    assert (
        trips(
            ("body=%body", annotation), ("tuple(%first, %carried, %x)", "tuple(%m, %carried, %x)")
        )
        == 4
    )


def nested(passed_on: str) -> Module:
    """LOOP inside a loop of five trips that carries the inner counter's first value and passes on `passed_on`."""
    state = f"(s32[], {STATE})"
    outer = f"""
%outer_body (p: {state}) -> {state} {{
  %p = {state} parameter(0)
  %j = s32[] get-tuple-element(%p), index=0
  %inner = {STATE} get-tuple-element(%p), index=1
  %first = s32[] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %other = s32[] add(%first, %one)
  %more = s32[] add(%j, %one)
  %carried = s32[] constant(7)
  %x = f32[8] constant(0)
  %start = {STATE} tuple(%first, %carried, %x)
  %loop = {STATE} while(%start), condition=%condition, body=%body
  ROOT %out = {state} tuple(%more, %inner, {passed_on})
}}

%outer_condition (p: {state}) -> pred[] {{
  %p = {state} parameter(0)
  %j = s32[] get-tuple-element(%p), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%j, %five), direction=LT
}}

ENTRY %main (x: {STATE}) -> {state} {{
  %x = {STATE} parameter(0)
  %zero = s32[] constant(0)
  %four = s32[] constant(4)
  %start = {state} tuple(%zero, %x, %four)
  ROOT %outer = {state} while(%start), condition=%outer_condition, body=%outer_body
}}
"""
    return parse_module(LOOP[: LOOP.index("\nENTRY")] + outer)


def test_a_start_that_an_outer_loop_carries() -> None:
    (entry,) = read_ledger(nested("%first"), {"data": 2})
    assert (entry.count, entry.exact) == (5 * 6, True)
    (entry,) = read_ledger(nested("%other"), {"data": 2})
    assert (entry.count, entry.exact) == (5, False)


def to_a_traced_bound(x: jax.Array, n: jax.Array) -> jax.Array:
    return lax.fori_loop(0, n, lambda _, x: lax.psum(jnp.sin(x), "data"), x)


def until_small(x: jax.Array, n: jax.Array) -> jax.Array:
    def more(carry: Any) -> jax.Array:
        return (carry[0] < 100) & (jnp.abs(carry[1]).max() > 1e-3)

    return lax.while_loop(more, lambda c: (c[0] + 1, lax.psum(jnp.sin(c[1]), "data")), (0, x))[1]


def every_second(x: jax.Array, n: jax.Array) -> jax.Array:
    return lax.while_loop(
        lambda c: c[0] < 9, lambda c: (c[0] + 2, lax.psum(jnp.sin(c[1]), "data")), (0, x)
    )[1]


@pytest.mark.parametrize(
    ("function", "count", "exact"),
    [(to_a_traced_bound, 1, False), (until_small, 1, False), (every_second, 5, True)],
)
def test_loops_as_they_are_compiled_here(function: Any, count: int, exact: bool) -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    body = jax.shard_map(
        function, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False
    )
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    n = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    (entry,) = mw.census(jax.jit(body), x, n).ledger
    assert (entry.count, entry.exact) == (count, exact)
