"""Lock on an output folder: one run at a time writes into it.

The system's lock on the file `.lock` (flock) ends with the process that holds it, however that ends. Some shared file
systems keep such locks on each host alone, so the file also counts up while its holder lives: a run on another host
watches it before it takes over.
"""

import contextlib
import fcntl
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import CheckpointError
from meshwright.heartbeat import beating
from meshwright.storage.paths import store_of

BEAT = 5.0
"""Seconds between two counts of the holder."""
WATCHED = 4
"""Beats for which a run on another host watches the file of one that it cannot see."""
_LARGEST = 4096


class LockError(CheckpointError):
    """Output folder that another run writes to."""

    exit_code = 9


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the lock on the folder `out`. Raises LockError where another run holds it.

    Of several processes of one run, process 0 holds it for all.
    """
    if not store_of(out).locks:
        from meshwright.trainer.bucket_lock import bucket_locked  # most runs are on file systems

        with bucket_locked(out):
            yield
        return
    out.mkdir(parents=True, exist_ok=True)
    file = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise refused(out, _read(file)) from error
        except OSError:
            pass  # a file system without locks: the counts alone tell
        holder = _read(file)
        if holder.get("host") not in (None, socket.gethostname()) and _counts(out, holder):
            raise refused(out, holder)
        _write(file, 0)
        counts = itertools.count(1)
        try:
            with beating(lambda: _renew(file, next(counts)), BEAT, "lock of the output folder"):
                yield
        finally:
            os.ftruncate(file, 0)
    finally:
        os.close(file)


def _renew(file: int, count: int) -> None:
    # A full disk or a network that is away ends no run.
    with contextlib.suppress(OSError):
        _write(file, count)


def _write(file: int, count: int) -> None:
    record = {"host": socket.gethostname(), "process": os.getpid(), "count": count}
    os.pwrite(file, f"{json.dumps(record):<200}\n".encode(), 0)


def _read(file: int) -> dict[str, object]:
    """Returns the record of the holder; an empty one where the file has none."""
    try:
        record = json.loads(os.pread(file, _LARGEST, 0))
        return dict(record)
    except (ValueError, TypeError, RecursionError):
        return {}


def _counts(out: Path, before: dict[str, object]) -> bool:
    """Whether a run on another host still counts up."""
    until = time.monotonic() + WATCHED * BEAT
    while time.monotonic() < until:
        time.sleep(BEAT / 2)
        again = os.open(out / ".lock", os.O_RDONLY)  # opening asks the server of a network file system anew
        try:
            if _read(again) != before:
                return True
        finally:
            os.close(again)
    return False


def describe_holder(holder: dict[str, object]) -> str:
    """Names the process in the record of a lock: `process 4103 on node7`."""
    known = "process" in holder and "host" in holder
    return f"process {holder['process']} on {holder['host']}" if known else "a process"


def refused(out: Path, holder: dict[str, object]) -> LockError:
    """Returns the error of a folder that another run writes to."""
    who = describe_holder(holder)
    return LockError(
        f"training in {out}",
        f"{who} trains there, and two runs in one folder would overwrite each other",
        "another --out, or wait until it ends",
    )
