"""Data in buckets: copied into the local cache once, where it is mapped and read like any other."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.storage.paths import in_bucket, path_of


def local_data(paths: Sequence[str], spec: str, cache: Path) -> tuple[tuple[str, ...], str]:
    """Returns sources (each PATH or PATH=WEIGHT) and a tokenizer as they are on this host.

    What is in a bucket is copied into `cache`, and again where it has changed there; a token file's own checksums then
    verify it like any other. Raises StorageError.
    """
    return tuple(_local(path, cache, weighted=True) for path in paths), _local(spec, cache, weighted=False)


def _local(location: str, cache: Path, *, weighted: bool) -> str:
    if not in_bucket(location):
        return location
    from meshwright.storage.transfer import local_copy  # of data in a bucket alone

    path, equals, weight = location.rpartition("=") if weighted else ("", "", "")
    if equals and "/" not in weight:
        return f"{local_copy(path_of(path), cache)}={weight}"
    return str(local_copy(path_of(location), cache))
