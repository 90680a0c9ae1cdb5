"""Choices that may change memory and time, never numbers: remat, unrolling, accumulation, chunks of the loss."""

import dataclasses
import functools
from typing import Any

import pytest
from tiny_runs import MODELS, Trained, largest_difference, tiny_run, train

MESH = "data=2,fsdp=2,tensor=2"


exhaustive = pytest.mark.exhaustive
FAMILIES = [pytest.param("gpt2", marks=exhaustive), "llama"]


@functools.cache
def plain(family: str) -> Trained:
    return train(tiny_run(MODELS[family], MESH, remat="none"), 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "choice",
    [
        *(pytest.param({"remat": remat}, marks=exhaustive) for remat in ("full", "projections", "attention")),
        {"unroll": 2},
        {"microbatches": 2},
        pytest.param({"microbatches": 4, "remat": "full"}, marks=exhaustive),
    ],
    ids=str,
)
def test_numbers_stay(family: str, choice: dict[str, Any]) -> None:
    changed = train(tiny_run(MODELS[family], MESH, **{"remat": "none", **choice}), 3, initial=plain(family).initial)
    assert changed.losses == pytest.approx(plain(family).losses, rel=1e-6)
    assert largest_difference(changed.gradients, plain(family).gradients) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_the_loss_change_no_number(family: str) -> None:
    """A vocabulary padded until the logits of 64 tokens take 4 MiB: at 1 MiB they are computed 16 tokens at a time."""
    model = dataclasses.replace(MODELS[family], vocab_multiple=2**15)
    whole = train(tiny_run(model, MESH, remat="none", logits_mib=64), 3)
    chunked = train(tiny_run(model, MESH, remat="none", logits_mib=1), 3, initial=whole.initial)
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6)
    assert largest_difference(chunked.gradients, whole.gradients) < 1e-6


def test_bfloat16_stays_near() -> None:
    half = train(tiny_run(MODELS["llama"], MESH, compute_dtype="bfloat16"), 3, initial=plain("llama").initial)
    # bfloat16 keeps 8 bits: a loss near 4 is known to about 0.4 %.
    assert half.losses == pytest.approx(plain("llama").losses, rel=4e-3)
    assert half.losses != plain("llama").losses
