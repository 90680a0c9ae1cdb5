"""Pictures of arrays, meshes, machines and pipeline schedules from abstract shapes: terminal, SVG, notebooks."""

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
    """Panels of coloured boxes that render in a notebook, print as text, and are returned as SVG by `svg()`."""

    title: str
    lines: Sequence[str] = ()
    """Lines below the title."""
    panels: Sequence[Panel] = ()

    def svg(self) -> str:
        """Returns the picture as SVG."""
        canvas = _Canvas(self.title, self.lines)
        left = 24.0 if any(panel.down for panel in self.panels) else 8.0
        x, y, tallest = left, canvas.height + 24.0, 0.0
        for panel in self.panels:
            if x + panel.width > 860 and x > left:
                x, y, tallest = left, y + tallest + 36, 0.0
            across = f"{panel.across} →" if panel.across else ""
            if caption := "   ".join(text for text in (across, panel.caption) if text):
                canvas.text(x, y - 4, caption, 11)
            if panel.down:
                canvas.shapes.append(
                    f'<text x="{x - 8:.1f}" y="{y:.1f}" font-size="11" style="fill:currentColor" text-anchor="end" '
                    f'transform="rotate(-90 {x - 8:.1f} {y:.1f})">{escape("← " + panel.down)}</text>'
                )
            w, h = panel.width / panel.columns, panel.height / panel.rows
            for box in panel.cells:
                place = (x + box.column * w, y + box.row * h, w - panel.gap, h - panel.gap)
                canvas.box(
                    *place, block_colour(box.number), box.label(max(1, int(w / 7.5))), box.tip
                )
            x, tallest = x + panel.width + 24, max(tallest, panel.height)
        return canvas.render()

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
            text.append(
                f"... and {len(self.panels) - _MAX_PANELS} more panels\n", style="dim not bold"
            )
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

    A text longer than `width` characters is shortened to the first device and the number, `0.. x8`, or to `x8`.
    """
    if not devices:
        return "-"
    step = devices[1] - devices[0] if len(devices) > 1 else 1
    even = all(b - a == step for a, b in itertools.pairwise(devices))
    if len(devices) > 2 and even:
        text = f"{devices[0]}-{devices[-1]}" + (f" by {step}" if step > 1 else "")
    else:
        text = ",".join(map(str, devices))
    if len(text) <= width:
        return text
    short = f"{devices[0]}.. x{len(devices)}"
    return short if len(short) <= width else f"x{len(devices)}"


def _grid(panel: Panel) -> Text:
    rows, columns = min(panel.rows, _MAX_ROWS), min(panel.columns, _MAX_COLUMNS)
    cells = {
        (box.row, box.column): box for box in panel.cells if box.row < rows and box.column < columns
    }
    labels = {
        place: box.label(max(4, min(24, _WIDTH // columns - 1))) for place, box in cells.items()
    }
    width = max(map(len, labels.values())) + 2

    def line(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for _ in range(columns)) + right + "\n"

    text = Text(line("┌", "┬", "┐"))
    for row in range(rows):
        for column in range(columns):
            text.append("│")
            box = cells.get((row, column))
            style = "" if box is None else _filled(block_colour(box.number))
            text.append(labels.get((row, column), "").center(width), style=style)
        text.append("│ ...\n" if panel.columns > columns else "│\n")
        text.append(line("├", "┼", "┤") if row < rows - 1 else line("└", "┴", "┘"))
    if panel.rows > rows:
        text.append(f"... and {panel.rows - rows} more rows\n", style="dim")
    return text


class _Canvas:
    """SVG of shapes at absolute positions, self-contained and readable in dark mode; it grows with them."""

    def __init__(self, title: str, lines: Sequence[str]):
        self.shapes: list[str] = []
        self.width = self.height = 0.0
        self._title = title
        self.text(4, 14, title, 13)
        for number, line in enumerate(lines):
            self.text(4, 32 + 15 * number, line, 11)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        style: str = "fill:currentColor",
        anchor: str = "start",
    ) -> None:
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
        return (
            f"{self.name}[{', '.join(self.dims)}]  {' x '.join(map(str, self.shape)) or 'scalar'}"
        )

    @property
    def lines(self) -> Sequence[str]:  # type: ignore[override]
        """Number of copies, if there are several."""
        return (f"each block on {self.copies} devices",) if self.copies > 1 else ()

    @property
    def panels(self) -> tuple[Panel, ...]:  # type: ignore[override]
        """Blocks in rows and columns, the two dimensions with most blocks; a panel for each index of the others."""
        blocks = [len(cuts) - 1 for cuts in self.cuts]
        shown = sorted(sorted(range(len(blocks)), key=lambda d: (-blocks[d], -d))[:2])
        across = shown[-1] if shown else None
        down = shown[0] if len(shown) > 1 else None
        rows, columns = 1 if down is None else blocks[down], 1 if across is None else blocks[across]
        tall, wide = (0.0 if dim is None else float(self.shape[dim]) for dim in (down, across))
        # The proportions of the array in pixels, within what is readable.
        ratio = min(2.5, max(0.4, wide / tall)) if tall and wide else 6.0
        width = min(560.0, max(150.0 * min(ratio, 2.0), columns * 26.0))
        height = min(420.0, max(width / ratio, rows * 22.0)) if down is not None else 34.0
        width, height = (
            max(width, columns * 9.0 * (columns > 24)),
            max(height, rows * 7.0 * (rows > 24)),
        )
        names = ["" if dim is None else self.dims[dim] for dim in (down, across)]
        others = [d for d in range(len(blocks)) if d not in shown]
        numbers = {key: i for i, key in enumerate(sorted(self.holders))}
        panels: list[Panel] = []
        for index in itertools.product(*(range(blocks[d]) for d in others)):
            fixed = dict(zip(others, index, strict=True))
            caption = ", ".join(
                f"{self.dims[d].partition('/')[0]} {self.cuts[d][i]}:{self.cuts[d][i + 1]}"
                for d, i in fixed.items()
                if blocks[d] > 1
            )
            cells = []
            for row, column in itertools.product(range(rows), range(columns)):
                key = tuple(
                    row if d == down else column if d == across else fixed[d]
                    for d in range(len(blocks))
                )
                devices = self.holders.get(key, ())
                tip = f"block {row}, {column}: devices {', '.join(map(str, devices))}"
                cells.append(Box(row, column, devices, numbers.get(key, 0), tip))
            panels.append(Panel(caption, rows, columns, tuple(cells), width, height, 0.0, *names))
        return tuple(panels)


def picture_of(
    name: str, shape: Sequence[int], dims: str, placement: Placement, mesh: Mapping[str, int]
) -> ArrayPicture:
    """Returns the blocks of an abstract array.

    mesh: degree of each axis, outermost first. A dimension that does not divide is cut as JAX cuts it: the last block
    is smaller or empty.
    """
    degrees = [math.prod(mesh[axis] for axis in axes) for axes in placement]
    split = [axis for axes in placement for axis in axes]
    order = [*split, *(axis for axis in mesh if axis not in split)]
    devices = np.arange(math.prod(mesh.values())).reshape([*mesh.values()])
    blocks = devices.transpose([list(mesh).index(axis) for axis in order]).reshape(*degrees, -1)
    holders = {key: tuple(blocks[key].tolist()) for key in np.ndindex(*degrees)}
    cuts = tuple(
        (*(min(i * -(-size // degree), size) for i in range(degree)), size)
        for size, degree in zip(shape, degrees, strict=True)
    )
    names = [
        str(size) if letter == "?" else letter
        for letter, size in zip(dims or "?" * len(shape), shape, strict=True)
    ]
    labels = tuple(
        "/".join([n, "+".join(axes)]) if axes else n
        for n, axes in zip(names, placement, strict=True)
    )
    return ArrayPicture(name, tuple(shape), labels, cuts, holders)


def draw(
    array: Any, name: str = "", dims: str = "", sharding: Sharding | None = None
) -> ArrayPicture:
    """Draws the blocks of a `jax.Array`, or of an abstract array with a sharding, over its devices. No data is read.

    name, dims: name of the array and a letter for each dimension. sharding: for an array that has none. Raises
    ConfigError where there is none at all.

    Example:
        >>> import jax
        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
        >>> mesh = AbstractMesh((2, 2), ("fsdp", "tensor"))
        >>> w = jax.ShapeDtypeStruct((8, 6), "float32", sharding=NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
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
        spec = [*layout.spec, *[None] * (len(shape) - len(layout.spec))]
        placement = tuple(() if p is None else p if isinstance(p, tuple) else (p,) for p in spec)
        return picture_of(name, shape, dims, placement, dict(layout.mesh.shape))
    # Without a PartitionSpec: on a single device, or chosen by the compiler.
    devices: list[Any] = sorted(layout.device_set, key=lambda d: d.id)
    blocks: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in layout.devices_indices_map(shape).items():
        bounds = tuple(
            (s.start or 0, size if s.stop is None else s.stop)
            for s, size in zip(index, shape, strict=True)
        )
        blocks.setdefault(bounds, []).append(devices.index(device))
    starts = [sorted({bounds[d][0] for bounds in blocks}) for d in range(len(shape))]
    holders = {
        tuple(starts[d].index(bounds[d][0]) for d in range(len(shape))): tuple(sorted(members))
        for bounds, members in blocks.items()
    }
    cuts = tuple((*dimension, size) for dimension, size in zip(starts, shape, strict=True))
    return ArrayPicture(name, shape, tuple(dims or map(str, shape)), cuts, holders)


def local_view(x: jax.Array, name: str = "") -> PanelPicture:
    """Draws a value inside a `shard_map` while it is traced: print the picture there, or append it to an outer list.

    Equal colours and numbers are equal values; the innermost axis of the mesh runs across.

    Raises ConfigError outside a `shard_map`.

    Example:
        >>> import jax
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> @jax.shard_map(
        ...     mesh=Mesh(jax.devices()[:1], ("data",)), in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
        ... )
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
    shape = " x ".join(map(str, x.shape)) or "scalar"
    verb = "differs" if known else "may differ"
    over = f"{verb} over {', '.join(varies)}" if varies else "is the same on every device"
    degrees = {axis: n for axis, n in context.shape.items() if n > 1}
    axes, columns = list(degrees), list(degrees.values())[-1] if degrees else 1
    cells = []
    for device, coordinates in enumerate(itertools.product(*map(range, degrees.values()))):
        value = 0
        for (axis, degree), index in zip(degrees.items(), coordinates, strict=True):
            value = value * degree + index if axis in varies else value
        text, tip = f"{device}: {name or 'x'}{value}", f"device {device} holds value {value}"
        cells.append(Box(device // columns, device % columns, (device,), value, tip, text))
    rows, side = len(cells) // columns, min(96.0, max(30.0, 640.0 / columns))
    return PanelPicture(
        f"{name or 'value'} {shape} on each device; {over}",
        (f"rows {' '.join(axes[:-1]) or '-'}, columns {axes[-1]}",) if axes else (),
        (Panel("", rows, columns, tuple(cells), columns * side, rows * 26.0, 3.0),),
    )


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
    """Chips along each dimension of the torus; (nodes, devices per node); or (devices of the host,)."""
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
        coordinates = tuple((*d.coords, getattr(d, "core_on_chip", 0)) for d in devices)
        one_core = len({c[-1] for c in coordinates}) == 1
        coordinates = tuple(c[:-1] for c in coordinates) if one_core else coordinates
        shape = tuple(max(c[i] for c in coordinates) + 1 for i in range(len(coordinates[0])))
        return MachineGrid("torus", kind, shape, coordinates)
    hosts = sorted({d.process_index for d in devices})
    if len(hosts) == 1:
        return _host(
            len(devices), "simulated devices of this CPU" if devices[0].platform == "cpu" else kind
        )
    members: list[tuple[int, int]] = []
    for d in devices:
        host = hosts.index(d.process_index)
        members.append((host, sum(other == host for other, _ in members)))
    return MachineGrid(
        "nodes", kind, (len(hosts), 1 + max(index for _, index in members)), tuple(members)
    )


def draw_machine(
    mesh: jax.sharding.Mesh | Mapping[str, int], machine: MachineGrid | None = None
) -> PanelPicture:
    """Draws a mesh over a machine, by default the one that the mesh's devices report, or one host.

    Devices of one colour communicate along the innermost axis. The lines are the links along each mesh axis.
    """
    if isinstance(mesh, jax.sharding.Mesh):
        machine = machine or machine_of(list(mesh.devices.flat))
        mesh = {str(axis): n for axis, n in mesh.shape.items()}
    size = math.prod(mesh.values())
    machine = machine or _host(size)
    nontrivial = {axis: n for axis, n in mesh.items() if n > 1}
    ids = np.arange(size).reshape([*nontrivial.values()] or [1])
    mesh_text = ",".join(f"{axis}={n}" for axis, n in nontrivial.items()) or "one device"
    lines = tuple(
        f"{axis}={n}: {_neighbour_links(ids, i, machine)}"
        for i, (axis, n) in enumerate(nontrivial.items())
    )
    return PanelPicture(
        f"mesh {mesh_text} over {machine.name} ({size} devices)",
        lines,
        _panels(machine, nontrivial),
    )


def _neighbour_links(ids: np.ndarray, axis: int, machine: MachineGrid) -> str:
    """Describes the links between neighbours along a mesh axis. ids: device indices in the shape of the mesh."""
    before, after = (
        np.take(ids, range(ids.shape[axis] - 1), axis),
        np.take(ids, range(1, ids.shape[axis]), axis),
    )
    pairs = [
        (machine.coordinates[int(a)], machine.coordinates[int(b)])
        for a, b in zip(before.flat, after.flat, strict=True)
    ]
    if machine.kind == "host":
        return "within the host"
    if machine.kind == "nodes":
        same = sum(a[0] == b[0] for a, b in pairs)
        if same == len(pairs):
            return "within a node"
        return (
            f"within a node for {same} of {len(pairs)} neighbours, else between nodes"
            if same
            else "between nodes"
        )
    hops = [
        sum(min(abs(x - y), n - abs(x - y)) for x, y, n in zip(a, b, machine.shape, strict=True))
        for a, b in pairs
    ]
    dims = sorted(
        {"xyzc"[i] for a, b in pairs for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y}
    )
    most = max(hops)
    text = f"along {', '.join(dims)} of the torus, {most} ICI hop{'s' if most > 1 else ''} to a neighbour"
    return text + (" at most" if len(set(hops)) > 1 else "")


def _panels(machine: MachineGrid, mesh: Mapping[str, int]) -> tuple[Panel, ...]:
    cells: dict[tuple[int, ...], list[Box]] = {}
    innermost = list(mesh.values())[-1] if mesh else 1
    along = list(np.ndindex(*mesh.values()))
    for device, position in enumerate(machine.coordinates):
        key: tuple[int, ...] = ()
        if machine.kind == "host":
            row, column = device // 8, device % 8
        elif machine.kind == "nodes":
            key, row, column = position[:1], position[1] // 4, position[1] % 4
        else:
            padded = (*position, 0) if len(position) == 1 else position
            key, row, column = padded[2:], padded[0], padded[1]
        coordinates = ", ".join(f"{axis}={i}" for axis, i in zip(mesh, along[device], strict=True))
        box = Box(row, column, (device,), device // innermost, f"device {device}: {coordinates}")
        cells.setdefault(key, []).append(box)
    caption = {"host": "", "nodes": "node {}", "torus": "z = {}"}[machine.kind]
    side = (
        34.0
        if len(machine.coordinates) <= 64
        else 24.0
        if len(machine.coordinates) <= 256
        else 15.0
    )
    panels = []
    for key, boxes in sorted(cells.items()):
        rows, columns = 1 + max(box.row for box in boxes), 1 + max(box.column for box in boxes)
        text = caption.format(*key) if key else ""
        panels.append(Panel(text, rows, columns, tuple(boxes), columns * side, rows * side, 2.0))
    return tuple(panels)


# Pipeline schedules

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MARKS = {FORWARD: "", BACKWARD: "'", BACKWARD_INPUT: "'", BACKWARD_WEIGHT: "w"}
_TASK_HEIGHT, _LIVE_HEIGHT, _STAGE_LEFT, _STAGE_TOP = 24.0, 22.0, 66.0, 62.0
"""Pixels of a schedule's rows: tasks, live inputs below them, and the margins of the first."""


@dataclasses.dataclass(frozen=True)
class PipelineTimeline(Picture):
    """Picture of a schedule table: rows for each stage, a column for each tick.

    A tick has a row for each of the forward pass, the backward pass and the gradient of the weights, where that is a
    task of its own. A cell shows the microbatch as a number and the virtual stage as a letter; `'` marks a backward
    pass, `w` the gradient of the weights.
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
    def _places(self) -> list[int]:
        return sorted({PLACE[kind] for kind in self._kinds})

    def _label(self, task: Task) -> str:
        letter = _LETTERS[task.virtual_stage % 26] if self.table.virtual_stages > 1 else ""
        return f"{task.microbatch}{letter}{_MARKS[task.kind]}"

    def svg(self) -> str:
        """Returns the picture as SVG; the grey bars below the tasks of a stage are its live inputs."""
        table, canvas, places = self.table, _Canvas(self.title, (self.table.summary,)), self._places
        tick_width = 26.0 if table.ticks <= 48 else max(7.0, 1240.0 / table.ticks)
        tasks_height = _TASK_HEIGHT * len(places)
        right = _STAGE_LEFT + table.ticks * tick_width + 6
        y = _STAGE_TOP
        for s in range(table.stages):
            canvas.text(4, y + 16, f"stage {s}", 12)
            for t in range(table.ticks):
                x, live = _STAGE_LEFT + t * tick_width, int(table.live_inputs[t, s])
                for task in table.tasks(t, s):
                    part = (
                        f", virtual stage {task.virtual_stage}" if table.virtual_stages > 1 else ""
                    )
                    name, top = (
                        TASK_NAMES[task.kind],
                        y + _TASK_HEIGHT * places.index(PLACE[task.kind]),
                    )
                    tip = f"tick {t}: {name} of microbatch {task.microbatch}{part}; {live} live inputs"
                    colour = task_colour(name, task.virtual_stage)
                    canvas.box(x, top, tick_width, _TASK_HEIGHT, colour, self._label(task), tip)
                if live:
                    height = _LIVE_HEIGHT * live / max(1, int(table.live_inputs.max()))
                    top = y + tasks_height + _LIVE_HEIGHT - height
                    canvas.shapes.append(
                        f'<rect x="{x:.1f}" y="{top:.1f}" width="{tick_width:.1f}" height="{height:.1f}" '
                        f'fill="currentColor" opacity="0.18"><title>{live} live inputs</title></rect>'
                    )
            idle = table.ticks * len(places) - int((table.kind[:, s] != IDLE).sum())
            canvas.text(right, y + 16, f"{idle} idle", 11)
            live = int(table.live_inputs[:, s].max())
            canvas.text(right, y + tasks_height + _LIVE_HEIGHT - 4, f"{live} live", 11)
            y += tasks_height + _LIVE_HEIGHT + 6
        x, y = _STAGE_LEFT, y + 12
        for name in (TASK_NAMES[kind] for kind in self._kinds):
            canvas.box(x, y - 11, 14, 14, task_colour(name, 0), "", name)
            canvas.text(x + 20, y, name, 11)
            x += 34 + len(name) * 7
        canvas.text(x, y, "grey: live inputs", 11)
        return canvas.render()

    def text(self) -> Text:
        """Returns lines for each stage with a column for each tick, and below them the number of live inputs."""
        table = self.table
        cells = {(t, s): table.tasks(t, s) for t in range(table.ticks) for s in range(table.stages)}
        width = max(len(self._label(task)) for tasks in cells.values() for task in tasks) + 1
        shown = min(table.ticks, max(8, (_WIDTH - 12) // width))
        text = Text(f"{self.title}\n", style="bold")
        text.append(f"{table.summary}\n")
        for s in range(min(table.stages, _MAX_ROWS)):
            for row, place in enumerate(self._places):
                text.append(f"stage {s:<3} " if row == 0 else " " * 10)
                for t in range(shown):
                    task = next((task for task in cells[t, s] if PLACE[task.kind] == place), None)
                    if task is None:
                        text.append("·".rjust(width), style="dim")
                    else:
                        style = _filled(task_colour(TASK_NAMES[task.kind], task.virtual_stage))
                        text.append(self._label(task).rjust(width), style=style)
                text.append("\n" if shown == table.ticks else " ...\n")
            live = "".join((str(n) if n else "").rjust(width) for n in table.live_inputs[:shown, s])
            text.append(f"{'live':>9} {live}\n", style="dim")
        if table.stages > _MAX_ROWS:
            text.append(f"... and {table.stages - _MAX_ROWS} more stages\n", style="dim")
        if shown < table.ticks:
            text.append(f"... and {table.ticks - shown} more ticks\n", style="dim")
        legend = ", ".join(f"0{_MARKS[kind]} {TASK_NAMES[kind]}" for kind in self._kinds)
        text.append(f"{legend}; live: inputs that a stage holds\n", style="dim")
        return text
