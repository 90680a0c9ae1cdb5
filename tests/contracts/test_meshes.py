"""Every family on every layout gives the numbers of one device: initial values bit for bit, losses, gradients."""

from pathlib import Path

import numpy as np
import pytest
from tiny_runs import (
    DENSE,
    MODELS,
    assert_same_initial,
    assert_same_steps,
    largest_difference,
    tiny_run,
    train,
    train_on_one_device,
)

exhaustive = pytest.mark.exhaustive

MESHES = [
    ("fsdp", "data=8"),
    ("fsdp", "fsdp=8"),
    ("fsdp", "tensor=8"),
    ("fsdp", "fsdp=4,tensor=2"),
    ("fsdp", "data=2,fsdp=2,tensor=2"),
    ("fsdp", "fsdp=2,context=2,tensor=2"),
    ("fsdp", "data=2*2,tensor=2"),
    ("zero1", "data=8"),
    ("zero1", "data=2,fsdp=2,tensor=2"),
]
MIXED = [row for row in MESHES if row[1] in ("data=2,fsdp=2,tensor=2", "fsdp=2,context=2,tensor=2")]
FAST = {
    ("llama", "fsdp", "data=2*2,tensor=2"),
    ("llama", "zero1", "data=2,fsdp=2,tensor=2"),
    ("gpt2", "fsdp", "data=2,fsdp=2,tensor=2"),
    ("qwen-like", "fsdp", "fsdp=2,context=2,tensor=2"),
}
"""Rows that between them have every dense family, layout and axis; the others are exhaustive."""
STEPS = 20


@pytest.mark.parametrize(
    ("family", "layout", "mesh"),
    [
        pytest.param(family, *row, marks=() if (family, *row) in FAST else exhaustive)
        for family in DENSE
        for row in (MESHES if family == "llama" else MIXED)
    ],
)
def test_same_numbers_as_one_device(family: str, layout: str, mesh: str) -> None:
    run = tiny_run(MODELS[family], mesh, layout=layout)
    one, many = train_on_one_device(run, STEPS), train(run, STEPS)
    assert_same_initial(many, one)
    assert_same_steps(many, one)


@pytest.mark.parametrize(
    ("family", "mesh", "steps", "layout"),
    [
        pytest.param("mixtral", "expert=8", STEPS, "fsdp", marks=exhaustive),
        pytest.param("mixtral", "fsdp=2,expert=4", STEPS, "fsdp", marks=exhaustive),
        pytest.param("deepseek-like", "expert=2,fsdp=2,tensor=2", STEPS, "fsdp", marks=exhaustive),
        pytest.param("mixtral", "expert=2,fsdp=2,tensor=2", 3, "fsdp", marks=exhaustive),
        pytest.param("mixtral", "context=8", STEPS, "folded", marks=exhaustive),
        pytest.param("mixtral", "expert=2,context=2,tensor=2", STEPS, "folded", marks=exhaustive),
        pytest.param(
            "deepseek-like", "data=2,context=2,tensor=2", STEPS, "folded_zero1", marks=exhaustive
        ),
        ("deepseek-like", "fsdp=2,expert=2,tensor=2", 3, "folded"),
    ],
)
def test_experts_over_devices(family: str, mesh: str, steps: int, layout: str) -> None:
    run = tiny_run(MODELS[family], mesh, layout=layout)
    one, many = train_on_one_device(run, steps), train(run, steps)
    assert_same_initial(many, one)
    assert_same_steps(many, one)
    np.testing.assert_allclose(many.evaluate(), one.evaluate(), rtol=1e-5)
    assert largest_difference(many.params, one.params) < 1e-4


@exhaustive
@pytest.mark.parametrize(
    "mesh", ["fsdp=2*4", "fsdp=4,data=2*1", "tensor=2*2,fsdp=2", "expert=2*2,fsdp=2"]
)
def test_any_axis_crosses_slices(mesh: str) -> None:
    run = tiny_run(MODELS["mixtral"], mesh, layout="zero1")
    one = train_on_one_device(run, STEPS)
    assert_same_steps(train(run, 3, initial=one.initial), one)


@pytest.mark.parametrize(
    ("family", "mesh", "strategy"),
    [
        pytest.param("qwen-like", "data=2,context=4", "all_gather", marks=exhaustive),
        pytest.param("qwen-like", "data=2,context=4", "ulysses", marks=exhaustive),
        ("llama", "context=4,tensor=2", "usp"),
        pytest.param("gpt2", "context=8", "ring", marks=exhaustive),
    ],
)
def test_every_way_to_split_the_sequence(family: str, mesh: str, strategy: str) -> None:
    run = tiny_run(MODELS[family], mesh, context_strategy=strategy, microbatches=2)
    one = train_on_one_device(run, STEPS)
    assert_same_steps(train(run, 5, initial=one.initial), one)


@pytest.mark.parametrize("family", MODELS)
def test_a_run_learns_as_it_always_did(family: str) -> None:
    """The golden curve: written by `python tests/golden/write.py`, so a change of numbers is a visible diff."""
    losses = train_on_one_device(tiny_run(MODELS[family]), STEPS).losses
    golden = np.loadtxt(Path(__file__).parents[1] / "golden" / f"{family}.txt")
    np.testing.assert_allclose(losses, golden, rtol=1e-5)
    assert losses[-1] < losses[0] - 0.1
