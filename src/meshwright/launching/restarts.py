"""Restarts: which ends of a run are worth another start, and how often and on which hosts a supervisor starts it.

A refusal (a wrong option, damaged data) would be refused again. Everything else may pass: a neighbour that died, a
preemption that saved in time (128 + SIGTERM), a process out of memory (128 + SIGKILL), a watchdog that asks for a
restart.
"""

import dataclasses
from typing import Annotated, Literal

import msgspec

from meshwright.ranges import NonNegativeInt, Ranged, Seconds

RESTART = 75
"""Exit code with which a run asks to be started again (EX_TEMPFAIL of sysexits.h)."""
REFUSED = (2, 3, 4, 5, 6, 7, 9)
"""Exit codes of errors that name their fix (`meshwright.errors`): starting again changes nothing."""
STOPPED = 130
"""Exit code after Ctrl-C."""
FAILED = (1, 8, 10, RESTART, 134, 137, 139, 143)
"""Exit codes to list where a scheduler wants those that restart: an exception, a bucket that is away, a disk that is
full, `RESTART`, and the signals ABRT, KILL, SEGV and TERM."""


def restarts(code: int) -> bool:
    """Whether a run that ended with this exit code is worth another start."""
    return code not in (0, STOPPED, *REFUSED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts(Ranged, part="restarts"):
    """Restarts under --supervise: after exit code 75, a crash, SIGKILL, a preemption, or a checkpoint that failed."""

    most: NonNegativeInt = 20
    """Restarts after which the supervisor gives up."""
    backoff: Seconds = 5.0
    """Seconds before a restart; doubled for each that follows without a step in between, up to five minutes."""
    wait: Annotated[float, msgspec.Meta(ge=1, le=1e9)] = 300.0
    """Seconds to wait for the supervisors of the other hosts."""
    hosts: Literal["all", "left"] = "all"
    """Hosts of a restart: all of them, or those that are left after `wait`, on a mesh of fewer devices that the planner
    chooses; the batch stays the same, and the losses within float error."""
