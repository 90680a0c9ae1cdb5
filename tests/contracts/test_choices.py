"""Choices that may change memory and time, never numbers: remat, unrolling, accumulation, chunks of the loss."""

import functools
from typing import Any

import pytest
from tiny_runs import MODELS, Trained, largest_difference, tiny_run, train

MESH = "data=2,fsdp=2,tensor=2"


@functools.cache
def plain(family: str) -> Trained:
    return train(tiny_run(MODELS[family], MESH, remat="none"), 3)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "choice",
    [{"remat": "full"}, {"remat": "projections"}, {"remat": "attention"}, {"unroll": 2}, {"microbatches": 2},
     {"microbatches": 4, "remat": "full"}, {"logits_mib": 0}],
    ids=str,
)  # fmt: skip
def test_numbers_stay(family: str, choice: dict[str, Any]) -> None:
    changed = train(tiny_run(MODELS[family], MESH, **{"remat": "none", **choice}), 3)
    assert changed.losses == pytest.approx(plain(family).losses, rel=1e-6)
    assert largest_difference(changed.gradients, plain(family).gradients) < 1e-6


def test_bfloat16_stays_near() -> None:
    half = train(tiny_run(MODELS["llama"], MESH, compute_dtype="bfloat16"), 3)
    # bfloat16 keeps 8 bits: a loss near 4 is known to about 0.4 %.
    assert half.losses == pytest.approx(plain("llama").losses, rel=4e-3)
    assert half.losses != plain("llama").losses
