"""Chip specifications: peak FLOP/s, HBM, interconnect and network of TPUs and GPUs.

Each number has its source.
All numbers are for one JAX device, dense and one-way, in FLOP/s, bytes and bytes/s. The known chips
are in `chips.toml`, with everything that is chosen by chip. Another chip is a TOML file with the
same fields (`read_chip`), or a `Chip` object in Python code (`--on module:attribute:SIZE`).
"""

import dataclasses
import itertools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import read_text
from meshwright.errors import ConfigError, by_class, nearest, reason_of
from xlacensus import chips
from xlacensus.chips import Nodes as Nodes

_KNOWN: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("chips.toml").read_text(encoding="utf-8")
)

SliceShape = tuple[int, ...]
"""Chips along each dimension of a TPU slice."""


@dataclasses.dataclass(frozen=True)
class Torus(chips.Torus):
    """TPU inter-chip interconnect (ICI), and the slices of it that are offered."""

    largest: SliceShape
    """Chips along each dimension of the largest slice (a full pod)."""
    slices: tuple[SliceShape, ...] = ()
    """Slice shapes that are offered; empty where every shape up to `largest` is."""


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Achieved fractions of a chip's peaks in a training step.

    All are from 0 to 1.
    How much of it a train step uses is in planner/physics.py.
    """

    matmul: float
    """Fraction of peak FLOP/s in a large matmul."""
    grouped_matmul: float
    """Fraction of the `matmul` rate in the matmuls of experts: groups of unequal size, token
    sorting and unsorting."""
    attention: float
    """Fraction of peak FLOP/s in the chip's own fused attention kernel (splash, cuDNN), of the
    products that it computes: the head size is below the matrix unit's, and softmax runs between
    its matmuls. The kernel's backward pass has 2.5 or 3.5 times those of its forward pass
    (`Kernels.backward`)."""
    hbm: float
    """Fraction of HBM bandwidth."""
    links: float
    """Fraction of the link bandwidth inside a slice (ICI) or node (NVLink)."""
    network: float
    """Fraction of the network bandwidth between slices (DCN) or nodes."""
    overlap: float
    """Fraction overlapped with compute, of the communication that has compute to overlap with."""
    tensor_overlap: float
    """Fraction overlapped with compute, of the communication over `tensor`, which is pipelined with
    the matmul before or after it."""
    tile: int = 128
    """Rows and columns of one matrix-unit tile, or of a step of a GPU's matmul along K (a size, not
    a fraction)."""


GPU_EFFICIENCY = Efficiency(**_KNOWN["gpu"]["efficiency"])
"""Fractions of GPUs, and of any chip that states none."""


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
    """JAX devices on one physical chip; shared resources are divided among them in the numbers
    above."""
    multiprocessors: int = 0
    """Multiprocessors of a GPU, each of which computes a tile of a matmul; 0 for TPUs."""
    clock_hz: float | None = None
    """Clock of the matrix unit, which converts a compiler's cycle estimates to seconds."""
    flops_fp8: float | None = None
    """Peak dense FLOP/s of products of float8 operands; None where the compiler gains nothing from
    them."""
    flops_mxfp8: float | None = None
    """Peak dense FLOP/s of products in MXFP8; None where the hardware does not apply the scales."""
    flops_nvfp4: float | None = None
    """Peak dense FLOP/s of products in NVFP4, only for plans: no program of this package has them.
    """
    flops_int8: float | None = None
    """Peak dense operations/s of products of int8 operands; None where the compiler gains nothing
    from them."""
    efficiency: Efficiency = GPU_EFFICIENCY
    """Achieved fraction of the peaks above."""
    # Facts of known chips.
    family: str = ""
    """Name that it shares with chips of the same matrix unit, which have the same fractions of
    peak."""
    announced: str = ""
    """Announcement that its figures are of; empty for a chip that others can use. An announced chip
    is planned for, and nothing is compiled for it."""
    compiler: str = ""
    """Name of the chip in libtpu, or its description in NVIDIA's CUDA plugin; empty where no
    compiler knows it."""
    device_kinds: tuple[str, ...] = ()
    """Prefixes of `jax.Device.device_kind`."""
    aliases: tuple[str, ...] = ()
    """Names of Google Cloud (accelerator types, node labels) and of products."""
    cores_per_chip: int = 1
    """Cores per chip that cloud accelerator types count: `v5p-256` is 128 chips."""
    compiler_options: Mapping[str, str] = dataclasses.field(
        default_factory=dict, hash=False, compare=False
    )
    """XLA options, the defaults of every verb that compiles for the chip."""
    sparse_cores: bool = False
    """Whether collectives run on SparseCores beside the matrix units."""
    tokens_last: bool = False
    """Whether saved outputs of gate and up are kept with tokens last: the compiler copies them into
    that order else."""
    folds_rings: bool = False
    """Whether rings go along a line of chips and back, in steps of two: the compiler runs permutes
    beside computation only where no message goes around the torus or along three chips."""
    sums_alone: bool = False
    """Whether the compiler runs nothing beside a reduce-scatter or an all-reduce, and makes a
    reduce-scatter over several dimensions of the torus an all-reduce."""
    gathers_in_levels: bool = False
    """Whether a gather over a closed three-dimensional torus takes two levels, because the compiler
    makes an all-reduce of one over all dimensions."""
    saves_some_layers: bool = False
    """Whether compiled memory agrees with plans that save some layers only: on v6e it is 33.5 GiB
    for 24 planned."""

    @property
    def on_torus(self) -> bool:
        """Whether it is a TPU: chips with a torus are, all others count as NVIDIA GPUs."""
        return isinstance(self.interconnect, Torus)

    @property
    def platform(self) -> str:
        """`jax.Device.platform` of the chip."""
        return "tpu" if self.on_torus else "cuda"

    @property
    def fragmentation(self) -> float:
        """Heap over live bytes.

        1.00 to 1.10 in programs that fill two thirds of a TPU (docs/log.md), 1.03 of a GPU.
        """
        return 1.1 if self.on_torus else 1.05

    @property
    def roomy_bytes(self) -> float:
        """Bytes that a step may take without being slowed down.

        Above three quarters of a GPU's memory XLA recomputes and overlaps less: Llama 2 70B on 64
        H100 takes 4.8 s with 57 GiB, 5.6 s with 61 and 5.9 s with 64 of its 75 (docs/log.md).
        """
        return self.hbm_bytes / self.fragmentation if self.on_torus else self.hbm_bytes * 0.75


def _slices(largest: SliceShape) -> tuple[SliceShape, ...]:
    """Lists the slices that Google Cloud offers: TPU v4, v5e, v5p, v6e and TPU7x.

    In three dimensions they are parts of one 4x4x4 cube, and whole cubes, with the dimensions in
    ascending order (`generate_tpu_topologies` of AI-Hypercomputer/xpk).
    """
    if len(largest) == 2:
        return ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
    cubes = itertools.product(*(range(4, most + 1, 4) for most in largest))
    return (
        (2, 2, 1),
        (2, 2, 2),
        (2, 2, 4),
        (2, 4, 4),
        *(shape for shape in cubes if sorted(shape) == list(shape)),
    )


def _known_chip(name: str) -> Chip:
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in _KNOWN[name].items()
    }
    defaults = _KNOWN["tpu" if "torus" in fields else "gpu"]
    interconnect = _interconnect(fields)
    if isinstance(interconnect, Torus):
        interconnect = dataclasses.replace(interconnect, slices=_slices(interconnect.largest))
    for name in ("sources", "compiler_options"):
        fields[name] = defaults.get(name, {}) | fields.get(name, {})
    fields["efficiency"] = Efficiency(**(defaults["efficiency"] | fields.get("efficiency", {})))
    return Chip(
        **{key: value for key, value in fields.items() if key not in _LINKS},
        interconnect=interconnect,
    )


def _interconnect(fields: dict[str, Any]) -> Torus | Nodes:
    """Returns the interconnect in the fields of a chip.

    Raises KeyError or TypeError for a missing or unknown field.
    """
    if "torus" not in fields:
        return Nodes(**fields["nodes"])
    torus = {**fields["torus"], "largest": tuple(fields["torus"]["largest"])}
    return Torus(dims=len(torus["largest"]), **torus)


_LINKS = ("nodes", "torus")
CHIPS: dict[str, Chip] = {name: _known_chip(name) for name in _KNOWN if name not in ("tpu", "gpu")}
"""Known chips by the name that `--on` takes (`targets.py`)."""


def chip_name(device_kind: str) -> str | None:
    """Returns the name in `CHIPS` of a `jax.Device.device_kind`.

    None if it is unknown (a CPU, for example).
    """
    prefixes = {kind: name for name, chip in CHIPS.items() for kind in chip.device_kinds}
    return prefixes.get(
        max((kind for kind in prefixes if device_kind.startswith(kind)), key=len, default="")
    )


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip of a `jax.Device.device_kind`, or None where it is unknown."""
    return CHIPS.get(chip_name(device_kind) or "")


_NUMBERS = ("flops_bf16", "hbm_bytes", "hbm_bandwidth", "network_bandwidth", "host_bandwidth")
_OPTIONAL = (
    "clock_hz",
    "devices_per_chip",
    "multiprocessors",
    "flops_fp8",
    "flops_int8",
    "flops_mxfp8",
    "flops_nvfp4",
)


def read_chip(file: Path) -> Chip:
    """Reads a chip from a TOML file.

    The file has the numeric fields of `Chip` in FLOP/s, bytes and bytes/s; either `[nodes]` with
    `link_bandwidth` and `devices_per_node`, or `[torus]` with `link_bandwidth`,
    `wraparound_multiple` and `largest`; and optionally `[efficiency]` with the fields of
    `Efficiency`. Raises ConfigError naming the field that is missing or wrong.
    """
    asked = f"chip file {file}"
    try:
        fields: dict[str, Any] = tomllib.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        truth = f"it cannot be read: {reason_of(error)}"
        raise by_class(error, ConfigError(asked, truth, "give a readable TOML file")) from error
    required = (*_NUMBERS, "torus" if "torus" in fields else "nodes")
    for key in required:
        if key not in fields:
            raise ConfigError(asked, f"it has no {key}", f"add each of {', '.join(required)}")
    known = {"name", "sources", "efficiency", *_NUMBERS, *_OPTIONAL, *_LINKS}
    for key in sorted(set(fields) - known):
        raise ConfigError(asked, f"{key!r} is not a field of a chip", nearest(key, known))
    _check_figures(asked, fields)
    try:
        interconnect = _interconnect(fields)
    except (KeyError, TypeError) as error:
        fix = (
            "give [nodes] link_bandwidth, devices_per_node; or [torus] link_bandwidth, "
            "wraparound_multiple, largest"
        )
        raise ConfigError(f"interconnect in {asked}", reason_of(error), fix) from error
    try:
        efficiency = (
            Efficiency(**fields["efficiency"]) if "efficiency" in fields else GPU_EFFICIENCY
        )
    except TypeError as error:
        names = ", ".join(
            field.name for field in dataclasses.fields(Efficiency) if field.name != "tile"
        )
        raise ConfigError(f"efficiency in {asked}", str(error), f"give each of {names}") from error
    return Chip(
        **{
            "name": file.stem,
            **{key: fields[key] for key in ("name", *_NUMBERS, *_OPTIONAL) if key in fields},
        },
        interconnect=interconnect,
        efficiency=efficiency,
        sources=dict.fromkeys((*_NUMBERS, "interconnect", "clock_hz"), str(file)),
    )


def _check_figures(asked: str, fields: Mapping[str, Any]) -> None:
    """Raises ConfigError for a figure in a chip file that no chip can have."""
    name = fields.get("name", "a name")
    if not isinstance(name, str) or not name:
        raise ConfigError(asked, f"name = {name!r} is not a text", 'write name = "my chip"')
    for key in (*_NUMBERS, *_OPTIONAL):
        if key in fields:
            _check_figure(asked, key, fields[key])
    for table in ("nodes", "torus", "efficiency"):
        values = fields.get(table, {})
        if not isinstance(values, dict):
            raise ConfigError(asked, f"{table} is not a table", f"begin it with [{table}]")
        for key, value in values.items():
            if key != "largest":
                _check_figure(f"{table} in {asked}", key, value)
                continue
            if not isinstance(value, list) or not 1 <= len(value) <= 3:
                truth = f"largest = {value!r} is not a list of one to three lengths"
                raise ConfigError(f"{table} in {asked}", truth, "write largest = [16, 16]")
            for length in value:
                _check_figure(f"{table} in {asked}", key, length)


def _check_figure(asked: str, key: str, value: Any) -> None:
    """Raises ConfigError for a figure that is not a number in the range of its field."""
    whole = key in _WHOLE
    example = f"write {key} = {_WHOLE.get(key, '1e12')}"
    if key in _FRACTIONS:
        example = f"write {key} = 0.7"
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MOST:
        kind = "positive whole number" if whole else "positive number"
        raise ConfigError(asked, f"{key} = {value!r:.100} is not a {kind}", example)
    if value == 0 and key not in _MAY_BE_ZERO:
        raise ConfigError(asked, f"{key} = {value!r} is not above 0", example)
    if key in _FRACTIONS and value > 1:
        raise ConfigError(asked, f"{key} = {value!r} is not a fraction from 0 to 1", example)


_MOST = 1e30
"""Largest figure of a chip: sums and products of several stay numbers."""
_WHOLE = {
    "devices_per_chip": 1,
    "multiprocessors": 132,
    "devices_per_node": 8,
    "wraparound_multiple": 4,
    "largest": 16,
    "tile": 128,
}
"""Figures that are whole numbers, each with an example."""
_FRACTIONS = {field.name for field in dataclasses.fields(Efficiency)} - {"tile"}
_MAY_BE_ZERO = {"multiprocessors", "overlap", "tensor_overlap"}
