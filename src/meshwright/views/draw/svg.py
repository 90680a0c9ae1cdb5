"""Pictures as SVG: self-contained, readable in dark mode, with the devices of every block as a tooltip."""

from html import escape

import numpy as np

from meshwright.sharding.schedule_table import PLACE, TASK_NAMES, ScheduleTable
from meshwright.views.draw.blocks import ArrayPicture, LocalPicture
from meshwright.views.draw.colours import block_colour, format_devices, ink_on, task_colour
from meshwright.views.draw.machine import MachinePicture
from meshwright.views.draw.panels import BlockPanel, BlockPanels, panels_of
from meshwright.views.draw.timeline import PipelineTimeline, fill

_FONT = "font-family:ui-monospace,Menlo,Consolas,monospace"
_TEXT = "fill:currentColor"
_CHARACTER = 0.62
"""Width of a monospaced character over its size."""


class _Drawing:
    """Shapes at absolute positions; the drawing grows with them."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.width = self.height = 0.0

    def text(self, x: float, y: float, text: str, size: float = 12, style: str = _TEXT, anchor: str = "start") -> None:
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" style="{style}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )
        if anchor == "start":
            self.width = max(self.width, x + len(text) * size * _CHARACTER + 8)
        self.height = max(self.height, y + 6)

    def box(self, x: float, y: float, w: float, h: float, fill: str, label: str, tip: str) -> None:
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" stroke="#555" '
            f'stroke-width="{0.8 if min(w, h) > 8 else 0.2}"><title>{escape(tip)}</title></rect>'
        )
        size = min(12.0, h * 0.6, w / (max(len(label), 1) * _CHARACTER + 0.6))
        if label and size >= 5:
            self.text(
                x + w / 2, y + h / 2 + size * 0.35, label, size, f"fill:{ink_on(fill)};pointer-events:none", "middle"
            )
        self.width, self.height = max(self.width, x + w + 4), max(self.height, y + h + 4)

    def render(self, title: str) -> str:
        w, h = round(self.width + 4), round(self.height + 4)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
            f'style="max-width:100%;height:auto;{_FONT}" role="img"><title>{escape(title)}</title>'
            + "".join(self.shapes)
            + "</svg>"
        )


def standalone(svg: str) -> str:
    """Returns the picture as a file of its own: dark text on light screens, light text in dark mode."""
    style = "<style>svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}</style>"
    return svg.replace("</title>", f"</title>{style}", 1)


def array_svg(picture: ArrayPicture) -> str:
    """Draws the panels of an array side by side, the blocks in the proportions of the array."""
    drawing = _Drawing()
    drawing.text(4, 14, picture.title, 13)
    if picture.copies > 1:
        drawing.text(4, 30, f"each block on {picture.copies} devices", 11)
    grid = panels_of(picture)
    x, y, tallest = 24.0, 62.0 if picture.copies > 1 else 46.0, 0.0
    for panel in grid.panels:
        w, h = _panel_size(picture, grid, panel)
        _draw_panel(drawing, picture, grid, panel, (x, y, w, h))
        tallest = max(tallest, h)
        x += w + 24
        if x > 760:
            x, y, tallest = 24.0, y + tallest + 36, 0.0
    return drawing.render(picture.title)


def _panel_size(picture: ArrayPicture, grid: BlockPanels, panel: BlockPanel) -> tuple[float, float]:
    """Width and height of a panel: the proportions of the array, within what is readable."""
    down, across = (0.0 if dim is None else float(picture.shape[dim]) for dim in (grid.down, grid.across))
    ratio = min(2.5, max(0.4, across / down)) if down and across else 6.0
    width = min(560.0, max(150.0 * min(ratio, 2.0), panel.columns * 26.0))
    height = min(420.0, max(width / ratio, panel.rows * 22.0)) if grid.down is not None else 34.0
    if panel.columns > 24:
        width = max(width, panel.columns * 9.0)
    if panel.rows > 24:
        height = max(height, panel.rows * 7.0)
    return width, height


_Rectangle = tuple[float, float, float, float]
"""Left, top, width and height."""


def _draw_panel(
    drawing: _Drawing, picture: ArrayPicture, grid: BlockPanels, panel: BlockPanel, box: _Rectangle
) -> None:  # fmt: skip
    x, y, width, height = box
    if grid.across is not None:
        caption = f"   {panel.caption}" if panel.caption else ""
        drawing.text(x, y - 4, f"{picture.dims[grid.across]} →{caption}", 11)
    elif panel.caption:
        drawing.text(x, y - 4, panel.caption, 11)
    if grid.down is not None:
        drawing.shapes.append(
            f'<text x="{x - 8:.1f}" y="{y:.1f}" font-size="11" style="{_TEXT}" text-anchor="end" '
            f'transform="rotate(-90 {x - 8:.1f} {y:.1f})">{escape("← " + picture.dims[grid.down])}</text>'
        )
    w, h = width / panel.columns, height / panel.rows
    label_width = max(1, int(w / 7.5))
    for cell in panel.cells:
        tip = f"block {cell.row}, {cell.column}: devices {', '.join(map(str, cell.devices))}"
        label = format_devices(cell.devices, label_width)
        drawing.box(x + cell.column * w, y + cell.row * h, w, h, block_colour(cell.number), label, tip)


def local_svg(picture: LocalPicture) -> str:
    """Draws the devices of the mesh, its innermost axis across; equal colours are equal values."""
    from meshwright.views.draw.terminal import value_numbers  # loads rich

    drawing = _Drawing()
    drawing.text(4, 14, picture.title, 13)
    axes = [axis for axis, n in picture.mesh.items() if n > 1]
    columns = picture.mesh[axes[-1]] if axes else 1
    values = value_numbers(picture)
    rows = np.arange(len(values)).reshape(-1, columns)
    if axes:
        drawing.text(4, 32, f"rows {' '.join(axes[:-1]) or '-'}, columns {axes[-1]}", 11)
    w, h = min(96.0, max(30.0, 640.0 / columns)), 26.0
    for r, row in enumerate(rows):
        for c, device in enumerate(row):
            value = values[int(device)]
            label, tip = f"{device}: {picture.name or 'x'}{value}", f"device {device} holds value {value}"
            drawing.box(8 + c * w, 40 + r * h, w - 3, h - 3, block_colour(value), label, tip)
    return drawing.render(picture.title)


def machine_svg(picture: MachinePicture) -> str:
    """Draws nodes or planes side by side; colours group the devices that communicate along the innermost axis."""
    drawing = _Drawing()
    drawing.text(4, 14, picture.title, 13)
    y = 32.0
    for summary in picture.axis_summaries:
        drawing.text(4, y, summary, 11)
        y += 15
    devices = sum(len(panel.cells) for panel in picture.panels)
    side = 34.0 if devices <= 64 else 24.0 if devices <= 256 else 15.0
    coordinates = np.array(list(np.ndindex(*picture.mesh.values())))
    axes = list(picture.mesh)
    x, y, tallest = 8.0, y + 14, 0.0
    for panel in picture.panels:
        width = (max(cell.column for cell in panel.cells) + 1) * side
        height = (max(cell.row for cell in panel.cells) + 1) * side
        if x + width > 860 and x > 8:
            x, y, tallest = 8.0, y + tallest + 26, 0.0
        drawing.text(x, y, panel.caption, 11)
        for cell in panel.cells:
            along = zip(axes, coordinates[cell.device], strict=True)
            position = ", ".join(f"{axis}={int(i)}" for axis, i in along if picture.mesh[axis] > 1)
            left, top = x + cell.column * side, y + 6 + cell.row * side
            tip = f"device {cell.device}: {position}"
            drawing.box(left, top, side - 2, side - 2, block_colour(picture.groups[cell.device]), str(cell.device), tip)
        tallest = max(tallest, height + 6)
        x += width + 16
    return drawing.render(picture.title)


_TASK_HEIGHT, _LIVE_HEIGHT, _STAGE_LEFT, _STAGE_TOP = 24.0, 22.0, 66.0, 62.0
"""Sizes of a schedule's rows: tasks, live inputs below them, and the margins of the first."""


def timeline_svg(picture: PipelineTimeline) -> str:
    """Draws rows for each stage with a column for each tick; the grey bars below them are its live inputs."""
    table, drawing = picture.table, _Drawing()
    drawing.text(4, 14, picture.title, 13)
    drawing.text(4, 32, picture.summary, 11)
    tick_width = 26.0 if table.ticks <= 48 else max(7.0, 1240.0 / table.ticks)
    tasks_height = _TASK_HEIGHT * len(picture.places)
    row_height = tasks_height + _LIVE_HEIGHT + 6
    for s in range(table.stages):
        y = _STAGE_TOP + s * row_height
        drawing.text(4, y + 16, f"stage {s}", 12)
        for t in range(table.ticks):
            _draw_tick(drawing, picture, (t, s), (_STAGE_LEFT + t * tick_width, y, tick_width))
        right = _STAGE_LEFT + table.ticks * tick_width + 6
        drawing.text(right, y + 16, f"{picture.idle(s)} idle", 11)
        drawing.text(right, y + tasks_height + _LIVE_HEIGHT - 4, f"{int(table.live_inputs[:, s].max())} live", 11)
    _draw_task_legend(drawing, table, _STAGE_TOP + table.stages * row_height + 12)
    return drawing.render(picture.title)


def _draw_tick(
    drawing: _Drawing, picture: PipelineTimeline, position: tuple[int, int], box: tuple[float, float, float]
) -> None:  # fmt: skip
    """Draws the tasks of a stage in a tick and its live inputs. box: left, top and width."""
    (t, s), (x, y, width), table = position, box, picture.table
    live = int(table.live_inputs[t, s])
    for task in table.tasks(t, s):
        virtual_stage = f", virtual stage {task.virtual_stage}" if table.virtual_stages > 1 else ""
        name = TASK_NAMES[task.kind]
        tip = f"tick {t}: {name} of microbatch {task.microbatch}{virtual_stage}; {live} live inputs"
        top = y + _TASK_HEIGHT * picture.places.index(PLACE[task.kind])
        drawing.box(x, top, width, _TASK_HEIGHT, fill(task), picture.label(task), tip)
    if live:
        height = _LIVE_HEIGHT * live / max(1, int(table.live_inputs.max()))
        top = y + _TASK_HEIGHT * len(picture.places) + _LIVE_HEIGHT - height
        drawing.shapes.append(
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="currentColor" '
            f'opacity="0.18"><title>{live} live inputs</title></rect>'
        )


def _draw_task_legend(drawing: _Drawing, table: ScheduleTable, y: float) -> None:
    x = _STAGE_LEFT
    for kind in (kind for kind, count in table.task_counts.items() if count):
        drawing.box(x, y - 11, 14, 14, task_colour(TASK_NAMES[kind], 0), "", TASK_NAMES[kind])
        drawing.text(x + 20, y, TASK_NAMES[kind], 11)
        x += 34 + len(TASK_NAMES[kind]) * 7
    drawing.text(x, y, "grey: live inputs", 11)
