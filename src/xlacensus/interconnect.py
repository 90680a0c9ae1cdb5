"""Interconnect model: bandwidth, latency and time of a collective over a group of devices.

A group spans ICI links (a TPU torus), NVLink (a GPU node), or the network between them (DCN for TPU
slices, InfiniBand or RoCE for GPU nodes). Times are those of bidirectional rings over all links
that the group spans (scaling-book, sharding.md and gpus.md): an all-gather or reduce-scatter of V
bytes over n devices takes V (n-1)/n / W for a bandwidth W, an all-reduce twice that, and each hop
adds its latency.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from xlacensus.chips import Chip, Efficiency, Torus

DeviceCoordinates = tuple[int, ...]
"""Coordinates of a device: its slice or node, its position inside,
and its index on the chip where that has several."""


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
    """Links that the path uses: `ICI x+y`, `ICI x (open)`, `die-to-die`, `NVLink`, `DCN`,
    or `network`."""
    neighbour_bandwidth: float
    """Bytes/s from one device to its neighbour."""
    on_torus: bool
    """Whether messages pass through neighbours (ICI) rather than through a switch."""
    links: tuple[str, ...]
    """Links that transfers along other paths may use at the same time: each direction
    of a torus' dimension is one."""
    outside: int = 0
    """Devices of the group in other slices or nodes than a device's own."""

    def seconds(self, kind: str, payload: float) -> float:
        """Returns the time of one collective in seconds.

        kind: HLO opcode. payload: bytes of the whole array,
        as `hlo.ledger.LedgerEntry` counts them.
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
            if self.on_torus:
                # On a ring a block travels a quarter of the way on average;
                # a switch forwards it once.
                return payload * n / (4 * self.bandwidth) + latency
            # Each device sends its own rows: those for other nodes over its own link
            # to the network.
            crossing = payload * self.outside / n / self.neighbour_bandwidth
            return max(crossing, payload * (n - 1 - self.outside) / n / self.bandwidth) + latency
        return payload / self.neighbour_bandwidth + self.hop_latency


_HOP_LATENCY = {"ici": 1e-6, "nvlink": 3e-6, "network": 6e-6}
"""Seconds per hop. Sources: scaling-book (1 us on a torus); stas00/ml-engineering, eight H200
(all-reduce of 1 MiB: 46 us for two times seven hops) and four nodes of B200 (16 MiB: 0.5 ms for two
times 31)."""


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
    """Returns the path between the devices of a group,
    while all groups of the same mesh axes communicate at once.

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
    # The devices of one chip share its links;
    # a group that holds all of them brings shared bytes in once.
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
    """Returns the most messages that a link carries,
    by dimension and direction of a slice, while all moves are made.

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
