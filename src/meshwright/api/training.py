"""Training from Python."""

import contextlib
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

from meshwright.activity import watched_by
from meshwright.api.viewing import view
from meshwright.bench.calibration_file import calibration_path, read_calibration
from meshwright.errors import ConfigError
from meshwright.formatting import format_bytes
from meshwright.hardware.mesh import default_cache_folder
from meshwright.hardware.targets import Target
from meshwright.planner.forecast import ForecastGap, StepForecast, forecast_gaps, forecast_step, local_target
from meshwright.plugins import keep_own_names
from meshwright.report import Reporter
from meshwright.report.console import ConsoleReport, Period, TokenizeReport, open_console
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_to_dict
from meshwright.step.device_memory import OutOfDeviceMemory, Room
from meshwright.storage.paths import path_of
from meshwright.trainer import loop
from meshwright.trainer.watchdog import Watchdog


def train(
    run: Run,
    out: str | Path | None = None,
    *,
    start: Literal["fresh", "resume"] | int = "fresh",
    data: Literal["same", "new"] = "same",
    devices: int | None = None,
    progress: str = "30s,10",
    profile: str | None = None,
    cache: Path | None = None,
) -> loop.Summary:
    """Trains `run` and returns a summary.

    out: output folder for checkpoints, metrics, the Run and a text sample; None makes a new one under `runs`.
    start: `resume` continues from the last checkpoint in `out`, a number from that of this step.
    data: `new` resumes although the text, its order or its mixture differ from those of the checkpoint.
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
    keep_own_names(run_to_dict(run))  # before a checkpoint names them too
    quiet = progress == "none"
    with contextlib.closing(ConsoleReport(open_console(), Period.parse("30s,10" if quiet else progress))) as shown:
        trained = train_reported(
            run,
            output_folder(run, out),
            start=start,
            data=data,
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
    gaps: list[ForecastGap] = dataclasses.field(default_factory=list)
    """Parts of a step, predicted and measured; none where nothing is known of the devices."""


def output_folder(run: Run, out: str | Path | None) -> Path:
    """Returns the output folder of a run: `out`, or a new one under `runs`."""
    return path_of(out) if out is not None else Path("runs") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def train_reported(
    run: Run,
    out: Path,
    *,
    start: Literal["fresh", "resume"] | int = "fresh",
    data: Literal["same", "new"] = "same",
    devices: int | None = None,
    progress: ConsoleReport | None = None,
    console: Console | None = None,
    profile: str | None = None,
    cache: Path | None = None,
    watchdog: Watchdog | None = None,
    on_prepared: Callable[[loop.Trainable, StepForecast | None], None] = lambda prepared, forecast: None,
) -> Trained:
    """Trains `run` as `train` does, on hosts that have joined, and keeps its forecast in OUT/foresight.json.

    progress: display of the steps; None shows none.  console: where a profile is printed; None prints none.
    on_prepared: called with the run on its devices, and the predicted step where the devices are known.
    """
    several = jax.distributed.is_initialized() and jax.process_count() > 1
    cache = cache or default_cache_folder()

    def reporters(first: int) -> list[Reporter]:
        if progress is None or jax.process_index():
            return []
        return [progress.begin(first, run.training.steps, run.optimizer.warmup_steps)]

    joined: AbstractContextManager[None] = contextlib.nullcontext()
    with contextlib.nullcontext() if progress is None else watched_by(progress):
        if several:
            from meshwright.trainer.same_hosts import agree_on, watched_before  # not for a process that is alone

            agree_on(run)
            joined = watched_before(out, watchdog or Watchdog())
        with joined:
            prepared = _prepare(run, cache, devices, None if start == "fresh" else out, shown=progress is not None)
        forecast = _forecast(prepared)
        on_prepared(prepared, forecast)
        with _memory_explained(prepared), _profiled(prepared, profile, out, console) as profiled:
            summary = loop.train(
                profiled,
                out,
                start="fresh" if start == "fresh" else "resume",
                at=start if isinstance(start, int) else None,
                data=data,
                reporters=reporters,
                page=lambda: view(out).write(),
                watchdog=watchdog,
            )
        unit = run.model.unit
        if forecast is None or not summary.tokens or jax.process_index():
            return Trained(summary, unit)
        return Trained(summary, unit, _gaps(forecast, summary))


def _calibration() -> Mapping[str, Any] | None:
    """Returns what `meshwright bench` measured on such devices as are here; None where it did not."""
    file = calibration_path(default_cache_folder())
    return read_calibration(file) if file.is_file() else None


def _forecast(prepared: loop.Trainable) -> StepForecast | None:
    """Returns the predicted step; None where nothing is known of the devices."""
    device_run = prepared.device_run
    return forecast_step(device_run.placed, list(device_run.mesh.devices.flat), _calibration())


def _target(prepared: loop.Trainable) -> Target | None:
    """Returns the hardware of the run's devices; None where nothing is known of it."""
    known = local_target(list(prepared.device_run.mesh.devices.flat), _calibration())
    return None if known is None else known[0]


def _gaps(forecast: StepForecast, summary: loop.Summary) -> list[ForecastGap]:
    """Returns the step's parts, predicted and measured, and writes them to `foresight.json`."""
    steps = max(1, summary.steps_taken)
    data_wait, saving = summary.data_wait_seconds / steps, summary.save_seconds / steps
    step = max(0.0, summary.step_seconds - data_wait)
    gaps = forecast_gaps(forecast, step=step, data_wait=data_wait, saving=saving)
    record = {"source": forecast.source, "gaps": [dataclasses.asdict(gap) for gap in gaps]}
    file = summary.out / "foresight.json"
    try:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:  # the training itself is done
        warnings.warn(f"{file} could not be written: {error.strerror}", stacklevel=1)
    return gaps


def _profiled(
    prepared: loop.Trainable, steps: str | None, out: Path, console: Console | None
) -> AbstractContextManager[loop.Trainable]:
    if steps is None:
        return contextlib.nullcontext(prepared)
    from meshwright.api.profiling import profiled  # most trainings have no profile

    return profiled(prepared, steps, out, console, _target(prepared))


def _prepare(run: Run, cache: Path, devices: int | None, resumed: Path | None, *, shown: bool) -> loop.Trainable:
    """Puts the run on its devices. resumed: output folder of a run that goes on with its own tokenizer."""
    display = TokenizeReport(open_console(sys.stderr)) if shown else None
    own = None if resumed is None else resumed / "tokenizer.json"
    return loop.prepare_run(run, cache=cache, devices=devices, choose=_choose_for_devices, own=own, progress=display)


def _choose_for_devices(run: Run, devices: Sequence[Any]) -> Run:
    """Returns the run with the remat policy, and the pipeline schedule, that is fastest on `devices`, where it leaves
    them open.

    Unchanged on simulated devices and on chips of which nothing is known. run: with its mesh and vocabulary.
    """
    training = run.training
    open_choices = "auto" in (training.remat, training.pipeline_schedule, training.stage_saves)
    known = local_target(devices, None) if open_choices and devices[0].platform != "cpu" else None
    if known is None:
        return run
    from meshwright.planner.search import with_best_remat  # loads the search, which given choices need not

    return with_best_remat(run, known[0])


_GENERAL_REMEDY = "a smaller --batch, more --training.microbatches, or --training.remat full (see meshwright prove)"


@contextlib.contextmanager
def _memory_explained(prepared: loop.Trainable) -> Iterator[None]:
    """Raises OutOfDeviceMemory with remedies in place of one without, and of XLA's RESOURCE_EXHAUSTED."""
    try:
        yield
    except OutOfDeviceMemory as error:
        over = 0 if error.needed is None or error.available is None else error.needed - error.available.bytes
        raise OutOfDeviceMemory(error.asked, error.needed, error.available, _remedies(prepared, over)) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        from meshwright.analysis.compile import OutOfMemory, compiler_error  # for a step that does not fit

        run, shape = prepared.device_run.run, prepared.device_run.shape
        refused, needed, available, over = compiler_error(error), None, None, 0
        if isinstance(refused, OutOfMemory):  # the compiler's own sizes
            needed, available = int(refused.required), Room(int(refused.available), "a device")
            over = needed - available.bytes
        asked = f"training {run.name} on mesh {shape}"
        raise OutOfDeviceMemory(asked, needed, available, _remedies(prepared, over)) from error


def _remedies(prepared: loop.Trainable, over: int) -> str:
    """Returns the cheapest options that save `over` bytes per device, with their cost where the chip is known."""
    from meshwright.planner.explain import memory_remedies  # for a step that does not fit

    placed, target = getattr(prepared.device_run, "placed", None), _target(prepared)
    if placed is None or target is None:
        return _GENERAL_REMEDY
    with contextlib.suppress(ConfigError):
        if remedies := memory_remedies(placed.run, target, placed.shape, over):
            return "one of\n" + "\n".join(
                f"    {r.option}: saves {format_bytes(r.saved_bytes)} per device, {r.extra_seconds:+.3g} s per step"
                for r in remedies
            )
    return _GENERAL_REMEDY
