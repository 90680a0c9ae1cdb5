"""Moves and copies of folders between stores: resumable, verified by checksums before the source goes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import StorageError
from meshwright.storage.transfer import check_names, copy_all, files_of, remove_tree, sha256_of

JOURNAL = ".moving.json"
"""File of the target with the checksums of what has been copied; it is deleted at the end."""
_RECORDED = 64
"""Files after which the journal is written."""


def copy_tree(
    source: Path, target: Path, last: Sequence[str] = (), say: Callable[[str], None] = lambda line: None
) -> dict[str, str]:
    """Copies a folder and reads the copy back; returns the SHA-256 of its files.

    What an earlier copy that was cut off has copied is read back, not sent again. last: files that make the copy whole,
    written when all others are there and compared. Raises StorageError where a file differs from its source.
    """
    names = files_of(source)
    check_names(names, source)
    if not names:
        raise StorageError(f"copying {source}", "there is nothing in it", "a folder that exists")
    journal = target / JOURNAL
    done: dict[str, Any] = _read(journal)
    end = [name for name in names if name in last]
    for group in ([name for name in names if name not in last], end):
        _copy_group(group, source, target, done, say)
    journal.unlink(missing_ok=True)
    return {name: done[name][0] for name in names}


def _copy_group(
    names: list[str], source: Path, target: Path, done: dict[str, Any], say: Callable[[str], None]
) -> None:  # fmt: skip
    missing = [name for name in names if name not in done]
    journal, count = target / JOURNAL, 0

    def record(name: str, digest: str, size: int) -> None:
        nonlocal count
        done[name], count = [digest, size], count + 1
        if count % _RECORDED == 0:
            _write(journal, done)

    copy_all(missing, source, target, record)
    if missing:
        _write(journal, done)
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
    """Copies a folder, compares the copy, and deletes the source: first the files that make it whole."""
    copy_tree(source, target, last)
    for name in last:
        (source / name).unlink(missing_ok=True)
    remove_tree(source)


def _read(journal: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(journal.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _write(journal: Path, done: dict[str, Any]) -> None:
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.write_text(json.dumps(done), encoding="utf-8")
