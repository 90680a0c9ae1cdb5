"""The blocks of a report on a terminal: tables without lines, bars as text;
charts and drawings are on pages only."""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text as Line

from meshwright.views.blocks import (
    Bars,
    Block,
    Cell,
    Code,
    Facts,
    Figures,
    Findings,
    Grid,
    Inspector,
    Item,
    Table,
    Text,
    Tone,
    Unit,
    format_cell,
)

_STYLES: dict[Tone, str] = {
    "": "",
    "good": "green",
    "bad": "bold red",
    "warning": "bold yellow",
    "faded": "dim",
}
_BAR = 32
"""Characters of the longest bar."""
_GAP = 2
"""Columns of the terminal between two columns of a table."""
_LAYOUT = re.compile(r"\w[\[{][^\[\]{}]* [^\[\]{}]*[\]}]")
"""Layouts of a tensor with spaces, `w[D/fsdp, F/tensor]`, which are read as one word."""


def print_blocks(console: Console, title: str, note: str, blocks: Sequence[Block]) -> None:
    """Prints a section: its heading, its note, and the blocks that a terminal can show;
    nothing if there are none."""
    shown = [block for block in _without_grids(blocks) if type(block) in _PRINTERS]
    if not shown and (blocks or not note):
        return
    console.print()
    if title:
        console.print(title, style="bold", markup=False)
    _print(console, note, "dim")
    for block in shown:
        if block.title and (len(shown) > 1 or not title):
            _print(console, block.title, "bold dim")
        _PRINTERS[type(block)](console, block)
        _print(console, block.note, "dim")


def _without_grids(blocks: Sequence[Block]) -> list[Block]:
    """Returns the blocks of a terminal; those of a grid are below each other."""
    found: list[Block] = []
    for block in blocks:
        if block.where == "page":
            continue
        if isinstance(block, Grid):
            found += [inner for inner in block.blocks if inner.where != "page"]
        else:
            found.append(block)
    return found


def text_of(*blocks: Block) -> str:
    """Returns blocks as plain text, 120 columns wide."""
    console = Console(width=120, color_system=None, highlight=False, force_jupyter=False)
    with console.capture() as capture:
        print_blocks(console, "", "", blocks)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def _print(console: Console, text: str, style: str = "") -> None:
    if text:
        console.print(text, style=style, markup=False, highlight=False)


@dataclasses.dataclass(frozen=True)
class _PrintedColumn:
    """Column of a table as text."""

    heading: str
    number: bool
    """Whether it is set to the right."""
    cells: Sequence[str]

    @property
    def least(self) -> int:
        """Characters of its longest word; numbers and layouts of tensors are not broken."""
        words = self.heading.split()
        if self.number or any(_LAYOUT.search(cell) for cell in self.cells):
            words += self.cells
        else:
            for cell in self.cells:
                words += cell.split()
        return max(map(cell_len, words))

    @property
    def natural(self) -> int:
        """Characters of its longest line, the heading aside."""
        lines = [line for cell in self.cells for line in cell.split("\n")]
        return max(self.least, *map(cell_len, lines))

    @property
    def full(self) -> int:
        """Characters of its longest line."""
        return max(self.natural, cell_len(self.heading))


def _widths(columns: Sequence[_PrintedColumn], room: int) -> list[int]:
    """Returns the widths of columns whose longest words fit into `room` characters.

    Where there is room headings stay on one line, else they are broken between words. Where the
    cells are too wide as well, each column gets its least width and its part of the rest:

        width = least + rest * (natural - least) / (sum of natural - sum of least)
    """
    full = [column.full for column in columns]
    if sum(full) <= room:
        return full
    least = [column.least for column in columns]
    natural = [column.natural for column in columns]
    rest = room - sum(least)
    wanted = sum(natural) - sum(least)
    if wanted <= rest:
        return natural
    return [low + rest * (n - low) // wanted for low, n in zip(least, natural, strict=True)]


@dataclasses.dataclass
class _Rows:
    """Table without lines and without its empty columns, for a terminal of any width.

    A terminal too narrow for the words, layouts and numbers of its columns side
    by side has them below each other.
    """

    headings: Sequence[str]
    units: Sequence[Unit]
    rows: Sequence[Sequence[Cell]]
    tones: Sequence[Tone] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self._columns()
        if not columns:
            return
        room = options.max_width - _GAP * (len(columns) - 1)
        if sum(column.least for column in columns) > room:
            yield from _stacked(console, options.max_width, columns)
            return
        table = self._table(columns, _widths(columns, room))
        for segments in console.render_lines(table, options, pad=False):
            line = Line.assemble(*((segment.text, segment.style or "") for segment in segments))
            line.rstrip()  # no spaces behind the last column
            yield line

    def _columns(self) -> list[_PrintedColumn]:
        """Returns the columns that are not empty."""
        columns = []
        for i, (heading, unit) in enumerate(zip(self.headings, self.units, strict=True)):
            cells = [format_cell(row[i], unit) for row in self.rows]
            if any(cells):
                columns.append(_PrintedColumn(heading, unit != "text", cells))
        return columns

    def _table(self, columns: Sequence[_PrintedColumn], widths: Sequence[int]) -> RichTable:
        headed = any(self.headings)
        table = RichTable(box=None, pad_edge=False, header_style="dim", show_header=headed)
        for column, width in zip(columns, widths, strict=True):
            heading = escape("\n".join(textwrap.wrap(column.heading, width)))
            side: JustifyMethod = "right" if column.number else "left"
            table.add_column(heading, justify=side, width=width, overflow="fold")
        for i in range(len(self.rows)):
            style = _STYLES[self.tones[i]] if i < len(self.tones) else ""
            table.add_row(*[Line(column.cells[i]) for column in columns], style=style)
        return table


def _stacked(console: Console, width: int, columns: Sequence[_PrintedColumn]) -> RenderResult:
    """Yields the first cell of each row, then the others with their headings.

    Of a pair of columns, a name and its value, both cells are on a line.
    """
    headings = [column.heading for column in columns[1:]]
    pair = headings in ([""], ["value"])
    indent = min(max(map(cell_len, headings), default=0), width // 2)
    for first, *others in zip(*[column.cells for column in columns], strict=True):
        if not pair:
            yield Line(first, style="bold", overflow="fold")
        for heading, cell in zip(headings, others, strict=True):
            if not cell.strip(" █"):  # empty, or a bar, whose length has no scale here
                continue
            label = Line(first, "bold") if pair else Line(f"  {heading:<{indent}}", "dim")
            margin = _GAP if pair else 2 * _GAP
            yield from _labeled(console, width, label, cell, margin)


def _labeled(console: Console, width: int, label: Line, cell: str, margin: int) -> RenderResult:
    """Yields a label and its cell on one line, or the cell below the label where it is too long."""
    if label.cell_len + _GAP + cell_len(cell) <= width:
        yield Line.assemble(label, " " * _GAP, cell)
        return
    if label.plain.strip():
        yield Line(label.plain.rstrip(), label.style, overflow="fold")
    for line in Line(cell).wrap(console, width - margin):
        yield Line.assemble(" " * margin, line)


def print_table(console: Console, block: Table) -> None:
    """Prints a table."""
    table = block.without("page")
    rows = table.rows[: block.printed]
    headings = [column.heading for column in table.columns]
    units = [column.unit for column in table.columns]
    console.print(_Rows(headings, units, rows, block.tones))
    more = len(block.rows) - len(rows)
    _print(console, f"... and {more} more" if more else "", "dim")


def _figures(console: Console, block: Figures) -> None:
    rows = [(item.label, item.value, item.detail) for item in block.items]
    console.print(_Rows([""] * 3, ["text"] * 3, rows, [item.tone for item in block.items]))


def _bars(console: Console, block: Bars) -> None:
    """Prints one bar of each value of the row that holds all others,
    or a table of several independent rows."""
    if block.legend_row is None and len(block.rows) > 1:
        _print_bar_table(console, block)
        return
    whole = block.rows[block.legend_row or 0]
    longest = max(whole.values, default=0.0) or 1.0
    rows: list[list[Cell]] = []
    for name, value in zip(block.names, whole.values, strict=True):
        if value:
            rows.append([name, value, _bar(value / longest)])
    console.print(_Rows(["", block.unit, ""], ["text", block.unit, "text"], rows))
    others = []
    for row in block.rows:
        if row is not whole:
            others.append(f"{row.label} {format_cell(sum(row.values), block.unit)}")
    _print(console, ", ".join(others), "dim")


def _print_bar_table(console: Console, block: Bars) -> None:
    rows: list[list[Cell]] = [[row.label, *row.values] for row in block.rows]
    units: list[Unit] = ["text", *[block.unit] * len(block.names)]
    console.print(_Rows(["", *block.names], units, rows))


def _bar(fraction: float) -> str:
    """Returns a bar of a fraction of the longest.

    Less than an eighth of a character has no bar, so that 5 bytes do not look like 5 MiB.
    """
    characters = fraction * _BAR
    if 8 * characters < 1:
        return ""
    return "█" * max(1, round(characters))


def _findings(console: Console, block: Findings) -> None:
    for finding in block.items[: block.printed]:
        where = f" at {finding.line}" if finding.line else ""
        size = f" ({finding.size})" if finding.size else ""
        console.print(
            f"[bold yellow]{escape(finding.name)}[/] {escape(finding.subject + where + size)}"
        )
        _print(console, f"  because: {finding.reason}" if finding.reason else "")
        _print(console, f"  fix:     {finding.fix}" if finding.fix else "")
    more = len(block.items) - block.printed
    _print(console, f"... and {more} more (--json has all)" if more > 0 else "", "dim")


def _inspector(console: Console, block: Inspector) -> None:
    """Prints the facts and bars of the first selection;
    of two keys, side by side with their differences."""
    items = [block.items[key] for key in block.first.split("~") if key in block.items]
    if not items:
        return
    for item in items:
        _print(console, f"{item.title}: {item.text}" if item.text else item.title)
    rows = _fact_rows(block, items)
    for number, bars in enumerate(block.bars):
        rows += _part_rows(bars, [item.values[number] for item in items])
    headings = ["", "value", ""]
    if len(items) > 1:
        headings = ["", *[item.title for item in items], "difference"]
    console.print(_Rows(headings, ["text"] * len(headings), rows))


def _fact_rows(block: Inspector, items: Sequence[Item]) -> list[list[Cell]]:
    """Returns a row for each fact that one of the items has, and the difference of two."""
    rows: list[list[Cell]] = []
    for i, column in enumerate(block.columns):
        facts = [item.facts[i] for item in items]
        if any(fact not in ("", None) for fact in facts):
            texts = [format_cell(fact, column.unit) for fact in facts]
            rows.append([column.heading, *texts, _difference(column.unit, facts)])
    return rows


def _part_rows(bars: Bars, values: Sequence[Sequence[float]]) -> list[list[Cell]]:
    """Returns a heading, and a row for each part of more than half a percent of one of the bars.

    values: of the parts, for each of the items.
    """
    rows: list[list[Cell]] = [[bars.title, *[""] * len(values), ""]]
    totals = [sum(parts) or 1.0 for parts in values]
    for i, name in enumerate(bars.names):
        sizes = [parts[i] for parts in values]
        fractions = [size / total for size, total in zip(sizes, totals, strict=True)]
        if max(fractions) <= 0.005:
            continue
        texts = []
        for size, fraction in zip(sizes, fractions, strict=True):
            texts.append(f"{format_cell(size, bars.unit)} ({fraction:.0%})")
        rows.append([f"  {name}", *texts, _difference(bars.unit, sizes)])
    return rows


def _difference(unit: Unit, values: Sequence[Cell]) -> str:
    numbers = [n for n in values if isinstance(n, int | float)]
    if len(numbers) != 2 or numbers[0] == numbers[1]:
        return ""
    text = format_cell(numbers[1] - numbers[0], unit)
    return text if text.startswith("-") else f"+{text}"


def _text(console: Console, block: Text) -> None:
    _print(console, "\n".join(block.paragraphs), _STYLES[block.tone])


def _facts(console: Console, block: Facts) -> None:
    console.print(_Rows(["", ""], ["text", "text"], block.rows))


def _code(console: Console, block: Code) -> None:
    _print(console, block.text.rstrip())


_PRINTERS: Mapping[type[Block], Callable[[Console, Any], None]] = {
    Text: _text,
    Figures: _figures,
    Facts: _facts,
    Code: _code,
    Table: print_table,
    Bars: _bars,
    Findings: _findings,
    Inspector: _inspector,
}
