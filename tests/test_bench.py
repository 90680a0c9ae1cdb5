"""Benchmarks: correct results, nccl-tests' conventions, files that can be read again."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from test_cli import in_process, meshwright

from meshwright.bench import microbenchmarks
from meshwright.bench.calibration_file import read_calibration, write_calibration
from meshwright.bench.microbenchmarks import COLLECTIVES, Collective, time_collectives, time_matmul
from meshwright.errors import ConfigError


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_collective_is_correct_over_every_axis(
    kind: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbenchmarks, "median_seconds", lambda f, x: (0.5, 1))
    for t in time_collectives(mesh, (kind,), (1000, 70_000)):
        assert t.correct
        n = {"fsdp": 4, "tensor": 2}[t.axis]
        assert t.devices == n and t.bytes >= 1000 and t.bytes % (4 * n * n) == 0
        # doc/PERFORMANCE.md of nccl-tests.
        factor = {"all-reduce": 2 * (n - 1) / n, "ring-shift": 1, "broadcast": 1}.get(
            kind, (n - 1) / n
        )
        assert t.algorithm_bandwidth == t.bytes / 0.5
        assert t.bus_bandwidth == pytest.approx(t.bytes / 0.5 * factor)


def test_a_wrong_result_is_reported(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmarks, "median_seconds", lambda f, x: (0.5, 1))
    shift = COLLECTIVES["ring-shift"]
    broken = Collective(
        lambda x, a: x + 1, shift.output_spec, shift.expected, lambda m, n: m, lambda n: 1.0
    )
    monkeypatch.setitem(COLLECTIVES, "ring-shift", broken)
    assert not any(t.correct for t in time_collectives(mesh, ("ring-shift",), (1000,)))


def test_one_device_or_an_unknown_collective_is_refused() -> None:
    alone = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    with pytest.raises(ConfigError, match="sends nothing"):
        list(time_collectives(alone, ("all-gather",), (1000,)))
    with pytest.raises(ConfigError, match="did you mean 'all-gather'"):
        list(time_collectives(alone, ("allgather",), (1000,)))


def test_matrix_products_are_correct() -> None:
    for timing in (time_matmul(8, 16, 32, dtype) for dtype in ("float32", "bfloat16")):
        assert timing.correct
        assert timing.flops_per_second == pytest.approx(2 * 8 * 16 * 32 / timing.seconds)


def test_the_calibration_keeps_collectives_and_matmuls(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbenchmarks, "median_seconds", lambda f, *x: (0.5, 1))
    file = tmp_path / "deep" / "calibration.json"
    timings = list(time_collectives(mesh, ("all-gather", "ring-shift"), (1000, 4000)))
    write_calibration(file, collectives=timings, mesh="fsdp=4,tensor=2")
    write_calibration(file, matmuls=[time_matmul(8, 8, 8, "float32")], memory_bandwidth=1e9)
    calibration = read_calibration(file)
    assert len(calibration["collectives"]) == 8 and len(calibration["matmuls"]) == 1
    assert calibration["device"] == "cpu" and calibration["memory_bandwidth"] == 1e9
    for damaged in ("{", "[]"):
        file.write_text(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_calibration(file)


@pytest.mark.usefixtures("own_cache")
def test_the_command_writes_the_rows_that_it_prints(tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = meshwright(
        "bench", "collectives", "--mesh", "fsdp=2,tensor=2", "--sizes", "4096", "--kinds", "all-gather", "all-reduce",
        "--out", str(out), "--json",
    )  # fmt: skip
    rows = json.loads(printed)["rows"]
    with (out / "collectives.csv").open() as file:
        assert [row["kind"] for row in csv.DictReader(file)] == [row["kind"] for row in rows]
    assert {row["axis"] for row in rows} == {"fsdp", "tensor"} and all(
        row["correct"] for row in rows
    )
    assert (out / "calibration.json").exists()
    assert "number of at least 1" in in_process(
        "bench", "collectives", "--sizes", "0", "--out", str(out), code=2
    )
    misspelt = in_process("bench", "collectives", "--kinds", "allgather", "--out", str(out), code=2)
    assert "did you mean 'all-gather'" in misspelt
    assert "it cannot be created" in in_process(
        "bench", "collectives", "--out", "/proc/none", code=2
    )
