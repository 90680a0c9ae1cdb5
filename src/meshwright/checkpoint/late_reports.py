"""Late reports of a failed operation of Orbax: waited for, and dropped (`orbax_reports`)."""

import gc
import threading
import time
import traceback
import warnings

from meshwright.checkpoint.orbax_reports import suppression

_QUIET_SECONDS = 0.5
"""Seconds without a late report after which none is expected: they arrive within 0.3 s of a failure on a local disk."""
_MAX_WAIT_SECONDS = 5.0
_LATE_SECONDS = 60.0
"""Seconds after a failure for which reports stay suppressed: threads of a busy machine write them after the wait."""


def drain_reports(error: BaseException) -> None:
    """Waits, inside `orbax_reports_suppressed`, for the reports that follow `error`: 0.5 s, at most 5 s.

    Later ones are dropped too, for a minute.

    Tasks and coroutines that the failed operation abandoned are reported when they are collected. The frames of
    `error` hold them, so the frames' local variables are released here, while the reports are still suppressed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        chained: BaseException | None = error
        while chained is not None:
            traceback.clear_frames(chained.__traceback__)
            chained = chained.__cause__
        gc.collect()
        suppression.acquire()
        late = threading.Timer(_LATE_SECONDS, suppression.release)
        late.daemon = True
        late.start()
        _drain()
        gc.collect()


def _drain() -> None:
    """Waits until no report has arrived for `_QUIET_SECONDS`, at most `_MAX_WAIT_SECONDS`."""
    start = suppression.last_report = time.monotonic()
    while time.monotonic() < min(suppression.last_report + _QUIET_SECONDS, start + _MAX_WAIT_SECONDS):
        time.sleep(0.02)
