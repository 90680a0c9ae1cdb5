"""The end of a process that does not wait: for a reader of its output,
for another thread, for other hosts."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_PATIENCE = 3.0
"""Seconds in which standard output and standard error take the last words."""


_at_once = threading.Event()


def wait_for_nothing() -> None:
    """Notes that the exit waits for nothing: a thread does not return,
    or other processes have been waited for."""
    _at_once.set()


def waits_for_nothing() -> bool:
    """Returns whether the process has to end without waiting for its threads and
    for other processes."""
    return _at_once.is_set()


def leave(code: int, text: str = "") -> NoReturn:
    """Prints `text` on standard error and ends the process
    with `code`, whatever its other threads do.

    A pipe that is full and a thread that holds a stream cannot keep it: what is not taken
    within seconds is lost.
    """
    threads = [_thread(_flush), _thread(lambda: _write(text))]
    for thread in threads:
        thread.join(_PATIENCE)
    os._exit(code)


def say(text: str) -> None:
    """Prints a line on standard error in a thread of its own: the caller goes on
    where it is not read."""
    _thread(lambda: _write(f"{text}\n"))


def _thread(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True, name="last words")
    thread.start()
    return thread


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _write(text: str) -> None:
    left = text.encode()
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(2, left) :]
