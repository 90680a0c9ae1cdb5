"""Verbs for wrapped models."""

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from meshwright.analysis.census import Census
from meshwright.cli.output import write_json
from meshwright.config import MeshShape
from meshwright.formatting import format_bytes
from meshwright.hardware.mesh import build_mesh
from meshwright.hardware.targets import Target
from meshwright.planner.estimate import Estimate
from meshwright.planner.plan_file import prediction_json, write_plan
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.run import Run
from meshwright.views.plain_table import plain_table
from meshwright.wrapped.census import census_of_wrapped
from meshwright.wrapped.placing import put_on_devices
from meshwright.wrapped.plan import plan_wrapped, price_wrapped

_ROWS = 20
"""Most rows of a table."""


def compile_wrapped(
    run: Run, devices: list[Any], target: Target | None
) -> tuple[PlacedRun, Census, Estimate | None]:  # fmt: skip
    """Compiles the train step of a wrapped model; returns the placed run, its census, and its price on the target."""
    run = dataclasses.replace(run, mesh=run.mesh or MeshShape(fsdp=len(devices)))
    assert run.mesh is not None
    wrapped_run = put_on_devices(run, build_mesh(run.mesh, devices))
    planned = None if target is None else price_wrapped(run, target).estimate
    return wrapped_run.placed, census_of_wrapped(wrapped_run, target), planned


def print_wrapped_plans(run: Run, target: Target, console: Console, *, out: Path | None, as_json: bool) -> int:
    """Plans a wrapped model, prints the plans and writes the best; returns the exit code."""
    plans = plan_wrapped(run, [target], at_most=_ROWS)
    if out is not None:
        write_plan(plans[0], target, out)
    if as_json:
        write_json({"target": str(target), "plans": [{"plan": p.name, **prediction_json(p)} for p in plans]})
        return 0
    console.print(
        f"[bold]{escape(run.name)}[/] on [bold]{target}[/]: {run.training.batch} examples per step, predicted"
    )
    table = plain_table("plan", "step", "MFU", "memory", "bound by", right=("step", "MFU", "memory"))
    for plan in plans:
        e = plan.estimate
        table.add_row(escape(plan.name), f"{e.seconds:.3g} s", f"{e.mfu:.1%}", format_bytes(e.bytes), e.bound_by)
    console.print(table)
    return 0
