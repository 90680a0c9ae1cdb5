"""Reporters: metrics on a full disk, reporters from outside the package, progress on a console."""

import dataclasses
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.config import Run
from meshwright.errors import ConfigError, TrainingError
from meshwright.models.families.llama import Llama
from meshwright.plugins import keep_own_names
from meshwright.report.console import ConsoleReport, open_console
from meshwright.report.files import JsonLines
from meshwright.report.reporters import build_reporters
from meshwright.runs.run_file import run_from_dict
from meshwright.runs.write_run import run_to_dict


class Full:
    """A file on a disk that has room for so many bytes."""

    def __init__(self, file: Any, room: int):
        self.file, self.room, self.name = file, room, "metrics.jsonl"

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        return int(self.file.write(taken))

    def close(self) -> None:
        self.file.close()


def test_lines_wait_for_room_and_none_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: Any = JsonLines(tmp_path / "metrics.jsonl", upto=0)
    disk = lines._file = Full(lines._file, 30)
    for step in (1, 2, 3):
        lines.write(step, {"loss": step / 2})
    disk.room = 10**6
    lines.write(4, {"loss": float("inf")})
    lines.close()
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert told == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 1.5},
                    {"step": 4, "loss": None}]  # fmt: skip
    assert capsys.readouterr().err == ""


def test_lines_that_find_no_room_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: Any = JsonLines(tmp_path / "metrics.jsonl", upto=0)
    lines._file = Full(lines._file, 0)
    lines.write(1, {"loss": 1.0})
    lines.write(2, {"loss": 1.0})
    lines.close()
    assert "no room for its last 2 lines" in capsys.readouterr().err


REPORTERS = """
written = []

class Kept:
    def __init__(self, out, run):
        written.append((out, run.name))

    def write(self, step, values):
        written.append((step, dict(values)))
        values.clear()

    def close(self):
        written.append("closed")

def broken(out, run):
    raise OSError("no such server")

def incomplete(out, run):
    return object()

class Fails(Kept):
    def write(self, step, values):
        raise TimeoutError("server is away")

    def close(self):
        raise TimeoutError("server is away")
"""


def reporter_run(tmp_path: Path, *names: str) -> Run:
    file = tmp_path / "mine.py"
    file.write_text(REPORTERS)
    return Run(Llama(), name="r", reporters=tuple(name.replace("FILE", str(file)) for name in names))


def test_reporters_from_outside_are_built_by_name_and_kept_in_the_run(tmp_path: Path) -> None:
    run = reporter_run(tmp_path, "FILE:Kept", "tensorboard", "FILE:Kept")
    keep_own_names(run_to_dict(run))
    assert run_from_dict(json.loads(json.dumps(run_to_dict(run))), "run.json") == run
    first, tensorboard, second = build_reporters(tmp_path / "out", run)
    values = {"loss": 2.0}
    for reporter in (first, tensorboard, second):
        reporter.write(3, values)
        reporter.close()
    # A reporter that changes its values changes nobody else's.
    assert values == {"loss": 2.0} and list((tmp_path / "out" / "tensorboard").iterdir())
    import meshwright.plugins as plugins

    written = plugins.load("reporter", run.reporters[0]).write.__globals__["written"]
    assert written == [(tmp_path / "out", "r"), (tmp_path / "out", "r"), *[(3, {"loss": 2.0}), "closed"] * 2]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensorbord", "did you mean 'tensorboard'"),
        ("FILE:Kep", "did you mean 'Kept'"),
        ("FILE:broken", r"it raised OSError: no such server .*mine.py, line 16"),
        ("FILE:incomplete", "it returned an object of type object"),
    ],
)
def test_what_is_no_reporter_is_refused(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_reporters(tmp_path, reporter_run(tmp_path, name))


def test_a_reporter_that_fails_ends_the_run_by_name(tmp_path: Path) -> None:
    run = reporter_run(tmp_path, "FILE:Fails")
    (reporter,) = build_reporters(tmp_path, run)
    with pytest.raises(TrainingError, match=r"mine.py:Fails, step 4\n.*raised TimeoutError: server is away"):
        reporter.write(4, {"loss": 1.0})
    with pytest.raises(TrainingError, match="closing"):
        reporter.close()


def test_a_name_is_needed_for_what_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.json"):
        dataclasses.replace(reporter_run(tmp_path), reporters=(lambda out, run: None,))  # type: ignore[arg-type]


def test_progress_is_a_line_now_and_then_where_the_output_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=120)
    report = ConsoleReport(console, start=10, steps=60)
    for step in range(11, 61):
        report.write(step, {"loss": 1 / step, "tokens/s": 1e6, "MFU": 0.41, "gradient norm": 1.0})
    report.write(60, {"held-out loss": 0.25})
    report.close()
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "step 11/60  loss 0.0909  1,000,000 tokens/s  MFU 41.0%"
    assert lines[-2].startswith("step 60/60  loss 0.0167") and lines[-2].endswith("left")
    assert lines[-1] == "step 60  held-out loss 0.2500" and len(lines) < 25


def test_a_console_without_a_reader_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        console = open_console(pipe)
        for _ in range(3):
            console.print("a line that nobody reads")
        assert console.quiet
