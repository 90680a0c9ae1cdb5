"""Copies between stores, verified by checksums, and copies of what is read from a bucket in the local cache."""

import concurrent.futures
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.errors import StorageError
from meshwright.formatting import format_bytes
from meshwright.storage.paths import bucket_path, in_bucket, remove_tree

PART = 64 * 2**20
"""Bytes of a file that are in memory at a time."""
JOURNAL = ".moving.json"
"""File of the target with the checksums of what has been copied; it is deleted at the end."""
_COPIES = 8
"""Files that are copied at a time."""
_RECORDED = 64
"""Files after which the journal is written."""
_VERSIONS = ".copied.json"


def files_of(folder: Path) -> list[str]:
    """Returns the names of the files under a folder, relative to it, in order; links are left out."""
    if in_bucket(folder):
        return bucket_path(folder).object_names()
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(str(path.relative_to(folder)) for path in files)


def sha256_of(path: Path) -> tuple[str, int]:
    """Returns the SHA-256 of a file or object, and its size in bytes."""
    digest, size = hashlib.sha256(), 0
    for part in _parts(path):
        digest.update(part)
        size += len(part)
    return digest.hexdigest(), size


def _parts(path: Path) -> Iterator[bytes]:
    """Yields the content of a file or object part by part."""
    if in_bucket(path):
        first, found = 0, bucket_path(path)
        while part := found.read_part(first, PART):
            yield part
            first += len(part)
            if len(part) < PART:
                return
        return
    with path.open("rb") as file:
        while part := file.read(PART):
            yield part


def copy_file(source: Path, target: Path) -> tuple[str, int]:
    """Copies a file or object to another store; returns its SHA-256 and size.

    All of an object is in memory while it is written; a local file appears when it is complete.
    """
    if in_bucket(target):
        content = b"".join(_parts(source))
        target.write_bytes(content)
        return hashlib.sha256(content).hexdigest(), len(content)
    target.parent.mkdir(parents=True, exist_ok=True)
    part_file = target.with_name(f".{target.name}.part-{os.getpid()}")
    digest, size = hashlib.sha256(), 0
    try:
        with part_file.open("wb") as file:
            for part in _parts(source):
                file.write(part)
                digest.update(part)
                size += len(part)
            file.flush()
            os.fsync(file.fileno())
        part_file.replace(target)
    finally:
        part_file.unlink(missing_ok=True)
    return digest.hexdigest(), size


def copy_all(names: Sequence[str], source: Path, target: Path, done: Callable[[str, str, int], None]) -> None:
    """Copies files of a folder, several at a time. done: called with name, SHA-256 and size of each."""
    with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
        futures = {pool.submit(copy_file, source / name, target / name): name for name in names}
        for future in concurrent.futures.as_completed(futures):
            done(futures[future], *future.result())


def _check_names(names: Sequence[str], folder: Path) -> None:
    """Raises StorageError for a name that leads out of the folder."""
    for name in names:
        if name.startswith("/") or ".." in PurePosixPath(name).parts or "\0" in name:
            raise StorageError(f"copying {folder}", f"{name!r} leads out of the folder", "delete that object")


def copy_tree(
    source: Path, target: Path, last: Sequence[str] = (), say: Callable[[str], None] = lambda line: None
) -> dict[str, str]:
    """Copies a folder and reads the copy back; returns the SHA-256 of its files.

    What an earlier copy that was cut off has copied is read back, not sent again. last: files that make the copy
    complete, written when all others are there and compared. Raises StorageError where a file differs from its source.
    """
    names = files_of(source)
    _check_names(names, source)
    if not names:
        raise StorageError(f"copying {source}", "there is nothing in it", "a folder that exists")
    journal = target / JOURNAL
    try:
        done: dict[str, Any] = dict(json.loads(journal.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        done = {}
    for group in ([name for name in names if name not in last], [name for name in names if name in last]):
        _copy_group(group, source, target, done, say)
    journal.unlink(missing_ok=True)
    return {name: done[name][0] for name in names}


def _copy_group(names: list[str], source: Path, target: Path, done: dict[str, Any], say: Callable[[str], None]) -> None:
    missing, journal, count = [name for name in names if name not in done], target / JOURNAL, 0

    def write() -> None:
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.write_text(json.dumps(done), encoding="utf-8")

    def record(name: str, digest: str, size: int) -> None:
        nonlocal count
        done[name], count = [digest, size], count + 1
        if count % _RECORDED == 0:
            write()

    copy_all(missing, source, target, record)
    if missing:
        write()
    for name in names:
        found, size = sha256_of(target / name)
        # The source is read again where an earlier attempt copied: it may have changed since.
        expected = done[name][0] if name in missing else sha256_of(source / name)[0]
        if found != expected:
            raise StorageError(
                f"copying {source / name} to {target / name}",
                f"the copy of {size:,} bytes has SHA-256 {found[:16]}..., the source {expected[:16]}...; the source is "
                "as it was",
                f"delete {journal} and copy again",
            )
        done[name] = [found, size]
        say(f"{name}: {size:,} bytes, as in the source")


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
        raise StorageError(f"reading {location}", "there is no such object and no such folder", "a name that exists")
    _check_names(names, location)
    origin = found.parent if single else found
    target = cache / "buckets" / hashlib.sha256(str(location).encode()).hexdigest()[:16] / location.name
    folder = target.parent if single else target
    record = folder / _VERSIONS
    known: dict[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}

    def versions_of(some: list[str]) -> dict[str, str]:
        with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
            versions = pool.map(lambda name: bucket_path(origin / name).generation().hex(), some)
            return dict(zip(some, versions, strict=True))

    versions = versions_of(names)
    stale = [name for name in names if known.get(name) != versions[name] or not (folder / name).is_file()]
    folder.mkdir(parents=True, exist_ok=True)
    for name in known.keys() - versions.keys():
        (folder / name).unlink(missing_ok=True)
    try:
        copy_all(stale, origin, folder, lambda name, digest, size: None)
        for name in stale:
            # Tokens in the cache are known by size and time of their text: the same on all hosts.
            when = int(hashlib.sha256(versions[name].encode()).hexdigest()[:7], 16)
            os.utime(folder / name, (when, when))
    except OSError as error:
        truth = f"{error.strerror or error}; {format_bytes(shutil.disk_usage(folder).free)} are free"
        raise StorageError(f"copying {location} to {folder}", truth, "a cache with more space") from error
    if versions_of(stale) != {name: versions[name] for name in stale}:
        raise StorageError(f"copying {location}", "its objects changed meanwhile", "the same command again")
    part = record.with_name(f"{_VERSIONS}.{os.getpid()}")
    part.write_text(json.dumps(versions), encoding="utf-8")
    part.replace(record)
    return target
