"""Exit codes that a scheduler acts on: which ends of a run are worth another start.

A refusal (a wrong option, damaged data) would be refused again. Everything else may pass: a neighbour that died, a
preemption that saved in time (128 + SIGTERM), a process out of memory (128 + SIGKILL), a watchdog that asks for a
restart.
"""

RESTART = 75
"""Exit code with which a run asks to be started again (EX_TEMPFAIL of sysexits.h)."""
REFUSED = (2, 3, 4, 5, 6, 7, 9)
"""Exit codes of errors that name their fix (`meshwright.errors`): starting again changes nothing."""
STOPPED = 130
"""Exit code after Ctrl-C."""
FAILED = (1, 8, RESTART, 134, 137, 139, 143)
"""Exit codes to list where a scheduler wants those that restart: an exception, a bucket that is away, `RESTART`, and
the signals ABRT, KILL, SEGV and TERM."""


def restarts(code: int) -> bool:
    """Returns whether a run that ended with this exit code is worth another start."""
    return code not in (0, STOPPED, *REFUSED)
