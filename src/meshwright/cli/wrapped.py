"""Verbs for wrapped models."""

import dataclasses
from typing import Any

from rich.console import Console

from meshwright.cli.output import write_json
from meshwright.config import MeshShape, Run
from meshwright.errors import CensusError
from meshwright.hardware.mesh import build_mesh
from meshwright.hardware.targets import Target
from meshwright.views.census_tables import print_census, print_prediction
from meshwright.wrapped.census import census_of_wrapped
from meshwright.wrapped.placing import put_on_devices
from meshwright.wrapped.plan import price_wrapped


def prove_wrapped(run: Run, devices: list[Any], target: Target | None, console: Console, *, as_json: bool) -> int:
    """Compiles the train step of a wrapped model, prints its census, and returns the exit code."""
    run = dataclasses.replace(run, mesh=run.mesh or MeshShape(fsdp=len(devices)))
    assert run.mesh is not None
    census = census_of_wrapped(put_on_devices(run, build_mesh(run.mesh, devices)), target)
    planned = None if target is None else price_wrapped(run, target).estimate
    if as_json:
        figures = {"planned": {"seconds": planned.seconds, "bytes": planned.bytes}} if planned else {}
        write_json({**census.to_json(), **figures})
    else:
        print_census(console, census)
        if target is not None:
            print_prediction(console, census, target, planned)
    fits = target is None or census.memory.compiled.live <= target.chip.hbm_bytes
    return 0 if fits else CensusError.exit_code
