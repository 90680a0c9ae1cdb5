"""Rates of a chip for a simulated schedule: peaks, links,
and the fractions of them that programs achieve."""

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Torus:
    """TPU inter-chip interconnect (ICI): each chip is linked
    to its neighbours along every dimension."""

    dims: int
    """Dimensions of the torus."""
    link_bandwidth: float
    """Bytes/s from a chip to one neighbour, one way."""
    wraparound_multiple: int
    """A dimension whose length is a multiple of this number
    of chips has wraparound links, which make it a ring."""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """GPU nodes: a switch joins all devices of a node (an NVLink domain), a network joins
    the nodes."""

    link_bandwidth: float
    """Bytes/s from a device into the switch, one way."""
    devices_per_node: int
    """Devices in one NVLink domain."""


class Chip(Protocol):
    """Peak rates of one JAX device, in FLOP/s, bytes/s and hertz;
    any object with these attributes is one."""

    @property
    def name(self) -> str:
        """Display name."""

    @property
    def flops_bf16(self) -> float:
        """Peak dense bfloat16 FLOP/s."""

    @property
    def flops_fp8(self) -> float | None:
        """Peak dense FLOP/s of products of float8 operands;
        None where they are as fast as bfloat16."""

    @property
    def flops_mxfp8(self) -> float | None:
        """Peak dense FLOP/s of products in MXFP8; None where they are as fast as bfloat16."""

    @property
    def flops_int8(self) -> float | None:
        """Peak dense operations/s of products of int8 operands;
        None where they are as fast as bfloat16."""

    @property
    def hbm_bandwidth(self) -> float:
        """HBM bandwidth in bytes/s."""

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s between a device and the memory of its host."""

    @property
    def network_bandwidth(self) -> float:
        """Bytes/s that a device sends between slices (DCN) or between nodes (InfiniBand, RoCE)."""

    @property
    def interconnect(self) -> Torus | Nodes:
        """Links inside a TPU slice (ICI) or inside a GPU node (NVLink)."""

    @property
    def devices_per_chip(self) -> int:
        """JAX devices on one physical chip, which share its links."""

    @property
    def clock_hz(self) -> float | None:
        """Clock of the matrix unit, which converts a compiler's cycle estimates to seconds;
        None for GPUs."""


class Efficiency(Protocol):
    """Achieved fractions of a chip's peak rates, 0 to 1."""

    @property
    def matmul(self) -> float:
        """Fraction of peak FLOP/s in a large matmul."""

    @property
    def grouped_matmul(self) -> float:
        """Fraction of the `matmul` rate in the matmuls of experts."""

    @property
    def attention(self) -> float:
        """Fraction of peak FLOP/s in a fused attention kernel."""

    @property
    def hbm(self) -> float:
        """Fraction of HBM bandwidth."""

    @property
    def links(self) -> float:
        """Fraction of the link bandwidth inside a slice (ICI) or node (NVLink)."""

    @property
    def network(self) -> float:
        """Fraction of the network bandwidth between slices (DCN) or nodes."""


@dataclasses.dataclass(frozen=True)
class ChipRates:
    """Peak rates of a chip by its data sheet.

    Example: an H100 SXM.

        >>> h100 = ChipRates(
        ...     "H100",
        ...     flops_bf16=989e12,
        ...     hbm_bandwidth=3.35e12,
        ...     interconnect=Nodes(450e9, 8),
        ...     network_bandwidth=50e9,
        ...     host_bandwidth=55e9,
        ...     flops_fp8=1979e12,
        ... )
        >>> h100.interconnect.devices_per_node
        8
    """

    name: str
    flops_bf16: float
    hbm_bandwidth: float
    interconnect: Torus | Nodes
    network_bandwidth: float
    host_bandwidth: float
    flops_fp8: float | None = None
    flops_mxfp8: float | None = None
    flops_int8: float | None = None
    devices_per_chip: int = 1
    clock_hz: float | None = None


@dataclasses.dataclass(frozen=True)
class AchievedFractions:
    """Fractions of the peak rates that a program achieves;
    the defaults are the peaks themselves."""

    matmul: float = 1.0
    grouped_matmul: float = 1.0
    attention: float = 1.0
    hbm: float = 1.0
    links: float = 1.0
    network: float = 1.0
