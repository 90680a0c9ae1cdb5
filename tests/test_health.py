"""Health of every tensor: what it says, equal on every mesh, at no change of a bit, in a file that stays small."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import MODELS, device_run_of, random_batch, tiny_run

import meshwright as mw
from meshwright.hardware.agreement import versions_of_program
from meshwright.reporters.health import (
    HealthLog,
    HealthRecord,
    History,
    Series,
    decode,
    encode,
)
from meshwright.reporters.outliers import FEWEST, Baseline
from meshwright.runs.run import Run
from meshwright.sharding.params import named_leaves, rows_to_layers
from meshwright.step.health import (
    ATTENTION,
    ENTROPY,
    FIGURES,
    GRADIENT,
    LARGEST_LOAD,
    PARAMETER,
    RESIDUAL,
    UNCHANGED,
    UPDATE,
    HealthReader,
)
from meshwright.step.train_step import CompiledTrainStep
from meshwright.views.health_blocks import health_blocks


class Taken:
    """Two steps of a run: the health of both, the states around the second, and its metrics."""

    def __init__(self, run: Run):
        self.device_run = device_run_of(run)
        step = CompiledTrainStep(self.device_run, random_batch(self.device_run))
        state, first = step(self.device_run.initial_state(), random_batch(self.device_run, 0))
        self.before = self._by_layers(state.params)
        state, metrics = step(state, random_batch(self.device_run, 1))
        self.after = self._by_layers(state.params)
        self.metrics = jax.device_get(metrics)
        self.state = jax.device_get(state)
        self.record: HealthRecord | None = None
        if "health" in self.metrics:
            reader = HealthReader(self.device_run)
            self.first = reader.read(jax.device_get(first["health"]))
            self.record = reader.read(self.metrics["health"])

    def _by_layers(self, params: Any) -> dict[str, np.ndarray]:
        described = named_leaves(self.device_run.layout.params)
        return {
            name: rows_to_layers(described[name], np.asarray(x, np.float32))
            for name, x in named_leaves(params).items()
        }


def taken(family: str, mesh: str, **changes: Any) -> Taken:
    return Taken(tiny_run(MODELS[family], mesh, **{"health": True, "dropout": 0.0, **changes}))


def norms(x: np.ndarray, layers: tuple[int, ...]) -> np.ndarray:
    rows = x.reshape(len(layers) or 1, -1).astype(np.float64)
    return np.sqrt(np.square(rows).sum(1))


def test_figures_are_what_they_are_declared_to_be() -> None:
    found = taken("llama", "fsdp=2")
    assert found.record is not None
    squares = 0.0
    for series, values in found.record.items():
        if series.figure == PARAMETER:
            expected = norms(found.before[series.tensor], series.layers)
            np.testing.assert_allclose(values, expected, rtol=1e-5)
        if series.figure == UPDATE:
            change = found.after[series.tensor] - found.before[series.tensor]
            np.testing.assert_allclose(values, norms(change, series.layers), rtol=1e-4)
        if series.figure == GRADIENT:
            squares += float(np.square(values).sum())
    assert squares**0.5 == pytest.approx(float(found.metrics["gradient norm"][0]), rel=1e-5)
    assert {series.figure for series in found.record.series} <= FIGURES.keys()


def test_updates_that_rounding_loses_are_counted() -> None:
    """Of a bfloat16 parameter: the share of elements that are the same bits after the step as before."""
    found = taken("llama", "fsdp=2", param_dtype="bfloat16")
    assert found.record is not None
    shares = [(s, values) for s, values in found.record.items() if s.figure == UNCHANGED]
    assert {series.tensor for series, _ in shares} == found.before.keys()
    for series, values in shares:
        same = found.before[series.tensor] == found.after[series.tensor]
        expected = same.reshape(len(series.layers) or 1, -1).mean(1)
        np.testing.assert_allclose(values, expected, rtol=1e-5, err_msg=str(series))
    assert any(0 < share < 1 for _, values in shares for share in values)


exhaustive = pytest.mark.exhaustive
MESHES = [
    ("mixtral", "fsdp=2,expert=2", {}),
    ("llama", "stage=2,tensor=2", {"microbatches": 2, "layers": 3}),
    ("llama", "context=2,data=2", {"seq": 32, "microbatches": 2}),
    ("llama", "fsdp=2,tensor=4", {"param_dtype": "bfloat16", "compute_dtype": "float32"}),
]


@pytest.mark.parametrize(
    ("family", "mesh", "changes"),
    [
        pytest.param(*row, id=f"{row[0]} {row[1]}", marks=() if row is MESHES[-1] else exhaustive)
        for row in MESHES
    ],
)
def test_health_is_that_of_one_device(family: str, mesh: str, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    model = MODELS[family]
    if "layers" in changes:
        model = dataclasses.replace(model, layers=changes.pop("layers"))
    # The log-sum-exp is that of a kernel that computes by blocks.
    shared: dict[str, Any] = {"health": True, "attention_kernel": "blocked", "dropout": 0.0}
    one = {name: value for name, value in changes.items() if name != "microbatches"}
    sides = [
        Taken(tiny_run(model, "data=1", **shared, **one)).first,
        Taken(tiny_run(model, mesh, **shared, **changes)).first,
    ]
    assert sides[0].series == sides[1].series
    figures = {series.figure for series in sides[0].series}
    assert {GRADIENT, PARAMETER, UPDATE, RESIDUAL, ATTENTION} <= figures
    assert ({ENTROPY, LARGEST_LOAD} <= figures) == (family == "mixtral")
    assert (UNCHANGED in figures) == ("param_dtype" in changes)
    for (series, values), (_, others) in zip(sides[0].items(), sides[1].items(), strict=True):
        # A bfloat16 parameter moves by whole units or not at all: near a half that is chance.
        if "param_dtype" in changes and series.figure in (UPDATE, UNCHANGED):
            assert (values >= 0).all() and (others >= 0).all()
            continue
        np.testing.assert_allclose(values, others, rtol=2e-3, atol=1e-6, err_msg=str(series))
        assert (values > 0).all() or series.figure in (UNCHANGED, ATTENTION), series


@pytest.mark.parametrize(
    ("family", "mesh", "changes"),
    [
        pytest.param("llama", "fsdp=2,tensor=2", {}, marks=exhaustive),
        pytest.param("mixtral", "fsdp=2,expert=2", {}, marks=exhaustive),
        pytest.param("llama", "stage=2,fsdp=2", {"microbatches": 4}, marks=exhaustive),
        ("gpt2", "data=4", {"microbatches": 2}),
    ],
    ids=["tensor", "experts", "stages", "microbatches"],
)
def test_health_changes_no_bit(family: str, mesh: str, changes: dict[str, Any]) -> None:
    measured = taken(family, mesh, **changes)
    without = taken(family, mesh, health=False, **changes)
    assert measured.record is not None and without.record is None
    for a, b in zip(jax.tree.leaves(measured.state), jax.tree.leaves(without.state), strict=True):
        assert np.array_equal(a, b)
    assert measured.metrics["loss"] == without.metrics["loss"]


def test_codes_keep_numbers_and_what_is_not_a_number() -> None:
    values = np.array([0.0, 1e-30, 0.02, 1.0, 3e38, np.inf, np.nan])
    again = decode(encode(values))
    np.testing.assert_allclose(again[1:5], values[1:5], rtol=3e-3)
    assert again[0] == 0 and np.isposinf(again[5]) and np.isnan(again[6])


SERIES = (Series(GRADIENT, "blocks.query", (0, 1)), Series(GRADIENT, "embed", ()))


def record(*values: float) -> HealthRecord:
    return HealthRecord(SERIES, np.asarray(values))


def read(file: Path) -> History:
    history = History(most=10**6)
    history.read(json.loads(line) for line in file.read_text().splitlines())
    return history


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    file = tmp_path / "health.jsonl"
    log = HealthLog(file, upto=0)
    for step in range(1, 8):
        log.health(step, record(step, 2 * step, 3 * step))
    log.rewind(5)
    log.health(6, record(60, 120, 180))
    log.close()
    log = HealthLog(file, upto=6)
    log.health(7, record(70, 140, 210))
    log.close()
    history = read(file)
    assert history.steps == [1, 2, 3, 4, 5, 6, 7] and history.series == SERIES
    np.testing.assert_allclose(history.values[-2][:2], [60, 120], rtol=3e-3)


def test_a_long_run_thins_the_older_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.reporters.health.LIMIT", 20_000)
    file = tmp_path / "health.jsonl"
    log = HealthLog(file, upto=0)
    for step in range(1, 3001):
        log.health(step, record(1.0, 2.0, 3.0))
        assert file.stat().st_size <= 20_000
    log.close()
    steps = read(file).steps
    assert steps[-100:] == list(range(2901, 3001)) and steps[0] == 1
    gaps = np.diff(steps)
    assert gaps[: len(gaps) // 4].mean() > 4 * gaps[-100:].mean()


def test_a_million_steps_of_the_largest_llama_are_a_gigabyte() -> None:
    """126 layers of 9 tensors and 3 outside, three figures each, and two of each layer, every ten steps."""
    run = mw.recipe("llama3-405b", mesh="fsdp=8")
    params = named_leaves(run.model.params())
    per_tensor = sum(p.shape[0] if p.dims.startswith("L") else 1 for p in params.values())
    numbers = 3 * per_tensor + 2 * len(run.model.spec().layers)
    line = json.dumps({"step": 10**6, "values": encode(np.ones(numbers))}) + "\n"
    assert len(line) * 10**6 / run.training.health_every < 10**9


def test_an_outlier_is_beyond_its_own_history() -> None:
    rng = np.random.default_rng(0)
    baseline = Baseline()
    for step in range(200):
        values = np.exp(rng.normal(0, 0.1, 50)) * np.arange(1, 51)
        assert (np.abs(baseline.deviations(values)) <= 1).all(), step
        baseline.add(values)
    values[7] *= 30
    found = baseline.deviations(values)
    assert np.flatnonzero(np.abs(found) > 1).tolist() == [7] and found[7] > 1
    values[7], values[3], values[9] = 8.0, np.nan, 0.0
    found = baseline.deviations(values)
    assert np.flatnonzero(np.abs(found) > 1).tolist() == [3, 9] and found[9] < 0


def test_the_page_marks_the_first_outlier() -> None:
    history = History()
    history.series = SERIES
    rng = np.random.default_rng(0)
    for step in range(FEWEST + 40):
        values = np.exp(rng.normal(0, 0.1, 3))
        values[1] *= 50 if step == FEWEST + 20 else 1
        history.steps.append(10 * step)
        history.values.append(values)
    text, _, picture = health_blocks(history)
    assert f"step {10 * (FEWEST + 20)}: gradient norm of blocks.query of layer 1" in str(text)
    data = picture.data  # type: ignore[attr-defined]
    assert data["rows"] == ["layer 0", "layer 1", "embed"]
    assert data["first"]["row"] == 1 and data["steps"][data["first"]["column"]] == 10 * (
        FEWEST + 20
    )


@exhaustive
def test_a_run_writes_health_and_its_page_shows_it(tmp_path: Path) -> None:
    run = mw.recipe("tiny", mesh="data=1", layers=1, steps=4, sample=0, eval_samples=16)
    training = dataclasses.replace(run.training, health_every=2)
    out = tmp_path / "run"
    mw.train(
        dataclasses.replace(run, training=training), out=out, progress="none", cache=tmp_path,
        devices=1,
    )  # fmt: skip
    assert read(out / "health.jsonl").steps == [1, 2, 4]
    page = mw.view(out).write().read_text()
    assert "Health" in page and "gradient norm" in page.lower()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    tokens_of_a_step = training.batch * training.seq
    assert [line["tokens"] for line in steps] == [tokens_of_a_step * n for n in (1, 2, 3, 4)]
    assert [line["time"] for line in steps] == sorted(line["time"] for line in steps)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    [start] = [event for event in events if event["event"] == "start"]
    assert start["versions"] == versions_of_program()
    place = start["data"]
    assert place["units"] == 4 * tokens_of_a_step and place["sources"][0]["name"] == "stdlib"
    assert max(event.get("bytes", 0) for event in events if event["event"] == "compile") > 0
    [process] = json.loads((out / "processes.json").read_text())["processes"]
    assert process["step"] == 4 and process["seconds"]["step"] > 0
    assert "Hosts" in page and "tokens read" in page
