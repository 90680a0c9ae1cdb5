"""Chip specifications: peak FLOP/s, HBM, interconnect and network of TPUs and GPUs, each number with its source.

All numbers are for one JAX device, dense and one-way, in FLOP/s, bytes and bytes/s. A chip that is not listed here is
a TOML file with the same fields (`read_chip`), or a `Chip` object in Python code (`--on module:attribute:SIZE`).
"""

import dataclasses
import itertools
import tomllib
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, nearest
from meshwright.hardware.efficiency import Efficiency

SliceShape = tuple[int, ...]
"""Chips along each dimension of a TPU slice."""


@dataclasses.dataclass(frozen=True)
class Torus:
    """TPU inter-chip interconnect (ICI): each chip is linked to its neighbours along every dimension."""

    dims: int
    """Dimensions of the torus."""
    link_bandwidth: float
    """Bytes/s from a chip to one neighbour, one way."""
    wraparound_multiple: int
    """A dimension whose length is a multiple of this number of chips has wraparound links, which make it a ring."""
    largest: SliceShape
    """Chips along each dimension of the largest slice (a full pod)."""
    slices: tuple[SliceShape, ...] = ()
    """Slice shapes that are offered; empty where every shape up to `largest` is."""

    def wraps_around(self, chips: int) -> bool:
        """Whether a dimension of `chips` chips is a ring."""
        return chips % self.wraparound_multiple == 0


@dataclasses.dataclass(frozen=True)
class Nodes:
    """GPU nodes: a switch joins all devices of a node (an NVLink domain), a network joins the nodes."""

    link_bandwidth: float
    """Bytes/s from a device into the switch, one way."""
    devices_per_node: int
    """Devices in one NVLink domain."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """Specification of one JAX device.

    A chip of your own is planned for by its name in Python, `--on module:attribute:SIZE`.

    Example:
        >>> from meshwright.hardware.chips import Nodes
        >>> gpu = mw.Chip(
        ...     "My GPU", flops_bf16=1e15, hbm_bytes=96e9, hbm_bandwidth=4e12,
        ...     interconnect=Nodes(link_bandwidth=400e9, devices_per_node=8),
        ...     network_bandwidth=50e9, host_bandwidth=32e9,
        ... )
        >>> gpu.interconnect.devices_per_node
        8
    """

    name: str
    """Display name."""
    flops_bf16: float
    """Peak dense bfloat16 FLOP/s."""
    hbm_bytes: float
    """HBM capacity in bytes."""
    hbm_bandwidth: float
    """HBM bandwidth in bytes/s."""
    interconnect: Torus | Nodes
    """Links inside a TPU slice (ICI) or inside a GPU node (NVLink)."""
    network_bandwidth: float
    """Bytes/s that a device sends between slices (DCN) or between nodes (InfiniBand, RoCE)."""
    host_bandwidth: float
    """Bytes/s between a device and the memory of its host."""
    sources: dict[str, str] = dataclasses.field(default_factory=dict, hash=False, compare=False)
    """Source of each number, by field."""
    devices_per_chip: int = 1
    """JAX devices on one physical chip; shared resources are divided among them in the numbers above."""
    clock_hz: float | None = None
    """Clock of the matrix unit, which converts a compiler's cycle estimates to seconds."""
    flops_fp8: float | None = None
    """Peak dense FLOP/s of products of float8 operands; None where the compiler gains nothing from them."""
    flops_mxfp8: float | None = None
    """Peak dense FLOP/s of products in MXFP8; None where the hardware does not apply the scales."""
    flops_nvfp4: float | None = None
    """Peak dense FLOP/s of products in NVFP4, for plans alone: no program of this package has them."""
    flops_int8: float | None = None
    """Peak dense operations/s of products of int8 operands; None where the compiler gains nothing from them."""
    efficiency: Efficiency | None = None
    """Achieved fraction of the peaks above; None takes that of the chip's family."""


_BOOK = "jax-ml/scaling-book, tpus.md@54e2c43"
_GPUS = "jax-ml/scaling-book, gpus.md@1a55377"
_DOCS = "Google Cloud TPU documentation"
_RECIPES = "AI-Hypercomputer/tpu-recipes@c8cfe2f"
_PCIE = (
    "PCIe generation of the host: 16 GB/s per lane group for TPUs (scaling-book), 64 GB/s Gen5 x16, 32 GB/s Gen4 x16"
)
_FP8 = "scaling-book, gpus.md: twice the bfloat16 rate; GB200 by NVIDIA dgxc-benchmarking; 300 as 200"
_FP4 = "NVIDIA HGX B200 and B300 datasheets, dense: four and six times the bfloat16 rate; GB200, GB300 likewise"
_CLOCK = "peak FLOP/s divided by the FLOPs per cycle of the matrix units"


def _tpu(**numbers: str) -> dict[str, str]:
    return {
        "flops_bf16": _DOCS, "hbm_bytes": _DOCS, "hbm_bandwidth": _DOCS, "interconnect": _BOOK,
        "network_bandwidth": _BOOK, "host_bandwidth": _BOOK, "clock_hz": _CLOCK, "flops_fp8": _DOCS,
        "flops_int8": _DOCS, **numbers,
    }  # fmt: skip


def _gpu(**numbers: str) -> dict[str, str]:
    return {
        "flops_bf16": _GPUS, "hbm_bytes": _GPUS, "hbm_bandwidth": _GPUS, "interconnect": _GPUS,
        "network_bandwidth": _GPUS, "host_bandwidth": _PCIE, "flops_fp8": _FP8, "flops_mxfp8": _FP8,
        "flops_nvfp4": _FP4, **numbers,
    }  # fmt: skip


# Google Cloud TPU documentation, "TPU v5e" and "TPU v6e", supported configurations.
_SLICES_2D: tuple[SliceShape, ...] = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))


def _slices_3d(largest: SliceShape) -> tuple[SliceShape, ...]:
    """Lists the 3-D slices: parts of one 4x4x4 cube, and whole cubes, with the dimensions in ascending order.

    Source: Google Cloud TPU documentation ("TPU v4", "TPU v5p", "TPU7x") and `generate_tpu_topologies` of
    AI-Hypercomputer/xpk.
    """
    cubes = itertools.product(*(range(4, most + 1, 4) for most in largest))
    return ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), *(shape for shape in cubes if sorted(shape) == list(shape)))


def _torus(link_bandwidth: float, largest: SliceShape) -> Torus:
    if len(largest) == 2:
        return Torus(2, link_bandwidth, 16, largest, _SLICES_2D)
    return Torus(3, link_bandwidth, 4, largest, _slices_3d(largest))


_DGX_A100 = "llm-foundry: 1600 Gbit/s per node"

CHIPS: dict[str, Chip] = {
    "v4": Chip(
        "TPU v4", 275e12, 32 * 2**30, 1.2e12, _torus(45e9, (16, 16, 16)), 3.125e9, 16e9, clock_hz=1.05e9,
        sources=_tpu(network_bandwidth="assumed equal to v5e: 25 Gbit/s per chip")),
    "v5e": Chip(
        "TPU v5 lite", 197e12, 16e9, 0.81e12, _torus(45e9, (16, 16)), 3.125e9, 16e9, clock_hz=1.5e9,
        flops_int8=394e12, sources=_tpu(hbm_bandwidth=_BOOK)),
    "v5p": Chip(
        "TPU v5p", 459e12, 95 * 2**30, 2.765e12, _torus(90e9, (16, 20, 28)), 6.25e9, 16e9, clock_hz=1.75e9,
        flops_int8=918e12, sources=_tpu()),
    "v6e": Chip(
        "TPU v6e", 918e12, 32e9, 1.64e12, _torus(90e9, (16, 16)), 12.5e9, 32e9, clock_hz=1.75e9,
        flops_int8=1836e12,
        sources=_tpu(interconnect="scaling-book: 90 GB/s per link; documentation: 800 GB/s per chip, which is 100")),
    # Two JAX devices per chip: each has half of 2307 TFLOP/s, 192 GiB, 7.37 TB/s, and of the links.
    "tpu7x": Chip(
        "TPU7x", 2307e12 / 2, 96 * 2**30, 7.37e12 / 2, _torus(100e9, (16, 24, 24)), 12.5e9, 16e9, devices_per_chip=2,
        clock_hz=2.2e9, flops_fp8=4614e12 / 2, sources=_tpu(
            interconnect="documentation: 1200 GB/s per chip over six links, both ways together",
            network_bandwidth="assumed equal to v6e",
            clock_hz=f"{_CLOCK}; {_RECIPES}: 950 TFLOP/s per device at n = 16384")),
    "a100": Chip(
        "NVIDIA A100", 312e12, 80e9, 2.0e12, Nodes(300e9, 8), 25e9, 32e9, sources=_gpu(network_bandwidth=_DGX_A100)),
    "a100-40gb": Chip(
        "NVIDIA A100-SXM4-40GB", 312e12, 40e9, 1.555e12, Nodes(300e9, 8), 25e9, 32e9,
        sources=_gpu(
            hbm_bytes="product name", hbm_bandwidth="NVIDIA A100 datasheet", network_bandwidth=_DGX_A100)),
    "h100": Chip("NVIDIA H100", 989e12, 80e9, 3.35e12, Nodes(450e9, 8), 50e9, 64e9, flops_fp8=1979e12, sources=_gpu()),
    "h200": Chip("NVIDIA H200", 989e12, 141e9, 4.8e12, Nodes(450e9, 8), 50e9, 64e9, flops_fp8=1979e12, sources=_gpu()),
    "b200": Chip(
        "NVIDIA B200", 2250e12, 180e9, 8.0e12, Nodes(900e9, 8), 50e9, 64e9,
        flops_fp8=4500e12, flops_mxfp8=4500e12, flops_nvfp4=9000e12,
        sources=_gpu()),
    "gb200": Chip(
        "NVIDIA GB200", 2450e12, 186e9, 8.0e12, Nodes(900e9, 72), 50e9, 450e9,
        flops_fp8=4900e12, flops_mxfp8=4900e12, flops_nvfp4=9800e12,
        sources=_gpu(flops_bf16="NVIDIA dgxc-benchmarking", host_bandwidth="NVLink-C2C, NVIDIA GB200 datasheet")),
    "b300": Chip(
        "NVIDIA B300", 2250e12, 288e9, 8.0e12, Nodes(900e9, 8), 100e9, 64e9,
        flops_fp8=4500e12, flops_mxfp8=4500e12, flops_nvfp4=13500e12,
        sources=_gpu(
            hbm_bytes="NVIDIA HGX B300 datasheet",
            network_bandwidth="NVIDIA HGX B300 datasheet: 800 Gbit/s per GPU")),
    "gb300": Chip(
        "NVIDIA GB300", 2450e12, 288e9, 8.0e12, Nodes(900e9, 72), 100e9, 450e9,
        flops_fp8=4900e12, flops_mxfp8=4900e12, flops_nvfp4=14700e12,
        sources=_gpu(
            flops_bf16="NVIDIA dgxc-benchmarking, as GB200", hbm_bytes="NVIDIA GB300 datasheet",
            network_bandwidth="NVIDIA GB300 datasheet: 800 Gbit/s per GPU",
            host_bandwidth="NVLink-C2C, NVIDIA GB300 datasheet")),
}  # fmt: skip
"""Known chips by the name that `--on` takes (`targets.py`)."""

# Prefixes of `jax.Device.device_kind`; the longest match wins.
_DEVICE_KINDS = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6 lite": "v6e",
    "TPU v6e": "v6e", "TPU7x": "tpu7x", "NVIDIA A100": "a100", "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA H100": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200", "NVIDIA GB200": "gb200",
    "NVIDIA B300": "b300", "NVIDIA GB300": "gb300",
}  # fmt: skip


def chip_name(device_kind: str) -> str | None:
    """Returns the name in `CHIPS` of a `jax.Device.device_kind`, or None where it is unknown (a CPU, for example)."""
    for kind in sorted(_DEVICE_KINDS, key=len, reverse=True):
        if device_kind.startswith(kind):
            return _DEVICE_KINDS[kind]
    return None


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip of a `jax.Device.device_kind`, or None where it is unknown."""
    name = chip_name(device_kind)
    return None if name is None else CHIPS[name]


_NUMBERS = ("flops_bf16", "hbm_bytes", "hbm_bandwidth", "network_bandwidth", "host_bandwidth")
_TABLES = ("nodes", "torus", "efficiency")


def read_chip(file: Path) -> Chip:
    """Reads a chip from a TOML file.

    The file has the numeric fields of `Chip` in FLOP/s, bytes and bytes/s; either `[nodes]` with `link_bandwidth` and
    `devices_per_node`, or `[torus]` with `link_bandwidth`, `wraparound_multiple` and `largest`; and optionally
    `[efficiency]` with the fields of `Efficiency`. Raises ConfigError naming the field that is missing or wrong.
    """
    try:
        fields: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"chip file {file}", f"it cannot be read: {error}", "give a readable TOML file") from error
    _check_fields(file, fields)
    numbers = {key: value for key, value in fields.items() if key not in (*_TABLES, "sources")}
    return Chip(
        **{"name": file.stem, **numbers},
        interconnect=_read_interconnect(file, fields),
        sources=dict.fromkeys((*_NUMBERS, "interconnect", "clock_hz"), str(file)),
        efficiency=_read_efficiency(file, fields["efficiency"]) if "efficiency" in fields else None,
    )


def _check_fields(file: Path, fields: dict[str, Any]) -> None:
    required = (*_NUMBERS, "torus" if "torus" in fields else "nodes")
    for key in required:
        if key not in fields:
            raise ConfigError(f"chip file {file}", f"it has no {key}", f"add each of {', '.join(required)}")
    for key in _NUMBERS:
        if not isinstance(fields[key], int | float) or fields[key] <= 0:
            raise ConfigError(
                f"chip file {file}", f"{key} = {fields[key]!r} is not a positive number", f"write {key} = 1e12"
            )
    known = {field.name for field in dataclasses.fields(Chip)} - {"interconnect"} | set(_TABLES)
    for key in sorted(set(fields) - known):
        raise ConfigError(f"chip file {file}", f"{key!r} is not a field of a chip", nearest(key, known))


def _read_interconnect(file: Path, fields: dict[str, Any]) -> Torus | Nodes:
    try:
        if "torus" not in fields:
            return Nodes(**fields["nodes"])
        torus = dict(fields["torus"])
        torus["largest"] = tuple(torus["largest"])
        return Torus(dims=len(torus["largest"]), **torus)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"interconnect in chip file {file}", str(error),
            "give [nodes] link_bandwidth, devices_per_node; or [torus] link_bandwidth, wraparound_multiple, largest",
        ) from error  # fmt: skip


def _read_efficiency(file: Path, fields: dict[str, Any]) -> Efficiency:
    try:
        return Efficiency(**fields)
    except TypeError as error:
        names = ", ".join(field.name for field in dataclasses.fields(Efficiency) if field.name != "tile")
        raise ConfigError(f"efficiency in chip file {file}", str(error), f"give each of {names}") from error
