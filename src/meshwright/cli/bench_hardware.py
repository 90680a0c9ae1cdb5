"""`meshwright bench hardware`: the sections, the report, and the exit code."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.bench.hardware.run import check_sections, run_sections
from meshwright.bench.hardware.section import Request, write_json_file
from meshwright.cli.output import write_json
from meshwright.errors import CensusError, ConfigError, TrainingError
from meshwright.report.console import open_console
from meshwright.views.hardware_report import (
    print_report,
    print_section,
    problems_of,
    report_json,
    report_page,
    unfinished_of,
)


def bench_hardware(
    out: Path, *, minutes: float, only: tuple[str, ...], kernels: tuple[str, ...], devices: int, json: bool
) -> int:
    """Runs the sections and writes the report.

    The exit code is 6 after a wrong result, and 5 where a section is unfinished. Raises ConfigError for an unknown
    section, or a folder with another machine's results.
    """
    if minutes <= 0:
        raise ConfigError(f"--minutes {minutes}", "the sections share this time", "--minutes 30")
    if devices < 1:
        raise ConfigError(f"--devices {devices}", "at least one device is simulated", "--devices 8")
    names, console = check_sections(only), open_console(sys.stderr if json else sys.stdout)
    results: dict[str, Mapping[str, Any]] = {}

    def finished(name: str, result: Mapping[str, Any]) -> None:
        results[name] = result
        print_section(console, name, result)
        # A run that is killed leaves the report of what it had.
        _write(out, results)

    run_sections(Request(str(out.resolve()), devices, kernels), names, minutes, finished)
    if json:
        write_json(report_json(results))
    else:
        print_report(console, results)
    console.print(f"\nwritten: {out / 'report.html'}, {out / 'report.json'}{_calibration(out)}", markup=False,
                  soft_wrap=True)  # fmt: skip
    if problems_of(results):
        return CensusError.exit_code
    return TrainingError.exit_code if unfinished_of(results) else 0


def _write(out: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    write_json_file(out / "report.json", report_json(results))
    report_page(results).write(out / "report.html")


def _calibration(out: Path) -> str:
    file = out / "calibration.json"
    return f", {file} (kept as the calibration of plans)" if file.exists() else ""
