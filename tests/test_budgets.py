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
