"""The verb `show`: how a run's parameters lie on a mesh, from abstract shapes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.columns import Columns
from rich.console import RenderableType

from meshwright.api.layout import show
from meshwright.cli.base_run import RunOptions, base_run
from meshwright.cli.output import unwritable, write_json
from meshwright.cli.parse import parse
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.targets import parse_target
from meshwright.reporters.console import open_console
from meshwright.views.draw import MachineGrid, PipelineTimeline, draw_machine, machine_of_target, standalone
from meshwright.views.layout_page import layout_page, tensor_pictures


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowOptions(RunOptions):
    """Show how the parameters of RECIPE (by default `tiny`) lie on a mesh: sharding, gathered weights, bytes per
    device, pipeline stages. It computes with abstract shapes and needs no device."""

    draw: tuple[str, ...] = ()
    """Also draw which device holds which block of these parameters; `all` draws every one."""
    machine: str | None = None
    """Draw the mesh over a machine: v5p:4x4x8 (a torus), or h100:8x8 (nodes x GPUs per node)."""
    svg: Path | None = None
    """Write the drawings into this folder, one file each."""
    html: Path | None = None
    """Write one offline page: any tensor on the devices, the pipeline, the mesh over the machine."""
    json: bool = False
    """Print JSON."""


def _machine(text: str, shape: MeshShape) -> MachineGrid:
    """Parses --machine. Raises ConfigError where it is not a target, or has another number of devices than the mesh."""
    target = parse_target(text)
    if target.devices != shape.size:
        raise ConfigError(
            f"--machine {text} under mesh {shape}",
            f"the machine has {target.devices} devices, and the mesh {shape.size}",
            f"--mesh fsdp={target.devices}, or the machine of {shape.size} devices",
        )
    return machine_of_target(target)


def main(args: Sequence[str]) -> int:
    """Runs `meshwright show`. Raises ConfigError where the run does not fit the mesh, or a file cannot be written."""
    base = base_run(args)
    options = parse(ShowOptions, "show [RECIPE]", base.args, default=ShowOptions(run=base.run))
    shown = show(options.run)
    placed, shape = shown.placed, shown.placed.shape
    machine = _machine(options.machine, shape) if options.machine else None
    page = layout_page(placed, machine)
    wanted = () if options.draw == ("all",) else options.draw
    pictures = tensor_pictures(placed, wanted) if options.draw or options.svg else []
    timeline = PipelineTimeline(placed.schedule_table) if shape.stage > 1 else None
    try:
        if options.svg:
            drawings = {"mesh": draw_machine(shape.degrees(), machine).svg()}
            drawings |= {p.name.replace(", ", "-").replace(" ", "-"): p.svg() for p in pictures}
            drawings |= {"pipeline": timeline.svg()} if timeline else {}
            options.svg.mkdir(parents=True, exist_ok=True)
            for name, svg in drawings.items():
                (options.svg / f"{name}.svg").write_text(standalone(svg), encoding="utf-8")
        if options.html:
            page.write(options.html)
    except OSError as error:
        raise unwritable(error.filename, error) from error
    if options.json:
        write_json({**dataclasses.asdict(shown.report), "mesh": str(shape)})
        return 0
    console = open_console()
    page.print(console)
    drawn: list[RenderableType] = [
        *([timeline] if timeline else []),
        *([draw_machine(shape.degrees(), machine)] if machine else []),
    ]
    drawn += [Columns([picture.__rich__() for picture in pictures], padding=(0, 3))] if options.draw else []
    for drawing in drawn:
        console.print()
        console.print(drawing)
    return 0
