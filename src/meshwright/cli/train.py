"""The verb `train`: a new run, or one that is resumed."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from meshwright.api.choices import choose_for_devices
from meshwright.bench.calibration_file import calibration_path, read_calibration
from meshwright.cli.base_run import Base, RunOptions, base_run, value_of
from meshwright.cli.devices import HostOptions, start_devices
from meshwright.cli.output import write_json
from meshwright.cli.parse import parse
from meshwright.errors import ConfigError, TrainingError
from meshwright.formatting import format_step
from meshwright.hardware import mesh
from meshwright.planner.forecast import ForecastGap, StepForecast, forecast_gaps, forecast_step
from meshwright.report import Reporter
from meshwright.report.console import ConsoleReport, open_console
from meshwright.runs.run_file import run_in_folder
from meshwright.trainer import loop
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
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Continue from the last checkpoint in --out, with the Run that is kept there."""
    at: int | None = None
    """Continue from the checkpoint of this step; newer ones are set aside."""
    new_data: tyro.conf.FlagCreatePairsOff[bool] = False
    """Resume although the text, its order or its mixture differ from those of the checkpoint."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the summary as JSON on standard output, and everything else on standard error."""

    @property
    def resumes(self) -> bool:
        """Whether a checkpoint is restored."""
        return self.resume or self.at is not None


def main(args: Sequence[str]) -> int:
    """Runs `meshwright train`; the exit code is 128 + N where signal N stopped the run."""
    base = _base_of_training(args)
    return run_training(parse(TrainOptions, "train [RECIPE]", base.args, default=TrainOptions(run=base.run)))


def run_training(options: TrainOptions) -> int:
    """Trains what the options of a verb say; returns its exit code."""
    console = open_console(sys.stderr if options.json else sys.stdout)
    hosts = options.hosts.hosts()
    console.quiet = hosts.process != 0
    start_devices(options.devices, options.run, hosts)
    out = options.out or Path("runs") / f"{options.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if is_wrapped(options.run):
        from meshwright.cli.wrapped import prepare_and_print  # a run of a family's model loads no wrapped one

        summary = _train(options, prepare_and_print(options.run, options.devices, console), out, console)
        if options.json:
            write_json({**dataclasses.asdict(summary), "out": out})
        else:
            print_summary(console, summary, unit="examples")
        return 128 + summary.interrupted_by if summary.interrupted_by else 0
    prepared = loop.prepare_run(
        options.run, cache=mesh.default_cache_folder(), devices=options.devices, choose=choose_for_devices,
        own=out / "tokenizer.json" if options.resumes else None,
    )  # fmt: skip
    print_prepared_run(console, prepared)
    if options.run.init_from is not None and not options.resumes:
        from meshwright.checkpoint.initial_weights import describe_initial_weights

        console.print(describe_initial_weights(prepared.device_run.run), markup=False)
    forecast = _print_forecast(console, prepared)
    summary = _train(options, prepared, out, console)
    if hosts.process == 0:
        gaps = [] if forecast is None or not summary.tokens else _write_gaps(console, forecast, summary, prepared)
        if options.json:
            write_json({**dataclasses.asdict(summary), "out": out})
        else:
            print_summary(console, summary)
        if gaps:
            print_forecast_gaps(console, gaps)
    return 128 + summary.interrupted_by if summary.interrupted_by else 0


def _base_of_training(args: Sequence[str]) -> Base:
    """Returns the Run to start from; a resumed run continues with the one in its folder, unless a recipe is given."""
    if "--resume" not in args and value_of(args, "--at") is None:
        return base_run(args)
    out = value_of(args, "--out")
    if out is None:
        raise ConfigError("--resume", "it continues the run in a folder", "--out DIR --resume")
    if args[0].startswith("-") and value_of(args, "--run") is None:
        return Base(run_in_folder(Path(out)), args)
    return base_run(args)


def _train(options: TrainOptions, prepared: loop.Trainable, out: Path, console: Console) -> loop.Summary:
    """Trains, with progress on the console of process 0."""

    def reporters(first: int) -> list[Reporter]:
        if jax.process_index():
            return []
        return [ConsoleReport(console, start=first, steps=prepared.device_run.run.training.steps)]

    try:
        return loop.train(
            prepared, out, start="resume" if options.resumes else "fresh", at=options.at,
            data="new" if options.new_data else "same", reporters=reporters,
        )  # fmt: skip
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(
            f"training {prepared.device_run.run.name} on mesh {prepared.device_run.shape}",
            f"a device has not enough memory: {str(error).splitlines()[0]}",
            "a smaller --batch, more --training.microbatches, or --training.remat full (see meshwright prove)",
        ) from error


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
