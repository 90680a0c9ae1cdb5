"""Pictures in a terminal: boxes, coloured where the terminal has colours."""

from collections.abc import Mapping

import numpy as np
from rich.text import Text

from meshwright.views.draw.blocks import ArrayPicture, LocalPicture
from meshwright.views.draw.colours import block_colour, format_devices, ink_on
from meshwright.views.draw.machine import MachinePicture
from meshwright.views.draw.panels import BlockPanel, panels_of
from meshwright.views.draw.timeline import PipelineTimeline, fill, task_legend

_MAX_ROWS, _MAX_COLUMNS, _MAX_PANELS = 16, 16, 8
"""Rows, columns and panels that are drawn; the others are counted."""
_WIDTH = 100
"""Characters in a row of panels."""


def array_text(picture: ArrayPicture) -> Text:
    """Returns the title, then each panel as a grid of boxes with the devices of every block."""
    text = Text(picture.title, style="bold")
    if picture.copies > 1:
        text.append(f"  each block on {picture.copies} devices", style="not bold")
    text.append("\n")
    grid = panels_of(picture)
    down = picture.dims[grid.down] if grid.down is not None else ""
    across = picture.dims[grid.across] if grid.across is not None else ""
    legend = f"rows {down}, columns {across}" if down else f"columns {across}" if across else ""
    if len(grid.panels) > 1 or down:
        text.append(f"{legend}\n", style="dim")
    for panel in grid.panels[:_MAX_PANELS]:
        if panel.caption:
            text.append(f"{panel.caption}\n", style="dim")
        text.append_text(_grid(panel))
    if len(grid.panels) > _MAX_PANELS:
        text.append(f"... and {len(grid.panels) - _MAX_PANELS} more panels\n", style="dim")
    return text


def _filled(colour: str) -> str:
    """Returns the style of a box: ink that is readable on its colour."""
    return f"{ink_on(colour)} on {colour}"


def _grid(panel: BlockPanel) -> Text:
    rows, columns = min(panel.rows, _MAX_ROWS), min(panel.columns, _MAX_COLUMNS)
    cells = [c for c in panel.cells if c.row < rows and c.column < columns]
    label_width = max(4, min(24, _WIDTH // columns - 1))
    labels = {(c.row, c.column): format_devices(c.devices, label_width) for c in cells}
    width = max(map(len, labels.values())) + 2
    numbers = {(c.row, c.column): c.number for c in cells}
    more = " ..." if panel.columns > columns else ""

    def line(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for _ in range(columns)) + right + "\n"

    text = Text(line("┌", "┬", "┐"))
    for row in range(rows):
        for column in range(columns):
            text.append("│")
            text.append(labels[row, column].center(width), style=_filled(block_colour(numbers[row, column])))
        text.append(f"│{more}\n")
        text.append(line("├", "┼", "┤") if row < rows - 1 else line("└", "┴", "┘"))
    if panel.rows > rows:
        text.append(f"... and {panel.rows - rows} more rows\n", style="dim")
    return text


def _mesh_grid(mesh: Mapping[str, int]) -> tuple[list[str], list[str], np.ndarray]:
    """Arranges the devices of a mesh: its innermost axis across, all others down."""
    axes = [axis for axis, n in mesh.items() if n > 1]
    down, across = axes[:-1], axes[-1:]
    ids = np.arange(int(np.prod([mesh[a] for a in axes], dtype=np.int64)))
    columns = mesh[across[0]] if across else 1
    return down, across, ids.reshape(-1, columns)


def local_text(picture: LocalPicture) -> Text:
    """Returns the devices of the mesh in rows and columns; equal colours and numbers are equal values."""
    down, across, ids = _mesh_grid(picture.mesh)
    text = Text(picture.title + "\n", style="bold")
    text.append(f"rows {' '.join(down) or '-'}, columns {' '.join(across) or '-'}\n", style="dim")
    values = value_numbers(picture)
    for row in ids[:_MAX_ROWS]:
        for device in row[:_MAX_COLUMNS]:
            value = values[int(device)]
            text.append(f" {device}:{picture.name or 'x'}{value} ", style=_filled(block_colour(value)))
            text.append(" ")
        text.append("\n")
    if len(ids) > _MAX_ROWS:
        text.append(f"... and {len(ids) - _MAX_ROWS} more rows\n", style="dim")
    return text


def value_numbers(picture: LocalPicture) -> list[int]:
    """Returns the number of each device's value; devices with the same number have the same value."""
    axes = [axis for axis, n in picture.mesh.items() if n > 1]
    shape = [picture.mesh[a] for a in axes]
    coordinates = np.indices(shape).reshape(len(shape), -1)
    index = np.zeros(coordinates.shape[1] if shape else 1, np.int64)
    for i, axis in enumerate(axes):
        if axis in picture.varies:
            index = index * shape[i] + coordinates[i]
    return [int(n) for n in index]


def machine_text(picture: MachinePicture) -> Text:
    """Returns each node or plane of the machine as a grid of device indices."""
    text = Text(picture.title + "\n", style="bold")
    for summary in picture.axis_summaries:
        text.append(f"  {summary}\n")
    for panel in picture.panels[:_MAX_PANELS]:
        text.append(f"{panel.caption}\n", style="dim")
        rows: dict[int, list[tuple[int, int]]] = {}
        for cell in panel.cells:
            rows.setdefault(cell.row, []).append((cell.column, cell.device))
        for row in sorted(rows)[:_MAX_ROWS]:
            for _, device in sorted(rows[row])[:_MAX_COLUMNS]:
                text.append(f"{device:^5}", style=_filled(block_colour(picture.groups[device])))
            text.append("\n")
    if len(picture.panels) > _MAX_PANELS:
        text.append(f"... and {len(picture.panels) - _MAX_PANELS} more\n", style="dim")
    return text


def timeline_text(picture: PipelineTimeline) -> Text:
    """Returns lines for each stage with a column for each tick, and below them the number of live inputs."""
    table = picture.table
    cells = [(t, s) for t in range(table.ticks) for s in range(table.stages)]
    width = max(len(picture.label(task)) for cell in cells for task in table.tasks(*cell)) + 1
    shown = min(table.ticks, max(8, (_WIDTH - 12) // width))
    text = Text(picture.title + "\n", style="bold")
    text.append(f"{picture.summary}\n")
    for s in range(min(table.stages, _MAX_ROWS)):
        for row, place in enumerate(picture.places):
            text.append(f"stage {s:<3} " if row == 0 else " " * 10)
            for task in (picture.task(t, s, place) for t in range(shown)):
                if task is None:
                    text.append("·".rjust(width), style="dim")
                else:
                    text.append(picture.label(task).rjust(width), style=_filled(fill(task)))
            text.append("\n" if shown == table.ticks else " ...\n")
        live = "".join((str(n) if n else "").rjust(width) for n in table.live_inputs[:shown, s])
        text.append(f"{'live':>9} {live}\n", style="dim")
    if table.stages > _MAX_ROWS:
        text.append(f"... and {table.stages - _MAX_ROWS} more stages\n", style="dim")
    if shown < table.ticks:
        text.append(f"... and {table.ticks - shown} more ticks\n", style="dim")
    text.append(f"{', '.join(task_legend(table))}; live: inputs that a stage holds\n", style="dim")
    return text
