"""Lists of hardware targets: `v5p:4x4x8,h100:64`, numbers of chips `h100:64,128`, ranges `v5p:64..1024`."""

import math
import re

from meshwright.errors import ConfigError
from meshwright.hardware.chips import CHIPS, Nodes, SliceShape, Torus
from meshwright.hardware.targets import format_size, parse_target

_COUNTED = re.compile(r"(.+?):(\d+(?:\.\.\d+)?)")


def expand_targets(text: str) -> list[str]:
    """Returns the targets that a list names, each as `parse_target` takes it.

    A part without a chip is another size of the chip before it. A range is every power of two in it, and its ends, of
    which the chip has a slice or whole nodes. A number of TPU chips in a list is its slice nearest to a cube. Raises
    ConfigError where nothing is named or nothing exists in a range.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) == 1 and ".." not in text:
        return parts  # one target as it is written, with its own errors
    targets: dict[str, None] = {}
    chip = ""
    for part in parts:
        if ":" not in part and not chip:
            raise ConfigError(f"--on {text}", f"{part!r} names no chip", "write v5p:4x4x8,h100:64 or h100:64..1024")
        chip, _, size = part.rpartition(":") if ":" in part else (chip, "", part)
        match = _COUNTED.fullmatch(f"{chip}:{size}")
        targets |= dict.fromkeys(_counted(chip, match[2]) if match else [f"{chip}:{size}"])
    if not targets:
        raise ConfigError(f"--on {text!r}", "it names no target", "write v5p:4x4x8, or h100:64,h100:128")
    return list(targets)


def _counted(chip: str, count: str) -> list[str]:
    """Returns the targets of one number of chips, or of a range."""
    slices, _, name = chip.rpartition("*")
    interconnect = CHIPS[name.lower()].interconnect if name.lower() in CHIPS else None
    low, between, high = count.partition("..")
    if not between and not isinstance(interconnect, Torus):
        return [f"{chip}:{count}"]
    if slices:
        raise ConfigError(
            f"--on {chip}:{count}", "a number of chips does not say how slices divide them", f"{chip}:4x4x4"
        )
    first, last = int(low), int(high or low)
    if not 0 < first <= last:
        raise ConfigError(f"--on {chip}:{count}", f"{first} to {last} holds nothing", f"{chip}:64..1024")
    numbers = {first, last} | {2**n for n in range(last.bit_length()) if first <= 2**n <= last}
    if isinstance(interconnect, Torus):
        shapes = _slices_of(interconnect)
        found = [f"{chip}:{format_size(shapes[n])}" for n in sorted(numbers) if n in shapes]
        near = sorted(shapes, key=lambda n: abs(math.log(n / first)))[:2]
    else:
        node = interconnect.devices_per_node if isinstance(interconnect, Nodes) else _node_of(chip)
        found = [f"{chip}:{n}" for n in sorted(numbers) if n <= node or n % node == 0 or node > 8]
        near = [max(1, first // node) * node, (first // node + 1) * node]
    if not found:
        fix = " or ".join(f"{chip}:{n}..{n}" if between else f"{chip}:{n}" for n in sorted(set(near)))
        raise ConfigError(f"--on {chip}:{count}", "no such number of chips is offered", fix)
    return found


def _node_of(chip: str) -> int:
    """Devices of a node of a chip that is not listed."""
    interconnect = parse_target(f"{chip}:1").chip.interconnect
    return interconnect.devices_per_node if isinstance(interconnect, Nodes) else 1


def _slices_of(torus: Torus) -> dict[int, SliceShape]:
    """Chips of each slice that is offered, and of slices with equally many the one nearest to a cube."""
    by_chips: dict[int, SliceShape] = {}
    for shape in sorted(torus.slices, key=max):
        by_chips.setdefault(math.prod(shape), shape)
    return by_chips
