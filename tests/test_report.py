"""Reporters: metrics on a full disk, reporters from outside the package, progress on a console."""

import dataclasses
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.activity import activity, watched_by
from meshwright.errors import ConfigError, UnavailableError
from meshwright.formatting import format_step
from meshwright.models.families.llama import Llama
from meshwright.reporters import build_reporters
from meshwright.reporters.console import ConsoleReport, Period, open_console
from meshwright.reporters.files import EventLog, JsonLines
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_from_dict, run_to_dict
from meshwright.trust import own
from meshwright.views.blocks import Column, Table
from meshwright.views.terminal import print_table


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


def test_lines_wait_for_room_and_none_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: Any = JsonLines(tmp_path / "metrics.jsonl", upto=0)
    disk = lines._file = Full(lines._file, 30)
    for step in (1, 2, 3):
        lines.write(step, {"loss": step / 2})
    disk.room = 10**6
    lines.write(4, {"loss": float("inf")})
    lines.close()
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(line.pop("time") > 1e9 for line in told)
    assert told == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 1.5},
                    {"step": 4, "loss": None}]  # fmt: skip
    assert capsys.readouterr().err == ""


def test_lines_that_find_no_room_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    reporters = tuple(name.replace("FILE", str(file)) for name in names)
    return own(Run(Llama(), name="r", reporters=reporters))


def test_reporters_from_outside_are_built_by_name_and_kept_in_the_run(tmp_path: Path) -> None:
    run = reporter_run(tmp_path, "FILE:Kept", "tensorboard", "FILE:Kept")
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
    assert written == [
        (tmp_path / "out", "r"),
        (tmp_path / "out", "r"),
        *[(3, {"loss": 2.0}), "closed"] * 2,
    ]


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
    with pytest.raises(  # a tracker's server that is away may be back for another start
        UnavailableError, match=r"mine.py:Fails, step 4\n.*raised TimeoutError: server is away"
    ):
        reporter.write(4, {"loss": 1.0})
    with pytest.raises(UnavailableError, match="closing"):
        reporter.close()


def test_a_name_is_needed_for_what_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.json"):
        dataclasses.replace(reporter_run(tmp_path), reporters=(lambda out, run: None,))  # type: ignore[arg-type]


class Clock:
    """A clock that goes on when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("steps", "seconds", "per_hour"), [(2_000_000, 0.05, 120), (20_000, 5.0, 72)]
)
def test_a_long_run_prints_lines_at_the_stated_period(
    steps: int, seconds: float, per_hour: int
) -> None:
    """The later of 30 s and 10 steps; 2,000,000 steps of 50 ms take 28 hours."""
    clock = Clock()
    console = Console(file=io.StringIO(), width=120)
    report = ConsoleReport(console, clock=clock).begin(0, steps)
    values = {
        "loss": 2.5,
        "learning rate": 3e-4,
        "gradient norm": 1.0,
        "step seconds": seconds,
        "tokens/s": 1e6,
    }
    for step in range(1, steps + 1):
        clock.now = step * seconds
        report.write(step, values)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    hours = steps * seconds / 3600
    assert abs(len(lines) / hours - per_hour) < 0.1, f"{len(lines)} lines in {hours:.1f} h"
    number, speed = (
        f"step {1:>{len(str(steps))}}/{steps}",
        f"{format_step(seconds)}/step  1,000,000 tokens/s",
    )
    assert lines[0] == f"{number}  loss 2.5000  lr 3.00e-04  grad norm 1  {speed}"
    assert lines[1].endswith("left") and "\x1b" not in "".join(lines)
    assert lines[-1].startswith(f"step {steps}/{steps}  loss 2.5000")


def test_a_warm_up_that_is_cut_is_told() -> None:
    console = Console(file=io.StringIO(), width=200)
    for steps, warmup, start in ((20, 19, 0), (20, 20, 20), (20, 20, 0)):
        ConsoleReport(console).begin(start, steps, warmup)
    assert isinstance(console.file, io.StringIO)
    (line,) = console.file.getvalue().splitlines()
    assert (
        line
        == "warm-up cut to 19 of 20 steps:  --optimizer.warmup-steps 20 leaves no step after it"
    )


@pytest.mark.parametrize(("text", "period"), [("30s,10", Period()), ("5min", Period(300, 1)), ("100", Period(0, 100)),
                                              ("20 steps,1h", Period(3600, 20))])  # fmt: skip
def test_periods_of_progress(text: str, period: Period) -> None:
    assert Period.parse(text) == period


@pytest.mark.parametrize("text", ["", "often", "0", "1.5", "-3s", "10,,"])
def test_a_period_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the later of the two counts"):
        Period.parse(text)


@pytest.mark.parametrize(("width", "height"), [(120, 1), (80, 2), (40, 4)])
def test_a_line_breaks_between_its_parts(width: int, height: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    report = ConsoleReport(console, clock=(clock := Clock())).begin(0, 60)
    values = {"loss": 2.5, "learning rate": 3e-4, "gradient norm": 1.25, "step seconds": 0.512, "tokens/s": 123456.0,
              "MFU": 0.41}  # fmt: skip
    report.write(1, values)
    clock.now = 330.0
    report.write(11, values)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()[-height:]
    assert all(len(line) <= width for line in lines) and lines[0].startswith("step 11/60")
    assert " ".join(" ".join(lines).split()) == (
        "step 11/60 loss 2.5000 lr 3.00e-04 grad norm 1.25 512 ms/step 123,456 tokens/s MFU 41.0% 26 min 57 s left"
    )


def test_work_besides_the_steps_is_shown_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.reporters.console._ANNOUNCED", 0.01)
    console = Console(file=io.StringIO(), width=120)
    with watched_by(report := ConsoleReport(console)):
        with activity("compile", "compiling the train step", "compiled the train step"):
            time.sleep(0.3)
        report.begin(0, 60).write(30, {"loss": 1.0})
        with activity("evaluate", "evaluating", "evaluated on held-out text") as work:
            work.result = "held-out loss 0.2500"
        with pytest.raises(OSError), activity("save", "saving", "saved"):
            raise OSError
    report.close()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "compiling the train step ...", "compiled the train step in 0.3 s", "step 30/60  loss 1.0000",
        "step 30/60  held-out loss 0.2500  evaluated on held-out text in 0.0 s",
    ]  # fmt: skip


def test_a_terminal_has_a_live_line() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    report = ConsoleReport(console, clock=(clock := Clock())).begin(0, 1000)
    with watched_by(report), activity("compile", "compiling the train step", "compiled it"):
        assert "compiling the train step, 0.0 s" in report._renderable().plain
    for step in range(1, 6):
        clock.now += 2.0
        report.write(step, {"loss": 1 / step, "gradient norm": 2.0, "step seconds": 2.0})
        assert report._renderable().plain.startswith(
            f"step    {step}/1000  loss {1 / step:.4f}  grad norm 2  2 s/step"
        )
    report.close()
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert (
        "step    1/1000" in text and text.count("loss 0.5000") <= 1
    )  # the second step was shown live alone
    assert "\x1b[?25h" in text, "the cursor is back"


def test_the_log_of_events_survives_restarts(tmp_path: Path) -> None:
    for start in (0, 20):
        log = EventLog(tmp_path / "events.jsonl")
        with watched_by(log):
            log.start(start, how="fresh")
            log.write(start + 5, {"loss": 1.0})
            with activity("save", "saving", "saved"):
                pass
            log.rewind(start + 2)
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [
        ("start", 0), ("began", 5), ("save", 5), ("roll back", 5), ("end", 2),
        ("start", 20), ("began", 25), ("save", 25), ("roll back", 25), ("end", 22),
    ]  # fmt: skip
    assert (lines[1]["activity"], lines[1]["doing"]) == ("save", "saving")
    assert lines[2]["seconds"] >= 0 and lines[3]["to"] == 2


def test_a_console_without_a_reader_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        console = open_console(pipe)
        for _ in range(3):
            console.print("a line that nobody reads")
        assert console.quiet


@pytest.mark.parametrize("width", [120, 80, 40])
def test_a_table_never_breaks_inside_a_layout(width: int) -> None:
    layouts = ["w[V/tensor, D/fsdp]", "w[L, N/tensor, H, D/fsdp]", "w[L, D]"]
    columns = [
        *map(Column, ("parameter", "sharded", "gathered")),
        Column("bytes per device", "bytes"),
    ]
    rows = [
        [f"blocks.attention_{number}", layout, layout.replace("/fsdp", ""), (number + 1) * 2**10]
        for number, layout in enumerate(layouts)
    ]
    console = Console(file=io.StringIO(), width=width)
    print_table(console, Table(columns, rows))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    for number, layout in enumerate(layouts):
        name = f"blocks.attention_{number}"
        assert any(name in line for line in lines) and any(layout in line for line in lines)
        assert any(f"{number + 1} KiB" in line for line in lines)
    # The words of a heading stand above each other before the table is stacked.
    assert len(lines) == {120: 4, 80: 6, 40: 13}[width]
    assert any("parameter" in line for line in lines[:3]) == (width > 40)


def test_a_cell_that_is_wider_than_the_terminal_is_folded_below_its_heading() -> None:
    columns = [Column("plan"), Column("why not"), Column("step", "seconds")]
    console = Console(file=io.StringIO(), width=30)
    print_table(
        console,
        Table(
            columns, [["data=4,fsdp=16,tensor=4,context=2,stage=8", "it needs 97 GiB of 95", 1.35]]
        ),
    )
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split() == [
        "data=4,fsdp=16,tensor=4,contex", "t=2,stage=8", "why", "not", "it", "needs", "97", "GiB", "of", "95", "step",
        "1.35", "s",
    ]  # fmt: skip
