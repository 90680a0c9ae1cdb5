"""Lock on an output folder: one run at a time writes into it.

On a file system it is the system's lock on the file `.lock` (flock), which ends with the process that holds it, however
that ends. Some shared file systems keep such locks on each host separately, so the file also counts up while its holder
lives: a run on another host watches it before it takes over.

In a bucket it is an object that is put on condition that there is none. Its holder replaces it every few seconds with a
higher count, on condition that it is its own. A run that cannot do so ends before another may take the folder over, and
one whose folder was taken over ends at once, without saving: whatever it wrote could overwrite what the other writes. A
lock without renewals is free after 90 s; at once where its process was on this host and is gone. A server that ignores
conditions (some that speak S3 do) is detected by asking twice and reported: there only the counts tell.
"""

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from meshwright.errors import CheckpointError, MeshwrightError, StorageError
from meshwright.heartbeat import beating
from meshwright.storage.paths import in_bucket

if TYPE_CHECKING:
    from meshwright.storage.bucket import BucketPath

BEAT = 5.0
"""Seconds between two counts of the holder."""
WATCHED = 4
"""Beats for which a run on another host watches the file of one that it cannot see."""


FREE = 90.0
"""Seconds without a count after which another run takes the lock over."""
_GIVEN_UP = 75.0
"""Seconds without a renewal after which the holder ends: as long as requests are sent again, and less than `FREE`."""
_ANSWER = 10.0
"""Seconds in which a bucket answers; the next renewal asks again."""


class LockError(CheckpointError):
    """Output folder that another run writes to."""

    exit_code = 9


def locked(out: Path) -> contextlib.AbstractContextManager[None]:
    """Holds the lock on the folder `out`. Raises LockError where another run holds it.

    Of several processes of one run, process 0 holds it for all. Where the lock of a bucket is lost meanwhile, this
    process prints why and exits: with 9 where another run has it, with 8 where the bucket takes no renewals.
    """
    return _object_locked(out) if in_bucket(out) else _file_locked(out)


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
def _file_locked(out: Path) -> Iterator[None]:
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


@contextlib.contextmanager
def _object_locked(out: Path) -> Iterator[None]:
    from meshwright.storage.bucket import MISSING, BucketPath  # loads a client of buckets

    file = BucketPath(out / ".lock")
    ours = _BucketLock(file, _take(file, MISSING))
    try:
        with beating(ours.renew, BEAT, "lock of the bucket"):
            yield
    finally:
        with contextlib.suppress(StorageError):
            # Nobody takes a lock that was this run's a moment ago: that takes `FREE` seconds.
            if _read_object(file)[0].get("token") == ours.token:
                file.unlink(missing_ok=True)


class _BucketLock:
    """The lock of this run. token: tells it from others, also from one in the same process."""

    def __init__(self, file: "BucketPath", token: str):
        self.file, self.token, self.renewed, self.count = file, token, time.monotonic(), 0

    def renew(self) -> None:
        """Counts up in the object; ends the process where it is not its own any more."""
        self.count += 1
        began, out = time.monotonic(), self.file.parent
        try:
            holder, version = _read_object(self.file)
            if holder.get("token") != self.token:
                who = describe_holder(holder) if holder else "another program, which removed the lock,"
                truth = (
                    f"{who} has taken this folder over; this run stopped at once and saved nothing more, because two "
                    "runs in one folder would overwrite each other"
                )
                again = f"when the other has ended, meshwright train --out {out} --resume"
                _end(LockError(f"training in {out}", truth, f"let one of them go on: {again}; or another --out"))
            # Where another run wrote in between, the next renewal reads its name.
            if _put(self.file, lock_record(self.count, token=self.token), version) is not None:
                self.renewed = began
        except StorageError as error:
            seconds = time.monotonic() - self.renewed
            if seconds > _GIVEN_UP:
                truth = (
                    f"it was not renewed for {seconds:.0f} s ({error.truth}), and after {FREE:.0f} s another run may "
                    "take the folder over; this run stopped and saved nothing more"
                )
                fix = f"meshwright train --out {out} --resume, when the bucket is well"
                _end(StorageError(f"keeping the lock on {out}", truth, fix))


def _end(error: MeshwrightError) -> NoReturn:
    """Exits whatever the other threads do, a save that is under way included: the folder is not this run's."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os.write(2, f"error: {error}\n".encode())
    os._exit(error.exit_code)


def _take(file: "BucketPath", missing: bytes) -> str:
    token = secrets.token_hex(8)
    record = lock_record(0, token=token)
    if _put(file, record, missing) is None:
        holder, version = _read_object(file)
        # It is this run's own where the answer to the write was lost and the write sent again.
        if holder.get("token") != token:
            if version != missing and not _gone(holder) and changes(lambda: _read_object(file)[1], version, FREE):
                raise refused(file.parent, holder)
            if _put(file, record, version) is None and _read_object(file)[0].get("token") != token:
                raise refused(file.parent, _read_object(file)[0])
    if _put(file, record, missing) is not None:
        print(
            f"{file}: this server takes no notice of conditional writes (If-None-Match), so two runs that start within "
            "the same second are not kept apart",
            file=sys.stderr,
        )
    return token


def _gone(holder: dict[str, Any]) -> bool:
    """Returns whether the holder was a process of this host that has ended."""
    if holder.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(str(holder.get("process"))), 0)
    except (ProcessLookupError, ValueError):
        return True
    except PermissionError:
        pass
    return False


def _put(file: "BucketPath", record: str, version: bytes) -> bytes | None:
    """Replaces the lock if it has this version; returns the new one, None where it has not."""
    return file.put_if(record.encode(), version, _ANSWER)


def _read_object(file: "BucketPath") -> tuple[dict[str, Any], bytes]:
    content, version = file.read_version(_ANSWER)
    return parse_holder(content or b""), version
