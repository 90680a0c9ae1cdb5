"""Fastest published run of each model by chip: `python bench/foresight/records.py` writes planner/data/records.json.

Every MFU is our count of FLOPs (models/flops.py) over the peak in bfloat16, from the speed that a row states. What rows
state as MFU counts attention in three ways and is not used.
"""

import csv
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from rows import FILE, NotPriced, Row, fill_in, read_model, read_precision, read_rows, read_target
from v6e_rows import read_v6e

from meshwright.errors import MeshwrightError
from meshwright.hardware.chips import CHIPS
from meshwright.models.flops import training_flops_per_token
from meshwright.planner.records import RECORDS_FILE, Record


def records_of_rates() -> Iterator[Record]:
    """Yields the rows that state tokens per second and chip, with what a plan needs or without."""
    with FILE.open(encoding="utf-8") as opened:
        for row in map(fill_in, csv.DictReader(opened)):
            try:
                rate = float(row["measured_tokens_per_s_per_chip"])
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
    for found in (*records_of_rates(), *records_of_steps(measured)):
        key = (found.family, found.below_bfloat16, found.model)
        if key not in best or found.mfu > best[key].mfu:
            best[key] = found
    return [best[key] for key in sorted(best)]


def main() -> None:
    found = [dataclasses.asdict(record) for record in records()]
    source = "bench/foresight/published.csv and v6e-steps.csv"
    text = json.dumps({"source": source, "records": found}, indent=1)
    Path(RECORDS_FILE).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
