"""What each test costs: CPU seconds, large compiled programs, Python processes; and the markers that say so.

A pytest plugin of this suite. `pytest --costs FILE` writes a table of all tests that ran, most expensive first. `pytest
--check-costs` fails a test that compiles more than one large program without the marker `compiles`, or starts a Python
process without `processes`. Costs are CPU seconds, so that other programs on the machine do not change them.

`tiers.txt` lists the tests that are too expensive for the fast tier (`exhaustive`) and for CI (`long`), by measurement.
They get the marker of that name. `pytest --part 3/8` runs an eighth of the tests that are chosen otherwise.

    pytest --costs /tmp/costs -n 2          # writes /tmp/costs.gw0 and /tmp/costs.gw1, a line after each test
    python tests/measured.py /tmp/costs*    # places every test that was measured
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Container, Generator, Iterable
from pathlib import Path
from typing import Any

import jax
import pytest

LARGE = 2.0
"""CPU seconds that compiling a large program takes. A tiny train step takes 3 to 7, an operation of its own 0.05."""

TIERS = Path(__file__).with_name("tiers.txt")
FAST, FASTEST = 1.5, 6.0
"""CPU seconds that a fast test takes at most; the cheapest row of a test function may take the second."""
FAST_SECONDS = 900.0
"""CPU seconds of all fast tests together: the cheapest of those that are fast, as many as fit."""
CI_SECONDS = 1800.0
"""CPU seconds of all exhaustive tests together: what is kept, the cheapest row of every function from the cheapest
function on, then the cheapest rows that fit."""
KEPT = {
    "tests/chaos/test_processes.py::test_two_processes_train_what_one_does": "processes that train together",
    "tests/chaos/test_processes.py::test_killed_while_saving_it_resumes_from_the_last_committed": "a process that is killed",
    "tests/contracts/test_families.py::test_a_family_has_the_numbers_of_transformers[deepseek-v3.2]": "latent attention",
    "tests/contracts/test_families.py::test_decoding_is_the_forward_pass_of_transformers[kimi-linear]": "linear attention",
    "tests/contracts/test_families.py::test_decoding_is_the_forward_pass_of_transformers[deepseek-v3.2]": "latent attention",
}
"""Tests that CI runs whatever they cost, with the kind that no other of its tests holds: processes that train together,
a process that is killed, latent attention with an indexer and linear attention against `transformers`."""

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Cost:
    """Cost of one test, or of what a session has run so far.

    cpu: seconds of this process and of the children that it has waited for. large: programs that took `LARGE` CPU
    seconds or more to compile. compiling: CPU seconds in the compiler. processes: Python processes started.
    """

    cpu: float = 0.0
    large: int = 0
    compiling: float = 0.0
    processes: int = 0

    def __sub__(self, other: "Cost") -> "Cost":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(mine - theirs for mine, theirs in pairs))


class Meter:
    """Counts what this process compiles and starts, from when it is made to the end of the process."""

    def __init__(self) -> None:
        self._so_far = Cost()
        self._lowered_at = time.process_time()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        sys.addaudithook(self._on_audit)

    def read(self) -> Cost:
        """Cost of everything since this process started."""
        times = os.times()
        cpu = times.user + times.system + times.children_user + times.children_system
        return dataclasses.replace(self._so_far, cpu=cpu)

    def _on_duration(self, event: str, seconds: float, **_: Any) -> None:
        # JAX reports the end of each stage. The compiler starts where lowering ends.
        if event == _LOWERED:
            self._lowered_at = time.process_time()
        elif event == _COMPILED:
            spent = time.process_time() - self._lowered_at
            self._so_far.compiling += spent
            self._so_far.large += spent >= LARGE

    def _on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            executable, words = arguments[0], arguments[1]
            program = executable or (words if isinstance(words, str | bytes) else words[0])
            self._so_far.processes += Path(os.fsdecode(program)).name.startswith(
                ("python", "meshwright")
            )


def undeclared(cost: Cost, markers: set[str]) -> list[str]:
    """Returns what a test costs without a marker that says so."""
    found = []
    if cost.large > 1 and "compiles" not in markers:
        found.append(
            f"compiles {cost.large} large programs: share them, or mark the test `compiles`"
        )
    if cost.processes and "processes" not in markers:
        found.append(
            f"starts {cost.processes} Python processes: call `cli.main.run`, or mark the test `processes`"
        )
    return found


class Costs:
    """Measures every test, and checks its markers where `check` is set. Of workers, results go to the first process."""

    def __init__(self, check: bool, file: str | None) -> None:
        self._check = check
        self._meter = Meter()
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        self._file = Path(f"{file}.{worker}" if worker else file) if file else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Checks the test itself: what fixtures compile is shared."""
        before = self._meter.read()
        yield
        faults = undeclared(
            self._meter.read() - before, {marker.name for marker in item.iter_markers()}
        )
        if self._check and faults:
            pytest.fail("; ".join(faults), pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measures a test with its fixtures."""
        before = self._meter.read()
        result = yield
        if self._file is not None:
            row = {"test": item.nodeid, **dataclasses.asdict(self._meter.read() - before)}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(row)}\n")
        return result


def tiers_of(
    costs: dict[str, float],
    fast_seconds: float = FAST_SECONDS,
    ci_seconds: float = CI_SECONDS,
    kept: Container[str] = KEPT,
) -> dict[str, str]:
    """Returns the tier of every test that is not fast.

    kept: tests that are at most exhaustive.

    costs: test -> CPU seconds, with its fixtures. fast_seconds, ci_seconds: of all fast and of all exhaustive tests.
    """
    by_cost = sorted(costs, key=costs.__getitem__)
    cheapest: dict[str, str] = {}
    for name in by_cost:
        cheapest.setdefault(name.partition("[")[0], name)
    slow = []
    for name in by_cost:
        most = FASTEST if name in cheapest.values() else FAST
        if costs[name] <= most and costs[name] <= fast_seconds:
            fast_seconds -= costs[name]
        else:
            slow.append(name)
    tiers = {}

    def order(name: str) -> tuple[bool, bool, float]:
        return name not in kept, name not in cheapest.values(), costs[name]

    for name in sorted(slow, key=order):
        ci_seconds -= costs[name]
        tiers[name] = "exhaustive" if ci_seconds >= 0 else "long"
    return tiers


class Part:
    """Leaves every n-th test in the order of their names, of those that are chosen otherwise.

    Neighbors in that order, the rows of a function, cost about the same, and so do the parts.

    text: "3/8" for the third, eleventh, ... test.

    Raises pytest.UsageError for another text.
    """

    def __init__(self, text: str) -> None:
        number, _, parts = text.partition("/")
        if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
            raise pytest.UsageError(f"--part {text}: of 8 parts they are 1/8, 2/8, ... 8/8")
        self._first = int(number) - 1
        self._parts = int(parts)

    def names(self, tests: Iterable[str]) -> set[str]:
        """Returns the tests of this part."""
        return set(sorted(tests)[self._first :: self._parts])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Comes after the choice by markers and words."""
        chosen = self.names(item.nodeid for item in items)
        left_out = [item for item in items if item.nodeid not in chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of `tiers.txt`."""
    tiers = read_tiers()
    for item in items:
        if tier := tiers.get(item.nodeid):
            item.add_marker(getattr(pytest.mark, tier))


def read_tiers() -> dict[str, str]:
    """Returns the tier of every test of `tiers.txt`."""
    lines = TIERS.read_text(encoding="utf-8").splitlines()
    return {name: tier for tier, _, name in (line.partition(" ") for line in lines)}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the two options."""
    parser.addoption(
        "--costs",
        metavar="FILE",
        help="write CPU seconds, programs and processes of each test to FILE",
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        help="run the K-th of N parts of the chosen tests; all parts together run each test once",
    )
    parser.addoption(
        "--check-costs",
        action="store_true",
        help="fail tests that cost more than their markers say",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measures, and chooses a part, where the options are given."""
    if config.getoption("part"):
        config.pluginmanager.register(Part(config.getoption("part")), "part")
    if config.getoption("costs") or config.getoption("check_costs"):
        config.pluginmanager.register(
            Costs(config.getoption("check_costs"), config.getoption("costs")), "costs"
        )


if __name__ == "__main__":
    measured = [
        json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()
    ]
    costs = {row["test"]: row["cpu"] for row in measured}
    placed = {name: tier for name, tier in read_tiers().items() if name not in costs} | tiers_of(
        costs
    )
    TIERS.write_text(
        "".join(f"{tier} {name}\n" for name, tier in sorted(placed.items())), encoding="utf-8"
    )
