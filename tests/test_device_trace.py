"""Traces as profilers of TPUs and GPUs write them, read back: names of planes, lines and stats of XLA's xplane schema.

No trace of a chip is at hand: the planes are written here, over texts of programs that were compiled for these chips.
"""

import errno
import json
import os
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import pytest
from jax.profiler import ProfileData

from meshwright.bench.device_trace import Event, Trace, device_time, read_trace
from meshwright.bench.slow_devices import computations, name_slow_devices
from meshwright.bench.slow_steps import WatchedRun, remove_old_traces
from meshwright.bench.step_profile import compare
from meshwright.mesh_shape import MeshShape
from xlacensus.hlo.parser import Module, parse_module

TEXTS = Path(__file__).parent / "analysis" / "texts"
MESH = {"data": 4, "tensor": 2}
Written = tuple[str, float, float] | tuple[str, float, float, Mapping[str, str]]
"""Name of an event, its start and length in microseconds, and its stats."""


def plane(name: str, lines: Mapping[str, Sequence[Written]]) -> str:
    """Writes a plane as a text proto, in the form of `xplane.proto`."""
    events = sorted({event[0] for line in lines.values() for event in line})
    stats = sorted(
        {
            stat
            for line in lines.values()
            for event in line
            for stat in (event[3] if len(event) > 3 else {})
        }
    )
    text = [f"name: {json.dumps(name)}"]
    for number, names in (("event_metadata", events), ("stat_metadata", stats)):
        text += [
            f"{number} {{ key: {i} value {{ id: {i} name: {json.dumps(n)} }} }}"
            for i, n in enumerate(names, start=1)
        ]
    for i, (line, written) in enumerate(lines.items()):
        text.append(f"lines {{ id: {i} name: {json.dumps(line)} timestamp_ns: 1000")
        for event in written:
            text.append(
                f"events {{ metadata_id: {events.index(event[0]) + 1} offset_ps: {round(event[1] * 1e6)}"
            )
            text.append(f"duration_ps: {round(event[2] * 1e6)}")
            for stat, value in (event[3] if len(event) > 3 else {}).items():
                text.append(
                    f"stats {{ metadata_id: {stats.index(stat) + 1} str_value: {json.dumps(value)} }}"
                )
            text.append("}")
        text.append("}")
    return f"planes {{ {' '.join(text)} }}"


def read(planes: Sequence[str], module: Module, folder: Path) -> Trace:
    """Writes a profile into a folder as the profiler does, and reads it."""
    write(planes, folder)
    return read_trace(folder, module)


def instruction(text: str, name: str) -> str:
    """Returns an instruction as the profiler of a TPU names its events: whole, without metadata."""
    line = next(
        line
        for line in text.splitlines()
        if line.strip().removeprefix("ROOT ").startswith(f"%{name} = ")
    )
    return line.strip().removeprefix("ROOT ").partition(", metadata=")[0]


def tpu_planes(text: str) -> list[str]:
    """Two turns of a ring on two chips: 20 us of compute while a permutation of 26 us is in flight, 6 us exposed."""
    names = (
        "collective-permute-start",
        "select_add_fusion.2",
        "collective-permute-done",
        "copy-start.3",
        "while.13",
    )
    start, add, done, copy, loop = (instruction(text, name) for name in names)
    turns = (10.0, 50.0)
    operations = [
        ("%convert.1 = f32[8] convert(f32[8] %x)", 0.0, 5.0), (loop, 10.0, 80.0),
        *(event for at in turns for event in ((start, at, 1.0), (add, at + 1, 20.0), (done, at + 21, 5.0))),
    ]  # fmt: skip
    chip = {
        "Steps": [("7", 0.0, 90.0)],
        "XLA Modules": [("jit_convert(1234)", 0.0, 6.0), ("jit__ring(98765432)", 10.0, 80.0)],
        "XLA Ops": operations,
        "Async XLA Ops": [event for at in turns for event in ((start, at, 26.0), (copy, at, 3.0))],
        "Framework Ops": [("jit(_ring)/shard_map/while", 10.0, 80.0)],
        "XLA TraceMe": [("idle", 90.0, 10.0)],
    }
    core = {"Sparse Core Ops": [("wait", 0.0, 900.0)], "XLA Ops": [(add, 0.0, 900.0)]}
    host = plane("/host:CPU", {"python": [("train_step", 0.0, 100.0)]})
    return [
        host,
        *(plane(f"/device:TPU:{i}", chip) for i in range(2)),
        plane("/device:TPU:0 SparseCore 0", core),
    ]


def test_a_trace_of_tpus(tmp_path: Path) -> None:
    text = (TEXTS / "v5p" / "ring.hlo").read_text()
    module = parse_module(text)
    trace = read(tpu_planes(text), module, tmp_path)
    assert list(trace.devices) == ["/device:TPU:0", "/device:TPU:1"] and not trace.host
    micro = 1e-6
    time = device_time("", trace.devices["/device:TPU:0"], trace.flights["/device:TPU:0"])
    # The other program keeps the chip busy for 5 us; between it, the turns and the end of the last nothing runs.
    assert [
        time.window,
        time.compute,
        time.communication,
        time.exposed,
        time.idle,
    ] == pytest.approx([76 * micro, 45 * micro, 52 * micro, 12 * micro, 19 * micro])
    rows, note = compare(trace, module, None, MESH, local_devices=8, steps=2, seconds=90 * micro)
    measured = {(row.kind, row.name): row.measured for row in rows}
    assert measured["part", "communication"] == pytest.approx(26 * micro)
    assert measured["part", "exposed"] == pytest.approx(6 * micro)
    assert measured["collective", "collective-permute over data"] == pytest.approx(6 * micro)
    assert sum(value for (kind, _), value in measured.items() if kind == "scope") == pytest.approx(
        26 * micro
    )
    assert not any("another" in row.name for row in rows) and "in flight" in note


def test_a_start_without_a_lane_of_its_own_is_in_flight_until_its_done(tmp_path: Path) -> None:
    text = (TEXTS / "v5p" / "ring.hlo").read_text()
    without = [plane.replace("Async XLA Ops", "Other") for plane in tpu_planes(text)]
    derived, written = (
        read(planes, parse_module(text), tmp_path).flights for planes in (without, tpu_planes(text))
    )
    assert [end for flight in derived["/device:TPU:0"] for end in flight] == pytest.approx(
        [end for flight in written["/device:TPU:0"] for end in flight]
    )


def test_a_trace_of_gpus(tmp_path: Path) -> None:
    text = (TEXTS / "h100" / "ring.hlo").read_text()
    module = parse_module(text)

    def of(hlo_op: str, program: str = "jit__ring") -> dict[str, str]:
        return {"hlo_op": hlo_op, "hlo_module": program, "correlation_id": "12"}

    turns = (10.0, 50.0)
    card = {
        "Stream #13(Compute)": [
            ("loop_convert_fusion", 0.0, 5.0, of("loop_add_fusion", "jit_convert")),
            *(("loop_add_fusion", at, 12.0, of("loop_add_fusion")) for at in turns),
            # A kernel of a CUDA graph tells no instruction; its name is that of the fusion.
            *(("loop_add_fusion_1", at + 12, 2.0, {"cuda_graph_id": "3"}) for at in turns),
        ],
        "Stream #14(MemcpyD2D,Compute)": [
            *(("MemcpyD2D", at, 3.0, of("copy.6")) for at in turns),
            *(("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", at + 3, 20.0, of("collective-permute-start"))
              for at in turns),
        ],
        # Lines that the profiler derives from the streams, which count nothing twice.
        "Steps": [("7", 0.0, 90.0)], "XLA Modules": [("jit__ring", 10.0, 63.0)],
        "XLA Ops": [("loop_add_fusion", at, 12.0, of("loop_add_fusion")) for at in turns],
        "Launch Stats": [("loop_add_fusion", 0.0, 1.0)],
    }  # fmt: skip
    trace = read([plane(f"/device:GPU:{i}", card) for i in range(8)], module, tmp_path)
    assert (
        len(trace.devices) == 8
        and len(trace.devices["/device:GPU:0"]) == 2
        and not trace.flights["/device:GPU:0"]
    )
    micro = 1e-6
    time = device_time("", trace.devices["/device:GPU:0"])
    # Of 20 us of NCCL in a turn 11 are under kernels and 9 are exposed.
    assert [time.compute, time.communication, time.exposed] == pytest.approx(
        [33 * micro, 40 * micro, 18 * micro]
    )
    rows, note = compare(trace, module, None, MESH, local_devices=8, steps=2, seconds=63 * micro)
    measured = {(row.kind, row.name): row.measured for row in rows}
    assert measured["collective", "collective-permute over data"] == pytest.approx(20 * micro)
    # 12 and 2 us of fusions, 3 us of a copy, 20 us of NCCL, each in its scope; the other program has none.
    assert sum(value for (kind, _), value in measured.items() if kind == "scope") == pytest.approx(
        37 * micro
    )
    assert "kernel" in note


def test_kernels_of_another_program_have_no_instruction_of_this_one(tmp_path: Path) -> None:
    module = parse_module((TEXTS / "h100" / "ring.hlo").read_text())
    stats = {"hlo_op": "loop_add_fusion", "hlo_module": "jit__ring_of_another"}
    trace = read(
        [plane("/device:GPU:0", {"Stream #7": [("kernel", 0.0, 1.0, stats)]})], module, tmp_path
    )
    (event,) = trace.devices["/device:GPU:0"][0]
    assert event == Event("another program: kernel", event.start, event.seconds, False, "")


REDUCTION = """HloModule jit_step, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %both = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %mlp = f32[8]{0} multiply(%x, %x)
  ROOT %total = f32[8]{0} all-reduce(%mlp), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}
"""


@pytest.mark.parametrize(("platform", "slow"), [("GPU", 5), ("TPU", 2), ("GPU", None)])
def test_one_slow_device_of_eight_is_named(platform: str, slow: int | None, tmp_path: Path) -> None:
    trace = read(planes_of_eight(platform, slow), parse_module(REDUCTION), tmp_path)
    found = computations(trace, steps=2, process=1, host="node7")
    assert [round(1e6 * device.seconds) for device in found] == [
        260 if device == slow else 200 + device for device in range(8)
    ]
    named = name_slow_devices(found)
    assert len(named) == (slow is not None)
    if slow is not None:
        factor = {5: "1.28", 2: "1.27"}[slow]  # 260 over the medians 203.5 and 204.5
        assert named[0].startswith(
            f"{platform}:{slow} of process 1 (node7) computes 260 us of a step besides collectives, "
            f"{factor} times the median of 8 devices"
        )


@pytest.mark.parametrize(
    ("slow", "stages", "said"),
    [
        (5, 1, "GPU:5 of process 0"),
        (None, 1, "none of the 8"),
        (5, 2, "stages have different work"),
    ],
)
def test_steps_that_become_slow_are_traced_once_an_hour(
    slow: int | None,
    stages: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The profiler writes a trace of eight devices that was constructed."""
    now = 0.0
    taken: list[int] = []
    steps = 0

    class Step:
        def program_text(self) -> str:
            return REDUCTION

        def __call__(self, state: int, batch: int) -> tuple[int, int]:
            nonlocal now, steps
            now += batch
            steps += 1
            return state, batch

    # Traces of earlier starts, the newest written after this one by a clock that was set back.
    for number in (1, 2, 8, 9, 10):
        write(planes_of_eight("GPU", 3), tmp_path / str(number))
    (newest,) = (tmp_path / "10").rglob("*.xplane.pb")
    os.utime(newest, (time.time() + 3600,) * 2)

    def stop_trace() -> None:
        write(planes_of_eight("GPU", slow), tmp_path / "11")
        taken.append(steps)

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop_trace)
    layout = types.SimpleNamespace(shape=MeshShape(stage=stages))
    device_run = types.SimpleNamespace(layout=layout)
    prepared = types.SimpleNamespace(compile=lambda batch: Step(), device_run=device_run)
    run = WatchedRun(cast(Any, prepared), tmp_path, clock=lambda: now)
    take = run.compile(None)
    seconds = [10] * 60 + [100] + [10] * 20 + [13] * 40  # one long pause is no slow run
    for each in seconds:
        take(0, each)
    run.stop()
    # Of ten steps six have to be slow for their median, and a step's time is known when the next begins.
    assert taken == [81 + 6 + 2]
    error = ""
    until = time.monotonic() + 20
    while "slow steps (" not in error and time.monotonic() < until:  # a thread writes it
        error += capfd.readouterr().err
        time.sleep(0.02)
    assert error.count("slow steps (") == 1 and said in error
    run.stop()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "10", "11", "9"]


def test_a_run_of_weeks_keeps_few_of_its_traces(tmp_path: Path) -> None:
    removed = []
    for hour in range(8, 14):
        trace = tmp_path / str(hour)
        trace.mkdir()
        (trace / "host.xplane.pb").write_bytes(b"a trace")
        removed.append(remove_old_traces(tmp_path))
    kept = sorted(int(folder.name) for folder in tmp_path.iterdir())
    assert kept == [8, 11, 12, 13] and removed == [0, 0, 0, 0, 1, 1]


def write(planes: Sequence[str], folder: Path) -> None:
    """Writes a profile into a folder as the profiler does."""
    file = folder / "plugins" / "profile" / "2026_11_23" / "host.xplane.pb"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))


def planes_of_eight(platform: str, slow: int | None) -> list[str]:
    """Two steps of 500 us: compute of 200 us, of one device 260 us, and a collective that all end together."""
    planes = []
    for device in range(8):
        events: list[Written] = []
        for start in (0.0, 500.0):
            compute = 260.0 if device == slow else 200.0 + device  # healthy ones differ by a little
            total = ("total", start + compute, 500.0 - compute)
            if platform == "GPU":
                kernel = ("ncclDevKernel_AllReduce", total[1], total[2], {"hlo_op": "total"})
                events += [("fusion_9", start, compute, {"hlo_op": "mlp"}), kernel]
            else:
                events += [("mlp", start, compute), total]
        lane = "Stream #7(Compute)" if platform == "GPU" else "XLA Ops"
        planes.append(plane(f"/device:{platform}:{device}", {lane: events}))
    return planes


def test_a_trace_that_cannot_be_read_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("meshwright.last_words.say", said.append)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = WatchedRun(cast(Any, types.SimpleNamespace()), tmp_path)
    (tmp_path / "a.xplane.pb").write_bytes(b"damaged")
    run._read_or_say(lambda: "no program", "1 s")
    monkeypatch.setattr("jax.profiler.start_trace", lambda *_, **__: None)
    monkeypatch.setattr("jax.profiler.stop_trace", full)
    run._begin(cast(Any, 0))
    run._end(0, lambda: "")
    unread, unwritten = said
    assert f"{tmp_path} was not read" in unread
    assert "the trace was not written: " in unwritten and run._reader is None
