"""Price of a TPU attention kernel from its VLIW bundles: what the compiler schedules, times
how often it runs.

A Pallas kernel is a loop over a grid.
Its body has the bundles of a step, and parts that only some steps run:

    for each head, for each block of one operand (a row), for each block of the other:
        step                        every pair of blocks; in tokamax's, which has a list of
                                    them, every visible one
        start                       the first of a row: sums are set to zero
        run                         a pair that the mask cuts: products, mask, softmax
        full                        a pair that is visible as a whole (JAX's runs the same)
        finish                      the last of a row: sums are written

    cycles = heads * (pairs * step + rows * (start + finish) + cut * run + full pairs * full)
    seconds = cycles / clock * STALLS

A bundle is one cycle unless the core waits. `kernel_bundles.json` has the bundles of each part,
read from libtpu's dump of its final bundles by bench/kernel_bundles.py.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path

from xlacensus.hlo.parser import Instruction

BUNDLES_FILE = Path(__file__).with_name("kernel_bundles.json")
STALLS = 1.1
"""Measured seconds over those of the bundles: waits for HBM and for the first blocks. Median of
five forward kernels that others timed alone on v6e, 1.04 to 1.14
(`python bench/kernel_bundles.py --check`)."""


@dataclasses.dataclass(frozen=True)
class KernelBlocks:
    """Blocks of an attention kernel: queries, keys, and the keys of one product."""

    q: int
    kv: int
    kv_compute: int

    def __str__(self) -> str:
        return f"{self.q} x {self.kv} by {self.kv_compute}"


@dataclasses.dataclass(frozen=True)
class VisiblePairs:
    """Pairs of blocks of which attention sees something."""

    cut: float
    """Those that the edge of the mask cuts."""
    full: float
    """Those that are visible as a whole."""

    @property
    def total(self) -> float:
        """Both kinds."""
        return self.cut + self.full


@dataclasses.dataclass(frozen=True)
class KernelBundles:
    """Bundles of one kernel on one chip."""

    chip: str
    """Display name of the chip (`Chip.name`)."""
    library: str
    """jax or tokamax."""
    kernel: str
    """fwd, dq, dkv, or fused: the backward kernel that computes all gradients."""
    head_size: int
    segments: bool
    """Whether it compares documents."""
    q: int
    kv: int
    kv_compute: int
    start: int
    run: int
    full: int
    finish: int
    step: int

    @property
    def blocks(self) -> KernelBlocks:
        """Its blocks."""
        return KernelBlocks(self.q, self.kv, self.kv_compute)

    def cycles(self, queries: int, keys: int, visible: VisiblePairs) -> float:
        """Returns the cycles of one head."""
        rows = queries // self.q
        columns = keys // self.kv
        steps = visible.total if self.library == "tokamax" else rows * columns
        if self.kernel in ("dkv", "fused"):
            rows = columns
        ends = rows * (self.start + self.finish)
        return steps * self.step + ends + visible.cut * self.run + visible.full * self.full


@functools.cache
def read_bundles() -> tuple[KernelBundles, ...]:
    """Reads the bundles of all kernels."""
    rows = json.loads(BUNDLES_FILE.read_text(encoding="utf-8"))["kernels"]
    return tuple(KernelBundles(**row) for row in rows)


def bundles_of(
    chip: str, library: str, kernel: str, head_size: int, segments: bool = True
) -> Iterable[KernelBundles]:
    """Yields a library's kernels of a chip and a head size that are known, one
    for each choice of blocks."""
    wanted = (chip, library, kernel, head_size, segments)
    for row in read_bundles():
        if (row.chip, row.library, row.kernel, row.head_size, row.segments) == wanted:
            yield row


def find_bundles(
    chip: str,
    library: str,
    kernel: str,
    head_size: int,
    blocks: KernelBlocks,
    segments: bool = True,
) -> KernelBundles | None:
    """Returns a kernel with these blocks; None if its bundles are not known."""
    for row in bundles_of(chip, library, kernel, head_size, segments):
        if row.blocks == blocks:
            return row
    return None


def causal_pairs(tokens: int, q: int, kv: int, window: int | None = None) -> VisiblePairs:
    """Returns the pairs of blocks of which causal attention of a sequence to itself sees something.

    window: keys that a query sees, itself included; None is all before it.
    """
    visited = 0
    full = 0
    for row in range(tokens // q):
        first_query = row * q
        last_query = first_query + q - 1
        first_key = 0
        if window is not None:
            first_key = max(0, first_query - window + 1)
        for column in range(first_key // kv, last_query // kv + 1):
            visited += 1
            begins = column * kv
            in_window = window is None or last_query - begins < window
            full += begins + kv - 1 <= first_query and in_window
    return VisiblePairs(visited - full, full)


def pairs_of_fraction(fraction: float, rows: int, columns: int) -> VisiblePairs:
    """Returns the pairs of blocks that are visited where a fraction of all keys is visible.

    The edge of a mask crosses a row of blocks; of each block that it cuts, half is hidden at the
    mean: visited = visible + half a block for each row. Causal attention has n^2 / 2 + n / 2 of n^2
    blocks, of which n are cut.
    """
    if fraction >= 1:
        return VisiblePairs(0.0, float(rows * columns))
    visited = fraction * rows * columns + max(rows, columns) / 2
    cut = min(visited, float(max(rows, columns)))
    return VisiblePairs(cut, visited - cut)


_BLOCK = re.compile(r'block_(\w+)\\*": (\d+)')
_FIELDS = {"fwd": ("q", "kv", "kv_compute"), "dq": ("q_dq", "kv_dq", "kv_dq")}
_BACKWARD_FIELDS = ("q_dkv", "kv_dkv", "kv_dkv_compute")
_ONLY_TOKAMAX = "use_experimental_scheduler"
"""What tokamax's kernels state of themselves, and JAX's of the same names do not."""


def kernel_of(instruction: Instruction, chip: str) -> KernelBundles | None:
    """Returns the bundles of a splash kernel in a compiled program, which states its blocks.

    None for a kernel that states none, and for one whose bundles are not known.
    """
    name = re.search(r"splash_\w+?_(fwd|dq|dkv)", instruction.name)
    blocks = {field: int(size) for field, size in _BLOCK.findall(instruction.attribute_text)}
    if name is None or not blocks:
        return None
    kernel = name[1]
    fields = _FIELDS.get(kernel, _BACKWARD_FIELDS)
    if kernel == "dkv" and "q_dq" not in blocks:
        kernel = "fused"
    if not all(field in blocks for field in fields):
        return None
    head_size = instruction.operand_arrays[-1].dims[-1]
    for operand in instruction.operand_arrays:
        if operand.dtype == "bf16" and len(operand.dims) >= 3:
            head_size = operand.dims[-1]
            break
    chosen = KernelBlocks(*(blocks[field] for field in fields))
    library = "tokamax" if _ONLY_TOKAMAX in instruction.attribute_text else "jax"
    segmented = "segmented" in instruction.name
    return find_bundles(chip, library, kernel, head_size, chosen, segmented)


def kernel_seconds(
    bundles: KernelBundles, clock_hz: float, queries: int, keys: int, visible: VisiblePairs
) -> float:
    """Returns the seconds of one head in one kernel."""
    return bundles.cycles(queries, keys, visible) / clock_hz * STALLS
