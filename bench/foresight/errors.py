"""Writes the error bands that plans print: `python bench/foresight/errors.py`.

Quantiles of published over predicted step time, by kind of plan, of the half of the published runs that no constant was
fitted on. The kind of a chip without published runs is the error of every run with the fractions of its chip taken
from other chips.
"""

import json
import statistics
from collections import defaultdict

from fit import halves
from report import results_of, without_the_chip
from rows import read_rows

from meshwright.planner.offers import ERRORS_FILE, FEWEST, UNSEEN, kinds_of


def bands() -> dict[str, dict[str, float]]:
    """Returns the number of runs, 10th percentile, median and 90th percentile of each kind with enough runs."""
    rows, _ = read_rows()
    _, unfitted = halves(rows)
    ratios: dict[str, list[float]] = defaultdict(list)
    for row, _, error in results_of(unfitted).values():
        for kind in kinds_of(row.placed, row.target):
            ratios[kind].append(1 / (1 + error))
    ratios[UNSEEN] = [1 / (1 + error) for error in without_the_chip(rows).values()]
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
