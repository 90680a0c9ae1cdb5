"""Adafactor of single layers, learning rates of groups, and batches that grow."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_runs import MODELS, device_run_of, tiny_run

import meshwright as mw
from meshwright.config import Optimizer, Training
from meshwright.data.batch import ramp_of
from meshwright.errors import ConfigError
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_run
from meshwright.sharding.params import Param, named_leaves, tree_map
from meshwright.step.optimizers import build_optimizer, lr_factors


def random_like(params: Any, rng: np.random.Generator) -> Any:
    return tree_map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)


def test_adafactor_is_optaxs_of_every_layer() -> None:
    """Two steps on layers of very different gradients: one layer's means and clipping know nothing of another's."""
    model = dataclasses.replace(MODELS["llama"], width=128, mlp=256, layers=3)
    params = device_run_of(tiny_run(model)).layout.params
    rule = build_optimizer(Optimizer("adafactor", 1e-2, "constant", weight_decay=0.1), 10, params)
    alone = optax.adafactor(1e-2, multiply_by_parameter_scale=False, weight_decay_rate=1e-3)
    without_decay = optax.adafactor(1e-2, multiply_by_parameter_scale=False)
    rng = np.random.default_rng(0)
    weights = random_like(params, rng)
    state, update = rule.init(weights), jax.jit(rule.update)
    states: dict[tuple[str, int], Any] = {}
    for _ in range(2):
        grads = tree_map(
            lambda p, x: (
                x * 10.0 ** np.arange(p.shape[0]).reshape(-1, *(1,) * (x.ndim - 1))
                if "L" in p.dims
                else x
            ),
            params,
            random_like(params, rng),
        )
        updates, state = update(grads, state, weights)
        for path, p in named_leaves(params).items():
            if path not in ("blocks.query", "blocks.down", "blocks.mlp_norm"):
                continue
            one = alone if p.init == "normal" else without_decay
            for layer in range(3):
                w, g = (jnp.asarray(named_leaves(tree)[path][layer]) for tree in (weights, grads))
                before = states.get((path, layer)) or one.init(w)
                expected, states[path, layer] = one.update(g, before, w)
                np.testing.assert_allclose(
                    named_leaves(updates)[path][layer], expected, rtol=2e-5, atol=1e-8
                )


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd"])
def test_weight_decay_is_decoupled(name: str) -> None:
    """Without gradients five steps leave (1 - rate x decay)^5 = 0.951 of a matrix, and all of a norm."""
    params = {"embed": Param((4, 4), "VD"), "norm": Param((4,), "D", "ones")}
    rule = build_optimizer(Optimizer(name, 0.1, "constant", weight_decay=0.1, beta1=0.9), 5, params)
    weights = tree_map(lambda p: jnp.ones(p.shape), params)
    state = rule.init(weights)
    for _ in range(5):
        updates, state = rule.update(jax.tree.map(jnp.zeros_like, weights), state, weights)
        weights = optax.apply_updates(weights, updates)
    np.testing.assert_allclose(weights["embed"], 0.99**5, rtol=1e-6)
    np.testing.assert_array_equal(weights["norm"], 1.0)


def test_a_group_has_its_own_learning_rate() -> None:
    """AdamW with groups is AdamW at those rates, weight decay included; the first pattern that matches counts."""
    params = device_run_of(tiny_run(MODELS["mixtral"])).layout.params
    groups = ("embed=0", "role:router=0.5", "blocks.*=2")
    rng = np.random.default_rng(0)
    weights, grads = random_like(params, rng), random_like(params, rng)

    def updates(**changes: Any) -> dict[str, Any]:
        rule = build_optimizer(Optimizer("adamw", lr_schedule="constant", **changes), 10, params)
        return named_leaves(rule.update(grads, rule.init(weights), weights)[0])

    found = updates(learning_rate=1e-3, lr_groups=groups)
    at = {rate: updates(learning_rate=rate) for rate in (1e-3, 5e-4, 2e-3)}
    assert not np.any(found["embed"])
    for path, rate in (
        ("unembed", 1e-3),
        ("blocks.router", 5e-4),
        ("blocks.query", 2e-3),
        ("blocks.mlp_norm", 2e-3),
    ):
        np.testing.assert_allclose(found[path], at[rate][path], rtol=1e-6)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ("embedd=2", "did you mean 'embed'?"),
        ("role:routers=2", "did you mean 'router'?"),
        ("blocks.query", "PATTERN=FACTOR"),
        ("embed=-1", "of 0 or more"),
        ("blocks.expert_gate=3", r"went to blocks\.\*=2"),
    ],
)
def test_groups_that_match_nothing_are_refused(group: str, says: str) -> None:
    params = MODELS["mixtral"].params()
    with pytest.raises(ConfigError, match=says):
        lr_factors(("blocks.*=2", group), params)


def test_a_ramp_counts_its_sequences() -> None:
    """By hand: 3 steps of 8, 2 of 16, then 32."""
    ramp = ramp_of(Training(batch=32, batch_ramp=("3=8", "2=16")))
    assert [ramp.batch(step) for step in range(7)] == [8, 8, 8, 16, 16, 32, 32]
    assert [ramp.read_before(step) for step in range(8)] == [0, 8, 16, 24, 40, 56, 88, 120]
    for part in ("3", "0=8", "3=x", "=8"):
        with pytest.raises(ConfigError, match="STEPS=SEQUENCES"):
            ramp_of(Training(batch_ramp=(part,)))
    with pytest.raises(ConfigError, match=r"--training.batch-ramp with 16 or 8"):
        place_run(tiny_run(MODELS["llama"], "fsdp=8", batch=32, batch_ramp=("3=12",)))


def ramped(out: Path, cache: Path, **changes: Any) -> tuple[mw.Summary, list[dict[str, Any]]]:
    (cache / "ramp.txt").write_text("".join(chr(97 + i * i % 26) for i in range(9000)))
    run = mw.recipe(
        "tiny", mesh="data=1", steps=4, batch=16, seq=16, batch_ramp=("2=8",), compute_dtype="float32", layers=1,
        width=32, heads=4, kv_heads=2, mlp=64, paths=(str(cache / "ramp.txt"),), tokenizer="bytes", sample=0,
        optimizer=Optimizer(lr_schedule="constant", lr_groups=("embed=0.5",)), save_every=1, max_to_keep=9,
    )  # fmt: skip
    summary = mw.train(run, out=out, progress="none", cache=cache, devices=1, **changes)
    return summary, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_ramp_reads_every_sample_once_and_resumes_bitwise(tmp_path: Path, cache: Path) -> None:
    """Stopped in the ramp and resumed: the losses of the run without a stop, from the same samples."""
    whole, rows = ramped(tmp_path / "whole", cache)
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert whole.tokens == 16 * (8 + 8 + 16 + 16) and whole.steps_taken == 4
    assert [row["batch"] for row in rows if "batch" in row] == [8, 8, 16, 16]
    again, rows = ramped(tmp_path / "whole", cache, start=1)
    assert again.steps_taken == 3 and again.tokens == 16 * (8 + 16 + 16)
    assert {row["step"]: row["loss"] for row in rows if "loss" in row} == losses
    run: Run = read_run(tmp_path / "whole" / "run.json")
    assert run.training.batch_ramp == ("2=8",) and run.optimizer.lr_groups == ("embed=0.5",)
