"""A prediction above everything that was measured on its chip says so."""

import dataclasses
import json
from typing import Any

import beside_records
import pytest
import records

from meshwright.config import MeshShape
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.targets import parse_target
from meshwright.planner.estimate import Estimate, estimate
from meshwright.planner.records import RECORDS_FILE, read_records, record_note, record_of
from meshwright.runs.catalogue import catalogue
from meshwright.runs.placed_run import place_run
from meshwright.runs.recipe import find_recipe
from meshwright.trainer.relations import with_stand_in_vocab


def predicted(chip: str, mfu: float) -> Estimate:
    """A prediction on one device of a chip, with another MFU."""
    on = parse_target("h100:1")
    found = estimate(place_run(find_recipe("gpt2")), on)
    target = dataclasses.replace(on, chip=CHIPS[chip], name=chip)
    return dataclasses.replace(found, target=target, model_flops=mfu * found.seconds * found.peak)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_prediction_above_the_record_of_its_chip_says_so(chip: str) -> None:
    record = record_of(predicted(chip, 0.0), "compute")
    if record is None:
        text = record_note(predicted(chip, 0.01), "compute")
        assert text and "no run in bfloat16 is published" in text
        return
    assert record_note(predicted(chip, record.mfu - 0.001), "compute") is None
    text = record_note(predicted(chip, record.mfu + 0.001), "compute")
    assert text and f"{record.mfu:.1%}" in text and record.model in text and chip in text


def test_the_records_are_what_the_rows_say() -> None:
    """The file is what its script writes now, from every row that states a speed."""
    found: list[dict[str, Any]] = json.loads(RECORDS_FILE.read_text(encoding="utf-8"))["records"]
    assert found == [dataclasses.asdict(record) for record in records.records()]


def test_plans_beside_records_are_those_of_now() -> None:
    """The table of docs/plan.md has the plans that the planner makes now."""
    page = beside_records.PAGE.read_text(encoding="utf-8")
    for case in beside_records.CASES:
        assert beside_records.row_of(case) in page


def test_records_count_flops_as_predictions_do() -> None:
    """Steps and rates of v6e and v5p, by hand; what their publishers state (50.3 %, 71.5 %) counts hidden scores."""
    bfloat16 = [r for r in read_records() if not r.below_bfloat16]
    of_family = {family: [r for r in bfloat16 if r.family == family] for family in ("v5p", "v6e")}
    best = of_family["v6e"][0]
    flops = 3 * (2 * 69.5e9 + 4 * 80 * 8192 * 8193 / 2)
    assert best.model == "llama3.1-70b"
    assert best.mfu == pytest.approx(960 * flops / 918e12, rel=0.01)
    eight = next(r for r in of_family["v6e"] if r.model == "Llama3-8B")
    flops = 3 * (2 * 7.505e9 + 4 * 32 * 4096 * 8193 / 2)
    assert eight.mfu == pytest.approx(4 * 8192 / 4.217 * flops / 918e12, rel=0.01)
    assert of_family["v5p"][0].model == "MaxText 32B" and of_family["v5p"][0].mfu < 0.7
    # Rates in the notes of rows: AXLearn's Llama 2, with its context of 4,096 tokens.
    seven = next(r for r in of_family["v5p"] if r.model == "Llama2-7B")
    flops = 3 * (2 * 6.607e9 + 4 * 32 * 4096 * 4097 / 2)
    assert seven.mfu == pytest.approx(6641 * flops / 459e12, rel=0.01)


def test_deepseek_s_own_training_is_a_record() -> None:
    """2.664 million hours of H800 for 14.8 trillion tokens; 37e9 active parameters, of which the embedding has 0.9e9."""
    low = [r for r in read_records() if r.below_bfloat16 and r.family == "h100"]
    record = next(r for r in low if r.model == "DeepSeek-V3")
    scores = 2 * 61 * 128 * (192 + 128) * 4097 / 2
    flops = 3 * (2 * 36.6e9 + scores)
    assert record.mfu == pytest.approx(14.8e12 / (2.664e6 * 3600) * flops / 989e12, rel=0.02)


def test_nvidia_s_card_of_qwen3_30b_is_a_record() -> None:
    """299.352 TFLOP/s/GPU by NVIDIA's own count, on 16 H100 in bfloat16."""
    record = next(
        r
        for r in read_records()
        if (r.family, r.below_bfloat16, r.model) == ("h100", False, "Qwen3_30B_a3B")
    )
    assert record.mfu == pytest.approx(299.352e12 / 989e12, rel=0.01) and record.devices == 16


def test_a_prediction_above_the_record_of_its_size_says_so() -> None:
    """8B on v6e: between the record of its size and that of the chip."""
    e = predicted("v6e", 0.45)
    tokens = round(e.model_flops * e.devices / 51.5e9)
    text = record_note(dataclasses.replace(e, tokens=tokens), "compute")
    assert text and "of this size is 43.6%" in text and "Llama3-8B" in text
    below = dataclasses.replace(predicted("v6e", 0.43), tokens=tokens)
    assert record_note(below, "compute") is None


@pytest.mark.parametrize("machine", ["h100:64", "b200:64", "v5p:4x4x4", "v6e:8x8"])
def test_no_model_is_predicted_far_below_what_every_program_reaches(machine: str) -> None:
    """A step of many tokens on each device is bound by FLOPs, bytes or links, never by launches of small kernels."""
    target = parse_target(machine)
    found = {}
    for name in catalogue():
        run = with_stand_in_vocab(find_recipe(name))
        if run.model.spec().width < 512:
            continue  # nothing that is trained on a pod
        positions = run.model.spec().max_seq or 4096
        seq = min(positions, 4096)
        training = dataclasses.replace(
            run.training, seq=seq, batch=64 * 16384 // seq, microbatches=1, remat="full"
        )
        run = dataclasses.replace(run, mesh=MeshShape(fsdp=64), training=training)
        found[name] = estimate(place_run(run), target).mfu
    low = {name: f"{mfu:.1%}" for name, mfu in found.items() if mfu < 0.03}
    assert low == {}
