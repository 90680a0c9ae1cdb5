"""Restarts: which ends of a run are worth another start, and how many starts without progress are.

A refusal (a wrong option, damaged data) would be refused again. Everything else may pass: a
neighbour that died, a preemption that saved in time (128 + SIGTERM), a process out of memory (128 +
SIGKILL), a watchdog that asks for a restart. A run of weeks is interrupted hundreds of times, so
starts are counted since the last progress (`Tally`), by the supervisor and by every scheduler's job
alike (`launching.job_starts`).
"""

import dataclasses
from typing import Annotated, Literal

import msgspec

from meshwright.errors import CompilerError, MeshwrightError
from meshwright.ranges import NonNegativeInt, Ranged, Seconds

RESTART = 75
"""Exit code with which a run asks to be started again (EX_TEMPFAIL of sysexits.h)."""
NO_PROGRESS = 11
"""Exit code of a run that was started again and again without progress."""
REFUSED = (2, 3, 4, 5, 6, 7, 9, NO_PROGRESS, CompilerError.exit_code)
"""Exit codes of errors that name their fix (`meshwright.errors`): starting again
changes nothing."""
EXCEPTIONS = 3
"""Starts in a row, without progress between,
after which an exception (exit code 1) is taken for one of every start."""
EXCEPTION = 1
"""Exit code of Python after an exception that nothing has met, such as one of a user's own code."""
STOPPED = 130
"""Exit code after Ctrl-C."""
FAILED = (1, 8, 10, RESTART, 134, 137, 139, 143)
"""Exit codes to list where a scheduler wants those that restart: an exception, a bucket that is
away, a disk that is full, `RESTART`, and the signals ABRT, KILL, SEGV and TERM."""


def restarts(code: int) -> bool:
    """Whether a run that ended with this exit code is worth another start."""
    return code not in (0, STOPPED, *REFUSED)


class NoProgressError(MeshwrightError):
    """Run that was started again and again without progress."""

    exit_code = NO_PROGRESS


@dataclasses.dataclass
class Tally:
    """Starts of a run since its last progress: a checkpoint of a later step than any before.

    Example:
        >>> tally = Tally(most=1)
        >>> [tally.add(75, step) for step in (0, 100, 200, 200)]
        [None, None, None, 'it was started again 1 time without a checkpoint after step 200']
    """

    most: int
    """Starts after the first, without progress between, after which no other is made."""
    step: int = -1
    """Step of the newest checkpoint so far."""
    starts: int = 0
    """Starts since that appeared which have ended, preempted ones left out."""
    raised: int = 0
    """How many of the last of these ended with an exception."""

    def add(self, code: int, step: int, *, preempted: bool = False) -> str | None:
        """Counts a start that has ended; returns why no other is made, None where one is.

        code: its exit code.
        step: of the newest checkpoint now, 0 for none.
        preempted: the machine was to be stopped, whatever the run did.
        """
        if step > self.step:
            self.step, self.starts, self.raised = step, 0, 0
        if not preempted:
            self.starts += 1
            self.raised = self.raised + 1 if code == EXCEPTION else 0
        return self.verdict()

    def verdict(self) -> str | None:
        """Returns why no other start is made; None where one is."""
        if self.raised >= EXCEPTIONS:
            return (
                f"the last {self.raised} starts ended with an exception, without a checkpoint "
                "between"
            )
        if self.starts > self.most:
            times = "1 time" if self.most == 1 else f"{self.most} times"
            return f"it was started again {times} without a checkpoint after step {self.step}"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts(Ranged, part="restarts"):
    """Restarts under --supervise: after exit code 75, a crash, SIGKILL, a preemption, or a
    checkpoint that failed."""

    most: NonNegativeInt = 20
    """Restarts in a row without progress (a checkpoint of a later step) after which the supervisor
    gives up. A preemption that the machine's provider announced is not counted."""
    backoff: Seconds = 5.0
    """Seconds before a restart; doubled for each that follows without a step in between, up
    to five minutes."""
    wait: Annotated[float, msgspec.Meta(ge=1, le=1e9)] = 300.0
    """Seconds to wait for the supervisors of the other hosts."""
    hosts: Literal["all", "left"] = "all"
    """Hosts of a restart: all of them, or those that are left after `wait`, on a mesh of fewer
    devices that the planner chooses; the batch stays the same, and the losses within float
    error."""
