"""Paths in buckets, on TensorStore's drivers for Google Cloud Storage and S3.

The drivers that read and write the tensors of a checkpoint do the small files too, so credentials,
endpoint, retries and errors are given once; fsspec, universal_pathlib and epath would bring a
second client of each store with its own. An object is written completely or not at all. A request
that fails with 429, 5xx or a broken connection is sent again, after 0.2 s, 0.4 s and so on up to 10
s.
"""

import contextlib
import errno
import fnmatch
import functools
import io
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import PosixPath
from typing import Any

import tensorstore

from meshwright.activity import Activity, watched_by
from meshwright.errors import StorageError, reason_of
from meshwright.statuses import BucketFailure, bucket_failure, statuses_of

RETRIES = 12
"""Times that a request is sent again: for about 70 s in all."""
MISSING = b"\x02"
"""Generation of an object that does not exist, as conditional writes name it."""


class BucketPath(PosixPath):
    """Path of an object, or of those whose names begin with it,
    in a bucket: `s3://BUCKET/KEY`, `gs://BUCKET/KEY`.

    A folder exists while an object is in it. What a bucket cannot do raises OSError; a request that
    it refuses raises StorageError.
    """

    def __str__(self) -> str:
        head, colon, tail = super().__str__().partition(":/")
        return (
            f"{head}://{tail.lstrip('/')}" if colon and head in ("gs", "s3") else super().__str__()
        )

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self.parts[1] if len(self.parts) > 1 else ""

    @property
    def key(self) -> str:
        """Name of the object in the bucket."""
        return "/".join(self.parts[2:])

    def absolute(self) -> "BucketPath":
        """Returns the path itself: a bucket has no working folder."""
        return self

    def resolve(self, strict: bool = False) -> "BucketPath":
        """Returns the path itself: a bucket has no links."""
        return self

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object of this name, or in this folder."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether there is an object of this name, or lines of this name in segments."""
        if self.key != "" and self._read(slice(0, 0)).state != "missing":
            return True
        return self.name.endswith(LINES) and segments_of(self).is_dir()

    def is_dir(self) -> bool:
        """Whether there is an object in this folder."""
        return bool(self.object_names())

    def object_names(self) -> list[str]:
        """Returns the names of all objects in this folder, relative to it."""
        return sorted(key.decode() for key in self._wait(self._folder().list(), "listing"))

    def generation(self) -> bytes:
        """Returns the version of the object. Raises FileNotFoundError."""
        return bytes(self._found(slice(0, 0)).stamp.generation)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Returns the size of the object, which is read; a bucket's driver gives no times."""
        return os.stat_result(
            (stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, len(self.read_bytes()), 0, 0, 0)
        )

    def iterdir(self) -> Generator["BucketPath", None, None]:
        """Yields the objects and folders in this folder."""
        for name in dict.fromkeys(key.partition("/")[0] for key in self.object_names()):
            yield self / name

    def glob(
        self, pattern: str, *, case_sensitive: bool | None = None
    ) -> Generator["BucketPath", None, None]:
        """Yields the objects in this folder that match a pattern without folders."""
        yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def open(
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
    ) -> Any:
        """Opens the object to read or write all of it; it is written when the file is closed."""
        if mode.strip("bt") == "r":
            raw: Any = io.BytesIO(self.read_bytes())
        elif mode.strip("bt") == "a":
            raw = Segments(self)
        elif mode.strip("bt") in ("w", "x"):
            raw = _Written(self, exclusive="x" in mode)
        else:
            raise OSError(errno.ENOTSUP, f"an object is not opened with mode {mode!r}", str(self))
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding or "utf-8", errors, newline)

    def read_bytes(self) -> bytes:
        """Returns the content, of lines in segments that of all segments.
        Raises FileNotFoundError."""
        content = self.read_object()
        if content is None and self.name.endswith(LINES):
            folder, store = segments_of(self), self._store()
            reads = [store.read(f"{folder.key}/{name}") for name in folder.object_names()]
            if reads:
                return b"".join(bytes(self._wait(read, "reading").value) for read in reads)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return content

    def read_object(self) -> bytes | None:
        """Returns the content of the object of this name; None where there is none."""
        found = self._read(None)
        return None if found.state == "missing" else bytes(found.value)

    def reversed_lines(self) -> Iterator[str]:
        """Yields the lines from the last to the first;
        of lines in segments only those segments are read."""
        folder = segments_of(self)
        names = folder.object_names()
        parts = [folder / name for name in reversed(names)] or [self]
        for part in parts:
            for line in reversed(part.read_bytes().split(b"\n")):
                if line:
                    yield line.decode("utf-8", "replace")

    def read_part(self, first: int, size: int) -> bytes:
        """Returns at most `size` bytes from byte `first` on; none behind the end.
        Raises FileNotFoundError."""
        for part in (slice(first, first + size), slice(first, None)):
            try:
                return bytes(self._found(part).value)
            except EOFError:  # the part ends, or also begins, beyond the end
                continue
        self.generation()
        return b""

    def read_version(self, timeout: float) -> tuple[bytes | None, bytes]:
        """Returns the content and the version of the object, (None, `MISSING`) where there is none.

        Raises StorageError where no answer comes within `timeout` seconds.
        """
        found = self._wait(self._store().read(self.key), "reading", timeout)
        return (
            (None, MISSING)
            if found.state == "missing"
            else (bytes(found.value), bytes(found.stamp.generation))
        )

    def write_bytes(self, data: Any) -> int:
        """Replaces the object."""
        content = bytes(data)
        self._wait(self._store().write(self.key, content), "writing")
        return len(content)

    def put_if(self, data: bytes, generation: bytes, timeout: float | None = None) -> bytes | None:
        """Replaces the object if its version is `generation` (`MISSING`: if there is none).

        Returns its new version, or None where it has another. Not every server that speaks S3 looks
        at the condition. Raises StorageError where no answer comes within `timeout` seconds.
        """
        stamp = self._wait(
            self._store().write(self.key, data, if_equal=generation), "writing", timeout
        )
        return bytes(stamp.generation) or None

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a folder exists while an object is in it."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        if not missing_ok:
            self.generation()
        self._wait(self._store().write(self.key, None), "deleting")

    def remove_tree(self) -> None:
        """Deletes all objects in this folder."""
        self._wait(self._folder().delete_range(tensorstore.KvStore.KeyRange("", "")), "deleting")

    def check_writable(self) -> None:
        """Raises StorageError where the bucket cannot be reached, does not exist,
        or may not be written.

        Asks with few retries, so that a wrong name or endpoint is found within seconds.
        """
        store, probe = self._folder(2), f".writable-{secrets.token_hex(8)}"
        for content in (b"probe", None):
            self._wait(store.write(probe, content), "writing into")

    def kvstore(self, retries: int = RETRIES) -> tuple[dict[str, Any], tensorstore.Context]:
        """Returns TensorStore's description of the objects in this folder,
        and the context to open them with."""
        prefix = f"{self.key}/" if self.key else ""
        if self.parts[0] == "gs:":
            return {"driver": "gcs", "bucket": self.bucket, "path": prefix}, context(retries)
        spec = {
            "driver": "s3",
            "bucket": self.bucket,
            "path": prefix,
            "use_conditional_write": True,
        }
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            region = (
                os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            )
            spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region}
        return spec, context(retries)

    def _folder(self, retries: int = RETRIES) -> Any:
        spec, shared = self.kvstore(retries)
        return self._wait(tensorstore.KvStore.open(spec, context=shared), "opening")

    def _store(self) -> Any:
        """TensorStore's view of the bucket; the object's name in it is `key`."""
        return BucketPath(*self.parts[:2])._folder()

    def _read(self, part: slice | None) -> Any:
        """Reads a part of the object, or all. Raises EOFError for one beyond its end."""
        if not self.key:
            raise IsADirectoryError(
                errno.EISDIR, "this names a bucket, not an object in it", str(self)
            )
        try:
            return self._store().read(self.key, byte_range=part).result()
        except ValueError as error:
            if "OUT_OF_RANGE" in statuses_of(error):
                raise EOFError(str(self)) from error
            raise storage_error(f"reading {self}", error) from error

    def _found(self, part: slice | None) -> Any:
        result = self._read(part)
        if result.state == "missing":
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return result

    def _wait(self, future: Any, action: str, timeout: float | None = None) -> Any:
        try:
            return future.result(timeout=timeout)
        except TimeoutError as error:
            truth = f"no answer within {timeout:.0f} s"
            raise StorageError(f"{action} {self}", truth, "the same command later") from error
        except ValueError as error:
            raise storage_error(f"{action} {self}", error) from error


class _Written(io.BytesIO):
    """Content of an object that is written when it is closed, unless its writer failed.
    exclusive: if there is none."""

    def __init__(self, path: BucketPath, *, exclusive: bool):
        super().__init__()
        self._path, self._exclusive = path, exclusive

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            super().close()
        super().__exit__(kind, *rest)

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            if not self._exclusive:
                self._path.write_bytes(content)
            elif self._path.put_if(content, MISSING) is None:
                raise FileExistsError(errno.EEXIST, "there is such an object", str(self._path))


INTERVAL = 30.0
"""Seconds after which lines that wait are put, except at saves and at the end."""
_SEGMENTS = ".lines"
"""End of the name of the folder with the segments of a file of lines."""
LINES = ".jsonl"
"""End of the names of files of lines: an object of such a name may be in segments."""


class Segments(io.RawIOBase):
    """Lines of an object that grows: segments `NAME.lines/0000000001`, ..., each put once.

    An object cannot grow, and putting all lines again at every save costs the square of their
    number. What is written waits for `INTERVAL` seconds, for a save (this is a watcher) or for the
    end, so that a run which dies and continues from a checkpoint has every line until then. A
    bucket that is away for a while ends no run: the lines wait. An object `NAME`, as earlier
    versions wrote it and a move puts it, becomes segment 0.
    """

    def __init__(self, path: BucketPath):
        super().__init__()
        self.name = str(path)
        self._folder = segments_of(path)
        self._numbers = sorted(int(name) for name in self._folder.object_names() if name.isdigit())
        before = path.read_object()
        if before is not None:
            if 0 not in self._numbers:
                self._put(0, before)
                self._numbers.insert(0, 0)
            path.unlink(missing_ok=True)
        self._waiting, self._put_at = b"", time.monotonic()
        self.size = 0
        """Bytes that were written since it was opened, or that `thin` left."""
        self._watching = contextlib.ExitStack()
        self._watching.enter_context(watched_by(self))

    def writable(self) -> bool:
        """Whether lines can be added: always."""
        return True

    @property
    def position(self) -> int:
        """Number of the next segment."""
        return (self._numbers[-1] if self._numbers else 0) + 1

    def began(self, activity: Activity) -> None:
        """Puts what waits before a checkpoint is saved."""
        if activity.kind == "save":
            with contextlib.suppress(StorageError):
                self.put()

    def ended(self, activity: Activity, *, failed: bool) -> None:
        """Does nothing."""

    def write(self, data: Any) -> int:
        """Adds bytes to what waits, and puts that where it has waited long enough."""
        content = bytes(data)
        self.size += len(content)
        self._waiting += content
        if time.monotonic() - self._put_at >= INTERVAL:
            with contextlib.suppress(StorageError):
                self.put()
        return len(content)

    def put(self) -> None:
        """Puts what waits as one segment. Raises StorageError."""
        self._put_at = time.monotonic()
        if self._waiting:
            number = self.position
            self._put(number, self._waiting)
            self._numbers.append(number)
            self._waiting = b""

    def _put(self, number: int, content: bytes) -> None:
        (self._folder / f"{number:010d}").write_bytes(content)

    def cut(self, keep: Callable[[str], bool]) -> None:
        """Drops lines at the end until `keep` holds for the last one.
        Only segments that lose lines are read."""
        self.put()
        while self._numbers:
            segment = self._folder / f"{self._numbers[-1]:010d}"
            content = segment.read_bytes()
            lines = content.split(b"\n")
            while lines and not (lines[-1] and keep(lines[-1].decode("utf-8", "replace"))):
                lines.pop()
            rest = b"".join(line + b"\n" for line in lines)
            if not rest:
                segment.unlink(missing_ok=True)
                self._numbers.pop()
                continue
            if rest != content:
                segment.write_bytes(rest)
            return

    def thin(self, keep: Callable[[str], bool]) -> int:
        """Drops the lines for which `keep` does not hold, segment by segment;
        returns the bytes that are left."""
        self.put()
        size = 0
        for number in list(self._numbers):
            segment = self._folder / f"{number:010d}"
            content = segment.read_bytes()
            lines = content.decode("utf-8", "replace").splitlines()
            rest = "".join(f"{line}\n" for line in lines if keep(line)).encode()
            size += len(rest)
            if rest and rest != content:
                segment.write_bytes(rest)
            elif not rest:
                segment.unlink(missing_ok=True)
                self._numbers.remove(number)
        self.size = size
        return size

    def lines(self, position: int) -> Iterator[str]:
        """Yields the lines from segment `position` on."""
        for number in self._numbers:
            if number >= position:
                content = (self._folder / f"{number:010d}").read_bytes()
                yield from content.decode("utf-8", "replace").splitlines()

    def close(self) -> None:
        """Puts what waits; lines that cannot be put are named on standard error."""
        if self.closed:
            return
        try:
            self.put()
        except StorageError as error:
            print(
                f"{self.name}: its last lines could not be written: {error.truth}", file=sys.stderr
            )
        self._watching.close()
        super().close()


def segments_of(path: BucketPath) -> BucketPath:
    """Returns the folder with the segments of a file of lines."""
    return path.with_name(f"{path.name}{_SEGMENTS}")


def is_segment(name: str) -> bool:
    """Whether a name relative to an output folder is that of a segment."""
    return name.rpartition("/")[0].endswith(f"{LINES}{_SEGMENTS}")


@functools.cache
def context(retries: int = RETRIES) -> tensorstore.Context:
    """Returns what all requests share: credentials, retries, limits of concurrency."""
    again = {"max_retries": retries, "initial_delay": "200ms", "max_delay": "10s"}
    shared: dict[str, Any] = {"s3_request_retries": again, "gcs_request_retries": again}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        shared["aws_credentials"] = {"type": "environment"}
    return tensorstore.Context(shared)


def storage_error(asked: str, error: Exception) -> StorageError:
    """Returns the error of a request that a bucket refused: what is missing,
    and where it is given."""
    failure = bucket_failure(error)
    if failure is None:
        return StorageError(asked, reason_of(error), "see `Buckets` in the docs")
    truth, fix = _REASONS[failure]
    return StorageError(asked, truth, fix)


_CREDENTIALS = (
    "for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile; for gs:// `gcloud auth "
    "application-default login` or GOOGLE_APPLICATION_CREDENTIALS"
)
_REASONS: dict[BucketFailure, tuple[str, str]] = {
    BucketFailure.NO_BUCKET: (
        "the bucket does not exist, or not at this endpoint",
        "the name of a bucket that exists; AWS_ENDPOINT_URL where the server is not Amazon's",
    ),
    BucketFailure.NO_CREDENTIALS: ("there are no credentials", _CREDENTIALS),
    BucketFailure.FORBIDDEN: (
        "the server refused permission (403): no credentials, wrong ones, or ones that may not do "
        "this",
        f"a role that may list, read, write and delete objects of the bucket; {_CREDENTIALS}",
    ),
    BucketFailure.UNREACHABLE: (
        "the server could not be reached",
        "AWS_ENDPOINT_URL (s3://) or TENSORSTORE_GCS_HTTP_URL (gs://) of a server that answers, or "
        "a network",
    ),
    BucketFailure.UNWELL: (
        f"the server failed again and again, through {RETRIES} retries",
        "the same command when the server is well",
    ),
}
"""Truth and fix of each reason."""
