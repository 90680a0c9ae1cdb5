"""The verb `train`: a new run, or one that is resumed."""

import contextlib
import dataclasses
import functools
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
from meshwright.hardware.hosts import Hosts
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
from meshwright.trainer.alarms import AlarmOptions, Alarms
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


SLOW = "slow"
"""Value of `--profile` that traces steps when they become slow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Train RECIPE: a name that `meshwright recipes` lists, FILE.py:FUNCTION, a plan (FILE.json),
    or hf:PATH of a Hugging Face model, which starts from its weights. Without one it trains `tiny`,
    a small Llama on Python's own source. Without an accelerator it simulates eight devices.
    """

    without: ClassVar[Sequence[str]] = ("finetune",)
    out: Path | None = None
    """Output folder; by default a new one under `runs`."""
    devices: PositiveInt | None = None
    """Devices of the whole run: the first so many accelerators, or simulated ones on a CPU."""
    resume: bool = False
    """Continue from the last checkpoint in --out, with the Run that is kept there."""
    resume_if_exists: bool = False
    """Resume where --out has a checkpoint, and start where it has none: the same command for every
    start of a job."""
    at: NonNegativeInt | None = None
    """Continue from the checkpoint of this step; newer ones are set aside."""
    accept: tuple[str, ...] = ()
    """Differences from the checkpoint with which to resume although they change the function of the
    model or its data: names as the refusal lists them, such as `model.rope_theta` or `text`."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST|slow")] = None
    """Trace these steps into OUT/profile (xprof, Perfetto), and set the measured beside the
    simulated schedule. `slow` traces two steps, once an hour at most, when ten steps take 1.2 times
    as long as those before, and names a device of this host that computes longer than the
    others."""
    log_every: str = "30s,10"
    """Time between lasting lines of progress: seconds (30s, 5min), steps (10), or both, of which
    the later counts."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()
    watchdog: Watchdog = Watchdog()
    alarm: AlarmOptions = AlarmOptions()
    supervise: bool = False
    """Train in a child process, and start it again from its last good checkpoint when it dies or a
    host is gone."""
    restarts: Restarts = Restarts()
    json: bool = False
    """Print the summary as JSON on standard output, and everything else on standard error."""

    @classmethod
    def base(cls, args: Sequence[str]) -> Base:
        """Returns the Run to start from.

        A resumed run is the one in its folder, unless a recipe is given.
        """
        unnamed = bool(args) and args[0].startswith("-") and value_of(args, "--run") is None
        folder = resumed_folder(args)
        if folder is not None and unnamed:
            return Base(run_in_folder(folder), args)
        return base_run(args)

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright train`; the exit code is 128 + N where signal N stopped the run."""
        out = output_folder(self.run, self.out)
        hosts = self.hosts.hosts()
        if self.supervise:
            return Outcome(code=self._supervise(call.words, out, hosts))
        console = call.console
        alarms = Alarms(self.alarm, out)
        with contextlib.ExitStack() as stack:
            if hosts.process == 0:
                stack.enter_context(alarms.sending())
            start_devices(self.devices, self.run.mesh, hosts)
            stack.enter_context(loop.to_the_end(out, self.watchdog))
            with contextlib.closing(
                ConsoleReport(console, Period.parse(self.log_every))
            ) as progress:
                trained = train_reported(
                    self.run,
                    out,
                    start=self._start(),
                    accept=self.accept,
                    devices=self.devices,
                    progress=progress,
                    console=console,
                    profile=self.profile,
                    watchdog=self.watchdog,
                    alarms=alarms,
                    on_prepared=functools.partial(_print_start, console),
                )
            summary = trained.summary
            if not self.json:
                print_summary(console, summary, unit=trained.unit)
            if trained.gaps:
                print_forecast_gaps(console, trained.gaps)
        code = 128 + summary.interrupted_by if summary.interrupted_by else 0
        return Outcome(record={**dataclasses.asdict(summary), "out": out}, code=code)

    def _start(self) -> loop.Start | int:
        """Returns the checkpoint to begin with: none, the last one, or that of a step."""
        if self.at is not None:
            return self.at
        if self.resume:
            return "resume"
        return "resume if exists" if self.resume_if_exists else "fresh"

    def _supervise(self, words: Sequence[str], out: Path, hosts: Hosts) -> int:
        """Trains in a child process that is started again when it dies; returns the exit code."""
        from meshwright.launching.supervise import Supervisor

        verb, *arguments = (word for word in words if word != "--supervise")
        if self.out is None:
            arguments += ["--out", str(out)]
        supervisor = Supervisor(
            verb,
            arguments,
            self.run,
            out,
            hosts,
            self.devices,
            self.restarts,
            self.watchdog,
            self.alarm,
        )
        return supervisor.supervise()


def _print_start(
    console: Console, prepared: loop.Trainable, forecast: "StepForecast | None"
) -> None:
    """Prints the run on its devices, and the predicted step."""
    if isinstance(prepared, loop.PreparedRun):
        print_prepared_run(console, prepared)
    else:
        print_prepared_model(console, prepared.device_run)
    if forecast is not None:
        step = format_step(forecast.step)
        exposed = format_step(forecast.exposed)
        console.print(
            f"predicted: {step} per step, of which {exposed} is exposed communication "
            f"({forecast.source})\n",
            markup=False,
        )


_IF_EXISTS = "--resume-if-exists"
_RESUMING = ("--resume", "--at", _IF_EXISTS)


def resumed_folder(args: Sequence[str]) -> Path | None:
    """Returns the output folder whose Run a start continues.

    None if it begins with another Run.
    With --resume-if-exists it is that of an earlier start; all hosts decide together later whether
    it has checkpoints.
    """
    asked = [name for name in _RESUMING if name in args or value_of(args, name) is not None]
    if not asked:
        return None
    out = value_of(args, "--out")
    if out is None:
        option = f"--at {value_of(args, '--at')}" if asked[0] == "--at" else asked[0]
        raise ConfigError(option, "it continues the run in a folder", f"--out DIR {option}")
    folder = path_of(out)
    if asked[0] == _IF_EXISTS and not (folder / "run.json").is_file():
        return None
    return folder


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

    out: output folder for checkpoints, metrics, the Run and a text sample; None makes a new one
    under `runs`.
    start: `resume` continues from the last checkpoint in `out`, a number from that of this step.
    accept: names of differences from the checkpoint with which it resumes although they change the
    function of the model or its data, as the error lists them (`("model.rope_theta", "text")`).
    devices: use the first so many devices; None uses all.
    progress: time between lasting lines on standard output: seconds (`30s`), steps (`10`), or both,
    of which the later counts; `none` shows nothing.
    profile: first and last step to trace into `out`/profile, as `10:13`, and to set beside the
    simulated schedule, in `out`/profile.json and, unless `progress` is `none`, on standard output;
    `slow`: two steps when the steps become slow, for a device that computes longer than the others.
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
    gaps: "list[ForecastGap]"
    """Parts of a step, predicted and measured; none where nothing is known of the devices."""


def output_folder(run: Run, out: str | Path | None) -> Path:
    """Returns the output folder of a run: `out`, or a new one under `runs`."""
    if out is not None:
        return path_of(out)
    return path_of("runs") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"


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
    alarms: Alarms | None = None,
    on_prepared: "Callable[[loop.Trainable, StepForecast | None], None] | None" = None,
) -> Trained:
    """Trains `run` as `train` does, on hosts that have joined.

    Its forecast is kept in OUT/foresight.json.
    progress: display of the steps; None shows none.  console: where a profile is printed; None
    prints none.  on_prepared: called with the run on its devices, and the predicted step where the
    devices are known.
    """
    refuse_links(out)
    run = with_absolute_paths(run)
    if profile not in (None, SLOW):
        from meshwright.bench.step_profile import parse_steps

        parse_steps(profile, run.training.steps)  # refused before the text is read
    at = start if isinstance(start, int) else None
    mode: loop.Start = "resume" if isinstance(start, int) else start
    output = Output(
        out,
        resumes=mode == "resume",
        may_resume=mode == "resume if exists",
        at=at,
        accept=accept,
    )
    with contextlib.ExitStack() as stack:
        if progress is not None:
            stack.enter_context(watched_by(progress))
        preemption = _preemption_of_all(stack)
        with _watched(run, out, watchdog), _memory_explained(run):
            prepared = loop.prepare_run(
                run,
                cache=path_of(cache or default_cache_folder()),
                devices=devices,
                choose=_choose_for_devices,
                output=output,
                progress=None if progress is None else TokenizeReport(open_console(sys.stderr)),
            )
        planner = _local_planner(list(prepared.device_run.mesh.devices.flat))
        forecast = None
        if planner is not None:
            prepared = planner.scheduled(prepared)
            forecast = planner.forecast(prepared.device_run)
        if on_prepared is not None:
            on_prepared(prepared, forecast)
        with (
            _memory_explained(run, prepared, planner),
            _profiled(prepared, profile, out, console, planner) as traced,
        ):
            summary = loop.train(
                traced,
                out,
                start=mode,
                at=at,
                accept=accept,
                reporters=functools.partial(_reporters, run, progress),
                watchdog=watchdog,
                alarms=alarms,
                preemption=preemption,
            )
        here().enter("leave")
        if planner is None or forecast is None or not summary.tokens or jax.process_index():
            return Trained(summary, run.model.unit, [])
        return Trained(summary, run.model.unit, planner.write_gaps(forecast, summary))


def _preemption_of_all(stack: contextlib.ExitStack) -> Preemption | None:
    """Returns the answer of all hosts to a signal, from here on; None where this process is alone.

    The other hosts wait for this process once they have joined.
    """
    if _hosts() is None:
        return None
    return stack.enter_context(Preemption().listening())


def _hosts() -> ModuleType | None:
    """Returns `trainer.hosts`; None where no other process has joined this one."""
    # Without this question first, counting the processes would start the devices.
    return loop.hosts_module() if jax.distributed.is_initialized() else None


@contextlib.contextmanager
def _watched(run: Run, out: Path, watchdog: Watchdog | None) -> Iterator[None]:
    """Gives signs of the preparation of a run.

    Several hosts watch each other, and agree on the run.
    """
    phases = Phases(PREPARING)
    hosts = _hosts()
    if hosts is None:
        with in_phases(phases):
            yield
        return
    with hosts.watching(out, phases, watchdog or Watchdog()):
        hosts.agree_on(run)
        yield


def _reporters(run: Run, progress: ConsoleReport | None, first: int) -> list[Reporter]:
    """Returns the reporters of process 0. first: steps that an earlier start took."""
    if progress is None or jax.process_index():
        return []
    return [progress.begin(first, run.training.steps, run.optimizer.warmup_steps)]


def _profiled(
    prepared: loop.Trainable,
    profile: str | None,
    out: Path,
    console: Console | None,
    planner: "LocalPlanner | None",
) -> AbstractContextManager[loop.Trainable]:
    """Returns the run as it is trained, with the steps of `profile` traced where some are named."""
    if profile is None:
        return contextlib.nullcontext(prepared)
    from meshwright.api.profiling import profiled, watched_for_slowness

    if profile == SLOW:
        return watched_for_slowness(prepared, out)
    target = None if planner is None else planner.target
    return profiled(prepared, profile, out, console, target)


def _local_planner(devices: Sequence[Any]) -> "LocalPlanner | None":
    """Returns the planner of devices.

    None for simulated devices that `meshwright bench` has not measured.
    """
    calibration = calibration_here(default_cache_folder())
    if calibration is None and devices[0].platform == "cpu":
        return None
    return _planning().LocalPlanner(devices, calibration)


def _planning() -> ModuleType:
    """Imports the planner, which only runs need on known devices, or that do not fit."""
    from meshwright.api import local_planner

    return local_planner


def _choose_for_devices(run: Run, devices: Sequence[Any]) -> Run:
    """Returns the run with the remat policy and pipeline schedule that are fastest on `devices`."""
    planner = _local_planner(devices)
    return run if planner is None else planner.choose(run)


@contextlib.contextmanager
def _memory_explained(
    run: Run, prepared: loop.Trainable | None = None, planner: "LocalPlanner | None" = None
) -> Iterator[None]:
    """Raises OutOfDeviceMemory with remedies.

    It replaces one without, and XLA's RESOURCE_EXHAUSTED.
    """
    try:
        yield
    except (OutOfDeviceMemory, jax.errors.JaxRuntimeError) as error:
        before_the_run = isinstance(error, OutOfDeviceMemory)
        if not before_the_run and "RESOURCE_EXHAUSTED" not in statuses_of(error):
            raise
        device_run = None if prepared is None else prepared.device_run
        raise _planning().out_of_memory(error, run, device_run, planner) from error
