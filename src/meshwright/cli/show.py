"""The verb `show`: how a run's parameters lie on a mesh, from abstract shapes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.columns import Columns
from rich.console import Console

from meshwright.api.planning import with_vocab
from meshwright.cli.base_run import RunOptions, base_run
from meshwright.cli.output import unwritable, write_json
from meshwright.cli.parse import parse
from meshwright.config import MeshShape
from meshwright.report.console import open_console
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.views.draw import ArrayPicture, MachineGrid, PipelineTimeline, draw_machine, parse_machine, standalone
from meshwright.views.layout_page import layout_page, layout_report, tensor_pictures


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowOptions(RunOptions):
    """Show how the parameters of RECIPE (by default `tiny`) lie on a mesh: sharding, gathered weights, bytes per
    device, pipeline stages. It computes with abstract shapes and needs no device."""

    draw: tuple[str, ...] = ()
    """Also draw which device holds which block of these parameters; `all` draws every one."""
    machine: str | None = None
    """Draw the mesh over a machine: v5p:4x4x8 (a torus), gpu:8x8 (nodes x GPUs per node), or host."""
    svg: Path | None = None
    """Write the drawings into this folder, one file each."""
    html: Path | None = None
    """Write one offline page: any tensor on the devices, the pipeline, the mesh over the machine."""
    json: bool = False
    """Print JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright show`. Raises ConfigError where the run does not fit the mesh, or a file cannot be written."""
    base = base_run(args)
    options = parse(ShowOptions, "show [RECIPE]", base.args, default=ShowOptions(run=base.run))
    placed = _place(options)
    report = layout_report(placed)
    machine = parse_machine(options.machine, placed.shape.size) if options.machine else None
    paths = () if options.draw == ("all",) else options.draw
    wanted = options.draw or options.svg
    pictures = tensor_pictures(placed, paths) if wanted else []
    _write_files(options, placed, machine, pictures)
    if options.json:
        write_json({**dataclasses.asdict(report), "mesh": str(report.mesh)})
        return 0
    console = open_console()
    layout_page(placed, machine).print(console)
    _print_pictures(console, placed, machine, pictures if options.draw else [])
    return 0


def _place(options: ShowOptions) -> PlacedRun:
    """Places the run on its mesh. A batch that does not divide is left as it is: it changes no parameter."""
    run = with_vocab(options.run)
    shape = run.mesh or MeshShape()
    legal = dataclasses.replace(run.training, batch=shape.size * run.training.microbatches)
    placed = place_run(dataclasses.replace(run, training=legal), shape)
    training = dataclasses.replace(placed.run.training, batch=run.training.batch)
    return dataclasses.replace(placed, run=dataclasses.replace(placed.run, training=training))


def _print_pictures(
    console: Console, placed: PlacedRun, machine: MachineGrid | None, pictures: Sequence[ArrayPicture]
) -> None:
    if placed.shape.stage > 1:
        console.print()
        console.print(PipelineTimeline(placed.schedule_table))
    if machine is not None:
        console.print()
        console.print(draw_machine(placed.shape.degrees(), machine))
    if pictures:
        console.print()
        console.print(Columns([picture.__rich__() for picture in pictures], padding=(0, 3)))


def _write_files(
    options: ShowOptions, placed: PlacedRun, machine: MachineGrid | None, pictures: Sequence[ArrayPicture]
) -> None:
    try:
        if options.svg:
            options.svg.mkdir(parents=True, exist_ok=True)
            for name, svg in _drawings(placed, machine, pictures).items():
                (options.svg / f"{name}.svg").write_text(standalone(svg), encoding="utf-8")
        if options.html:
            layout_page(placed, machine).write(options.html)
    except OSError as error:
        raise unwritable(error.filename, error) from error


def _drawings(placed: PlacedRun, machine: MachineGrid | None, pictures: Sequence[ArrayPicture]) -> dict[str, str]:
    """Returns the SVG of every drawing, by file name."""
    drawings = {"mesh": draw_machine(placed.shape.degrees(), machine).svg()}
    drawings |= {p.name.replace(", ", "-").replace(" ", "-"): p.svg() for p in pictures}
    pipeline = {"pipeline": PipelineTimeline(placed.schedule_table).svg()} if placed.shape.stage > 1 else {}
    return {**drawings, **pipeline}
