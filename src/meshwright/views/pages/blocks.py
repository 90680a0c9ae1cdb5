"""Blocks of a page, as data: what `assets/*.js` draws. A block's fields are the JSON that its drawer reads.

A `link` names a selection that blocks share: a click on a row of a table, a point of a chart or a box of a timeline
with the same link selects its key, and an `Inspector` of that link shows what is known of it. Units are those of
`assets/scale.js`: seconds, bytes, count, number, integer, fraction, days, dollars, text. A cell of a table can be a
link: an address, of a page beside this one or https, and after a space the text that is shown.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Cell = str | int | float | None
Unit = Literal["seconds", "bytes", "count", "number", "integer", "fraction", "days", "dollars", "text"]
Tone = Literal["", "good", "bad", "warning", "faded"]
Style = Literal["line", "step", "area", "points"]
Marker = Literal["circle", "square", "diamond", "triangle", "cross"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Part of a section with an optional title and a sentence about it."""

    title: str = ""
    note: str = ""


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
    """Text as it is, such as a file or a sample."""

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
    """A missing value leaves a gap in nothing: its neighbours are joined."""
    colour: str = "c1"
    """Name of a colour of `views.draw.colours`: c1 to c8, a kind of work, limit, good, bad, muted."""
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
    bar: bool = False
    """Whether a cell's background is a bar of its part of the largest."""
    choices: bool = False
    """Whether the table is filtered by this column's values."""
    wide: bool = False
    """Whether its text wraps."""
    note: str = ""


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
    """Rows before a button shows more."""


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
    """Parts of each of the inspector's bars."""


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
    """Key that is selected when the page opens."""
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


def to_json(value: Any) -> Any:
    """Returns a block, or a part of one, as JSON values; numbers that are not finite become null."""
    if isinstance(value, Block):
        return {"block": type(value).__name__, **_fields(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars
        return to_json(value.tolist())
    raise TypeError(f"a page cannot hold a {type(value).__name__}")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _rounded(value: float) -> float | int | None:
    """Rounds to seven digits, which no pixel shows, so that pages are small; whole numbers stay as they are."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.7g}")
