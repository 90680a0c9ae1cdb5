"""The hardware benchmark: every section on simulated devices, faults that are planted, runs that are killed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from test_cli import meshwright

from meshwright.bench.calibration_file import read_calibration
from meshwright.bench.device_trace import (
    DeviceTime,
    Event,
    collective_names,
    device_time,
    innermost,
    read_trace,
)
from meshwright.bench.hardware import run
from meshwright.bench.hardware.kernels import (
    Case,
    _time_grouped,
    attention_inputs,
    calibrated_rates,
)
from meshwright.bench.hardware.section import (
    DONE,
    FAILED,
    OUT_OF_TIME,
    RUNNING,
    Request,
    read_section,
    section_file,
)
from meshwright.cli.main import run as command
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.mesh import build_mesh
from meshwright.hardware.targets import parse_target
from meshwright.models.kernels.attention import reference_attention, sequence_positions
from meshwright.planner.forecast import calibrate_target, local_target
from meshwright.plugins import PARTS, load_file
from meshwright.trust import own
from meshwright.views.hardware_report import report_page
from xlacensus.compilation import compile_function
from xlacensus.hlo.buffers import union

BENCH = Path(__file__).parents[1] / "bench"
sys.path.append(str(BENCH))
from hardware import experts, kernels, steps  # noqa: E402
from hardware.steps import RECIPES, fit_recipe  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")

PLANTED = """
import dataclasses, os, time
from pathlib import Path

from meshwright.plugins import resolve

def _shifted(q, k, v, segments, /, *, window):
    out = resolve("attention kernel", "reference")(512).self_attention(q, k, v, segments, window=window)
    return out * 1.02

broken = dataclasses.replace(resolve("attention kernel", "reference")(512), name="broken", self_attention=_shifted)

def failing(section):
    section.measure({"good": lambda: {"value": 1}, "bad": lambda: 1 / 0, "after": lambda: {"value": 2}})

def raising(section):
    raise KeyError("planted")

def aborting(section):
    section.measure({"first": lambda: {"value": 1}})
    os.abort()

def hanging(section):
    def hang():
        time.sleep(600)
    section.measure({"first": lambda: {"value": 1}, "second": hang})

def waiting(section):
    def wait():
        (section.folder / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    section.measure({"first": lambda: {"value": 1}, "second": wait})
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    file = tmp_path / "planted.py"
    file.write_text(PLANTED)
    return file


def hardware(out: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Runs the verb and returns its report."""
    meshwright("bench", "hardware", "--out", str(out), *words, code=code)
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def test_sections_fail_alone_and_the_report_has_the_others(planted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    only = ["matmuls", *(f"{planted}:{name}" for name in ("failing", "raising", "aborting"))]
    report = hardware(out, "--minutes", "2", "--devices", "2", "--only", *only, code=5)
    assert not report["problems"] and len(report["unfinished"]) == 3
    machine, matmuls, failing, raising, aborting = report["sections"].values()
    assert machine["facts"]["devices"] == 2 and "simulated devices" in machine["notes"][0]
    assert matmuls["state"] == DONE and all(row.get("correct", True) for row in matmuls["rows"])
    assert failing["state"] == FAILED and "bad: raised ZeroDivisionError" in failing["message"]
    assert [row["item"] for row in failing["rows"]] == ["good", "bad", "after"]
    assert raising["state"] == FAILED and "raised KeyError: 'planted'" in raising["message"]
    assert aborting["state"] == FAILED and "signal SIGABRT" in aborting["message"]
    assert [row["value"] for row in aborting["rows"]] == [1]
    page = (out / "report.html").read_text()
    assert "3 sections not finished" in page and "ZeroDivisionError" in page and "Matmuls" in page
    # The calibration is one that forecasts take.
    calibration = read_calibration(out / "calibration.json")
    known = local_target(jax.devices()[:2], calibration)
    assert known is not None and known[0].devices == 2


def test_a_killed_run_keeps_what_it_had(planted: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "out", f"{planted}:waiting"
    words = ["bench", "hardware", "--out", str(out), "--devices", "1", "--only", name]
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", *words], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (out / "pid").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    child = Path("/proc") / (out / "pid").read_text()
    while child.exists() and "Z (zombie)" not in (child / "status").read_text():
        assert time.monotonic() < deadline, "the section outlives the benchmark"
        time.sleep(0.05)
    before = read_section(out, name)
    assert (
        before is not None
        and before["state"] == RUNNING
        and [r["item"] for r in before["rows"]] == ["first"]
    )


def test_a_section_that_hangs_is_stopped(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_GRACE_SECONDS", 6.0)
    name = own(f"{planted}:hanging")
    request = Request(str(tmp_path), 1)
    result = run.run_sections(request, (name,), 0.2, lambda name, result: None)[name]
    assert result["state"] == OUT_OF_TIME and "stopped after" in result["message"]
    assert [row["value"] for row in result["rows"]] == [1]


def test_unknown_sections_and_illegal_numbers_are_refused(tmp_path: Path) -> None:
    words = ["bench", "hardware", "--out", str(tmp_path / "out")]
    for wrong, message in (
        (["--only", "kernel"], "did you mean 'kernels'"),
        (["--minutes", "0"], "--minutes 10"),
    ):
        with pytest.raises(ConfigError, match=message):
            command([*words, *wrong])
    assert run.check_sections(("matmuls", "kernels")) == ("machine", "kernels", "matmuls")


def test_a_broken_kernel_is_found(planted: Path) -> None:
    case = dataclasses.replace(kernels.correctness_cases("cpu")[-1], seq=32, window=11)
    for name, wrong in ((own(f"{planted}:broken"), True), ("reference", False)):
        for dtype in ("float32", "bfloat16"):
            row = kernels.compare(name, case, dtype)
            assert bool(row["problems"]) == wrong, row
    assert "TPU kernel" in kernels.compare("splash", case, "float32")["unsupported"]


def test_the_float64_truth_agrees_with_automatic_differentiation() -> None:
    case = Case("", 24, 4, 2, 8, window=7, documents=3, batch=2)
    q, k, v, s, g = attention_inputs(case, "float32")
    positions = sequence_positions(s)
    out, pullback = jax.vjp(
        lambda *qkv: reference_attention(*qkv, positions, positions, window=7), q, k, v
    )
    found = (out, *pullback(g))
    truth = kernels.attention_with_gradients(*(np.asarray(x) for x in (q, k, v, s, g)), 7)
    for result, expected in zip(found, truth, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_grouped_matmul_is_compared_and_timed() -> None:
    assert not kernels.compare_grouped("bfloat16")["problems"]
    row = _time_grouped(4, 64, 32, 16)
    assert row["seconds"] > 0 and row["flops_per_second"] == pytest.approx(
        3 * 2 * 64 * 32 * 16 / row["seconds"]
    )


def test_kernels_calibrate_plans() -> None:
    rows = [
        {"kernel": "splash", "flops_per_second": 2e14},
        {"kernel": "splash", "flops_per_second": 1e14},
        {"kernel": "reference", "flops_per_second": 9e14},
        {"kernel": "grouped matmul", "flops_per_second": 3e14, "of_dense": 0.25},
    ]
    rates = calibrated_rates(rows, ("splash",))
    target = parse_target("v5p:2x2x2")
    calibration = {"device": "TPU v5p", "date": "2026-11-22", **rates}
    efficiency = calibrate_target(target, calibration).efficiency
    # The same seconds: 3.5 forward passes of work measured, 4.5 counted.
    assert efficiency.attention == pytest.approx(2e14 * 4.5 / 3.5 / target.chip.flops_bf16)
    assert efficiency.grouped_matmul == 0.25 and efficiency.matmul == target.efficiency.matmul


def test_exposed_time_of_a_device() -> None:
    # Two streams of a GPU: 3 s of a collective, one of which overlaps with computation; 1 s idle at the end.
    compute = [Event("gemm", 0.0, 2.0, False), Event("gemm", 5.0, 1.0, False)]
    network = [Event("ncclDevKernel_AllGather", 1.0, 3.0, True)]
    assert device_time("gpu", [compute, network]) == DeviceTime("gpu", 6.0, 3.0, 3.0, 2.0, 1.0)
    # One lane of a TPU: a loop contains its body, and only what is inside counts.
    lane = [
        Event("while", 0.0, 4.0, False),
        Event("fusion", 0.0, 3.0, False),
        Event("all-gather-done", 3.0, 1.0, True),
    ]
    assert [event.name for event in innermost(lane)] == ["fusion", "all-gather-done"]
    assert device_time("tpu", [lane]) == DeviceTime("tpu", 4.0, 3.0, 1.0, 1.0, 0.0)
    assert union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)]) == [(0.0, 2.0), (3.0, 4.0)]


def test_a_trace_of_simulated_devices_has_no_device_lanes(tmp_path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    spec = jax.sharding.PartitionSpec("fsdp")
    x = jax.device_put(jnp.ones((64, 64)), jax.sharding.NamedSharding(mesh, spec))
    function = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x @ x.T, "fsdp"), mesh=mesh, in_specs=spec,
                                     out_specs=jax.sharding.PartitionSpec()))  # fmt: skip
    program = compile_function(function, x)
    assert len(collective_names(program.module)) == 1
    jax.block_until_ready(program.executable(x))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(program.executable(x))
    trace = read_trace(tmp_path, program.module)
    assert not trace.devices and any(
        event.communicates for lane in trace.host for event in innermost(lane)
    )


@pytest.mark.parametrize("machine", ["h200:1", "h100:8", "v5e:2x4", "v5p:2x2x1"])
def test_recipes_are_cut_until_they_fit_memory_and_time(machine: str) -> None:
    target = parse_target(machine)
    for name in ("small", "dense"):
        sized = fit_recipe(name, target, 60.0)
        assert (
            sized.plan is not None
            and sized.plan.estimate.fits
            and sized.plan.estimate.seconds < 60 / 20
        )
        assert sized.run.mesh is not None and sized.run.mesh.size == target.devices
    assert fit_recipe("dense", target, 60.0, layers=2).note.startswith("2 of 32 layers")
    assert set(RECIPES) == {"small", "dense", "experts", "long"}


def test_an_exchange_that_loses_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, exchange = build_mesh(MeshShape(expert=2), jax.devices()[:2]), experts.ragged_all_to_all
    assert not experts._exchange(mesh, 2, 1, 16, 4, None)["problems"]
    monkeypatch.setattr(experts, "ragged_all_to_all", lambda *args: exchange(*args).at[1].set(0))
    assert len(experts._exchange(mesh, 2, 1, 16, 4, None)["problems"]) == 2


def test_over_nodes_rows_go_between_these_and_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight devices in two nodes: one update per node, and inside for each of the two experts of a device."""
    target, rows = dataclasses.replace(parse_target("h100:8"), topology=(2, 4)), dict[str, Any]()
    monkeypatch.setattr(experts, "target_here", lambda folder: target)
    section = SimpleNamespace(
        folder=None, measure=lambda items: rows.update({k: run() for k, run in items.items()})
    )
    experts.measure_experts(section)  # type: ignore[arg-type]
    assert [row["updates"] for row in rows.values()] == [1, 1, 2]
    assert next(iter(rows)).startswith("between nodes") and not any(
        row["problems"] for row in rows.values()
    )


def test_nothing_fits_a_small_device() -> None:
    with pytest.raises(ConfigError, match="not even one layer"):
        fit_recipe("experts", parse_target("v5e:1x1"), 60.0)


SCRIPTS = {
    "kernels": f"{BENCH}/hardware/kernels.py:compare_kernels",
    "experts": f"{BENCH}/hardware/experts.py:measure_experts",
    "steps": f"{BENCH}/hardware/steps.py:measure_steps",
    "checkpoint": f"{BENCH}/hardware/steps.py:measure_checkpoint",
    "meshes": f"{BENCH}/hardware/meshes.py:measure_meshes",
}
"""Sections of the repository, which are named as a user names one."""


@pytest.mark.exhaustive
def test_the_whole_verb_on_eight_devices(planted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["bench", "hardware", "--out", str(out), "--minutes", "8"]
    words += ["--only", *list(run.SECTIONS)[1:], *SCRIPTS.values()]
    words += ["--kernels", f"{planted}:broken"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 6, done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    sections = report["sections"]
    assert list(sections) == [*run.SECTIONS, *SCRIPTS.values()]
    assert report["problems"] and all("broken" in problem for problem in report["problems"])
    right = [row for row in sections[SCRIPTS["kernels"]]["rows"] if "broken" not in row["kernel"]]
    assert not any(row.get("problems") for row in right)
    repeated, *compared = sections[SCRIPTS["meshes"]]["rows"]
    assert repeated["bits"] == "equal in two runs"
    assert all(row.get("first_divergence") is None for row in compared)
    kinds = {row["kind"] for row in sections["collectives"]["rows"]}
    assert {"all-gather", "reduce-scatter", "all-to-all"} <= kinds
    for row in sections[SCRIPTS["experts"]]["rows"]:
        assert row["seconds"] > 0 and row["expected_seconds"] > 0
    dense = next(row for row in sections[SCRIPTS["steps"]]["rows"] if row["item"] == "dense")
    for figure in ("compile_seconds", "init_seconds", "first_step_seconds", "bare_seconds", "loop_seconds",
                   "dispatch_seconds", "tokens_per_second", "predicted_seconds", "simulated_seconds"):  # fmt: skip
        assert dense[figure] > 0, figure
    assert dense["data_wait_seconds"] >= 0
    saved = sections[SCRIPTS["checkpoint"]]["rows"][0]
    assert saved["save_bandwidth"] > 0 and saved["restore_bandwidth"] > 0
    assert not list(out.glob("checkpoint-bench*"))
    page = (out / "report.html").read_text()
    for heading in ("Overview", "Machine", "Kernels", "Bandwidth", "planned / measured"):
        assert heading in page
    # The report is made again from the files alone.
    results = {name: json.loads(section_file(out, name).read_text()) for name in sections}
    assert report_page(results).html() == page
    console = Console(record=True, width=200)
    report_page(results).print(console)
    assert "wrong results" in console.export_text()


def test_every_section_of_the_repository_is_named_where_it_can_be_read() -> None:
    """Each script says its own command, the page of the verb names it, and the command's function is there."""
    page = (BENCH.parent / "docs/verbs/bench.md").read_text()
    for name, place in SCRIPTS.items():
        file, function = place.split(":")
        command = f"bench/hardware/{Path(file).name}:{function}"
        assert command in Path(file).read_text() and command in page, name
        assert callable(getattr(load_file(own(file)), function))


def test_the_lines_of_a_step_say_what_was_predicted() -> None:
    row = {"item": "dense", "loop_seconds": 0.2, "mfu": 0.4, "predicted_seconds": 0.1}
    text = steps._summary({**row, "simulated_seconds": None})
    assert text == "dense 200 ms, MFU 40.0%, planned / measured 0.50"


def test_a_section_ends_with_its_parent() -> None:
    script = "import os, time\nfrom meshwright.bench.hardware.section import end_with_parent\nend_with_parent()\n"
    script += "print(os.getpid(), flush=True)\ntime.sleep(100)"
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {script!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_every_kernel_is_measured_with_the_shapes_that_the_page_names() -> None:
    names = [case.name for case in kernels.correctness_cases("tpu")]
    assert {"GQA", "window", "documents", "head 64", "T 8192"} <= set(names)
    assert "reference" in PARTS["attention kernel"]
