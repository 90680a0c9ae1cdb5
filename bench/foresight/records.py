"""Highest published MFU by chip: `python bench/foresight/records.py` writes planner/data/records.json.

A row's MFU is the larger of what its source states and of our count from its step time (models/flops.py), over the
peak in bfloat16.
"""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rows import FILE, NotPriced, Row, fill_in, read_precision, read_rows, read_target

from meshwright.errors import MeshwrightError
from meshwright.hardware.chips import CHIPS
from meshwright.models.flops import training_flops_per_token
from meshwright.planner.records import RECORDS_FILE


def stated() -> list[dict[str, Any]]:
    """Returns the rows in bfloat16 that state an MFU, priced or not."""
    found = []
    with FILE.open(encoding="utf-8") as opened:
        for row in map(fill_in, csv.DictReader(opened)):
            try:
                mfu = float(row["measured_mfu"]) / 100
                target = read_target(row)
                precision = read_precision(row, target)
            except (ValueError, NotPriced, MeshwrightError):
                continue
            if precision == "compute" and target.name in CHIPS:
                facts = (row["model"], target.devices, row["system"], row["id"])
                found.append(_record(CHIPS[target.name].family, False, mfu, *facts))
    return found


def counted(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Returns the MFU of priced rows by our count."""
    found = []
    for row in rows:
        if row.target.name in CHIPS:
            family = CHIPS[row.target.name].family
            low = row.placed.run.training.matmul_precision != "compute"
            facts = (row.model, row.placed.shape.size, row.system, row.id)
            found.append(_record(family, low, counted_mfu(row), *facts))
    return found


def _record(
    family: str, low: bool, mfu: float, model: str, devices: int, program: str, row: str
) -> dict[str, Any]:
    return {
        "family": family,
        "below_bfloat16": low,
        "mfu": round(mfu, 4),
        "model": model,
        "devices": devices,
        "program": program,
        "row": row,
    }


def counted_mfu(row: Row) -> float:
    """Returns the MFU of a row's measured step by our count of FLOPs."""
    run = row.placed.run
    flops = training_flops_per_token(run.model, run.training.seq, run.finetune.method)
    tokens = run.training.batch * run.training.seq
    devices = row.placed.shape.size
    return flops * tokens / devices / (row.measured * row.target.chip.flops_bf16)


def records(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Returns the run with the highest MFU of each family of chips, in bfloat16 and below it."""
    best: dict[tuple[str, bool], dict[str, Any]] = {}
    for found in [*stated(), *counted(rows)]:
        key = (found["family"], found["below_bfloat16"])
        if key not in best or found["mfu"] > best[key]["mfu"]:
            best[key] = found
    return [best[key] for key in sorted(best)]


def main() -> None:
    found = records(read_rows()[0])
    text = json.dumps({"source": "bench/foresight/published.csv", "records": found}, indent=1)
    Path(RECORDS_FILE).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
