"""Copies between stores, verified by checksums, and copies of what is read from a bucket in the local cache."""

import concurrent.futures
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.errors import StorageError, by_class, reason_of
from meshwright.formatting import format_bytes
from meshwright.storage.attempts import RegularFile
from meshwright.storage.paths import bucket_path, in_bucket, remove_tree

PART = 64 * 2**20
"""Bytes of a file that are in memory at a time."""
_COPIES = 8
"""Files that are copied at a time."""
_VERSIONS = ".copied.json"


def files_of(folder: Path) -> list[str]:
    """Returns the names of the files under a folder, relative to it, in order; links are left out."""
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
    target.parent.mkdir(parents=True, exist_ok=True)
    part_file, digest = target.with_name(f".{target.name}.part-{os.getpid()}"), hashlib.sha256()
    try:
        with part_file.open("wb") as file:
            for part in _parts(source):
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
        part_file.replace(target)
    finally:
        part_file.unlink(missing_ok=True)
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

    A file that the target has already, from a copy that was cut off, is compared and sent again only if it differs.
    Raises StorageError where a copy differs from its source.
    """
    _check_names(names, source)
    there = set(files_of(target))

    def copy(name: str) -> None:
        first, second = source / name, target / name
        if name in there and sha256_of(first) == sha256_of(second):
            return
        expected = copy_file(first, second)
        if (found := sha256_of(second)) != expected:
            truth = f"the copy has SHA-256 {found[:16]}..., the source {expected[:16]}...; the source is as it was"
            raise StorageError(
                f"copying {first} to {second}", truth, f"delete {second} and copy again"
            )

    _of_each(copy, names)


def copy_tree(source: Path, target: Path, last: Sequence[str] = ()) -> None:
    """Copies a folder with `copy_files`. last: files that make the copy complete, copied when all others are compared.

    Raises StorageError where there is nothing in it.
    """
    names = files_of(source)
    if not names:
        raise StorageError(f"copying {source}", "there is nothing in it", "a folder that exists")
    for group in (
        [name for name in names if name not in last],
        [name for name in names if name in last],
    ):
        copy_files(group, source, target)


def move_tree(source: Path, target: Path, last: Sequence[str] = ()) -> None:
    """Copies a folder, compares the copy, and deletes the source: first the files that make it complete."""
    copy_tree(source, target, last)
    for name in last:
        (source / name).unlink(missing_ok=True)
    remove_tree(source)


def local_copy(location: Path, cache: Path) -> Path:
    """Returns a local copy of a file or folder in a bucket; a local path itself.

    Objects are copied once, and again when their version in the bucket is another; copies of deleted objects are
    deleted. Raises StorageError where there is nothing of that name, or no room.
    """
    if not in_bucket(location):
        return location
    found = bucket_path(location)
    single = found.is_file()
    names = [found.name] if single else found.object_names()
    if not names:
        raise StorageError(
            f"reading {location}",
            "there is no such object and no such folder",
            "a name that exists",
        )
    _check_names(names, location)
    origin = found.parent if single else found
    target = (
        cache / "buckets" / hashlib.sha256(str(location).encode()).hexdigest()[:16] / location.name
    )
    folder = target.parent if single else target
    record = folder / _VERSIONS
    known: dict[str, Any] = (
        json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    )

    def versions_of(some: list[str]) -> dict[str, str]:
        versions = _of_each(lambda name: bucket_path(origin / name).generation().hex(), some)
        return dict(zip(some, versions, strict=True))

    versions = versions_of(names)
    stale = [
        name for name in names if known.get(name) != versions[name] or not (folder / name).is_file()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name in known.keys() - versions.keys():
        (folder / name).unlink(missing_ok=True)
    try:
        _of_each(lambda name: copy_file(origin / name, folder / name), stale)
    except OSError as error:
        truth = f"{reason_of(error)}; {format_bytes(shutil.disk_usage(folder).free)} are free"
        refusal = StorageError(f"copying {location} to {folder}", truth, "a cache with more space")
        raise by_class(error, refusal) from error
    if versions_of(stale) != {name: versions[name] for name in stale}:
        raise StorageError(
            f"copying {location}", "its objects changed meanwhile", "the same command again"
        )
    part = record.with_name(f"{_VERSIONS}.{os.getpid()}")
    part.write_text(json.dumps(versions), encoding="utf-8")
    part.replace(record)
    return target
