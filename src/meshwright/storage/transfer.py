"""Copies between stores, verified by checksums,
and copies of what is read from a bucket in the local cache."""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from meshwright.errors import StorageError, by_class, reason_of
from meshwright.formatting import format_bytes
from meshwright.storage.attempts import RegularFile, attempt
from meshwright.storage.paths import bucket_path, in_bucket
from meshwright.storage.removing import remove_file, remove_tree, rename
from meshwright.storage.writing import open_file, refuse_link

PART = 64 * 2**20
"""Bytes of a file that are in memory at a time."""
_COPIES = 8
"""Files that are copied at a time."""
COPY_RECORD = ".copied.json"
"""File of a copy from a bucket with the versions of its objects; readers hold a lock on it."""
COPIES = "buckets"
"""Folder of the cache with what was copied from buckets."""


_kept: dict[Path, int] = {}
"""Copies that this process reads, with the descriptors that hold their locks."""


def files_of(folder: Path) -> list[str]:
    """Returns the names of the files under a folder, relative to it, in order;
    links are left out."""
    if in_bucket(folder):
        return bucket_path(folder).object_names()
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(str(path.relative_to(folder)) for path in files)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file or object."""
    digest = hashlib.sha256()
    for part in _parts(path):
        digest.update(part)
    return digest.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    if in_bucket(path):
        first, found = 0, bucket_path(path)
        while part := found.read_part(first, PART):
            yield part
            first += len(part)
            if len(part) < PART:
                return
        return
    with io.BufferedReader(RegularFile(path)) as file:
        while part := file.read(PART):
            yield part


def copy_file(source: Path, target: Path) -> str:
    """Copies a file or object to another store; returns its SHA-256.

    All of an object is in memory while it is written; a local file appears when it is complete.
    """
    if in_bucket(target):
        content = b"".join(_parts(source))
        target.write_bytes(content)
        return hashlib.sha256(content).hexdigest()
    refuse_link(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Processes of several hosts have the same number in their containers.
    part_file = target.with_name(f".{target.name}.part-{secrets.token_hex(8)}")
    digest = hashlib.sha256()
    try:
        with open_file(part_file, "wb") as file:
            for part in _parts(source):
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
        rename(part_file, target, below=target.parent)
    finally:
        with contextlib.suppress(OSError):
            remove_file(part_file, below=target.parent, missing_ok=True)
    return digest.hexdigest()


def _of_each[T](call: Callable[[str], T], names: Iterable[str]) -> list[T]:
    with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
        return list(pool.map(call, names))


def _check_names(names: Sequence[str], folder: Path) -> None:
    """Raises StorageError for a name that leads out of the folder."""
    for name in names:
        if name.startswith("/") or ".." in PurePosixPath(name).parts or "\0" in name:
            raise StorageError(
                f"copying {folder}", f"{name!r} leads out of the folder", "delete that object"
            )


def copy_files(names: Sequence[str], source: Path, target: Path) -> None:
    """Copies files of a folder, several at a time, and reads each copy back.

    A file that the target has already, from a copy that was cut off, is compared and sent again
    only if it differs. Raises StorageError where a copy differs from its source.
    """
    _check_names(names, source)
    existing = set(files_of(target))

    def copy(name: str) -> None:
        if name in existing and sha256_of(source / name) == sha256_of(target / name):
            return
        _copy_verified(source / name, target / name)

    _of_each(copy, names)


def _copy_verified(source: Path, target: Path) -> None:
    """Copies a file and reads the copy back. Raises StorageError where it differs."""
    expected = copy_file(source, target)
    digest = sha256_of(target)
    if digest != expected:
        truth = (
            f"the copy has SHA-256 {digest[:16]}..., the source {expected[:16]}...; the source is "
            "as it was"
        )
        raise StorageError(
            f"copying {source} to {target}", truth, f"delete {target} and copy again"
        )


def join_segments(names: Sequence[str], folder: Path) -> None:
    """Makes one file of the segments of each file of lines that were copied from a bucket.
    names: in their order."""
    joined: dict[Path, list[Path]] = {}
    for name in sorted(names):
        segment = folder / name
        file = segment.parent.with_name(segment.parent.name.rpartition(".")[0])
        joined.setdefault(file, []).append(segment)
    for file, segments in joined.items():
        part = file.with_name(f".{file.name}.part-{secrets.token_hex(8)}")
        with open_file(part, "xb") as opened:
            for segment in segments:
                opened.write(segment.read_bytes())
            opened.flush()
            os.fsync(opened.fileno())
        rename(part, file, below=folder)
        remove_tree(segments[0].parent, below=folder)


def copy_tree(source: Path, target: Path, last: Sequence[str] = ()) -> None:
    """Copies a folder with `copy_files`.
    last: files that make the copy complete, copied when all others are compared.

    Raises StorageError where there is nothing in it.
    """
    names = files_of(source)
    if not names:
        raise StorageError(f"copying {source}", "there is nothing in it", "a folder that exists")
    copy_files([name for name in names if name not in last], source, target)
    copy_files([name for name in names if name in last], source, target)


def move_tree(source: Path, target: Path, last: Sequence[str] = ()) -> None:
    """Copies a folder, compares the copy,
    and deletes the source: first the files that make it complete."""
    copy_tree(source, target, last)
    for name in last:
        remove_file(source / name, below=source, missing_ok=True)
    remove_tree(source, below=source.parent)


def local_copy(location: Path, cache: Path) -> Path:
    """Returns a local copy of a file or folder in a bucket; a local path itself.

    A copy is named by the versions of its objects, and never changes: another process may read it.
    Where an object has another version, another copy is made, with hard links to the objects that
    are as they were. A copy that was cut off is gone on with. Raises StorageError where there is
    nothing of that name, or no room.
    """
    if not in_bucket(location):
        return location
    source = _BucketSource.find(location)
    versions = source.versions()
    copies = cache / COPIES / _hash(str(location))
    entry = copies / _hash(json.dumps(versions))
    copy = entry / location.name
    if _keep(entry):
        return copy
    scratch = copies / f".{entry.name}"
    folder = scratch if source.is_file else scratch / location.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held_folder(scratch):
            if _keep(entry):  # another process made it meanwhile
                return copy
            _link_known(copies, versions, folder, source.is_file)
            source.copy_missing(folder)
            if source.versions() != versions:
                raise StorageError(
                    f"copying {location}", "its objects changed meanwhile", "the same command again"
                )
            (scratch / COPY_RECORD).write_text(json.dumps(versions), encoding="utf-8")
            rename(scratch, entry, below=copies)
            _keep(entry)
    except OSError as error:
        if _keep(entry):  # another process was first, on a file system without locks
            return copy
        raise by_class(error, _copy_refusal(error, location, folder, cache)) from error
    return copy


def _copy_refusal(error: OSError, location: Path, folder: Path, cache: Path) -> StorageError:
    """Returns the error of a copy that the disk refused."""
    truth = reason_of(error)
    if cache.is_dir():
        truth += f"; {format_bytes(shutil.disk_usage(cache).free)} are free"
    return StorageError(f"copying {location} to {folder}", truth, "a cache with more space")


@dataclasses.dataclass(frozen=True)
class _BucketSource:
    """File or folder in a bucket, with the names of its objects."""

    folder: Path
    """Folder below which the objects are named."""
    names: list[str]
    is_file: bool

    @classmethod
    def find(cls, location: Path) -> "_BucketSource":
        """Lists the objects of a location.
        Raises StorageError where there are none, or a name leads out of it."""
        path = bucket_path(location)
        is_file = path.is_file()
        if is_file:
            folder = path.parent
            names = [path.name]
        else:
            folder = path
            names = path.object_names()
        if not names:
            raise StorageError(
                f"reading {location}",
                "there is no such object and no such folder",
                "a name that exists",
            )
        _check_names(names, location)
        return cls(folder, names, is_file)

    def versions(self) -> dict[str, str]:
        """Asks for the present version of each object."""
        versions = _of_each(self._version, self.names)
        return dict(zip(self.names, versions, strict=True))

    def _version(self, name: str) -> str:
        return bucket_path(self.folder / name).generation().hex()

    def copy_missing(self, target: Path) -> None:
        """Copies the objects that a local folder does not have."""
        missing = [name for name in self.names if not (target / name).is_file()]
        _of_each(lambda name: copy_file(self.folder / name, target / name), missing)


def _keep(copy: Path) -> bool:
    """Holds a shared lock on a copy until this process ends,
    so that `meshwright cache` does not delete it.

    Returns whether the copy is there.
    """
    try:
        number = _kept.get(copy)
        if number is None:
            number = attempt(lambda: os.open(copy / COPY_RECORD, os.O_RDONLY))
            _kept[copy] = number
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(number, fcntl.LOCK_SH)
        return (copy / COPY_RECORD).is_file()
    except FileNotFoundError:
        return False


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Holds the lock on a folder; waits for another process that has it."""
    number = attempt(lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _link_known(copies: Path, versions: dict[str, str], folder: Path, single: bool) -> None:
    """Links what other copies have of the same objects in the same versions into `folder`."""
    for record in copies.glob(f"[!.]*/{COPY_RECORD}"):
        try:
            known = dict(json.loads(record.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            continue  # its objects are copied again
        copy = record.parent if single else record.parent / folder.name
        for name, version in versions.items():
            file = folder / name
            if known.get(name) == version and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):  # no links here: it is copied
                    os.link(copy / name, file)
