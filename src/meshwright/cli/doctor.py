"""The verb `doctor`: finds what is wrong with a host before a run does."""

import dataclasses
import math
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.markup import escape

from meshwright.cli.base_run import base_run
from meshwright.cli.output import write_json
from meshwright.cli.parse import parse
from meshwright.errors import ConfigError
from meshwright.launching.host_checks import Finding, check_host
from meshwright.report.console import open_console
from meshwright.views.plain_table import plain_table

_VOCAB = 2**15
"""Vocabulary of a recipe whose tokenizer decides it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check this host before a run: versions, devices, limits, shared memory, variables and room. Start it as the run
    is started, on every host."""

    recipe: Annotated[str | None, tyro.conf.Positional] = None
    """Recipe, plan or run file whose checkpoints need room; without one, room is shown and not judged."""
    out: Path = Path("runs")
    """Output folder of the run."""
    deadline: float = 120.0
    """Seconds after which devices that do not answer are given up."""
    json: bool = False
    """Print JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright doctor`; the exit code is 1 where a host has a fault."""
    options = parse(DoctorOptions, "doctor", args)
    if not 0 < options.deadline < math.inf:
        raise ConfigError(f"--deadline {options.deadline}", "it is a time in seconds", "--deadline 120")
    needed = 0 if options.recipe is None else _checkpoint_bytes(options.recipe)
    findings = check_host(options.out, needed, options.deadline)
    faults = sum(finding.verdict == "fault" for finding in findings)
    host = socket.gethostname()
    if options.json:
        found = [dataclasses.asdict(finding) for finding in findings]
        write_json({"verdict": "fault" if faults else "ok", "host": host, "findings": found})
    else:
        _print(open_console(sys.stdout), host, findings)
    return 1 if faults else 0


def _print(console: Console, host: str, findings: Sequence[Finding]) -> None:
    """Prints a row of all checks, then every fault and warning with its fix."""
    checks = list(dict.fromkeys(finding.check for finding in findings))
    table = plain_table("host", *checks)
    cells = []
    for check in checks:
        found = [finding for finding in findings if finding.check == check]
        worst = next((v for v in ("fault", "warning") if any(f.verdict == v for f in found)), "")
        good = ", ".join(f.found for f in found if f.verdict == "ok")
        cells.append(f"[bold red]{worst}[/]" if worst else escape(good) or "[dim]-[/]")
    table.add_row(escape(host), *cells)
    console.print(table)
    for finding in findings:
        if finding.verdict != "ok":
            console.print(
                f"\n[bold]{finding.verdict}[/] {escape(host)}, {escape(finding.check)}: {escape(finding.found)}\n"
                f"  fix: {escape(finding.fix)}",
                soft_wrap=True,
            )
    faults = sum(finding.verdict == "fault" for finding in findings)
    console.print(f"\n{faults or 'no'} fault{'' if faults == 1 else 's'} on {escape(host)}")


def _checkpoint_bytes(run: str) -> int:
    """Returns the bytes of the checkpoints that a run keeps, and of the one that it writes meanwhile."""
    from meshwright.config import MeshShape
    from meshwright.planner.memory_model import sharded_elements
    from meshwright.planner.optimizer import state_bytes
    from meshwright.runs.placed_run import place_run

    given = base_run([run]).run
    training = given.training
    legal = dataclasses.replace(training, batch=training.microbatches)
    model = dataclasses.replace(given.model, vocab=given.model.vocab or _VOCAB)
    placed = place_run(dataclasses.replace(given, model=model, training=legal, mesh=None), MeshShape())
    itemsize = jnp.dtype(training.param_dtype).itemsize
    return int(sharded_elements(placed.layout) * itemsize + state_bytes(placed)) * (training.max_to_keep + 1)
