"""What each test costs: CPU seconds, large compiled programs, Python processes; and the markers that say so.

A pytest plugin of this suite. `pytest --costs FILE` writes a table of all tests that ran, most expensive first. `pytest
--check-costs` fails a test that compiles more than one large program without the marker `compiles`, or starts a Python
process without `processes`. Costs are CPU seconds, so that other programs on the machine do not change them.

`costly.txt` lists the tests that are too expensive for the fast tier, by measurement; they get the marker `exhaustive`.

    pytest -m "not exhaustive and not long" --costs /tmp/costs    # with -n 2: /tmp/costs.gw0, /tmp/costs.gw1
    python tests/measured.py /tmp/costs*                          # adds what was too expensive to costly.txt
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import pytest

LARGE = 2.0
"""CPU seconds that compiling a large program takes. A tiny train step takes 3 to 7, an operation of its own 0.05."""

COSTLY = Path(__file__).with_name("costly.txt")
FAST, FASTEST = 1.5, 6.0
"""CPU seconds that a fast test takes at most; of the rows of one test function the cheapest stays below the second."""

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
            self._so_far.processes += Path(os.fsdecode(program)).name.startswith(("python", "meshwright"))


def undeclared(cost: Cost, markers: set[str]) -> list[str]:
    """Returns what a test costs without a marker that says so."""
    found = []
    if cost.large > 1 and "compiles" not in markers:
        found.append(f"compiles {cost.large} large programs: share them, or mark the test `compiles`")
    if cost.processes and "processes" not in markers:
        found.append(f"starts {cost.processes} Python processes: call `cli.main.run`, or mark the test `processes`")
    return found


class Costs:
    """Measures every test, and checks its markers where `check` is set. Of workers, results go to the first process."""

    def __init__(self, check: bool) -> None:
        self._check = check
        self._meter = Meter()
        self._costs: dict[str, Cost] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Checks the test itself: what fixtures compile is shared."""
        before = self._meter.read()
        yield
        faults = undeclared(self._meter.read() - before, {marker.name for marker in item.iter_markers()})
        if self._check and faults:
            pytest.fail("; ".join(faults), pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measures a test with its fixtures."""
        before = self._meter.read()
        result = yield
        self._costs[item.nodeid] = self._meter.read() - before
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the table, one line per test; each worker writes a file of its own."""
        file = session.config.getoption("costs")
        if not file:
            return
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        rows = sorted(self._costs.items(), key=lambda row: -row[1].cpu)
        lines = [json.dumps({"test": name, **dataclasses.asdict(cost)}) for name, cost in rows]
        Path(f"{file}.{worker}" if worker else file).write_text("".join(f"{line}\n" for line in lines))


def too_expensive(costs: dict[str, float]) -> list[str]:
    """Returns the tests that do not stay in the fast tier: test -> CPU seconds, with their fixtures."""
    cheapest: dict[str, str] = {}
    for name in sorted(costs, key=lambda name: costs[name]):
        cheapest.setdefault(name.partition("[")[0], name)
    kept = {name for name in cheapest.values() if costs[name] <= FASTEST}
    return sorted(name for name, cpu in costs.items() if cpu > FAST and name not in kept)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of `costly.txt`."""
    costly = set(COSTLY.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in costly:
            item.add_marker(pytest.mark.exhaustive)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the two options."""
    parser.addoption("--costs", metavar="FILE", help="write CPU seconds, programs and processes of each test to FILE")
    parser.addoption("--check-costs", action="store_true", help="fail tests that cost more than their markers say")


def pytest_configure(config: pytest.Config) -> None:
    """Measures where one of the options is given."""
    if config.getoption("costs") or config.getoption("check_costs"):
        config.pluginmanager.register(Costs(config.getoption("check_costs")), "costs")


if __name__ == "__main__":
    measured = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    listed = {*COSTLY.read_text(encoding="utf-8").splitlines(), *too_expensive({r["test"]: r["cpu"] for r in measured})}
    COSTLY.write_text("".join(f"{name}\n" for name in sorted(listed)), encoding="utf-8")
