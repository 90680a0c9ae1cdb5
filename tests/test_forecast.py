"""Rehearsed runs and forecasts: small versions of a run, and predicted against measured steps on local devices."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from test_cli import in_process, meshwright
from test_plan import placed_recipe
from tiny_runs import MODELS, tiny_run

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.chips import Nodes
from meshwright.hardware.targets import parse_target
from meshwright.planner.estimate import estimate
from meshwright.planner.forecast import calibrate_target, forecast_gaps, forecast_step, local_target
from meshwright.planner.shrink import shape_within, shrink
from meshwright.runs.placed_run import place_run
from meshwright.runs.recipe import find_recipe


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama3-70b", "fsdp=4,tensor=8"), ("llama3-405b", "stage=4,fsdp=2,tensor=4"), ("gpt2-xl", "data=2,fsdp=4"),
        ("mixtral-8x7b", "fsdp=2,expert=4,tensor=2"), ("qwen2-7b", "data=2,fsdp=2,tensor=4"),
        ("llama31-8b", "fsdp=2,context=4,tensor=2"), ("mistral-7b", "data=2*2,fsdp=4"),
    ],
)  # fmt: skip
def test_a_shrunken_run_fits_where_the_real_one_does(name: str, mesh: str) -> None:
    shape = MeshShape.parse(mesh)
    run = dataclasses.replace(find_recipe(name), mesh=shape)
    small = shrink(run, shape, 4)
    placed = place_run(small)
    assert small.model.width <= 512 and small.training.steps == 4
    assert small.model.layers % shape.stage == run.model.layers % shape.stage
    assert type(small.model) is type(run.model) and placed.run.layout == place_run(run).run.layout


def test_a_run_that_does_not_fit_cannot_be_rehearsed() -> None:
    run = dataclasses.replace(find_recipe("llama3-8b"), mesh=MeshShape(tensor=3))
    with pytest.raises(ConfigError):
        shrink(run, MeshShape(tensor=3), 4)


@pytest.mark.parametrize(
    ("mesh", "most", "smaller"),
    [("fsdp=512,tensor=8", 32, "fsdp=4,tensor=8"), ("stage=4,data=2,tensor=2", 16, "stage=4,data=2,tensor=2"),
     ("data=4*8,fsdp=8", 32, "data=4*2,fsdp=4")],
)  # fmt: skip
def test_a_large_mesh_keeps_its_axes(mesh: str, most: int, smaller: str) -> None:
    found = shape_within(MeshShape.parse(mesh), most)
    assert found.size <= most
    assert {a for a, n in found.degrees().items() if n > 1} == {
        a for a, n in MeshShape.parse(mesh).degrees().items() if n > 1
    }
    assert math.prod(MeshShape.parse(smaller).degrees().values()) >= found.size // 2


def test_a_rehearsal_trains_and_resumes() -> None:
    done = meshwright(
        "rehearse", "llama3-8b", "--mesh", "fsdp=2", "--batch", "8", "--for-steps", "1"
    )
    assert "bitwise that of the run without a stop" in done and "every part succeeded" in done


def test_a_rehearsal_that_kills_needs_two_processes() -> None:
    assert "or --mesh" in in_process("rehearse", "tiny", code=2)


def test_steps_on_measured_devices_are_predicted() -> None:
    class Device:
        device_kind, process_index = "cpu", 0

    placed, devices = place_run(tiny_run(MODELS["llama"], "fsdp=2")), [Device(), Device()]
    assert forecast_step(placed, devices, None) is None
    calibration = {
        "matmuls": [{"flops_per_second": 1e11}],
        "device": "cpu",
        "date": "today",
        "memory_bandwidth": 1e10,
    }
    forecast = forecast_step(placed, devices, calibration)
    assert forecast is not None and forecast.step > 0 and "today" in forecast.source
    twice = forecast_step(placed, devices, {**calibration, "matmuls": [{"flops_per_second": 2e11}]})
    assert twice is not None and twice.compute < forecast.compute
    largest = forecast_gaps(
        forecast, step=forecast.step * 1.5, data_wait=10 * forecast.step, saving=0.0
    )[0]
    assert largest.part == "waiting for data" and largest.seconds == pytest.approx(
        10 * forecast.step
    )


def test_plans_use_what_a_bench_measured() -> None:
    target = parse_target("h100:2x8")
    chip, nodes = target.chip, target.chip.interconnect
    assert isinstance(nodes, Nodes)
    matmul = {
        "dtype": "bfloat16",
        "m": 2**20,
        "k": 2**20,
        "n": 2**20,
        "flops_per_second": 0.5 * chip.flops_bf16,
    }
    calibration = {
        "device": "NVIDIA H100 80GB HBM3", "date": "2026-11-01",
        "matmuls": [matmul, {**matmul, "dtype": "float32", "flops_per_second": 1e16}],
        "memory_bandwidth": 0.7 * chip.hbm_bandwidth,
        "collectives": [
            {"devices": 8, "bus_bandwidth": 0.6 * nodes.link_bandwidth},
            {"devices": 16, "bus_bandwidth": 2 * nodes.link_bandwidth},  # over the network too
        ],
    }  # fmt: skip
    measured = calibrate_target(target, calibration)
    efficiency = measured.efficiency
    assert (efficiency.matmul, efficiency.hbm, efficiency.links) == pytest.approx(
        (0.5, 0.7, 0.6), rel=1e-3
    )
    assert (efficiency.network, efficiency.attention) == (
        target.efficiency.network,
        target.efficiency.attention,
    )
    assert (
        f"2026-11-01: matmul 0.50 for {target.efficiency.matmul:.2f}" in measured.efficiency_source
    )
    assert str(measured) == str(target)
    # A rate above the data sheet is of something else: it is named, and not cut to the peak.
    faster = {**calibration, "memory_bandwidth": 1.2 * chip.hbm_bandwidth, "grouped_matmul": 1.1}
    above = calibrate_target(target, faster)
    assert above.efficiency.hbm == target.efficiency.hbm
    assert above.efficiency.grouped_matmul == target.efficiency.grouped_matmul
    assert above.efficiency.matmul == efficiency.matmul
    assert "hbm not taken: 1.200 of the data sheet" in above.efficiency_source
    assert "grouped_matmul not taken: 1.100 of the rate of matmuls" in above.efficiency_source
    placed = placed_recipe("llama3-8b", "fsdp=16", batch=16)
    assert estimate(placed, measured).seconds > estimate(placed, target).seconds
    for other in (
        {**calibration, "device": "cpu"},
        {"device": "NVIDIA H100 80GB HBM3", "date": "2026-11-01"},
    ):
        assert calibrate_target(target, other) is target
    torus = calibrate_target(
        parse_target("v5e:4x4"),
        {**calibration, "device": "TPU v5 lite", "matmuls": [], "memory_bandwidth": 4e11},
    )
    assert torus.efficiency.hbm < 0.85 and torus.efficiency.links == 0.85


def test_local_slices_are_counted() -> None:
    def device(index: int, x: int, y: int) -> Any:
        return SimpleNamespace(
            device_kind="TPU v5 lite", coords=(x, y, 0), slice_index=index, process_index=0
        )

    devices = [device(index, x, y) for index in (0, 1) for x in range(4) for y in range(2)]
    whole = local_target(devices, None)
    assert whole is not None and str(whole[0]) == "2*v5e:4x2" and whole[0].devices == len(devices)
    one = local_target([d for d in devices if d.slice_index == 1], None)
    assert one is not None and str(one[0]) == "v5e:4x2"
