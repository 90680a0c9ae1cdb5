"""Blocks of a report, as data: what `terminal.py` prints and `assets/*.js` draws, which reads the fields as JSON.

A `link` names a selection that blocks share: a click on a row of a table, a point of a chart or a box of a timeline
with the same link selects its key, and an `Inspector` of that link shows what is known of it. A cell of a table can be
a hyperlink: an address, of a page in the same folder or https, and after a space the text that is shown.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from meshwright.formatting import format_bytes, format_count, format_step

Cell = str | int | float | None
Unit = Literal["seconds", "bytes", "count", "number", "integer", "fraction", "days", "dollars", "text"]
Tone = Literal["", "good", "bad", "warning", "faded"]
Where = Literal["everywhere", "page", "terminal"]
"""Renderers that show a section, a block or a column. Charts, timelines and drawings are on pages only."""
Style = Literal["line", "step", "area", "points"]
Marker = Literal["circle", "square", "diamond", "triangle", "cross"]


def format_amount(value: float) -> str:
    """Formats a number with three digits, and all digits before the point: `3.14`, `31.4`, `12,345`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_FORMATS: dict[Unit, Callable[[Any], str]] = {
    "seconds": format_step,
    "bytes": format_bytes,
    "count": format_count,
    "number": lambda n: f"{n:.4g}",
    "integer": lambda n: f"{n:,.0f}",
    "fraction": lambda n: f"{n:.1%}",
    "days": format_amount,
    "dollars": lambda n: f"${format_amount(n)}",
}


def format_cell(value: Cell, unit: Unit) -> str:
    """Formats a cell as a terminal shows it; a text stays as it is, and a missing value is empty."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"-{format_cell(-value, unit)}" if value < 0 else _FORMATS.get(unit, str)(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Element of a section with an optional title and a sentence about it."""

    title: str = ""
    note: str = ""
    hint: str = ""
    """What a reader of the page can click or hover."""
    where: Where = "everywhere"


@dataclasses.dataclass(frozen=True)
class Text(Block):
    """Paragraphs."""

    paragraphs: Sequence[str]
    tone: Tone = ""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One large figure."""

    label: str
    value: str
    detail: str = ""
    tone: Tone = ""


@dataclasses.dataclass(frozen=True)
class Figures(Block):
    """Large figures in a row."""

    items: Sequence[Figure]


@dataclasses.dataclass(frozen=True)
class Facts(Block):
    """Names and values."""

    rows: Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Code(Block):
    """Preformatted text, such as a file or a sample."""

    text: str


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
    marker: Marker = "circle"
    dashed: bool = False
    keys: Sequence[str] = ()
    """Key of each point for the chart's link; empty for lines that select nothing."""
    tips: Sequence[str] = ()
    """Text of each point; its first line is a title."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Line across a chart at a value: a limit, a restart, a checkpoint."""

    axis: Literal["x", "y"]
    value: float
    label: str
    colour: str = "limit"
    fit: bool = False
    """Whether the axis reaches at least to the mark."""


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


@dataclasses.dataclass(frozen=True)
class Column:
    """Column of a table."""

    heading: str
    unit: Unit = "text"
    cell: str | Callable[[Any], Cell] = ""
    """For `Table.of`: key of a mapping, or a function of the row's item."""
    bar: bool = False
    """Whether a page shows each cell as a bar, relative to the largest."""
    choices: bool = False
    """Whether a page filters the table by this column's values."""
    wide: bool = False
    """Whether its text wraps."""
    where: Where = "everywhere"


@dataclasses.dataclass(frozen=True)
class Table(Block):
    """Table that sorts by each column; with `searchable` it filters by text and by the columns of choices."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    keys: Sequence[str] = ()
    tones: Sequence[Tone] = ()
    """Tone of each row: bad and faded."""
    link: str = ""
    searchable: bool = False
    shown: int = 60
    """Rows on a page before a button shows more."""
    printed: int = 20
    """Rows that a terminal shows."""

    def without(self, where: Where) -> "Table":
        """Returns the table without the columns of one renderer, and without those that are empty."""
        kept = [
            i
            for i, column in enumerate(self.columns)
            if column.where != where and (not self.rows or any(row[i] not in (None, "") for row in self.rows))
        ]
        rows = [[row[i] for i in kept] for row in self.rows]
        return dataclasses.replace(self, columns=[self.columns[i] for i in kept], rows=rows)

    @classmethod
    def of(cls, items: Iterable[Any], columns: Sequence[Column], **fields: Any) -> "Table":
        """Returns the table with a row for each item. fields: of the table."""

        def value(cell: str | Callable[[Any], Cell], item: Any) -> Cell:
            return item.get(cell) if isinstance(cell, str) else cell(item)

        return cls(columns, [[value(column.cell, item) for column in columns] for item in items], **fields)


@dataclasses.dataclass(frozen=True)
class Bar:
    """One stacked bar: values in the order of the names."""

    label: str
    values: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Bars(Block):
    """Stacked bars on one scale."""

    unit: Unit
    names: Sequence[str]
    colours: Sequence[str]
    rows: Sequence[Bar]
    limit: float | None = None
    limit_name: str = "limit"
    legend_row: int | None = None
    """Row whose values the legend gives: the one that holds all others."""


@dataclasses.dataclass(frozen=True)
class Matrix(Block):
    """Matrix whose cells are shaded by value. filters: text that a cell puts into the filter of the linked table."""

    unit: Unit
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    link: str = ""
    filters: Sequence[Sequence[str]] = ()


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something wrong or worth knowing: where, why, and what mends it."""

    name: str
    subject: str
    reason: str
    fix: str = ""
    line: str = ""
    size: str = ""
    tone: Tone = ""


@dataclasses.dataclass(frozen=True)
class Findings(Block):
    """Findings below each other."""

    items: Sequence[Finding]
    printed: int = 8
    """Findings that a terminal shows."""


@dataclasses.dataclass(frozen=True)
class BarScale:
    """Names and colours of one stacked bar of each item of an inspector."""

    title: str
    unit: Unit
    names: Sequence[str]
    colours: Sequence[str]
    limit: float | None = None


@dataclasses.dataclass(frozen=True)
class Item:
    """Facts that an inspector shows of one key."""

    title: str
    text: str
    facts: Sequence[Cell]
    """In the order of the inspector's names."""
    values: Sequence[Sequence[float]] = ()
    """Values of each of the inspector's bars."""


@dataclasses.dataclass(frozen=True)
class Inspector(Block):
    """Facts of the selection; of two keys, side by side with their differences."""

    link: str
    names: Sequence[str]
    units: Sequence[Unit]
    items: Mapping[str, Item]
    bars: Sequence[BarScale] = ()
    at_most: int = 1
    first: str = ""
    """Key that is selected when the page opens; two are joined by `~`."""
    empty: str = "Nothing is selected."


@dataclasses.dataclass(frozen=True)
class WorkKind:
    """Kind of work on a timeline."""

    kind: str
    name: str
    colour: str


@dataclasses.dataclass(frozen=True)
class WorkSpans:
    """Boxes of a timeline, a list for each field; a loop comes before its body, which comes once."""

    lane: Sequence[int]
    kind: Sequence[str]
    name: Sequence[int]
    """Index into the timeline's names."""
    start: Sequence[float]
    seconds: Sequence[float]
    count: Sequence[int]
    """Executions in the step."""
    depth: Sequence[int]
    exposed: Sequence[float]
    key: Sequence[str]
    """Key for the timeline's link; empty for a box that selects nothing."""


@dataclasses.dataclass(frozen=True)
class Timeline(Block):
    """Lanes of boxes over time, on a canvas; every iteration of a loop is drawn."""

    lanes: Sequence[str]
    kinds: Sequence[WorkKind]
    names: Sequence[str]
    spans: WorkSpans
    seconds: float
    link: str = ""


@dataclasses.dataclass(frozen=True)
class Grid(Block):
    """Blocks beside each other where there is room for `columns` of them."""

    blocks: Sequence[Block]
    columns: int = 2
    wide: bool = False
    """Whether the first of two blocks takes twice the width of the second."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """Devices of one node, or of one plane of a torus."""

    caption: str
    rows: int
    columns: int
    cells: Sequence[tuple[int, int, int]]
    """Device, row and column of each cell."""


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Axes of a mesh on a machine."""

    axes: Sequence[tuple[str, int]]
    """Name and degree of each mesh axis of more than one device, outermost first."""
    summaries: Sequence[str]
    """Links along each of these axes."""


@dataclasses.dataclass(frozen=True)
class Machine(Block):
    """Mesh over a machine; the devices that communicate along the chosen axis have one colour."""

    mesh: MeshAxes
    panels: Sequence[Panel]
    link: str = ""
    """Selection whose mesh is shown, where `meshes` has it."""
    meshes: Mapping[str, MeshAxes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TensorPlacement:
    """One tensor, sharded and gathered."""

    name: str
    dims: Sequence[str]
    """Letter of each dimension."""
    shape: Sequence[int]
    sharded: Sequence[Sequence[int]]
    """For each dimension the axes that split it, as indices into the axes of the block."""
    gathered: Sequence[Sequence[int]]
    sharded_text: str
    gathered_text: str
    bytes_sharded: int
    """Bytes on one device between steps."""
    bytes_gathered: int
    """Bytes on one device while it is used, of one layer where it is stacked."""
    stacked: bool
    """Whether its first dimension counts layers, which are gathered one at a time."""


@dataclasses.dataclass(frozen=True)
class Placement(Block):
    """Blocks of any tensor and the devices that hold them; sliders over tensors, sharded and gathered."""

    axes: Sequence[tuple[str, int]]
    devices: int
    tensors: Sequence[TensorPlacement]
    first: str
    """Tensor that is shown when the page opens."""


@dataclasses.dataclass(frozen=True)
class PipelineTasks:
    """Tasks of a schedule, a list for each field."""

    tick: Sequence[int]
    stage: Sequence[int]
    place: Sequence[int]
    """Row of the task in its stage."""
    kind: Sequence[int]
    """1 forward, 2 backward, 3 input gradient, 4 weight gradient (`sharding.schedule_table`)."""
    part: Sequence[int]
    """Virtual stage."""
    microbatch: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Pipeline(Block):
    """Schedule of a pipeline; hovering a task shows its microbatch on all stages, and live inputs are drawn below."""

    stages: int
    ticks: int
    places: int
    virtual_stages: int
    microbatches: int
    tasks: PipelineTasks
    live: Sequence[Sequence[int]]
    """Inputs that each stage holds in each tick."""


_NOT_ON_PAGES = ("hint", "where", "printed", "cell")
"""Fields that no script reads."""


def to_json(value: Any) -> Any:
    """Returns a block, or a value of one, as JSON values; numbers that are not finite become null."""
    if isinstance(value, Table):
        value = value.without("terminal")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.name not in _NOT_ON_PAGES]
        fields = {name: to_json(getattr(value, name)) for name in names}
        if not isinstance(value, Block):
            return fields
        return {"block": type(value).__name__, **fields, "note": f"{value.note} {value.hint}".strip()}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        # Seven digits, which no pixel shows, keep pages small.
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.7g}")
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars
        return to_json(value.tolist())
    raise TypeError(f"a page cannot hold a {type(value).__name__}")
