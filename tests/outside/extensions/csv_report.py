"""Reporter that writes a CSV file."""

import csv
from pathlib import Path

from meshwright.reporters import Values
from meshwright.runs.run import Run


class CsvReport:
    """Reporter that appends `step,metric,value` lines to metrics.csv in the output folder of a run."""

    def __init__(self, out: Path, run: Run):
        self._file = (out / "metrics.csv").open("a", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file)

    def write(self, step: int, values: Values) -> None:
        """Writes the metrics of a step."""
        self._rows.writerows((step, metric, value) for metric, value in values.items())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
