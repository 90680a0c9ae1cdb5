"""The machine that a run is settled for.

Its chips, the torus under each mesh axis, its compiler's options.
It is read from the devices of a mesh, or from a target that is planned for; everything that a run
chooses by hardware (runs/settle.py) is chosen from it.
"""

import dataclasses
import functools
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.errors import ConfigError
from meshwright.hardware.chips import CHIPS, Chip, chip_name, find_chip
from meshwright.statuses import unknown_option
from xlacensus.determinism import ORDERED_SUMS, sums_in_order

if TYPE_CHECKING:
    from meshwright.hardware.interconnect import AxisMapping

AUTO = "auto"
"""Word of a Run's compiler options that stands for those of the chip; without it the compiler's
defaults are used."""


@dataclasses.dataclass(frozen=True)
class Determinism:
    """Whether two runs of one program on the same devices have the same bits, on some platforms."""

    platforms: list[str]
    keeps: Literal["bitwise", "bitwise with options", "not promised"]
    sentence: str
    compiler_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """XLA options of `--training.deterministic`."""


_TABLE = Path(__file__).with_name("determinism.toml").read_text(encoding="utf-8")
DETERMINISM = tuple(Determinism(**row) for row in tomllib.loads(_TABLE)["platform"])


def determinism_of(platform: str) -> Determinism:
    """Returns what a `jax.Device.platform` keeps."""
    return next((row for row in DETERMINISM if platform in row.platforms), DETERMINISM[-1])


def fix_communication() -> None:
    """Makes NCCL add in one order, before devices first communicate.

    Raises ConfigError for another NCCL_ALGO.
    """
    given = os.environ.setdefault("NCCL_ALGO", ORDERED_SUMS[0])
    if not sums_in_order():
        truth = "NCCL may then add in another order in every run"
        raise ConfigError(
            f"--training.deterministic with NCCL_ALGO={given}",
            truth,
            f"NCCL_ALGO={ORDERED_SUMS[0]}",
        )


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hardware of a mesh."""

    platform: str
    """`jax.Device.platform`: cpu, tpu, gpu or cuda, rocm."""
    chip_name: str | None = None
    """Name in `chips.CHIPS`, if it is known."""
    installed: bool = False
    """Whether kernel libraries count as present, as on the hardware that a plan is for."""
    kind: str = ""
    """`jax.Device.device_kind`, or the name of the chip."""
    torus: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Mesh axes that span several dimensions of a TPU slice's torus, with their degree along each,
    outermost first."""
    chip: Chip | None = dataclasses.field(default=None, compare=False)
    """Specification, if it is known."""
    mapping: "AxisMapping | None" = dataclasses.field(default=None, compare=False, repr=False)
    """Extent of each mesh axis in a target; None for devices."""

    @property
    def listed(self) -> Chip | None:
        """Specification in `CHIPS` of the chip, even if `chip` is the user's own."""
        return CHIPS.get(self.chip_name or "")

    @property
    def determinism(self) -> Determinism:
        """Whether two runs on it have the same bits."""
        return determinism_of(self.platform)

    @property
    def on_tpu(self) -> bool:
        """Whether the devices are TPUs."""
        return self.platform == "tpu"

    @property
    def simulated(self) -> bool:
        """Whether the devices are simulated, by the CPU."""
        return self.platform == "cpu"


def machine_of_mesh(mesh: Mesh) -> Machine:
    """Returns the machine that the devices of a mesh belong to."""
    device = mesh.devices.flat[0]
    kind = device.device_kind
    return Machine(
        device.platform, chip_name(kind), False, kind, torus_degrees(mesh), find_chip(kind)
    )


def torus_degrees(mesh: Mesh) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns the axes that span several dimensions of a torus, with the degree along each.

    The torus is that of a TPU slice.
    Degrees are outermost first. Empty for devices that report no coordinates, and for an axis whose
    order does not follow the dimensions.
    """
    degrees = {
        axis: degrees_on_torus(mesh.devices, number) for number, axis in enumerate(mesh.axis_names)
    }
    return tuple((axis, sizes) for axis, sizes in degrees.items() if len(sizes) > 1)


def degrees_on_torus(devices: np.ndarray, axis: int) -> tuple[int, ...]:
    """Returns the degree of a mesh axis along each torus dimension that it spans inside a slice.

    Outermost first; () where devices report no coordinates, and where their order does not follow
    the dimensions.
    """
    line = np.moveaxis(devices, axis, 0).reshape(devices.shape[axis], -1)[:, 0]
    inside = [d for d in line if getattr(d, "slice_index", 0) == getattr(line[0], "slice_index", 0)]
    if any(getattr(d, "coords", None) is None for d in inside):
        return ()
    coordinates = [(*d.coords, getattr(d, "core_on_chip", 0)) for d in inside]
    # Places along each dimension, numbered as they appear; the outer a dimension is, the fewer
    # times it changes.
    places = []
    for along in zip(*coordinates, strict=True):
        number_of = {place: number for number, place in enumerate(dict.fromkeys(along))}
        if len(number_of) > 1:
            places.append([number_of[place] for place in along])
    places.sort(key=lambda c: np.count_nonzero(np.diff(c)))
    degrees = tuple(max(c) + 1 for c in places)
    return degrees if [*zip(*places, strict=True)] == [*np.ndindex(*degrees)] else ()


def ring_order(degrees: tuple[int, ...]) -> tuple[int, ...]:
    """Orders the devices of an axis in a ring.

    Its neighbors are neighbors on the torus, if possible.
    degrees: of the axis along each dimension of the torus, outermost first. A cycle through a grid
    needs one even dimension; without it the ends are apart.
    """
    order = list(range(degrees[0]))
    for degree in degrees[1:]:
        # There and back row by row, with an even number of rows through all columns but the first,
        # and home along it.
        first = 1 - len(order) % 2
        columns = [range(first, degree), range(degree - 1, first - 1, -1)]
        there = [row * degree + j for i, row in enumerate(order) for j in columns[i % 2]]
        home = [row * degree for row in order] if first else []
        order = [*home[:1], *there, *reversed(home[1:])]
    return tuple(order)


def compiler_options_of(chip: Chip | None, words: Sequence[str]) -> dict[str, str]:
    """Returns XLA options by name.

    chip: None has no options of its own.  words: `auto` for the options of the chip, and
    NAME=VALUE, which replaces one of them. Raises ConfigError for a word that is neither.
    """
    options: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word == AUTO:
            options |= chip.compiler_options if chip else {}
        elif not equals:
            raise ConfigError(
                f"compiler option {word!r}",
                "an option has a name and a value",
                f"{word}=true, or auto",
            )
        else:
            options[name] = value
    return options


@functools.lru_cache(maxsize=64)
def refused_options(device: Any, options: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Returns the names of those `options` that the installed compiler of `device` does not know.

    It compiles an empty program with them; older and newer compilers know other options. Raises
    ConfigError for a value that an option does not take.
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    nothing = jax.ShapeDtypeStruct((), "float32", sharding=sharding)
    refused: list[str] = []
    while True:
        left = {name: value for name, value in options if name not in refused}
        try:
            jax.jit(lambda x: x).lower(nothing).compile(compiler_options=left)
            return tuple(refused)
        except jax.errors.JaxRuntimeError as error:
            unknown = unknown_option(error)
            if unknown not in left:
                raise ConfigError(
                    "compiler options "
                    f"{', '.join(f'{name}={value}' for name, value in left.items())}",
                    str(error).splitlines()[0][:300],
                    "another value, or --training.compiler-options auto",
                ) from error
            refused.append(unknown)
