"""Writes the error bands that plans print: `python bench/foresight/errors.py`.

Quantiles of published over predicted step time, by kind of plan. Each row is predicted with constants that were fitted
on other programs' rows (`left_out.py`, whose results it reads), because the user's program has no row either. The kind
of a chip without published runs takes the constants of the row's chip from other chips besides.
"""

import json
import statistics
from collections import defaultdict

from left_out import errors_without_chip_and_program
from report import LEFT_OUT
from rows import read_rows

from meshwright.planner.offers import ERRORS_FILE, FEWEST, UNSEEN, kinds_of


def bands() -> dict[str, dict[str, float]]:
    """Returns the number of runs, 10th percentile, median and 90th percentile of each kind with enough runs."""
    rows, _ = read_rows()
    left_out = json.loads(LEFT_OUT.read_text(encoding="utf-8"))
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        ratio = 1 / (1 + left_out["errors"][row.id])
        for kind in kinds_of(row.placed, row.target):
            ratios[kind].append(ratio)
    unseen = errors_without_chip_and_program(rows, left_out["constants"])
    ratios[UNSEEN] = [1 / (1 + error) for error in unseen.values()]
    return {
        kind: quantiles(values) for kind, values in sorted(ratios.items()) if len(values) >= FEWEST
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """Returns the quantiles of some ratios, with linear interpolation."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {
        "runs": len(values), "low": round(tenths[0], 4), "median": round(tenths[4], 4), "high": round(tenths[8], 4)
    }  # fmt: skip


def main() -> None:
    ERRORS_FILE.write_text(
        json.dumps({"written_by": "bench/foresight/errors.py", "kinds": bands()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
