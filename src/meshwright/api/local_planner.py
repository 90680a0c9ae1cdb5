"""Predictions and choices of the planner for devices at hand; training loads it where something is known of them."""

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.analysis.compile import OutOfMemory, compiler_error
from meshwright.config import MeshShape
from meshwright.errors import ConfigError, reason_of
from meshwright.formatting import format_bytes
from meshwright.planner.explain import memory_remedies
from meshwright.planner.forecast import ForecastGap, StepForecast, forecast_gaps, forecast_step, local_target
from meshwright.planner.search import machine_for, with_best_remat
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.run import Run
from meshwright.step.device_memory import OutOfDeviceMemory, Room
from meshwright.step.device_run import DeviceRun
from meshwright.trainer.loop import Summary


class LocalPlanner:
    """Planner of the local devices. calibration: what `meshwright bench` measured on such devices."""

    def __init__(self, devices: Sequence[Any], calibration: Mapping[str, Any] | None):
        self._devices, self._calibration = devices, calibration
        known = local_target(devices, calibration)
        self.target = None if known is None else known[0]
        """Hardware of the devices; None where nothing is known of them."""

    def choose(self, run: Run) -> Run:
        """Returns the run with the remat policy and the pipeline schedule that are fastest, where they are `auto`."""
        training = run.training
        is_open = "auto" in (training.remat, training.pipeline_schedule, training.stage_saves)
        known = local_target(self._devices, None) if is_open and self._devices[0].platform != "cpu" else None
        return run if known is None else with_best_remat(run, known[0])

    def forecast(self, placed: PlacedRun) -> StepForecast | None:
        """Predicts the step time; None where nothing is known of the devices."""
        return forecast_step(placed, self._devices, self._calibration)

    def write_gaps(self, forecast: StepForecast, summary: Summary) -> list[ForecastGap]:
        """Returns the step's parts, predicted and measured, and writes them to OUT/foresight.json."""
        steps = max(1, summary.steps_taken)
        data_wait, saving = summary.data_wait_seconds / steps, summary.save_seconds / steps
        step = max(0.0, summary.step_seconds - data_wait)
        gaps = forecast_gaps(forecast, step=step, data_wait=data_wait, saving=saving)
        record = {"source": forecast.source, "gaps": [dataclasses.asdict(gap) for gap in gaps]}
        file = summary.out / "foresight.json"
        try:
            file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:  # the training itself is done
            warnings.warn(f"{file} could not be written: {reason_of(error)}", stacklevel=1)
        return gaps


_GENERAL_REMEDY = "a smaller --batch, more --training.microbatches, or --training.remat full (see meshwright prove)"


def out_of_memory(
    error: Exception, run: Run, device_run: DeviceRun | None, planner: LocalPlanner | None
) -> OutOfDeviceMemory:
    """Returns the error of a step that does not fit, with the cheapest options that make it fit.

    device_run: None where the devices cannot even hold the state: the error then names hardware that does.
    """
    if device_run is None and isinstance(error, OutOfDeviceMemory):
        machine = machine_for(run)
        fix = f"{error.fix}; meshwright plan {run.name} --on {machine}, or prove, which need no devices"
        return OutOfDeviceMemory(error.asked, error.needed, error.available, fix)
    run = run if device_run is None else device_run.run
    shape, remedies = run.mesh or MeshShape(), []
    asked, needed, available = f"training {run.name} on mesh {shape}", None, None
    if isinstance(error, OutOfDeviceMemory):
        asked, needed, available = error.asked, error.needed, error.available
    elif isinstance(refused := compiler_error(error), OutOfMemory):
        needed, available = int(refused.required), Room(int(refused.available), "a device")
    if planner is not None and planner.target is not None:
        over = 0 if needed is None or available is None else needed - available.bytes
        with contextlib.suppress(ConfigError):
            remedies = memory_remedies(run, planner.target, shape, over)
    lines = [
        f"    {r.option}: saves {format_bytes(r.saved_bytes)} per device, {r.extra_seconds:+.3g} s per step"
        for r in remedies
    ]
    return OutOfDeviceMemory(asked, needed, available, "\n".join(["one of", *lines]) if lines else _GENERAL_REMEDY)
