"""Locks of output folders: the record of a holder, and the thread in which it counts up."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.storage.paths import in_bucket

BEAT = 5.0
"""Seconds between two counts of the holder."""


class LockError(CheckpointError):
    """Output folder that another run writes to."""

    exit_code = 9


def lock_record(count: int, **token: str) -> str:
    """Returns the content of a lock."""
    return json.dumps(
        {"host": socket.gethostname(), "process": os.getpid(), **token, "count": count}
    )


def parse_holder(text: bytes) -> dict[str, Any]:
    """Returns the record of the holder; an empty one for a file without one."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return {}


def count_age(out: Path, now: float) -> float | None:
    """Returns the seconds since the holder of a local output folder counted.

    The result is None where the lock has no holder.

    now: Unix seconds. A bucket's driver gives no times, so nothing is known of a lock there.
    """
    if in_bucket(out):
        return None
    try:
        status = (out / ".lock").lstat()
    except OSError:
        return None
    return max(0.0, now - status.st_mtime) if status.st_size else None


def describe_holder(holder: dict[str, Any]) -> str:
    """Names the process that holds a lock."""
    known = "process" in holder and "host" in holder
    return f"process {holder['process']} on {holder['host']}" if known else "a process"


def refused(out: Path, holder: dict[str, Any]) -> LockError:
    """Returns the error of a run whose folder another holds."""
    return LockError(
        f"training in {out}",
        f"{describe_holder(holder)} trains there, and two runs in one folder would overwrite "
        "each other",
        "another --out, or wait until it ends",
    )


def changes(read: Callable[[], Any], before: Any, seconds: float) -> bool:
    """Returns whether the holder lives: whether what `read` returns changes within `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(BEAT / 2)
        if read() != before:
            return True
    return False


@contextlib.contextmanager
def beating(beat: Callable[[], None], name: str) -> Iterator[None]:
    """Calls `beat` in a thread, at once and then every `BEAT` seconds, until the block ends.

    The last is waited for.

    name: of the thread, as stacks show it.
    """
    stopped = threading.Event()

    def run() -> None:
        beat()
        while not stopped.wait(BEAT):
            beat()

    thread = threading.Thread(target=run, daemon=True, name=name)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
