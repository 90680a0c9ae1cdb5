"""The bounds of the memory that `plan` and `prove` state for each phase, against what `bench/memory.py` measured."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.memory_model import PHASES

BENCH = Path(__file__).parents[1] / "bench" / "memory.py"
SPEC = importlib.util.spec_from_file_location("bench_memory", BENCH)
assert SPEC is not None and SPEC.loader is not None
bench: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)
RESULTS: dict[str, Any] = json.loads(bench.RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("layout", RESULTS)
def test_each_phase_takes_what_is_planned_and_compiled(layout: str) -> None:
    """Planned now, against figures of `python bench/memory.py`: of one device, with its part of the host's memory."""
    planned = bench.planned(bench.run_of(layout))
    assert tuple(planned) == PHASES
    for phase, figures in RESULTS[layout].items():
        plan, measured = planned[phase].device + planned[phase].host, figures["measured"]
        assert plan == pytest.approx(figures["planned"], rel=0.01), (
            f"{phase}: run bench/memory.py again"
        )
        least, most = PLANNED[phase]
        assert least * measured <= plan <= most * measured, (
            f"{phase}: planned {plan / measured:.2f} of what it takes"
        )
        least, most = COMPILED[phase]
        compiled = figures["compiled"] / measured
        assert least <= compiled <= most, f"{phase}: compiled {compiled:.2f} of what it takes"


PLANNED = {
    "start": (0.5, 1.2),  # XLA:CPU has several arrays of the random bits of a tensor
    "step": (0.65, 1.1),  # XLA:CPU copies the state that it updates
    "evaluation": (0.8, 1.25),
    "save": (0.9, 1.4),
    "resume": (0.95, 1.7),  # simulated devices share what the host has read
}
COMPILED = {
    "start": (0.85, 1.05),
    "step": (0.9, 1.05),
    "evaluation": (0.9, 1.05),
    "save": (0.9, 1.2),
    "resume": (0.95, 1.7),  # as above
}
