"""Watchdog: phases of a process as others see them, and limits after which hosts stop waiting for another."""

import dataclasses
import time

from meshwright.errors import ConfigError

BEATS = "MESHWRIGHT_BEATS"
"""Variable with the number of an open file that takes a process's signs, for the one that supervises it."""
PREPARING = "prepare"
"""Phase before training, without a limit: text may be tokenised for hours."""


class Phases:
    """Step and phase of a process, set by the training loop in one assignment and read by other threads."""

    def __init__(self, phase: str = "start") -> None:
        self.now: tuple[int, str, float] = (0, phase, time.monotonic())

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins a phase: start, data, compile, step, save, evaluate, sample. step: None stays in the same one."""
        self.now = (self.now[0] if step is None else step, phase, time.monotonic())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watchdog:
    """Limits after which hosts that wait for another stop, with exit code 75."""

    silence: float = 20.0
    """Seconds without a sign of a host (it died, was stopped, or its network is cut) after which all others stop; at
    least 2."""
    stall: float = 600.0
    """Seconds that a host may spend in one step, in waiting for data, or in saving; compiling, restoring and evaluating
    may take ten times as long. 0 sets no limit."""

    def __post_init__(self) -> None:
        if self.silence < 2:
            raise ConfigError(
                f"--watchdog.silence {self.silence:g}",
                "signs come up to a second apart, and a busy host is late",
                "--watchdog.silence 20",
            )
        if self.stall < 0:
            raise ConfigError(f"--watchdog.stall {self.stall:g}", "it is a number of seconds", "--watchdog.stall 600")
