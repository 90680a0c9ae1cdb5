"""A prediction above everything that was measured on its chip says so."""

import csv
import dataclasses
import json
from typing import Any

import pytest
import records
from rows import FILE

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


def test_the_records_are_those_of_the_published_runs() -> None:
    """The largest stated MFU of a chip's rows in bfloat16 is not above its record, and each record is a row."""
    with FILE.open(encoding="utf-8") as opened:
        rows = {row["id"]: row for row in csv.DictReader(opened)}
    found: list[dict[str, Any]] = json.loads(RECORDS_FILE.read_text(encoding="utf-8"))["records"]
    assert {record["row"] for record in found} <= rows.keys()
    for stated in records.stated():
        assert stated["mfu"] <= read_records()[stated["family"], False].mfu
    v5p = read_records()["v5p", False]
    assert v5p.mfu == 0.7147 and rows[v5p.row]["model"] == "MaxText 32B"


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
