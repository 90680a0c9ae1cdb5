"""Entries of the cache that grow with the data: token files, and copies of what is in buckets.

An entry never changes once it is complete, because other processes may read it. Readers hold a
shared lock on one file of it (`tokens.json`, `.copied.json`), a writer the lock of an unfinished
one (`.lock`). Only `delete_entry` deletes, where no process holds the lock.
"""

import contextlib
import dataclasses
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from meshwright.data.tokens import DESCRIPTION
from meshwright.documents import read_json
from meshwright.errors import ConfigError, DataError, by_class, nearest, reason_of
from meshwright.storage.removing import remove_tree, rename
from meshwright.storage.transfer import COPIES, COPY_RECORD

_TOKENS = "tokens"
_WRITING = ".lock"
_DELETED = ".deleted-"
"""Start of the name of an entry whose deletion was cut off."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the cache."""

    name: str
    """Path below the cache folder, which `delete_entry` takes."""
    source: str
    """What it was made of; empty where that is unknown."""
    bytes: int
    written: float
    """Time at which it was completed, in seconds since 1970."""
    state: str
    """`complete`, `unfinished` or `deleted`."""
    used: bool
    """Whether a process holds its lock."""


def list_entries(cache: Path) -> list[Entry]:
    """Returns the entries of a cache, largest first."""
    found = [_entry(cache, folder) for folder in _folders(cache)]
    return sorted(found, key=lambda entry: (-entry.bytes, entry.name))


def delete_entry(cache: Path, name: str) -> int:
    """Deletes an entry of the cache; returns its bytes.

    It is renamed first, so that a kill leaves nothing that is taken for an entry. Raises
    ConfigError where there is no such entry, DataError where a process reads or writes it.
    """
    known = {str(folder.relative_to(cache)): folder for folder in _folders(cache)}
    if name not in known:
        fix = nearest(name, known) if known else "nothing: the cache has no entries"
        raise ConfigError(f"deleting {name} from {cache}", "there is no such entry", fix)
    folder = known[name]
    size = _size(folder)
    doomed = folder.with_name(f"{_DELETED}{secrets.token_hex(8)}")
    try:
        with _locked(folder):
            rename(folder, doomed, below=folder.parent)
        remove_tree(doomed, below=folder.parent)
    except BlockingIOError as error:
        truth = "a process reads or writes it now"
        raise DataError(
            f"deleting {name} from {cache}", truth, "the same command when that has ended"
        ) from error
    except OSError as error:
        truth = f"it cannot be deleted: {reason_of(error)}"
        refusal = DataError(f"deleting {name} from {cache}", truth, "a look at who owns the files")
        raise by_class(error, refusal) from error
    return size


def _folders(cache: Path) -> Iterator[Path]:
    copies = cache / COPIES
    parents = [cache / _TOKENS]
    if copies.is_dir():
        parents += sorted(path for path in copies.iterdir() if path.is_dir())
    for parent in parents:
        if parent.is_dir():
            yield from sorted(path for path in parent.iterdir() if path.is_dir())


def _entry(cache: Path, folder: Path) -> Entry:
    lock = _lock_file(folder)
    state = "unfinished"
    if folder.name.startswith(_DELETED):
        state = "deleted"
    elif lock is not None and lock.name != _WRITING:
        state = "complete"
    used = False
    try:
        with _locked(folder):
            pass
    except BlockingIOError:
        used = True
    except OSError:
        pass  # a file system without locks
    written = (lock or folder).stat().st_mtime
    name = str(folder.relative_to(cache))
    return Entry(name, _source(folder), _size(folder), written, state, used)


def _source(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if (folder / DESCRIPTION).is_file():
            return str(read_json(folder / DESCRIPTION)["source"])
        if (folder / COPY_RECORD).is_file():
            return ", ".join(path.name for path in folder.iterdir() if path.name != COPY_RECORD)
    return ""


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def _lock_file(folder: Path) -> Path | None:
    """Returns the file whose lock readers or the writer of an entry hold."""
    for name in (DESCRIPTION, COPY_RECORD, _WRITING):
        if (folder / name).is_file():
            return folder / name
    return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the exclusive lock of an entry.

    Raises BlockingIOError where another process holds one.
    """
    file = _lock_file(folder)
    # The writer of a copy, or of conversations, holds the lock on the folder itself.
    number = os.open(file or folder, os.O_RDONLY if file is None else os.O_RDWR)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)
