"""Hosts, memory and data of a run: what the loop records of them, and what the page makes of a folder with known numbers."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_data import blocks_of
from written_run import (
    AWAY,
    BATCH,
    BEGIN,
    GIB,
    SEQ,
    SERIES,
    SPIKE,
    STEPS,
    WARNING,
    health_of,
    time_of,
    write_run,
)

from meshwright.errors import CheckpointError
from meshwright.monitoring import processes
from meshwright.monitoring.host import process_memory
from meshwright.monitoring.processes import keeping_processes
from meshwright.signs import WORK, Phases, waiting
from meshwright.views import run_page
from meshwright.views.run_folder import RunFolder, open_folders
from meshwright.views.run_hosts import host_blocks, memory_blocks


def opened(folder: Path) -> RunFolder:
    read = RunFolder(folder)
    read.refresh()
    return read


def cells_of(table: Any) -> list[dict[str, Any]]:
    """Returns the rows of a table by heading."""
    headings = [column.heading for column in table.columns]
    return [dict(zip(headings, row, strict=True)) for row in table.rows]


def page_of(*folders: Path) -> dict[str, Any]:
    return run_page.run_page([opened(folder) for folder in folders]).to_json()


def test_the_sections_stand_in_the_order_of_a_watcher(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    titles = [section["title"] for section in page["sections"]]
    wanted = ["Overview", "Health", "Goodput", "Hosts", "Machines", "Data", "Curves", "Memory"]
    assert titles[: len(wanted)] == wanted
    assert page["tab"].startswith(f"step {STEPS}, loss ")


def test_each_host_has_a_row_with_its_age_its_seconds_and_its_machine(tmp_path: Path) -> None:
    folder = opened(write_run(tmp_path / "run"))
    [table] = host_blocks(folder, time_of(STEPS) + 5, "Hosts")
    first, second = cells_of(table)
    assert (first["host"], first["last sign"], second["last sign"]) == ("node0", 5.0, 605.0)
    # The first waits half a second for the second, which waits that long for its data.
    assert first["waits for others"] == pytest.approx(0.5)
    assert second["waits for others"] == 0.0
    assert (first["data"], second["data"]) == (0.01, 0.51)
    assert (first["step"], first["own work"], first["save"]) == (1.98, 0.02, 4.0)
    assert not first["its machine"] and second["its machine"].endswith(WARNING)
    assert table.tones == ["", "bad"]  # type: ignore[attr-defined]


def test_an_old_warning_does_not_mark_its_host(tmp_path: Path) -> None:
    out = write_run(tmp_path / "run")
    table = json.loads((out / "processes.json").read_text())
    days_later = time_of(STEPS) + 3 * 86400
    for row in table["processes"]:
        row["seen"] = days_later
    (out / "processes.json").write_text(json.dumps(table))
    [block] = host_blocks(opened(out), days_later, "")
    assert cells_of(block)[1]["its machine"].startswith("3 d")
    assert block.tones == ["", ""]  # type: ignore[attr-defined]


def test_a_run_that_is_over_has_no_ages(tmp_path: Path) -> None:
    out = write_run(tmp_path / "run")
    with (out / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time_of(STEPS), "step": STEPS, "event": "end"}) + "\n")
    [table] = host_blocks(opened(out), time_of(STEPS) + 9e5, "Hosts")
    assert [row["last sign"] for row in cells_of(table)] == [None, None]


def test_memory_is_held_against_capacity_and_plan(tmp_path: Path) -> None:
    devices, hosts = memory_blocks(opened(write_run(tmp_path / "run")), "")
    rows = cells_of(devices)
    assert len(rows) == 16 and rows[0]["host"] == "node1"  # the fullest first
    assert (rows[0]["highest"], rows[0]["capacity"]) == (79 * GIB, 80 * GIB)
    assert rows[0]["planned by the compiler"] == 60 * GIB
    assert cells_of(hosts)[0]["share"] == 0.02


def test_devices_without_memory_are_said_once(tmp_path: Path) -> None:
    out = write_run(tmp_path / "run")
    table = json.loads((out / "processes.json").read_text())
    for row in table["processes"]:
        row["devices"] = [{"device": 0, "kind": "cpu", "peak": None, "limit": None}] * 4
    (out / "processes.json").write_text(json.dumps(table))
    page = page_of(out)
    [memory] = [section for section in page["sections"] if section["title"] == "Memory"]
    assert [block["block"] for block in memory["blocks"]] == ["Text", "Table"]
    # Four simulated devices of a process have four times the arrays of one.
    assert 4 * 60 * GIB in memory["blocks"][1]["rows"][0]


def test_a_run_of_an_earlier_version_says_what_is_missing(tmp_path: Path) -> None:
    out = write_run(tmp_path / "run")
    (out / "processes.json").unlink()
    titles = {section["title"]: section for section in page_of(out)["sections"]}
    assert "left no processes.json" in json.dumps(titles["Hosts"])
    assert "Memory" not in titles


def test_the_place_in_the_data(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    [data] = [section for section in page["sections"] if section["title"] == "Data"]
    figures, table = data["blocks"]
    tokens, epoch = figures["items"]
    assert (tokens["value"], tokens["detail"]) == ("1.64 M", "of 2.05 M: 80.0%")
    # A quarter of 12,800 samples, of 2,000 in a pass.
    assert epoch["value"] == "1.6"
    web, code = table["rows"]
    assert code == ["code.jsonl", 0.25, STEPS * BATCH * SEQ * 0.25, 2000 * SEQ, 1.6]
    assert web[-1] == pytest.approx(STEPS * BATCH * 0.75 / 50_000)


def test_curves_have_their_steps_in_tokens_and_hours(tmp_path: Path) -> None:
    folder = opened(write_run(tmp_path / "run"))
    page = run_page.run_page([folder]).to_json()
    [choice] = [block for block in blocks_of(page) if block["block"] == "AxisChoice"]
    assert [axis["label"] for axis in choice["axes"]] == ["step", "tokens", "hours"]
    for step in (1, 400, 401, STEPS):
        tokens, hours = (choice["scales"][name]["run"] for name in ("tokens", "hours"))
        at_tokens = np.interp(step, tokens["steps"], tokens["values"])
        at_hours = np.interp(step, hours["steps"], hours["values"])
        assert at_tokens == step * BATCH * SEQ
        assert at_hours == pytest.approx((time_of(step) - BEGIN) / 3600, abs=1e-3)
    # Tokens are a line; of hours the hour between two steps is a corner.
    assert [len(choice["scales"][name]["run"]["steps"]) for name in ("tokens", "hours")] == [2, 4]
    assert time_of(401) - time_of(400) > AWAY
    charts = [block for block in blocks_of(page) if block["block"] == "Chart"]
    assert {chart["across"] for chart in charts} == {choice["link"]}
    assert all(series["run"] == "run" for chart in charts for series in chart["series"])


def test_an_axis_is_offered_only_where_every_run_has_it(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second")
    lines = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["tokens"]
    (second / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    [choice] = [block for block in blocks_of(page_of(first, second)) if "scales" in block]
    assert list(choice["scales"]) == ["hours"]


def test_runs_in_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / run / "out") for run in ("first", "second")]
    page = run_page.run_page(open_folders(paths)).to_json()
    [choice] = [block for block in blocks_of(page) if "scales" in block]
    assert list(choice["scales"]["hours"]) == [str(path) for path in paths]
    text = json.dumps(page["sections"][0])
    assert all(str(path) in text for path in paths)


def test_norms_per_layer_are_those_of_all_tensors_of_a_layer(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    [health] = [section for section in page["sections"] if section["title"] == "Health"]
    outlier, table, *pictures = health["blocks"]
    assert f"step {SPIKE}" in json.dumps(outlier) and "layer 2" in json.dumps(outlier)
    assert [block["block"] for block in pictures] == ["Health"] * 3
    values = health_of(STEPS)
    norms = {}
    start = 0
    for series in SERIES:
        norms[series.figure, series.tensor] = values[start : start + series.size]
        start += series.size
    headings = [column["heading"] for column in table["columns"]]
    for layer, row in enumerate(table["rows"][:4]):
        cells = dict(zip(headings, row, strict=True))
        for figure in ("gradient norm", "parameter norm", "update norm"):
            query, up = (norms[figure, f"blocks.{name}"][layer] for name in ("query", "up"))
            assert cells[figure] == pytest.approx(np.hypot(query, up), rel=0.01)
        relative = cells["update norm"] / cells["parameter norm"]
        assert cells["update / parameter"] == pytest.approx(relative, rel=1e-5)


def test_layers_without_an_update_have_no_relative_one(tmp_path: Path) -> None:
    """A header may name other layers for one figure than for another: the page is shown all the same."""
    out = write_run(tmp_path / "run")
    text = (out / "health.jsonl").read_text()
    renamed = text.replace('"update norm", "embed"', '"update norm", "other"')
    assert renamed != text
    (out / "health.jsonl").write_text(renamed)
    titles = [section["title"] for section in page_of(out)["sections"]]
    assert "Health" in titles


# What is recorded


def test_phases_have_the_median_of_their_last_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("meshwright.signs.time.monotonic", lambda: now[0])
    phases = Phases()
    assert phases.usual_seconds("step") is None
    for step in range(300):
        phases.enter("data", step)
        now[0] += 0.25
        phases.enter("step", step + 1)
        with waiting("the devices"):
            now[0] += 1.5
        now[0] += 100.0 if step == 290 or step < 150 else 0.5
    assert phases.usual_seconds("data") == 0.25
    assert phases.usual_seconds(WORK) == 0.5
    assert phases.usual_seconds("step") == 2.0  # neither the stall nor what is long past


@pytest.mark.parametrize(("limit", "total"), [("max", 2048), ("1048576", 1024)])
def test_memory_of_a_process_is_that_of_its_container(
    tmp_path: Path, limit: str, total: int
) -> None:
    files = {
        "proc/self/status": "Name:\tpython\nVmHWM:\t     512 kB\nVmRSS:\t 100 kB\n",
        "proc/meminfo": "MemTotal:   2048 kB\nMemFree: 1 kB\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert process_memory(tmp_path) == (512 * 1024, total * 1024)
    assert process_memory(tmp_path / "absent") is None


class Store:
    """Key-value store of JAX's coordination service, with the row of another process."""

    def __init__(self) -> None:
        self.texts = {"meshwright/processes/1": json.dumps({"process": 1, "host": "b", "beat": 7})}

    def key_value_set(self, key: str, value: str, overwrite: bool) -> None:
        self.texts[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [item for item in self.texts.items() if item[0].startswith(folder)]


def table_of(out: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((out / "processes.json").read_text())
    return table


def test_the_table_has_all_processes_and_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that gives no further row keeps the time at which its last one came."""
    monkeypatch.setattr(processes, "PERIOD", 0.05)
    store, phases = Store(), Phases()
    file = tmp_path / "processes.json"

    def wait_for(beat: int) -> dict[str, Any]:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if file.exists() and table_of(tmp_path)["processes"][0]["beat"] >= beat:
                return table_of(tmp_path)
            threading.Event().wait(0.01)
        raise AssertionError("no table")

    with keeping_processes(tmp_path, phases, store, lambda action: None):
        first = wait_for(1)
        size = file.stat().st_size
        phases.enter("data", 12)
        later = wait_for(first["processes"][0]["beat"] + 3)
    assert [row["host"] for row in later["processes"]][1] == "b"
    assert later["processes"][1]["seen"] == first["processes"][1]["seen"]
    assert later["processes"][0]["seen"] > first["processes"][0]["seen"]
    last = table_of(tmp_path)["processes"][0]
    assert (last["step"], last["phase"]) == (12, "data")
    assert last["memory"] is None or last["memory"][0] > 2**20
    assert file.stat().st_size < 2 * size


def test_nothing_is_written_where_the_folder_is_another(tmp_path: Path) -> None:
    def gone(action: str) -> None:
        raise CheckpointError(action, "another folder is in its place", "mount it again")

    with keeping_processes(tmp_path, Phases(), None, gone):
        pass
    assert not list(tmp_path.iterdir())
