"""Choices that may change memory and time, never numbers: remat, overlap, unrolling, accumulation, loss chunks."""

import dataclasses
import functools
from typing import Any

import pytest
from tiny_runs import (
    MODELS,
    Trained,
    assert_same_steps,
    device_run_of,
    largest_difference,
    random_batch,
    tiny_run,
    train,
    train_on_one_device,
)

from meshwright.config import Remat
from meshwright.errors import ConfigError
from meshwright.hardware.interconnect import machine_of_target
from meshwright.hardware.targets import parse_target
from meshwright.models.remat import SaveHidden, save_as_it_is, save_tokens_last
from meshwright.planner.estimate import with_remat
from meshwright.runs.settle import Settled, settle
from meshwright.step.train_step import build_train_step

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
        *(
            pytest.param({"remat": remat}, marks=exhaustive)
            for remat in ("full", "projections", "attention", "attention_out")
        ),
        {"tensor_strategy": "ring"},
        {"saved_layers": 1, "remat": "full"},
        pytest.param(
            {"saved_layers": 1, "remat": "attention_out", "gather_ahead": "layer"}, marks=exhaustive
        ),
        {"gather_ahead": "layer", "remat": "full"},
        {"gather_ahead": "layer", "remat": "projections"},
        pytest.param(
            {"gather_ahead": "layer", "remat": "attention_out", "microbatches": 2}, marks=exhaustive
        ),
        {"unroll": 2},
        {"microbatches": 2},
        pytest.param({"microbatches": 4, "remat": "full"}, marks=exhaustive),
    ],
    ids=str,
)
def test_numbers_stay(family: str, choice: dict[str, Any]) -> None:
    changed = train(
        tiny_run(MODELS[family], MESH, **{"remat": "none", **choice}),
        3,
        initial=plain(family).initial,
    )
    assert changed.losses == pytest.approx(plain(family).losses, rel=1e-6)
    assert largest_difference(changed.gradients, plain(family).gradients) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_in_pieces_of_the_batch(family: str) -> None:
    """Four pieces, each of which waits for the sums of the last but one; documents are cut with their sequences."""
    run = tiny_run(MODELS[family], "data=2,tensor=4", remat="projections", tensor_strategy="ring")
    assert (
        device_run_of(run).local_model.execution.attention_pieces == 4 and run.training.batch == 16
    )
    whole = train(
        dataclasses.replace(
            run, training=dataclasses.replace(run.training, tensor_strategy="gather")
        ),
        3,
    )
    pieces = train(run, 3, initial=whole.initial)
    assert pieces.losses == pytest.approx(whole.losses, rel=1e-6)
    assert largest_difference(pieces.gradients, whole.gradients) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_features_are_kept_with_tokens_last_on_v6e(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(MODELS[family], MESH, remat="projections")
    placed = device_run_of(run)

    def chosen(target: str, remat: Remat) -> SaveHidden:
        settled = settle(
            with_remat(placed, remat), machine_of_target(parse_target(target), placed.layout.shape)
        )
        return settled.save_hidden

    assert chosen("v6e:2x4", "projections") is save_tokens_last
    # Where they are computed again nothing is copied, and other compilers read them as they are.
    assert {chosen("v6e:2x4", "full"), chosen("v5p:2x2x2", "projections")} == {save_as_it_is}
    monkeypatch.setattr(Settled, "save_hidden", property(lambda self: save_tokens_last))
    changed = train(run, 3, initial=plain(family).initial)
    assert changed.losses == pytest.approx(plain(family).losses, rel=1e-6)
    assert largest_difference(changed.gradients, plain(family).gradients) < 1e-6


@pytest.mark.parametrize("precision", ["int8", pytest.param("fp8_rowwise", marks=exhaustive)])
def test_weights_in_low_precision_gather_ahead(precision: str) -> None:
    """Integers have no gradient that a scan could carry."""
    changes = {"remat": "projections", "matmul_precision": precision, "microbatches": 2}
    within, ahead = (
        tiny_run(MODELS["llama"], "fsdp=2", gather_ahead=g, **changes) for g in ("none", "layer")
    )
    expected = train(within, 3)
    found = train(ahead, 3, initial=expected.initial)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert largest_difference(found.gradients, expected.gradients) < 1e-6


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=exhaustive) for f in ("mixtral", "deepseek-like")]
)
def test_layers_with_experts_gather_ahead(family: str) -> None:
    """The balance loss of a layer's aux has a gradient too, and a stack of one layer has no layer ahead."""
    run = tiny_run(MODELS[family], "fsdp=2,expert=2,tensor=2", remat="full", health=True)
    within = train(run, 3)
    ahead = train(
        dataclasses.replace(run, training=dataclasses.replace(run.training, gather_ahead="layer")), 3,
        initial=within.initial,
    )  # fmt: skip
    assert ahead.losses == pytest.approx(within.losses, rel=1e-6)
    assert largest_difference(ahead.gradients, within.gradients) < 1e-6


@pytest.mark.parametrize("remat", ["full", "projections"])
def test_gathering_ahead_saves_no_weights(remat: str) -> None:
    """Eight layers whose weights are larger than their activations: their gathered weights are never all there."""
    model = dataclasses.replace(MODELS["llama"], width=256, layers=8, mlp=512)

    def temporaries(**changes: Any) -> int:
        run = tiny_run(model, "fsdp=8", batch=8, seq=8, remat=remat, dropout=0.0, **changes)
        device_run = device_run_of(run)
        lowered = build_train_step(device_run).lower(device_run.abstract, random_batch(device_run))
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)

    one_layer = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)
    more = temporaries(gather_ahead="layer") - temporaries(gather_ahead="none")
    # The first weights of a second layer and its gradients, twice where XLA:CPU copies the carry; eight layers not.
    assert more < 4 * one_layer


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_the_loss_change_no_number(family: str) -> None:
    """A vocabulary padded until the logits of 64 tokens take 4 MiB: at 1 MiB they are computed 16 tokens at a time."""
    model = dataclasses.replace(MODELS[family], vocab_multiple=2**15)
    whole = train(tiny_run(model, MESH, remat="none", logits_mib=64), 3)
    chunked = train(tiny_run(model, MESH, remat="none", logits_mib=1), 3, initial=whole.initial)
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6)
    assert largest_difference(chunked.gradients, whole.gradients) < 1e-6


def test_bfloat16_stays_near() -> None:
    half = train(
        tiny_run(MODELS["llama"], MESH, compute_dtype="bfloat16"), 3, initial=plain("llama").initial
    )
    # bfloat16 keeps 8 bits: a loss near 4 is known to about 0.4 %.
    assert half.losses == pytest.approx(plain("llama").losses, rel=4e-3)
    assert half.losses != plain("llama").losses


def test_a_policy_left_open_recomputes_whole_layers_on_simulated_devices() -> None:
    run = tiny_run(MODELS["llama"], "data=1", remat="auto")
    assert device_run_of(run).run.training.remat == "full"


@pytest.mark.parametrize("changes", [{"remat": "none"}, {"remat": "full", "unroll": 2}], ids=str)
def test_gathering_ahead_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"training\.gather-ahead auto"):
        device_run_of(tiny_run(MODELS["llama"], "fsdp=2", gather_ahead="layer", **changes))


@pytest.mark.parametrize(
    ("family", "mesh", "changes"),
    [
        ("mixtral", "fsdp=2,expert=4", {"remat": "projections"}),
        ("deepseek-like", "expert=8", {"remat": "full", "gather_ahead": "layer"}),
        ("deepseek-like", "stage=2,expert=2,tensor=2", {"remat": "full", "microbatches": 2}),
        ("mixtral", "expert=4,context=2", {"remat": "none", "batch": 12}),
    ],
    ids=str,
)
def test_rows_travel_to_experts_in_pieces_of_the_batch(
    family: str, mesh: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pieces have the numbers of one device; three sequences of a device stay one batch."""
    run = tiny_run(MODELS[family], mesh, **changes)
    monkeypatch.setattr(Settled, "exchange_pieces", 2)
    one = train_on_one_device(run, 2)
    assert_same_steps(train(run, 2, initial=one.initial), one)


@pytest.mark.parametrize(("batch", "times"), [(16, 2), (12, 1)])
def test_each_piece_of_the_batch_has_its_exchange(
    batch: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchanges() -> int:
        device_run = device_run_of(tiny_run(MODELS["mixtral"], "expert=4", batch=batch))
        traced = build_train_step(device_run).trace(device_run.abstract, device_run.abstract_batch)
        return str(traced.jaxpr).count("ragged_all_to_all[")

    at_once = exchanges()
    monkeypatch.setattr(Settled, "exchange_pieces", 2)
    assert at_once and exchanges() == times * at_once
