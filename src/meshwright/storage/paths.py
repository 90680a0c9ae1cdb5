"""Paths of the package: a local path, or one in a bucket.

A bucket cannot rename or append, map an object into memory or lock it, and its free space is unknown. So there the
manifest of a checkpoint is written last, metrics are written at intervals and at the end, token files are read by range
and texts copied to the cache once, and a lock is an object that is put on condition that there is none.
"""

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.storage.bucket import BucketPath

# `Path("s3://bucket/x")` is `s3:/bucket/x`: options are parsed into paths before they come here.
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/")
SCHEMES = ("gs", "s3")


def in_bucket(location: str | Path) -> bool:
    """Whether a location is in a bucket."""
    found = _SCHEME.match(str(location))
    return found is not None and found[1] in SCHEMES


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
        truth = f"{found[1]}:// is no store that can be opened"
        raise ConfigError(f"{location}", truth, "a local path, gs:// or s3://")
    path = bucket_path(location)
    if not path.bucket:
        raise ConfigError(f"{location}", "it names no bucket", f"{found[1]}://BUCKET/FOLDER")
    return path


def default_cache_folder() -> Path:
    """Returns the folder that keeps compiled programs and token files between runs."""
    folder = os.environ.get("MESHWRIGHT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "meshwright"
    )
    if in_bucket(folder):
        raise ConfigError(
            f"MESHWRIGHT_CACHE={folder}",
            "it keeps files that grow, and compiled programs",
            "a local folder; data and output may be in a bucket",
        )
    return Path(folder)


def bucket_path(location: str | Path) -> "BucketPath":
    """Returns a path that is known to be in a bucket."""
    from meshwright.storage.bucket import BucketPath  # TensorStore; most runs are on local disks

    return BucketPath(str(location))


def remove_tree(folder: Path) -> None:
    """Deletes a folder and all in it, if it is there."""
    if in_bucket(folder):
        bucket_path(folder).remove_tree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def kvstore_of(folder: Path) -> tuple[dict[str, Any], Any]:
    """Returns TensorStore's description of the files in a folder, and the context to open them with (None: its own)."""
    if in_bucket(folder):
        return bucket_path(folder).kvstore()
    return {"driver": "file", "path": f"{folder.absolute()}/"}, None
