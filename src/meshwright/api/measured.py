"""Plans with the rates of a run's traced steps: `meshwright plan --measured RUN`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.api.profiling import CALIBRATION
from meshwright.api.targets import find_target, with_vocab
from meshwright.bench.calibration_file import read_calibration
from meshwright.config import MeshShape
from meshwright.errors import ConfigError, shell_word
from meshwright.formatting import format_step
from meshwright.hardware.chips import find_chip
from meshwright.hardware.targets import Target, parse_target
from meshwright.planner.forecast import calibrate_target, measured_target
from meshwright.planner.search import Plan, price_run
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_run, run_to_dict
from meshwright.trust import foreign

_TRACE = "meshwright train --out {} --profile 10:13 traces steps"


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """A run whose steps were traced, and the machine as it was traced."""

    folder: Path
    run: Run
    step: Mapping[str, Any]
    """Rates of its traced steps and what they are of (`bench.step_profile.calibration_of_step`)."""
    before: Target | None
    """The machine without these rates; None where nothing else is known of it."""
    target: Target
    """The machine with the rates of the traced steps."""


def traced_machine(folder: Path) -> str:
    """Returns the machine of the traced steps in an output folder, as `--on` names it. Raises
    ConfigError without any."""
    file = folder / CALIBRATION
    return foreign(str(_traced_steps(folder)["step"]["target"]), str(file))


def _traced_steps(folder: Path) -> Mapping[str, Any]:
    """Reads the calibration of an output folder.
    Raises ConfigError where it has no traced steps."""
    file = folder / CALIBRATION
    calibration = read_calibration(file, _TRACE.format(shell_word(folder)))
    if "step" not in calibration:
        raise ConfigError(
            f"--measured {folder}", f"{file} has no traced steps", _TRACE.format(shell_word(folder))
        )
    return calibration


def read_measured(folder: Path, on: str | None) -> MeasuredRun:
    """Reads the run of an output folder with the rates of its traced steps.

    on: the machine that was asked for; None takes that of the trace. Raises ConfigError for a
    folder without a trace, a trace of another machine or of another mesh than the run's, and a rate
    above the data sheet.
    """
    asked = f"--measured {folder}"
    calibration = _traced_steps(folder)
    step = calibration["step"]
    run = read_run(folder / "run.json")
    if run.mesh is not None and str(run.mesh) != step["mesh"]:
        raise ConfigError(
            asked,
            f"the trace is of mesh {step['mesh']}, and the run of {folder} has {run.mesh}",
            _TRACE.format(shell_word(folder)),
        )
    for name in step["impossible"]:
        raise ConfigError(
            asked,
            f"the measured rate of {name} is above the data sheet: {step['refused'].get(name, '')}",
            "a trace of complete steps: a longer range of --profile; or correct the chip's figures",
        )
    traced = foreign(step["target"], str(folder / CALIBRATION))
    before, target = _machine(asked, traced, calibration, on)
    return MeasuredRun(folder, run, step, before, target)


def _machine(
    asked: str, traced: str, calibration: Mapping[str, Any], on: str | None
) -> tuple[Target | None, Target]:
    """Returns the machine of a trace without its rates, None where nothing else is known,
    and with them."""
    listed = find_chip(str(calibration["device"])) is not None
    if on is not None and on != traced and str(parse_target(on)) != traced:
        target = parse_target(on)
        if not listed or target.chip is not parse_target(traced).chip:
            difference = f"the trace is of {calibration['device']}, and {on} is {target.chip.name}"
        else:
            devices = calibration["step"]["devices"]
            difference = (
                f"the trace is of {traced}, {devices} devices, and {on} has {target.devices}: what "
                "their links carry was not measured"
            )
        raise ConfigError(f"{asked} --on {on}", difference, f"--on {traced}, or no --on")
    if listed:
        before = find_target(traced)
        return before, calibrate_target(before, calibration)
    return None, measured_target(calibration, calibration["step"]["devices"])


def require_model(measured: MeasuredRun, run: Run) -> None:
    """Raises ConfigError where a run to plan has another model
    than the trace, naming what differs."""
    traced = measured.step["model"]
    planned: Mapping[str, Any] = run_to_dict(run)["model"]
    # Where its text gives the vocabulary, a run that has not read it has none.
    names = [
        name for name in {**traced, **planned} if planned.get(name) is not None or name != "vocab"
    ]
    different = [
        f"{name} {traced.get(name)} in the trace and {planned.get(name)} here"
        for name in names
        if traced.get(name) != planned.get(name)
    ]
    if different:
        raise ConfigError(
            f"--measured {measured.folder} with {run.name}",
            f"the trace is of another model: {', '.join(different)}",
            "leave the recipe out, which takes the run of the trace",
        )


def what_changed(measured: MeasuredRun, best: Plan, best_before: Plan | None) -> list[str]:
    """Says what the rates of a trace change: the rates, the step of the traced run,
    and the best plan."""
    step = measured.step
    lines = []
    if measured.before is None:
        rates = ", ".join(f"{name} {value:.3g}" for name, value in step["rates"].items())
        lines.append(f"rates by the trace, of a device that has no data sheet here: {rates}")
    else:
        lines.append(f"rates: {measured.target.efficiency_source or 'none was taken'}")
    lines += [f"not taken: {name}: {reason}" for name, reason in step["refused"].items()]
    lines.append(_traced_step(measured))
    if best_before is None:
        lines.append(f"best plan: {best.name}, {format_step(best.estimate.seconds)}")
    elif best_before.name == best.name:
        lines.append(
            f"best plan: as before, {best.name}; {format_step(best.estimate.seconds)} for "
            f"{format_step(best_before.estimate.seconds)}"
        )
    else:
        lines.append(
            f"best plan: {best.name}, {format_step(best.estimate.seconds)}; before "
            f"{best_before.name}, {format_step(best_before.estimate.seconds)}"
        )
    return lines


def _traced_step(measured: MeasuredRun) -> str:
    """Says what the traced layout is planned at, before and with the measured rates,
    and what it took."""
    step = measured.step
    before = step["planned_seconds"]
    planned = "nothing was planned" if before is None else f"{format_step(before)} was planned"
    text = (
        f"step of the traced run: {format_step(step['seconds'])} measured, {planned} without the "
        f"rates, {format_step(traced_plan(measured).estimate.seconds)} with them"
    )
    unpriced = step["unpriced_seconds"]
    if not unpriced:
        return text
    return (
        f"{text}; {format_step(unpriced)} of it are idle or wait for other devices, which no rate "
        "is for"
    )


def traced_plan(measured: MeasuredRun) -> Plan:
    """Returns the traced run's own layout, priced with the rates of the trace."""
    shape = MeshShape.parse(measured.step["mesh"])
    run = dataclasses.replace(with_vocab(measured.run, shape), mesh=shape)
    return price_run(run, measured.target)
