"""Watchdog: limits after which hosts stop waiting for another."""

import dataclasses
from typing import Annotated

import msgspec

from meshwright.ranges import Ranged, Seconds

PATIENCE = 60.0
"""Seconds without an answer after which a host's own disk is given up: its checkpoints are an aid,
and end no run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watchdog(Ranged, part="watchdog"):
    """Limits after which hosts that wait for another stop, with exit code 75."""

    silence: Annotated[float, msgspec.Meta(ge=2, le=1e9)] = 20.0
    """Seconds without a sign of a host (it died, was stopped, or its network is cut) after which
    all others stop. Signs come up to a second apart, and a busy host is late: at least 2."""
    stall: Seconds = 600.0
    """Seconds that a host may spend in one step, in waiting for data, or in a save without writing
    another part of it; compiling, restoring and evaluating may take ten times as long. 0 sets no
    limit."""

    @property
    def patience(self) -> float:
        """Seconds in which a host's own disk has to answer, before the others give the host up."""
        return min(PATIENCE, self.stall / 4) if self.stall else PATIENCE
