"""Blocks that only pages draw: charts, matrices, and drawings by a script of their own."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from meshwright.views.blocks import Block, Unit

Style = Literal["line", "step", "area", "points"]
MARKERS = ("circle", "square", "diamond", "triangle", "cross")
"""Shapes of a chart's points."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """Axis of a chart."""

    label: str
    unit: Unit = "number"
    log: bool = False
    toggle: bool = False
    """Whether the reader may switch between linear and logarithmic."""
    zero: bool = False
    """Whether the axis begins at zero."""
    top: float | None = None
    """Greatest value that a linear axis shows before the reader zooms;
    spikes beyond it do not flatten the rest."""


@dataclasses.dataclass(frozen=True)
class Series:
    """Line, area or cloud of points."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    """Missing values do not break the line."""
    colour: str = "c1"
    """Name of a colour of `views.colours`: c1 to c8, a kind of work, limit, good, bad, muted."""
    style: Style = "line"
    marker: str = "circle"
    """One of MARKERS."""
    dashed: bool = False
    keys: Sequence[str] = ()
    """Key of each point for the chart's link; empty for lines that select nothing."""
    tips: Sequence[str] = ()
    """Text of each point; its first line is a title."""
    under: bool = False
    """Whether it is drawn below the others, which it would hide."""
    run: str = ""
    """Run that it is of, by whose scales another x axis has its values; see `AxisChoice`."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Line across a chart at a value: a limit, a restart, a checkpoint."""

    axis: Literal["x", "y"]
    value: float
    label: str
    colour: str = "limit"
    fit: bool = False
    """Whether the axis reaches at least to the mark."""
    run: str = ""
    """Run that a mark on the x axis is of, as of `Series`."""


@dataclasses.dataclass(frozen=True)
class Chart(Block):
    """Lines, areas and points over two axes; zooms, pans, and is read by hovering or by keys."""

    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    link: str = ""
    smoothing: float | None = None
    """Weight of the moving average that a slider begins with; None for no slider."""
    height: int = 340
    """Most pixels; a narrow page has fewer."""
    across: str = ""
    """Link of the `AxisChoice` that chooses its x axis."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """Values that a run had at some steps, between which they are linear: its tokens,
    or its time."""

    steps: Sequence[float]
    values: Sequence[float]


@dataclasses.dataclass(frozen=True)
class AxisChoice(Block):
    """Buttons with which the reader chooses the x axis of charts;
    the choice is kept in the page's address.

    Charts of which `across` is the link follow it. Their data are steps.
    """

    link: str
    axes: Sequence[Axis]
    """The axis of the charts' own data, and those that may take its place."""
    scales: Mapping[str, Mapping[str, Scale]]
    """Label of each further axis -> name of a run -> its values."""


@dataclasses.dataclass(frozen=True)
class Drawing(Block):
    """Picture that a script of the page draws from its data.

    Timeline: lanes of boxes over time. Machine: a mesh over nodes or planes of a torus. Placement:
    blocks of any tensor and the devices that hold them. Pipeline: shapes of
    `draw.PipelineTimeline`. Health: layers by steps. `timeline.js` and `drawings.js` document the
    data.
    """

    kind: Literal["Timeline", "Machine", "Placement", "Pipeline", "Health"]
    data: Mapping[str, Any]
