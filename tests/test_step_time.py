"""The time of a step, its rate and MFU are without what the loop does between steps, which has metrics of its own."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint import programs_are_compiled_once, text_run

from meshwright.reporters import BETWEEN
from meshwright.trainer import loop
from meshwright.trainer.tiers import Tiers

__all__ = ["programs_are_compiled_once"]  # a fixture of this file too

HOUR = 3600.0


class Clock:
    """The clock of the process, which tests move on by hours."""

    def __init__(self) -> None:
        self.real, self.ahead = time.perf_counter, 0.0

    def __call__(self) -> float:
        return self.real() + self.ahead

    def taking(self, hours: float, call: Any) -> Any:
        """Returns `call`, which takes `hours` more than it does."""

        def slow(*arguments: Any, **options: Any) -> Any:
            self.ahead += hours * HOUR
            return call(*arguments, **options)

        return slow


def test_what_the_loop_does_between_steps_is_in_no_step(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = text_run(tmp_path, "data=1", steps=8, remat="none", eval_every=2, save_every=3)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, sample=1, sample_every=4))
    prepared = loop.prepare_run(run, cache=cache)
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    evaluator = prepared.evaluator()
    hours = {"evaluating": 2.0, "sampling": 3.0, "saving": 5.0}
    slow_evaluator = clock.taking(hours["evaluating"], evaluator)
    monkeypatch.setattr(type(prepared), "evaluator", lambda self: slow_evaluator)
    slow_sample = clock.taking(hours["sampling"], lambda state, out: "")
    monkeypatch.setattr(type(prepared), "sample", lambda self, state, out: slow_sample(state, out))
    monkeypatch.setattr(Tiers, "save", clock.taking(hours["saving"], Tiers.save))
    loop.train(prepared, tmp_path / "out")
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    assert list(steps) == list(range(1, 9))
    for number, line in steps.items():
        if number == 1:
            continue
        assert line["step seconds"] < HOUR, "a step contains what the loop did between steps"
        assert line["tokens/s"] == pytest.approx(16 * 16 / line["step seconds"])
        between = {name: line.get(f"{name} seconds", 0.0) // HOUR for name in BETWEEN}
        # What came after a step is told with the next.
        assert between["evaluating"] == (2 if (number - 1) % 2 == 0 else 0)
        assert between["sampling"] == (3 if (number - 1) % 4 == 0 else 0)
        assert between["saving"] == (5 if (number - 1) % 3 == 0 else 0)
    # The metrics of a step stand before those of its evaluation.
    losses = [line for line in lines if "loss" in line or "held-out loss" in line]
    order = [(line["step"], "held-out loss" in line) for line in losses]
    assert order == sorted(order)
