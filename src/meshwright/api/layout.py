"""The layout of a run, as a table and as a page in notebooks."""

import dataclasses

from rich.console import Console, ConsoleOptions, RenderResult

from meshwright.api.planning import with_vocab
from meshwright.config import MeshShape
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.views.layout_page import LayoutReport, layout_page, layout_report


@dataclasses.dataclass(frozen=True)
class LayoutView:
    """Layout of a run on a mesh: a table on a terminal, a page in a notebook."""

    placed: PlacedRun
    report: LayoutReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with console.capture() as capture:
            layout_page(self.placed, None).print(console)
        yield capture.get()

    def _repr_html_(self) -> str:
        return layout_page(self.placed, None).frame()

    def __str__(self) -> str:
        return str(layout_page(self.placed, None))


def show(run: Run | str, mesh: str | MeshShape | None = None) -> LayoutView:
    """Returns where every parameter of a run lies on a mesh, and its bytes per device, from shapes alone.

    run: a Run, or a recipe's name.  mesh: as `fsdp=64,tensor=8`; None takes the run's own. Its devices need not divide
    the batch, which changes no parameter. Raises ConfigError where a parameter does not divide.

    Example:
        >>> view = mw.show("llama3-8b", mesh="fsdp=64")
        >>> view.report.rows[0].sharded
        'w[L, D/fsdp]'
        >>> view.report.parameters
        8030261248
    """
    run = with_vocab(find_recipe(run) if isinstance(run, str) else run)
    shape = (MeshShape.parse(mesh) if isinstance(mesh, str) else mesh) or run.mesh or MeshShape()
    legal = dataclasses.replace(run.training, batch=shape.size * run.training.microbatches)
    placed = place_run(dataclasses.replace(run, training=legal), shape)
    training = dataclasses.replace(placed.run.training, batch=run.training.batch)
    placed = dataclasses.replace(placed, run=dataclasses.replace(placed.run, training=training))
    return LayoutView(placed, layout_report(placed))
