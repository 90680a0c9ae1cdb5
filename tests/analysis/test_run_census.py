"""Facts of a run that its census needs, taken from the model's specification."""

import dataclasses
from typing import Any

import pytest
from tiny_runs import DEEPSEEK_SPARSE, MODELS, QWEN3_NEXT, device_run_of, tiny_run

from meshwright.analysis.run_census import (
    causal_fraction,
    census_of_train_step,
    flops_band,
    skipped_by_kernels,
)
from meshwright.config import MeshShape
from meshwright.hardware.machine import Machine
from meshwright.models.model import AttentionSpec, LayerSpec, ModelSpec
from meshwright.runs.placed_run import place_run
from meshwright.runs.settle import settle
from xlacensus.program_census import doubts_of

SEQ = 16
exhaustive = pytest.mark.exhaustive


def spec(*attention: AttentionSpec | None) -> ModelSpec:
    return ModelSpec(64, tuple(LayerSpec("blocks", a) for a in attention))


def test_causal_attention_reads_half_of_the_keys() -> None:
    assert causal_fraction(spec(AttentionSpec(4, 4, 16)), SEQ) == pytest.approx((SEQ + 1) / 2 / SEQ)


def test_windows_may_differ_per_layer() -> None:
    """A window of 4 over 16 tokens: 1 + 2 + 3 positions at the beginning, then 4 for each of 13 tokens."""
    whole, window = AttentionSpec(4, 4, 16), AttentionSpec(4, 4, 16, window=4)
    narrow = (1 + 2 + 3 + 13 * 4) / SEQ**2
    assert causal_fraction(spec(window), SEQ) == pytest.approx(narrow)
    assert causal_fraction(spec(whole, window), SEQ) == pytest.approx(
        ((SEQ + 1) / 2 / SEQ + narrow) / 2
    )
    # Weighted by the FLOPs of each layer's attention: three times the heads count three times.
    heads = AttentionSpec(12, 4, 16, window=4)
    assert causal_fraction(spec(whole, heads), SEQ) == pytest.approx(
        ((SEQ + 1) / 2 / SEQ + 3 * narrow) / 4
    )


def test_a_model_without_attention_has_a_census() -> None:
    assert causal_fraction(spec(None, None), SEQ) == 0.5
    assert causal_fraction(spec(AttentionSpec(4, 4, 16), None), SEQ) == pytest.approx(
        (SEQ + 1) / 2 / SEQ
    )


@pytest.mark.parametrize(
    ("family", "mesh", "changes"),
    [
        ("llama", "fsdp=2,tensor=4", {"remat": "none"}),
        ("mixtral", "fsdp=2,expert=4", {}),
        ("gpt2", "stage=2,data=2,tensor=2", {"microbatches": 4, "pipeline_schedule": "1f1b"}),
    ],
)
def test_a_step_has_the_flops_of_its_model(family: str, mesh: str, changes: dict[str, Any]) -> None:
    device_run = device_run_of(tiny_run(MODELS[family], mesh, **changes))
    census = census_of_train_step(device_run)
    assert census.doubts == ()
    # Twice or half the tokens are noticed: a loop counted twice, layers that are missing.
    band = flops_band(device_run, 3.0)
    least, flops = sum(census.flops.model.values()), census.flops.compiled
    assert band.least < least < band.most
    assert "needs at least" in doubts_of(least / 2, 0.0, {}, band, None)[0]
    excess = 0.0 if family != "mixtral" else flops - least
    assert "explains at most" in doubts_of(4 * least + excess, excess, {}, band, None)[0]


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        ("data=1", "warmup"),
        pytest.param("data=1", "frozen", marks=exhaustive),
        pytest.param("tensor=4", "sparse", marks=exhaustive),
    ],
)
def test_a_step_with_an_indexer_has_the_flops_of_its_model(mesh: str, stage: Any) -> None:
    """In the warm-up the backward pass is the indexer's; reference attention computes all keys, chosen or not."""
    model = dataclasses.replace(DEEPSEEK_SPARSE, index_training=stage)
    census = census_of_train_step(device_run_of(tiny_run(model, mesh, seq=64)))
    assert census.doubts == ()


@exhaustive
def test_segments_of_linear_attention_explain_their_flops() -> None:
    """Each of four devices composes the states of all eight segments, and computes how its own change a state."""
    model = dataclasses.replace(QWEN3_NEXT, linear_key_size=64, linear_value_size=64)
    device_run = device_run_of(tiny_run(model, "context=4,fsdp=2", seq=256, remat="full"))
    census = census_of_train_step(device_run)
    assert census.doubts == ()
    assert flops_band(device_run, 3.0).most < 2 * census.flops.compiled


@pytest.mark.parametrize(("expert", "fraction"), [(1, 1.0), (2, 1 / 2), (4, 1 / 4), (8, 2 / 8)])
def test_buffers_of_experts_are_filled_by_an_even_load(expert: int, fraction: float) -> None:
    """Eight experts, two of a token: a device gets at most min(2, 8 / expert) rows for a token of each device."""
    run = tiny_run(MODELS["mixtral"], "data=1")
    placed = place_run(dataclasses.replace(run, mesh=MeshShape(expert=expert)))
    skipped = skipped_by_kernels(settle(placed, Machine("cpu")))
    assert skipped.group_fraction == pytest.approx(fraction)
    rows = 2 * run.training.batch * run.training.seq // expert
    assert skipped.sent_rows == ({"expert": rows} if expert > 1 else {})
