"""Readers of line files that another process appends to.

Their memory does not grow with the file.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.documents import check_inside, open_bytes
from meshwright.storage.paths import bucket_path, in_bucket

if TYPE_CHECKING:
    from meshwright.storage.bucket import BucketPath

LONGEST_LINE = 2**20
"""Most bytes of a line that is followed; a sample has a few thousand."""
_PART = 2**16
"""Bytes that are read at a time."""
_TAIL = 256
"""Bytes before the position of a reader by which it knows the file again."""


class Followed(Protocol):
    """File of lines that another process adds to, and now and then cuts.

    A reader of it takes what is new.
    """

    @property
    def version(self) -> Any:
        """Value that changes when the file does; it is cheap."""
        ...

    def read(self) -> tuple[bool, Iterator[bytes | None]]:
        """Returns whether what was read before no longer counts, and the lines that are new.

        After a cut the lines are those of the whole file. They are read in parts as they are taken,
        so that the memory does not grow with the file; None stands for a line of more than
        `LONGEST_LINE` bytes. What has no newline yet is left for the next call.
        """
        ...


def follow_lines(file: Path) -> Followed:
    """Returns a reader of a file of lines, on a disk or in a bucket, which need not exist yet."""
    if in_bucket(file):
        from meshwright.storage.bucket import segments_of  # loads a client of buckets

        path = bucket_path(file)
        return _FollowedSegments(path, segments_of(path))
    return _FollowedFile(file)


class _LineSplitter:
    """Lines of a content that comes in parts."""

    def __init__(self) -> None:
        self._rest = b""
        """What has no newline yet."""
        self._skipping = False

    def lines(self, part: bytes) -> Iterator[bytes | None]:
        """Yields the lines that `part` completes; None for one that is too long."""
        *complete, self._rest = (self._rest + part).split(b"\n")
        for line in complete:
            if self._skipping:
                self._skipping = False
            elif len(line) > LONGEST_LINE:
                yield None
            else:
                yield line
        if self._skipping or len(self._rest) > LONGEST_LINE:
            if not self._skipping:
                yield None
            self._skipping = True
            self._rest = b""


class _FollowedFile:
    """File on a disk.

    A cut that has been written over again is known by the bytes before the position.
    """

    def __init__(self, file: Path):
        self._file = file
        self._offset = 0
        self._identity = (0, 0)
        self._tail = b""
        self._splitter = _LineSplitter()

    @property
    def version(self) -> Any:
        """Identity, size and time of the file."""
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self) -> tuple[bool, Iterator[bytes | None]]:
        """Returns whether the file was cut or replaced, and the lines that are new."""
        try:
            check_inside(self._file.parent, [self._file])
            opened = open_bytes(self._file)
        except (OSError, ValueError):
            anew = self._offset > 0
            self._restart((0, 0))
            return anew, iter(())
        status = os.fstat(opened.fileno())
        identity = (status.st_dev, status.st_ino)
        start = self._offset - len(self._tail)
        anew = (
            identity != self._identity
            or status.st_size < self._offset
            or os.pread(opened.fileno(), len(self._tail), start) != self._tail
        )
        if anew:
            self._restart(identity)
        return anew, self._new_lines(opened)

    def _restart(self, identity: tuple[int, int]) -> None:
        self._offset = 0
        self._identity = identity
        self._tail = b""
        self._splitter = _LineSplitter()

    def _new_lines(self, opened: Any) -> Iterator[bytes | None]:
        with opened:
            opened.seek(self._offset)
            while part := opened.read(_PART):
                self._offset += len(part)
                self._tail = (self._tail + part)[-_TAIL:]
                yield from self._splitter.lines(part)


class _FollowedSegments:
    """Reader of the lines of an object that grows in segments.

    Segments are cut from the last one back, so the lines before stay what they were as long as the
    last segment that was read has the version it had.
    """

    _PART = 8 * 2**20
    """Bytes that are read in a request."""

    def __init__(self, path: "BucketPath", segments: "BucketPath"):
        self._path = path
        self._segments = segments
        self._read: list[str] = []
        """Names of the parts that were read, in their order."""
        self._generation = b""
        """Version of the last of them."""

    @property
    def version(self) -> Any:
        """Number of the parts, and version of the last."""
        parts = self._parts()
        if not parts:
            return None
        with contextlib.suppress(FileNotFoundError):
            return len(parts), self._part(parts[-1]).generation()
        return len(parts), b""

    def read(self) -> tuple[bool, Iterator[bytes | None]]:
        """Returns whether lines that were read are gone, and the lines that are new."""
        parts = self._parts()
        anew = self._read != parts[: len(self._read)]
        if self._read and not anew:
            try:
                anew = self._part(self._read[-1]).generation() != self._generation
            except FileNotFoundError:
                anew = True
        if anew:
            self._read = []
        return anew, self._new_lines(parts[len(self._read) :])

    def _parts(self) -> list[str]:
        """Names of the segments.

        "" is the object itself, which counts as segment 0 if there is no other.
        """
        names = [name for name in self._segments.object_names() if name.isdigit()]
        first = f"{0:010d}"
        whole = self._path.key != "" and first not in names and self._has_object()
        return ["", *names] if whole else names

    def _has_object(self) -> bool:
        try:
            self._path.generation()
        except FileNotFoundError:
            return False
        return True

    def _part(self, name: str) -> "BucketPath":
        return self._segments / name if name else self._path

    def _new_lines(self, names: list[str]) -> Iterator[bytes | None]:
        for name in names:
            part = self._part(name)
            splitter = _LineSplitter()
            position = 0
            try:
                generation = part.generation()
                while content := part.read_part(position, self._PART):
                    position += len(content)
                    yield from splitter.lines(content)
            except FileNotFoundError:  # cut meanwhile: the next call begins anew
                return
            yield from splitter.lines(b"\n")
            self._read.append(name)
            self._generation = generation
