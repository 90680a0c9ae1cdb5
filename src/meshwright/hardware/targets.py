"""Hardware targets: `v5p:4x4x8`, two slices `2*v6e:16x16`, `h100:64`.

A chip may be a file; lists and ranges name several.
"""

import dataclasses
import math
import re

from meshwright.errors import ConfigError, nearest
from meshwright.hardware.chips import CHIPS, Chip, Efficiency, Nodes, SliceShape, Torus, read_chip
from meshwright.plugins import load
from meshwright.storage.paths import path_of
from meshwright.trust import derive


@dataclasses.dataclass(frozen=True)
class Target:
    """Hardware that a run is planned or compiled for: slices of a TPU torus, or nodes of GPUs."""

    name: str
    """Chip as `--on` names it: a key of `chips.CHIPS`, a TOML file, or `module:attribute`."""
    chip: Chip
    """Specification of one device."""
    topology: tuple[int, ...]
    """Chips along each dimension of a slice; for GPUs (nodes, GPUs per node)."""
    slices: int = 1
    """TPU slices, which the data-center network (DCN) joins."""
    given_efficiency: Efficiency | None = None
    """Measured fractions of peak that replace those of the chip; None keeps those."""
    efficiency_source: str = ""
    """Source of `given_efficiency`, for the reader."""

    @property
    def efficiency(self) -> Efficiency:
        """Achieved fractions of the chip's peaks."""
        return self.given_efficiency or self.chip.efficiency

    def __str__(self) -> str:
        size = format_size(self.topology)
        return f"{self.slices}*{self.name}:{size}" if self.slices > 1 else f"{self.name}:{size}"

    @property
    def chips(self) -> int:
        """Physical chips in all slices or nodes."""
        return math.prod(self.topology) * self.slices

    @property
    def devices(self) -> int:
        """JAX devices in all slices or nodes."""
        return self.chips * self.chip.devices_per_chip

    @property
    def domains(self) -> int:
        """Groups of chips that only the network joins.

        TPU slices (ICI inside), or GPU nodes (NVLink inside).
        """
        return self.slices if self.chip.on_torus else self.topology[0]


def usable_chips() -> list[str]:
    """Returns the names of the chips that others can use, which a compiler knows."""
    return [name for name, chip in CHIPS.items() if not chip.announced]


def refuse_announced(target: Target, doing: str) -> None:
    """Raises ConfigError for a chip that is only announced.

    doing: what cannot be done on it, as a noun phrase.
    """
    if target.chip.announced:
        raise ConfigError(
            doing,
            f"{target.chip.name} is only announced ({target.chip.announced}): no compiler here "
            "knows it, and it cannot be used",
            f"use meshwright plan, or one of {', '.join(usable_chips())}",
        )


def format_size(topology: tuple[int, ...]) -> str:
    """Formats a topology: `4x4x8`."""
    return "x".join(map(str, topology))


_FORM = re.compile(r"(?:(\d+)\*)?(.+?):(\d+(?:x\d+)*)")


def parse_target(text: str) -> Target:
    """Parses one value of `--on`.

    `CHIP:4x4x8` is one TPU slice and `2*CHIP:4x4x8` two slices. For GPUs `CHIP:64` counts all GPUs,
    and `CHIP:8x8` is nodes x GPUs per node. CHIP is a name in `chips.CHIPS`, the TOML file of a
    chip, or a `Chip` object in Python code as `module:attribute` or `FILE.py:attribute`. Raises
    ConfigError with the nearest valid target.
    """
    match = _FORM.fullmatch(text.strip())
    if not match:
        fix = _from_accelerator_type(text.strip()) or "write v5p:4x4x8, or h100:64"
        raise _refusal(text, "a target is CHIP:SIZE, with sizes joined by x", fix)
    slices, size = int(match[1] or 1), tuple(int(n) for n in match[3].split("x"))
    name, chip = _find_chip(text, derive(text, match[2]), size)
    links = chip.interconnect
    if slices < 1 or min(size) < 1:
        example = "64" if isinstance(links, Nodes) else format_size((4,) * links.dims)
        raise _refusal(text, "sizes and slices are at least 1", f"write {name}:{example}")
    if isinstance(links, Nodes):
        return Target(name, chip, _nodes_topology(text, name, links.devices_per_node, size, slices))
    _check_slice(text, name, links, size)
    return Target(name, chip, size, slices)


def _refusal(text: str, truth: str, fix: str) -> ConfigError:
    return ConfigError(f"target {text!r}", truth, fix)


_ALIASES = {alias: name for name, chip in CHIPS.items() for alias in chip.aliases}


def _find_chip(text: str, name: str, size: tuple[int, ...]) -> tuple[str, Chip]:
    if name.endswith(".toml"):
        return name, read_chip(path_of(name))
    if ":" in name:
        chip = load("chip", name)
        if not isinstance(chip, Chip):
            truth = f"{name} is a {type(chip).__name__}, not a meshwright.hardware.chips.Chip"
            raise _refusal(text, truth, "name a Chip object")
        return name, chip
    name = name.lower()
    if name in CHIPS:
        return name, CHIPS[name]
    alias = _ALIASES.get(name)
    if alias is None:
        raise _refusal(text, f"there is no chip {name!r}", nearest(name, CHIPS))
    links = CHIPS[alias].interconnect
    fix = (
        _neighbours(alias, links, size)
        if isinstance(links, Torus)
        else f"{alias}:{format_size(size)}"
    )
    raise _refusal(text, f"there is no chip {name!r}", f"write {fix}")


def _from_accelerator_type(text: str) -> str:
    """Suggests the target for a cloud accelerator type.

    `v5litepod-16` is `v5e:4x4`, `v5p-256` is `v5p:4x4x8`.
    """
    name, _, count = text.lower().rpartition("-")
    name = _ALIASES.get(name, name)
    if name not in CHIPS or not count.isdigit():
        return ""
    links, cores = CHIPS[name].interconnect, CHIPS[name].cores_per_chip
    if isinstance(links, Nodes):
        return f"write {name}:{count}"
    chips = int(count) // cores
    counts = f" ({text} counts {count} TensorCores, which are {chips} chips)" if cores > 1 else ""
    return f"write {_neighbours(name, links, (chips,))}{counts}"


def _check_slice(text: str, name: str, torus: Torus, size: SliceShape) -> None:
    """Raises ConfigError where no TPU slice has this shape, with the nearest that exist."""
    largest = format_size(torus.largest)
    chips = math.prod(size)
    most_chips = math.prod(torus.largest)
    if len(size) != torus.dims:
        truth = f"a slice of {name} has {torus.dims} dimensions"
    elif any(n > most for n, most in zip(sorted(size), sorted(torus.largest), strict=True)):
        truth = f"the largest slice of {name} is {largest}"
        if chips > most_chips:
            raise _refusal(
                text, truth, f"use several slices: {-(-chips // most_chips)}*{name}:{largest}"
            )
    elif torus.slices and size not in torus.slices:
        rule = f"the slices are {', '.join(map(format_size, torus.slices))}"
        if torus.dims == 3:
            rule = (
                "slices have ascending dimensions, and are part of one 4x4x4 cube or made of "
                "whole cubes"
            )
        truth = f"{name} has no slice of {format_size(size)}: {rule}"
    else:
        return
    raise _refusal(text, truth, f"write {_neighbours(name, torus, size)}")


def slices_by_chips(torus: Torus) -> dict[int, SliceShape]:
    """Returns the slices that are offered by their number of chips.

    Of slices with equally many chips, the nearest to a cube has the most bandwidth across its
    middle.
    """
    by_chips: dict[int, SliceShape] = {}
    for shape in sorted(torus.slices, key=max):
        by_chips.setdefault(math.prod(shape), shape)
    return by_chips


def _neighbours(name: str, torus: Torus, size: tuple[int, ...]) -> str:
    if not torus.slices:
        return f"{name}:{format_size(torus.largest)}"
    by_chips = slices_by_chips(torus)
    chips = math.prod(size)
    ascending = tuple(sorted(size))
    if ascending in torus.slices:
        return f"{name}:{format_size(ascending)}"
    if chips in by_chips:
        return f"{name}:{format_size(by_chips[chips])}"
    counts = [
        *sorted(n for n in by_chips if n < chips)[-1:],
        *sorted(n for n in by_chips if n > chips)[:1],
    ]
    return " or ".join(f"{name}:{format_size(by_chips[n])} ({n} chips)" for n in counts)


def _nodes_topology(
    text: str, name: str, domain: int, size: tuple[int, ...], slices: int
) -> tuple[int, int]:
    """Returns (nodes, GPUs per node) for a number of GPUs, or for both numbers.

    domain: most GPUs of a node.
    """
    total = math.prod(size)
    if slices > 1 or len(size) > 2:
        raise _refusal(
            text, f"{name} is a GPU: it has nodes, not slices", f"write {name}:{slices * total}"
        )
    if len(size) == 2:
        if size[1] > domain:
            raise _refusal(
                text, f"a node of {name} has at most {domain} GPUs", f"write {name}:{total}"
            )
        return size[0], size[1]
    if total <= domain:
        return 1, total
    # An NVLink domain of 72 is filled with as many GPUs as make all nodes equal: powers of two take
    # 64 of each.
    node = next(n for n in range(domain, 0, -1) if total % n == 0)
    if node * 2 <= domain and domain <= 8:
        full = total // domain
        truth = (
            f"nodes of {name} have {domain} GPUs, and {total} = {full} * {domain} + "
            f"{total - full * domain}"
        )
        raise _refusal(text, truth, f"write {name}:{full * domain} or {name}:{(full + 1) * domain}")
    return total // node, node


_COUNTED = re.compile(r"(.+?):(\d+(?:\.\.\d+)?)")


def expand_targets(text: str) -> list[str]:
    """Returns the targets that a list names: `h100:64,128`, `v5p:64..1024`.

    Each is as `parse_target` takes it.
    A part without a chip is another size of the chip before it. A range is every power of two in
    it, and its ends, of which the chip has a slice or whole nodes. A number of TPU chips in a list
    is its slice nearest to a cube. Raises ConfigError where nothing is named or nothing exists in a
    range.
    """
    parts = [derive(text, part.strip()) for part in text.split(",") if part.strip()]
    if len(parts) == 1 and ".." not in text:
        return parts  # parse_target has the errors of a single target
    targets: dict[str, None] = {}
    chip = ""
    for part in parts:
        if ":" not in part and not chip:
            raise ConfigError(
                f"--on {text}",
                f"{part!r} names no chip",
                "write v5p:4x4x8,h100:64 or h100:64..1024",
            )
        chip, _, size = part.rpartition(":") if ":" in part else (chip, "", part)
        match = _COUNTED.fullmatch(f"{chip}:{size}")
        names = [f"{chip}:{size}"]
        if match:
            names = _counted(derive(text, chip), match[2])
        targets |= dict.fromkeys(names)
    if not targets:
        raise ConfigError(
            f"--on {text!r}", "it names no target", "write v5p:4x4x8, or h100:64,h100:128"
        )
    return [derive(text, target) for target in targets]


def _counted(chip: str, count: str) -> list[str]:
    slices, _, name = chip.rpartition("*")
    links = CHIPS[name.lower()].interconnect if name.lower() in CHIPS else None
    low, between, high = count.partition("..")
    asked = f"--on {chip}:{count}"
    if not between and not isinstance(links, Torus):
        return [f"{chip}:{count}"]
    if slices:
        raise ConfigError(
            asked, "a number of chips does not say how slices divide them", f"{chip}:4x4x4"
        )
    first, last = int(low), int(high or low)
    if not 0 < first <= last:
        ends = f"{last}..{first}" if last else "64..1024"
        raise ConfigError(asked, f"{first} to {last} holds nothing", f"{chip}:{ends}")
    numbers = sorted(
        {first, last} | {2**n for n in range(last.bit_length()) if first <= 2**n <= last}
    )
    if isinstance(links, Torus):
        shapes = slices_by_chips(links)
        found = [f"{chip}:{format_size(shapes[n])}" for n in numbers if n in shapes]
        near = sorted(shapes, key=lambda n: abs(math.log(n / first)))[:2]
    else:
        links = links or parse_target(derive(chip, f"{chip}:1")).chip.interconnect
        node = links.devices_per_node if isinstance(links, Nodes) else 1
        found = [f"{chip}:{n}" for n in numbers if n <= node or n % node == 0 or node > 8]
        near = [max(1, first // node) * node, (first // node + 1) * node]
    if not found:
        fix = " or ".join(
            f"{chip}:{n}..{n}" if between else f"{chip}:{n}" for n in sorted(set(near))
        )
        raise ConfigError(asked, "no such number of chips is offered", fix)
    return found
