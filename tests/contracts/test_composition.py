"""The matrix of features, walked: every pair of choices is in some run, held to one device's numbers or refused."""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from outside.extensions.short_conv import ShortConvModel
from tiny_runs import (
    DEEPSEEK,
    DEEPSEEK_SPARSE,
    MODELS,
    assert_same_steps,
    by_layers,
    device_run_of,
    place_params,
    random_batch,
    state_of,
    tiny_run,
    train,
    train_on_one_device,
)

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.config import Optimizer
from meshwright.errors import ConfigError
from meshwright.runs.checks import REFUSED, Refusal
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.sharding.params import Param, tree_map
from meshwright.sharding.schedules import find_schedule
from meshwright.step.train_step import CompiledTrainStep

CHOICES: dict[str, tuple[Any, ...]] = {
    "family": ("deepseek-like", "gpt2", "llama", "mixtral"),
    "mesh": (
        "data=2,fsdp=2,tensor=2", "stage=2,fsdp=2,expert=2", "stage=2,data=2*1,tensor=2", "stage=2,context=2,tensor=2",
        "context=2,expert=2,tensor=2", "data=2*1,fsdp=2,context=2",
    ),
    "pipeline_schedule": ("1f1b", "interleaved", "zbv", "zero_bubble", "circular"),
    "context_strategy": ("ulysses", "all_gather", "ring", "usp"),
    "layers": (4, 5),
    "dispatch": ("dropless", "capacity"),
    "microbatches": (2, 1),
    "remat": ("full", "none", "attention", "projections", "feed_forward", "offload_attention", "offload"),
    "layout": ("fsdp", "zero1", "folded_zero1"),
}  # fmt: skip


APART = frozenset({("dispatch", "capacity"), ("layout", "folded_zero1")})
"""Choices that no run has together (`test_every_refusal_is_made`)."""


def covering(choices: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Returns runs that have between them every pair of choices, each built name by name from what meets most."""
    names = list(choices)
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(names, 2)
        for x in choices[a]
        for y in choices[b]
    } - {APART}  # fmt: skip
    found = []
    while missing:
        # Sets have an order of their own in every process; the rows must not.
        first = min(
            missing,
            key=lambda pair: sorted((names.index(name), str(value)) for name, value in pair),
        )
        row = dict(sorted(first, key=lambda taken: names.index(taken[0])))
        for name in (n for n in names if n not in row):
            pairs = {
                value: {frozenset({(name, value), taken}) for taken in row.items()}
                for value in choices[name]
            }
            met = {value: len(missing & new) for value, new in pairs.items() if APART not in new}
            row[name] = max(met, key=met.__getitem__)
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        found.append({name: row[name] for name in names})
    return found


def run_of(row: dict[str, Any]) -> Run:
    model = dataclasses.replace(MODELS[row["family"]], layers=row["layers"])
    if hasattr(model, "dispatch"):
        model = dataclasses.replace(model, dispatch=row["dispatch"])
    changes = {
        n: row[n]
        for n in ("pipeline_schedule", "context_strategy", "microbatches", "remat", "layout")
    }
    dropout = 0.1 if row["family"] == "gpt2" else 0.0
    return tiny_run(model, row["mesh"], dropout=dropout, health=True, **changes)


def uneven(run: Run) -> bool:
    """Whether the stages of the run have unequal numbers of layers."""
    virtual_stages = find_schedule(run.training.pipeline_schedule).virtual_stages_for(
        run.training.virtual_stages
    )
    return (
        run.mesh is not None
        and run.mesh.stage > 1
        and run.model.layers % (run.mesh.stage * virtual_stages) != 0
    )


def features(row: dict[str, Any]) -> set[str]:
    """Returns what a run has: two of these meet in a pair."""
    run = run_of(row)
    training, model = run.training, run.model
    dispatch, mtp_depth = getattr(model, "dispatch", None), getattr(model, "mtp_depth", 0)
    axes = (
        {axis for axis, degree in run.mesh.degrees().items() if degree > 1} if run.mesh else set()
    )
    optional = {
        f"dispatch: {dispatch}": dispatch is not None,
        "tied embeddings": model.decoder.tied,
        "leading dense layers": getattr(model, "dense_layers", 0) > 0,
        "multi-token prediction": mtp_depth > 0,
        "several slices": run.mesh is not None and run.mesh.slices > 1,
        f"schedule: {training.pipeline_schedule}": "stage" in axes,
        "uneven stages": uneven(run),
        f"context: {training.context_strategy}": "context" in axes,
        "accumulation": training.microbatches > 1,
        "zero1": run.layout.endswith("zero1"),
        "layout: folded": run.layout.startswith("folded")
        and dispatch is not None
        and bool(axes & {"context", "tensor"}),
        "dropout": training.dropout > 0,
    }
    return (
        axes
        | {row["family"], f"remat: {training.remat}"}
        | {name for name, there in optional.items() if there}
    )


def pairs_in_effect(row: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Returns the pairs of features and choices that take effect in a run: no dispatch where there are no experts."""
    dispatch = getattr(run_of(row).model, "dispatch", None)
    chosen = {f"{name}: {row[name]}" for name in ("family", "mesh", "layers", "layout")} | {
        f"dispatch: {dispatch}"
    }
    return Counter(itertools.combinations(sorted(features(row) | chosen), 2))


def lightened(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with Llama in place of the family that compiles longest, where no pair is in that run alone."""
    counts = sum(map(pairs_in_effect, rows), Counter[tuple[str, str]]())
    found = list(rows)
    for place in sorted(
        range(len(rows)), key=lambda i: ("stage" in rows[i]["mesh"], i), reverse=True
    ):
        row, light = rows[place], {**rows[place], "family": "llama"}
        left = counts - pairs_in_effect(row) + pairs_in_effect(light)
        if row["family"] == "deepseek-like" and left.keys() >= counts.keys():
            counts, found[place] = left, light
    return found


ROWS = lightened(covering(CHOICES))


COMPILE_TIME = {"mixtral": 1.5, "deepseek-like": 2.5}
"""Time to compile a step, relative to that of a dense family."""


def covering_features(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns few of `rows` that have between them every feature, preferring families that compile sooner."""
    missing = set[str]().union(*map(features, rows))
    found = []
    while missing:
        best = max(
            rows, key=lambda row: len(missing & features(row)) / COMPILE_TIME.get(row["family"], 1)
        )
        found.append(best)
        missing -= features(best)
    return found


FAST = covering_features(ROWS)


def name_of(row: dict[str, Any]) -> str:
    return "-".join(str(v).replace("=", "") for v in row.values())


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row in FAST else pytest.mark.exhaustive, id=name_of(row))
        for row in ROWS
    ],
)
def test_every_pair_of_features(row: dict[str, Any]) -> None:
    run = run_of(row)
    one = train_on_one_device(run, 2)
    many = train(run, 2, initial=one.initial)
    assert_same_steps(many, one)
    if ROWS.index(row) % 3 == 0:
        np.testing.assert_allclose(many.evaluate(), one.evaluate(), rtol=1e-5)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: " with ".join(refusal.features))
def test_every_refusal_is_made(refusal: Refusal) -> None:
    row = {
        "family": "llama", "mesh": "stage=2,context=2,tensor=2", "layers": 5, "dispatch": "dropless", "remat": "full",
        "pipeline_schedule": "1f1b", "context_strategy": "all_gather", "microbatches": 2, "layout": "fsdp",
    }  # fmt: skip
    options = {"context": "context_strategy", "schedule": "pipeline_schedule"}
    row["family"] = "mixtral" if "layout: folded" in refusal.features else "llama"
    for feature in refusal.features:
        kind, _, value = feature.partition(": ")
        row |= {options.get(kind, kind): value} if value else {}
    run = run_of(row)
    if "multi-token prediction" in refusal.features:
        run = dataclasses.replace(run, model=dataclasses.replace(DEEPSEEK, layers=5, mtp_depth=1))
    if "recurrence without segments" in refusal.features:
        model = ShortConvModel(64, 64, 4, 16, vocab_multiple=16, kv_heads=8, mlp=96)
        run = dataclasses.replace(run, model=model)
    if "indexer" in refusal.features:
        run = dataclasses.replace(run, model=dataclasses.replace(DEEPSEEK_SPARSE, layers=5))
    with pytest.raises(ConfigError, match=refusal.instead):
        place_run(run)


@pytest.mark.parametrize(
    "name",
    [
        "muon",
        "adafactor",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("lion", "sgd")),
    ],
)
def test_padding_rows_change_no_update(name: str) -> None:
    """Three layers on two stages: the fourth row is zero and stays zero."""
    optimizer = Optimizer(name=name, learning_rate=1e-3, weight_decay=0.1)
    model = dataclasses.replace(MODELS["llama"], layers=3)
    run = tiny_run(model, "stage=2,fsdp=2", microbatches=2, optimizer=optimizer)
    one = train_on_one_device(run, 3)
    device_run = device_run_of(run)
    state, losses = device_run.initial_state(), []
    step = CompiledTrainStep(device_run, random_batch(device_run))
    for number in range(3):
        state, metrics = step(state, random_batch(device_run, number))
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
        for leaf in jax.tree.leaves(state.params["blocks"]):
            assert leaf.shape[0] == 4 and not np.asarray(leaf[3]).any()
    # Lion steps by signs and Muon by singular values: what is left of rounding moves them.
    np.testing.assert_allclose(losses, one.losses, rtol=1e-4 if name != "sgd" else 1e-5)


MOVES = [
    ("data=1", "stage=2,fsdp=2"),
    pytest.param("stage=2,fsdp=2", "stage=4,tensor=2", marks=pytest.mark.exhaustive),
    ("stage=4,tensor=2", "fsdp=2,expert=2,tensor=2 folded"),
    pytest.param("fsdp=2,expert=2,tensor=2", "data=2*2,context=2", marks=pytest.mark.exhaustive),
    pytest.param(
        "expert=2,context=2,tensor=2 folded",
        "fsdp=2,expert=2,tensor=2",
        marks=pytest.mark.exhaustive,
    ),
    ("data=2*2,context=2", "stage=3"),
    pytest.param("stage=3", "stage=2,expert=4", marks=pytest.mark.exhaustive),
    pytest.param("stage=2,expert=4", "data=1", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_checkpoints_move_between_meshes(before: str, after: str, tmp_path: Path) -> None:
    """State saved on one mesh, restored on another: the same bits, wherever the layers lie."""
    model = dataclasses.replace(MODELS["deepseek-like"], layers=7)
    sides = []
    for mesh, _, folded in (side.partition(" ") for side in (before, after)):
        schedule = "interleaved" if mesh == "stage=2,fsdp=2" else "1f1b"
        run = tiny_run(
            model, mesh, pipeline_schedule=schedule, context_strategy="all_gather", batch=48
        )
        sides.append(device_run_of(dataclasses.replace(run, layout=folded or "fsdp")))
    rng = np.random.default_rng(0)

    def values() -> Any:
        """Numbers that differ everywhere, with one row per layer; zero where the vocabulary is padded, as in a run."""

        def draw(p: Param) -> np.ndarray:
            x = rng.standard_normal(p.logical_shape, np.float32)
            if p.rows is not None:
                x[p.rows :] = 0
            return x

        return tree_map(draw, sides[0].layout.params)

    state = state_of(sides[0], values())
    mu, nu = (place_params(sides[0], values()) for _ in range(2))
    adam = state.optimizer[0]._replace(mu=mu, nu=nu)
    state = dataclasses.replace(state, optimizer=(adam, *state.optimizer[1:]))
    with Checkpoints(tmp_path / "checkpoints", max_to_keep=1) as checkpoints:
        checkpoints.save(state, sides[0], step=1, cursor=48)
        checkpoints.wait()
        found, manifest = checkpoints.restore(sides[1])
    assert manifest.tensors["params.blocks.query"].shape[0] == 6
    for a, b in (
        (state.params, found.params),
        (adam.mu, found.optimizer[0].mu),
        (adam.nu, found.optimizer[0].nu),
    ):
        first, second = (by_layers(side, x) for side, x in zip(sides, (a, b), strict=True))
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            # Tables that are padded to different multiples agree in their real rows.
            rows = min(len(x), len(y))
            np.testing.assert_array_equal(x[:rows], y[:rows])
