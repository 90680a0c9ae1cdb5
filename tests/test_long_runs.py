"""Views of runs of a million steps, in a folder and in segments, and what they say of a run that is late or gone."""

import itertools
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.activity import activity, watched_by
from meshwright.cli.verbs import run_verb
from meshwright.reporters.files import EventLog, JsonLines
from meshwright.storage.paths import path_of
from meshwright.views.charts import Chart
from meshwright.views.live_server import LivePage
from meshwright.views.run_folder import Curve, RunFolder, open_folders
from meshwright.views.run_page import run_page
from meshwright.views.run_status import run_status

NOW = 1_800_000_000.0


def lines_of(steps: int) -> bytes:
    """Metrics with one line a step, with a spike in the middle, and a value of its own at the end."""
    parts = []
    for step in range(1, steps + 1):
        loss = 9.5 if step == steps // 2 else 2.0
        parts.append(f'{{"step": {step}, "loss": {loss}, "step seconds": 0.1000000000}}')
    parts[-1] = f'{{"step": {steps}, "loss": 0.25, "step seconds": 0.1}}'
    return ("\n".join(parts) + "\n").encode()


def folder_of(out: Path, steps: int, **training: Any) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    run = {"name": "own", "model": {"family": "llama"}, "training": {"steps": steps, **training}}
    (out / "run.json").write_text(json.dumps(run))
    return out


def charts(folder: RunFolder) -> dict[str, Chart]:
    found = {}
    for section in run_page([folder]).sections:
        for block in section.blocks:
            for chart in getattr(block, "blocks", []):
                found[chart.title] = chart
    return found


def check_whole(folder: RunFolder, steps: int) -> None:
    """Both ends, the extreme in the middle, and the counts of a run of `lines_of`."""
    loss = folder.curves["loss"]
    points = loss.steps
    assert (points[0], points[-1], loss.count) == (1, steps, steps)
    assert (max(loss.values), loss.values[-1]) == (9.5, 0.25)
    assert points == sorted(points) and len(points) <= 6001
    gaps = [after - before for before, after in itertools.pairwise(points)]
    assert max(gaps) <= steps / 250, "the points are spread over the run"
    assert run_status(folder).step == steps and not folder.left_out


def test_a_view_shows_a_run_of_a_million_steps_to_its_end(tmp_path: Path) -> None:
    steps = 1_200_000
    out = folder_of(tmp_path / "run", steps)
    content = lines_of(steps)
    (out / "metrics.jsonl").write_bytes(content)
    assert len(content) > 64 * 2**20
    del content
    folder = open_folders([out])[0]
    check_whole(folder, steps)
    assert f"{steps:,}" in json.dumps(run_page([folder]).to_json())
    # What is new is read alone, and a cut that was written over again is noticed.
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1200001, "loss": 0.125}\n')
    folder.refresh()
    assert folder.curves["loss"].count == steps + 1


def test_the_memory_of_a_reader_does_not_grow_with_the_run(tmp_path: Path) -> None:
    peaks = []
    for steps in (6_000, 12_000):
        out = folder_of(tmp_path / str(steps), steps)
        (out / "metrics.jsonl").write_bytes(lines_of(steps))
        tracemalloc.start()
        folder = RunFolder(out)
        folder.refresh()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        check_whole(folder, steps)
    assert peaks[1] < 1.2 * peaks[0]


def test_a_cut_that_was_written_over_again_is_read_anew(tmp_path: Path) -> None:
    out = folder_of(tmp_path, 100)
    lines = JsonLines(out / "metrics.jsonl", upto=0)
    for step in range(1, 51):
        lines.write(step, {"loss": 1.0})
    folder = RunFolder(out)
    folder.refresh()
    lines.rewind(10)
    for step in range(11, 91):
        lines.write(step, {"loss": 2.0})
    lines.close()
    folder.refresh()
    assert folder.curves["loss"].steps == list(range(1, 91))


def test_lines_that_are_not_shown_are_named(tmp_path: Path) -> None:
    out = folder_of(tmp_path, 100)
    long = b'{"step": 2, "x": "' + b"y" * 2**21 + b'"}\n'
    damaged = b'{"step": 3, "lo\n'
    content = b'{"step": 1, "loss": 1}\n' + long + damaged + b'{"step": 4, "loss": 2}\n'
    (out / "metrics.jsonl").write_bytes(content)
    folder = RunFolder(out)
    folder.refresh()
    assert folder.curves["loss"].steps == [1, 4]
    page = json.dumps(run_page([folder]).to_json())
    assert "1 lines of metrics.jsonl longer than 1 MiB not shown" in page
    assert "1 damaged lines of metrics.jsonl not shown" in page


def test_a_curve_of_many_points_keeps_its_ends_and_extremes() -> None:
    for count in (1, 2, 1999, 2000, 2001, 100_000):
        curve = Curve()
        for step in range(count):
            curve.add(step, 100.0 if step == count // 3 else 1.0)
        assert (curve.steps[0], curve.steps[-1], max(curve.values)) == (0, count - 1, 100.0)
        assert curve.count == count and len(curve.steps) <= 6001
        if count <= 2000:
            assert curve.steps == list(range(count))


def running(out: Path, *, steps: int = 50, seconds: float = 0.1, lock: bool = False) -> Path:
    """A run that took 50 of 100 steps until `NOW`, as the loop writes it."""
    folder_of(out, 100, log_every=1)
    events = [{"time": NOW - 9, "step": 0, "event": "start", "mesh": "data=1", "devices": 1}]
    write_events(out, events)
    lines = JsonLines(out / "metrics.jsonl", upto=0)
    for step in range(1, steps + 1):
        lines.write(step, {"loss": 1.0, "step seconds": seconds})
    lines.close()
    files = ["metrics.jsonl"]
    if lock:
        (out / ".lock").write_text("{}")
        files.append(".lock")
    for name in files:
        os.utime(out / name, (NOW, NOW))
    return out


def write_events(out: Path, events: list[dict[str, Any]]) -> None:
    with (out / "events.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps(event) + "\n")


def status_after(out: Path, seconds: float) -> Any:
    folder = RunFolder(out)
    folder.refresh()
    return run_status(folder, NOW + seconds)


STATES = [
    # seconds after the last step, seconds of a step, whether the lock of a killed process is there, state
    (1.0, 0.1, False, "running"),
    (30.0, 0.1, False, "late"),
    (30.0, 0.1, True, "silent"),
    (90.0, 0.1, False, "silent"),
    (30.0, 20.0, True, "silent"),
    (30.0, 20.0, False, "running"),
    (130.0, 20.0, False, "late"),
    (500.0, 20.0, False, "silent"),
]


@pytest.mark.parametrize(("after", "seconds", "lock", "state"), STATES)
def test_the_age_of_the_last_step_is_held_against_its_median(
    after: float, seconds: float, lock: bool, state: str, tmp_path: Path
) -> None:
    status = status_after(running(tmp_path, seconds=seconds, lock=lock), after)
    assert status.state == state
    assert (status.seconds_left is not None) == (state == "running"), "the clock stops"
    assert "last step" in status.summary and "median" in status.summary
    assert status.progresses == (state != "silent")


def test_a_process_that_counts_is_late_and_not_silent(tmp_path: Path) -> None:
    out = running(tmp_path, lock=True)
    os.utime(out / ".lock", (NOW + 590, NOW + 590))
    status = status_after(out, 600.0)
    assert status.state == "late" and "its process lives" in status.summary


ACTIVITIES = {"restore": "restoring", "compile": "compiling", "evaluate": "evaluating", "save": "saving"}  # fmt: skip


@pytest.mark.parametrize("kind", ACTIVITIES)
def test_a_view_shows_what_a_run_does_besides_steps(kind: str, tmp_path: Path) -> None:
    out = folder_of(tmp_path, 100)
    log, folder = EventLog(out / "events.jsonl"), RunFolder(out)
    with watched_by(log):
        log.start(0, devices=1)
        with activity(kind, f"{kind} of a thing", "done", 3):
            folder.refresh()
            status = run_status(folder)
            assert (status.state, status.word) == ("busy", ACTIVITIES[kind])
            assert f"{kind} of a thing for " in status.summary
            assert ACTIVITIES[kind] in json.dumps(run_page([folder]).to_json())
    folder.refresh()
    assert run_status(folder).state != "busy"
    log.close()
    folder.refresh()
    assert run_status(folder).state == "ended"


def test_a_killed_evaluation_is_silent(tmp_path: Path) -> None:
    out = running(tmp_path, lock=True)
    began = {"time": NOW, "step": 50, "event": "began", "activity": "evaluate", "doing": "evaluating"}  # fmt: skip
    write_events(out, [began])
    assert status_after(out, 5.0).word == "evaluating"
    assert status_after(out, 40.0).state == "silent"


def test_a_restart_says_which_step_and_what_it_lost(tmp_path: Path) -> None:
    out = running(tmp_path)
    events = [
        {"time": NOW, "step": 0, "event": "restore", "restored": 40, "taken again": 10},
        {"time": NOW, "step": 40, "event": "start", "devices": 1},
        {"time": NOW + 1, "step": 47, "event": "roll back", "to": 40},
    ]
    write_events(out, events)
    status = status_after(out, 2.0)
    labels = [restart.label for restart in status.restarts]
    assert labels == ["restart at step 40, 10 steps lost", "rolled back to step 40, 7 steps lost"]
    assert status.steps_lost == status.to_json()["steps_lost"] == 17
    folder = open_folders([out])[0]
    assert [mark.label for mark in charts(folder)["Loss"].marks] == labels
    assert "17 steps taken again" in json.dumps(run_page([folder]).to_json())
    assert labels[0] in str(status)


def test_page_terminal_and_json_have_one_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = running(tmp_path / "run")
    monkeypatch.setattr(time, "time", lambda: NOW + 30)
    summary = status_after(out, 30.0).summary
    assert run_verb("view", [str(out)]) == 0
    printed = capsys.readouterr().out
    assert summary in printed
    assert run_verb("view", [str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert summary in json.dumps(record)
    assert "late" in mw.view(out).page.html()


def test_a_live_page_of_a_dead_run_says_so_until_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = running(tmp_path / "run")
    clock = [NOW + 1.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr("meshwright.views.live_server._AGED", 0.0)
    page = LivePage([out], run_page)

    def live() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(page.data()[1])["live"]
        return found

    assert live()["state"] == "live" and live()["active"]
    clock[0] = NOW + 3600
    assert live()["state"] == "silent" and not live()["active"]
    assert live()["seconds"] > 2
    write_events(out, [{"time": clock[0], "step": 50, "event": "start", "devices": 1}])
    assert live()["state"] == "live"
    write_events(out, [{"time": clock[0], "step": 50, "event": "end"}])
    assert live()["state"] == "ended"


def test_the_first_step_after_a_save_does_not_set_the_axis_of_times(tmp_path: Path) -> None:
    out = folder_of(tmp_path, 1000)
    lines = JsonLines(out / "metrics.jsonl", upto=0)
    for step in range(1, 501):
        lines.write(step, {"loss": 1.0, "step seconds": 60.0 if step % 50 == 1 else 0.1})
    lines.close()
    chart = charts(open_folders([out])[0])["Step time"]
    assert chart.y.top is not None and 0.1 < chart.y.top < 1.0
    assert "10 points" in chart.note and "beyond the axis" in chart.note
    assert max(value or 0.0 for value in chart.series[0].y) == 60.0, "they stay in the data"


def test_checkpoints_of_a_week_do_not_hide_the_curve_nor_the_held_out_loss(tmp_path: Path) -> None:
    out = folder_of(tmp_path, 10_000)
    lines = JsonLines(out / "metrics.jsonl", upto=0)
    for step in range(1, 10_001):
        lines.write(step, {"loss": 3.0 - step / 10_000})
    lines.write(10_000, {"held-out loss": 2.0})
    lines.close()
    saves = [{"time": NOW, "step": step, "event": "save", "seconds": 1.0} for step in range(10, 10_001, 10)]  # fmt: skip
    write_events(out, saves)
    folder = open_folders([out])[0]
    curve, checkpoints, held_out = charts(folder)["Loss"].series
    assert len(checkpoints.x) <= 24 and checkpoints.x[0] == 10 and checkpoints.x[-1] == 10_000
    assert checkpoints.under and not curve.under and not held_out.under
    for at, value in zip(checkpoints.x, checkpoints.y, strict=True):
        assert value == pytest.approx(3.0 - at / 10_000, abs=1e-6)
    assert "24 of 1,000 checkpoints" in checkpoints.tips[0]


class Objects:
    """A bucket in memory, with the requests that a reader makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        import tensorstore

        from meshwright.storage.bucket import BucketPath

        context = tensorstore.Context()

        def kvstore(path: Any, retries: int = 0) -> Any:
            prefix = f"{path.bucket}/{path.key}/" if path.key else f"{path.bucket}/"
            return {"driver": "memory", "path": prefix}, context

        monkeypatch.setattr(BucketPath, "kvstore", kvstore)


def test_lines_in_segments_are_read_whole_and_again_after_a_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Objects(monkeypatch)
    monkeypatch.setattr("meshwright.storage.bucket.INTERVAL", 0.0)
    out = path_of("s3://bucket/run")
    (out / "run.json").write_bytes(b'{"name": "own", "training": {"steps": 100}}')
    (out / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 1.0}\n')
    folder = open_folders([out])[0]
    assert folder.curves["loss"].steps == [1, 2]
    lines = JsonLines(out / "metrics.jsonl", upto=2)
    for step in range(3, 31):
        lines.write(step, {"loss": 1.0})
    before = folder.version
    folder.refresh()
    assert folder.curves["loss"].steps == list(range(1, 31))
    lines.rewind(10)
    for step in range(11, 41):
        lines.write(step, {"loss": 2.0})
    lines.close()
    assert folder.version != before
    folder.refresh()
    assert folder.curves["loss"].steps == list(range(1, 41))
    assert folder.curves["loss"].values[10:] == [2.0] * 30
    assert run_status(folder).step == 40
