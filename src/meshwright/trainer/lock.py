"""Lock on an output folder: one run at a time writes into it.

The system's lock on the file `.lock` (flock) ends with the process that holds it, however that ends. Some shared file
systems keep such locks on each host alone, so the file also counts up while its holder lives: a run on another host
watches it before it takes over.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import CheckpointError

BEAT = 5.0
"""Seconds between two counts of the holder."""
_WATCHED = 4
"""Beats for which a run on another host watches the file of one that it cannot see."""
_LARGEST = 4096


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the lock on the folder `out`. Raises CheckpointError where another run holds it.

    Of several processes of one run, process 0 holds it for all.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    stopped = threading.Event()
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _refused(out, _read(file)) from error
        except OSError:
            pass  # a file system without locks: the counts alone tell
        holder = _read(file)
        if holder.get("host") not in (None, socket.gethostname()) and _counts(out, holder):
            raise _refused(out, holder)
        beat = threading.Thread(target=_beat, args=(file, stopped), daemon=True, name="lock of the output folder")
        _write(file, 0)
        beat.start()
        try:
            yield
        finally:
            stopped.set()
            beat.join()
            os.ftruncate(file, 0)
    finally:
        os.close(file)


def _beat(file: int, stopped: threading.Event) -> None:
    count = 0
    while not stopped.wait(BEAT):
        count += 1
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
    until = time.monotonic() + _WATCHED * BEAT
    while time.monotonic() < until:
        time.sleep(BEAT / 2)
        again = os.open(out / ".lock", os.O_RDONLY)  # opening asks the server of a network file system anew
        try:
            if _read(again) != before:
                return True
        finally:
            os.close(again)
    return False


def _refused(out: Path, holder: dict[str, object]) -> CheckpointError:
    who = (
        f"process {holder['process']} on {holder['host']}" if "process" in holder and "host" in holder else "a process"
    )
    return CheckpointError(
        f"training in {out}",
        f"{who} trains there, and two runs in one folder would overwrite each other",
        "another --out, or wait until it ends",
    )
