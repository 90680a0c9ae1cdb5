"""Every optimizer: it learns, its state is sharded like its parameters, and it gives one device's numbers on eight."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tiny_runs import (
    MODELS,
    device_run_of,
    largest_difference,
    tiny_run,
    train,
    train_on_one_device,
)

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.config import Optimizer
from meshwright.errors import ConfigError
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.step.optimizers import LR_SCHEDULES, build_lr_schedule, build_optimizer
from meshwright.update_rules import UPDATE_RULES

RATES = dict.fromkeys(UPDATE_RULES, 3e-3) | {"lion": 1e-3, "sgd": 0.3}


def run_with(name: str, mesh: str, layout: str = "fsdp") -> Run:
    # Wide enough for Adafactor to factor its second moment (128 and more).
    model = dataclasses.replace(MODELS["llama"], width=128, mlp=256)
    optimizer = Optimizer(name=name, learning_rate=RATES[name], weight_decay=0.01)
    return tiny_run(model, mesh, layout=layout, optimizer=optimizer)


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("adafactor", "muon") else pytest.param(n, marks=pytest.mark.exhaustive)
        for n in RATES
    ],
)
def test_learns_alike_on_one_and_eight_devices(name: str) -> None:
    run = run_with(name, "data=2,fsdp=2,tensor=2", "zero1")
    one = train_on_one_device(run, 8)
    many = train(run, 8, initial=one.initial)
    assert one.losses[-1] < one.losses[0] - 0.02
    # Lion steps by signs: one gradient of rounding size moves a weight by a whole step, so optimizers differ in how
    # near they stay; each bound is twice what was seen.
    assert many.losses == pytest.approx(one.losses, rel=1e-4 if name in ("lion", "muon") else 1e-5)


@pytest.mark.parametrize(
    ("family", "mesh", "changes"),
    [
        pytest.param("mixtral", "fsdp=2,expert=2,tensor=2", {}, marks=pytest.mark.exhaustive),
        ("deepseek-like", "stage=2,fsdp=2,expert=2", {"microbatches": 2}),
        pytest.param(
            "gpt2", "data=2,fsdp=2,context=2", {"microbatches": 2}, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "llama", "data=2,tensor=4", {"param_dtype": "bfloat16"}, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_matrices_are_the_same_wherever_they_are(
    family: str, mesh: str, changes: dict[str, Any]
) -> None:
    """Muon with groups of learning rates: experts, uneven stages, replicas, masters; projections and single heads."""
    optimizer = Optimizer(
        "muon",
        1e-3,
        lr_groups=("embed=0.5", "role:ffn_in=2"),
        muon_heads="together" if family == "gpt2" else "each",
    )
    run = tiny_run(MODELS[family], mesh, optimizer=optimizer, **changes)
    one = train_on_one_device(run, 3)
    many = train(run, 3, initial=one.initial)
    assert many.losses == pytest.approx(one.losses, rel=2e-4 if "param_dtype" in changes else 1e-4)
    # Singular values near zero are amplified with their rounding errors: a few elements of a step of 1e-3 differ.
    assert largest_difference(many.params, one.params) < 2e-3


@pytest.mark.parametrize("name", RATES)
def test_state_is_sharded_like_its_parameters(name: str) -> None:
    device_run = device_run_of(run_with(name, "data=2,fsdp=2,tensor=2"))
    moments = jax.tree.leaves(device_run.abstract.optimizer)
    params = jax.tree.leaves(device_run.abstract.params)
    local_fraction = sum(map(local_size, moments)) / sum(x.size for x in moments)
    assert local_fraction < 1.3 * sum(map(local_size, params)) / sum(x.size for x in params)


def local_size(x: jax.ShapeDtypeStruct) -> int:
    size = 1
    for n in x.sharding.shard_shape(x.shape):
        size *= n
    return size


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_state_moves_between_meshes(name: str, tmp_path: Path) -> None:
    """Saved with a padding row on uneven stages, restored without: the same numbers for every layer."""
    model = dataclasses.replace(MODELS["llama"], width=128, mlp=256, layers=3)
    sides = [
        device_run_of(tiny_run(model, mesh, optimizer=Optimizer(name), microbatches=2))
        for mesh in ("stage=2,fsdp=2", "fsdp=2,tensor=2")
    ]
    state = sides[0].initial_state()
    gradients = jax.tree.map(lambda p: p * 1e-2, state.params)
    params, optimizer = sides[0].optimizer.update(
        gradients, state.optimizer, state.params, state.step
    )
    state = dataclasses.replace(state, params=params, optimizer=optimizer)
    state = jax.device_put(state, sides[0].abstract.shardings)
    with Checkpoints(tmp_path / "checkpoints", max_to_keep=1) as checkpoints:
        checkpoints.save(state, sides[0], step=1, cursor=16)
        checkpoints.wait()
        restored, _ = checkpoints.restore(sides[1])
    for (path, before), (other, after) in zip(
        *(jax.tree_util.tree_flatten_with_path(s.optimizer)[0] for s in (state, restored)),
        strict=True,
    ):
        assert path == other
        before, after = np.asarray(before), np.asarray(after)
        np.testing.assert_array_equal(before[:3] if before.shape != after.shape else before, after)


def rate_by_formula(o: Optimizer, steps: int, step: int) -> float:
    """The formula in the docstring of `build_lr_schedule`, written out."""
    peak, last = o.learning_rate, o.final_lr_fraction
    warmup = min(o.warmup_steps, steps - 1)
    peak_step = max(warmup - 1, 0)
    if step < peak_step:
        return peak * (step + 1) / warmup
    intervals = steps - 1 - peak_step
    if intervals == 0 or o.lr_schedule == "constant":
        return peak
    x = (step - peak_step) / intervals
    if o.lr_schedule == "cosine":
        x = (1 - math.cos(math.pi * x)) / 2
    if o.lr_schedule == "wsd":
        decay = math.ceil(intervals / 5)
        x = max(0, step - (steps - 1 - decay)) / decay
    return peak * (1 - (1 - last) * x)


@pytest.mark.parametrize("schedule", list(LR_SCHEDULES))
def test_a_schedule_is_its_formula_at_every_step(schedule: str) -> None:
    for steps in range(1, 21):
        for warmup in {0, 1, 2, steps // 2, steps - 1, steps + 1}:
            optimizer = Optimizer(
                learning_rate=0.5, lr_schedule=schedule, warmup_steps=warmup, final_lr_fraction=0.1
            )
            rates = np.broadcast_to(build_lr_schedule(optimizer, steps)(np.arange(20)), 20)
            expected = [rate_by_formula(optimizer, steps, step) for step in range(steps)]
            np.testing.assert_allclose(rates[:steps], expected, rtol=1e-5)


@pytest.mark.parametrize("schedule", [name for name in LR_SCHEDULES if name != "constant"])
def test_the_joints_of_a_schedule(schedule: str) -> None:
    """The last step has the final rate, the last step of warm-up the peak, and the peak does not repeat."""
    for steps in range(2, 21):
        for warmup in {0, 1, 2 % steps, steps // 2, steps - 1}:
            optimizer = Optimizer(
                learning_rate=1.0, lr_schedule=schedule, warmup_steps=warmup, final_lr_fraction=0.1
            )
            # Steps that a run does not have keep the rate of the last.
            every = build_lr_schedule(optimizer, steps)(np.arange(23)).tolist()
            rates, beyond = every[:steps], every[steps:]
            assert [rates[-1], *beyond] == pytest.approx([0.1] * (1 + len(beyond)))
            assert rates[max(warmup - 1, 0)] == max(rates) == 1.0
            assert rates[:warmup] == sorted(set(rates[:warmup]))
            assert schedule == "wsd" or rates.count(1.0) == 1


def test_wsd_decays_over_the_last_fifth() -> None:
    rate = build_lr_schedule(
        Optimizer(learning_rate=1.0, lr_schedule="wsd", final_lr_fraction=0.0), 101
    )
    rates = np.asarray(rate(np.arange(101))).tolist()
    assert rates[:81] == [1.0] * 81
    np.testing.assert_allclose(rates[81:], 1 - np.arange(1, 21) / 20, atol=1e-6)


def rule_with_bfloat16_momentum(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(o.beta1, accumulator_dtype=o.moment_dtype), optax.scale_by_learning_rate(rate)
    )


def rule_of_its_own_type(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.sgd(rate, momentum=o.beta1)


def test_the_type_of_the_first_moment_is_that_of_the_rule() -> None:
    """A rule from outside that stores the type is taken, and every refusal says what is true of its rule."""
    params = place_run(tiny_run(MODELS["llama"], "fsdp=1")).layout.params

    def build(rule: Any) -> optax.GradientTransformation:
        return build_optimizer(Optimizer(rule, moment_dtype="bfloat16"), 3, params)

    build(rule_with_bfloat16_momentum)
    with pytest.raises(ConfigError, match=r"has no array of bfloat16") as raised:
        build(rule_of_its_own_type)
    assert "adamw" not in str(raised.value)
    for name, row in UPDATE_RULES.items():
        if row.stores_first_moment:
            build(name)
        else:
            with pytest.raises(
                ConfigError, match=r"stores no first moment; those that do are adam"
            ):
                build(name)
