"""Pictures as SVG and on a terminal: panels of coloured boxes, with the devices of every box as a tooltip."""

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import Any

from rich.text import Text

from meshwright.views.colours import block_colour, format_devices, ink_on

MAX_ROWS, _MAX_COLUMNS, _MAX_PANELS = 16, 16, 8
"""Rows, columns and panels that a terminal shows; the others are counted."""
WIDTH = 100
"""Characters in a row of a terminal."""
_CHARACTER = 0.62
"""Width of a monospaced character over its size."""
_INK = "fill:currentColor"


@dataclasses.dataclass(frozen=True)
class Box:
    """One box of a panel."""

    row: int
    column: int
    devices: tuple[int, ...]
    number: int
    """Number of its colour: boxes with equal contents have the same."""
    tip: str
    """Text that an SVG shows on hovering."""
    text: str = ""
    """Label; empty for the devices."""

    def label(self, width: int) -> str:
        """Returns the label in at most about `width` characters."""
        return self.text or format_devices(self.devices, width)


@dataclasses.dataclass(frozen=True)
class Panel:
    """Grid of boxes."""

    caption: str
    rows: int
    columns: int
    cells: tuple[Box, ...]
    width: float
    """Pixels of the SVG."""
    height: float
    gap: float = 0.0
    """Pixels between boxes."""
    down: str = ""
    """Name of the rows."""
    across: str = ""


class Picture:
    """Picture that renders itself in a notebook, prints as text, and returns itself as SVG."""

    title: str

    @property
    def lines(self) -> Sequence[str]:
        """Lines below the title."""
        return ()

    panels: Sequence[Panel]

    def svg(self) -> str:
        """Returns the picture as SVG."""
        canvas = Canvas(self.title, self.lines)
        left = 24.0 if any(panel.down for panel in self.panels) else 8.0
        x, y, tallest = left, canvas.height + 24.0, 0.0
        for panel in self.panels:
            if x + panel.width > 860 and x > left:
                x, y, tallest = left, y + tallest + 36, 0.0
            self._draw(canvas, panel, x, y)
            x, tallest = x + panel.width + 24, max(tallest, panel.height)
        return canvas.render()

    @staticmethod
    def _draw(canvas: "Canvas", panel: Panel, x: float, y: float) -> None:
        across = f"{panel.across} →" if panel.across else ""
        caption = "   ".join(text for text in (across, panel.caption) if text)
        if caption:
            canvas.text(x, y - 4, caption, 11)
        if panel.down:
            canvas.shapes.append(
                f'<text x="{x - 8:.1f}" y="{y:.1f}" font-size="11" style="{_INK}" text-anchor="end" '
                f'transform="rotate(-90 {x - 8:.1f} {y:.1f})">{escape("← " + panel.down)}</text>'
            )
        w, h = panel.width / panel.columns, panel.height / panel.rows
        for box in panel.cells:
            place = (x + box.column * w, y + box.row * h, w - panel.gap, h - panel.gap)
            canvas.box(*place, block_colour(box.number), box.label(max(1, int(w / 7.5))), box.tip)

    def text(self) -> Text:
        """Returns the picture for a terminal: boxes, coloured where the terminal has colours."""
        text = Text(f"{self.title}\n", style="bold")
        for line in self.lines:
            text.append(f"{line}\n", style="not bold")
        first = next(iter(self.panels), None)
        if first is not None and first.across and (first.down or len(self.panels) > 1):
            rows = f"rows {first.down}, " if first.down else ""
            text.append(f"{rows}columns {first.across}\n", style="dim not bold")
        for panel in self.panels[:_MAX_PANELS]:
            if panel.caption:
                text.append(f"{panel.caption}\n", style="dim not bold")
            text.append_text(_grid(panel))
        if len(self.panels) > _MAX_PANELS:
            text.append(f"... and {len(self.panels) - _MAX_PANELS} more panels\n", style="dim not bold")
        return text

    def _repr_html_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return self.text().plain

    def __rich__(self) -> Any:
        return self.text()


def filled(colour: str) -> str:
    """Returns the terminal style of a box: ink that is readable on its colour."""
    return f"{ink_on(colour)} on {colour}"


def _grid(panel: Panel) -> Text:
    rows, columns = min(panel.rows, MAX_ROWS), min(panel.columns, _MAX_COLUMNS)
    cells = {(box.row, box.column): box for box in panel.cells if box.row < rows and box.column < columns}
    labels = {place: box.label(max(4, min(24, WIDTH // columns - 1))) for place, box in cells.items()}
    width = max(map(len, labels.values())) + 2

    def line(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for _ in range(columns)) + right + "\n"

    text = Text(line("┌", "┬", "┐"))
    for row in range(rows):
        for column in range(columns):
            text.append("│")
            box = cells.get((row, column))
            style = "" if box is None else filled(block_colour(box.number))
            text.append(labels.get((row, column), "").center(width), style=style)
        text.append("│ ...\n" if panel.columns > columns else "│\n")
        text.append(line("├", "┼", "┤") if row < rows - 1 else line("└", "┴", "┘"))
    if panel.rows > rows:
        text.append(f"... and {panel.rows - rows} more rows\n", style="dim")
    return text


class Canvas:
    """SVG drawing of shapes at absolute positions, self-contained and readable in dark mode; it grows with them."""

    def __init__(self, title: str, lines: Sequence[str] = ()):
        self.shapes: list[str] = []
        self.width = self.height = 0.0
        self._title = title
        self.text(4, 14, title, 13)
        for number, line in enumerate(lines):
            self.text(4, 32 + 15 * number, line, 11)

    def text(self, x: float, y: float, text: str, size: float = 12, style: str = _INK, anchor: str = "start") -> None:
        """Writes a line of text."""
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" style="{style}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )
        if anchor == "start":
            self.width = max(self.width, x + len(text) * size * _CHARACTER + 8)
        self.height = max(self.height, y + 6)

    def box(self, x: float, y: float, w: float, h: float, fill: str, label: str, tip: str) -> None:
        """Draws a box with a label that fits, or none."""
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" stroke="#555" '
            f'stroke-width="{0.8 if min(w, h) > 8 else 0.2}"><title>{escape(tip)}</title></rect>'
        )
        size = min(12.0, h * 0.6, w / (max(len(label), 1) * _CHARACTER + 0.6))
        if label and size >= 5:
            ink = f"fill:{ink_on(fill)};pointer-events:none"
            self.text(x + w / 2, y + h / 2 + size * 0.35, label, size, ink, "middle")
        self.width, self.height = max(self.width, x + w + 4), max(self.height, y + h + 4)

    def render(self) -> str:
        """Returns the SVG."""
        w, h = round(self.width + 4), round(self.height + 4)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
            'style="max-width:100%;height:auto;font-family:ui-monospace,Menlo,Consolas,monospace" role="img">'
            f"<title>{escape(self._title)}</title>{''.join(self.shapes)}</svg>"
        )


def standalone(svg: str) -> str:
    """Returns the picture as a file of its own: dark text on light screens, light text in dark mode."""
    style = "<style>svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}</style>"
    return svg.replace("</title>", f"</title>{style}", 1)


@dataclasses.dataclass(frozen=True)
class PictureRow:
    """Pictures side by side in a notebook, one below the other in a terminal."""

    pictures: tuple[Picture, ...]

    def _repr_html_(self) -> str:
        cells = "".join(f"<div>{picture.svg()}</div>" for picture in self.pictures)
        return f'<div style="display:flex;flex-wrap:wrap;gap:1.2rem;align-items:flex-start">{cells}</div>'

    def __str__(self) -> str:
        return "\n".join(str(picture) for picture in self.pictures)


def side_by_side(*pictures: Any) -> PictureRow:
    """Returns a row of pictures, for the last line of a notebook's cell: `side_by_side(draw(x), draw(y))`."""
    return PictureRow(pictures)
