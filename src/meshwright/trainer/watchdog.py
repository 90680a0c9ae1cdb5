"""Watchdog: phases of a process as others see them, and limits after which hosts stop waiting for another."""

import dataclasses
import time
from typing import Annotated

import msgspec

from meshwright.ranges import Ranged, Seconds

BEATS = "MESHWRIGHT_BEATS"
"""Variable with the number of an open file that takes a process's signs, for the one that supervises it."""
PREPARING = "prepare"
"""Phase before training, without a limit: text may be tokenised for hours."""


class Phases:
    """Step and phase of a process, set by the training loop in one assignment and read by other threads."""

    def __init__(self, phase: str = "start") -> None:
        self.now: tuple[int, str, float] = (0, phase, time.monotonic())
        self._saving = ("save", 0.0)

    @property
    def place(self) -> tuple[int, str, float]:
        """Step, phase, and since when; of a save since it last wrote something, or waits for other hosts (`commit`)."""
        step, phase, since = self.now
        return (
            (step, self._saving[0], max(since, self._saving[1]))
            if phase == "save"
            else (step, phase, since)
        )

    def saves(self, phase: str) -> None:
        """Called by a save when it has written another part (`save`), or waits for the other hosts (`commit`)."""
        self._saving = (phase, time.monotonic())

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins a phase: start, data, compile, step, save, evaluate, sample. step: None stays in the same one."""
        self.now = (self.now[0] if step is None else step, phase, time.monotonic())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watchdog(Ranged, part="watchdog"):
    """Limits after which hosts that wait for another stop, with exit code 75."""

    silence: Annotated[float, msgspec.Meta(ge=2, le=1e9)] = 20.0
    """Seconds without a sign of a host (it died, was stopped, or its network is cut) after which all others stop. Signs
    come up to a second apart, and a busy host is late: at least 2."""
    stall: Seconds = 600.0
    """Seconds that a host may spend in one step, in waiting for data, or in a save without writing another part of it;
    compiling, restoring and evaluating may take ten times as long. 0 sets no limit."""
