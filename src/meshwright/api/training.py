"""The verb `train`: a new run, or one that is resumed."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import jax
import tyro
from rich.console import Console

from meshwright.activity import watched_by
from meshwright.api.verb import (
    Base,
    Call,
    HostOptions,
    Outcome,
    RunOptions,
    base_run,
    start_devices,
    value_of,
)
from meshwright.bench.calibration_file import calibration_here
from meshwright.errors import ConfigError
from meshwright.formatting import format_step
from meshwright.launching.restarts import Restarts
from meshwright.ranges import NonNegativeInt, PositiveInt
from meshwright.reporters import Reporter
from meshwright.reporters.console import ConsoleReport, Period, TokenizeReport, open_console
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder, with_absolute_paths
from meshwright.signs import PREPARING, Phases, here, in_phases
from meshwright.statuses import statuses_of
from meshwright.step.device_memory import OutOfDeviceMemory
from meshwright.storage.paths import default_cache_folder, path_of
from meshwright.storage.writing import refuse_links
from meshwright.trainer import loop
from meshwright.trainer.preemption import Preemption
from meshwright.trainer.relations import Output
from meshwright.trainer.watchdog import Watchdog
from meshwright.trust import own
from meshwright.views.run_tables import (
    print_forecast_gaps,
    print_prepared_model,
    print_prepared_run,
    print_summary,
)

if TYPE_CHECKING:
    from meshwright.api.local_planner import LocalPlanner
    from meshwright.planner.forecast import ForecastGap, StepForecast


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Train RECIPE: a name that `meshwright recipes` lists, FILE.py:FUNCTION, a plan (FILE.json), or hf:PATH of a
    Hugging Face model, which starts from its weights. Without one it trains `tiny`, a small Llama on Python's own
    source. Without an accelerator it simulates eight devices."""

    without: ClassVar[Sequence[str]] = ("finetune",)
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

    @classmethod
    def base(cls, args: Sequence[str]) -> Base:
        """Returns the Run to start from: of a resumed run the one in its folder, unless a recipe is given."""
        unnamed = bool(args) and args[0].startswith("-") and value_of(args, "--run") is None
        folder = resumed_folder(args)
        return (
            Base(run_in_folder(folder), args) if folder is not None and unnamed else base_run(args)
        )

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright train`; the exit code is 128 + N where signal N stopped the run."""
        out, hosts = output_folder(self.run, self.out), self.hosts.hosts()
        if self.supervise:
            rest = [word for word in call.words[1:] if word != "--supervise"]
            rest += [] if self.out else ["--out", str(out)]
            from meshwright.launching.supervise import Supervisor

            given = (self.run, out, hosts, self.devices, self.restarts, self.watchdog)
            return Outcome(code=Supervisor(call.words[0], rest, *given).supervise())
        console = call.console
        start: loop.Start = (
            "resume" if self.resume else "resume if exists" if self.resume_if_exists else "fresh"
        )

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

        start_devices(self.devices, self.run.mesh, hosts)
        with loop.to_the_end(out, self.watchdog):
            with contextlib.closing(
                ConsoleReport(console, Period.parse(self.log_every))
            ) as progress:
                trained = train_reported(
                    self.run,
                    out,
                    start=start if self.at is None else self.at,
                    accept=self.accept,
                    devices=self.devices,
                    progress=progress,
                    console=console,
                    profile=self.profile,
                    watchdog=self.watchdog,
                    on_prepared=show_start,
                )
            summary = trained.summary
            if not self.json:
                print_summary(console, summary, unit=trained.unit)
            if trained.gaps:
                print_forecast_gaps(console, trained.gaps)
        code = 128 + summary.interrupted_by if summary.interrupted_by else 0
        return Outcome(record={**dataclasses.asdict(summary), "out": out}, code=code)


_IF_EXISTS = "--resume-if-exists"


def resumed_folder(args: Sequence[str]) -> Path | None:
    """Returns the output folder whose Run a start continues with; None where it begins with another.

    With --resume-if-exists it is that of an earlier start; all hosts decide together later whether it has checkpoints.
    """
    given = [
        name
        for name in ("--resume", "--at", _IF_EXISTS)
        if name in args or value_of(args, name) is not None
    ]
    if not given:
        return None
    out = value_of(args, "--out")
    if out is None:
        asked = f"--at {value_of(args, '--at')}" if given[0] == "--at" else given[0]
        raise ConfigError(asked, "it continues the run in a folder", f"--out DIR {asked}")
    folder = path_of(out)
    return folder if given[0] != _IF_EXISTS or (folder / "run.json").is_file() else None


def train(
    run: Run,
    out: str | Path | None = None,
    *,
    start: Literal["fresh", "resume"] | int = "fresh",
    accept: Sequence[str] = (),
    devices: int | None = None,
    progress: str = "30s,10",
    profile: str | None = None,
    cache: Path | None = None,
) -> loop.Summary:
    """Trains `run` and returns a summary.

    out: output folder for checkpoints, metrics, the Run and a text sample; None makes a new one under `runs`.
    start: `resume` continues from the last checkpoint in `out`, a number from that of this step.
    accept: names of differences from the checkpoint with which it resumes although they change the function of the
    model or its data, as the error lists them (`("model.rope_theta", "text")`).
    devices: use the first so many devices; None uses all.
    progress: time between lasting lines on standard output: seconds (`30s`), steps (`10`), or both, of which the later
    counts; `none` shows nothing.
    profile: first and last step to trace into `out`/profile, as `10:13`, and to set beside the simulated schedule, in
    `out`/profile.json and, unless `progress` is `none`, on standard output.
    cache: folder of token files and compiled programs; None takes the user's cache.
    Raises ConfigError before anything is traced, DataError, CheckpointError, TrainingError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, steps=2, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "mine", progress="none", cache=tmp)
        >>> result.steps, result.loss > 0
        (2, True)
    """
    run = own(run)
    quiet = progress == "none"
    with contextlib.closing(
        ConsoleReport(open_console(), Period.parse("30s,10" if quiet else progress))
    ) as shown:
        trained = train_reported(
            run,
            output_folder(run, out),
            start=start,
            accept=accept,
            devices=devices,
            profile=profile,
            cache=cache,
            progress=None if quiet else shown,
            console=None if quiet else open_console(),
        )
        return trained.summary


@dataclasses.dataclass(frozen=True)
class Trained:
    """Result of a training, and how far its steps were from what the planner predicted."""

    summary: loop.Summary
    unit: str
    """What `summary.tokens` counts: tokens, or examples of a wrapped model."""
    gaps: "list[ForecastGap]" = dataclasses.field(default_factory=list)
    """Parts of a step, predicted and measured; none where nothing is known of the devices."""


def output_folder(run: Run, out: str | Path | None) -> Path:
    """Returns the output folder of a run: `out`, or a new one under `runs`."""
    return (
        path_of(out)
        if out is not None
        else path_of("runs") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    )


def train_reported(
    run: Run,
    out: Path,
    *,
    start: loop.Start | int = "fresh",
    accept: Sequence[str] = (),
    devices: int | None = None,
    progress: ConsoleReport | None = None,
    console: Console | None = None,
    profile: str | None = None,
    cache: Path | None = None,
    watchdog: Watchdog | None = None,
    on_prepared: "Callable[[loop.Trainable, StepForecast | None], None]" = lambda prepared, forecast: (
        None
    ),
) -> Trained:
    """Trains `run` as `train` does, on hosts that have joined, and keeps its forecast in OUT/foresight.json.

    progress: display of the steps; None shows none.  console: where a profile is printed; None prints none.
    on_prepared: called with the run on its devices, and the predicted step where the devices are known.
    """
    refuse_links(out)
    run = with_absolute_paths(run)
    cache = path_of(cache or default_cache_folder())
    if profile is not None:
        from meshwright.bench.step_profile import parse_steps

        parse_steps(profile, run.training.steps)  # refused before the text is read
    output = Output(
        out,
        resumes=start == "resume" or isinstance(start, int),
        may_resume=start == "resume if exists",
        at=start if isinstance(start, int) else None,
        accept=accept,
    )

    def reporters(first: int) -> list[Reporter]:
        if progress is None or jax.process_index():
            return []
        return [progress.begin(first, run.training.steps, run.optimizer.warmup_steps)]

    preemption: Preemption | None = None
    with contextlib.ExitStack() as stack:
        if progress is not None:
            stack.enter_context(watched_by(progress))
        joined = stack.enter_context(contextlib.ExitStack())
        if jax.distributed.is_initialized() and (hosts := loop.hosts_module()) is not None:
            # From here on the others wait for this process: a signal is answered by all of them.
            preemption = stack.enter_context(Preemption().listening())
            joined.enter_context(hosts.watching(out, Phases(PREPARING), watchdog or Watchdog()))
            hosts.agree_on(run)
        else:
            joined.enter_context(in_phases(Phases(PREPARING)))
        with joined, _memory_explained(run):
            prepared = loop.prepare_run(
                run,
                cache=cache,
                devices=devices,
                choose=_choose_for_devices,
                output=output,
                progress=None if progress is None else TokenizeReport(open_console(sys.stderr)),
            )
        device_run = prepared.device_run
        planner = _local_planner(list(device_run.mesh.devices.flat))
        prepared = prepared if planner is None else planner.scheduled(prepared)
        forecast = None if planner is None else planner.forecast(device_run)
        on_prepared(prepared, forecast)
        tracing: AbstractContextManager[loop.Trainable] = contextlib.nullcontext(prepared)
        if profile is not None:
            from meshwright.api.profiling import profiled

            tracing = profiled(
                prepared, profile, out, console, None if planner is None else planner.target
            )
        with _memory_explained(run, prepared, planner), tracing as traced:
            summary = loop.train(
                traced,
                out,
                start="resume" if isinstance(start, int) else start,
                at=start if isinstance(start, int) else None,
                accept=accept,
                reporters=reporters,
                watchdog=watchdog,
                preemption=preemption,
            )
        here().enter("leave")
        if planner is None or forecast is None or not summary.tokens or jax.process_index():
            return Trained(summary, run.model.unit)
        return Trained(summary, run.model.unit, planner.write_gaps(forecast, summary))


def _local_planner(devices: Sequence[Any]) -> "LocalPlanner | None":
    """Returns the planner of devices; None of simulated devices that `meshwright bench` has not measured."""
    calibration = calibration_here(default_cache_folder())
    if calibration is None and devices[0].platform == "cpu":
        return None
    return _planning().LocalPlanner(devices, calibration)


def _planning() -> ModuleType:
    """Imports the planner, which only runs need on known devices, or that do not fit."""
    from meshwright.api import local_planner

    return local_planner


def _choose_for_devices(run: Run, devices: Sequence[Any]) -> Run:
    """Returns the run with the remat policy and the pipeline schedule that are fastest on `devices`."""
    planner = _local_planner(devices)
    return run if planner is None else planner.choose(run)


@contextlib.contextmanager
def _memory_explained(
    run: Run, prepared: loop.Trainable | None = None, planner: "LocalPlanner | None" = None
) -> Iterator[None]:
    """Raises OutOfDeviceMemory with remedies in place of one without, and of XLA's RESOURCE_EXHAUSTED."""
    try:
        yield
    except (OutOfDeviceMemory, jax.errors.JaxRuntimeError) as error:
        before_the_run = isinstance(error, OutOfDeviceMemory)
        if not before_the_run and "RESOURCE_EXHAUSTED" not in statuses_of(error):
            raise
        device_run = None if prepared is None else prepared.device_run
        raise _planning().out_of_memory(error, run, device_run, planner) from error
