"""The verb `rehearse`: a small model on the mesh of a real run.

It trains on simulated devices, is stopped and resumed.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro
from rich.markup import escape

from meshwright.api.verb import Call, Outcome, RunOptions
from meshwright.errors import ConfigError, TrainingError, divisors
from meshwright.models.families import family_name
from meshwright.planner.shrink import shape_within, shrink
from meshwright.ranges import PositiveInt, TimeLimit
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run
from meshwright.trust import options_of_child

_BYTES_VOCAB = 257


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearseOptions(RunOptions):
    """Run a plan (or RECIPE on --mesh) with a small model on simulated devices. Mesh, layout,
    schedule and divisibility are the real ones. It trains, saves, stops, resumes and evaluates:
    what would fail on real devices fails here.
    """

    steps: Annotated[PositiveInt, tyro.conf.arg(name="for-steps")] = 4
    """Steps before it stops, and again after it resumes."""
    processes: PositiveInt = 1
    """Number of processes, as hosts."""
    most: PositiveInt = 32
    """Most simulated devices: a larger mesh has its degrees divided, and the real mesh is checked
    by arithmetic."""
    limit: TimeLimit = 900
    """Most seconds for each part."""
    json: bool = False
    """Print JSON."""

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright rehearse`.

        Raises TrainingError with the message of a part that fails.
        """
        console, shape = call.console, self.run.mesh
        small = small_run(self.run, steps=self.steps, processes=self.processes, most=self.most)
        assert small.mesh is not None
        instead = "" if small.mesh == shape else f" in place of {shape}, which the real sizes fit"
        devices = f"{small.mesh.size} simulated devices, mesh [bold]{small.mesh}[/]"
        console.print(f"[bold]{escape(small.name)}[/]: {devices}{instead}")
        parts = []
        with tempfile.TemporaryDirectory(prefix="meshwright-rehearsal-") as folder:
            for part in rehearse(small, Path(folder), processes=self.processes, limit=self.limit):
                parts.append(dataclasses.asdict(part))
                console.print(f"  {part.name}: {part.result} [dim]({part.seconds:.0f} s)[/]")
        record = {"mesh": str(small.mesh), "parts": parts}
        return Outcome(
            lambda console: console.print("[bold]rehearsed[/]: every part succeeded"), record
        )


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a rehearsal."""

    name: str
    seconds: float
    result: str


def small_run(run: Run, *, steps: int, processes: int = 1, most: int = 32) -> Run:
    """Returns the run with a small model and twice the steps, on a mesh of at most `most` devices.

    Raises ConfigError where the run has no mesh, or the processes cannot share its devices.
    """
    if run.mesh is None:
        raise ConfigError(
            "rehearsing a run without a mesh", "a rehearsal is of one mesh", "a plan, or --mesh"
        )
    shape = shape_within(run.mesh, most)
    if shape.size % processes:
        legal = max(d for d in divisors(shape.size) if d <= processes)
        asked = f"{processes} processes for {shape.size} devices"
        raise ConfigError(asked, "each process has the same number", f"--processes {legal}")
    if run.model.vocab is None:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=_BYTES_VOCAB))
    return shrink(run, shape, 2 * steps)


def rehearse(small: Run, folder: Path, *, processes: int = 1, limit: int = 900) -> Iterator[Part]:
    """Trains a small run in child processes, stops it, resumes it and evaluates.

    Yields each part when it is done.
    It is resumed from the checkpoint in the middle, and every loss has to be bitwise that of the
    run without a stop.
    folder: for its files.  limit: most seconds of each part.  Raises TrainingError with the message
    of a failed part.
    """
    assert small.mesh is not None
    file, out = folder / "run.json", folder / "out"
    write_run(small, file)
    running, began = TrainingProcesses(processes, small.mesh.size, limit), time.perf_counter()
    given = options_of_child(small, family_name(small.model))
    running.start("--run", str(file), "--out", str(out), *given)
    held_out, losses = running.wait()["held_out_loss"], _losses(out)
    yield Part("trains", time.perf_counter() - began, _format_end(losses, held_out))
    began, stop = time.perf_counter(), small.training.steps // 2
    running.start("--out", str(out), "--resume", "--at", str(stop), *given)
    again, resumed = running.wait()["held_out_loss"], _losses(out)
    check_equal(stop, losses, resumed)
    _check_same("the held-out loss", again, held_out)
    steps = (
        f"steps {stop + 1} to {max(resumed)}: every loss is bitwise that of the run without a stop"
    )
    yield Part("resumes", time.perf_counter() - began, f"{steps}; {_format_end(resumed, again)}")


def _losses(out: Path) -> dict[int, float]:
    """Reads the loss of every step from the metrics of an output folder."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def _format_end(losses: dict[int, float], held_out_loss: float | None) -> str:
    last = max(losses)
    held_out = "" if held_out_loss is None else f", held-out loss {held_out_loss:.4f}"
    return f"loss {losses[last]:.4f} at step {last}{held_out}"


def check_equal(stop: int, losses: dict[int, float], resumed: dict[int, float]) -> None:
    """Raises TrainingError at the first step after `stop` whose losses are not bitwise equal."""
    for step in range(stop + 1, max(losses) + 1):
        _check_same(f"the loss of step {step}", resumed.get(step), losses[step])


def _check_same(quantity: str, resumed: float | None, without_stop: float | None) -> None:
    if resumed != without_stop:
        raise TrainingError(
            "resuming from the checkpoint in the middle",
            f"{quantity} is {resumed!r}, and {without_stop!r} without a stop",
            "a report: a resumed run should be bitwise the one that was not stopped",
        )


class TrainingProcesses:
    """Processes of one training run.

    count: of processes.  devices: of the run.  limit: most seconds of a part.
    """

    def __init__(self, count: int, devices: int, limit: int):
        self._count, self._devices, self._limit = count, devices, limit
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *options: str) -> None:
        """Starts `meshwright train` with `options` in every process."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["train", *options, "--devices", str(self._devices), "--json"]
        self._running = []
        for i in range(self._count):
            hosts = [
                "--coordinator",
                f"127.0.0.1:{port}",
                "--processes",
                str(self._count),
                "--process",
                str(i),
            ]
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "meshwright",
                    *words,
                    *(hosts if self._count > 1 else []),
                ],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._running.append(process)

    def wait(self) -> dict[str, Any]:
        """Waits for the end and returns the summary of process 0.

        Raises TrainingError where a process fails.
        """
        try:
            outputs = [process.communicate(timeout=self._limit) for process in self._running]
        except subprocess.TimeoutExpired:
            self._fail(f"it took more than {self._limit} s")
        for process, (_, errors) in zip(self._running, outputs, strict=True):
            if process.returncode:
                self._fail(errors.strip()[-1500:])
        return dict(json.loads(outputs[0][0].strip().splitlines()[-1]))

    def _fail(self, reason: str) -> NoReturn:
        for process in self._running:
            process.kill()
            process.wait()
        raise TrainingError(
            "the rehearsal", reason, "the fix named above; the real run would fail alike"
        )
