"""Section `steps`: train steps of sized runs, measured beside the planner's prediction and the simulated schedule."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax

from meshwright.analysis.run_census import skipped_by_kernels, target_devices
from meshwright.analysis.simulate import SimulatedSchedule, simulate_schedule
from meshwright.bench.hardware.machine import memory_stats
from meshwright.bench.hardware.section import Measurement, Section, describe
from meshwright.bench.hardware.sizing import SizedRun, run_names, sized_run
from meshwright.bench.loop_cost import LoopCost, StepRunner, measure_loop
from meshwright.errors import ConfigError
from meshwright.hardware.chips import find_chip
from meshwright.hardware.mesh import build_mesh
from meshwright.hlo.parser import parse_module
from meshwright.models.flops import mfu, training_flops_per_token
from meshwright.sharding.params import count_params
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.train_step import build_train_step

HOST_LIMIT = 1e-3
"""Seconds of the host's work per step above which it is noted on accelerators."""
_ROUNDS = 3
_MAX_STEPS = 40
_MEASURED_FRACTION = 0.3
"""Fraction of a run's time that steps are taken for; compiling takes the rest."""


def measure_steps(section: Section) -> None:
    """Compiles and runs train steps: a small and a large dense model, experts, a long sequence."""
    names = run_names()
    items: dict[str, Measurement] = {
        name: functools.partial(_measure_or_cut, section, name, section.seconds / len(names)) for name in names
    }
    section.measure(items)
    for row in section.rows:
        slow = max(row.get("dispatch_seconds", 0.0), row.get("overhead_seconds", 0.0), row.get("host_seconds", 0.0))
        if slow > HOST_LIMIT and jax.default_backend() != "cpu":
            section.notes.append(f"{row['item']}: the host takes {slow * 1e3:.1f} ms of a step; the aim is under 1 ms")


def _measure_or_cut(section: Section, name: str, seconds: float) -> Mapping[str, Any]:
    """Measures a run; where it needs more memory than planned, records that and measures half of its layers."""
    allowed = seconds * _MEASURED_FRACTION
    try:
        sized = sized_run(name, section.folder, allowed)
    except ConfigError as error:
        return {"unsupported": f"{error.asked}: {error.truth}"}
    try:
        return measure_run(sized, seconds)
    except Exception as error:
        layers = int(getattr(sized.run.model, "layers", 1)) // 2
        if not layers or not any(sign in str(error) for sign in ("RESOURCE_EXHAUSTED", "exceeds available HBM")):
            raise
        section.notes.append(f"{name}: the planned run does not fit: {describe(error)[:200]}")
    return measure_run(sized_run(name, section.folder, allowed, layers), seconds)


def measure_run(sized: SizedRun, seconds: float) -> Mapping[str, Any]:
    """Returns times, rates and memory of a sized run, with what was predicted of them."""
    clock = _Clock()
    assert sized.run.mesh is not None
    device_run = place_on_devices(sized.run, build_mesh(sized.run.mesh))
    runner = StepRunner(device_run, steps=(_ROUNDS + 1) * _MAX_STEPS)
    clock.lap("place_seconds")
    compiled = compile_step(device_run, runner)
    clock.lap("compile_seconds")
    state = jax.block_until_ready(device_run.initial_state())
    clock.lap("init_seconds")
    runner.start(compiled, state)
    del state
    clock.lap("first_step_seconds")
    probe = max(runner.bare(2), 1e-5)
    steps = int(seconds * _MEASURED_FRACTION / probe / (3 * _ROUNDS))
    cost = measure_loop(runner, steps=min(_MAX_STEPS, max(1, steps)), rounds=_ROUNDS, reporters=[])
    return {
        **describe_run(sized, device_run),
        **clock.laps,
        **_rates(device_run, cost),
        **predictions(sized),
        **_memory(compiled, device_run),
        **_simulated(compiled, device_run, sized),
    }


class _Clock:
    """Seconds since the lap before, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def compile_step(device_run: DeviceRun, runner: StepRunner) -> Any:
    """Compiles the train step as `train` does; returns `jax.stages.Compiled`, whose text can be read."""
    lowered = build_train_step(device_run).lower(device_run.abstract, runner.batch)
    return lowered.compile(compiler_options=device_run.compiler_options() or None)


def describe_run(sized: SizedRun, device_run: DeviceRun) -> dict[str, Any]:
    """Returns what was run: model, mesh, batch, options of the compiler."""
    training = device_run.run.training
    return {
        "run": sized.run.name,
        "note": sized.note,
        "mesh": str(device_run.shape),
        "batch": training.batch,
        "seq": training.seq,
        "microbatches": training.microbatches,
        "remat": training.remat,
        "compute_dtype": training.compute_dtype,
        "attention_kernel": device_run.settled.kernels.name,
        "parameters": count_params(device_run.placed.params),
        "compiler_options": device_run.compiler_options(),
    }


def _rates(device_run: DeviceRun, cost: LoopCost) -> dict[str, Any]:
    training = device_run.run.training
    tokens = training.batch * training.seq / cost.loop_seconds
    rates: dict[str, Any] = {**dataclasses.asdict(cost), "tokens_per_second": tokens, "mfu": None}
    peak = _peak(device_run)
    if peak is not None:
        rates["mfu"] = mfu(training_flops_per_token(device_run.run.model, training.seq), tokens, peak)
    return rates


def _peak(device_run: DeviceRun) -> float | None:
    chip = find_chip(device_run.mesh.devices.flat[0].device_kind)
    return None if chip is None else chip.flops_bf16 * device_run.mesh.size


def predictions(sized: SizedRun) -> dict[str, Any]:
    """Returns the planner's step time and memory."""
    if sized.plan is None:
        return {"predicted_seconds": None, "predicted_bytes": None}
    e = sized.plan.estimate
    return {"predicted_seconds": e.seconds, "predicted_bytes": e.bytes, "predicted_exposed": e.parts["exposed"]}


def _memory(compiled: Any, device_run: DeviceRun) -> dict[str, Any]:
    """Returns the live bytes of a device by the compiler, and the peak that the runtime saw since its start."""
    stats = compiled.memory_analysis()
    live = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    seen = memory_stats(device_run.mesh.devices.flat[0]).get("peak_bytes_in_use")
    return {"compiled_bytes": live + stats.temp_size_in_bytes, "peak_bytes": seen}


def simulated_schedule(compiled: Any, device_run: DeviceRun, sized: SizedRun) -> SimulatedSchedule | None:
    """Simulates the compiled program; None where nothing is known of the chip, or stages run different branches."""
    if sized.target is None or device_run.shape.stage > 1:
        return None
    return simulate_schedule(
        parse_module(compiled.as_text()),
        target_devices(device_run, sized.target),
        dict(device_run.mesh.shape),
        skipped=skipped_by_kernels(device_run.placed),
    )


def _simulated(compiled: Any, device_run: DeviceRun, sized: SizedRun) -> dict[str, Any]:
    """Returns the simulated schedule's step and exposed communication, or why there is none."""
    try:
        schedule = simulated_schedule(compiled, device_run, sized)
    except Exception as error:  # a program that the reader does not know must not lose the measured figures
        return {"simulated_seconds": None, "simulated_note": describe(error)}
    if schedule is None:
        return {"simulated_seconds": None}
    return {"simulated_seconds": schedule.step_seconds, "simulated_exposed": sum(schedule.exposed.values())}
