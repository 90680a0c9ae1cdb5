"""Interconnect model: where mesh axes are in the hardware, and bandwidth, latency and time of a collective over them.

A group spans ICI links (a TPU torus), NVLink (a GPU node), or the network between them (DCN for TPU slices, InfiniBand
or RoCE for GPU nodes). Times are those of bidirectional rings over all links that the group spans (scaling-book,
sharding.md and gpus.md): an all-gather or reduce-scatter of V bytes over n devices takes V (n-1)/n / W for a bandwidth
W, an all-reduce twice that, and each hop adds its latency.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.config import MeshShape
from meshwright.hardware.chips import Chip, Efficiency, Torus, chip_name
from meshwright.hardware.machine import Machine
from meshwright.hardware.targets import Target
from meshwright.words import AXES

DeviceCoordinates = tuple[int, ...]
"""Coordinates of a device: its slice or node, its position inside, and its index on the chip where that has several."""


@dataclasses.dataclass(frozen=True)
class Route:
    """Path that a collective takes between the devices of a group."""

    devices: int
    """Devices in the group."""
    bandwidth: float
    """Bytes/s that each device moves over all its links together."""
    hop_latency: float
    """Seconds of latency per hop."""
    hops: int
    """Hops of one pass around the group."""
    medium: str
    """Links that the path uses: `ICI x+y`, `ICI x (open)`, `die-to-die`, `NVLink`, `DCN`, or `network`."""
    neighbour_bandwidth: float
    """Bytes/s from one device to its neighbour."""
    on_torus: bool
    """Whether messages pass through neighbours (ICI) rather than through a switch."""
    links: tuple[str, ...]
    """Links that transfers along other paths may use at the same time: each direction of a torus' dimension is one."""
    outside: int = 0
    """Devices of the group in other slices or nodes than a device's own."""

    def seconds(self, kind: str, payload: float) -> float:
        """Returns the time of one collective in seconds.

        kind: HLO opcode. payload: bytes of the whole array, as `hlo.ledger.LedgerEntry` counts them.
        """
        n = self.devices
        if n == 1:
            return 0.0
        ring_pass = payload * (n - 1) / n / self.bandwidth
        latency = self.hops * self.hop_latency
        if kind == "all-reduce":
            return 2 * (ring_pass + latency)
        if kind in ("all-gather", "reduce-scatter"):
            return ring_pass + latency
        if kind in ("all-to-all", "ragged-all-to-all"):
            if self.on_torus:  # on a ring a block travels a quarter of the way on average; a switch forwards it once
                return payload * n / (4 * self.bandwidth) + latency
            # Each device sends its own rows: those for other nodes over its own link to the network.
            crossing = payload * self.outside / n / self.neighbour_bandwidth
            return max(crossing, payload * (n - 1 - self.outside) / n / self.bandwidth) + latency
        return payload / self.neighbour_bandwidth + self.hop_latency


_HOP_LATENCY = {"ici": 1e-6, "nvlink": 3e-6, "network": 6e-6}
"""Seconds per hop. Sources: scaling-book (1 us on a torus); stas00/ml-engineering, eight H200 (all-reduce of 1 MiB:
46 us for two times seven hops) and four nodes of B200 (16 MiB: 0.5 ms for two times 31)."""


@dataclasses.dataclass(frozen=True)
class GroupSpan:
    """Extent of a group of devices in the hardware."""

    domains: int
    """Slices or nodes that the group spans."""
    chips: tuple[int, ...]
    """Chips that the group spans along each dimension of the torus, or in one node."""
    cores: int = 1
    """Devices of one chip that belong to the group."""

    @property
    def devices(self) -> int:
        """Devices in the group."""
        return self.domains * math.prod(self.chips) * self.cores


def span_of_group(chip: Chip, group: Sequence[DeviceCoordinates]) -> GroupSpan:
    """Returns the extent of the devices at these coordinates."""
    domains = len({coordinates[0] for coordinates in group})
    dims = chip.interconnect.dims if isinstance(chip.interconnect, Torus) else 1
    first_domain = [coordinates for coordinates in group if coordinates[0] == group[0][0]]
    chips = {coordinates[1 : 1 + dims] for coordinates in first_domain}
    extents = tuple(len({coordinates[d] for coordinates in chips}) for d in range(dims))
    return GroupSpan(domains, extents, len(set(first_domain)) // len(chips))


def route(chip: Chip, topology: tuple[int, ...], span: GroupSpan, efficiency: Efficiency) -> Route:
    """Returns the path between the devices of a group, while all groups of the same mesh axes communicate at once.

    topology: chips along each dimension of a slice.
    """
    inside = span.devices // span.domains
    interconnect = chip.interconnect
    if isinstance(interconnect, Torus):
        local = _ici_route(chip, interconnect, topology, span, efficiency)
    else:
        bandwidth = interconnect.link_bandwidth * efficiency.links
        local = Route(
            inside,
            bandwidth,
            _HOP_LATENCY["nvlink"],
            inside - 1,
            "NVLink",
            bandwidth,
            False,
            ("NVLink",),
        )
    if span.domains == 1:
        return local
    network = chip.network_bandwidth * efficiency.network
    # The bytes that cross are divided among the devices of the group in each slice or node.
    bandwidth = min(local.bandwidth, inside * network) if inside > 1 else network
    hops = span.domains - 1 + local.hops
    medium = "DCN" if isinstance(interconnect, Torus) else "network"
    outside = span.devices - inside
    links = (medium, *(local.links if inside > 1 else ()))
    return Route(
        span.devices,
        bandwidth,
        _HOP_LATENCY["network"],
        hops,
        medium,
        network,
        False,
        links,
        outside,
    )


def _ici_route(
    chip: Chip, torus: Torus, topology: tuple[int, ...], span: GroupSpan, efficiency: Efficiency
) -> Route:
    # The devices of one chip share its links; a group that holds all of them brings shared bytes in once.
    link = (
        torus.link_bandwidth * efficiency.links / (1 if span.cores > 1 else chip.devices_per_chip)
    )
    bandwidth, names, hops = 0.0, [], 0
    devices = math.prod(span.chips) * span.cores
    for d, chips in enumerate(span.chips):
        if chips > 1:
            ring = chips == topology[d] and chips % torus.wraparound_multiple == 0
            bandwidth += 2 * link if ring else link
            hops += chips // 2 if ring else chips - 1
            names.append("xyz"[d] + ("" if ring else " (open)"))
    if not names:
        # The devices of one chip: a die-to-die link as wide as six ICI links (MaxText, Ironwood).
        die_to_die = 6 * 2 * torus.link_bandwidth
        return Route(
            devices,
            die_to_die,
            _HOP_LATENCY["ici"],
            1,
            "die-to-die",
            die_to_die,
            True,
            ("die-to-die",),
        )
    links = tuple(f"ICI {name[0]}{sign}" for name in names for sign in "+-")
    return Route(
        devices, bandwidth, _HOP_LATENCY["ici"], hops, "ICI " + "+".join(names), link, True, links
    )


def messages_on_links(
    torus: Torus,
    topology: tuple[int, ...],
    moves: Iterable[tuple[DeviceCoordinates, DeviceCoordinates]],
) -> dict[str, int]:
    """Returns the most messages that a link carries, by dimension and direction of a slice, while all moves are made.

    A message goes along one dimension after another, the shorter way around those that are closed.
    """
    messages = Counter[tuple[Any, ...]]()
    for source, target in moves:
        at = list(source[: 1 + len(topology)])
        for d, n in enumerate(topology, start=1):
            ahead = target[d] - at[d]
            if n % torus.wraparound_multiple == 0 and 2 * abs(ahead) > n:
                ahead -= n if ahead > 0 else -n
            for _ in range(abs(ahead)):
                messages[f"ICI {'xyz'[d - 1]}{'+' if ahead > 0 else '-'}", *at] += 1
                at[d] = (at[d] + (1 if ahead > 0 else -1)) % n
    most: dict[str, int] = {}
    for (link, *_), count in messages.items():
        most[link] = max(count, most.get(link, 0))
    return most


def all_coordinates(chip: Chip, topology: tuple[int, ...], domains: int) -> list[DeviceCoordinates]:
    """Lists the coordinates of all devices of a target, the last coordinate fastest."""
    ranges = (
        [range(n) for n in topology]
        if isinstance(chip.interconnect, Torus)
        else [range(topology[-1])]
    )
    cores = [range(chip.devices_per_chip)] if chip.devices_per_chip > 1 else []
    return [
        (domain, *inside)
        for domain in range(domains)
        for inside in itertools.product(*ranges, *cores)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class AxisMapping:
    """Extent of each mesh axis in the hardware."""

    target: Target
    spans: dict[str, GroupSpan]
    """Extent of one group of each axis; axes of degree 1 are absent."""
    _routes: dict[tuple[str, ...], Route | None] = dataclasses.field(
        default_factory=dict, repr=False
    )

    def route(self, axes: tuple[str, ...]) -> Route | None:
        """Returns the path of a group over several axes, or None where all have degree 1."""
        if axes not in self._routes:
            span, target = self.span(axes), self.target
            self._routes[axes] = (
                None
                if span is None
                else route(target.chip, target.topology, span, target.efficiency)
            )
        return self._routes[axes]

    def span(self, axes: tuple[str, ...]) -> GroupSpan | None:
        """Returns the extent of a group over several axes, or None where all have degree 1."""
        known = self.spans | self._levels
        spans = [known[axis] for axis in axes if axis in known]
        if not spans:
            return None
        chips = tuple(math.prod(s.chips[d] for s in spans) for d in range(len(spans[0].chips)))
        return GroupSpan(
            math.prod(s.domains for s in spans), chips, math.prod(s.cores for s in spans)
        )

    @functools.cached_property
    def _levels(self) -> dict[str, GroupSpan]:
        """Extents of the parts of axes that span slices or nodes, named as `hlo.collectives.axes_of_groups` does."""
        levels = {}
        for axis, span in self.spans.items():
            if 1 < span.domains < span.devices:
                levels[f"{axis} between {span.domains}"] = GroupSpan(
                    span.domains, (1,) * len(span.chips)
                )
                levels[f"{axis} within {span.devices // span.domains}"] = dataclasses.replace(
                    span, domains=1
                )
        return levels

    def __str__(self) -> str:
        return ", ".join(f"{axis} on {format_span(span)}" for axis, span in self.spans.items())


def format_span(span: GroupSpan) -> str:
    """Formats an extent: `ICI x4 y2`, `2 slices x ICI x16`, `8 nodes x 2 GPUs (NVLink)`."""
    on_torus, dims = (
        len(span.chips) > 1,
        [f"{'xyz'[d]}{n}" for d, n in enumerate(span.chips) if n > 1],
    )
    parts = (
        [f"{span.domains} {'slices (DCN)' if on_torus else 'nodes'}"] if span.domains > 1 else []
    )
    parts += (
        ["ICI " + " ".join(dims) if on_torus else f"{span.chips[0]} GPUs (NVLink)"] if dims else []
    )
    return " x ".join([*parts, *([f"{span.cores} devices of a chip"] if span.cores > 1 else [])])


@functools.lru_cache(maxsize=65536)
def map_axes(shape: MeshShape, target: Target) -> AxisMapping:
    """Maps the axes of a mesh to all devices of a target, innermost axis first, as `build_mesh` does.

    On a torus an axis takes whole dimensions where its degree is the product of some (as many as possible, as JAX's
    `mesh_utils` does), and factors of several dimensions otherwise. On GPUs the innermost axes fill a node.
    """
    degrees = {axis: n for axis, n in shape.degrees().items() if n > 1}
    if not target.chip.on_torus:
        return _map_to_nodes(degrees, target)
    slices = {axis: (shape.slices if axis == shape.dcn_axis else 1) for axis in degrees}
    free, cores = list(target.topology), target.chip.devices_per_chip
    spans: dict[str, GroupSpan] = {}
    for axis in reversed([axis for axis in AXES if axis in degrees]):
        degree, axis_cores = degrees[axis] // slices[axis], 1
        if cores > 1 and degree % cores == 0:
            degree, axis_cores, cores = degree // cores, cores, 1
        chips = _take_dimensions(degree, free)
        free = [n // taken for n, taken in zip(free, chips, strict=True)]
        spans[axis] = GroupSpan(slices[axis], chips, axis_cores)
    return AxisMapping(target, {axis: spans[axis] for axis in AXES if axis in spans})


def _take_dimensions(degree: int, free: list[int]) -> tuple[int, ...]:
    """Returns the chips along each dimension that an axis of `degree` takes of those that are free."""
    for count in range(len(free), 0, -1):
        for dims in itertools.combinations(range(len(free)), count):
            if all(free[d] > 1 for d in dims) and math.prod(free[d] for d in dims) == degree:
                return tuple(free[d] if d in dims else 1 for d in range(len(free)))
    chips = [1] * len(free)
    # The largest factor of a single dimension first, so that an axis spans as few dimensions as possible.
    while degree > 1:
        factors = [math.gcd(degree, n // taken) for n, taken in zip(free, chips, strict=True)]
        d = max(range(len(free)), key=lambda d: factors[d])
        if factors[d] == 1:
            chips[0] *= degree  # no dimension has such a factor: modelled as one long open chain
            break
        chips[d] *= factors[d]
        degree //= factors[d]
    return tuple(chips)


def _map_to_nodes(degrees: dict[str, int], target: Target) -> AxisMapping:
    """Maps axes to GPU nodes: the innermost axes fill a node, the others span several."""
    node, inner = target.topology[-1], 1
    spans: dict[str, GroupSpan] = {}
    for axis in reversed([axis for axis in AXES if axis in degrees]):
        degree = degrees[axis]
        inside = math.gcd(degree, max(1, node // inner)) if inner < node else 1
        spans[axis] = GroupSpan(degree // inside, (inside,))
        inner *= degree
    return AxisMapping(target, {axis: spans[axis] for axis in AXES if axis in spans})


@functools.lru_cache(maxsize=65536)
def machine_of_target(target: Target, shape: MeshShape) -> Machine:
    """Returns the machine that a mesh of `shape` has on a target."""
    chip, mapping = target.chip, map_axes(shape, target)
    spans = ((axis, tuple(n for n in span.chips if n > 1)) for axis, span in mapping.spans.items())
    torus = tuple((axis, chips) for axis, chips in spans if len(chips) > 1)
    return Machine(chip.platform, chip_name(chip.name), True, chip.name, torus, chip, mapping)
