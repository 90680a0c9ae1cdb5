"""Highest measured model-FLOP utilization of each chip, which a prediction is printed beside."""

import dataclasses
import functools
import json
from pathlib import Path

from meshwright.hardware.chips import CHIPS
from meshwright.planner.estimate import Estimate

RECORDS_FILE = Path(__file__).parent / "data" / "records.json"
"""Written by bench/foresight/records.py from published runs."""
SAME_SIZE = 1.5
"""Factor between the FLOPs per token of two models that count as of one size."""


@dataclasses.dataclass(frozen=True)
class Record:
    """Fastest published run of a model on a family of chips.

    Its MFU is counted from its speed by models/flops.py, as that of a prediction is: other
    publishers count attention without its mask, which is 3 percentage points more on v6e.
    """

    family: str
    """Chips with the same fractions of peak (`Chip.family`)."""
    below_bfloat16: bool
    """Whether its matmuls are in low precision; all MFU are over the peak in bfloat16."""
    mfu: float
    flops_per_token: float
    model: str
    devices: int
    program: str
    row: str
    """Its id in bench/foresight/published.csv or v6e-steps.csv, which have its source."""

    def __str__(self) -> str:
        return (
            f"{self.mfu:.1%} ({self.program.split(' (')[0]}, {self.model}, {self.devices:,} "
            "devices)"
        )


@functools.cache
def read_records() -> tuple[Record, ...]:
    """Reads the fastest run of each model, by family of chips and precision;
    the highest MFU first."""
    rows = json.loads(RECORDS_FILE.read_text(encoding="utf-8"))["records"]
    records = [Record(**row) for row in rows]
    return tuple(sorted(records, key=lambda record: -record.mfu))


def records_of(e: Estimate, matmul_precision: str) -> tuple[Record, ...]:
    """Returns the records of a prediction's chip and precision, the highest MFU first."""
    if e.target.name not in CHIPS:
        return ()
    family = CHIPS[e.target.name].family
    low = matmul_precision != "compute"
    return tuple(r for r in read_records() if (r.family, r.below_bfloat16) == (family, low))


def record_of(e: Estimate, matmul_precision: str) -> Record | None:
    """Returns the highest MFU of a prediction's chip and precision;
    None where no run is published."""
    return next(iter(records_of(e, matmul_precision)), None)


def record_of_size(e: Estimate, matmul_precision: str) -> Record | None:
    """Returns the highest MFU of models with about as many FLOPs per token;
    None where none is published."""
    if not e.tokens:
        return None
    flops_per_token = e.model_flops * e.devices / e.tokens
    for record in records_of(e, matmul_precision):
        ratio = flops_per_token / record.flops_per_token
        if 1 / SAME_SIZE <= ratio <= SAME_SIZE:
            return record
    return None


def record_note(e: Estimate, matmul_precision: str) -> str | None:
    """Says that a prediction is above everything measured, of any model or of its size,
    or that nothing is published.

    None where it is below both records.
    """
    chip = e.target.name
    record = record_of(e, matmul_precision)
    if record is None:
        kind = "in bfloat16" if matmul_precision == "compute" else "below bfloat16"
        return f"{e.mfu:.1%} MFU is predicted: no run {kind} is published for {chip}"
    if e.mfu > record.mfu:
        return f"{e.mfu:.1%} MFU is predicted: the highest measured on {chip} is {record}"
    of_size = record_of_size(e, matmul_precision)
    if of_size is not None and e.mfu > of_size.mfu:
        return (
            f"{e.mfu:.1%} MFU is predicted: the highest measured on {chip} for a model of this "
            f"size is {of_size}"
        )
    return None
