"""Error of predicted step times, measured: quantiles of published over predicted time, by kind of plan.

`data/errors.json` holds them; `python bench/foresight/errors.py` writes it from the published runs of
bench/foresight/published.csv.
"""

import dataclasses
import functools
import json
from pathlib import Path

from meshwright.hardware.targets import Target
from meshwright.runs.placed_run import PlacedRun

FILE = Path(__file__).with_name("data") / "errors.json"
FAMILIES = {
    "v4": ("v4",), "v5e": ("v5e",), "v5p": ("v5p",), "v6e": ("v6e",), "tpu7x": ("tpu7x",),
    "a100": ("a100", "a100-40gb"), "h100": ("h100", "h200"), "b200": ("b200", "gb200"), "b300": ("b300", "gb300"),
}  # fmt: skip
"""Chips with the same matrix unit, which have the same fractions of peak."""
UNSEEN = "a chip without published runs"
EVERY = "all published runs"
FEWEST = 6
"""Runs that a kind needs for a band."""


@dataclasses.dataclass(frozen=True)
class ErrorBand:
    """Published over predicted step time of the runs of one kind."""

    kind: str
    runs: int
    """Published runs, none of which the constants were fitted on, but for an unseen chip's."""
    low: float
    """10th percentile."""
    median: float
    high: float
    """90th percentile."""


@dataclasses.dataclass(frozen=True)
class ErrorRange:
    """Lowest and highest end of the bands of all kinds that a plan belongs to."""

    lowest: ErrorBand
    """Kind with the lowest 10th percentile."""
    highest: ErrorBand
    """Kind with the highest 90th percentile."""

    @property
    def low(self) -> float:
        """Published over predicted time that 9 of 10 runs of its kind exceed."""
        return self.lowest.low

    @property
    def high(self) -> float:
        """Published over predicted time that 9 of 10 runs of its kind stay below."""
        return self.highest.high

    def __str__(self) -> str:
        ends = dict.fromkeys(f"{band.kind}: {band.runs}" for band in (self.lowest, self.highest))
        return f"{self.low:.2f} to {self.high:.2f} of it, as 8 of 10 published runs ({', '.join(ends)})"


def kinds_of(placed: PlacedRun, target: Target) -> list[str]:
    """Returns the kinds of a plan: chip, precision, and what it splits besides the batch."""
    shape = placed.shape
    family = next((name for name, chips in FAMILIES.items() if target.name in chips), None)
    kinds = [EVERY, UNSEEN if family is None else family]
    kinds.append("bfloat16" if placed.run.training.matmul_precision == "compute" else "below bfloat16")
    kinds += [f"{axis} axis" for axis in ("stage", "context", "tensor") if shape.degrees()[axis] > 1]
    return [*kinds, "experts"] if any(layer.experts is not None for layer in placed.spec.layers) else kinds


@functools.cache
def read_bands() -> dict[str, ErrorBand]:
    """Reads the measured bands by kind."""
    kinds = json.loads(FILE.read_text(encoding="utf-8"))["kinds"]
    return {kind: ErrorBand(kind, **quantiles) for kind, quantiles in kinds.items()}


def band_of(placed: PlacedRun, target: Target) -> ErrorRange:
    """Returns the ends of the bands of all kinds that a plan belongs to; kinds with too few runs have none.

    A chip with too few runs has the band of a chip without any.
    """
    bands = read_bands()
    kinds = kinds_of(placed, target)
    known = [bands[kind] for kind in kinds if kind in bands]
    if not any(kind in FAMILIES and kind in bands for kind in kinds):
        known.append(bands[UNSEEN])
    return ErrorRange(min(known, key=lambda band: band.low), max(known, key=lambda band: band.high))
