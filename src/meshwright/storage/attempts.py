"""System calls that are made again where they failed for now: a file server
that restarts, a network that is away.

Which errors may pass is decided by `errors.class_of`. A call that fails through all attempts raises
its OSError, and who made it raises `errors.by_class` of that.
"""

import errno
import io
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.errors import FOR_NOW, NO_ROOM, class_of
from meshwright.statuses import status_of, system_error
from meshwright.storage.paths import in_bucket

PAUSES = (0.05, 0.25, 1.0, 3.0)
"""Seconds before each further attempt."""
_AWAY = (
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNKNOWN",
)
"""Codes of a bucket's answers that are not about the bytes of an object (absl::StatusCode)."""
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def may_pass(error: BaseException) -> bool:
    """Whether a system call that failed is worth another attempt."""
    return isinstance(error, OSError) and class_of(error) in FOR_NOW and error.errno not in NO_ROOM


def attempt[T](call: Callable[[], T]) -> T:
    """Returns what `call` returns, calling it again where it failed for now.
    Raises the last OSError."""
    for pause in PAUSES:
        try:
            return call()
        except OSError as error:
            if not may_pass(error):
                raise
        time.sleep(pause)
    return call()


def result_of(store: Path, request: Callable[[], Any]) -> Any:
    """Returns the result of a request to TensorStore, made again
    where its system call failed for now.

    store: folder or bucket that is asked.
    request: starts it and returns a future. Raises OSError where a system call failed, StorageError
    where a bucket did, and the error of TensorStore for bytes that are not an array.
    """

    def call() -> Any:
        try:
            return request().result()
        except Exception as error:
            failed = store_error(store, error)
            if failed is None:
                raise
            raise failed from error

    return attempt(call)


def store_error(store: Path, error: Exception) -> Exception | None:
    """Returns the error of the system call or of the bucket that made a request
    to TensorStore fail.

    Returns None where neither did: then the bytes are wrong.
    """
    failed_call = system_error(error)
    if failed_call is not None:
        return failed_call
    if in_bucket(store) and status_of(error) in _AWAY:
        from meshwright.storage.bucket import storage_error  # loads a client of buckets

        return storage_error(f"the files in {store}", error)
    return None


def is_file(path: Path | str) -> bool:
    """Whether there is a regular file of this name. Raises OSError where the system cannot tell."""
    return _has_type(path, stat.S_ISREG)


def is_dir(path: Path | str) -> bool:
    """Whether there is a folder of this name. Raises OSError where the system cannot tell."""
    return _has_type(path, stat.S_ISDIR)


def _has_type(path: Path | str, matches: Callable[[int], bool]) -> bool:
    try:
        status = attempt(lambda: os.stat(path))
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise
    except ValueError:  # a name that no file can have
        return False
    return matches(status.st_mode)


class RegularFile(io.RawIOBase):
    """Regular file opened for reading, opened again at its place where a read failed for now.

    Raises OSError, and ValueError for a pipe, a device or a folder.
    """

    def __init__(self, path: Path):
        super().__init__()
        self._path, self._at = path, 0
        self.name = str(path)
        self._number = attempt(self._open)

    def _open(self) -> int:
        # A pipe without a writer would never open.
        number = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise ValueError(f"{self._path.name} is no regular file")
        return number

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer from the file, and returns the number of bytes read."""

        def read() -> int:
            try:
                return os.preadv(self._number, [buffer], self._at)
            except OSError as error:
                if may_pass(error):
                    self._open_again()
                raise

        count = attempt(read)
        self._at += count
        return count

    def _open_again(self) -> None:
        """Takes a new handle: one of a network file system may be stale."""
        number = self._open()
        os.close(self._number)
        self._number = number

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def seekable(self) -> bool:
        """Whether it has places: always."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a place, and returns it."""
        if whence == os.SEEK_CUR:
            offset += self._at
        if whence == os.SEEK_END:
            offset += os.fstat(self._number).st_size
        self._at = offset
        return offset

    def fileno(self) -> int:
        """Returns the number of the open file."""
        return self._number

    def close(self) -> None:
        """Closes the file."""
        if not self.closed:
            os.close(self._number)
        super().close()
