"""Goodput of a run: a log that a test writes with known times, and what the page makes of it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.reporters.goodput import (
    REST,
    STEPS,
    TIMES,
    EventTimes,
    Goodput,
    RunTimes,
    StepTimes,
    read_times,
    split_time,
)
from meshwright.views.run_folder import RunFolder
from meshwright.views.run_goodput import goodput_of
from meshwright.views.run_page import run_page
from meshwright.views.run_status import run_status

BEGIN = 1_000_000.0


def write_run(folder: Path, events: list[dict[str, Any]], steps: int, log_every: int = 1) -> None:
    """Writes steps of 2 s, of which 0.5 s are a wait for data, and events with times since the begin."""
    folder.mkdir()
    lines = [{**event, "time": BEGIN + event["time"]} for event in events]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    values = {"loss": 2.5, "step seconds": 2.0, "input wait seconds": 0.5}
    metrics = [{"step": step, **values} for step in range(log_every, steps + 1, log_every)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    (folder / "run.json").write_text(json.dumps({"name": "mine"}))


def read_goodput(folder: Path, now: float) -> Goodput:
    read = RunFolder(folder)
    read.refresh()
    good = goodput_of(read, run_status(read, BEGIN + now), BEGIN + now)
    assert good is not None
    return good


RESTARTED = [
    {"time": 0, "step": 0, "event": "start", "devices": 8},
    {"time": 30, "step": 0, "event": "compile", "seconds": 30.0},
    {"time": 240, "step": 100, "event": "save", "seconds": 10.0},
    # It dies after step 150, is away for 100 s, and takes steps 101 to 150 again.
    {"time": 445, "step": 100, "event": "restore", "seconds": 5.0, "restored": 100, "taken again": 50},
    {"time": 446, "step": 100, "event": "start", "devices": 8},
    {"time": 476, "step": 100, "event": "compile", "seconds": 30.0},
    {"time": 700, "step": 200, "event": "end"},
]  # fmt: skip


@pytest.mark.parametrize("log_every", [1, 10])
def test_the_time_of_a_run_with_a_restart_is_split_by_cause(tmp_path: Path, log_every: int) -> None:
    write_run(tmp_path / "out", RESTARTED, steps=200, log_every=log_every)
    good = read_goodput(tmp_path / "out", now=5000)
    assert good.wall == 700
    known = {cause: seconds for cause, seconds in good.seconds.items() if seconds}
    assert known == {
        STEPS: 200 * 1.5,
        "steps taken again": 50 * 1.5,
        "waiting for data": 250 * 0.5,
        "compiling": 60.0,
        "restoring": 5.0,
        "saving": 10.0,
        REST: 700 - 300 - 75 - 125 - 60 - 5 - 10,
    }
    assert good.fraction == 300 / 700


def test_a_run_that_died_is_looked_at_until_its_last_step(tmp_path: Path) -> None:
    """A week later its goodput is still what it was."""
    write_run(tmp_path / "out", RESTARTED[:3], steps=150)
    folder = RunFolder(tmp_path / "out")
    folder.refresh()
    written = (tmp_path / "out" / "metrics.jsonl").stat().st_mtime
    status = run_status(folder, written + 604_800)
    assert status.state == "silent"
    good = goodput_of(folder, status, written + 604_800)
    assert good is not None
    assert good.wall == pytest.approx(written - BEGIN)


def test_summary_metrics_and_page_have_one_goodput(tmp_path: Path) -> None:
    """Of a run that is resumed: its times count from the first start, not from the second."""
    out = tmp_path / "out"
    run = mw.recipe("tiny", mesh="data=1", layers=1, steps=6, sample=0, eval_samples=16)
    first = mw.train(run, out=out, progress="none", cache=tmp_path / "cache", devices=1)
    more = dataclasses.replace(run, training=dataclasses.replace(run.training, steps=12))
    cache = tmp_path / "cache"
    summary = mw.train(more, out=out, start="resume", progress="none", cache=cache, devices=1)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    reported = [line for line in metrics if "goodput" in line]
    assert [line.pop("step") for line in reported] == [6, 12]
    assert all(line.pop("time") for line in reported)
    assert reported == [first.goodput, summary.goodput]
    assert sum(summary.goodput.values()) == pytest.approx(1)
    folder = RunFolder(out)
    folder.refresh()
    page = goodput_of(folder, run_status(folder), BEGIN)
    assert page is not None
    # The page counts until the `end`, a moment after the summary.
    wall = events[-1]["time"] - events[0]["time"]
    assert page.wall == pytest.approx(wall)
    assert page.fraction == pytest.approx(summary.goodput["goodput"], rel=0.05)
    compiling = sum(event["seconds"] for event in events if event["event"] == "compile")
    assert page.seconds["compiling"] == pytest.approx(compiling)
    assert summary.goodput["time compiling"] == pytest.approx(compiling / wall, rel=0.05)
    assert f"goodput {summary.goodput['goodput']:.1%}" in summary.brief()


def test_a_run_without_a_step_has_none(tmp_path: Path) -> None:
    write_run(tmp_path / "out", RESTARTED[:2], steps=0)
    folder = RunFolder(tmp_path / "out")
    folder.refresh()
    assert goodput_of(folder, run_status(folder, BEGIN + 40), BEGIN + 40) is None


def test_the_page_shows_goodput_machines_and_a_tab_with_step_and_loss(tmp_path: Path) -> None:
    sick = {
        "time": 650,
        "step": 190,
        "event": "machine",
        "host": "node17",
        "warning": "GPU 3, NVLink 14: 505 NVLink recoveries in 1 h: cordon the host",
    }
    write_run(tmp_path / "out", [*RESTARTED[:-1], sick, RESTARTED[-1]], steps=200)
    folder = RunFolder(tmp_path / "out")
    folder.refresh()
    page = run_page([folder])
    assert page.to_json()["tab"] == "step 200, loss 2.5000, out"
    assert "<title>step 200, loss 2.5000, out</title>" in page.html()
    text = str(page)
    assert "42.9%" in text  # 300 of 700 s
    assert "node17" in text
    assert "505 NVLink recoveries" in text


def test_a_step_that_hangs_is_not_training(tmp_path: Path) -> None:
    """400 steps of 0.1 s, of which every tenth has a line; one with a line hangs for a minute."""
    times = StepTimes()
    for step in range(10, 401, 10):
        seconds = 60.0 if step == 200 else 0.1
        times.add({"step": step, "step seconds": seconds})
    events = EventTimes()
    events.add({"event": "start", "step": 0, "time": BEGIN})
    good = split_time(events, times, 400, BEGIN + 100)
    assert good is not None
    assert good.fraction == pytest.approx(0.4)
    assert good.seconds[REST] == pytest.approx(60)
    assert sum(good.metrics().values()) == pytest.approx(1)


def test_the_usual_time_follows_the_steps_of_a_long_run() -> None:
    times = StepTimes()
    for step in range(250):
        times.add({"step": step, "step seconds": 1.0 if step < 100 else 2.0})
    assert times.usual() == pytest.approx(((100 * 1.0 + 150 * 2.0) / 250, 0.0))


def test_steps_before_a_start_without_a_checkpoint_are_taken_again(tmp_path: Path) -> None:
    events = EventTimes()
    events.add({"event": "start", "step": 0, "time": BEGIN})
    events.add({"event": "start", "step": 0, "time": BEGIN + 900, "taken again": 900})
    assert events.steps_lost == 900


def test_a_start_keeps_the_times_before_it(tmp_path: Path) -> None:
    """What the last start holds and the lines after it are what all lines say; a damaged start is passed over."""
    rows = [{"step": step, "step seconds": 1.0 + step % 7, "input wait seconds": 0.25} for step in range(1, 251)]  # fmt: skip
    events: list[dict[str, Any]] = [
        {"time": 10.0, "step": 0, "event": "compile", "seconds": 3.0},
        {"time": 20.0, "step": 50, "event": "roll back", "to": 40},
        {"time": 30.0, "step": 60, "event": "save", "seconds": 2.0},
    ]

    def write(lines: list[dict[str, Any]], name: str) -> None:
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(events, "events.jsonl")
    write(rows[:120], "metrics.jsonl")
    before = read_times(tmp_path)
    start = {"time": 40.0, "step": 120, "event": "start", TIMES: before.to_json()}
    after = {"time": 50.0, "step": 130, "event": "save", "seconds": 4.0}
    write(rows, "metrics.jsonl")
    write([*events, start, after], "events.jsonl")
    continued = read_times(tmp_path)
    write([*events, {**start, TIMES: {"first": "?"}}, after], "events.jsonl")
    whole = read_times(tmp_path)
    assert continued.steps.usual() == pytest.approx(whole.steps.usual())
    assert vars(continued.events) == vars(whole.events)
    assert whole.events.steps_lost == 10 and sum(whole.events.activity_seconds.values()) == 9.0


@pytest.mark.parametrize(
    "damage",
    [{"lines": -2}, {"step seconds": -5.0}, {"last": [[0.1, 0.0]] * 100}, {"activities": {"saving": -1.0}}],
)  # fmt: skip
def test_sums_that_no_start_writes_are_passed_over(damage: dict[str, Any]) -> None:
    """Two lines less than none would be divided by, and a block that is never complete grows with the run."""
    times = RunTimes()
    times.events.add({"event": "start", "step": 0, "time": BEGIN})
    times.steps.add({"step": 1, "step seconds": 1.0})
    record = times.to_json()
    assert RunTimes.from_json(record) is not None
    assert RunTimes.from_json({**record, **damage}) is None
