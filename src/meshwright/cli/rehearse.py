"""The verb `rehearse`: a plan with a small model on simulated devices, before it runs on the real ones."""

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.markup import escape

from meshwright.api.rehearsal import rehearse, small_run
from meshwright.cli.base_run import RunOptions, parse_run
from meshwright.cli.output import write_json
from meshwright.errors import ConfigError
from meshwright.ranges import PositiveInt, TimeLimit
from meshwright.reporters.console import open_console


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearseOptions(RunOptions):
    """Run a plan (or RECIPE on --mesh) with a small model on simulated devices. Mesh, layout, schedule and divisibility
    are the real ones. It trains, saves, stops, resumes and evaluates: what would fail on real devices fails here."""

    steps: Annotated[PositiveInt, tyro.conf.arg(name="for-steps")] = 4
    """Steps before it stops, and again after it resumes."""
    processes: PositiveInt = 1
    """Number of processes, as hosts."""
    kill: bool = False
    """Kill one of the processes (SIGKILL) while it trains: the others have to stop, and the run has to resume."""
    most: PositiveInt = 32
    """Most simulated devices: a larger mesh has its degrees divided, and the real mesh is checked by arithmetic."""
    limit: TimeLimit = 900
    """Most seconds for each part."""
    json: bool = False
    """Print JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright rehearse`. Raises TrainingError with the message of a part that fails."""
    options = parse_run(RehearseOptions, "rehearse", args)
    console = open_console(sys.stderr if options.json else sys.stdout)
    if options.kill and options.processes < 2:
        raise ConfigError("--kill with one process", "no other process would be left to stop", "--processes 2")
    small = small_run(options.run, steps=options.steps, processes=options.processes, most=options.most)
    shape = small.mesh
    assert shape is not None
    instead = "" if shape == options.run.mesh else f" in place of {options.run.mesh}, which the real sizes fit"
    console.print(f"[bold]{escape(small.name)}[/]: {shape.size} simulated devices, mesh [bold]{shape}[/]{instead}")
    parts = []
    with tempfile.TemporaryDirectory(prefix="meshwright-rehearsal-") as folder:
        for part in rehearse(small, Path(folder), processes=options.processes, kill=options.kill, limit=options.limit):
            parts.append(dataclasses.asdict(part))
            console.print(f"  {part.name}: {part.result} [dim]({part.seconds:.0f} s)[/]")
    if options.json:
        write_json({"mesh": str(shape), "parts": parts})
    else:
        console.print("[bold]rehearsed[/]: every part succeeded")
    return 0
