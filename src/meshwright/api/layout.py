"""The verb `show`: how a run's parameters lie on a mesh, from abstract shapes."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from meshwright.api.targets import with_vocab
from meshwright.api.verb import Call, Outcome, RunOptions
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.formatting import Brief, format_count
from meshwright.hardware.targets import Target, parse_target
from meshwright.planner.explain import announced_note
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.trust import own
from meshwright.views.draw import PipelineTimeline, draw_machine, machine_of_target
from meshwright.views.layout_page import LayoutReport, layout_page, layout_report, tensor_pictures
from meshwright.views.report import Report


@dataclasses.dataclass(frozen=True, repr=False)
class LayoutView(Brief):
    """Layout of a run on a mesh: a table on a terminal, a page in a notebook."""

    placed: PlacedRun
    report: LayoutReport

    def brief(self) -> str:
        """Returns the run, the mesh, and the number of parameters."""
        return (
            f"of {self.placed.run.name} on {self.placed.layout.shape}: "
            f"{format_count(self.report.parameters)} parameters"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with console.capture() as capture:
            layout_page(self.placed, None).print(console)
        yield capture.get()

    def _repr_html_(self) -> str:
        return layout_page(self.placed, None).frame()

    def __str__(self) -> str:
        return str(layout_page(self.placed, None))


def show(run: Run | str, mesh: str | MeshShape | None = None) -> LayoutView:
    """Returns where every parameter of a run is on a mesh, and its bytes per device.

    Only shapes are used.
    run: a Run, or a recipe's name.  mesh: as `fsdp=64,tensor=8`; None takes the run's own. Its
    devices need not divide the batch, which changes no parameter. Raises ConfigError where a
    parameter does not divide.

    Example:
        >>> view = mw.show("llama3-8b", mesh="fsdp=64")
        >>> view.report.rows[3].sharded
        'w[L, D/fsdp, F]'
        >>> view.report.parameters
        8030261248
    """
    run = own(run)
    run = find_recipe(run) if isinstance(run, str) else run
    run.model.spec()  # refuses a model whose layers only its module knows
    shape = (MeshShape.parse(mesh) if isinstance(mesh, str) else mesh) or run.mesh or MeshShape()
    legal = dataclasses.replace(run.training, batch=shape.size * max(1, run.training.microbatches))
    placed = place_run(with_vocab(dataclasses.replace(run, training=legal), shape), shape)
    training = dataclasses.replace(placed.run.training, batch=run.training.batch)
    placed = dataclasses.replace(placed, run=dataclasses.replace(placed.run, training=training))
    return LayoutView(placed, layout_report(placed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowOptions(RunOptions):
    """Show how the parameters of RECIPE (by default `tiny`) lie on a mesh: sharding, gathered
    weights, bytes per device, pipeline stages. It computes with abstract shapes and needs no
    device.
    """

    draw: tuple[str, ...] = ()
    """Also draw which device holds which block of these parameters; `all` draws every one."""
    machine: str | None = None
    """Draw the mesh over a machine: v5p:4x4x8 (a torus), or h100:8x8 (nodes x GPUs per node)."""
    html: Path | None = None
    """Write one offline page: any tensor on the devices, the pipeline, the mesh over the machine.
    """
    json: bool = False
    """Print JSON."""

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright show`.

        Raises ConfigError where the run does not fit the mesh, or a file is not written.
        """
        shown = show(self.run)
        placed = shown.placed
        shape = placed.layout.shape
        target = _machine(self.machine, shape) if self.machine else None
        machine = machine_of_target(target) if target is not None else None
        note = announced_note(target) if target is not None else None
        notes = [note] if note else []
        page = layout_page(placed, machine, notes)
        drawings: list[RenderableType] = []
        if shape.stage > 1:
            drawings.append(PipelineTimeline(placed.schedule_table))
        if machine is not None:
            drawings.append(draw_machine(shape.degrees(), machine))
        if self.draw:
            names = () if self.draw == ("all",) else self.draw
            pictures = [picture.__rich__() for picture in tensor_pictures(placed, names)]
            drawings.append(Columns(pictures, padding=(0, 3)))
        if self.html:
            page.write(self.html)
        record = {**dataclasses.asdict(shown.report), "mesh": str(shape), "notes": notes}
        return Outcome(functools.partial(_print_with, page, drawings), record)


def _print_with(page: Report, drawings: Sequence[RenderableType], console: Console) -> None:
    page.print(console)
    for drawing in drawings:
        console.print()
        console.print(drawing)


def _machine(text: str, shape: MeshShape) -> Target:
    """Parses --machine.

    Raises ConfigError where it is not a target, or has another number of devices than the mesh.
    """
    target = parse_target(text)
    if target.devices != shape.size:
        raise ConfigError(
            f"--machine {text} under mesh {shape}",
            f"the machine has {target.devices} devices, and the mesh {shape.size}",
            f"--mesh fsdp={target.devices}, or the machine of {shape.size} devices",
        )
    return target
