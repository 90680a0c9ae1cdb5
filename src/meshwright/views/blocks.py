"""Blocks of a report, as data: what `terminal.py` prints and `assets/*.js` draws,
which reads the fields as JSON.

A `link` names a selection that blocks share: a click on a row of a table, a point of a chart or a
box of a timeline with the same link selects its key, and an `Inspector` of that link shows what is
known of it. A cell of a table can be a hyperlink: an address, of a page in the same folder or
https, and after a space the text that is shown.
"""

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from meshwright.formatting import format_bytes, format_count, format_step, short_paths

Cell = str | int | float | None
Unit = Literal[
    "seconds", "bytes", "count", "number", "integer", "fraction", "days", "dollars", "text"
]
Tone = Literal["", "good", "bad", "warning", "faded"]
Where = Literal["everywhere", "page", "terminal"]
"""Renderers that show a section, a block or a column. Charts and drawings are on pages only."""


def format_amount(value: float) -> str:
    """Formats a number with three digits,
    and all digits before the point: `3.14`, `31.4`, `12,345`."""
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
    """Formats a cell as a terminal shows it;
    a text stays as it is, and a missing value is empty."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"-{format_cell(-value, unit)}" if value < 0 else _FORMATS.get(unit, str)(value)


def _short(cell: Cell) -> Cell:
    return short_paths(cell) if isinstance(cell, str) else cell


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

    def __post_init__(self) -> None:
        """Shortens the paths in values."""
        rows = [(name, short_paths(value)) for name, value in self.rows]
        object.__setattr__(self, "rows", rows)


@dataclasses.dataclass(frozen=True)
class Code(Block):
    """Preformatted text, such as a file or a sample."""

    text: str


@dataclasses.dataclass(frozen=True)
class Column:
    """Column of a table, or fact of an inspector."""

    heading: str
    unit: Unit = "text"
    cell: str | Callable[[Any], Any] = ""
    """Its value of an item: a function, or dotted attributes or keys, `plan.estimate.seconds`."""
    bar: bool = False
    """Whether a page shows each cell as a bar, relative to the largest."""
    choices: bool = False
    """Whether a page filters the table by this column's values."""
    wide: bool = False
    """Whether its text wraps."""
    where: Where = "everywhere"

    def of(self, item: Any) -> Cell:
        """Returns the cell of an item: in a column of text its `str`, in another a number;
        else None."""
        value = item
        if callable(self.cell):
            value = self.cell(item)
        else:
            for name in self.cell.split("."):
                value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
        if self.unit == "text":
            return None if value is None else str(value)
        number: Any = (
            None if isinstance(value, bool) or not isinstance(value, numbers.Real) else value
        )
        return number


@dataclasses.dataclass(frozen=True)
class Table(Block):
    """Table that sorts by each column;
    with `searchable` it filters by text and by the columns of choices."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    keys: Sequence[str] = ()
    tones: Sequence[Tone] = ()
    """Tone of each row: bad and faded."""
    link: str = ""
    searchable: bool = False
    shown: int = 60
    """Rows on a page before a button shows more."""
    printed: int | None = 20
    """Rows that a terminal shows; None for all."""

    def __post_init__(self) -> None:
        """Shortens the paths in headings and cells, which would set a table wide."""
        columns = [dataclasses.replace(c, heading=short_paths(c.heading)) for c in self.columns]
        rows = [[_short(cell) for cell in row] for row in self.rows]
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "rows", rows)

    @classmethod
    def of(cls, items: Iterable[Any], columns: Sequence[Column], **fields: Any) -> "Table":
        """Returns the table with a row for each item. fields: of the table."""
        return cls(columns, [[column.of(item) for column in columns] for item in items], **fields)

    def without(self, where: Where) -> "Table":
        """Returns the table without the columns of one renderer,
        and without those that are empty."""
        kept = [
            i
            for i, column in enumerate(self.columns)
            if column.where != where
            and (not self.rows or any(row[i] not in (None, "") for row in self.rows))
        ]
        rows = [[row[i] for i in kept] for row in self.rows]
        return dataclasses.replace(self, columns=[self.columns[i] for i in kept], rows=rows)


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
    rows: Sequence[Bar] = ()
    """Empty in an inspector, whose items have the values."""
    limit: float | None = None
    legend_row: int | None = None
    """Row whose values the legend gives: the one that holds all others."""


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
class Item:
    """Facts and bars of one key."""

    title: str
    text: str
    facts: Sequence[Cell]
    """In the order of the inspector's columns."""
    values: Sequence[Sequence[float]] = ()
    """Values of each of the inspector's bars."""


@dataclasses.dataclass(frozen=True)
class Inspector(Block):
    """Facts of the selection; of two keys, side by side with their differences."""

    link: str
    columns: Sequence[Column]
    items: Mapping[str, Item]
    bars: Sequence[Bars] = ()
    at_most: int = 2
    first: str = ""
    """Key that is selected when the page opens; two are joined by `~`."""
    empty: str = "Nothing is selected."


@dataclasses.dataclass(frozen=True)
class Grid(Block):
    """Blocks beside each other where there is room for `columns` of them."""

    blocks: Sequence[Block]
    columns: int = 2
    wide: bool = False
    """Whether the first of two blocks takes twice the width of the second."""
