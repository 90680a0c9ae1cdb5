"""The verb `parity`: one run on two meshes, step by step."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from meshwright.api.evaluation import parity
from meshwright.cli.base_run import RunOptions, base_run
from meshwright.cli.devices import SIMULATED, HostOptions, start_devices
from meshwright.cli.output import write_json
from meshwright.cli.parse import parse
from meshwright.config import MeshShape
from meshwright.hardware.agreement import failing_together
from meshwright.reporters.console import open_console
from meshwright.views.result_pages import parity_page

_STEPS = 5
"""Steps that are compared where --steps does not say."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityOptions(RunOptions):
    """Run RECIPE (by default `tiny`) on two meshes in float32, and compare initial values bit for bit, then losses and
    gradients of every step."""

    against: Annotated[str, tyro.conf.arg(metavar="AXIS=N,...")] = "data=1"
    """The other mesh, as axis=degree,..."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()
    json: bool = False
    """Print JSON."""


@failing_together()
def main(args: Sequence[str]) -> int:
    """Runs `meshwright parity`; the exit code is 1 where the meshes diverge."""
    base = base_run(args)
    run = dataclasses.replace(base.run, training=dataclasses.replace(base.run.training, steps=_STEPS))
    options = parse(ParityOptions, "parity [RECIPE]", base.args, default=ParityOptions(run=run))
    run, other = options.run, MeshShape.parse(options.against)
    hosts = options.hosts.hosts()
    start_devices(max(other.size, run.mesh.size if run.mesh else SIMULATED), None, hosts)
    result = parity(run, other, steps=run.training.steps)
    if hosts.process == 0 and options.json:
        write_json({**dataclasses.asdict(result), "first_divergence": result.first_divergence})
    elif hosts.process == 0:
        parity_page(result).print(open_console())
    return 1 if result.first_divergence else 0
