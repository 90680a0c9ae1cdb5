"""Lock on an output folder: one run at a time writes into it.

On a file system it is the system's lock on the file `.lock` (flock), which ends with the process that holds it, however
that ends. Some shared file systems keep such locks on each host separately, so the file also counts up while its holder
lives: a run on another host watches it before it takes over. Buckets have a lock of their own (bucket_lock.py).
"""

import contextlib
import fcntl
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.heartbeat import beating

BEAT = 5.0
"""Seconds between two counts of the holder."""
WATCHED = 4
"""Beats for which a run on another host watches the file of one that it cannot see."""


class LockError(CheckpointError):
    """Output folder that another run writes to."""

    exit_code = 9


def lock_record(count: int, **token: str) -> str:
    """Returns the content of a lock."""
    return json.dumps({"host": socket.gethostname(), "process": os.getpid(), **token, "count": count})


def parse_holder(text: bytes) -> dict[str, Any]:
    """Returns the record of the holder; an empty one for a file without one."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return {}


def _read(file: int) -> dict[str, Any]:
    return parse_holder(os.pread(file, 4096, 0))


def describe_holder(holder: dict[str, Any]) -> str:
    """Names the process that holds a lock."""
    known = "process" in holder and "host" in holder
    return f"process {holder['process']} on {holder['host']}" if known else "a process"


def refused(out: Path, holder: dict[str, Any]) -> LockError:
    """Returns the error of a run whose folder another holds."""
    return LockError(
        f"training in {out}",
        f"{describe_holder(holder)} trains there, and two runs in one folder would overwrite each other",
        "another --out, or wait until it ends",
    )


def changes(read: Callable[[], Any], before: Any, seconds: float) -> bool:
    """Returns whether the holder still counts: whether what `read` returns changes within `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(BEAT / 2)
        if read() != before:
            return True
    return False


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the lock on the folder `out`, of a file system. Raises LockError where another run holds it.

    Of several processes of one run, process 0 holds it for all.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, counts = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644), itertools.count()

    def write() -> None:
        os.pwrite(file, f"{lock_record(next(counts)):<200}\n".encode(), 0)

    def renew() -> None:
        # A full disk or a network that is away does not end the run.
        with contextlib.suppress(OSError):
            write()

    def read_again() -> dict[str, Any]:
        again = os.open(out / ".lock", os.O_RDONLY)  # opening asks the server of a network file system anew
        try:
            return _read(again)
        finally:
            os.close(again)

    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise refused(out, _read(file)) from error
        except OSError:
            pass  # a file system without locks: only the counts tell
        holder = _read(file)
        elsewhere = holder.get("host") not in (None, socket.gethostname())
        if elsewhere and changes(read_again, holder, WATCHED * BEAT):
            raise refused(out, holder)
        write()
        try:
            with beating(renew, BEAT, "lock of the output folder"):
                yield
        finally:
            os.ftruncate(file, 0)
    finally:
        os.close(file)
