"""Picture of a mesh over a machine: a TPU torus, GPU nodes, or the simulated devices of one host."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshwright.errors import ConfigError
from meshwright.views.draw.picture import Box, Panel, Picture


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


def parse_machine(text: str, devices: int) -> MachineGrid:
    """Parses `v5p:4x4x8` (a torus), `gpu:8x8` (nodes x GPUs per node), or `host` (all devices in one).

    Devices fill the machine row by row, the last coordinate fastest; `jax.make_mesh` may assign a real torus better.
    Raises ConfigError where the text is not a machine, or not one of `devices` devices.
    """
    name, _, size = text.partition(":")
    if name == "host":
        return MachineGrid("host", "one host", (devices,), tuple((i,) for i in range(devices)))
    if not re.fullmatch(r"\d+(x\d+){0,2}", size):
        raise ConfigError(
            f"machine {text!r}", "a machine is NAME:SIZE, with sizes joined by x", "write v5p:4x4x8, gpu:8x8, or host"
        )
    shape = tuple(int(n) for n in size.split("x"))
    chips = int(np.prod(shape))
    if chips != devices:
        raise ConfigError(
            f"machine {text} under a mesh of {devices} devices",
            f"{' * '.join(map(str, shape))} = {chips}",
            f"choose a mesh of {chips} devices, or another machine",
        )
    coordinates = tuple(tuple(int(i) for i in np.unravel_index(n, shape)) for n in range(chips))
    return MachineGrid("nodes" if name == "gpu" else "torus", text, shape, coordinates)


def machine_of(devices: Sequence[Any]) -> MachineGrid:
    """Returns the machine of JAX devices, from the coordinates and processes that they report."""
    if devices[0].platform == "tpu":
        coordinates = tuple((*d.coords, getattr(d, "core_on_chip", 0)) for d in devices)
        one_core = len({c[-1] for c in coordinates}) == 1
        coordinates = tuple(c[:-1] for c in coordinates) if one_core else coordinates
        shape = tuple(max(c[i] for c in coordinates) + 1 for i in range(len(coordinates[0])))
        return MachineGrid("torus", devices[0].device_kind, shape, coordinates)
    hosts = sorted({d.process_index for d in devices})
    if len(hosts) == 1:
        name = "simulated devices of this CPU" if devices[0].platform == "cpu" else devices[0].device_kind
        return MachineGrid("host", name, (len(devices),), tuple((i,) for i in range(len(devices))))
    counts: dict[int, int] = {}
    members = []
    for d in devices:
        members.append((hosts.index(d.process_index), counts.setdefault(d.process_index, 0)))
        counts[d.process_index] += 1
    return MachineGrid("nodes", devices[0].device_kind, (len(hosts), max(counts.values())), tuple(members))


@dataclasses.dataclass(frozen=True)
class MachinePicture(Picture):
    """Mesh over a machine; devices of equal colour communicate along the innermost axis."""

    title: str
    axis_summaries: tuple[str, ...]
    """For each mesh axis, the links between neighbours along it."""
    panels: tuple[Panel, ...]
    """Each node, or each plane of the torus."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Links along each mesh axis."""
        return self.axis_summaries


def draw_machine(mesh: jax.sharding.Mesh | Mapping[str, int], machine: MachineGrid | None = None) -> MachinePicture:
    """Draws a mesh over a machine, by default the one that the mesh's devices report, or one host."""
    degrees: dict[str, int]
    if isinstance(mesh, jax.sharding.Mesh):
        degrees = {str(axis): n for axis, n in mesh.shape.items()}
        machine = machine or machine_of(list(mesh.devices.flat))
    else:
        degrees = dict(mesh)
    size = int(np.prod(list(degrees.values())))
    machine = machine or parse_machine("host", size)
    nontrivial = {axis: n for axis, n in degrees.items() if n > 1}
    ids = np.arange(size).reshape([*nontrivial.values()] or [1])
    along_innermost = np.moveaxis(ids, -1, 0).reshape(ids.shape[-1], -1) if nontrivial else ids.reshape(1, -1)
    groups = np.zeros(size, np.int64)
    for number, members in enumerate(along_innermost.T):
        groups[members] = number
    mesh_text = ",".join(f"{axis}={n}" for axis, n in nontrivial.items()) or "one device"
    summaries = tuple(
        f"{axis}={n}: {_neighbour_links(ids, i, machine)}" for i, (axis, n) in enumerate(nontrivial.items())
    )
    title = f"mesh {mesh_text} over {machine.name} ({size} devices)"
    return MachinePicture(title, summaries, _panels(machine, nontrivial, groups))


def _neighbour_links(ids: np.ndarray, axis: int, machine: MachineGrid) -> str:
    """Describes the links between neighbours along a mesh axis. ids: device indices in the shape of the mesh."""
    before, after = np.take(ids, range(ids.shape[axis] - 1), axis), np.take(ids, range(1, ids.shape[axis]), axis)
    pairs = [
        (machine.coordinates[int(a)], machine.coordinates[int(b)]) for a, b in zip(before.flat, after.flat, strict=True)
    ]
    if machine.kind == "host":
        return "within the host"
    if machine.kind == "nodes":
        same = sum(a[0] == b[0] for a, b in pairs)
        if same == len(pairs):
            return "within a node"
        if same == 0:
            return "between nodes"
        return f"within a node for {same} of {len(pairs)} neighbours, else between nodes"
    hops = [sum(min(abs(x - y), n - abs(x - y)) for x, y, n in zip(a, b, machine.shape, strict=True)) for a, b in pairs]
    dims = sorted({"xyzc"[i] for a, b in pairs for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y})
    most = max(hops)
    text = f"along {', '.join(dims)} of the torus, {most} ICI hop{'s' if most > 1 else ''} to a neighbour"
    return text + (" at most" if len(set(hops)) > 1 else "")


def _panels(machine: MachineGrid, mesh: Mapping[str, int], groups: np.ndarray) -> tuple[Panel, ...]:
    """Lays the devices out. mesh: axes of more than one device.  groups: number of each device's colour."""
    cells: dict[tuple[int, ...], list[Box]] = {}
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
        tip = f"device {device}: {coordinates}"
        cells.setdefault(key, []).append(Box(row, column, (device,), int(groups[device]), tip))
    caption = {"host": "", "nodes": "node {}", "torus": "z = {}"}[machine.kind]
    side = 34.0 if len(machine.coordinates) <= 64 else 24.0 if len(machine.coordinates) <= 256 else 15.0
    panels = []
    for key, boxes in sorted(cells.items()):
        rows, columns = 1 + max(box.row for box in boxes), 1 + max(box.column for box in boxes)
        text = caption.format(*key) if key else ""
        panels.append(Panel(text, rows, columns, tuple(boxes), columns * side, rows * side, 2.0))
    return tuple(panels)
