"""The verb `rehearse`: a plan with a small model on simulated devices, before it runs on the real ones."""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.markup import escape

from meshwright.cli.base_run import RunOptions, base_run
from meshwright.cli.output import write_json
from meshwright.cli.parse import parse
from meshwright.errors import ConfigError, TrainingError, divisors
from meshwright.launching.training_processes import TrainingProcesses, read_losses
from meshwright.planner.shrink import shape_within, shrink
from meshwright.report.console import open_console
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run

_BYTES_VOCAB = 257


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearseOptions(RunOptions):
    """Run a plan (or RECIPE on --mesh) with a small model on simulated devices. Mesh, layout, schedule and divisibility
    are the real ones. It trains, saves, stops, resumes and evaluates: what would fail on real devices fails here."""

    steps: Annotated[int, tyro.conf.arg(name="for-steps")] = 4
    """Steps before it stops, and again after it resumes."""
    processes: int = 1
    """Number of processes, as hosts."""
    kill: bool = False
    """Kill one of the processes (SIGKILL) while it trains: the others have to stop, and the run has to resume."""
    most: int = 32
    """Most simulated devices: a larger mesh has its degrees divided, and the real mesh is checked by arithmetic."""
    limit: int = 900
    """Most seconds for each part."""
    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a rehearsal."""

    name: str
    seconds: float
    result: str


def main(args: Sequence[str]) -> int:
    """Runs `meshwright rehearse`. Raises TrainingError with the message of a part that fails."""
    base = base_run(args)
    options = parse(RehearseOptions, "rehearse [RECIPE]", base.args, default=RehearseOptions(run=base.run))
    console = open_console(sys.stderr if options.json else sys.stdout)
    small = _small_run(options)
    shape = small.mesh
    assert shape is not None
    instead = "" if shape == options.run.mesh else f" in place of {options.run.mesh}, which the real sizes fit"
    console.print(f"[bold]{escape(small.name)}[/]: {shape.size} simulated devices, mesh [bold]{shape}[/]{instead}")
    parts: list[Part] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-rehearsal-") as folder:
        rehearsal = _killed(options, small, Path(folder)) if options.kill else _stopped(options, small, Path(folder))
        for part in rehearsal:
            parts.append(part)
            console.print(f"  {part.name}: {part.result} [dim]({part.seconds:.0f} s)[/]")
    if options.json:
        write_json({"mesh": str(shape), "parts": [dataclasses.asdict(part) for part in parts]})
    else:
        console.print("[bold]rehearsed[/]: every part succeeded")
    return 0


def _small_run(options: RehearseOptions) -> Run:
    """Returns the run with a small model, on a mesh of at most --most devices.

    Raises ConfigError where the run has no mesh, or the processes cannot share its devices.
    """
    run = options.run
    if run.mesh is None:
        raise ConfigError("rehearsing a run without a mesh", "a rehearsal is of one mesh", "a plan, or --mesh")
    for name, number in (("--for-steps", options.steps), ("--processes", options.processes), ("--most", options.most)):
        if number < 1:
            raise ConfigError(f"{name} {number}", "a rehearsal has at least one", f"{name} 1")
    if options.kill and options.processes < 2:
        raise ConfigError("--kill with one process", "no other process would be left to stop", "--processes 2")
    shape = shape_within(run.mesh, options.most)
    if shape.size % options.processes:
        raise ConfigError(
            f"{options.processes} processes for {shape.size} devices", "each process has the same number",
            f"--processes {max(d for d in divisors(shape.size) if d <= options.processes)}",
        )  # fmt: skip
    if run.model.vocab is None:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=_BYTES_VOCAB))
    return shrink(run, shape, 2 * options.steps)


def _processes(options: RehearseOptions, small: Run) -> TrainingProcesses:
    assert small.mesh is not None
    return TrainingProcesses(options.processes, small.mesh.size, options.limit)


def _stopped(options: RehearseOptions, small: Run, folder: Path) -> Iterator[Part]:
    """Trains to the end, then again from the checkpoint in the middle; both have to give the same losses."""
    file, out = folder / "run.json", folder / "out"
    write_run(small, file)
    processes, began = _processes(options, small), time.perf_counter()
    processes.start("--run", str(file), "--out", str(out))
    first = processes.wait()
    losses = read_losses(out)
    yield Part("trains", time.perf_counter() - began, _format_end(losses, first["held_out_loss"]))
    began = time.perf_counter()
    processes.start("--out", str(out), "--resume", "--at", str(options.steps))
    second = processes.wait()
    resumed = read_losses(out)
    _check_equal(options.steps, losses, resumed)
    if second["held_out_loss"] != first["held_out_loss"]:
        raise _resume_error("the held-out loss", second["held_out_loss"], first["held_out_loss"])
    steps = f"steps {options.steps + 1} to {max(resumed)}: every loss is bitwise that of the run without a stop"
    yield Part("resumes", time.perf_counter() - began, f"{steps}; {_format_end(resumed, second['held_out_loss'])}")


def _killed(options: RehearseOptions, small: Run, folder: Path) -> Iterator[Part]:
    """Trains until one process is killed, then resumes from the last checkpoint."""
    file, out = folder / "run.json", folder / "out"
    write_run(small, file)
    processes, began = _processes(options, small), time.perf_counter()
    processes.start("--run", str(file), "--out", str(out))
    processes.wait_for_checkpoint(out)
    processes.kill_last()
    yield Part("one process killed", time.perf_counter() - began, processes.wait_for_failure())
    began = time.perf_counter()
    processes.start("--out", str(out), "--resume")
    summary = processes.wait()
    yield Part("resumes", time.perf_counter() - began, _format_end(read_losses(out), summary["held_out_loss"]))


def _format_end(losses: dict[int, float], held_out_loss: float | None) -> str:
    last = max(losses)
    held_out = "" if held_out_loss is None else f", held-out loss {held_out_loss:.4f}"
    return f"loss {losses[last]:.4f} at step {last}{held_out}"


def _check_equal(stop: int, losses: dict[int, float], resumed: dict[int, float]) -> None:
    """Raises TrainingError at the first step after `stop` whose losses are not bitwise equal."""
    for step in range(stop + 1, max(losses) + 1):
        if resumed.get(step) != losses[step]:
            raise _resume_error(f"the loss of step {step}", resumed.get(step), losses[step])


def _resume_error(quantity: str, resumed: float | None, without_stop: float | None) -> TrainingError:
    return TrainingError(
        "resuming from the checkpoint in the middle",
        f"{quantity} is {resumed!r}, and {without_stop!r} without a stop",
        "a report: a resumed run should be bitwise the one that was not stopped",
    )
