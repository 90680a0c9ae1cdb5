"""Costs of tests are measured, and what a marker must say is found out."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from measured import TIERS, Cost, Meter, read_tiers, tiers_of, undeclared


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
    assert tiers_of(costs, 50.0) == {
        "a.py::z": "exhaustive",
        "a.py::w": "long",
        "a.py::x[1]": "long",
    }
    assert set(tiers_of(costs, 200.0).values()) == {"exhaustive"}


def test_tests_of_the_tiers_exist() -> None:
    """The list names functions that are there; a row that is gone leaves the list."""
    assert set(read_tiers().values()) <= {"exhaustive", "long"}
    for name in read_tiers():
        file, _, test = name.partition("[")[0].partition("::")
        assert f"def {test}(" in (TIERS.parents[1] / file).read_text(), name
