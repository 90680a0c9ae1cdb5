"""The verb `train`: a new run, or one that is resumed."""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from meshwright.api.training import output_folder, train_reported
from meshwright.cli.base_run import Base, RunOptions, base_run
from meshwright.cli.devices import HostOptions, start_devices
from meshwright.cli.output import write_json
from meshwright.cli.parse import parse, value_of
from meshwright.errors import ConfigError
from meshwright.formatting import format_step
from meshwright.launching.restarts import Restarts
from meshwright.ranges import NonNegativeInt, PositiveInt
from meshwright.reporters.console import ConsoleReport, Period, open_console
from meshwright.runs.run_file import run_in_folder
from meshwright.storage.paths import path_of
from meshwright.trainer import loop
from meshwright.trainer.watchdog import Watchdog
from meshwright.views.run_tables import print_forecast_gaps, print_prepared_model, print_prepared_run, print_summary

if TYPE_CHECKING:
    from meshwright.planner.forecast import StepForecast


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Train RECIPE: a name that `meshwright recipes` lists, FILE.py:FUNCTION, a plan (FILE.json), or hf:PATH of a
    Hugging Face model, which starts from its weights. Without one it trains `tiny`, a small Llama on Python's own
    source. Without an accelerator it simulates eight devices."""

    without: ClassVar[Sequence[str]] = ("finetune",)
    """Parts of the Run whose options other verbs have."""
    out: Path | None = None
    """Output folder; by default a new one under `runs`."""
    devices: PositiveInt | None = None
    """Devices of the whole run: the first so many accelerators, or simulated ones on a CPU."""
    resume: bool = False
    """Continue from the last checkpoint in --out, with the Run that is kept there."""
    resume_if_exists: bool = False
    """Resume where --out has a checkpoint, and start where it has none: the same command for every start of a job."""
    at: NonNegativeInt | None = None
    """Continue from the checkpoint of this step; newer ones are set aside."""
    accept: tuple[str, ...] = ()
    """Differences from the checkpoint with which to resume although they change the function of the model or its data:
    names as the refusal lists them, such as `model.rope_theta` or `text`."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
    """Trace these steps into OUT/profile (xprof, Perfetto), and set the measured beside the simulated schedule."""
    log_every: str = "30s,10"
    """Time between lasting lines of progress: seconds (30s, 5min), steps (10), or both, of which the later counts."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()
    watchdog: Watchdog = Watchdog()
    supervise: bool = False
    """Train in a child process, and start it again from its last good checkpoint when it dies or a host is gone."""
    restarts: Restarts = Restarts()
    json: bool = False
    """Print the summary as JSON on standard output, and everything else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright train`; the exit code is 128 + N where signal N stopped the run."""
    base = base_of_training(args)
    options = parse(TrainOptions, "train [RECIPE]", base.args, default=TrainOptions(run=base.run))
    return run_training(options, ["train", *args])


def run_training(options: TrainOptions, words: Sequence[str]) -> int:
    """Trains what the options of a verb ask for; returns its exit code. words: the verb and its arguments."""
    out, hosts = output_folder(options.run, options.out), options.hosts.hosts()
    if options.supervise:
        rest = [word for word in words[1:] if word != "--supervise"]
        rest += [] if options.out else ["--out", str(out)]
        limits = (options.restarts, options.watchdog)
        from meshwright.launching.supervise import supervise

        return supervise(words[0], rest, options.run, out, hosts, options.devices, limits)
    console = open_console(sys.stderr if options.json else sys.stdout)
    console.quiet = hosts.process != 0
    start: loop.Start = "resume" if options.resume else "resume if exists" if options.resume_if_exists else "fresh"

    def show_start(prepared: Any, forecast: "StepForecast | None") -> None:
        if not isinstance(prepared, loop.PreparedRun):
            print_prepared_model(console, prepared.device_run)
        else:
            print_prepared_run(console, prepared)
        if forecast is not None:
            console.print(
                f"predicted: {format_step(forecast.step)} per step, of which {format_step(forecast.exposed)} is "
                f"exposed communication ({forecast.source})\n",
                markup=False,
            )

    with contextlib.closing(ConsoleReport(console, Period.parse(options.log_every))) as progress:
        start_devices(options.devices, options.run.mesh, hosts)
        trained = train_reported(
            options.run,
            out,
            start=start if options.at is None else options.at,
            accept=options.accept,
            devices=options.devices,
            progress=progress,
            console=console,
            profile=options.profile,
            watchdog=options.watchdog,
            on_prepared=show_start,
        )
    summary = trained.summary
    if options.json and hosts.process == 0:
        write_json({**dataclasses.asdict(summary), "out": out})
    elif not options.json:
        print_summary(console, summary, unit=trained.unit)
    if trained.gaps:
        print_forecast_gaps(console, trained.gaps)
    return 128 + summary.interrupted_by if summary.interrupted_by else 0


def resumed_folder(args: Sequence[str]) -> Path | None:
    """Returns the output folder whose Run a start continues with; None where it begins with another.

    With --resume-if-exists it is that of an earlier start; all hosts decide together later whether it has checkpoints.
    """
    given = [name for name in ("--resume", "--at", _IF_EXISTS) if name in args or value_of(args, name) is not None]
    if not given:
        return None
    out = value_of(args, "--out")
    if out is None:
        asked = f"--at {value_of(args, '--at')}" if given[0] == "--at" else given[0]
        raise ConfigError(asked, "it continues the run in a folder", f"--out DIR {asked}")
    folder = path_of(out)
    return folder if given[0] != _IF_EXISTS or (folder / "run.json").is_file() else None


_IF_EXISTS = "--resume-if-exists"


def base_of_training(args: Sequence[str]) -> Base:
    """Returns the Run to start from; a resumed run continues with the one in its folder, unless a recipe is given."""
    unnamed = bool(args) and args[0].startswith("-") and value_of(args, "--run") is None
    folder = resumed_folder(args)
    return Base(run_in_folder(folder), args) if folder is not None and unnamed else base_run(args)
