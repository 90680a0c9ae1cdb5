"""The verb `train`: a new run, or one that is resumed."""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from meshwright.activity import watched_by
from meshwright.api.choices import choose_for_devices
from meshwright.api.memory_remedies import memory_explained
from meshwright.api.viewing import view
from meshwright.bench.calibration_file import calibration_path, read_calibration
from meshwright.checkpoint.steps import committed_steps
from meshwright.cli.base_run import Base, RunOptions, base_run
from meshwright.cli.devices import HostOptions, start_devices
from meshwright.cli.output import write_json
from meshwright.cli.parse import parse, value_of
from meshwright.cli.restarts import Restarts
from meshwright.errors import ConfigError
from meshwright.formatting import format_step
from meshwright.hardware import mesh
from meshwright.hardware.hosts import Hosts
from meshwright.planner.forecast import ForecastGap, StepForecast, forecast_gaps, forecast_step
from meshwright.report import Reporter
from meshwright.report.console import ConsoleReport, Period, open_console
from meshwright.report.tokenizing import TokenizeReport
from meshwright.runs.run_file import run_in_folder
from meshwright.storage.paths import path_of
from meshwright.trainer import loop
from meshwright.trainer.watchdog import Watchdog
from meshwright.views.plan_tables import print_forecast_gaps
from meshwright.views.run_tables import print_prepared_run, print_summary
from meshwright.wrapped.model import is_wrapped


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Train RECIPE: a name that `meshwright recipes` lists, FILE.py:FUNCTION, a plan (FILE.json), or hf:PATH of a
    Hugging Face model, which starts from its weights. Without one it trains `tiny`, a small Llama on Python's own
    source. Without an accelerator it simulates eight devices."""

    out: Path | None = None
    """Output folder; by default a new one under `runs`."""
    devices: int | None = None
    """Devices of the whole run: the first so many accelerators, or simulated ones on a CPU."""
    resume: bool = False
    """Continue from the last checkpoint in --out, with the Run that is kept there."""
    resume_if_exists: bool = False
    """Resume where --out has a checkpoint, and start where it has none: the same command for every start of a job."""
    at: int | None = None
    """Continue from the checkpoint of this step; newer ones are set aside."""
    new_data: bool = False
    """Resume although the text, its order or its mixture differ from those of the checkpoint."""
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

    @property
    def resumes(self) -> bool:
        """Whether a checkpoint is restored."""
        return self.resume or self.at is not None


def main(args: Sequence[str]) -> int:
    """Runs `meshwright train`; the exit code is 128 + N where signal N stopped the run."""
    if value_of(args, "--out") == "":  # before it is taken for the folder of a run to resume
        truth = "its value is empty, as of a shell variable that is not set"
        raise ConfigError("--out ''", truth, "--out DIR, or leave it out")
    words = resume_if_exists(args)
    base = base_of_training(words)
    options = parse(TrainOptions, "train [RECIPE]", base.args, default=TrainOptions(run=base.run))
    return run_training(options, ["train", *words])


def run_training(options: TrainOptions, words: Sequence[str]) -> int:
    """Trains what the options of a verb say; returns its exit code. words: the verb and its arguments."""
    out = path_of(options.out or Path("runs") / f"{options.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if options.supervise:
        from meshwright.cli.supervise import supervise  # loaded for runs that ask for it

        rest = [word for word in words[1:] if word != "--supervise"]
        rest += [] if options.out else ["--out", str(out)]
        limits = (options.restarts, options.watchdog)
        return supervise(words[0], rest, options.run, out, options.hosts.hosts(), options.devices, limits)
    console = open_console(sys.stderr if options.json else sys.stdout)
    hosts = options.hosts.hosts()
    console.quiet = hosts.process != 0
    progress = ConsoleReport(console, Period.parse(options.log_every))
    try:
        with watched_by(progress):
            return _run_training(options, out, hosts, console, progress)
    finally:
        progress.close()


def _run_training(
    options: TrainOptions, out: Path, hosts: Hosts, console: Console, progress: ConsoleReport
) -> int:  # fmt: skip
    start_devices(options.devices, options.run, hosts)
    watched: AbstractContextManager[None] = contextlib.nullcontext()
    if hosts.processes > 1:
        from meshwright.trainer.same_hosts import agree_on, watched_before  # not for a process that is alone

        agree_on(options.run)
        watched = watched_before(out, options.watchdog)
    if is_wrapped(options.run):
        from meshwright.cli.wrapped import prepare_and_print  # a run of a family's model loads no wrapped one

        summary = _train(options, prepare_and_print(options.run, options.devices, console), out, console, progress)
        if options.json and hosts.process == 0:
            write_json({**dataclasses.asdict(summary), "out": out})
        elif not options.json:
            print_summary(console, summary, unit="examples")
        return 128 + summary.interrupted_by if summary.interrupted_by else 0
    with watched:
        prepared = loop.prepare_run(
            options.run, cache=mesh.default_cache_folder(), devices=options.devices, choose=choose_for_devices,
            own=out / "tokenizer.json" if options.resumes else None, progress=TokenizeReport(open_console(sys.stderr)),
        )  # fmt: skip
    print_prepared_run(console, prepared)
    if options.run.init_from is not None and not options.resumes:
        from meshwright.checkpoint.initial_weights import describe_initial_weights

        console.print(describe_initial_weights(prepared.device_run.run), markup=False)
    forecast = _print_forecast(console, prepared)
    summary = _train(options, prepared, out, console, progress)
    if hosts.process == 0:
        gaps = [] if forecast is None or not summary.tokens else _write_gaps(console, forecast, summary, prepared)
        if options.json:
            write_json({**dataclasses.asdict(summary), "out": out})
        else:
            print_summary(console, summary)
        if gaps:
            print_forecast_gaps(console, gaps)
    return 128 + summary.interrupted_by if summary.interrupted_by else 0


def resume_if_exists(args: Sequence[str]) -> Sequence[str]:
    """Returns the arguments with `--resume` in the place of `--resume-if-exists`, or neither without a checkpoint.

    Decided once, before the hosts join: none of them can have written a checkpoint of this start.
    """
    if _IF_EXISTS not in args:
        return args
    out = value_of(args, "--out")
    if out is None:
        raise ConfigError(_IF_EXISTS, "it looks into a folder", f"--out DIR {_IF_EXISTS}")
    others = [word for word in args if word != _IF_EXISTS]
    return [*others, "--resume"] if committed_steps(path_of(out) / "checkpoints") else others


_IF_EXISTS = "--resume-if-exists"


def base_of_training(args: Sequence[str]) -> Base:
    """Returns the Run to start from; a resumed run continues with the one in its folder, unless a recipe is given."""
    if "--resume" not in args and value_of(args, "--at") is None:
        return base_run(args)
    out = value_of(args, "--out")
    if out is None:
        raise ConfigError("--resume", "it continues the run in a folder", "--out DIR --resume")
    if args[0].startswith("-") and value_of(args, "--run") is None:
        return Base(run_in_folder(path_of(out)), args)
    return base_run(args)


def _train(
    options: TrainOptions, prepared: loop.Trainable, out: Path, console: Console, progress: ConsoleReport
) -> loop.Summary:
    """Trains, with progress on the console of process 0, and with a profile where one is asked for."""

    def reporters(first: int) -> list[Reporter]:
        if jax.process_index():
            return []
        run = prepared.device_run.run
        return [progress.begin(first, run.training.steps, run.optimizer.warmup_steps)]

    with memory_explained(prepared), _profiled(options, prepared, out, console) as run:
        return loop.train(
            run, out, start="resume" if options.resumes else "fresh", at=options.at,
            data="new" if options.new_data else "same", reporters=reporters, page=lambda: view(out).write(),
            watchdog=options.watchdog,
        )  # fmt: skip


def _profiled(
    options: TrainOptions, prepared: loop.Trainable, out: Path, console: Console
) -> AbstractContextManager[loop.Trainable]:
    if options.profile is None:
        return contextlib.nullcontext(prepared)
    from meshwright.api.profiling import profiled  # most trainings have no profile

    return profiled(prepared, options.profile, out, console)


def _print_forecast(console: Console, prepared: loop.PreparedRun) -> StepForecast | None:
    """Prints the predicted time of a step; nothing where nothing is known of the devices."""
    file = calibration_path(mesh.default_cache_folder())
    calibration = read_calibration(file) if file.is_file() else None
    device_run = prepared.device_run
    forecast = forecast_step(device_run.placed, list(device_run.mesh.devices.flat), calibration)
    if forecast is not None:
        console.print(
            f"predicted: {format_step(forecast.step)} per step, of which {format_step(forecast.exposed)} is exposed "
            f"communication ({forecast.source})\n",
            markup=False,
        )
    return forecast


def _write_gaps(
    console: Console, forecast: StepForecast, summary: loop.Summary, prepared: loop.PreparedRun
) -> list[ForecastGap]:
    """Returns the step's parts, predicted and measured, and writes them to `foresight.json`."""
    steps = max(1, summary.steps_taken)
    data_wait, saving = summary.data_wait_seconds / steps, summary.save_seconds / steps
    step = max(0.0, summary.step_seconds - data_wait)
    gaps = forecast_gaps(forecast, step=step, data_wait=data_wait, saving=saving)
    record = {"source": forecast.source, "gaps": [dataclasses.asdict(gap) for gap in gaps]}
    file = summary.out / "foresight.json"
    try:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        console.print(f"{file} could not be written: {error.strerror}", markup=False)
    return gaps
