"""Files of lines that grow: added to, cut at their end, and read from there.

What is asked of the newest lines does not cost the whole file. In a bucket they are
`bucket.Segments`.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, cast

from meshwright.documents import open_bytes
from meshwright.storage.attempts import attempt
from meshwright.storage.paths import bucket_path, in_bucket
from meshwright.storage.writing import open_file, write_atomically

_PART = 2**16
"""Bytes that are read at a time."""


class Lines(Protocol):
    """File of lines that is open for adding. name: for messages."""

    name: str

    @property
    def position(self) -> int:
        """Where the next line goes, for `lines`."""
        ...

    @property
    def size(self) -> int:
        """Bytes, of an object in a bucket those since it was opened."""
        ...

    def write(self, data: bytes) -> int:
        """Adds bytes; returns how many were taken. Raises OSError."""
        ...

    def thin(self, keep: Callable[[str], bool]) -> int:
        """Drops the lines for which `keep` does not hold, asked in order.

        Returns the bytes that are left.
        """
        ...

    def cut(self, keep: Callable[[str], bool]) -> None:
        """Drops lines at the end until `keep` holds for the last one."""
        ...

    def lines(self, position: int) -> Iterator[str]:
        """Yields the lines from a position on."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


def open_lines(file: Path) -> Lines:
    """Opens a file of lines for adding. Raises OSError."""
    if in_bucket(file):
        return cast(Lines, open_file(bucket_path(file), "ab"))
    return LocalLines(file)


class LocalLines:
    """File of lines on a disk.

    A last line that was cut off is ended, so that the next is a line of its own.
    """

    def __init__(self, file: Path):
        self.name = str(file)
        self._file = open_file(file, "ab+", buffering=0)
        size = self.position
        if size and self._read(size - 1, 1) != b"\n":
            self._file.write(b"\n")

    @property
    def position(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.position

    def thin(self, keep: Callable[[str], bool]) -> int:
        """Replaces the file by one with the lines for which `keep` holds; returns its bytes.

        Raises OSError.
        """
        kept = [line for line in self.lines(0) if keep(line)]
        data = "".join(f"{line}\n" for line in kept).encode()
        file = Path(self.name)
        write_atomically(file, data)
        self._file.close()
        self._file = open_file(file, "ab+", buffering=0)
        return len(data)

    def write(self, data: bytes) -> int:
        """Adds bytes at the end; returns how many were taken. Raises OSError."""
        return self._file.write(data)

    def cut(self, keep: Callable[[str], bool]) -> None:
        """Drops lines at the end until `keep` holds for the last one.

        Only those are read, and nothing is rewritten.
        """
        end = 0
        for start, line in _reversed(self._read, self.position):
            if keep(line.decode("utf-8", "replace")):
                end = start + len(line)
                break
        if end == self.position - 1 and self._read(end, 1) == b"\n":
            return
        os.ftruncate(self._file.fileno(), end)
        if end:
            self._file.write(b"\n")

    def _read(self, start: int, count: int) -> bytes:
        return attempt(lambda: os.pread(self._file.fileno(), count, start))

    def lines(self, position: int) -> Iterator[str]:
        """Yields the lines from a byte of the file on."""
        with open_bytes(Path(self.name)) as opened:
            opened.seek(position)
            for line in opened:
                yield line.decode("utf-8", "replace").rstrip("\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def reversed_lines(file: Path) -> Iterator[str]:
    """Yields the lines of a file from the last to the first.

    Raises OSError, and ValueError for a pipe or a device.
    """
    if in_bucket(file):
        yield from bucket_path(file).reversed_lines()
        return
    with open_bytes(file) as opened:

        def read(start: int, count: int) -> bytes:
            opened.seek(start)
            return opened.read(count)

        for _, line in _reversed(read, opened.seek(0, os.SEEK_END)):
            yield line.decode("utf-8", "replace")


def _reversed(read: Callable[[int, int], bytes], size: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not empty, last to first, each with the byte at which it begins.

    read: returns the bytes at a place, so many.  size: of the file in bytes.
    """
    end, rest = size, b""
    while end:
        start = max(0, end - _PART)
        content = read(start, end - start) + rest
        at = start + len(content)
        lines = content.split(b"\n")
        for line in reversed(lines[1:]):
            at -= len(line)
            if line:
                yield at, line
            at -= 1
        rest, end = lines[0], start
    if rest:
        yield 0, rest
