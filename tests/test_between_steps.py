"""What a training does between two steps is booked as that, not as step time."""

import dataclasses
import json
from pathlib import Path

import meshwright as mw
from meshwright.reporters import BETWEEN
from meshwright.trainer import loop, meter
from meshwright.views import run_page


def test_sampling_is_no_step_time(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text.txt").write_text("She sells sea shells by the sea shore. " * 500)
    run = mw.recipe(
        "tiny", mesh="data=1", layers=1, width=16, mlp=16, heads=2, kv_heads=2, steps=6, batch=2, seq=16,
        sample=2, sample_every=3, eval_every=2, eval_samples=2, save_every=4, paths=(str(tmp_path / "text.txt"),),
    )  # fmt: skip
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer="bytes"))
    mw.train(run, tmp_path / "out", devices=1, progress="none", cache=cache)
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if "step seconds" in line]
    sampled = [line["step"] for line in steps if "sampling seconds" in line]
    assert sampled == [
        4
    ]  # between steps 3 and 4; that after the last step is no time between steps
    for line in steps:
        assert 0 <= line.get("input wait seconds", 0.0) <= line["step seconds"]
    events = [
        json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    ]
    for kind, expected in {"sample": [3, 6], "evaluate": [2, 4, 6], "save": [4, 6]}.items():
        found = [event["step"] for event in events if event["event"] == kind]
        assert found == expected, kind


def test_there_is_one_list_of_what_is_between_steps() -> None:
    """The loop that measures, the meter that subtracts, and the page that shows."""
    for module in (loop, meter, run_page):
        assert vars(module)["BETWEEN"] is BETWEEN
