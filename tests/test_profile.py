"""Profile of a training: traced steps beside the simulated schedule, by part, collective and scope."""

import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from test_cli import SMALL, meshwright

import meshwright as mw
from meshwright.api import training
from meshwright.bench.device_trace import Event, Trace
from meshwright.bench.slow_steps import WatchedRun
from meshwright.bench.step_profile import ProfiledRun, compare, parse_steps
from meshwright.errors import ConfigError
from meshwright.trainer.prepare import Position
from xlacensus.hlo.parser import parse_module
from xlacensus.schedule import SimulatedSchedule, Span

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %both = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %mlp = f32[8]{0} multiply(%x, %x), metadata={op_name="jit(step)/layer/mlp/mul"}
  %total = f32[8]{0} all-reduce(%mlp), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%sum, metadata={op_name="jit(step)/layer/grads/psum"}
  ROOT %last = f32[8]{0} add(%total, %mlp), metadata={op_name="jit(step)/layer/mlp/add"}
}
"""  # noqa: E501
SPANS = (
    Span("layer/mlp: mlp", "matmul", 0.0, 2.0, 1, 0),
    Span("layer/grads: total", "collective", 2.0, 3.0, 1, 0, "data", exposed=1.0),
    Span("layer/mlp: last", "memory", 5.0, 0.5, 2, 1),
    Span("a loop", "loop", 5.0, 1.0, 2, 0),
)
SCHEDULE = SimulatedSchedule(
    "a chip", 6.0, {"matmul": 2.0, "memory": 1.0, "exposed": 1.0}, {"data": 1.0}, {"data": 3.0}, {"data": "ICI"}, 0.5,
    SPANS,
)  # fmt: skip


def lane(shift: float, *, kernels: bool = False) -> list[Event]:
    """Two steps of one device, each of 7 seconds: 2 of compute, 3 of a collective, 1 idle, 1 of compute."""
    events = []
    for start in (shift, shift + 7.0):
        for name, at, seconds in (("mlp", 0.0, 2.0), ("total", 2.0, 3.0), ("last", 6.0, 1.0)):
            # A GPU's kernels have names of their own, and tell their instruction.
            kernel, instruction = (f"kernel_of_{name}", name) if kernels else (name, "")
            events.append(Event(kernel, start + at, seconds, name == "total", instruction))
    return events


@pytest.mark.parametrize(
    ("names", "simulated", "word"),
    [
        (("/device:TPU:0", "/device:TPU:1"), 1.0, "exposed"),
        (("/device:GPU:0", "/device:GPU:1"), 3.0, "kernel"),
    ],
)
def test_measured_stands_beside_simulated(
    names: tuple[str, str], simulated: float, word: str
) -> None:
    trace = Trace(
        {name: [lane(0.25 * i, kernels="GPU" in name)] for i, name in enumerate(names)}, []
    )
    rows, note = compare(
        trace, parse_module(PROGRAM), SCHEDULE, {"data": 2}, local_devices=2, steps=2, seconds=14.5
    )
    assert [(row.kind, row.name, row.measured, row.simulated) for row in rows] == [
        ("step", "whole step", 7.25, 6.0),
        ("part", "compute", 3.0, 4.5), ("part", "communication", 3.0, 3.0), ("part", "exposed", 3.0, 1.0),
        ("part", "idle", 1.0, 0.5),
        ("collective", "all-reduce over data", 3.0, simulated),
        *sorted([("scope", "layer/mlp", 3.0, 3.0), ("scope", "layer/grads", 3.0, simulated)],
                key=lambda row: row[1] == "layer/grads"),
    ]  # fmt: skip
    assert word in note


def test_simulated_devices_are_called_what_they_are() -> None:
    trace = Trace({}, [lane(0.0), lane(0.5)])
    rows, note = compare(
        trace, parse_module(PROGRAM), None, {"data": 2}, local_devices=2, steps=2, seconds=15.0
    )
    assert [(row.kind, row.measured, row.simulated) for row in rows] == [
        ("step", 7.5, None), ("collective", 3.0, None), ("scope", 3.0, None), ("scope", 3.0, None),
    ]  # fmt: skip
    assert "share the cores" in note


@pytest.mark.parametrize("text", ["", "3", "4:3", "0:2", "1:2", "a:b", "2:3:4", "99:101"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--profile 10:13"):
        parse_steps(text, 100)


@pytest.mark.parametrize("steps", ["3:4", "slow"])
def test_a_profiled_run_is_what_the_loop_takes(steps: str, tmp_path: Path) -> None:
    """Its sample is written, and the text of a bad step's samples can be."""
    out = tmp_path / "out"
    words = ["--devices", "1", "--data.sample", "5", "--steps", "4", "--profile", steps]
    assert "step 4/4" in meshwright("train", "--out", str(out), *SMALL, *words)
    assert (out / "sample.txt").read_text()
    prepared = types.SimpleNamespace(tokenizer="a tokenizer", sources=tuple)
    runs = (ProfiledRun(cast(Any, prepared), 3, 4, out), WatchedRun(cast(Any, prepared), out))
    assert [run.tokenizer for run in runs] == ["a tokenizer"] * 2


@pytest.mark.parametrize(
    ("steps", "traces"),
    [
        ((1, 2, 3, 4, 5, 2, 3, 4, 5), [(3, 4)]),  # returns to step 1, and later to step 4
        ((1, 2, 3, 1, 2, 3, 4), [(3,), (3, 4)]),
        ((1, 2, 3, 4, 5, 6, 5, 6), [(3, 4)]),
    ],
)
def test_a_profiled_run_may_return_to_a_checkpoint(
    steps: Sequence[int],
    traces: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[list[int]] = []
    under_way: list[bool] = []
    monkeypatch.setattr(
        "jax.profiler.start_trace", lambda *_, **__: (found.append([]), under_way.append(True))
    )
    monkeypatch.setattr("jax.profiler.stop_trace", under_way.clear)

    class Step:
        def program_text(self) -> str:
            return ""

        def __call__(self, state: Any, batch: Any) -> Any:
            if under_way:
                found[-1].append(batch)
            return state, {}

    prepared = types.SimpleNamespace(compile=lambda batch: Step(), feed=lambda start: start)
    run = ProfiledRun(cast(Any, prepared), 3, 4, tmp_path)
    take = run.compile(None)
    before = None
    for step in steps:
        if before is None or step != before + 1:
            run.feed(Position(step - 1, 0))
        take(0, step)
        before = step
    assert [tuple(each) for each in found] == traces
    late = ProfiledRun(cast(Any, prepared), 3, 4, tmp_path)
    with pytest.raises(ConfigError, match="--profile 7:9"):
        late.feed(Position(5, 0))


def test_a_training_is_profiled(tmp_path: Path) -> None:
    out = tmp_path / "out"
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
        "3:4",
    ]
    said = meshwright("train", "--out", str(out), *words)
    assert (
        "profile of steps 3 to 4" in said
        and "whole step" in said
        and "all-gather over fsdp" in said
    )
    assert list((out / "profile").rglob("*.xplane.pb")) and list(
        (out / "profile").rglob("perfetto_trace.json.gz")
    )
    record = json.loads((out / "profile.json").read_text())
    assert (record["first"], record["last"]) == (3, 4) and "share the cores" in record["note"]
    times = {(row["kind"], row["name"]): row["measured"] for row in record["rows"]}
    collectives = {name: seconds for (kind, name), seconds in times.items() if kind == "collective"}
    scopes = sum(seconds for (kind, _), seconds in times.items() if kind == "scope")
    assert all(seconds > 0 for seconds in times.values()) and "all-gather over fsdp" in collectives
    # Every operation has one scope; those of two devices fit into the time of the steps on this machine's cores.
    assert sum(collectives.values()) < scopes
    told = meshwright(
        "train", "--out", str(out), "--resume", "--steps", "9", "--profile", "3:4", code=2
    )
    assert "the run goes on after step 6" in told and "--profile 8:10" in told


def test_the_library_profiles_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = mw.recipe("tiny", steps=4)
    mesh = types.SimpleNamespace(devices=np.array(["a device"]))
    prepared = types.SimpleNamespace(device_run=types.SimpleNamespace(run=run, mesh=mesh))
    monkeypatch.setattr(training.loop, "prepare_run", lambda *_, **__: prepared)
    monkeypatch.setattr(training, "_local_planner", lambda devices: None)
    trained: list[object] = []
    monkeypatch.setattr(ProfiledRun, "profile", lambda *_: None)
    monkeypatch.setattr(training.loop, "train", lambda prepared, *_, **__: trained.append(prepared))
    for steps in ("2:3", None):
        mw.train(run, out=tmp_path, profile=steps, progress="none")
    assert [isinstance(prepared, ProfiledRun) for prepared in trained] == [True, False]
    with pytest.raises(ConfigError, match="--profile 2:4"):
        mw.train(run, out=tmp_path, profile="9:9", progress="none")
