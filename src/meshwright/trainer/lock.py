"""Lock on an output folder: one run at a time writes into it.

On a file system it is the system's lock on the file `.lock` (flock), which ends with the process
that holds it, however that ends. Some shared file systems keep such locks on each host separately,
so the file also counts up while its holder lives: a run on another host watches it before it takes
over. In a bucket it is an object (trainer/bucket_lock.py).
"""

import contextlib
import fcntl
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.checkpoint.steps import unwritable
from meshwright.storage.attempts import attempt
from meshwright.storage.paths import in_bucket
from meshwright.storage.writing import make_folder, open_descriptor, refuse_links
from meshwright.trainer.heartbeat import BEAT, beating, changes, lock_record, parse_holder, refused

WATCHED = 4
"""Beats for which a run on another host watches the file of one that it cannot see."""


def locked(out: Path) -> contextlib.AbstractContextManager[None]:
    """Holds the lock on the folder `out`. Raises LockError where another run holds it.

    Of several processes of one run, process 0 holds it for all. Where the lock of a bucket is lost
    meanwhile, this process prints why and exits: with 9 where another run has it, with 8 where the
    bucket takes no renewals.
    """
    if not in_bucket(out):
        return _file_locked(out)
    from meshwright.trainer.bucket_lock import bucket_locked  # loads a client of buckets

    return bucket_locked(out)


@contextlib.contextmanager
def _file_locked(out: Path) -> Iterator[None]:
    try:
        make_folder(out)
        refuse_links(out)
        file = open_descriptor(out / ".lock", "lock")
    except OSError as error:
        raise unwritable(out, error) from error
    counts = itertools.count()

    def write() -> None:
        os.pwrite(file, f"{lock_record(next(counts)):<200}\n".encode(), 0)

    def renew() -> None:
        # A full disk or a network that is away does not end the run.
        with contextlib.suppress(OSError):
            write()

    def read_again() -> dict[str, Any]:
        again = os.open(
            out / ".lock", os.O_RDONLY | os.O_NOFOLLOW
        )  # opening asks the server of a network file system anew
        try:
            return parse_holder(os.pread(again, 4096, 0))
        finally:
            os.close(again)

    def read_holder() -> dict[str, Any]:
        try:
            return parse_holder(attempt(lambda: os.pread(file, 4096, 0)))
        except OSError as error:
            raise unwritable(out, error) from error

    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise refused(out, read_holder()) from error
        except OSError:
            pass  # a file system without locks: only the counts tell
        holder = read_holder()
        elsewhere = holder.get("host") not in (None, socket.gethostname())
        if elsewhere and changes(read_again, holder, WATCHED * BEAT):
            raise refused(out, holder)
        try:
            attempt(write)
        except OSError as error:
            raise unwritable(out, error) from error
        try:
            with beating(renew, "lock of the output folder"):
                yield
        finally:
            # A record of a process that has ended counts for nothing.
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
    finally:
        os.close(file)
