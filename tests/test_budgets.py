"""A host asks as much on any number of hosts; what process 0 does grows with their number, not with its square."""

from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


def test_a_host_costs_the_same_on_any_number_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import budgets

    few, many = budgets.measure(32), budgets.measure(256)
    assert few.keys() == many.keys() == {
        "start", "resume", "watchdog, a second", "save", "end", "meeting of supervisors",
    }  # fmt: skip
    for phase, costs in many.items():
        for kind in budgets.COUNTED:
            # A host looks for the start file until the others have come: a poll more or less.
            assert costs["others"][kind] <= few[phase]["others"][kind] + (
                8 if phase.startswith("meeting") else 0
            ) + (200 if kind == "bytes" else 0), (phase, kind)
            assert (
                costs["process 0"].get(kind, 0) <= 9 * few[phase]["process 0"].get(kind, 0) + 300
            ), (phase, kind)


def test_what_a_run_puts_grows_with_its_lines_and_a_start_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import run_costs

    few, many = run_costs.reporter_costs(500, 20), run_costs.reporter_costs(4000, 20)
    assert many["all steps"]["bytes put"] < 8.5 * few["all steps"]["bytes put"]
    assert many["all steps"]["puts"] < 8.5 * few["all steps"]["puts"]
    assert many["a start after them"]["bytes read"] < 1.3 * many["all steps"]["bytes put"]
    for kind, count in many["the next start"].items():
        assert count <= 1.2 * few["the next start"][kind] + 64, kind


def test_shards_that_fit_are_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import run_costs

    assert run_costs.shard_opens(3, 150) <= 3 + 1
