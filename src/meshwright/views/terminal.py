"""The blocks of a report on a terminal: tables without lines, bars as text; charts and drawings are on pages only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

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
    Matrix,
    Table,
    Text,
    Tone,
    Unit,
    format_cell,
)
from meshwright.views.plain_table import plain_table

_STYLES: dict[Tone, str] = {"": "", "good": "green", "bad": "bold red", "warning": "bold yellow", "faded": "dim"}
_BAR = 32
"""Characters of the longest bar."""


def print_blocks(console: Console, title: str, note: str, blocks: Sequence[Block]) -> None:
    """Prints a section: its heading, its note, and the blocks that a terminal can show; nothing if there are none."""
    flat = [
        b for block in blocks for b in (block.blocks if isinstance(block, Grid) else (block,)) if block.where != "page"
    ]
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


def text_of(*blocks: Block, width: int = 120) -> str:
    """Returns blocks as plain text."""
    console = Console(width=width, color_system=None, highlight=False, force_jupyter=False)
    with console.capture() as capture:
        print_blocks(console, "", "", blocks)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def _print(console: Console, text: str, style: str = "") -> None:
    if text:
        console.print(text, style=style, markup=False, highlight=False)


def _rows(
    console: Console,
    headings: Sequence[str],
    units: Sequence[Unit],
    rows: Sequence[Sequence[Cell]],
    tones: Sequence[Tone] = (),
) -> None:
    """Prints a table; columns without any value are left out."""
    used = [i for i in range(len(headings)) if any(row[i] not in ("", None) for row in rows)]
    if not used:
        return
    numbers = {i for i in used if units[i] != "text"}
    table = plain_table(*(headings[i] for i in used), right=[headings[i] for i in used if i in numbers])
    table.show_header = any(headings)
    for number, row in enumerate(rows):
        style = _STYLES[tones[number]] if number < len(tones) else ""
        table.add_row(*(escape(format_cell(row[i], units[i])) for i in used), style=style)
    console.print(table)


def _table(console: Console, block: Table) -> None:
    table = block.without("page")
    rows = table.rows[: block.printed]
    _rows(console, [c.heading for c in table.columns], [c.unit for c in table.columns], rows, block.tones)
    left = len(block.rows) - len(rows)
    _print(console, f"... and {left} more" if left else "", "dim")


def _figures(console: Console, block: Figures) -> None:
    rows = [(item.label, item.value, item.detail) for item in block.items]
    _rows(console, ("", "", ""), ("text", "text", "text"), rows, [item.tone for item in block.items])


def _facts(console: Console, block: Facts) -> None:
    _rows(console, ("", ""), ("text", "text"), block.rows)


def _bars(console: Console, block: Bars) -> None:
    """Prints one bar of each value of the row that holds all others, or a table of several independent rows."""
    if block.legend_row is None and len(block.rows) > 1:
        rows: list[list[Cell]] = [[row.label, *row.values] for row in block.rows]
        _rows(console, ["", *block.names], ["text", *[block.unit] * len(block.names)], rows)
        return
    whole = block.rows[block.legend_row or 0]
    total = max(whole.values, default=0.0) or 1.0
    # A value of less than an eighth of a character has no bar, so that 5 bytes do not look like 5 MiB.
    bars = ["█" * max(1, round(n / total * _BAR)) if 8 * n / total * _BAR >= 1 else "" for n in whole.values]
    values = [row for row in zip(block.names, whole.values, bars, strict=True) if row[1]]
    _rows(console, ("", block.unit, ""), ("text", block.unit, "text"), values)
    others = [f"{row.label} {format_cell(sum(row.values), block.unit)}" for row in block.rows if row is not whole]
    _print(console, ", ".join(others), "dim")


def _matrix(console: Console, block: Matrix) -> None:
    rows: list[list[Cell]] = [[name, *values] for name, values in zip(block.rows, block.values, strict=True)]
    _rows(console, ["", *block.columns], ["text", *[block.unit] * len(block.columns)], rows)


def _findings(console: Console, block: Findings) -> None:
    for finding in block.items[: block.printed]:
        where = f" at {finding.line}" if finding.line else ""
        size = f" ({finding.size})" if finding.size else ""
        console.print(f"[bold yellow]{escape(finding.name)}[/] {escape(finding.subject + where + size)}")
        _print(console, f"  because: {finding.reason}" if finding.reason else "")
        _print(console, f"  fix:     {finding.fix}" if finding.fix else "")
    left = len(block.items) - block.printed
    _print(console, f"... and {left} more (--json has all)" if left > 0 else "", "dim")


def _inspector(console: Console, block: Inspector) -> None:
    """Prints the facts and bars of the first selection; of two keys, side by side with their differences."""
    items = [block.items[key] for key in block.first.split("~") if key in block.items]
    if not items:
        return
    for item in items:
        _print(console, f"{item.title}: {item.text}" if item.text else item.title)
    names = [item.title for item in items]
    rows: list[list[Cell]] = [
        [name, *(format_cell(item.facts[i], unit) for item in items), _difference(unit, [x.facts[i] for x in items])]
        for i, (name, unit) in enumerate(zip(block.names, block.units, strict=True))
        if any(item.facts[i] not in ("", None) for item in items)
    ]
    for number, scale in enumerate(block.bars):
        totals = [sum(item.values[number]) for item in items]
        rows.append([scale.title, *[""] * len(items), ""])
        for i, name in enumerate(scale.names):
            values = [item.values[number][i] for item in items]
            if any(n > 0.005 * total for n, total in zip(values, totals, strict=True)):
                texts = [
                    f"{format_cell(n, scale.unit)} ({n / total:.0%})" if total else format_cell(n, scale.unit)
                    for n, total in zip(values, totals, strict=True)
                ]
                rows.append([f"  {name}", *texts, _difference(scale.unit, values)])
    headings = ["", *names, "difference"] if len(items) > 1 else ["", "value", ""]
    _rows(console, headings, ["text"] * len(headings), rows)


def _difference(unit: Unit, values: Sequence[Cell]) -> str:
    numbers = [n for n in values if isinstance(n, int | float)]
    if len(numbers) != 2 or numbers[0] == numbers[1]:
        return ""
    text = format_cell(numbers[1] - numbers[0], unit)
    return text if text.startswith("-") else f"+{text}"


_PRINTERS: Mapping[type[Block], Callable[[Console, Any], None]] = {
    Text: lambda console, block: _print(console, "\n".join(block.paragraphs), _STYLES[block.tone]),
    Figures: _figures,
    Facts: _facts,
    Code: lambda console, block: _print(console, block.text.rstrip()),
    Table: _table,
    Bars: _bars,
    Matrix: _matrix,
    Findings: _findings,
    Inspector: _inspector,
}
