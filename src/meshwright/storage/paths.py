"""Paths of the package: a local path, or one in a bucket.

A bucket cannot rename or append, map an object into memory or lock it, and its free space is
unknown. So there the manifest of a checkpoint is written last, metrics are written at intervals and
at the end, token files are read by range and texts copied to the cache once, and a lock is an
object that is put on condition that there is none.
"""

import glob
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError
from meshwright.trust import derive

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
    """Returns the absolute, normal path of a location: of a local file or folder,
    or of an object in a bucket.

    `~` is the home folder. `..` leaves the folder that a link before it leads to, as for the
    system; other links stay in the path, and are followed where it is used. Raises ConfigError for
    a scheme other than `s3://` and `gs://`, a bucket without a name, and a path out of its bucket.

    Example:
        >>> bucket = path_of("s3://bucket/runs/../old")
        >>> str(bucket / "mine"), path_of("runs/../mine") == Path.cwd() / "mine"
        ('s3://bucket/old/mine', True)
    """
    found = _SCHEME.match(str(location))
    # `hf:PATH` names weights (hugging_face/hub.py), also where PATH is absolute.
    if found is None or (found[1] == "hf" and not str(location).startswith("hf://")):
        path = Path(os.path.expanduser(location))
        return path.resolve() if ".." in path.parts else path.absolute()
    if found[1] not in SCHEMES:
        truth = f"{found[1]}:// is no store that can be opened"
        raise ConfigError(f"{location}", truth, "a local path, gs:// or s3://")
    scheme, *parts = bucket_path(location).parts
    inside = posixpath.normpath("/".join(parts)) if parts else ""
    if not inside or inside.startswith("..") or (parts[0] != inside.partition("/")[0]):
        truth = "it leads out of its bucket" if parts else "it names no bucket"
        raise ConfigError(f"{location}", truth, f"{found[1]}://BUCKET/FOLDER")
    return bucket_path(f"{scheme}//{inside}")


def place_of(name: str) -> str:
    """Returns a name with the path in it made absolute: text, a tokenizer
    or weights, `hf:PATH` too.

    A name that is no path (`bytes`, `hf:OWNER/MODEL`) stays as it is, and a pattern of files keeps
    its wildcards. The result is of the name's class (`trust`).
    """
    return derive(name, _placed(name))


def _placed(name: str) -> str:
    kind = "hf:" if name.startswith("hf:") else ""
    given = name.removeprefix(kind)
    if in_bucket(given):
        return kind + str(path_of(given))
    local = os.path.expanduser(given)
    # A Megatron dataset is named by what the names of its two files have in common.
    exists = os.path.exists(local) or os.path.exists(f"{local}.idx")
    if _SCHEME.match(given) or not (glob.has_magic(given) or exists):
        return name
    if exists:
        return kind + str(path_of(given))
    return os.path.join(glob.escape(os.getcwd()), os.path.expanduser(given))


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
    return path_of(folder)


def bucket_path(location: str | Path) -> "BucketPath":
    """Returns a path that is known to be in a bucket."""
    from meshwright.storage.bucket import BucketPath  # TensorStore; most runs are on local disks

    return BucketPath(str(location))


def kvstore_of(folder: Path) -> tuple[dict[str, Any], Any]:
    """Returns TensorStore's description of the files in a folder,
    and the context to open them with (None: its own)."""
    if in_bucket(folder):
        return bucket_path(folder).kvstore()
    return {"driver": "file", "path": f"{path_of(folder)}/"}, None
