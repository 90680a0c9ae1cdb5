"""Tables without lines for a terminal, as every verb prints them; stacked where the terminal is too narrow."""

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_LAYOUT = re.compile(r"\w[\[{][^\[\]{}]* [^\[\]{}]*[\]}]")
"""Layouts of a tensor with spaces, `w[D/fsdp, F/tensor]`, which are read as one word."""
_BAR = re.compile(r"[\s█▏▎▍▌▋▊▉]*")
"""Cells that are empty, or a bar, whose length has no scale in a stacked row."""
_GAP = 2
"""Columns of the terminal between two columns of a table."""
_VALUES = ([""], ["value"])
"""Headings after the first of a table of names and values, which need not be repeated."""


def plain_table(
    *headings: str, right: Sequence[str] = (), unwrapped: Sequence[str] = (), title: str | None = None
) -> Table:
    """Returns an empty table.

    Where the terminal is too narrow for its words, layouts and numbers, the table is stacked: the first cell of a row
    has a line of its own, and below it each of the others one with its heading.

    right: headings of the columns that are aligned right and never wrapped, numbers mostly. unwrapped: headings of
    further columns that are never wrapped.
    """
    table = _StackingTable(
        box=None, pad_edge=False, header_style="dim", title=title, title_justify="left", title_style="bold"
    )
    for heading in headings:
        justify: JustifyMethod = "right" if heading in right else "left"
        no_wrap = heading in right or heading in unwrapped
        table.add_column(escape(heading), justify=justify, no_wrap=no_wrap, overflow="fold")
    return table


class _StackingTable(Table):
    """Table that is stacked where it does not fit, and never breaks a word, a number or a layout."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in self.columns:
            column.no_wrap = column.no_wrap or any(_LAYOUT.search(text.plain) for text in _texts(column))
        room = options.max_width - _GAP * max(0, len(self.columns) - 1)
        headings = [column.header for column in self.columns]
        if sum(map(_least_width, self.columns)) > room:
            for column in self.columns:
                column.header = str(column.header).replace(" ", "\n")
        fits = sum(map(_least_width, self.columns)) <= room
        if fits:
            for column, width in zip(self.columns, _widths(self.columns, room), strict=True):
                column.width = width
            yield from super().__rich_console__(console, options)
        for column, heading in zip(self.columns, headings, strict=True):
            column.header, column.width = heading, None
        if not fits:
            yield from self._stacked(console, options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)

    def _stacked(self, console: Console, width: int) -> RenderResult:
        """Yields each row as lines: the first cell, then heading and value of the others that are not empty."""
        if self.title:
            yield Text(str(self.title), style="bold")
        headings = [Text.from_markup(str(column.header)).plain for column in self.columns]
        room = min(max(map(cell_len, headings[1:]), default=0), width // 2)
        for cells in zip(*map(_texts, self.columns), strict=True):
            if headings[1:] in _VALUES:
                yield from _pair(console, cells[0], cells[1], width)
                continue
            yield Text(cells[0].plain, style="bold", overflow="fold")
            for heading, cell in zip(headings[1:], cells[1:], strict=True):
                if _BAR.fullmatch(cell.plain):
                    continue
                line = Text(f"  {heading:<{room}}  ", style="dim", end="")
                if line.cell_len + cell.cell_len <= width:
                    yield Text.assemble(line, cell)
                    continue
                if heading:
                    yield Text(f"  {heading}", style="dim")
                yield from (Text.assemble("    ", part) for part in cell.wrap(console, width - 4))


def _pair(console: Console, name: Text, value: Text, width: int) -> RenderResult:
    """Yields a name and its value: on one line where it has the room, else the value below."""
    line = Text.assemble((name.plain, "bold"), " " * _GAP, value)
    if line.cell_len <= width:
        yield line
        return
    yield Text(name.plain, style="bold", overflow="fold")
    yield from (Text.assemble("  ", part) for part in value.wrap(console, width - 2))


def _texts(column: Column) -> list[Text]:
    return [cell if isinstance(cell, Text) else Text.from_markup(str(cell)) for cell in column.cells]


def _heading_lines(column: Column) -> list[str]:
    return Text.from_markup(str(column.header)).plain.split("\n")


def _least_width(column: Column) -> int:
    """Returns the width that a column needs for what may not be broken."""
    texts = [*_heading_lines(column), *(text.plain for text in _texts(column))]
    pieces = texts if column.no_wrap else [word for text in texts for word in text.split()]
    return max(map(cell_len, pieces), default=0)


def _widths(columns: Sequence[Column], room: int) -> list[int]:
    """Returns the width of each column: what it may not break, and its part of the rest by what it would take."""
    least = [_least_width(column) for column in columns]
    whole = [
        max(map(cell_len, [*_heading_lines(c), *(line for t in _texts(c) for line in t.plain.split("\n"))]), default=0)
        for c in columns
    ]
    wanted, rest = [w - n for w, n in zip(whole, least, strict=True)], room - sum(least)
    if sum(wanted) <= rest:
        return whole
    return [n + rest * w // sum(wanted) for n, w in zip(least, wanted, strict=True)]
