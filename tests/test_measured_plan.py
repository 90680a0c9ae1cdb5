"""A traced run corrects the plan: kinds of a trace, the rates fitted to them, and plans with those rates."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_cli import SMALL, meshwright

from meshwright.api.measured import read_measured, require_model
from meshwright.bench.calibration_file import read_calibration
from meshwright.bench.device_trace import Event, Trace
from meshwright.bench.measured_kinds import KindsOfTrace, explain_differences, kinds_of_trace
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.targets import Target, parse_target
from meshwright.models.layer_facts import LayerSpec
from meshwright.planner.estimate import estimate
from meshwright.planner.forecast import calibrate_target
from meshwright.planner.step_kinds import (
    ATTENTION_MATMULS,
    ELEMENTS,
    EXPOSED,
    FEED_FORWARD_MATMULS,
    IDLE,
    KERNEL,
    MATMUL_KINDS,
    WAITING,
    MeasuredStep,
    StepRate,
    fit_rates,
    planned_kinds,
)
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run_file import run_to_dict, write_run
from xlacensus.hlo.parser import parse_module

H100 = parse_target("h100:8")


def placed_run(**degrees: int) -> PlacedRun:
    """Llama 3.2 1B on eight devices, by default with `fsdp`."""
    run = find_recipe("llama32-1b")
    model = dataclasses.replace(run.model, vocab=128256)
    mesh = MeshShape(**(degrees or {"fsdp": 8}))
    return place_run(dataclasses.replace(run, model=model, mesh=mesh))


def scaled(
    factors: Mapping[str, float], flops: float = 1.0, *, fused: bool = True, **degrees: int
) -> tuple[PlacedRun, MeasuredStep]:
    """A run, and a trace of it whose kinds take so many times what is planned on H100."""
    placed = placed_run(**degrees)
    planned = planned_kinds(estimate(placed, H100), fused_attention=fused)
    seconds = {kind: value * factors.get(kind, 1.0) for kind, value in planned.items()}
    return placed, MeasuredStep(seconds, 32.0, fused, {"bf16": flops})


def rates_of(rates: list[StepRate]) -> dict[str, float]:
    return {rate.name: rate.value for rate in rates if not rate.refused}


def test_kinds_add_up_to_the_planned_step() -> None:
    e = estimate(placed_run(), H100)
    for fused in (True, False):
        planned = planned_kinds(e, fused_attention=fused)
        assert sum(planned.values()) == pytest.approx(e.seconds)
    # Weights of Llama 3.2 1B: a feed-forward of 3 x 2048 x 8192, attention of 2048 x (2048 + 2 x 512 + 2048).
    fused = planned_kinds(e, fused_attention=True)
    assert fused[FEED_FORWARD_MATMULS] / fused[ATTENTION_MATMULS] == pytest.approx(
        3 * 8192 / (2 * 2048 + 2 * 512), rel=0.15
    )


@pytest.mark.parametrize(
    ("fused", "matmuls", "exposed"),
    [(True, 1.25, 1.1), (True, 1.25, 0.9), (False, 1.5, 1.1)],
)
def test_a_plan_with_the_measured_rates_has_the_measured_seconds(
    fused: bool, matmuls: float, exposed: float
) -> None:
    factors = dict.fromkeys(MATMUL_KINDS, matmuls)
    factors |= {KERNEL: 0.8, ELEMENTS: 1.2, EXPOSED: exposed}
    placed, measured = scaled(factors, fused=fused)
    rates = rates_of(fit_rates(placed, H100, measured, has_data_sheet=True))
    assert set(rates) == {"matmul", "attention", "hbm", "overlap"}
    calibration = {"device": "NVIDIA H100", "date": "2026-01-01", "step": {"rates": rates}}
    corrected = calibrate_target(H100, calibration)
    assert "traced steps" in corrected.efficiency_source
    planned = planned_kinds(estimate(placed, corrected), fused_attention=fused)
    for kinds in (MATMUL_KINDS, (KERNEL,), (ELEMENTS,), (EXPOSED,)):
        found = sum(planned[kind] for kind in kinds)
        assert found == pytest.approx(measured.of(kinds), rel=0.02), kinds
    assert sum(planned.values()) == pytest.approx(measured.step, rel=0.02)


def test_a_rate_of_too_little_time_is_not_taken() -> None:
    placed, measured = scaled({ELEMENTS: 1e-5})
    rates = {rate.name: rate for rate in fit_rates(placed, H100, measured, has_data_sheet=True)}
    assert not rates["hbm"].impossible
    assert (
        "less than the 5 ms" in rates["hbm"].refused and "trace more steps" in rates["hbm"].refused
    )
    assert not rates["matmul"].refused


def test_a_rate_above_the_data_sheet_is_not_taken() -> None:
    # Elementwise work ten times as fast as planned at 0.85 of the peak would be 8.5 of it.
    placed, measured = scaled({ELEMENTS: 0.1})
    rates = {rate.name: rate for rate in fit_rates(placed, H100, measured, has_data_sheet=True)}
    assert "would be 8.5" in rates["hbm"].refused
    # More FLOPs than the data sheet allows: the trace is not of complete steps.
    _, measured = scaled({}, flops=1e18)
    rates = {rate.name: rate for rate in fit_rates(placed, H100, measured, has_data_sheet=True)}
    assert rates["matmul"].impossible
    seconds = measured.of((*MATMUL_KINDS, KERNEL))
    assert f"{1e18 / seconds:.3g} FLOP/s" in rates["matmul"].refused


def test_more_exposed_communication_than_there_is_corrects_no_overlap() -> None:
    """Even without any overlap the plan has less of it: the links are slower, which overlap does not tell."""
    placed, measured = scaled({EXPOSED: 100.0})
    rates = {rate.name: rate for rate in fit_rates(placed, H100, measured, has_data_sheet=True)}
    assert "slower than planned" in rates["overlap"].refused
    assert not rates["matmul"].refused


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.3])
def test_exposed_communication_over_tensor_corrects_no_overlap(factor: float) -> None:
    """Its collectives follow `tensor_overlap`: 3 s of them are exposed, and `overlap` moves 20 us."""
    placed, measured = scaled({EXPOSED: factor}, tensor=8)
    rates = {rate.name: rate for rate in fit_rates(placed, H100, measured, has_data_sheet=True)}
    assert "such as those over `tensor`" in rates["overlap"].refused
    assert "slower" not in rates["overlap"].refused


def test_less_exposed_communication_than_without_any_that_overlaps_corrects_no_overlap() -> None:
    placed, measured = scaled({EXPOSED: 0.7})
    rates = {rate.name: rate for rate in fit_rates(placed, H100, measured, has_data_sheet=True)}
    assert "with an overlap of 1" in rates["overlap"].refused


def test_a_rate_of_matmuls_that_is_not_taken_takes_that_of_attention_along() -> None:
    placed, measured = scaled({}, flops=1e18, fused=False)
    rates = {rate.name: rate for rate in fit_rates(placed, H100, measured, has_data_sheet=True)}
    assert rates["matmul"].impossible
    assert rates["attention"].refused == rates["matmul"].refused


def step_of(placed: PlacedRun, **changes: Any) -> dict[str, Any]:
    step = {
        "rates": {"matmul": 5e14}, "refused": {}, "impossible": [], "target": "h100:1x8", "devices": 8,
        "mesh": "fsdp=8", "model": run_to_dict(placed.run)["model"], "seconds": 1.0, "unpriced_seconds": 0.1,
        "planned_seconds": 0.9,
    }  # fmt: skip
    return step | changes


def run_folder(folder: Path, **changes: Any) -> Path:
    """An output folder of a run on eight H100 with traced steps."""
    placed = placed_run()
    folder.mkdir()
    write_run(placed.run, folder / "run.json")
    calibration = {
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-01-01",
        "step": step_of(placed, **changes),
    }
    (folder / "calibration.json").write_text(json.dumps(calibration))
    return folder


@pytest.mark.parametrize(
    ("changes", "on", "differs"),
    [
        ({}, "v5p:2x2x2", "h100.*v5p|H100.*TPU v5p"),
        ({}, "h100:16", "8 devices, and h100:16 has 16"),
        ({"mesh": "fsdp=4,tensor=2"}, None, "mesh fsdp=4,tensor=2, and the run of .* has fsdp=8"),
        (
            {"impossible": ["matmul"], "refused": {"matmul": "1e18 FLOPs in 1 s"}},
            None,
            "above the data sheet: 1e18 FLOPs in 1 s",
        ),
    ],
)
def test_a_trace_of_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], on: str | None, differs: str
) -> None:
    folder = run_folder(tmp_path / "out", **changes)
    with pytest.raises(ConfigError, match=differs):
        read_measured(folder, on)


def test_a_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    measured = read_measured(run_folder(tmp_path / "out"), "h100:8")
    require_model(measured, measured.run)
    wider = dataclasses.replace(measured.run.model, width=4096)
    with pytest.raises(ConfigError, match="width 2048 in the trace and 4096 here"):
        require_model(measured, dataclasses.replace(measured.run, model=wider))


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--profile 10:13"):
        read_measured(tmp_path, None)


def test_plan_says_what_a_trace_changes(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "out")
    said = " ".join(meshwright("plan", "--measured", str(folder), "--shown", "1").split())
    assert "matmul 0.51 for 0.71" in said and "1 s measured, 900 ms was planned" in said
    refused = meshwright("plan", "--measured", str(folder), "--on", "v5p:2x2x1", code=2)
    assert "the trace is of NVIDIA H100 80GB HBM3" in refused and "--on h100:1x8" in refused


PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %both = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %up = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/feed-forward/dot"}
  %out = f32[8,8]{1,0} dot(%up, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/attention/dot"}
  %total = f32[8,8]{1,0} all-reduce(%out), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%sum
  ROOT %last = f32[8,8]{1,0} add(%total, %up)
}
"""  # noqa: E501


def test_the_kinds_of_a_trace_by_hand() -> None:
    """Two devices, of which the second is a straggler: it computes 1 s longer, for which the first waits."""
    devices = {
        "/device:GPU:0": [
            ("up", 0.0, 2.0),
            ("out", 2.0, 1.0),
            ("total", 3.0, 1.5),
            ("last", 4.5, 0.5),
        ],
        "/device:GPU:1": [
            ("up", 0.0, 3.0),
            ("out", 3.0, 1.0),
            ("total", 4.0, 0.5),
            ("last", 4.5, 0.5),
        ],
    }
    lanes = {
        name: [[Event(f"kernel_{op}", at, took, op == "total", op) for op, at, took in events]]
        for name, events in devices.items()
    }
    found = kinds_of_trace(
        Trace(lanes, []),
        parse_module(PROGRAM),
        [LayerSpec("blocks", attention_scope="attention", feed_forward_scope="feed-forward")],
        {"total": "all-reduce over data"},
        devices=2,
        local_devices=2,
        steps=1,
        seconds=6.0,
    )
    assert not found.notes
    expected = {
        FEED_FORWARD_MATMULS: 2.5,
        ATTENTION_MATMULS: 1.0,
        ELEMENTS: 0.5,
        EXPOSED: 0.5,
        WAITING: 0.5,
        IDLE: 1.0,
    }
    seconds = {kind: value for kind, value in found.step.seconds.items() if value}
    assert seconds == pytest.approx(expected)
    assert found.step.flops == {"bf16": 2 * 2 * 8**3} and not found.step.fused_attention
    planned = dict.fromkeys(found.step.seconds, 0.0) | {
        FEED_FORWARD_MATMULS: 2.5,
        ATTENTION_MATMULS: 1.0,
        ELEMENTS: 0.5,
    }
    host, straggler = explain_differences(found, planned | {EXPOSED: 0.4})
    assert host.startswith("idle: 1 s measured") and "the host" in host
    assert "straggler" in straggler and "/device:GPU:1 computes 12% longer" in straggler
    kernel, collective = explain_differences(
        found, planned | {FEED_FORWARD_MATMULS: 1.0, WAITING: 0.5, IDLE: 1.0, EXPOSED: 0.1}
    )
    assert "1.5 s more: kernels, the longest; up 2.5 s" in kernel
    assert "all-reduce over data 500 ms" in collective


LAYERS = [LayerSpec("blocks", attention_scope="attention", feed_forward_scope="feed-forward")]


def kinds_of_lanes(
    trace: Trace, *, devices: int = 2, local_devices: int = 2, seconds: float
) -> KindsOfTrace:
    """The kinds of one traced step of PROGRAM."""
    return kinds_of_trace(
        trace,
        parse_module(PROGRAM),
        LAYERS,
        {"total": "all-reduce over data"},
        devices=devices,
        local_devices=local_devices,
        steps=1,
        seconds=seconds,
    )


def lanes_of(*lanes: list[tuple[str, float, float]]) -> list[list[Event]]:
    return [[Event(op, at, took, op == "total", op) for op, at, took in lane] for lane in lanes]


def nonzero(found: KindsOfTrace) -> dict[str, float]:
    return {kind: value for kind, value in found.step.seconds.items() if value}


def test_exposed_communication_is_waits_and_transfers_in_their_proportion() -> None:
    """The first device waits 2 of its 4 s for the other, which transfers 2 s; each has 1 s exposed."""
    early = lanes_of([("up", 0.0, 5.0)], [("total", 2.0, 4.0)])
    late = lanes_of([("up", 0.0, 5.0)], [("total", 4.0, 2.0)])
    found = kinds_of_lanes(Trace({"/device:GPU:0": early, "/device:GPU:1": late}, []), seconds=6.0)
    # Of 6 s on both 2 are waits; of the 1 s exposed a third is.
    expected = {FEED_FORWARD_MATMULS: 5.0, WAITING: 1 / 3, EXPOSED: 2 / 3}
    assert nonzero(found) == pytest.approx(expected)
    assert dict(found.longest[EXPOSED]) == pytest.approx({"all-reduce over data": 2 / 3})
    assert dict(found.longest[WAITING]) == pytest.approx({"all-reduce over data": 1 / 3})


def test_operations_of_two_streams_share_their_time() -> None:
    """Both compute in the same second; in the next nothing does."""
    both = lanes_of([("up", 0.0, 1.0)], [("out", 0.0, 1.0)])
    trace = Trace({"/device:GPU:0": both, "/device:GPU:1": both}, [])
    found = kinds_of_lanes(trace, seconds=2.0)
    expected = {FEED_FORWARD_MATMULS: 0.5, ATTENTION_MATMULS: 0.5, IDLE: 1.0}
    assert nonzero(found) == pytest.approx(expected)
    assert dict(found.longest[FEED_FORWARD_MATMULS]) == pytest.approx({"up": 0.5})
    (note,) = found.notes
    assert "each counts 0.50 of its seconds" in note


def test_kinds_of_threads_that_share_cores_are_scaled_with_their_operations() -> None:
    threads = lanes_of([("up", 0.0, 3.0), ("last", 3.0, 1.0)])
    found = kinds_of_lanes(Trace({}, [*threads, *threads]), seconds=2.0)
    assert nonzero(found) == pytest.approx({FEED_FORWARD_MATMULS: 1.5, ELEMENTS: 0.5})
    assert dict(found.longest[FEED_FORWARD_MATMULS]) == pytest.approx({"up": 1.5})
    (note,) = found.notes
    assert "4 s of a device in a step of 2 s" in note and "0.50 of its seconds" in note


def test_waits_for_devices_that_a_trace_does_not_have_correct_no_communication() -> None:
    lanes = lanes_of([("up", 0.0, 2.0), ("total", 2.0, 1.0)])
    trace = Trace({"/device:GPU:0": lanes, "/device:GPU:1": lanes}, [])
    found = kinds_of_lanes(trace, devices=8, seconds=3.0)
    (note,) = found.notes
    assert "6 devices of other processes" in note
    assert found.step.devices_elsewhere == 6
    placed, measured = scaled({EXPOSED: 1.1})
    elsewhere = dataclasses.replace(measured, devices_elsewhere=6)
    for has_data_sheet, name in ((True, "overlap"), (False, "links")):
        rates = fit_rates(placed, H100, elsewhere, has_data_sheet=has_data_sheet)
        refused = {rate.name: rate.refused for rate in rates}
        assert "6 devices of other processes" in refused[name]
        assert not refused["matmul"]


def test_threads_of_simulated_devices_are_those_of_this_process() -> None:
    """Two of the four devices are of another process: their threads are in no trace of this one."""
    thread = lanes_of([("up", 0.0, 3.0)])
    trace = Trace({}, [*thread, *thread])
    found = kinds_of_lanes(trace, devices=4, seconds=4.0)
    assert nonzero(found) == pytest.approx({FEED_FORWARD_MATMULS: 3.0, IDLE: 1.0})
    assert found.step.traced == 2


def test_a_run_on_this_machine_corrects_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(cache))
    known = cache / "calibration" / "cpu.json"
    known.parent.mkdir(parents=True)
    matmul = {
        "m": 512,
        "k": 512,
        "n": 512,
        "dtype": "float32",
        "seconds": 1e-3,
        "flops_per_second": 1e13,
    }
    known.write_text(
        json.dumps(
            {"device": "cpu", "date": "2026-01-01", "matmuls": [matmul], "memory_bandwidth": 1e12}
        )
    )
    words = [
        *SMALL,
        "--mesh",
        "fsdp=2",
        "--devices",
        "2",
        "--data.sample",
        "0",
        "--steps",
        "6",
        "--profile",
        "3:6",
    ]
    said = " ".join(meshwright("train", "--out", str(out), *words).split())
    assert "measured rates of a device: " in said and f"meshwright plan --measured {out}" in said
    profile = json.loads((out / "profile.json").read_text())
    kinds = {row["name"]: row for row in profile["rows"] if row["kind"] == "kind"}
    step = profile["rows"][0]
    assert sum(row["measured"] for row in kinds.values()) == pytest.approx(step["measured"])
    assert sum(row["planned"] for row in kinds.values()) == pytest.approx(step["planned"])
    assert len(profile["differences"]) == 2
    # The rates that were made up plan a step of microseconds; those of the trace plan what was measured.
    traced = read_calibration(out / "calibration.json")["step"]
    assert traced["planned_seconds"] < 0.05 * traced["seconds"]
    record = json.loads(meshwright("plan", "--measured", str(out), "--json"))["measured"]["traced"]
    priced = traced["seconds"] - traced["unpriced_seconds"]
    assert record["planned_seconds"] == pytest.approx(priced, rel=0.1)


def test_a_target_keeps_what_the_trace_does_not_say() -> None:
    calibration = {"device": "TPU v5p", "date": "2026-01-01", "step": {"rates": {"overlap": 0.0}}}
    v5p = parse_target("v5p:2x2x1")
    corrected: Target = calibrate_target(v5p, calibration)
    assert corrected.efficiency == dataclasses.replace(v5p.efficiency, overlap=0.0)
