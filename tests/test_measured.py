"""Costs of tests are measured, and what a marker must say is found out."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import shared_programs
from measured import KEPT, TIERS, Cost, Meter, Part, read_tiers, tiers_of, undeclared


@pytest.mark.compiles
@pytest.mark.processes
def test_processes_and_compiled_programs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("measured.LARGE", 0.0)
    meter = Meter()
    before = meter.read()
    subprocess.run([sys.executable, "-S", "-c", "sum(range(10**6))"], check=True)
    subprocess.run(["true"], check=True)
    jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) * 2.5 + 0.125)(jnp.arange(7.0)))
    cost = meter.read() - before
    assert cost.processes == 1
    assert cost.large >= 1
    assert 0 < cost.compiling <= cost.cpu


def test_only_what_costs_needs_a_marker() -> None:
    assert undeclared(Cost(cpu=100.0, large=1), set()) == []
    assert "2 large programs" in undeclared(Cost(large=2), {"processes"})[0]
    assert "starts 3" in undeclared(Cost(processes=3), {"compiles"})[0]
    assert undeclared(Cost(large=9, processes=9), {"compiles", "processes"}) == []


def test_the_cheapest_row_of_a_test_stays_fast_and_ci_has_a_limit() -> None:
    costs = {"a.py::x[1]": 5.0, "a.py::x[2]": 3.0, "a.py::y": 0.1, "a.py::z": 40.0, "a.py::w": 70.0}
    assert tiers_of(costs, 100.0, 50.0) == {
        "a.py::z": "exhaustive",
        "a.py::w": "long",
        "a.py::x[1]": "long",
    }
    assert set(tiers_of(costs, 100.0, 200.0).values()) == {"exhaustive"}


def test_what_is_kept_is_at_most_exhaustive() -> None:
    costs = {"a.py::x[1]": 9.0, "a.py::x[2]": 8.0, "a.py::y": 40.0}
    assert tiers_of(costs, 0.0, 50.0, kept={"a.py::y"}) == {
        "a.py::y": "exhaustive",
        "a.py::x[2]": "exhaustive",
        "a.py::x[1]": "long",
    }


def test_the_kept_tests_exist_and_no_list_calls_them_long() -> None:
    tiers = read_tiers()
    for name in KEPT:
        file, _, test = name.partition("[")[0].partition("::")
        assert f"def {test}(" in (TIERS.parents[1] / file).read_text(), name
        assert tiers.get(name) != "long"


def test_all_parts_together_run_each_test_once() -> None:
    tests = [f"a.py::x[{row}]" for row in range(21)]
    parts = [Part(f"{number}/8").names(reversed(tests)) for number in range(1, 9)]
    assert sorted(name for part in parts for name in part) == sorted(tests)
    assert {len(part) for part in parts} == {2, 3}


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "a/b", "-1/8"])
def test_a_part_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="1/8, 2/8"):
        Part(text)


def test_the_fast_tests_have_a_limit_together() -> None:
    costs = {"a.py::x": 1.0, "a.py::y": 1.25, "a.py::z": 1.5, "a.py::w": 4.0}
    assert tiers_of(costs, 100.0, 100.0) == {}
    assert tiers_of(costs, 4.0, 100.0) == {"a.py::w": "exhaustive"}
    assert tiers_of(costs, 3.0, 4.0) == {"a.py::w": "long", "a.py::z": "exhaustive"}


def test_tests_of_the_tiers_exist() -> None:
    """The list names functions that are there; a row that is gone leaves the list."""
    assert set(read_tiers().values()) <= {"exhaustive", "long"}
    for name in read_tiers():
        file, _, test = name.partition("[")[0].partition("::")
        assert f"def {test}(" in (TIERS.parents[1] / file).read_text(), name


def test_equal_programs_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[str]()
    compile_anew = shared_programs._compile

    def counted(backend: Any, computation: Any, *rest: Any, **more: Any) -> Any:
        compiled.append(str(computation.operation.attributes["sym_name"]))
        return compile_anew(backend, computation, *rest, **more)

    def build(factor: float) -> Any:
        def counted_program(x: jax.Array) -> jax.Array:
            return jnp.cos(x) * factor

        return jax.jit(counted_program)

    monkeypatch.setattr(shared_programs, "_compile", counted)
    x = jnp.arange(11.0)
    first, again, other = (build(factor)(x) for factor in (3.25, 3.25, 4.25))
    assert compiled.count('"jit_counted_program"') == 2
    assert (first == again).all() and (other[1:] != first[1:]).all()


@pytest.mark.parametrize("number", [1, 2])
def test_a_program_that_calls_back_has_its_own_function(number: int) -> None:
    seen = list[int]()

    def call_back(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append(int(value)), x)
        return x

    jax.block_until_ready(jax.jit(call_back)(number))
    jax.effects_barrier()
    assert seen == [number]


@pytest.mark.parametrize("folder", shared_programs.OWN_LINES)
def test_tests_of_source_lines_compile_their_own(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """The text of a program is without lines: of two equal ones, one would have those of the other."""
    assert (TIERS.parents[1] / folder).is_dir()
    asked = list[Any]()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{folder}test_any.py::test_any (call)")
    monkeypatch.setattr(shared_programs, "_compile", lambda *given: asked.append(given))
    shared_programs._compile_once(None, None, None, None, [])
    assert asked == [(None, None, None, None, [])]
