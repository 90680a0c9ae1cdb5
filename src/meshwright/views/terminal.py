"""The blocks of a report on a terminal: tables without lines, bars as text; charts and drawings are on pages only."""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
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
    """Prints a section: its heading, its note, and the blocks that a terminal can show; nothing if there are none."""
    visible = [block for block in blocks if block.where != "page"]
    flat = [b for block in visible for b in (block.blocks if isinstance(block, Grid) else (block,))]
    shown = [block for block in flat if block.where != "page" and type(block) in _PRINTERS]
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


def text_of(*blocks: Block) -> str:
    """Returns blocks as plain text, 120 columns wide."""
    console = Console(width=120, color_system=None, highlight=False, force_jupyter=False)
    with console.capture() as capture:
        print_blocks(console, "", "", blocks)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def _print(console: Console, text: str, style: str = "") -> None:
    if text:
        console.print(text, style=style, markup=False, highlight=False)


@dataclasses.dataclass
class _Rows:
    """Table without lines and without its empty columns, for a terminal of any width.

    A terminal too narrow for the words, layouts and numbers of its columns side by side has them below each other.
    """

    headings: Sequence[str]
    units: Sequence[Unit]
    rows: Sequence[Sequence[Cell]]
    tones: Sequence[Tone] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, least, natural = [], [], []
        for i, (heading, unit) in enumerate(zip(self.headings, self.units, strict=True)):
            cells = [format_cell(row[i], unit) for row in self.rows]
            if any(cells):
                columns.append((heading, unit != "text", cells))
                unbroken = unit != "text" or any(map(_LAYOUT.search, cells))
                words = [
                    *heading.split(),
                    *(cells if unbroken else (word for cell in cells for word in cell.split())),
                ]
                least.append(max(map(cell_len, words)))
                natural.append(
                    max(least[-1], *(cell_len(line) for cell in cells for line in cell.split("\n")))
                )
        room = options.max_width - _GAP * (len(columns) - 1)
        rest, wanted = room - sum(least), sum(natural) - sum(least)
        if rest < 0:
            yield from self._stacked(console, options.max_width, *zip(*columns, strict=True))
        if rest < 0 or not columns:
            return
        full = [
            max(n, cell_len(heading)) for n, (heading, _, _) in zip(natural, columns, strict=True)
        ]
        if sum(full) <= room:  # else headings are broken between words
            widths = full
        elif wanted <= rest:
            widths = natural
        else:
            widths = [
                low + rest * (n - low) // wanted for low, n in zip(least, natural, strict=True)
            ]
        table = RichTable(
            box=None, pad_edge=False, header_style="dim", show_header=any(self.headings)
        )
        for (heading, number, _), width in zip(columns, widths, strict=True):
            title = escape("\n".join(textwrap.wrap(heading, width)))
            table.add_column(
                title, justify="right" if number else "left", width=width, overflow="fold"
            )
        for i in range(len(self.rows)):
            style = _STYLES[self.tones[i]] if i < len(self.tones) else ""
            table.add_row(*(Line(cells[i]) for _, _, cells in columns), style=style)
        for segments in console.render_lines(table, options, pad=False):
            line = Line.assemble(*((segment.text, segment.style or "") for segment in segments))
            line.rstrip()  # no spaces behind the last column
            yield line

    @staticmethod
    def _stacked(
        console: Console,
        width: int,
        headings: Sequence[str],
        _: Sequence[bool],
        columns: Sequence[Sequence[str]],
    ) -> RenderResult:
        """Yields the first cell of each row, then the others with their headings; of a pair both cells on a line."""
        pair = headings[1:] in (("",), ("value",))
        indent = min(max(map(cell_len, headings[1:]), default=0), width // 2)
        for first, *others in zip(*columns, strict=True):
            if not pair:
                yield Line(first, style="bold", overflow="fold")
            for heading, cell in zip(headings[1:], others, strict=True):
                if not cell.strip(" █"):  # empty, or a bar, whose length has no scale here
                    continue
                label = Line(first, "bold") if pair else Line(f"  {heading:<{indent}}", "dim")
                if label.cell_len + _GAP + cell_len(cell) <= width:
                    yield Line.assemble(label, " " * _GAP, cell)
                    continue
                if label.plain.strip():
                    yield Line(label.plain.rstrip(), label.style, overflow="fold")
                left = _GAP if pair else 2 * _GAP
                yield from (
                    Line.assemble(" " * left, line)
                    for line in Line(cell).wrap(console, width - left)
                )


def print_table(console: Console, block: Table) -> None:
    """Prints a table."""
    table = block.without("page")
    rows = table.rows[: block.printed]
    console.print(
        _Rows(
            [c.heading for c in table.columns], [c.unit for c in table.columns], rows, block.tones
        )
    )
    left = len(block.rows) - len(rows)
    _print(console, f"... and {left} more" if left else "", "dim")


def _figures(console: Console, block: Figures) -> None:
    rows = [(item.label, item.value, item.detail) for item in block.items]
    console.print(_Rows([""] * 3, ["text"] * 3, rows, [item.tone for item in block.items]))


def _bars(console: Console, block: Bars) -> None:
    """Prints one bar of each value of the row that holds all others, or a table of several independent rows."""
    if block.legend_row is None and len(block.rows) > 1:
        rows: list[list[Cell]] = [[row.label, *row.values] for row in block.rows]
        console.print(_Rows(["", *block.names], ["text", *[block.unit] * len(block.names)], rows))
        return
    whole = block.rows[block.legend_row or 0]
    total = max(whole.values, default=0.0) or 1.0
    # A value of less than an eighth of a character has no bar, so that 5 bytes do not look like 5 MiB.
    bars = [
        "█" * max(1, round(n / total * _BAR)) if 8 * n / total * _BAR >= 1 else ""
        for n in whole.values
    ]
    values = [row for row in zip(block.names, whole.values, bars, strict=True) if row[1]]
    console.print(_Rows(["", block.unit, ""], ["text", block.unit, "text"], values))
    others = [
        f"{row.label} {format_cell(sum(row.values), block.unit)}"
        for row in block.rows
        if row is not whole
    ]
    _print(console, ", ".join(others), "dim")


def _findings(console: Console, block: Findings) -> None:
    for finding in block.items[: block.printed]:
        where = f" at {finding.line}" if finding.line else ""
        size = f" ({finding.size})" if finding.size else ""
        console.print(
            f"[bold yellow]{escape(finding.name)}[/] {escape(finding.subject + where + size)}"
        )
        _print(console, f"  because: {finding.reason}" if finding.reason else "")
        _print(console, f"  fix:     {finding.fix}" if finding.fix else "")
    left = len(block.items) - block.printed
    _print(console, f"... and {left} more (--json has all)" if left > 0 else "", "dim")


def _inspector(console: Console, block: Inspector) -> None:
    """Prints the facts and bars of the first selection; of two keys, side by side with their differences."""
    items = [block.items[key] for key in block.first.split("~") if key in block.items]
    for item in items:
        _print(console, f"{item.title}: {item.text}" if item.text else item.title)
    rows: list[list[Cell]] = []
    for i, column in enumerate(block.columns):
        facts = [item.facts[i] for item in items]
        if any(fact not in ("", None) for fact in facts):
            texts = [format_cell(fact, column.unit) for fact in facts]
            rows.append([column.heading, *texts, _difference(column.unit, facts)])
    for number, bars in enumerate(block.bars):
        rows.append([bars.title, *[""] * len(items), ""])
        totals = [sum(item.values[number]) or 1.0 for item in items]
        for i, name in enumerate(bars.names):
            values = [item.values[number][i] for item in items]
            parts = [n / total for n, total in zip(values, totals, strict=True)]
            if max(parts, default=0.0) > 0.005:
                texts = [
                    f"{format_cell(n, bars.unit)} ({part:.0%})"
                    for n, part in zip(values, parts, strict=True)
                ]
                rows.append([f"  {name}", *texts, _difference(bars.unit, values)])
    headings = (
        ["", *(item.title for item in items), "difference"] if len(items) > 1 else ["", "value", ""]
    )
    if items:
        console.print(_Rows(headings, ["text"] * len(headings), rows))


def _difference(unit: Unit, values: Sequence[Cell]) -> str:
    numbers = [n for n in values if isinstance(n, int | float)]
    if len(numbers) != 2 or numbers[0] == numbers[1]:
        return ""
    text = format_cell(numbers[1] - numbers[0], unit)
    return text if text.startswith("-") else f"+{text}"


_PRINTERS: Mapping[type[Block], Callable[[Console, Any], None]] = {
    Text: lambda console, block: _print(console, "\n".join(block.paragraphs), _STYLES[block.tone]),
    Figures: _figures,
    Facts: lambda console, block: console.print(_Rows(["", ""], ["text", "text"], block.rows)),
    Code: lambda console, block: _print(console, block.text.rstrip()),
    Table: print_table,
    Bars: _bars,
    Findings: _findings,
    Inspector: _inspector,
}
