"""Tables of every verb in terminals of any width: no line is wider, and no layout or mesh breaks inside."""

import dataclasses
import io
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_checkpoint_verb import save

import meshwright as mw
from meshwright.api.benchmarks import print_timings
from meshwright.bench.microbenchmarks import CollectiveTiming
from meshwright.bench.step_profile import Profile, ProfileRow
from meshwright.cli.main import run
from meshwright.planner.forecast import ForecastGap
from meshwright.reporters.console import open_console
from meshwright.views.blocks import Column, Facts, Table
from meshwright.views.run_page import print_profile
from meshwright.views.run_tables import print_forecast_gaps, print_summary
from meshwright.views.terminal import text_of

WIDTHS = (30, 40, 80, 200)
WORD = re.compile(r"\w+\[[^\[\]]*\]|\b[a-z]+=\d+(?:,[a-z]+=\d+)*")
"""Layout of a tensor, or a mesh."""
SMALL = [
    "--model.width",
    "32",
    "--model.layers",
    "2",
    "--model.mlp",
    "64",
    "--seq",
    "32",
    "--batch",
    "8",
]


def test_a_terminal_without_a_size_gets_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    open_console().print("tiny on fsdp=2")
    assert capsys.readouterr().out == "tiny on fsdp=2\n"


def test_a_start_that_is_stopped_before_its_first_step_has_no_loss(tmp_path: Path) -> None:
    numbers = {field.name: 0 for field in dataclasses.fields(mw.Summary)}
    values = {**numbers, "loss": math.nan, "held_out_loss": None, "interrupted_by": 2}
    summary = mw.Summary(**{**values, "goodput": {}, "out": tmp_path, "sample": ""})  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), width=120)
    print_summary(console, summary)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "before its first step" in text
    assert "nan" not in text and "the end of the first step" not in text


VERBS: dict[str, list[str]] = {
    "show": ["show", "llama3-70b", "--mesh", "stage=2,fsdp=8,tensor=8"],
    "plan": ["plan", "tiny", "--on", "v5e:2x4", "--compare", "fsdp=8", "data=2,fsdp=2,tensor=2"],
    "plan, several": ["plan", "tiny", "--on", "v5e:2x2,h100:4"],
    "prove": ["prove", "tiny", *SMALL, "--mesh", "data=2,fsdp=2,tensor=2"],
    "doctor": ["doctor"],
}


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, io.StringIO]]:
    """What consoles print, as terminals of each width show it: the verb runs once."""
    shown = {width: io.StringIO() for width in WIDTHS}
    consoles = [Console(file=file, width=width, highlight=False) for width, file in shown.items()]
    own: Callable[..., None] = Console.print

    def each(console: Console, *objects: Any, **how: Any) -> None:
        own(console, *objects, **how)
        for other in consoles if not console.quiet and console not in consoles else ():
            own(other, *objects, **how)

    monkeypatch.setattr(Console, "print", each)
    yield shown
    monkeypatch.undo()


def check(shown: dict[int, io.StringIO]) -> None:
    words = set(WORD.findall(shown[200].getvalue()))
    for width, file in shown.items():
        text = file.getvalue()
        wide = [line for line in text.splitlines() if len(line.rstrip()) > width]
        assert not [line for line in wide if not line.startswith(("  fix:", "written:"))], width
        broken = [word for word in words if len(word) <= width - 4 and word not in text]
        assert not broken, (width, broken)


@pytest.mark.parametrize("verb", VERBS)
def test_tables_of_a_verb(verb: str, printed: dict[int, io.StringIO]) -> None:
    assert run(VERBS[verb]) in (0, 1)
    assert printed[80].getvalue()
    check(printed)


def test_tables_of_checkpoints(tmp_path: Path, printed: dict[int, io.StringIO]) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    for verb in (["list"], ["inspect"], ["verify"]):
        assert run(["checkpoint", *verb, str(tmp_path)]) == 0
    assert (
        "float32[3, 4]" in printed[30].getvalue()
        and "run.optimizer.learning_rate" in printed[40].getvalue()
    )
    check(printed)


def test_tables_of_measurements(printed: dict[int, io.StringIO]) -> None:
    rows = [
        ProfileRow("step", "whole step", 1.5, None),
        ProfileRow("collective", "reduce-scatter over data+fsdp+tensor", 0.25, 0.125),
        ProfileRow("scope", "transformer_layer/attention_with_a_long_name", 0.5, 0.5),
    ]  # fmt: skip
    profile = Profile(2, 3, tuple(rows), "a note that is long enough for two lines")
    print_profile(Console(file=io.StringIO()), dataclasses.asdict(profile))
    print_forecast_gaps(
        Console(file=io.StringIO()), [ForecastGap("exposed communication", 0.25, 0.5)]
    )
    timing = CollectiveTiming(
        "reduce-scatter", "data+fsdp", 8, 2**24, 0.0074, 10, 2.27e9, 2.27e9, True
    )
    print_timings(Console(file=io.StringIO()), [timing])
    check(printed)


@pytest.mark.parametrize("columns", [30, 40, 80, 200])
def test_recipes(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns and any(line.startswith("llama3-405b") for line in lines)
    alone = any(line.split() == ["llama3-405b", "406", "B"] for line in lines)
    assert alone == (columns <= 40)


def test_no_path_sets_a_table_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells and headings begin in the working directory or at `~`, in a terminal and on a page."""
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    cells = [f"{work}/runs/a", f"in {home}/data/x.txt, read", f"gs:/{work}/b", "w[D/fsdp]", None, 3]
    shown = ["runs/a", "in ~/data/x.txt, read", f"gs:/{work}/b", "w[D/fsdp]", None, 3]
    table = Table([Column("value"), Column(f"in {home}/runs")], [[cell, cell] for cell in cells])
    assert [row[0] for row in table.rows] == shown
    assert table.columns[1].heading == "in ~/runs"
    assert Facts([("out", f"{work}/runs/a")]).rows == [("out", "runs/a")]
    assert str(work) not in text_of(Table([Column("file")], [[f"{work}/runs/a"]]))
