"""Highest published model-FLOP utilization of each chip, which a prediction is printed beside."""

import dataclasses
import functools
import json
from pathlib import Path

from meshwright.hardware.chips import CHIPS
from meshwright.planner.estimate import Estimate

RECORDS_FILE = Path(__file__).parent / "data" / "records.json"
"""Written by bench/foresight/records.py from published runs."""


@dataclasses.dataclass(frozen=True)
class Record:
    """Published run with the highest MFU of its family of chips."""

    family: str
    """Chips with the same fractions of peak (`Chip.family`)."""
    below_bfloat16: bool
    """Whether its matmuls are in low precision; all MFU are over the peak in bfloat16."""
    mfu: float
    model: str
    devices: int
    program: str
    row: str
    """Its id in bench/foresight/published.csv, which has its source."""

    def __str__(self) -> str:
        return f"{self.mfu:.1%} ({self.program.split(' (')[0]}, {self.model}, {self.devices:,} devices)"


@functools.cache
def read_records() -> dict[tuple[str, bool], Record]:
    """Reads the records, by family of chips and whether they are below bfloat16."""
    rows = json.loads(RECORDS_FILE.read_text(encoding="utf-8"))["records"]
    records = [Record(**row) for row in rows]
    return {(record.family, record.below_bfloat16): record for record in records}


def record_of(e: Estimate, matmul_precision: str) -> Record | None:
    """Returns the record of a prediction's chip and precision; None where no run is published."""
    if e.target.name not in CHIPS:
        return None
    family = CHIPS[e.target.name].family
    return read_records().get((family, matmul_precision != "compute"))


def record_note(e: Estimate, matmul_precision: str) -> str | None:
    """Says that a prediction is above everything published, or that nothing is; None where it is below the record."""
    chip = e.target.name
    record = record_of(e, matmul_precision)
    if record is None:
        kind = "in bfloat16" if matmul_precision == "compute" else "below bfloat16"
        return f"{e.mfu:.1%} MFU is predicted: no run {kind} is published for {chip}"
    if e.mfu <= record.mfu:
        return None
    return f"{e.mfu:.1%} MFU is predicted: the highest published on {chip} is {record}"
