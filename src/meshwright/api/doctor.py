"""The verb `doctor`: finds what is wrong with a host before a run does."""

import dataclasses
import functools
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console
from rich.markup import escape

from meshwright.api.verb import Call, Outcome, base_run
from meshwright.config import MeshShape
from meshwright.launching.host_checks import Finding, check_counters, check_host
from meshwright.monitoring.counters import Counter, rule_of
from meshwright.monitoring.watch import open_sources, read_all
from meshwright.planner.memory_model import checkpoint_bytes
from meshwright.ranges import Ranged
from meshwright.runs.placed_run import place_run
from meshwright.views.blocks import Column, Table, Tone
from meshwright.views.terminal import print_table

_VOCAB = 2**15
"""Vocabulary of a recipe whose tokenizer decides it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions(Ranged):
    """Check this host before a run: versions, devices, limits, shared memory, variables and room.
    Start it as the run is started, on every host.
    """

    recipe: Annotated[str | None, tyro.conf.Positional] = None
    """Recipe, plan or run file whose checkpoints need room; without one, room is shown and not
    judged."""
    out: Path = Path("runs")
    """Output folder of the run."""
    deadline: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 120.0
    """Seconds after which devices that do not answer are given up."""
    json: bool = False
    """Print JSON."""

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright doctor`; the exit code is 1 where a host has a fault."""
        needed = 0 if self.recipe is None else _checkpoint_bytes(self.recipe)
        host = socket.gethostname()
        counters = _read_machine(self.out)
        findings = [*check_host(self.out, needed, self.deadline), *check_counters(counters)]
        found = [dataclasses.asdict(finding) for finding in findings]
        has_fault = any(finding.verdict == "fault" for finding in findings)
        record = {
            "verdict": "fault" if has_fault else "ok",
            "host": host,
            "findings": found,
            "counters": [counter._asdict() for counter in counters],
        }
        show = functools.partial(_print_findings, host, findings, counters)
        return Outcome(show, record, int(has_fault))


def _print_findings(
    host: str, findings: Sequence[Finding], counters: Sequence[Counter], console: Console
) -> None:
    """Prints the worst verdict of each check, every warning and fault
    with its fix, and counters."""
    cells: dict[str, str] = {}
    tones: list[Tone] = []
    for check in dict.fromkeys(finding.check for finding in findings):
        verdicts = {
            finding.verdict: finding.found for finding in findings if finding.check == check
        }
        worst = next((verdict for verdict in ("fault", "warning") if verdict in verdicts), None)
        cells[check] = worst or verdicts["ok"]
        tones.append("bad" if worst else "")
    columns = [Column("check"), Column(host, wide=True)]
    print_table(console, Table(columns, list(cells.items()), tones=tones))
    for finding in findings:
        if finding.verdict != "ok":
            text = f"{escape(host)}, {escape(finding.check)}: {escape(finding.found)}"
            fix = escape(finding.fix)
            console.print(f"\n[bold]{finding.verdict}[/] {text}\n  fix: {fix}", soft_wrap=True)
    console.print("\n[bold]counters[/] that are not 0 (a run watches them once a minute)")
    print_table(console, _counter_table(counters))
    faults = sum(finding.verdict == "fault" for finding in findings)
    console.print(f"\n{faults or 'no'} fault{'' if faults == 1 else 's'} on {escape(host)}")


def _read_machine(out: Path) -> list[Counter]:
    """Reads the counters of this host's devices, links and disks once."""
    sources, _ = open_sources(out)
    return read_all(sources)


def _counter_table(counters: Sequence[Counter]) -> Table:
    """Makes a table of the counters that are not 0, by part."""
    rows = [
        (counter.part, counter.name, f"{counter.value:.6g} {rule_of(counter.name).unit}".rstrip())
        for counter in counters
        if counter.value
    ]
    return Table([Column("part", wide=True), Column("counter"), Column("now")], rows)


def _checkpoint_bytes(run: str) -> int:
    """Returns the bytes of the checkpoints that a run keeps, and of the one that it is writing."""
    given = base_run([run]).run
    training = given.training
    legal = dataclasses.replace(training, batch=max(1, training.microbatches))
    model = dataclasses.replace(given.model, vocab=given.model.vocab or _VOCAB)
    placed = place_run(
        dataclasses.replace(given, model=model, training=legal, mesh=None), MeshShape()
    )
    return int(checkpoint_bytes(placed)[0]) * (training.max_to_keep + 1)
