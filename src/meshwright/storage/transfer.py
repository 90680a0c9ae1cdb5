"""Copies between stores, verified by checksums, and copies of what is read from a bucket in the local cache."""

import concurrent.futures
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.errors import StorageError
from meshwright.formatting import format_bytes
from meshwright.storage.bucket import BucketPath, objects_of

PART = 64 * 2**20
"""Bytes of a file that are in memory at a time."""
_COPIES = 8
"""Files that are copied at a time."""
_RECORD = ".copied.json"


def remove_tree(folder: Path) -> None:
    """Deletes a folder and all in it, if it is there."""
    if isinstance(folder, BucketPath):
        folder.remove_tree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def sha256_of(path: Path) -> tuple[str, int]:
    """Returns the SHA-256 of a file or object, and its size in bytes."""
    digest, size = hashlib.sha256(), 0
    for part in _parts(path):
        digest.update(part)
        size += len(part)
    return digest.hexdigest(), size


def _parts(path: Path) -> Any:
    """Yields the content of a file or object part by part."""
    if isinstance(path, BucketPath):
        first = 0
        while part := path.read_part(first, PART):
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

    An object is in memory as a whole while it is written, a local file appears when it is whole.
    """
    digest, size = hashlib.sha256(), 0
    if isinstance(target, BucketPath):
        content = b"".join(_parts(source))
        target.write_bytes(content)
        return hashlib.sha256(content).hexdigest(), len(content)
    target.parent.mkdir(parents=True, exist_ok=True)
    part_file = target.with_name(f".{target.name}.part-{os.getpid()}")
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


def copy_all(names: list[str], source: Path, target: Path, done: Callable[[str, str, int], None]) -> None:
    """Copies files of a folder, several at a time. done: called with name, SHA-256 and size of each."""
    with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
        futures = {pool.submit(copy_file, source / name, target / name): name for name in names}
        for future in concurrent.futures.as_completed(futures):
            done(futures[future], *future.result())


def check_names(names: Sequence[str], folder: Path) -> None:
    """Raises StorageError for a name that leads out of the folder."""
    for name in names:
        if name.startswith("/") or ".." in PurePosixPath(name).parts or "\0" in name:
            raise StorageError(f"copying {folder}", f"{name!r} leads out of the folder", "delete that object")


def local_copy(location: Path, cache: Path) -> Path:
    """Returns a local copy of a file or folder in a bucket; a local path itself.

    Objects are copied once, and again when their version in the bucket is another; those that are gone there go here.
    Raises StorageError where there is nothing of that name, or no room.
    """
    if not isinstance(location, BucketPath):
        return location
    single = location.is_file()
    names = [location.name] if single else location.object_names()
    if not names:
        raise StorageError(f"reading {location}", "there is no such object and no such folder", "a name that exists")
    check_names(names, location)
    origin = location.parent if single else location
    target = cache / "buckets" / hashlib.sha256(str(location).encode()).hexdigest()[:16] / location.name
    folder = target.parent if single else target
    versions = _versions(origin, names)
    record = folder / _RECORD
    known: dict[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
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
        free = format_bytes(shutil.disk_usage(folder).free)
        raise StorageError(
            f"copying {location} to {folder}", f"{error.strerror or error}; {free} are free", "a cache with more space"
        ) from error
    if _versions(origin, stale) != {name: versions[name] for name in stale}:
        raise StorageError(f"copying {location}", "its objects changed meanwhile", "the same command again")
    part = record.with_name(f"{_RECORD}.{os.getpid()}")
    part.write_text(json.dumps(versions), encoding="utf-8")
    part.replace(record)
    return target


def _versions(origin: BucketPath, names: list[str]) -> dict[str, str]:
    with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
        return dict(zip(names, pool.map(lambda name: (origin / name).generation().hex(), names), strict=True))


def files_of(folder: Path) -> list[str]:
    """Returns the files under a folder, relative to it, in order."""
    return [name for name, _ in objects_of(folder)]
