"""Paths of the package: a local path, or one in a bucket, and what the store under it can do."""

import dataclasses
import re
from pathlib import Path

from meshwright.errors import ConfigError

# `Path("s3://bucket/x")` is `s3:/bucket/x`: options are parsed into paths before they come here.
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/")
SCHEMES = ("gs", "s3")


@dataclasses.dataclass(frozen=True)
class Store:
    """Kind of store, and those of its abilities that anything here depends on."""

    name: str
    renames: bool
    """Whether a folder is renamed in one step. Where not, the manifest of a checkpoint is written last, and a folder
    without one is no checkpoint."""
    appends: bool
    """Whether a file grows. Where not, metrics are written whole, at intervals and at the end."""
    maps: bool
    """Whether a file can be mapped into memory. Where not, token files and texts are copied to the cache once."""
    locks: bool
    """Whether the system locks files. Where not, the lock of an output folder is an object that is put on condition
    that there is none."""
    limited: bool
    """Whether its free space is known."""


LOCAL = Store("file system", renames=True, appends=True, maps=True, locks=True, limited=True)
BUCKET = Store("bucket", renames=False, appends=False, maps=False, locks=False, limited=False)


def path_of(location: str | Path) -> Path:
    """Returns the path of a location: of a local file or folder, or of an object in a bucket (`s3://`, `gs://`).

    Raises ConfigError for another scheme, or a bucket without a name.

    Example:
        >>> str(path_of("s3://bucket/runs") / "mine"), str(path_of("runs") / "mine")
        ('s3://bucket/runs/mine', 'runs/mine')
    """
    found = _SCHEME.match(str(location))
    # `hf:PATH` names weights (hugging_face/hub.py), also where PATH is absolute.
    if found is None or (found[1] == "hf" and not str(location).startswith("hf://")):
        return Path(location)
    if found[1] not in SCHEMES:
        raise ConfigError(
            f"{location}", f"{found[1]}:// is no store that can be opened", "a local path, gs:// or s3://"
        )
    from meshwright.storage.bucket import BucketPath  # most runs are on local disks

    path = BucketPath(str(location))
    if not path.bucket:
        raise ConfigError(f"{location}", "it names no bucket", f"{found[1]}://BUCKET/FOLDER")
    return path


def store_of(path: Path) -> Store:
    """Returns what the store of a path can do."""
    return BUCKET if in_bucket(path) else LOCAL


def read_object(path: Path, largest: int) -> bytes:
    """Returns at most `largest` bytes of an object in a bucket. Raises FileNotFoundError."""
    from meshwright.storage.bucket import BucketPath

    return BucketPath(path).read_part(0, largest)


def in_bucket(location: str | Path) -> bool:
    """Whether a location is in a bucket."""
    found = _SCHEME.match(str(location))
    return found is not None and found[1] in SCHEMES
