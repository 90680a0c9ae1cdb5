"""Lock on an output folder in a bucket: an object that is put on condition that there is none.

Its holder replaces it every few seconds with a higher count, on condition that it is its own. A run
that cannot do so ends before another may take the folder over, and one whose folder was taken over
ends at once, without saving: whatever it wrote could overwrite what the other writes. A lock
without renewals is free after 90 s; at once where its process was on this host and is gone. A
server that ignores conditions (some that speak S3 do) is detected by asking twice and reported:
there only the counts tell.
"""

import contextlib
import itertools
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from meshwright import last_words
from meshwright.errors import MeshwrightError, StorageError, shell_word
from meshwright.storage.bucket import MISSING, BucketPath
from meshwright.storage.removing import remove_file
from meshwright.trainer.heartbeat import (
    LockError,
    beating,
    changes,
    describe_holder,
    lock_record,
    parse_holder,
    refused,
)

FREE = 90.0
"""Seconds without a count after which another run takes the lock over."""
_GIVEN_UP = 75.0
"""Seconds without a renewal after which the holder ends: as long as requests are sent again, and
less than `FREE`."""
_ANSWER = 10.0
"""Seconds in which a bucket answers; the next renewal asks again."""


@contextlib.contextmanager
def bucket_locked(out: Path) -> Iterator[None]:
    """Holds the lock on a folder in a bucket. Raises LockError where another run holds it."""
    file, token = (
        BucketPath(out / ".lock"),
        secrets.token_hex(8),
    )  # tells this run from another in the same process
    _take(file, token)
    counts, renewed = itertools.count(1), time.monotonic()

    def renew() -> None:
        """Counts up in the object; ends the process where it is not its own any more."""
        nonlocal renewed
        began = time.monotonic()
        try:
            holder, version = _read_object(file)
            if holder.get("token") != token:
                who = (
                    describe_holder(holder)
                    if holder
                    else "another program, which removed the lock,"
                )
                truth = (
                    f"{who} has taken this folder over; this run stopped at once and saved "
                    "nothing more, because two "
                    "runs in one folder would overwrite each other"
                )
                again = (
                    f"when the other has ended, meshwright train --out {shell_word(out)} --resume"
                )
                _end(
                    LockError(
                        f"training in {out}",
                        truth,
                        f"let one of them go on: {again}; or another --out",
                    )
                )
            # Where another run wrote in between, the next renewal reads its name.
            if (
                file.put_if(lock_record(next(counts), token=token).encode(), version, _ANSWER)
                is not None
            ):
                renewed = began
        except StorageError as error:
            seconds = time.monotonic() - renewed
            if seconds > _GIVEN_UP:
                truth = (
                    f"it was not renewed for {seconds:.0f} s ({error.truth}), and after "
                    f"{FREE:.0f} s another run may "
                    "take the folder over; this run stopped and saved nothing more"
                )
                fix = f"meshwright train --out {shell_word(out)} --resume, when the bucket is well"
                _end(StorageError(f"keeping the lock on {out}", truth, fix))

    try:
        with beating(renew, "lock of the bucket"):
            yield
    finally:
        with contextlib.suppress(OSError, StorageError):
            # Nobody takes a lock that was this run's a moment ago: that takes `FREE` seconds.
            if _read_object(file)[0].get("token") == token:
                remove_file(file, below=file.parent, missing_ok=True)


def _end(error: MeshwrightError) -> NoReturn:
    """Exits whatever other threads do, saves included: the folder is not this run's."""
    last_words.leave(error.exit_code, f"error: {error}\n")


def _take(file: BucketPath, token: str) -> None:
    record = lock_record(0, token=token).encode()
    if file.put_if(record, MISSING, _ANSWER) is None:
        holder, version = _read_object(file)
        # It is this run's own where the answer to the write was lost and the write sent again.
        if holder.get("token") != token:
            if (
                version != MISSING
                and not _gone(holder)
                and changes(lambda: _read_object(file)[1], version, FREE)
            ):
                raise refused(file.parent, holder)
            if (
                file.put_if(record, version, _ANSWER) is None
                and _read_object(file)[0].get("token") != token
            ):
                raise refused(file.parent, _read_object(file)[0])
    if file.put_if(record, MISSING, _ANSWER) is not None:
        print(
            f"{file}: this server takes no notice of conditional writes (If-None-Match), so two "
            "runs that start within "
            "the same second are not kept apart",
            file=sys.stderr,
        )


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


def _read_object(file: BucketPath) -> tuple[dict[str, Any], bytes]:
    content, version = file.read_version(_ANSWER)
    return parse_holder(content or b""), version
