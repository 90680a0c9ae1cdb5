"""Profile of some steps of a training: traced by JAX's profiler,
and set beside the simulated schedule.

The folder of a profile has files for xprof (TensorBoard) and for ui.perfetto.dev.
"""

import collections
import dataclasses
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.analysis.programs import parse_module
from meshwright.analysis.run_census import simulate_run
from meshwright.bench.device_trace import Trace, device_time, innermost, read_trace
from meshwright.bench.measured_kinds import explain_differences, kinds_of_trace
from meshwright.bench.observed_step import ObservedStep
from meshwright.bench.slow_devices import (
    Computation,
    computations,
    devices_have_equal_work,
    name_slow_devices,
)
from meshwright.errors import ConfigError
from meshwright.hardware.agreement import choose_together
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.targets import Target
from meshwright.planner.estimate import estimate
from meshwright.planner.forecast import measured_target
from meshwright.planner.step_kinds import (
    IDLE,
    KINDS,
    WAITING,
    MeasuredStep,
    fit_rates,
    planned_kinds,
)
from meshwright.runs.run_file import run_to_dict
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep
from meshwright.trainer.loop import Trainable
from meshwright.trainer.prepare import Batches, Position
from xlacensus.hlo.collectives import collective_in, group_label, group_of, kind_of, start_of
from xlacensus.hlo.parser import Module
from xlacensus.schedule import SimulatedSchedule

_HOST = (
    "Simulated devices share the cores of this machine: figures are thread seconds per device, a "
    "collective's include waiting for the other devices, and nothing overlaps as it would on "
    "accelerators."
)
_TPU = (
    "On a TPU a collective counts as its start and the wait for its end, and its simulated seconds "
    "are those exposed; communication is the time in which one is in flight."
)
_GPU = (
    "On a GPU a collective counts from the beginning to the end of its kernel, overlapped or not."
)


@dataclasses.dataclass(frozen=True)
class ProfileRow:
    """One line of a profile, in seconds of one device in one step."""

    kind: str
    """`step`, `kind`, `part`, `collective`, or `scope`."""
    name: str
    measured: float
    simulated: float | None
    planned: float | None = None
    """By the plan's arithmetic, of the step and its kinds."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measured steps beside the simulated schedule."""

    first: int
    last: int
    rows: tuple[ProfileRow, ...]
    note: str
    """Meaning of the figures on these devices."""
    differences: tuple[str, ...] = ()
    """The largest differences between the trace and the plan, and what they are of."""
    slow_devices: tuple[str, ...] = ()
    """Devices of all processes that compute longer than most."""
    calibration: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Rates that the traced steps ran at, and the run that they are of (`write_calibration`)."""


def parse_steps(text: str, steps: int) -> tuple[int, int]:
    """Parses `10:13`, the first and the last step of a run of `steps`.
    Raises ConfigError on anything else."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 < int(match[1]) <= int(match[2]) <= steps:
        raise ConfigError(
            f"--profile {text}",
            f"it is the first and the last step, of 2 to {steps}: the first of a run warms up",
            f"--profile {min(10, max(2, steps - 3))}:{min(13, steps)}, or --profile slow",
        )
    return int(match[1]), int(match[2])


class ProfiledRun:
    """A run as the training loop takes it (`Trainable`),
    whose steps `first` to `last` are traced into `folder`."""

    def __init__(self, prepared: Trainable, first: int, last: int, folder: Path):
        self._prepared, self._first, self._last, self._folder = prepared, first, last, folder
        self._step = 0
        self._has_begun = False
        """Whether the run has been given batches: from then on it only returns to a checkpoint."""
        self._began: float | None = None
        self._text, self._seconds = "", 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared, name)

    def feed(self, start: Position) -> Batches:
        """Returns the run's batches, and counts steps from there on.

        A run that returns to a checkpoint while its steps are traced begins the trace again, where
        its first step comes again.
        """
        self._step = start.step
        self.stop()
        if self._first <= start.step and not self._has_begun:
            raise ConfigError(
                f"--profile {self._first}:{self._last}",
                f"the run goes on after step {start.step}",
                f"--profile {start.step + 2}:{start.step + 4}",
            )
        self._has_begun = True
        return self._prepared.feed(start)

    def compile(self, batch: Any) -> Any:
        """Compiles the train step and returns it with the profiler around it."""
        return ObservedStep(self._prepared.compile(batch), self.take)

    def take(self, step: CompiledTrainStep, state: State, batch: Any) -> tuple[State, Any]:
        """Takes a step; the trace begins before the first of its steps and ends after the last."""
        self._step += 1
        if self._step == self._first and not self._seconds:
            self._text = step.program_text()
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._began = time.perf_counter()
        result = step(state, batch)
        if self._step == self._last and self._began is not None:
            jax.block_until_ready(result)
            self._seconds = time.perf_counter() - self._began
            self.stop()
        return result

    def stop(self) -> None:
        """Ends the trace, also where the run ended before its last step."""
        if self._began is not None:
            self._began = None
            jax.profiler.stop_trace()

    def profile(self, target: Target | None) -> Profile | None:
        """Returns the profile; None where the run ended before the last of its steps.

        target: hardware of the devices, where it is known.
        """
        if not self._seconds:
            return None
        module, device_run, schedule, note = (
            parse_module(self._text),
            self._prepared.device_run,
            None,
            "",
        )
        if target is None:
            note = (
                "Nothing is known of this device, so nothing is simulated (meshwright bench "
                "measures it)."
            )
        elif device_run.layout.shape.stage > 1:
            note = (
                "Stages take different branches of one program, whose times are not simulated by "
                "instruction."
            )
        else:
            schedule = simulate_run(module, device_run, target)
        count = self._last - self._first + 1
        mesh = dict(device_run.mesh.shape)
        trace = read_trace(self._folder, module)
        local_devices = len(device_run.mesh.local_devices)
        rows, meaning = compare(
            trace,
            module,
            schedule,
            mesh,
            local_devices=local_devices,
            steps=count,
            seconds=self._seconds,
        )
        found = kinds_of_trace(
            trace,
            module,
            device_run.layout.spec.layers,
            _collective_labels(module, mesh),
            devices=device_run.mesh.size,
            local_devices=local_devices,
            steps=count,
            seconds=self._seconds,
        )
        planned = None
        if target is not None:
            e = estimate(device_run, target)
            planned = planned_kinds(e, fused_attention=found.step.fused_attention)
            rows[0] = dataclasses.replace(rows[0], planned=e.seconds)
        rows[1:1] = _kind_rows(found.step, planned)
        return Profile(
            self._first,
            self._last,
            tuple(rows),
            " ".join(part for part in (meaning, note, *map(_sentence, found.notes)) if part),
            () if planned is None else tuple(explain_differences(found, planned)),
            tuple(self._slow_devices(trace, count)),
            calibration_of_step(device_run, target, found.step, planned),
        )

    def _slow_devices(self, trace: Trace, steps: int) -> list[str]:
        """Names the devices of all processes that compute longer than most.
        All processes call it together."""
        if not devices_have_equal_work(self._prepared.device_run):
            return []
        mine = computations(
            trace, steps=steps, process=jax.process_index(), host=socket.gethostname()
        )
        records = [dataclasses.asdict(device) for device in mine]

        def name(answers: list[list[dict[str, Any]]]) -> list[str]:
            return name_slow_devices([Computation(**record) for one in answers for record in one])

        return list(choose_together("seconds of computation", records, name))


def _sentence(note: str) -> str:
    """Returns a note as a sentence."""
    return f"{note[0].upper()}{note[1:]}."


def _kind_rows(step: MeasuredStep, planned: Mapping[str, float] | None) -> list[ProfileRow]:
    """Returns the kinds of a step, measured and planned, without those that it has nothing of."""
    rows = []
    for kind in KINDS:
        seconds = None if planned is None else planned[kind]
        if step.seconds[kind] or seconds:
            rows.append(ProfileRow("kind", kind, step.seconds[kind], None, seconds))
    return rows


def calibration_of_step(
    device_run: DeviceRun,
    target: Target | None,
    step: MeasuredStep,
    planned: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Returns the rates of a traced step and what they are of, as a calibration has them.

    target: hardware of the devices with the fractions of its plans;
    None where nothing is known of them.
    """
    devices = device_run.mesh.size
    has_data_sheet = target is not None and target.name in CHIPS
    device = device_run.mesh.devices.flat[0]
    base = target or measured_target({"device": device.device_kind, "date": ""}, devices)
    rates = fit_rates(device_run, base, step, has_data_sheet=has_data_sheet)
    return {
        "rates": {rate.name: rate.value for rate in rates if not rate.refused},
        "refused": {rate.name: rate.refused for rate in rates if rate.refused},
        "impossible": [rate.name for rate in rates if rate.impossible],
        "target": str(base),
        "devices": devices,
        "mesh": str(device_run.layout.shape),
        "model": run_to_dict(device_run.run)["model"],
        "seconds": step.step,
        "unpriced_seconds": step.of((WAITING, IDLE)),
        "planned_seconds": None if planned is None else sum(planned.values()),
    }


def compare(
    trace: Trace,
    module: Module,
    schedule: SimulatedSchedule | None,
    mesh: Mapping[str, int],
    *,
    local_devices: int,
    steps: int,
    seconds: float,
) -> tuple[list[ProfileRow], str]:
    """Returns the lines of a profile, and what its figures mean on these devices.

    mesh: degree of each axis.
    local_devices: of this process, whose threads a trace of simulated devices has.
    steps: steps in the trace.
    seconds: wall time of all of them.
    """
    tpu = any("TPU" in name for name in trace.devices)
    lanes = [lane for device in trace.devices.values() for lane in device] or trace.host
    devices = len(trace.devices) or local_devices
    share, measured = 1.0 / (devices * steps), collections.defaultdict[str, float](float)
    for event in (event for lane in lanes for event in innermost(lane)):
        measured[event.instruction or event.name] += event.seconds
    simulated = None if schedule is None else _simulated_by_name(schedule, exposed=tpu)
    rows = [
        ProfileRow(
            "step",
            "whole step",
            seconds / steps,
            None if schedule is None else schedule.step_seconds,
        )
    ]
    rows += _parts(trace, schedule, steps)
    scopes = {
        instruction.name: "/".join(instruction.scopes[-2:]) or "no scope" for instruction in module
    }
    for kind, label in (("collective", _collective_labels(module, dict(mesh))), ("scope", scopes)):
        rows += _grouped(
            kind, label, {name: value * share for name, value in measured.items()}, simulated
        )
    return rows, _TPU if tpu else _GPU if trace.devices else _HOST


def _parts(trace: Trace, schedule: SimulatedSchedule | None, steps: int) -> list[ProfileRow]:
    """Returns compute, exposed communication and idle time of the mean device;
    nothing of simulated devices."""
    times = [
        device_time(name, lanes, trace.flights.get(name, ()))
        for name, lanes in trace.devices.items()
    ]
    if not times:
        return []
    mean = {
        part: sum(getattr(time, part) for time in times) / (len(times) * steps)
        for part in ("compute", "communication", "exposed", "idle")
    }
    foreseen: dict[str, float] = {}
    if schedule is not None:
        exposed = sum(schedule.exposed.values())
        foreseen = {
            "exposed": exposed,
            "communication": sum(schedule.link_seconds.values()),
            "compute": schedule.step_seconds - exposed - schedule.bubble,
            "idle": schedule.bubble,
        }
    return [ProfileRow("part", part, value, foreseen.get(part)) for part, value in mean.items()]


def _grouped(
    kind: str,
    labels: Mapping[str, str],
    measured: Mapping[str, float],
    simulated: Mapping[str, float] | None,
) -> list[ProfileRow]:
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for column, times in enumerate((measured, simulated or {})):
        for name, value in times.items():
            if name in labels:
                sums[labels[name]][column] += value
    rows = [ProfileRow(kind, name, *times) for name, times in sums.items()]
    if simulated is None:
        rows = [dataclasses.replace(row, simulated=None) for row in rows]
    return sorted(rows, key=lambda row: -max(row.measured, row.simulated or 0.0))


def _simulated_by_name(schedule: SimulatedSchedule, *, exposed: bool) -> dict[str, float]:
    """Returns the seconds of each instruction in a step.
    exposed: of collectives, those in which nothing else ran."""
    sums: dict[str, float] = collections.defaultdict(float)
    for span in schedule.spans:
        if span.kind != "loop":
            seconds = span.exposed if exposed and span.kind == "collective" else span.seconds
            sums[span.instruction] += seconds * span.count
    return sums


def _collective_labels(module: Module, mesh: dict[str, int]) -> dict[str, str]:
    """Returns kind and axes of every collective by the name of its instruction,
    and of what waits for it."""
    labels: dict[str, str] = {}
    for instruction in module:
        started = instruction
        if instruction.opcode.endswith(("-done", "-update")):
            started = start_of(instruction) or instruction
        inner = collective_in(started)
        if inner is not None:
            label = group_label(*group_of(inner, mesh))
            labels[instruction.name] = f"{kind_of(inner) or 'all-reduce'} over {label}"
    return labels
