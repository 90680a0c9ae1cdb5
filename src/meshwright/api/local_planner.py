"""Predictions and choices of the planner for the devices at hand.

Training loads it if something is known about them.
"""

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax

from meshwright.activity import activity
from meshwright.analysis.programs import OutOfMemory, compiler_error
from meshwright.analysis.run_census import profile_for
from meshwright.config import MeshShape
from meshwright.errors import ConfigError, reason_of
from meshwright.formatting import format_bytes
from meshwright.hardware.mesh import build_mesh
from meshwright.hardware.targets import Target
from meshwright.planner.explain import memory_remedies
from meshwright.planner.forecast import (
    ForecastGap,
    StepForecast,
    forecast_gaps,
    forecast_step,
    local_target,
)
from meshwright.planner.search import machine_for, price_run, with_choices_that_fit
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.run import Run
from meshwright.step.device_memory import OutOfDeviceMemory, Room
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.train_step import CompiledTrainStep
from meshwright.storage.writing import write_text
from meshwright.trainer.loop import Summary, Trainable

_NEAR = 0.9
"""Planned fraction of the memory, with its fragmentation, from which the compiler decides whether a
choice fits."""


class LocalPlanner:
    """Planner of the local devices.

    calibration: what `meshwright bench` measured on such devices.
    """

    def __init__(self, devices: Sequence[Any], calibration: Mapping[str, Any] | None):
        self._devices, self._calibration = devices, calibration
        known = local_target(devices, calibration)
        self.target = None if known is None else known[0]
        """Hardware of the devices; None where nothing is known of them."""

    def choose(self, run: Run) -> Run:
        """Returns the run with its open choices made as in the best plan on its mesh that fits.

        A plan within 10 % of the memory that JAX has of a device is compiled before it is taken.
        """
        known = None if self._devices[0].platform == "cpu" else local_target(self._devices, None)
        if known is None:
            return run
        limit = (
            (self._devices[0].memory_stats() or {}).get("bytes_limit", math.inf) // 2**30 * 2**30
        )
        chip = known[0].chip
        target = dataclasses.replace(
            known[0], chip=dataclasses.replace(chip, hbm_bytes=min(chip.hbm_bytes, float(limit)))
        )
        return with_choices_that_fit(
            run,
            target,
            lambda run: self._needed(run, target),
            lambda why: warnings.warn(why, stacklevel=1),
        )

    def _needed(self, run: Run, target: Target) -> float:
        """Returns the bytes that the compiler takes for a plan near the limit.

        0 for other plans, and if it fits.
        """
        plan, available = price_run(run, target), target.chip.hbm_bytes
        if plan.estimate.bytes * target.chip.fragmentation < _NEAR * available:
            return 0.0
        why = (
            f"compiling {plan.name}, planned at {plan.estimate.bytes / available:.0%} of the "
            f"memory, to see if it fits"
        )
        placed = place_on_devices(plan.run, build_mesh(plan.mesh, list(self._devices)))
        device_run = dataclasses.replace(placed, profile_of=profile_for(target))
        try:
            with activity("compile", why, "compiled the step"):
                CompiledTrainStep(device_run, device_run.abstract_batch)
        except (OutOfDeviceMemory, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, OutOfDeviceMemory):
                refused = compiler_error(error)
                return (
                    refused.required / refused.available * available
                    if isinstance(refused, OutOfMemory)
                    else 0.0
                )
            if error.needed and error.available:
                return error.needed / error.available.bytes * available
        return 0.0

    def scheduled[T: Trainable](self, prepared: T) -> T:
        """Returns a run whose steps XLA schedules by predicted times, if it is faster with them."""
        if self.target is None or not prepared.device_run.scheduled_by_price:
            return prepared
        device_run = dataclasses.replace(prepared.device_run, profile_of=profile_for(self.target))
        return dataclasses.replace(cast(Any, prepared), device_run=device_run)

    def forecast(self, placed: PlacedRun) -> StepForecast | None:
        """Predicts the step time; None where nothing is known of the devices."""
        return forecast_step(placed, self._devices, self._calibration)

    def write_gaps(self, forecast: StepForecast, summary: Summary) -> list[ForecastGap]:
        """Returns the step's parts, predicted and measured; writes them to OUT/foresight.json."""
        steps = max(1, summary.steps_taken)
        data_wait, saving = summary.data_wait_seconds / steps, summary.save_seconds / steps
        step = summary.step_seconds - data_wait
        gaps = forecast_gaps(forecast, step=step, data_wait=data_wait, saving=saving)
        record = {"source": forecast.source, "gaps": [dataclasses.asdict(gap) for gap in gaps]}
        file = summary.out / "foresight.json"
        try:
            write_text(file, json.dumps(record, indent=1) + "\n")
        except OSError as error:  # the training itself is done
            warnings.warn(f"{file} could not be written: {reason_of(error)}", stacklevel=1)
        return gaps


_GENERAL_REMEDY = (
    "a smaller --batch, more --training.microbatches, or --training.remat full (see "
    "meshwright prove)"
)


def out_of_memory(
    error: Exception, run: Run, device_run: DeviceRun | None, planner: LocalPlanner | None
) -> OutOfDeviceMemory:
    """Returns the error of a step that does not fit, with the cheapest options that make it fit.

    device_run: None where the devices cannot even hold the state: the error then names hardware
    that does.
    """
    if device_run is None and isinstance(error, OutOfDeviceMemory):
        machine = machine_for(run)
        fix = (
            f"{error.fix}; meshwright plan {run.name} --on {machine}, or prove, which need no "
            f"devices"
        )
        return OutOfDeviceMemory(error.asked, error.needed, error.available, fix)
    run = run if device_run is None else device_run.run
    shape = run.mesh or MeshShape()
    remedies = []
    asked = f"training {run.name} on mesh {shape}"
    needed = available = None
    refused = compiler_error(error)
    if isinstance(error, OutOfDeviceMemory):
        asked = error.asked
        needed = error.needed
        available = error.available
    elif isinstance(refused, OutOfMemory):
        needed = int(refused.required)
        available = Room(int(refused.available), "a device")
    if planner is not None and planner.target is not None:
        over = 0 if needed is None or available is None else needed - available.bytes
        with contextlib.suppress(ConfigError):
            remedies = memory_remedies(run, planner.target, shape, over)
    lines = [
        f"    {r.option}: saves {format_bytes(r.saved_bytes)} per device, {r.extra_seconds:+.3g} "
        f"s per step"
        for r in remedies
    ]
    fix = "\n".join(["one of", *lines]) if lines else _GENERAL_REMEDY
    return OutOfDeviceMemory(asked, needed, available, fix)
