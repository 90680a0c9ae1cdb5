"""DeepSeek-V3: latent attention on every kind of mesh, published sizes, multi-token prediction, fp8 weights."""

from pathlib import Path
from typing import Any

import hf_models
import pytest
from tiny_runs import DEEPSEEK, assert_same_steps, largest_difference, tiny_run, train, train_on_one_device

exhaustive = pytest.mark.exhaustive
STEPS = 3


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("expert=2,fsdp=2,tensor=2", {"remat": "projections"}),
        ("stage=2,fsdp=2,expert=2", {"microbatches": 4}),
        ("context=4,tensor=2", {"context_strategy": "ring"}),
        pytest.param("context=2,data=2,tensor=2", {"context_strategy": "ulysses"}, marks=exhaustive),
        pytest.param("context=2,data=2,tensor=2", {"context_strategy": "all_gather"}, marks=exhaustive),
        pytest.param("data=2,tensor=4", {"tensor_strategy": "ring", "remat": "none"}, marks=exhaustive),
        pytest.param("stage=2,context=2,tensor=2", {"context_strategy": "usp"}, marks=exhaustive),
    ],
    ids=str,
)
def test_the_numbers_of_one_device(mesh: str, changes: dict[str, Any]) -> None:
    run = tiny_run(DEEPSEEK, mesh, **changes)
    one = train_on_one_device(run, STEPS)
    many = train(run, STEPS, initial=one.initial)
    assert_same_steps(many, one)
    assert largest_difference(many.params, one.params) < 1e-4


@pytest.mark.parametrize("row", ["deepseek-v3", "deepseek-v2-lite"])
def test_eight_steps_of_adamw_are_those_of_torch(row: str, tmp_path: Path) -> None:
    model = hf_models.save(row, tmp_path)
    found = hf_models.losses_of(tmp_path, "fsdp=2,tensor=2", 8)
    assert found == pytest.approx(hf_models.reference_losses(model, 8), rel=1e-5)
    assert found[-1] < found[0] - 0.1
