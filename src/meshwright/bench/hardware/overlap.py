"""Section `overlap`: exposed communication of real steps, from a profile, beside that of the simulated schedule."""

import dataclasses
import functools
import shutil
import statistics
from collections.abc import Mapping
from typing import Any

import jax

from meshwright.bench.device_trace import Trace, device_time, innermost, read_trace
from meshwright.bench.hardware.section import Measurement, Section, file_name
from meshwright.bench.hardware.sizing import SizedRun, run_names, sized_run
from meshwright.bench.hardware.steps import compile_step, describe_run, simulated_schedule
from meshwright.bench.loop_cost import StepRunner
from meshwright.config import MeshShape
from meshwright.hardware.mesh import build_mesh
from meshwright.hlo.parser import parse_module
from meshwright.planner.search import price_run
from meshwright.step.device_run import place_on_devices

_STEPS = 4
"""Steps in a profile."""


def measure_overlap(section: Section) -> None:
    """Profiles steps of the first run under FSDP over all devices, and of the dense run on its planned mesh."""
    first = run_names()[0]
    items: dict[str, Measurement] = {f"{first}, FSDP": functools.partial(_profile, section, first, True)}
    if jax.default_backend() != "cpu":
        items["dense, planned mesh"] = functools.partial(_profile, section, "dense", False)
    section.measure(items)


def _profile(section: Section, name: str, under_fsdp: bool) -> Mapping[str, Any]:
    """Returns the measured and the simulated parts of a step."""
    sized = sized_run(name, section.folder, section.seconds / 4)
    sized = _under_fsdp(sized) if under_fsdp else sized
    assert sized.run.mesh is not None
    device_run = place_on_devices(sized.run, build_mesh(sized.run.mesh))
    runner = StepRunner(device_run, steps=1)
    compiled = compile_step(device_run, runner)
    runner.start(compiled, device_run.initial_state())
    runner.bare(2)
    folder = section.folder / "profiles" / file_name(name + ("-fsdp" if under_fsdp else ""))
    shutil.rmtree(folder, ignore_errors=True)
    with jax.profiler.trace(str(folder)):
        seconds = runner.bare(_STEPS)
    module = parse_module(compiled.as_text())
    schedule = simulated_schedule(compiled, device_run, sized)
    simulated = {}
    if schedule is not None:
        simulated = {
            "simulated_seconds": schedule.step_seconds,
            "simulated_exposed": sum(schedule.exposed.values()),
            "simulated_links": sum(schedule.link_seconds.values()),
            "simulated_exposed_by_axes": dict(schedule.exposed),
        }
    return {
        **describe_run(sized, device_run),
        "profile": str(folder),
        "profiled_seconds": seconds,
        **measured_parts(read_trace(folder, module), _STEPS),
        **simulated,
    }


def _under_fsdp(sized: SizedRun) -> SizedRun:
    """Returns the run on a mesh of FSDP alone."""
    run = dataclasses.replace(sized.run, mesh=MeshShape(fsdp=jax.device_count()))
    plan = None if sized.target is None else price_run(run, sized.target)
    return dataclasses.replace(sized, run=run, plan=plan)


def measured_parts(trace: Trace, steps: int) -> dict[str, Any]:
    """Returns the seconds per step that devices computed, communicated and waited: medians over devices."""
    if not trace.devices:
        events = [event for lane in trace.host for event in innermost(lane)]
        total = sum(e.seconds for e in events)
        share = sum(e.seconds for e in events if e.communicates) / total if total else None
        return {"measured_note": "no device lanes in this trace", "host_share_in_collectives": share}
    times = [device_time(name, lanes, trace.flights.get(name, ())) for name, lanes in trace.devices.items()]
    parts = {
        field: statistics.median(getattr(t, field) for t in times) / steps
        for field in ("window", "compute", "communication", "exposed", "idle")
    }
    return {f"measured_{name}": seconds for name, seconds in parts.items()}
