"""Checks of a census against itself: a count that cannot be right is stated beside the figures, not passed on."""

import dataclasses
from collections.abc import Mapping

from meshwright.analysis.simulate import SimulatedSchedule
from meshwright.formatting import format_count


@dataclasses.dataclass(frozen=True)
class FlopsBand:
    """Matrix-product FLOPs that a compiled step of one device may have, from the model's formulas."""

    least: float
    """A step with fewer misses part of the model."""
    most: float
    """A step with more multiplies what the model does not need, or is counted twice."""
    most_is: str = ""
    """What `most` allows for, in words."""


def doubts_of(
    flops: float, excess: float, unpriced: Mapping[str, int], band: FlopsBand | None, schedule: SimulatedSchedule | None
) -> tuple[str, ...]:
    """Returns the reasons for which a census does not trust itself; empty where it does.

    flops: matrix products of the program.  excess: of those, what a finding already names as not needed.  unpriced:
    executions of kernels whose FLOPs are not known.  band: None where no formula is known.  schedule: None where none
    was simulated.
    """
    doubts: list[str] = []
    if schedule is not None and schedule.doubt:
        doubts.append(schedule.doubt)
    if band is not None and flops < band.least:
        cause = f": kernels without known FLOPs ({', '.join(unpriced)})" if unpriced else ""
        doubts.append(
            f"the compiled program has {format_count(flops)} FLOPs of matrix products, and the model needs at least "
            f"{format_count(band.least)}{cause}; FLOPs and predicted time are too low"
        )
    elif band is not None and flops - excess > band.most:
        doubts.append(
            f"the compiled program has {format_count(flops - excess)} FLOPs of matrix products, and the model explains "
            f"at most {format_count(band.most)} ({band.most_is}); FLOPs and predicted time may be too high"
        )
    return tuple(doubts)
