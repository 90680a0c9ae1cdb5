"""Extensions from outside the package: one device's numbers on eight, kept in run.json, resumed, planned and proved."""

import csv
import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from outside.extensions.csv_report import CsvReport
from outside.extensions.fsdp_2d import fsdp_2d
from outside.extensions.inverse_sqrt import inverse_sqrt
from outside.extensions.mi300x import mi300x
from outside.extensions.min_gru import MinGru
from outside.extensions.nano import Nano
from outside.extensions.row_attention import row_kernel
from outside.extensions.short_conv import ShortConvModel
from outside.extensions.soap import scale_by_soap, soap
from outside.extensions.sums import sums
from outside.extensions.zbv import zbv
from tiny_runs import (
    MODELS,
    VOCAB,
    Trained,
    device_run_of,
    largest_difference,
    on_one_device,
    tiny_run,
    train,
)

import meshwright as mw
from meshwright.analysis.programs import Census
from meshwright.analysis.run_census import census_of_train_step
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.config import Data, MeshShape, Optimizer, Training
from meshwright.errors import ConfigError
from meshwright.generation.cache import CachePlan
from meshwright.hardware.mesh import build_mesh
from meshwright.hardware.targets import parse_target
from meshwright.models.flops import forward_flops
from meshwright.planner.optimizer import state_bytes
from meshwright.planner.plan_file import read_plan, write_plan
from meshwright.planner.search import price_run, search
from meshwright.planner.traffic import movements
from meshwright.planner.work import recomputed_roles, work_of
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_run, run_from_dict, run_to_dict, write_run
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.trainer.prepare import PreparedRun, check_sample
from meshwright.trust import own

FOLDER = Path(__file__).parent / "extensions"
STEPS = 4
NANO = Nano(VOCAB, vocab_multiple=16, n_embd=32)
DEEP = dataclasses.replace(NANO, depth=4)
MIN_GRU = MinGru(VOCAB, vocab_multiple=16, width=32, recurrent=64)
SHORT_CONV = ShortConvModel(VOCAB, 64, 4, 16, vocab_multiple=16, kv_heads=8, mlp=96)
SOAP = Optimizer(soap, 3e-3, inverse_sqrt, warmup_steps=2)
ROW = {"attention_kernel": row_kernel, "context_strategy": "all_gather"}
ZBV = {"pipeline_schedule": zbv, "microbatches": 4}

CASES: dict[str, tuple[mw.Model, str, dict[str, Any]]] = {
    "family without attention": (MIN_GRU, "fsdp=2,context=2,tensor=2", {}),
    "family with names of its own": (NANO, "data=2,fsdp=2,tensor=2", {}),
    "optimizer": (MIN_GRU, "data=2,fsdp=2,tensor=2", {"optimizer": SOAP}),
    "layout": (NANO, "data=2,fsdp=2,tensor=2", {"layout": fsdp_2d}),
    "attention kernel": (NANO, "fsdp=2,context=2,tensor=2", ROW),
    "pipeline schedule": (DEEP, "stage=2,data=2,fsdp=2", ZBV),
}
every_case = pytest.mark.parametrize("case", CASES)
LEFT_OUT = ("family with names of its own", "pipeline schedule")
"""Cases whose census is not fast: the other cases have the same collectives."""
census_cases = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.exhaustive] if case in LEFT_OUT else [])
        for case in CASES
    ],
)

COMBINATIONS: list[tuple[mw.Model, str, dict[str, Any]]] = [
    (NANO, "data=2,fsdp=2,tensor=2", {"optimizer": SOAP, "layout": "zero1"}),
    (MIN_GRU, "stage=2,context=2,tensor=2", {"microbatches": 2, "context_strategy": "all_gather"}),
    (MIN_GRU, "data=4*2", {"layout": fsdp_2d}),
    (dataclasses.replace(MIN_GRU, depth=4), "stage=2,fsdp=2,tensor=2", {**ZBV, "layout": fsdp_2d}),
    (NANO, "fsdp=2,context=4", {"context_strategy": "ring"}),
    (NANO, "data=2,fsdp=2,tensor=2", {**ROW, "remat": "attention"}),
    (NANO, "data=2,fsdp=2,tensor=2", {**ROW, "remat": "projections"}),
    (NANO, "fsdp=2,context=4", {**ROW, "context_strategy": "ulysses"}),
    (
        DEEP,
        "stage=4,tensor=2",
        {"pipeline_schedule": "interleaved", "virtual_stages": 1, "microbatches": 4},
    ),
    (dataclasses.replace(NANO, depth=5), "stage=2,data=2,fsdp=2", {**ZBV, **ROW}),
    # Adam divides rounding errors of unused experts by epsilon, which is above them here.
    (
        MODELS["mixtral"],
        "fsdp=2,expert=2,tensor=2",
        {"optimizer": dataclasses.replace(SOAP, epsilon=1e-6)},
    ),
    (MODELS["mixtral"], "data=2,fsdp=2,expert=2", {"layout": fsdp_2d}),
    # Likewise GPT-2's biases, whose gradients begin near zero: 3e-6 with this epsilon, 1.1e-5 with SOAP's 1e-8.
    (
        MODELS["gpt2"],
        "stage=2,fsdp=4",
        {"optimizer": dataclasses.replace(SOAP, epsilon=1e-6), "microbatches": 2},
    ),
    (MODELS["qwen-like"], "data=2,fsdp=2,tensor=2", {**ROW, "layout": fsdp_2d}),
]


def run_of(case: str) -> Run:
    model, mesh, changes = CASES[case]
    return tiny_run(model, mesh, **changes)


@functools.cache
def one_device(run: Run) -> Trained:
    return train(run, STEPS)


def assert_like_one_device(run: Run) -> None:
    many, one = train(run, STEPS), one_device(on_one_device(run))
    np.testing.assert_allclose(many.losses, one.losses, rtol=1e-5)
    if many.gradients is not None:
        assert largest_difference(many.gradients, one.gradients) < 1e-5


@every_case
def test_same_numbers_as_one_device(case: str) -> None:
    assert_like_one_device(run_of(case))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "mesh", "changes"), COMBINATIONS)
def test_same_numbers_in_combination(model: mw.Model, mesh: str, changes: dict[str, Any]) -> None:
    assert_like_one_device(tiny_run(model, mesh, **changes))


@every_case
def test_a_run_keeps_its_extensions_by_name(case: str) -> None:
    document = json.loads(json.dumps(run_to_dict(run_of(case))))
    assert "outside.extensions." in json.dumps(document)
    assert run_from_dict(document, "run.json") == run_of(case)


def bytes_on_first_device(tree: Any) -> int:
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == jax.devices()[0])


@every_case
def test_the_planner_counts_the_bytes_of_the_real_state(case: str) -> None:
    device_run = device_run_of(run_of(case))
    state = device_run.initial_state()
    real, planned = bytes_on_first_device(state.optimizer), state_bytes(device_run)
    # The planner leaves out the step counts of built-in optimizers, two of four bytes.
    assert real == planned + (8 if device_run.run.optimizer.name == "adamw" else 0)
    # On 8 devices: everything large is sharded.
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer))
    assert real < whole / 2


@every_case
def test_the_planner_prices_it_on_a_chip_from_outside(case: str) -> None:
    target = parse_target(own("outside.extensions.mi300x:mi300x:8"))
    if run_of(case).training.attention_kernel != "auto":
        with pytest.raises(ConfigError, match="the row kernel is written for TPUs"):
            price_run(run_of(case), target)
        return
    plan = price_run(run_of(case), target)
    assert plan.target.chip is mi300x and plan.estimate.fits
    assert 0 < plan.estimate.mfu < 1
    assert sum(plan.estimate.parts.values()) == pytest.approx(plan.estimate.seconds)


@functools.cache
def census_of(case: str) -> tuple[DeviceRun, Census]:
    device_run = device_run_of(run_of(case))
    return device_run, census_of_train_step(device_run)


@census_cases
def test_the_census_adds_up(case: str) -> None:
    device_run, census = census_of(case)
    state = device_run.initial_state()
    memory = census.memory.by_category()
    assert sum(census.memory.by_category().values()) == census.memory.compiled.peak
    assert memory["parameters"] == bytes_on_first_device(state.params)
    assert memory["optimizer state"] == bytes_on_first_device(state.optimizer)
    assert not census.unread and all(
        entry.axes is not None and entry.exact for entry in census.ledger
    )
    matmuls = sum(matmul.flops for matmul in census.flops.matmuls)
    # Each layer is recomputed once: four passes for three. Attention computes the masked half of its scores as well.
    assert (
        1.0
        < matmuls / sum(census.flops.model.values())
        < (1.5 if case not in ("optimizer", "pipeline schedule") else 3)
    )


@census_cases
def test_the_planner_counts_the_bytes_that_parameters_and_activations_move(case: str) -> None:
    """What the compiler adds for an optimizer that is not elementwise is in the census alone."""
    device_run, census = census_of(case)
    sent: dict[tuple[str, str], float] = {}
    for entry in census.ledger:
        sent[entry.kind, entry.axes_label] = (
            sent.get((entry.kind, entry.axes_label), 0) + entry.total
        )
    work, again = work_of(device_run), recomputed_roles(device_run.run.training.remat)
    planned: dict[tuple[str, str], float] = {}
    for m in movements(device_run, work, again):
        if m.kind in ("all-gather", "reduce-scatter") and m.payload:
            planned[m.kind, "+".join(m.axes)] = (
                planned.get((m.kind, "+".join(m.axes)), 0) + m.payload * m.times
            )
    assert planned
    for key, payload in planned.items():
        added = sent[key] if case == "optimizer" else 0.0
        assert 0.85 * (sent[key] - added) <= payload <= 1.15 * sent[key], key


def test_two_dimensional_fsdp_shards_both_dimensions() -> None:
    placed = place_run(run_of("layout"))
    at_rest = {path: where.at_rest for path, _, where in placed.layout.leaves}
    assert at_rest["h.fc_in"] == ((), ("fsdp",), ("tensor", "data"))
    assert at_rest["h.fc_out"] == ((), ("tensor", "data"), ("fsdp",))


def test_soap_orthogonalises_a_constant_gradient() -> None:
    """In the eigenbasis a constant gradient is diagonal, where Adam takes its signs: the update is its polar factor."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, n)))[0][:, :3] for n in (5, 3))
    grad = jnp.asarray(left * [8.0, 4.0, 2.0] @ right.T, jnp.float32)[None]
    rule = scale_by_soap(0.9, 0.5, 1e-3, every=1)
    state, update = rule.init(grad), jax.jit(rule.update)
    for _ in range(20):
        direction, state = update(grad, state)
    np.testing.assert_allclose(direction[0], left @ right.T, atol=5e-3)


def run_of_all_extensions() -> Run:
    """A run in which everything is from outside, with a checkpoint in its middle."""
    return Run(
        Nano(vocab_multiple=16, n_embd=32, depth=4),
        MeshShape.parse("stage=2,data=2,fsdp=2"),
        layout=fsdp_2d,
        fsdp_min_size=64,
        training=Training(
            steps=4, batch=16, seq=32, compute_dtype="float32", remat="projections", save_every=2, max_to_keep=4,
            eval_samples=16, **ZBV, **ROW,
        ),
        optimizer=SOAP,
        data=Data((sums,), sample=0),
        reporters=(CsvReport,),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, mw.Summary]:
    out = tmp_path_factory.mktemp("outside") / "run"
    return out, mw.train(run_of_all_extensions(), out, progress="none", cache=cache)


def test_run_json_names_every_extension(tmp_path: Path) -> None:
    write_run(run_of_all_extensions(), tmp_path / "run.json")
    document = json.loads((tmp_path / "run.json").read_text())
    names = {
        "family": document["model"]["family"],
        "optimizer": document["optimizer"]["name"],
        "learning rate": document["optimizer"]["lr_schedule"],
        "layout": document["layout"],
        "pipeline": document["training"]["pipeline_schedule"],
        "kernel": document["training"]["attention_kernel"],
        "data": document["data"]["paths"][0],
        "reporter": document["reporters"][0],
    }
    package = "outside.extensions"
    assert names == {
        "family": f"{package}.nano:Nano",
        "optimizer": f"{package}.soap:soap",
        "learning rate": f"{package}.inverse_sqrt:inverse_sqrt",
        "layout": f"{package}.fsdp_2d:fsdp_2d",
        "pipeline": f"{package}.zbv:zbv",
        "kernel": f"{package}.row_attention:row_kernel",
        "data": f"{package}.sums:sums",
        "reporter": f"{package}.csv_report:CsvReport",
    }


@pytest.mark.exhaustive
def test_reporter_and_learning_rate(trained: tuple[Path, mw.Summary]) -> None:
    lines = [json.loads(line) for line in (trained[0] / "metrics.jsonl").read_text().splitlines()]
    rows = list(csv.reader((trained[0] / "metrics.csv").read_text().splitlines()))
    losses = [(int(step), float(value)) for step, metric, value in rows if metric == "loss"]
    assert losses == [(line["step"], line["loss"]) for line in lines if "loss" in line]
    # Two steps of warm-up, the second at the peak, then the peak times sqrt(2 / (2 + t)).
    rates = [line["learning rate"] for line in lines if "learning rate" in line]
    assert rates == pytest.approx([1.5e-3, 3e-3, 3e-3 * (2 / 3) ** 0.5, 3e-3 * 0.5**0.5])


@pytest.mark.exhaustive
def test_resume_is_bitwise(trained: tuple[Path, mw.Summary], tmp_path: Path, cache: Path) -> None:
    out, summary = trained
    again = tmp_path / "again"
    shutil.copytree(out, again)
    run = read_run(again / "run.json")
    resumed = mw.train(run, again, start=2, progress="none", cache=cache)
    assert resumed.held_out_loss == summary.held_out_loss
    assert run.mesh is not None
    device_run = place_on_devices(run, build_mesh(run.mesh))
    states = []
    for folder in (out, again):
        with Checkpoints(folder / "checkpoints", max_to_keep=4) as checkpoints:
            states.append(checkpoints.restore(device_run, 4)[0])
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.exhaustive
def test_evaluation_on_another_mesh(trained: tuple[Path, mw.Summary], cache: Path) -> None:
    out, summary = trained
    assert mw.evaluate(out, mesh="data=4,tensor=2", cache=cache).loss == pytest.approx(
        summary.held_out_loss, rel=1e-5
    )


def test_plans_are_searched_and_written(tmp_path: Path) -> None:
    """The chip is named by its file; the plan keeps every name."""
    write_run(run_of_all_extensions(), tmp_path / "run.json")
    run = read_run(tmp_path / "run.json")
    target = parse_target(own(f"{FOLDER / 'mi300x.py'}:mi300x:2x8"))
    # Its kernel is none of this chip's.
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, vocab=VOCAB),
        training=dataclasses.replace(run.training, attention_kernel="auto"),
    )
    found = search(run, target)
    schedules = {plan.run.training.pipeline_schedule for plan in found.plans}
    assert run.training.pipeline_schedule in schedules
    best = found.plans[0]
    write_plan(best, target, tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    assert (
        plan.run == best.run
        and plan.run.optimizer == run.optimizer
        and plan.run.layout == run.layout
    )
    assert parse_target(plan.target) == target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "outside.extensions.soap:soap"}, "it is a function"),
        ({"layout": "outside.extensions.fsdp_2d:fsdp_3d"}, "did you mean 'fsdp_2d'"),
        ({"layout": f"{FOLDER}/fsdp_4d.py:fsdp_2d"}, "there is no such file"),
        ({"layout": "no_such_module:layout"}, "no module 'no_such_module'"),
        ({"optimizer": Optimizer("outside.extensions.sums:sums")}, "takes 0 positional arguments"),
        (
            {"attention_kernel": row_kernel, "mesh": "fsdp=4,context=2"},
            "between chunks in a ring, which row lacks",
        ),
        ({"pipeline_schedule": "outside.extensions.fsdp_2d:fsdp_2d"}, "it is a Layout"),
    ],
)
def test_a_wrong_extension_is_refused(changes: dict[str, Any], message: str) -> None:
    changes = own(changes)
    with pytest.raises(ConfigError, match=message):
        device_run_of(tiny_run(NANO, changes.pop("mesh", "data=2"), **changes))


def test_a_model_without_attention_trains_without_a_sample(tmp_path: Path) -> None:
    """By default it is left out with a word; a sample that is asked for is refused before the training."""
    left_out = device_run_of(tiny_run(MIN_GRU, data=Data((sums,))))
    check_sample(left_out)
    assert PreparedRun(left_out, cast(Any, None), (), ()).sample(cast(Any, None), tmp_path) == ""
    for data in (Data((sums,), sample=5), Data((sums,), sample_every=2)):
        with pytest.raises(ConfigError, match="they have no attention"):
            check_sample(device_run_of(tiny_run(MIN_GRU, data=data)))
    with pytest.raises(ConfigError, match="sample 0 is no text at all"):
        check_sample(device_run_of(tiny_run(MIN_GRU, data=Data((sums,), sample=0, sample_every=2))))


def test_an_object_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"top level of a \.py file"):
        Optimizer(name=lambda config, learning_rate: optax.sgd(learning_rate))  # type: ignore[arg-type]


def meshwright(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], text=True, capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.exhaustive
def test_the_command_line_takes_files(tmp_path: Path) -> None:
    """A recipe in the file of its family; the other extensions as options."""
    words = [
        f"{FOLDER / 'min_gru.py'}", "--layout", f"{FOLDER / 'fsdp_2d.py'}:fsdp_2d",
        "--optimizer.name", f"{FOLDER / 'soap.py'}:soap",
        "--optimizer.lr-schedule", f"{FOLDER / 'inverse_sqrt.py'}:inverse_sqrt",
    ]  # fmt: skip
    plans = json.loads(
        meshwright("plan", *words, "--on", f"{FOLDER / 'mi300x.py'}:mi300x:8", "--json")
    )
    assert plans["plans"] and plans["target"].endswith(":mi300x:1x8")
    rehearsal = json.loads(
        meshwright("rehearse", *words, "--mesh", "data=2,tensor=2", "--for-steps", "2", "--json")
    )
    assert [part["name"] for part in rehearsal["parts"]] == ["trains", "resumes"]


def test_a_script_may_define_what_it_trains(tmp_path: Path) -> None:
    """Objects of the script itself are named by its file, which is not run a second time."""
    script = tmp_path / "script.py"
    script.write_text(
        "import optax\n"
        "import meshwright as mw\n"
        "from meshwright.config import Optimizer\n"
        "from meshwright.plugins import name_of\n"
        "from meshwright.sharding.layouts import MEGATRON, find_layout\n"
        "print('runs')\n"
        "def sgd(config: Optimizer, learning_rate: optax.Schedule) -> optax.GradientTransformation:\n"
        "    return optax.sgd(learning_rate)\n"
        "layout = mw.Layout(MEGATRON, ('fsdp',), ('fsdp',), 'of the script')\n"
        "assert find_layout(name_of(layout)) is layout\n"
        "run = mw.recipe('tiny', mesh='fsdp=2')\n"
        "print(mw.Optimizer(name=sgd).name)\n"
    )
    done = subprocess.run([sys.executable, str(script)], text=True, capture_output=True, check=True)
    assert done.stdout.splitlines() == ["runs", f"{script}:sgd"]


def test_a_layer_kind_is_planned_as_it_states() -> None:
    """FLOPs, work, memory and cache come from the kind; it refuses `context`, over which its state would wait."""
    placed = place_run(tiny_run(SHORT_CONV, "fsdp=2,tensor=2"))
    kinds = placed.layout.spec.recurrences
    assert [kind.item for kind in kinds] == ["short convolution"] * 2
    items = forward_flops(SHORT_CONV, 64)
    assert items["short convolution"] == 0.0
    D, F, G = 64, 96, 64
    attention = 2 * D * 4 * (2 * 16 + 2 * 8)
    assert items["attention projections"] == 2 * (2 * 4 * D * G + attention)
    assert items["feed-forward"] == 4 * 6 * D * F
    work = work_of(placed)
    assert work.recurrence_inner == 0.0 and work.widths.value == (32 + 8 * 4) / 2
    cache = CachePlan(placed.layout.spec, placed.layout.shape, 8, 128, "float32")
    longer = CachePlan(placed.layout.spec, placed.layout.shape, 8, 256, "float32")
    keys_and_values = 2 * 2 * 128 * 4 * 4 * 4 * 4
    assert longer.bytes_per_device - cache.bytes_per_device == keys_and_values
    assert cache.bytes_per_device - keys_and_values == 2 * 32 * 4 * 2 * 4
    with pytest.raises(ConfigError, match="recurrence without segments with context"):
        place_run(tiny_run(SHORT_CONV, "context=2,fsdp=2"))
    plan = search(tiny_run(SHORT_CONV, "fsdp=8"), parse_target("v5e:2x4")).plans[0]
    assert plan.placed.layout.shape.context == 1
