"""DeepSeek-V3: latent attention on every kind of mesh, published sizes, multi-token prediction, fp8 weights."""

import dataclasses
from pathlib import Path
from typing import Any

import hf_models
import jax
import numpy as np
import pytest
from tiny_runs import DEEPSEEK, assert_same_steps, largest_difference, tiny_run, train, train_on_one_device

from meshwright.data.batch import Batch
from meshwright.models.further_tokens import shift

exhaustive = pytest.mark.exhaustive
STEPS = 3
FURTHER = dataclasses.replace(DEEPSEEK, mtp_depth=1, mtp_weight=0.5)
"""With a layer that predicts the token after the next."""


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


def test_tokens_after_the_next_stay_in_their_document() -> None:
    row = [np.array([x]) for x in ([1, 2, 3, 4], [2, 3, 4, 5], [0, 0, 1, 1], [0, 1, 0, 1], [1.0, 0.5, 2.0, 3.0])]
    found = shift(jax.tree.map(np.asarray, Batch(*row)))
    # Position 1 predicts the end of a document, and position 3 has no token after the next.
    np.testing.assert_array_equal(found.inputs, [[2, 3, 4, 5]])
    np.testing.assert_array_equal(found.targets, [[3, 4, 5, 0]])
    np.testing.assert_array_equal(found.weights, [[0.5, 0, 3.0, 0]])


@pytest.mark.parametrize(
    "mesh",
    ["expert=2,fsdp=2,tensor=2", pytest.param("data=2,context=2,tensor=2", marks=exhaustive)],
)
def test_multi_token_prediction_has_the_numbers_of_one_device(mesh: str) -> None:
    run = tiny_run(FURTHER, mesh, context_strategy="ring", microbatches=2)
    one = train_on_one_device(run, STEPS)
    many = train(run, STEPS, initial=one.initial)
    assert_same_steps(many, one)
    assert largest_difference(many.params, one.params) < 1e-4
    # The bias of its router is balanced as those of the others.
    assert np.abs(one.params["mtp"]["router_bias"] - one.initial["mtp"]["router_bias"]).max() > 0
