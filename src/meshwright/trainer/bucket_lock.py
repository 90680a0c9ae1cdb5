"""Lock on an output folder in a bucket: an object that is put on condition that there is none.

Its holder replaces it every few seconds with a higher count, on condition that it is its own. A run that cannot do so
ends before another may take the folder over, and one whose folder was taken over ends at once, without saving: whatever
it wrote could overwrite what the other writes. A lock without renewals is free after 90 s; at once where its process
was on this host and is gone. A server that takes no notice of conditions (some that speak S3 do not) is found out by
asking twice, which is then said: there the counts alone tell.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from meshwright.errors import MeshwrightError, StorageError
from meshwright.heartbeat import beating
from meshwright.storage.bucket import MISSING, BucketPath, object_store, storage_error
from meshwright.trainer import lock

FREE = 90.0
"""Seconds without a count after which another run takes a lock over."""
_GIVEN_UP = 75.0
"""Seconds without a renewal after which the holder ends: as long as requests are sent again, and less than `FREE`."""
_ANSWER = 10.0
"""Seconds in which a bucket answers; the next renewal asks again."""


@contextlib.contextmanager
def bucket_locked(out: Path) -> Iterator[None]:
    """Holds the lock on the folder `out` of a bucket. Raises LockError where another run holds it.

    Where the lock is lost meanwhile, this process prints why and exits: with 9 where another run has it, with 8 where
    the bucket takes no renewals.
    """
    file = BucketPath(out / ".lock")
    ours = _Held(file, _take(file))
    try:
        with beating(ours.renew, lock.BEAT, "lock of the bucket"):
            yield
    finally:
        with contextlib.suppress(StorageError):
            # Nobody takes a lock that was this run's a moment ago: that takes `FREE` seconds.
            if _holder(file)[0].get("token") == ours.token:
                file.unlink(missing_ok=True)


class _Held:
    """The lock of this run. token: tells it from others, also from one in the same process."""

    def __init__(self, file: BucketPath, token: str):
        self.file, self.token, self.renewed, self.count = file, token, time.monotonic(), 0

    def renew(self) -> None:
        """Counts up in the object; ends the process where it is not its own any more."""
        self.count += 1
        began = time.monotonic()
        try:
            holder, version = _holder(self.file)
            if holder.get("token") != self.token:
                _end(_taken_over(self.file.parent, holder))
            # Where another run wrote in between, the next renewal reads its name.
            if _put(self.file, _record(self.token, self.count), version) is not None:
                self.renewed = began
        except StorageError as error:
            seconds = time.monotonic() - self.renewed
            if seconds > _GIVEN_UP:
                _end(_unreachable(self.file.parent, error, seconds))


def _taken_over(out: Path, holder: dict[str, Any]) -> MeshwrightError:
    who = lock.describe_holder(holder) if holder else "another program, which removed the lock,"
    return lock.LockError(
        f"training in {out}",
        f"{who} has taken this folder over; this run stopped at once and saved nothing more, because two runs in one "
        "folder would overwrite each other",
        f"let one of them go on: when the other has ended, meshwright train --out {out} --resume; or another --out",
    )


def _unreachable(out: Path, error: StorageError, seconds: float) -> MeshwrightError:
    return StorageError(
        f"keeping the lock on {out}",
        f"it was not renewed for {seconds:.0f} s ({error.truth}), and after {FREE:.0f} s another run may take the "
        "folder over; this run stopped and saved nothing more",
        f"meshwright train --out {out} --resume, when the bucket is well",
    )


def _end(error: MeshwrightError) -> NoReturn:
    """Exits whatever the other threads do, a save that is under way included: the folder is not this run's."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os.write(2, f"error: {error}\n".encode())
    os._exit(error.exit_code)


def _take(file: BucketPath) -> str:
    """Puts the lock; returns its token."""
    token = secrets.token_hex(8)
    record = _record(token, 0)
    if _put(file, record, MISSING) is None:
        holder, version = _holder(file)
        # It is this run's own where the answer to the write was lost and the write sent again.
        if holder.get("token") != token:
            if _lives(file, holder, version):
                raise lock.refused(file.parent, holder)
            if _put(file, record, version) is None and _holder(file)[0].get("token") != token:
                raise lock.refused(file.parent, _holder(file)[0])
    if _put(file, record, MISSING) is not None:
        print(
            f"{file}: this server takes no notice of conditional writes (If-None-Match), so two runs that start within "
            "the same second are not kept apart",
            file=sys.stderr,
        )
    return token


def _put(file: BucketPath, record: bytes, version: bytes) -> bytes | None:
    """Replaces the lock if it has this version; returns the new one, None where it has not."""
    store, key = object_store(file)
    stamp = _answer(store.write(key, record, if_equal=version), f"writing {file}")
    return bytes(stamp.generation) or None


def _holder(file: BucketPath) -> tuple[dict[str, Any], bytes]:
    """Returns the record of the holder and its version; nothing where the lock is gone."""
    store, key = object_store(file)
    found = _answer(store.read(key), f"reading {file}")
    if found.state == "missing":
        return {}, MISSING
    try:
        return dict(json.loads(found.value)), bytes(found.stamp.generation)
    except (ValueError, TypeError, RecursionError):
        return {}, bytes(found.stamp.generation)


def _answer(future: Any, action: str) -> Any:
    """Returns what a bucket answers. Raises StorageError where it does not soon."""
    try:
        return future.result(timeout=_ANSWER)
    except TimeoutError as error:
        raise StorageError(action, f"no answer within {_ANSWER:.0f} s", "the same command later") from error
    except ValueError as error:
        raise storage_error(action, error) from error


def _lives(file: BucketPath, holder: dict[str, Any], version: bytes) -> bool:
    """Whether the holder of the lock still counts."""
    if version == MISSING:
        return False
    if holder.get("host") == socket.gethostname() and not _is_process(holder.get("process")):
        return False
    until = time.monotonic() + FREE
    while time.monotonic() < until:
        time.sleep(lock.BEAT / 2)
        if _holder(file)[1] != version:
            return True
    return False


def _is_process(number: Any) -> bool:
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, ValueError, TypeError):
        return False
    except PermissionError:
        return True
    return True


def _record(token: str, count: int) -> bytes:
    record = {"host": socket.gethostname(), "process": os.getpid(), "token": token, "count": count}
    return json.dumps(record).encode()
