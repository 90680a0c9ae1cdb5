"""The verb `doctor`: what is wrong with a host, or with hosts together, before a run finds out."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.markup import escape

from meshwright.cli.base_run import base_run
from meshwright.cli.devices import HostOptions
from meshwright.cli.output import write_json
from meshwright.cli.parse import parse
from meshwright.errors import ConfigError
from meshwright.launching.doctor import HostReport, examine
from meshwright.launching.host_checks import check_host
from meshwright.report.console import open_console
from meshwright.views.plain_table import plain_table

_DEVICES = 0.4
"""Part of the time for JAX to list the devices."""
_MEASURED = ("devices", "clock", "bandwidth")
"""Checks that show what they found in a table of several hosts."""
_VOCAB = 2**15
"""Vocabulary of a recipe whose tokenizer decides it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check this host, and the others of a job where there are any, before a run: versions, devices, clocks, ports,
    shared storage, room, limits, variables and the bandwidth between hosts. Start it as the run is started."""

    recipe: Annotated[str | None, tyro.conf.Positional] = None
    """Recipe, plan or run file whose checkpoints need room; without one, room is shown and not judged."""
    out: Path = Path("runs")
    """Output folder of the run, which all hosts share."""
    deadline: float = 120.0
    """Seconds after which hosts and devices that do not answer are given up."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()
    json: bool = False
    """Print JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright doctor`; the exit code is 1 where a host has a fault."""
    options = parse(DoctorOptions, "doctor", args)
    if not 0 < options.deadline < math.inf:
        raise ConfigError(f"--deadline {options.deadline}", "it is a time in seconds", "--deadline 120")
    hosts = options.hosts.hosts()
    needed = 0 if options.recipe is None else _checkpoint_bytes(options.recipe)
    local = check_host(options.out, needed, options.deadline * _DEVICES)
    reports = examine(hosts, options.out, local, options.deadline * (1 - _DEVICES))
    faulty = any(report.verdict == "fault" for report in reports)
    # The others have sent theirs to process 0, unless that could not be reached.
    lost = hosts.process and any(f.check == "coordinator" for report in reports for f in report.findings)
    if hosts.process == 0 or lost:
        if options.json:
            write_json({"verdict": "fault" if faulty else "ok", "hosts": [_record(report) for report in reports]})
        else:
            _print(open_console(sys.stdout), reports)
    return 1 if faulty else 0


def _record(report: HostReport) -> dict[str, object]:
    return {
        "process": report.process,
        "name": report.name,
        "verdict": report.verdict,
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
    }


def _print(console: Console, reports: Sequence[HostReport]) -> None:
    """Prints a row for each host, then every fault and warning with its fix."""
    checks = list(dict.fromkeys(finding.check for report in reports for finding in report.findings))
    table = plain_table("process", "host", *checks, right=("process",))
    for report in reports:
        cells = []
        for check in checks:
            found = [finding for finding in report.findings if finding.check == check]
            worst = next((v for v in ("fault", "warning") if any(f.verdict == v for f in found)), "")
            good = ", ".join(f.found for f in found if f.verdict == "ok")
            if good and len(reports) > 1 and check not in _MEASURED:
                good = "ok"  # a row stays on one line
            cells.append(f"[bold red]{worst}[/]" if worst else escape(good) or "[dim]-[/]")
        table.add_row(str(report.process), escape(report.name), *cells)
    console.print(table)
    for report in reports:
        for finding in report.findings:
            if finding.verdict != "ok":
                console.print(
                    f"\n[bold]{finding.verdict}[/] process {report.process} ({escape(report.name)}), "
                    f"{escape(finding.check)}: {escape(finding.found)}\n  fix: {escape(finding.fix)}",
                    soft_wrap=True,
                )  # fmt: skip
    faults = sum(finding.verdict == "fault" for report in reports for finding in report.findings)
    console.print(f"\n{faults or 'no'} fault{'' if faults == 1 else 's'} on {len(reports)} host"
                  f"{'' if len(reports) == 1 else 's'}")  # fmt: skip


def _checkpoint_bytes(run: str) -> int:
    """Returns the bytes of the checkpoints that a run keeps, and of the one that it writes meanwhile."""
    from meshwright.config import MeshShape
    from meshwright.planner.memory_model import sharded_elements, state_bytes
    from meshwright.runs.placed_run import place_run

    given = base_run([run]).run
    training = given.training
    legal = dataclasses.replace(training, batch=training.microbatches)
    model = dataclasses.replace(given.model, vocab=given.model.vocab or _VOCAB)
    placed = place_run(dataclasses.replace(given, model=model, training=legal, mesh=None), MeshShape())
    itemsize = jnp.dtype(training.param_dtype).itemsize
    return int(sharded_elements(placed.layout) * itemsize + state_bytes(placed)) * (training.max_to_keep + 1)
