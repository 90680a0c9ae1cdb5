"""Picture of an array's blocks and the devices that hold them, from its shape and layout."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from meshwright.errors import ConfigError
from meshwright.sharding.placement import Placement
from meshwright.views.draw.picture import Box, Panel, Picture

Bounds = tuple[tuple[int, int], ...]
"""Start and stop of a block in each dimension."""


@dataclasses.dataclass(frozen=True)
class ArrayPicture(Picture):
    """Array cut into blocks, each on one or several devices.

    Prints in a terminal and renders itself in a notebook; `svg()` returns the drawing.
    """

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
        return f"{self.name}[{', '.join(self.dims)}]  {' x '.join(map(str, self.shape)) or 'scalar'}"

    @property
    def lines(self) -> Sequence[str]:
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
        width, height = self._panel_size(down, across)
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
                key = tuple(row if d == down else column if d == across else fixed[d] for d in range(len(blocks)))
                devices = self.holders.get(key, ())
                tip = f"block {row}, {column}: devices {', '.join(map(str, devices))}"
                cells.append(Box(row, column, devices, numbers.get(key, 0), tip))
            panels.append(Panel(caption, rows, columns, tuple(cells), width, height, 0.0, *names))
        return tuple(panels)

    def _panel_size(self, down: int | None, across: int | None) -> tuple[float, float]:
        """Width and height of a panel in pixels: the proportions of the array, within what is readable."""
        rows, columns = (1 if dim is None else len(self.cuts[dim]) - 1 for dim in (down, across))
        tall, wide = (0.0 if dim is None else float(self.shape[dim]) for dim in (down, across))
        ratio = min(2.5, max(0.4, wide / tall)) if tall and wide else 6.0
        width = min(560.0, max(150.0 * min(ratio, 2.0), columns * 26.0))
        height = min(420.0, max(width / ratio, rows * 22.0)) if down is not None else 34.0
        return max(width, columns * 9.0 if columns > 24 else 0.0), max(height, rows * 7.0 if rows > 24 else 0.0)


def picture_of(
    name: str, shape: Sequence[int], dims: str, placement: Placement, mesh: Mapping[str, int]
) -> ArrayPicture:
    """Returns the blocks of an abstract array.

    mesh: degree of each axis, outermost first. A dimension that does not divide is cut as JAX cuts it: the last block
    is smaller or empty.
    """
    degrees = [int(np.prod([mesh[a] for a in axes], dtype=np.int64)) for axes in placement]
    coordinates = np.indices(list(mesh.values())).reshape(len(mesh), -1)
    along = {axis: coordinates[i] for i, axis in enumerate(mesh)}
    block_indices = []
    for axes in placement:
        index = np.zeros(coordinates.shape[1], np.int64)
        for axis in axes:
            index = index * mesh[axis] + along[axis]
        block_indices.append(index)
    holders: dict[tuple[int, ...], list[int]] = {key: [] for key in itertools.product(*map(range, degrees))}
    for device in range(coordinates.shape[1]):
        holders[tuple(int(index[device]) for index in block_indices)].append(device)
    cuts = tuple(_cuts(size, degree) for size, degree in zip(shape, degrees, strict=True))
    letters = dims or "?" * len(shape)
    labels = tuple(
        "/".join([letter if letter != "?" else str(size), "+".join(axes)]) if axes else letter.replace("?", str(size))
        for letter, size, axes in zip(letters, shape, placement, strict=True)
    )
    return ArrayPicture(name, tuple(shape), labels, cuts, {k: tuple(v) for k, v in holders.items()})


def _cuts(size: int, degree: int) -> tuple[int, ...]:
    block = -(-size // degree) if size else 0
    return (*(min(i * block, size) for i in range(degree)), size)


def draw(array: Any, name: str = "", dims: str = "", sharding: Sharding | None = None) -> ArrayPicture:
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
            "a picture of an array", "it has no sharding", "call draw(x, sharding=NamedSharding(mesh, spec))"
        )
    shape = tuple(array.shape)
    if isinstance(layout, NamedSharding):
        spec = [*layout.spec, *[None] * (len(shape) - len(layout.spec))]
        placement = tuple(() if p is None else p if isinstance(p, tuple) else (p,) for p in spec)
        return picture_of(name, shape, dims, placement, dict(layout.mesh.shape))
    return _from_indices(name, shape, dims, layout)


def _from_indices(name: str, shape: tuple[int, ...], dims: str, sharding: Sharding) -> ArrayPicture:
    """Returns the picture of a sharding without a PartitionSpec: on a single device, or chosen by the compiler."""
    devices: list[Any] = sorted(sharding.device_set, key=lambda d: d.id)
    blocks: dict[Bounds, list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True))
        blocks.setdefault(bounds, []).append(devices.index(device))
    starts = [sorted({bounds[d][0] for bounds in blocks}) for d in range(len(shape))]
    holders = {
        tuple(starts[d].index(bounds[d][0]) for d in range(len(shape))): tuple(sorted(members))
        for bounds, members in blocks.items()
    }
    cuts = tuple((*dimension, size) for dimension, size in zip(starts, shape, strict=True))
    labels = tuple(letter if dims else str(size) for letter, size in zip(dims or "?" * len(shape), shape, strict=True))
    return ArrayPicture(name, shape, labels, cuts, holders)


@dataclasses.dataclass(frozen=True)
class LocalPicture(Picture):
    """Value inside a `shard_map` on every device of a mesh; equal colours are equal values."""

    name: str
    shape: tuple[int, ...]
    """Shape of the block of one device."""
    mesh: Mapping[str, int]
    varies: tuple[str, ...]
    """Mesh axes along which the value differs between devices."""
    known: bool
    """Whether JAX tracks which axes a value varies over; False under `check_vma=False`, where it may be any."""

    @property
    def title(self) -> str:  # type: ignore[override]
        """Name, shape, and the axes over which the value differs."""
        shape = " x ".join(map(str, self.shape)) or "scalar"
        verb = "differs" if self.known else "may differ"
        over = f"{verb} over {', '.join(self.varies)}" if self.varies else "is the same on every device"
        return f"{self.name or 'value'} {shape} on each device; {over}"

    @property
    def lines(self) -> Sequence[str]:
        """Mesh axes of the rows and of the columns."""
        axes = [axis for axis, n in self.mesh.items() if n > 1]
        return (f"rows {' '.join(axes[:-1]) or '-'}, columns {axes[-1]}",) if axes else ()

    @property
    def panels(self) -> tuple[Panel, ...]:  # type: ignore[override]
        """Devices of the mesh, its innermost axis across; equal colours and numbers are equal values."""
        degrees = {axis: n for axis, n in self.mesh.items() if n > 1}
        columns = list(degrees.values())[-1] if degrees else 1
        cells = []
        for device, coordinates in enumerate(itertools.product(*map(range, degrees.values()))):
            value = 0
            for (axis, degree), index in zip(degrees.items(), coordinates, strict=True):
                value = value * degree + index if axis in self.varies else value
            text, tip = f"{device}: {self.name or 'x'}{value}", f"device {device} holds value {value}"
            cells.append(Box(device // columns, device % columns, (device,), value, tip, text))
        rows = len(cells) // columns
        side = min(96.0, max(30.0, 640.0 / columns))
        return (Panel("", rows, columns, tuple(cells), columns * side, rows * 26.0, 3.0),)


def local_view(x: jax.Array, name: str = "") -> LocalPicture:
    """Draws a value inside a `shard_map` while it is traced: print the picture there, or append it to an outer list.

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
            f"a local view of {name or 'a value'}", "it is not inside a shard_map", "use draw(x) outside of one"
        )
    varying = _varying_axes(x)
    # Without check_vma no value has varying axes, not even an axis index.
    known = bool(varying) or bool(_varying_axes(jax.lax.axis_index(manual[0])))
    varies = tuple(axis for axis in manual if not known or axis in varying)
    return LocalPicture(name, tuple(x.shape), dict(context.shape), varies, known)


def _varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the mesh axes over which the type of a value varies."""
    kind = jax.typeof(x)
    tracked = getattr(kind, "manual_axis_type", None) or getattr(kind, "mat", None)
    return frozenset(getattr(tracked, "varying", None) or ())
