"""Fastest published run of each model by chip: `python bench/foresight/records.py` writes planner/data/records.json.

Every MFU is our count of FLOPs (models/flops.py) over the peak in bfloat16, from the speed that a row states. What rows
state as MFU counts attention in three ways and is not used.
"""

import csv
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rows import FILE, NotPriced, Row, fill_in, read_model, read_precision, read_rows, read_target
from v6e_rows import read_v6e

from meshwright.errors import MeshwrightError
from meshwright.hardware.chips import CHIPS
from meshwright.models.flops import training_flops_per_token
from meshwright.planner.records import RECORDS_FILE, Record
from meshwright.runs.recipe import find_recipe

_CONTEXT = {"Llama2-7B": "4096", "Llama2-70B": "4096"}
"""Sequence length of rows that do not state it: Llama 2's, of which 1,024 are the 4.2 million tokens of their steps."""


def _tokens_per_second(row: dict[str, str]) -> float:
    """Returns the tokens per second and chip that a row states, also in its notes. Raises ValueError without any."""
    in_notes = re.search(r"= (\d+)/chip", row["notes"])
    return float(row["measured_tokens_per_s_per_chip"] or (in_notes[1] if in_notes else ""))


def records_of_rates() -> Iterator[Record]:
    """Yields the rows that state tokens per second and chip, with what a plan needs or without."""
    with FILE.open(encoding="utf-8") as opened:
        for row in map(fill_in, csv.DictReader(opened)):
            row["seq_len"] = row["seq_len"] or _CONTEXT.get(row["model"], "")
            try:
                rate = _tokens_per_second(row)
                seq = int(row["seq_len"])
                target = read_target(row)
                model = read_model(row)
                precision = read_precision(row, target)
            except (ValueError, MeshwrightError, NotPriced):
                continue
            if target.name not in CHIPS:
                continue
            flops = training_flops_per_token(model, seq)
            chip = target.chip
            yield Record(
                family=CHIPS[target.name].family,
                below_bfloat16=precision != "compute",
                mfu=round(flops * rate / chip.devices_per_chip / chip.flops_bf16, 4),
                flops_per_token=flops,
                model=row["model"],
                devices=target.devices,
                program=row["system"],
                row=row["id"],
            )


def record_of_deepseek() -> Record:
    """Returns DeepSeek's own training: 14.8e12 tokens in 2.664e6 hours of H800 (arXiv:2412.19437, table 1).

    An H800 computes as an H100 does, with half of its NVLink. Without the layer for further tokens, as our model.
    """
    flops = training_flops_per_token(find_recipe("deepseek-v3").model, 4096)
    rate = 14.8e12 / (2.664e6 * 3600)
    return Record(
        family="h100",
        below_bfloat16=True,
        mfu=round(flops * rate / CHIPS["h100"].flops_bf16, 4),
        flops_per_token=flops,
        model="DeepSeek-V3",
        devices=2048,
        program="DeepSeek on H800",
        row="arXiv:2412.19437, table 1",
    )


_CARD = (
    "NVIDIA-NeMo/Megatron-Bridge@d5d8c19, docs/fern/versions/nightly/pages/model-verification/models/"
    "qwen3-30b-a3b.mdx"
)
_OF_CARD = (
    ("h100", False, 16, 13_011.378),
    ("gb200", True, 8, 40_322.898),
    ("gb300", True, 32, 45_086.158),
)
"""Chip, whether in MXFP8 and not in bfloat16, GPUs, tokens/s/GPU over steps 41 to 50 of text that is drawn at random."""


def records_of_card() -> Iterator[Record]:
    """Yields NVIDIA's own training steps of Qwen3-30B-A3B (`pretrain_performance`, 4,096 tokens).

    They are of a later day than the page of P399 and P445, which has none in bfloat16.
    """
    flops = training_flops_per_token(find_recipe("qwen3-30b-a3b").model, 4096)
    for name, below_bfloat16, devices, rate in _OF_CARD:
        chip = CHIPS[name]
        yield Record(
            family=chip.family,
            below_bfloat16=below_bfloat16,
            mfu=round(flops * rate / chip.flops_bf16, 4),
            flops_per_token=flops,
            model="Qwen3_30B_a3B",
            devices=devices,
            program="Megatron-Bridge (NeMo 26.06)",
            row=f"{_CARD}, {name}",
        )


def records_of_steps(rows: Iterable[Row]) -> Iterator[Record]:
    """Yields the rows that are priced, by the seconds of their step."""
    for row in rows:
        if row.target.name not in CHIPS:
            continue
        run = row.placed.run
        training = run.training
        devices = row.placed.layout.shape.size
        flops = training_flops_per_token(run.model, training.seq, run.finetune.method)
        step = flops * training.batch * training.seq / devices
        yield Record(
            family=CHIPS[row.target.name].family,
            below_bfloat16=training.matmul_precision != "compute",
            mfu=round(step / (row.measured * row.target.chip.flops_bf16), 4),
            flops_per_token=flops,
            model=row.model,
            devices=devices,
            program=row.system,
            row=row.id,
        )


def records() -> list[Record]:
    """Returns the fastest run of each model on each family of chips, in bfloat16 and below it."""
    best: dict[tuple[str, bool, str], Record] = {}
    measured = [*read_rows()[0], *(step.row for step in read_v6e()[0])]
    stated = [record_of_deepseek(), *records_of_card(), *records_of_rates()]
    for found in (*stated, *records_of_steps(measured)):
        key = (found.family, found.below_bfloat16, found.model)
        if key not in best or found.mfu > best[key].mfu:
            best[key] = found
    return [best[key] for key in sorted(best)]


def main() -> None:
    found = [dataclasses.asdict(record) for record in records()]
    source = "bench/foresight/published.csv, v6e-steps.csv, and records.py with its own sources"
    text = json.dumps({"source": source, "records": found}, indent=1)
    Path(RECORDS_FILE).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
