"""Pictures of arrays, meshes, machines and pipeline schedules
from abstract shapes: terminal, SVG, notebooks."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from rich.text import Text

from meshwright.errors import ConfigError
from meshwright.hardware.chips import Torus
from meshwright.hardware.targets import Target
from meshwright.sharding.placement import Placement
from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    IDLE,
    PLACE,
    TASK_NAMES,
    ScheduleTable,
    Task,
)
from meshwright.views.colours import block_colour, ink_on, task_colour
from xlacensus.interconnect import all_coordinates

_MAX_ROWS, _MAX_COLUMNS, _MAX_PANELS = 16, 16, 8
"""Rows, columns and panels that a terminal shows; the others are counted."""
_WIDTH = 100
"""Characters in a row of a terminal."""
_CHARACTER = 0.62
"""Width of a monospaced character over its size."""
_SVG_WIDTH = 860
"""Pixels of an SVG beyond which a panel begins a new row."""
_LABEL_CHARACTER = 7.5
"""Pixels of a box for each character of its label."""


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
    """Panels of coloured boxes that render in a notebook, print as text,
    and are returned as SVG by `svg()`."""

    title: str
    lines: Sequence[str] = ()
    """Lines below the title."""
    panels: Sequence[Panel] = ()

    def svg(self) -> str:
        """Returns the picture as SVG."""
        canvas = _Canvas(self.title, self.lines)
        left = 24.0 if any(panel.down for panel in self.panels) else 8.0
        x = left
        y = canvas.height + 24.0
        tallest = 0.0
        for panel in self.panels:
            if x + panel.width > _SVG_WIDTH and x > left:
                x = left
                y += tallest + 36
                tallest = 0.0
            _draw_panel(canvas, panel, x, y)
            x += panel.width + 24
            tallest = max(tallest, panel.height)
        return canvas.render()

    def text(self) -> Text:
        """Returns the picture for a terminal: boxes, colored where the terminal has colors."""
        text = Text(f"{self.title}\n", style="bold")
        for line in self.lines:
            text.append(f"{line}\n", style="not bold")
        text.append(_names_of_rows_and_columns(self.panels), style="dim not bold")
        for panel in self.panels[:_MAX_PANELS]:
            if panel.caption:
                text.append(f"{panel.caption}\n", style="dim not bold")
            text.append_text(_grid(panel))
        more = len(self.panels) - _MAX_PANELS
        if more > 0:
            text.append(f"... and {more} more panels\n", style="dim not bold")
        return text

    def _repr_html_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return self.text().plain

    def __rich__(self) -> Any:
        return self.text()


@dataclasses.dataclass(frozen=True)
class PanelPicture(Picture):
    """Picture of given panels."""

    title: str
    lines: Sequence[str]
    panels: Sequence[Panel]


def _filled(colour: str) -> str:
    return f"{ink_on(colour)} on {colour}"


def format_devices(devices: tuple[int, ...], width: int) -> str:
    """Formats device indices: `0-3`, `0,4`, `0-14 by 2`.

    A text longer than `width` characters is shortened to the first device
    and the number, `0.. x8`, or to `x8`.
    """
    if not devices:
        return "-"
    step = devices[1] - devices[0] if len(devices) > 1 else 1
    even = all(b - a == step for a, b in itertools.pairwise(devices))
    if len(devices) > 2 and even:
        text = f"{devices[0]}-{devices[-1]}"
        if step > 1:
            text += f" by {step}"
    else:
        text = ",".join(map(str, devices))
    if len(text) <= width:
        return text
    short = f"{devices[0]}.. x{len(devices)}"
    return short if len(short) <= width else f"x{len(devices)}"


def _names_of_rows_and_columns(panels: Sequence[Panel]) -> str:
    """Names the rows and columns of panels in a line;
    one row of one panel names itself in the title."""
    if not panels or not panels[0].across:
        return ""
    first = panels[0]
    if first.down:
        return f"rows {first.down}, columns {first.across}\n"
    return f"columns {first.across}\n" if len(panels) > 1 else ""


def _grid(panel: Panel) -> Text:
    """Returns the boxes of a panel for a terminal, as many as it shows.

    ┌─────┬─────┐
    │ 0,1 │ 2,3 │
    └─────┴─────┘
    """
    rows = min(panel.rows, _MAX_ROWS)
    columns = min(panel.columns, _MAX_COLUMNS)
    room = max(4, min(24, _WIDTH // columns - 1))
    boxes = {}
    labels = {}
    for box in panel.cells:
        if box.row < rows and box.column < columns:
            boxes[box.row, box.column] = box
            labels[box.row, box.column] = box.label(room)
    width = max(map(len, labels.values())) + 2

    text = Text(_rule("┌┬┐", columns, width))
    for row in range(rows):
        for column in range(columns):
            text.append("│")
            filled = boxes.get((row, column))
            style = "" if filled is None else _filled(block_colour(filled.number))
            text.append(labels.get((row, column), "").center(width), style=style)
        text.append("│ ...\n" if panel.columns > columns else "│\n")
        text.append(_rule("├┼┤" if row < rows - 1 else "└┴┘", columns, width))
    if panel.rows > rows:
        text.append(f"... and {panel.rows - rows} more rows\n", style="dim")
    return text


def _rule(corners: str, columns: int, width: int) -> str:
    """Returns a line of a grid. corners: its left, middle and right characters."""
    line = corners[1].join(["─" * width] * columns)
    return f"{corners[0]}{line}{corners[2]}\n"


# Shapes


@dataclasses.dataclass(frozen=True)
class _Label:
    """Text at a point of a drawing."""

    x: float
    y: float
    text: str
    size: float
    style: str = "fill:currentColor"
    anchor: str = "start"

    def svg(self) -> str:
        return (
            f'<text x="{self.x:.1f}" y="{self.y:.1f}" font-size="{self.size:.1f}" '
            f'style="{self.style}" text-anchor="{self.anchor}">{escape(self.text)}</text>'
        )


@dataclasses.dataclass(frozen=True)
class _RotatedLabel:
    """Text that reads upwards and ends at a point."""

    x: float
    y: float
    text: str

    def svg(self) -> str:
        return (
            f'<text x="{self.x:.1f}" y="{self.y:.1f}" font-size="11" '
            'style="fill:currentColor" text-anchor="end" '
            f'transform="rotate(-90 {self.x:.1f} {self.y:.1f})">{escape(self.text)}</text>'
        )


@dataclasses.dataclass(frozen=True)
class _DrawnBox:
    """Filled rectangle with a label, where one fits."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    label: str
    tip: str
    group: int = -1
    """Number of what a page shows together, such as a microbatch; -1 for none."""

    def svg(self) -> str:
        stroke = 0.8 if min(self.width, self.height) > 8 else 0.2
        rectangle = (
            f'<rect x="{self.x:.1f}" y="{self.y:.1f}" '
            f'width="{self.width:.1f}" height="{self.height:.1f}" fill="{self.fill}" '
            f'stroke="#555" stroke-width="{stroke}"><title>{escape(self.tip)}</title></rect>'
        )
        characters = max(len(self.label), 1)
        size = min(12.0, self.height * 0.6, self.width / (characters * _CHARACTER + 0.6))
        if not self.label or size < 5:
            return rectangle
        x = self.x + self.width / 2
        y = self.y + self.height / 2 + size * 0.35
        ink = f"fill:{ink_on(self.fill)};pointer-events:none"
        return rectangle + _Label(x, y, self.label, size, ink, "middle").svg()


@dataclasses.dataclass(frozen=True)
class _DrawnBar:
    """Translucent bar in the color of the text."""

    x: float
    y: float
    width: float
    height: float
    tip: str

    def svg(self) -> str:
        return (
            f'<rect x="{self.x:.1f}" y="{self.y:.1f}" '
            f'width="{self.width:.1f}" height="{self.height:.1f}" '
            f'fill="currentColor" opacity="0.18"><title>{escape(self.tip)}</title></rect>'
        )


class _Canvas:
    """Shapes at absolute positions; it grows with them.

    As SVG they are self-contained and readable in dark mode.
    """

    def __init__(self, title: str, lines: Sequence[str]):
        self.shapes: list[_Label | _RotatedLabel | _DrawnBox | _DrawnBar] = []
        self.width = 0.0
        self.height = 0.0
        self._title = title
        self.text(4, 14, title, 13)
        for number, line in enumerate(lines):
            self.text(4, 32 + 15 * number, line, 11)

    def text(self, x: float, y: float, text: str, size: float) -> None:
        self.shapes.append(_Label(x, y, text, size))
        self.width = max(self.width, x + len(text) * size * _CHARACTER + 8)
        self.height = max(self.height, y + 6)

    def box(self, box: _DrawnBox) -> None:
        self.shapes.append(box)
        self.width = max(self.width, box.x + box.width + 4)
        self.height = max(self.height, box.y + box.height + 4)

    def render(self) -> str:
        width = round(self.width + 4)
        height = round(self.height + 4)
        shapes = "".join(shape.svg() for shape in self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" style="max-width:100%;height:auto;'
            'font-family:ui-monospace,Menlo,Consolas,monospace" role="img">'
            f"<title>{escape(self._title)}</title>{shapes}</svg>"
        )


def _draw_panel(canvas: _Canvas, panel: Panel, x: float, y: float) -> None:
    """Draws a panel with its corner at (x, y), and the names of its rows and columns outside."""
    across = f"{panel.across} →" if panel.across else ""
    caption = "   ".join(text for text in (across, panel.caption) if text)
    if caption:
        canvas.text(x, y - 4, caption, 11)
    if panel.down:
        canvas.shapes.append(_RotatedLabel(x - 8, y, f"← {panel.down}"))
    width = panel.width / panel.columns
    height = panel.height / panel.rows
    characters = max(1, int(width / _LABEL_CHARACTER))
    for box in panel.cells:
        drawn = _DrawnBox(
            x + box.column * width,
            y + box.row * height,
            width - panel.gap,
            height - panel.gap,
            block_colour(box.number),
            box.label(characters),
            box.tip,
        )
        canvas.box(drawn)


def standalone(svg: str) -> str:
    """Returns the picture as a file of its own: dark text on light screens, light text
    in dark mode."""
    style = "<style>svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}</style>"
    return svg.replace("</title>", f"</title>{style}", 1)


@dataclasses.dataclass(frozen=True)
class PictureRow:
    """Pictures side by side in a notebook, one below the other in a terminal."""

    pictures: tuple[Picture, ...]

    def _repr_html_(self) -> str:
        cells = "".join(f"<div>{picture.svg()}</div>" for picture in self.pictures)
        style = "display:flex;flex-wrap:wrap;gap:1.2rem;align-items:flex-start"
        return f'<div style="{style}">{cells}</div>'

    def __str__(self) -> str:
        return "\n".join(str(picture) for picture in self.pictures)


def side_by_side(*pictures: Any) -> PictureRow:
    """Returns a row of pictures, for the last line of a notebook's cell:
    `side_by_side(draw(x), draw(y))`."""
    return PictureRow(pictures)


# Arrays


@dataclasses.dataclass(frozen=True)
class ArrayPicture(Picture):
    """Array cut into blocks, each on one or several devices."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    """Name of each dimension with the mesh axes that split it: `D/fsdp`."""
    cuts: tuple[tuple[int, ...], ...]
    """Boundaries of the blocks in each dimension, from 0 to the size of the dimension."""
    holders: Mapping[tuple[int, ...], tuple[int, ...]]
    """Index of a block in each dimension -> devices that hold it, by their index in the mesh."""

    @property
    def copies(self) -> int:
        """Largest number of devices that hold the same block."""
        return max((len(devices) for devices in self.holders.values()), default=1)

    @property
    def title(self) -> str:  # type: ignore[override]
        """Layout and shape: `w[D/fsdp, F/tensor]  4096 x 14336`."""
        shape = " x ".join(map(str, self.shape)) or "scalar"
        return f"{self.name}[{', '.join(self.dims)}]  {shape}"

    @property
    def lines(self) -> Sequence[str]:  # type: ignore[override]
        """Number of copies, if there are several."""
        return (f"each block on {self.copies} devices",) if self.copies > 1 else ()

    @property
    def _blocks(self) -> list[int]:
        """Number of blocks along each dimension."""
        return [len(cuts) - 1 for cuts in self.cuts]

    @property
    def panels(self) -> tuple[Panel, ...]:  # type: ignore[override]
        """Blocks in rows and columns, the two dimensions with most blocks.

        There is a panel for each index of the other dimensions.
        """
        blocks = self._blocks
        down, across = self._rows_and_columns()
        rows = 1 if down is None else blocks[down]
        columns = 1 if across is None else blocks[across]
        width, height = self._panel_size(down, across)
        others = [dim for dim in range(len(blocks)) if dim not in (down, across)]
        numbers = {key: number for number, key in enumerate(sorted(self.holders))}
        panels = []
        for index in itertools.product(*[range(blocks[dim]) for dim in others]):
            fixed = dict(zip(others, index, strict=True))
            boxes = []
            for row, column in itertools.product(range(rows), range(columns)):
                position = dict(fixed)
                if down is not None:
                    position[down] = row
                if across is not None:
                    position[across] = column
                key = tuple(position[dim] for dim in range(len(blocks)))
                devices = self.holders.get(key, ())
                tip = f"block {row}, {column}: devices {', '.join(map(str, devices))}"
                boxes.append(Box(row, column, devices, numbers.get(key, 0), tip))
            panel = Panel(
                self._caption(fixed),
                rows,
                columns,
                tuple(boxes),
                width,
                height,
                down="" if down is None else self.dims[down],
                across="" if across is None else self.dims[across],
            )
            panels.append(panel)
        return tuple(panels)

    def _rows_and_columns(self) -> tuple[int | None, int | None]:
        """Returns the dimensions of the rows and of the columns: the two with most blocks,
        in their order.

        Of dimensions with equally many blocks the last are taken. One dimension is in columns.
        """
        blocks = self._blocks
        by_blocks = sorted(range(len(blocks)), key=lambda dim: (-blocks[dim], -dim))
        shown = sorted(by_blocks[:2])
        if not shown:
            return None, None
        return (shown[0] if len(shown) > 1 else None), shown[-1]

    def _panel_size(self, down: int | None, across: int | None) -> tuple[float, float]:
        """Returns the pixels of a panel: the proportions of the array, within what is readable."""
        if across is None:
            return 300.0, 34.0
        columns = self._blocks[across]
        wide = float(self.shape[across])
        if down is None:
            return max(min(560.0, max(300.0, columns * 26.0)), _least_side(columns, 9.0)), 34.0
        rows = self._blocks[down]
        tall = float(self.shape[down])
        ratio = min(2.5, max(0.4, wide / tall)) if tall and wide else 6.0
        width = min(560.0, max(150.0 * min(ratio, 2.0), columns * 26.0))
        height = min(420.0, max(width / ratio, rows * 22.0))
        return max(width, _least_side(columns, 9.0)), max(height, _least_side(rows, 7.0))

    def _caption(self, fixed: Mapping[int, int]) -> str:
        """Names the part of the array in a panel: `L 0:4, N 8:16`.
        fixed: dimension -> index of the block."""
        parts = []
        for dim, index in fixed.items():
            if self._blocks[dim] > 1:
                letter = self.dims[dim].partition("/")[0]
                parts.append(f"{letter} {self.cuts[dim][index]}:{self.cuts[dim][index + 1]}")
        return ", ".join(parts)


def _least_side(boxes: int, pixels: float) -> float:
    """Returns the pixels that many boxes need; few boxes are large enough anyway."""
    return boxes * pixels if boxes > 24 else 0.0


def picture_of(
    name: str, shape: Sequence[int], dims: str, placement: Placement, mesh: Mapping[str, int]
) -> ArrayPicture:
    """Returns the blocks of an abstract array.

    mesh: degree of each axis, outermost first. A dimension that does not divide is cut as JAX cuts
    it: the last block is smaller or empty.
    """
    degrees = [math.prod(mesh[axis] for axis in axes) for axes in placement]
    cuts = [_cuts(size, degree) for size, degree in zip(shape, degrees, strict=True)]
    labels = []
    for letter, size, axes in zip(dims or "?" * len(shape), shape, placement, strict=True):
        label = str(size) if letter == "?" else letter
        labels.append("/".join([label, "+".join(axes)]) if axes else label)
    holders = _holders(degrees, placement, mesh)
    return ArrayPicture(name, tuple(shape), tuple(labels), tuple(cuts), holders)


def _cuts(size: int, degree: int) -> tuple[int, ...]:
    """Returns the boundaries of `degree` blocks of equal size,
    of which the last may be cut short."""
    block = -(-size // degree)
    return (*[min(i * block, size) for i in range(degree)], size)


def _holders(
    degrees: Sequence[int], placement: Placement, mesh: Mapping[str, int]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Returns the devices that hold each block.

    The mesh's array of devices is transposed so that the axes of each dimension come first, in the
    order of the dimensions; the axes that are left are those of the copies.
    """
    splitting = [axis for axes in placement for axis in axes]
    copying = [axis for axis in mesh if axis not in splitting]
    order = [list(mesh).index(axis) for axis in (*splitting, *copying)]
    devices = np.arange(math.prod(mesh.values())).reshape([*mesh.values()])
    by_block = devices.transpose(order).reshape(*degrees, -1)
    return {key: tuple(by_block[key].tolist()) for key in np.ndindex(*degrees)}


def draw(
    array: Any, name: str = "", dims: str = "", sharding: Sharding | None = None
) -> ArrayPicture:
    """Draws the blocks of a `jax.Array`, or of an abstract array with a sharding,
    over its devices. No data is read.

    name, dims: name of the array and a letter for each dimension. sharding: for an array that has
    none. Raises ConfigError where there is none at all.

    Example:
        >>> import jax
        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
        >>> mesh = AbstractMesh((2, 2), ("fsdp", "tensor"))
        >>> sharding = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
        >>> w = jax.ShapeDtypeStruct((8, 6), "float32", sharding=sharding)
        >>> print(mw.draw(w, "w", "DF"))
        w[D/fsdp, F/tensor]  8 x 6
        rows D/fsdp, columns F/tensor
        ┌───┬───┐
        │ 0 │ 1 │
        ├───┼───┤
        │ 2 │ 3 │
        └───┴───┘
    """
    layout = sharding or getattr(array, "sharding", None)
    if layout is None:
        raise ConfigError(
            "a picture of an array",
            "it has no sharding",
            "call draw(x, sharding=NamedSharding(mesh, spec))",
        )
    shape = tuple(array.shape)
    if isinstance(layout, NamedSharding):
        unspecified = [None] * (len(shape) - len(layout.spec))
        placement = tuple(_axes_of(part) for part in (*layout.spec, *unspecified))
        return picture_of(name, shape, dims, placement, dict(layout.mesh.shape))
    return _picture_of_indices(name, shape, dims, layout)


def _axes_of(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a PartitionSpec."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _picture_of_indices(
    name: str, shape: tuple[int, ...], dims: str, sharding: Sharding
) -> ArrayPicture:
    """Draws a sharding without a PartitionSpec: on a single device, or chosen by the compiler."""
    devices: list[Any] = sorted(sharding.device_set, key=lambda device: device.id)
    holders_of: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = []
        for part, size in zip(index, shape, strict=True):
            bounds.append((part.start or 0, size if part.stop is None else part.stop))
        holders_of.setdefault(tuple(bounds), []).append(devices.index(device))

    starts = []
    for dim in range(len(shape)):
        starts.append(sorted({block[dim][0] for block in holders_of}))
    holders = {}
    for block, members in holders_of.items():
        key = tuple(starts[dim].index(start) for dim, (start, _) in enumerate(block))
        holders[key] = tuple(sorted(members))
    cuts = tuple((*dimension, size) for dimension, size in zip(starts, shape, strict=True))
    return ArrayPicture(name, shape, tuple(dims or map(str, shape)), cuts, holders)


def local_view(x: jax.Array, name: str = "") -> PanelPicture:
    """Draws a value inside a `shard_map` while it is traced: print the picture there,
    or append it to an outer list.

    Equal colours and numbers are equal values; the innermost axis of the mesh runs across.

    Raises ConfigError outside a `shard_map`.

    Example:
        >>> import jax
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> mesh = Mesh(jax.devices()[:1], ("data",))
        >>> @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
        ... def total(x):
        ...     print(mw.local_view(x, "x").title)
        ...     return jax.lax.psum(x.sum(), "data")
        >>> _ = jax.eval_shape(total, jax.ShapeDtypeStruct((8,), "float32"))
        x 8 on each device; differs over data
    """
    context = jax.sharding.get_abstract_mesh()
    manual = tuple(context.manual_axes)
    if not manual:
        raise ConfigError(
            f"a local view of {name or 'a value'}",
            "it is not inside a shard_map",
            "use draw(x) outside of one",
        )
    varying = _varying_axes(x)
    # Without check_vma no value has varying axes, not even an axis index.
    known = bool(varying) or bool(_varying_axes(jax.lax.axis_index(manual[0])))
    varies = tuple(axis for axis in manual if not known or axis in varying)
    degrees = {axis: n for axis, n in context.shape.items() if n > 1}
    axes = list(degrees)
    lines: tuple[str, ...] = ()
    if axes:
        lines = (f"rows {' '.join(axes[:-1]) or '-'}, columns {axes[-1]}",)
    shape = " x ".join(map(str, x.shape)) or "scalar"
    title = f"{name or 'value'} {shape} on each device; {_differs_over(varies, known)}"
    return PanelPicture(title, lines, (_panel_of_values(name or "x", degrees, varies),))


def _differs_over(varies: Sequence[str], known: bool) -> str:
    """Names the axes over which a value differs. known: whether JAX has a record of them."""
    if not varies:
        return "is the same on every device"
    verb = "differs" if known else "may differ"
    return f"{verb} over {', '.join(varies)}"


def _panel_of_values(name: str, degrees: Mapping[str, int], varies: Sequence[str]) -> Panel:
    """Returns a box for each device, with the number of its value.

    The number counts the device's position along the axes
    that the value varies over, the last fastest.
    """
    columns = list(degrees.values())[-1] if degrees else 1
    boxes = []
    positions = itertools.product(*map(range, degrees.values()))
    for device, position in enumerate(positions):
        value = 0
        for (axis, degree), index in zip(degrees.items(), position, strict=True):
            if axis in varies:
                value = value * degree + index
        tip = f"device {device} holds value {value}"
        text = f"{device}: {name}{value}"
        boxes.append(Box(device // columns, device % columns, (device,), value, tip, text))
    rows = len(boxes) // columns
    side = min(96.0, max(30.0, 640.0 / columns))
    return Panel("", rows, columns, tuple(boxes), columns * side, rows * 26.0, gap=3.0)


def _varying_axes(x: jax.Array) -> frozenset[str]:
    kind = jax.typeof(x)
    tracked = getattr(kind, "manual_axis_type", None) or getattr(kind, "mat", None)
    return frozenset(getattr(tracked, "varying", None) or ())


# Machines


@dataclasses.dataclass(frozen=True)
class MachineGrid:
    """Coordinates of the devices of a mesh in a machine."""

    kind: str
    """torus, nodes, or host."""
    name: str
    shape: tuple[int, ...]
    """Chips along each dimension of the torus; (nodes, devices per node);
    or (devices of the host,)."""
    coordinates: tuple[tuple[int, ...], ...]
    """Coordinates of each device, in the order of the mesh."""


def machine_of_target(target: Target) -> MachineGrid:
    """Returns the grid of a target's devices; `jax.make_mesh` may assign a real torus better."""
    coordinates = tuple(all_coordinates(target.chip, target.topology, target.domains))
    if not isinstance(target.chip.interconnect, Torus):
        return MachineGrid("nodes", str(target), (target.domains, target.topology[1]), coordinates)
    cores = (target.chip.devices_per_chip,) if target.chip.devices_per_chip > 1 else ()
    if target.slices == 1:
        inside = tuple(coordinate[1:] for coordinate in coordinates)
        return MachineGrid("torus", str(target), (*target.topology, *cores), inside)
    # Several slices are drawn like nodes: a panel for each slice, its devices in rows.
    per_slice = len(coordinates) // target.slices
    rows = tuple(
        (coordinate[0], number % per_slice) for number, coordinate in enumerate(coordinates)
    )
    return MachineGrid("nodes", str(target), (target.slices, per_slice), rows)


def _host(devices: int, name: str = "one host") -> MachineGrid:
    return MachineGrid("host", name, (devices,), tuple((i,) for i in range(devices)))


def machine_of(devices: Sequence[Any]) -> MachineGrid:
    """Returns the machine of JAX devices, from the coordinates and processes that they report."""
    kind = devices[0].device_kind
    if devices[0].platform == "tpu":
        return _torus_of(devices, kind)
    hosts = sorted({device.process_index for device in devices})
    if len(hosts) > 1:
        return _nodes_of(devices, hosts, kind)
    simulated = devices[0].platform == "cpu"
    return _host(len(devices), "simulated devices of this CPU" if simulated else kind)


def _torus_of(devices: Sequence[Any], kind: str) -> MachineGrid:
    """Returns the torus of TPUs;
    the core of a chip is a last coordinate where a chip has several."""
    coordinates = [(*device.coords, getattr(device, "core_on_chip", 0)) for device in devices]
    cores = {coordinate[-1] for coordinate in coordinates}
    if len(cores) == 1:
        coordinates = [coordinate[:-1] for coordinate in coordinates]
    shape = tuple(max(along) + 1 for along in zip(*coordinates, strict=True))
    return MachineGrid("torus", kind, shape, tuple(coordinates))


def _nodes_of(devices: Sequence[Any], hosts: Sequence[int], kind: str) -> MachineGrid:
    """Returns the nodes of devices of several processes.
    Coordinates are (node, device of the node)."""
    coordinates = []
    placed = dict.fromkeys(hosts, 0)
    for device in devices:
        host = device.process_index
        coordinates.append((hosts.index(host), placed[host]))
        placed[host] += 1
    shape = (len(hosts), max(placed.values()))
    return MachineGrid("nodes", kind, shape, tuple(coordinates))


def draw_machine(
    mesh: jax.sharding.Mesh | Mapping[str, int], machine: MachineGrid | None = None
) -> PanelPicture:
    """Draws a mesh over a machine, by default the one that the mesh's devices report, or one host.

    Devices of one color communicate along the innermost axis. The lines are the links along each
    mesh axis. Raises ConfigError where the machine has another number of devices than the mesh.
    """
    if isinstance(mesh, jax.sharding.Mesh):
        machine = machine or machine_of(list(mesh.devices.flat))
        mesh = {str(axis): n for axis, n in mesh.shape.items()}
    size = math.prod(mesh.values())
    machine = machine or _host(size)
    if len(machine.coordinates) != size:
        raise ConfigError(
            f"a mesh of {size} devices over {machine.name}",
            f"the machine has {len(machine.coordinates)} devices",
            f"a mesh of {len(machine.coordinates)} devices, or the machine of {size}",
        )
    nontrivial = {axis: n for axis, n in mesh.items() if n > 1}
    devices = np.arange(size).reshape([*nontrivial.values()] or [1])
    degrees = [f"{axis}={n}" for axis, n in nontrivial.items()]
    lines = []
    for number, degree in enumerate(degrees):
        lines.append(f"{degree}: {_neighbor_links(devices, number, machine)}")
    mesh_text = ",".join(degrees) or "one device"
    title = f"mesh {mesh_text} over {machine.name} ({size} devices)"
    return PanelPicture(title, tuple(lines), _machine_panels(machine, nontrivial))


_Neighbors = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
"""Coordinates of pairs of devices in a machine."""


def _neighbor_links(devices: np.ndarray, axis: int, machine: MachineGrid) -> str:
    """Describes the links between neighbors along a mesh axis.
    devices: indices in the shape of the mesh."""
    if machine.kind == "host":
        return "within the host"
    degree = devices.shape[axis]
    before = np.take(devices, range(degree - 1), axis)
    after = np.take(devices, range(1, degree), axis)
    neighbors = []
    for first, second in zip(before.flat, after.flat, strict=True):
        neighbors.append((machine.coordinates[int(first)], machine.coordinates[int(second)]))
    if machine.kind == "nodes":
        return _links_of_nodes(neighbors)
    return _links_of_torus(neighbors, machine.shape)


def _links_of_nodes(neighbors: _Neighbors) -> str:
    same = sum(first[0] == second[0] for first, second in neighbors)
    if same == len(neighbors):
        return "within a node"
    if same == 0:
        return "between nodes"
    return f"within a node for {same} of {len(neighbors)} neighbours, else between nodes"


def _links_of_torus(neighbors: _Neighbors, shape: Sequence[int]) -> str:
    """Describes the dimensions of the torus on the way to a neighbor, and the hops.

    Along a dimension of n chips the way from x to y is min(|x - y|, n - |x - y|) hops: it
    wraps around.
    """
    distances = set()
    dimensions = set()
    for first, second in neighbors:
        hops = 0
        for letter, x, y, n in zip("xyzc"[: len(shape)], first, second, shape, strict=True):
            hops += min(abs(x - y), n - abs(x - y))
            if x != y:
                dimensions.add(letter)
        distances.add(hops)
    most = max(distances)
    plural = "s" if most > 1 else ""
    text = (
        f"along {', '.join(sorted(dimensions))} of the torus, {most} ICI hop{plural} to a neighbour"
    )
    return f"{text} at most" if len(distances) > 1 else text


def _machine_panels(machine: MachineGrid, mesh: Mapping[str, int]) -> tuple[Panel, ...]:
    """Returns a panel for each node or plane of a torus, with a box for each device."""
    innermost = list(mesh.values())[-1] if mesh else 1
    boxes: dict[tuple[int, ...], list[Box]] = {}
    indices = np.ndindex(*mesh.values())
    for device, index in enumerate(indices):
        panel, row, column = _position_in_panels(machine, device)
        along = ", ".join(f"{axis}={i}" for axis, i in zip(mesh, index, strict=True))
        tip = f"device {device}: {along}"
        box = Box(row, column, (device,), device // innermost, tip)
        boxes.setdefault(panel, []).append(box)
    caption = {"host": "", "nodes": "node {}", "torus": "z = {}"}[machine.kind]
    side = _side_of_devices(len(machine.coordinates))
    panels = []
    for panel, members in sorted(boxes.items()):
        rows = 1 + max(box.row for box in members)
        columns = 1 + max(box.column for box in members)
        text = caption.format(*panel) if panel else ""
        width = columns * side
        panels.append(Panel(text, rows, columns, tuple(members), width, rows * side, gap=2.0))
    return tuple(panels)


def _position_in_panels(machine: MachineGrid, device: int) -> tuple[tuple[int, ...], int, int]:
    """Returns the panel of a device, and its row and column there.

    A host has rows of eight devices, a node rows of four,
    and a torus a panel for each of its (x, y) planes.
    """
    coordinate = machine.coordinates[device]
    if machine.kind == "host":
        return (), device // 8, device % 8
    if machine.kind == "nodes":
        return coordinate[:1], coordinate[1] // 4, coordinate[1] % 4
    if len(coordinate) == 1:
        return (), coordinate[0], 0
    return coordinate[2:], coordinate[0], coordinate[1]


def _side_of_devices(devices: int) -> float:
    """Returns the pixels of a device's box: many devices have smaller ones."""
    if devices <= 64:
        return 34.0
    return 24.0 if devices <= 256 else 15.0


# Pipeline schedules

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MARKS = {FORWARD: "", BACKWARD: "'", BACKWARD_INPUT: "'", BACKWARD_WEIGHT: "w"}
_TASK_HEIGHT = 24.0
"""Pixels of a row of tasks."""
_LIVE_HEIGHT = 22.0
"""Pixels below the tasks of a stage for its live inputs."""
_STAGE_LEFT = 66.0
"""Pixels left of the first tick, for the names of the stages."""
_STAGE_TOP = 62.0
"""Pixels above the first stage, for the title."""


@dataclasses.dataclass(frozen=True)
class PipelineTimeline(Picture):
    """Picture of a schedule table: rows for each stage, a column for each tick.

        stage 0   0 1 2 3 . .         forward passes of microbatches 0 to 3
                  . . . . 0' 1'       backward passes
        live      1 2 3 4 4 3         inputs that the stage holds

    A tick has a row for each of the forward pass, the backward pass and the gradient of the
    weights, where that is a task of its own. A cell shows the microbatch as a number and the
    virtual stage as a letter; `'` marks a backward pass, `w` the gradient of the weights.
    """

    table: ScheduleTable

    @property
    def title(self) -> str:  # type: ignore[override]
        """Name and size of the schedule."""
        return self.table.title

    @property
    def _kinds(self) -> list[int]:
        return [kind for kind, count in self.table.task_counts.items() if count]

    @property
    def _rows(self) -> list[int]:
        """Rows of a stage that have tasks, by their number in `PLACE`."""
        return sorted({PLACE[kind] for kind in self._kinds})

    def _label(self, task: Task) -> str:
        letter = _LETTERS[task.virtual_stage % 26] if self.table.virtual_stages > 1 else ""
        return f"{task.microbatch}{letter}{_MARKS[task.kind]}"

    def svg(self) -> str:
        """Returns the picture as SVG;
        the grey bars below the tasks of a stage are its live inputs."""
        return self._drawn().render()

    def page_data(self) -> dict[str, Any]:
        """Returns the shapes of the picture for the script of a page;
        `drawings.js` documents them."""
        canvas = self._drawn()
        boxes = [shape for shape in canvas.shapes if isinstance(shape, _DrawnBox)]
        bars = [shape for shape in canvas.shapes if isinstance(shape, _DrawnBar)]
        labels = [shape for shape in canvas.shapes if isinstance(shape, _Label)]
        below_title = [label for label in labels if label.y > _STAGE_TOP]
        box_fields = ("x", "y", "width", "height", "fill", "label", "tip", "group")
        return {
            "width": canvas.width,
            "height": canvas.height,
            "boxes": _columns_of(boxes, box_fields),
            "bars": _columns_of(bars, ("x", "y", "width", "height")),
            "labels": _columns_of(below_title, ("x", "y", "text", "size")),
            "microbatches": self.table.microbatches,
        }

    def _drawn(self) -> _Canvas:
        canvas = _Canvas(self.title, (self.table.summary,))
        stage_height = _TASK_HEIGHT * len(self._rows) + _LIVE_HEIGHT + 6
        for stage in range(self.table.stages):
            self._draw_stage(canvas, stage, _STAGE_TOP + stage * stage_height)
        self._draw_legend(canvas, _STAGE_TOP + self.table.stages * stage_height + 12)
        return canvas

    @property
    def _tick_width(self) -> float:
        return 26.0 if self.table.ticks <= 48 else max(7.0, 1240.0 / self.table.ticks)

    def _draw_stage(self, canvas: _Canvas, stage: int, top: float) -> None:
        """Draws the tasks of a stage, its live inputs below, and what it sums to at the right."""
        table = self.table
        bottom = top + _TASK_HEIGHT * len(self._rows) + _LIVE_HEIGHT
        canvas.text(4, top + 16, f"stage {stage}", 12)
        for tick in range(table.ticks):
            for task in table.tasks(tick, stage):
                canvas.box(self._drawn_task(task, tick, stage, top))
            live = int(table.live_inputs[tick, stage])
            if live:
                height = _LIVE_HEIGHT * live / max(1, int(table.live_inputs.max()))
                x = _STAGE_LEFT + tick * self._tick_width
                tip = f"{live} live inputs"
                bar = _DrawnBar(x, bottom - height, self._tick_width, height, tip)
                canvas.shapes.append(bar)
        right = _STAGE_LEFT + table.ticks * self._tick_width + 6
        tasks = int((table.kind[:, stage] != IDLE).sum())
        canvas.text(right, top + 16, f"{table.ticks * len(self._rows) - tasks} idle", 11)
        most_live = int(table.live_inputs[:, stage].max())
        canvas.text(right, bottom - 4, f"{most_live} live", 11)

    def _drawn_task(self, task: Task, tick: int, stage: int, top: float) -> _DrawnBox:
        name = TASK_NAMES[task.kind]
        part = f", virtual stage {task.virtual_stage}" if self.table.virtual_stages > 1 else ""
        live = int(self.table.live_inputs[tick, stage])
        return _DrawnBox(
            x=_STAGE_LEFT + tick * self._tick_width,
            y=top + _TASK_HEIGHT * self._rows.index(PLACE[task.kind]),
            width=self._tick_width,
            height=_TASK_HEIGHT,
            fill=task_colour(name, task.virtual_stage),
            label=self._label(task),
            tip=f"tick {tick}: {name} of microbatch {task.microbatch}{part}; {live} live inputs",
            group=int(task.microbatch),
        )

    def _draw_legend(self, canvas: _Canvas, y: float) -> None:
        x = _STAGE_LEFT
        for kind in self._kinds:
            name = TASK_NAMES[kind]
            canvas.box(_DrawnBox(x, y - 11, 14, 14, task_colour(name, 0), "", name))
            canvas.text(x + 20, y, name, 11)
            x += 34 + len(name) * 7
        canvas.text(x, y, "grey: live inputs", 11)

    def text(self) -> Text:
        """Returns lines for each stage with a column for each tick,
        and below them the number of live inputs."""
        table = self.table
        width = self._label_width() + 1
        shown = min(table.ticks, max(8, (_WIDTH - 12) // width))
        text = Text(f"{self.title}\n", style="bold")
        text.append(f"{table.summary}\n")
        for stage in range(min(table.stages, _MAX_ROWS)):
            text.append_text(self._stage_text(stage, shown, width))
        if table.stages > _MAX_ROWS:
            text.append(f"... and {table.stages - _MAX_ROWS} more stages\n", style="dim")
        if shown < table.ticks:
            text.append(f"... and {table.ticks - shown} more ticks\n", style="dim")
        legend = ", ".join(f"0{_MARKS[kind]} {TASK_NAMES[kind]}" for kind in self._kinds)
        text.append(f"{legend}; live: inputs that a stage holds\n", style="dim")
        return text

    def _label_width(self) -> int:
        """Returns the characters of the longest label."""
        widths = []
        for tick in range(self.table.ticks):
            for stage in range(self.table.stages):
                widths += [len(self._label(task)) for task in self.table.tasks(tick, stage)]
        return max(widths)

    def _stage_text(self, stage: int, shown: int, width: int) -> Text:
        """Returns the lines of a stage: one for each row of tasks, and one for the live inputs."""
        text = Text(style="bold")
        for number, row in enumerate(self._rows):
            text.append(f"stage {stage:<3} " if number == 0 else " " * 10)
            for tick in range(shown):
                text.append_text(self._cell_text(tick, stage, row, width))
            text.append("\n" if shown == self.table.ticks else " ...\n")
        counts = [str(n) if n else "" for n in self.table.live_inputs[:shown, stage]]
        live = "".join(count.rjust(width) for count in counts)
        return text.append(f"{'live':>9} {live}\n", style="dim")

    def _cell_text(self, tick: int, stage: int, row: int, width: int) -> Text:
        for task in self.table.tasks(tick, stage):
            if PLACE[task.kind] == row:
                colour = task_colour(TASK_NAMES[task.kind], task.virtual_stage)
                return Text(self._label(task).rjust(width), style=_filled(colour))
        return Text("·".rjust(width), style="dim")


def _columns_of(items: Sequence[Any], fields: Sequence[str]) -> dict[str, list[Any]]:
    """Returns the values of each field of many items, as lists."""
    return {field: [getattr(item, field) for item in items] for field in fields}
