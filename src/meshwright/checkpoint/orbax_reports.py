"""Suppression of the reports that Orbax prints about failures that it also raises.

A save or restore that fails raises one error. Orbax also logs its traceback (logger `absl`), asyncio logs each task
that was not awaited (logger `asyncio`), and TensorStore goes on to report every other tensor's transfer to an event
loop that is closed by then (`sys.unraisablehook`). Meshwright raises the error with its reason, so these reports are
dropped, but only they, and only while an operation of Orbax is in progress or shortly after one failed.
"""

import contextlib
import inspect
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_ORBAX_FILE = re.compile(r"[/\\](orbax|tensorstore)[/\\]")
_WRITER_FILE = re.compile(r"[/\\](orbax|tensorstore|etils)[/\\]")
"""Files of what Orbax writes with in threads of its own: its small files go through etils."""
_ORBAX_TASK = re.compile("orbax|tensorstore|OCDBT", re.IGNORECASE)
"""Text of asyncio's report of a task of Orbax or of a failed transfer; OCDBT is TensorStore's storage format."""


def _log_filter(record: logging.LogRecord) -> bool:
    """Keeps a record that is neither logged by a file of Orbax nor about one of its tasks."""
    if record.name == "asyncio":
        frames = traceback.walk_tb(record.exc_info[2] if record.exc_info else None)
        failed_writing = any(_WRITER_FILE.search(frame.f_code.co_filename) for frame, _ in frames)
        return not failed_writing and not _ORBAX_TASK.search(record.getMessage())
    return not _ORBAX_FILE.search(record.pathname)


class _Suppression:
    """Filters on two loggers and a hook, installed while at least one operation is in progress in any thread."""

    def __init__(self) -> None:
        self._lock, self._operations = threading.Lock(), 0
        self._loggers = (logging.getLogger("absl"), logging.getLogger("asyncio"))
        self._previous_hook: Callable[[Any], object] = sys.unraisablehook
        self.last_report = 0.0

    def acquire(self) -> None:
        with self._lock:
            self._operations += 1
            if self._operations == 1:
                for logger in self._loggers:
                    logger.addFilter(_log_filter)
                self._previous_hook = sys.unraisablehook
                sys.unraisablehook = self._hook

    def release(self) -> None:
        with self._lock:
            self._operations -= 1
            if not self._operations:
                for logger in self._loggers:
                    logger.removeFilter(_log_filter)
                # A hook that was installed in the meantime stays; it may call this one, which still passes reports on.
                if sys.unraisablehook == self._hook:
                    sys.unraisablehook = self._previous_hook

    def _hook(self, unraisable: Any) -> None:
        coroutine = unraisable.object
        if str(unraisable.exc_value) == "Event loop is closed":
            self.last_report = time.monotonic()
        elif not (inspect.iscoroutine(coroutine) and _ORBAX_FILE.search(coroutine.cr_code.co_filename)):
            self._previous_hook(unraisable)


suppression = _Suppression()
"""The one of this process."""


@contextlib.contextmanager
def orbax_reports_suppressed() -> Iterator[None]:
    """Drops Orbax's own reports of failures inside the block; contexts may nest and overlap between threads."""
    suppression.acquire()
    try:
        yield
    finally:
        suppression.release()
