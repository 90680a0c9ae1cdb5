"""Files that are written: opened below the descriptor of their folder, without following links.

A run folder, a converted model or a folder of tokens may come from a stranger, and `git`, `tar` and
`rsync` keep links. Opening `events.jsonl` where that is a link to a file elsewhere would change
that file. So whatever the package writes goes through here, and a link at a name that is written is
an error. The folder that the user names may itself be reached through links: it is opened first,
and its descriptor is what files are opened below.

A call that fails for now is made again from the beginning,
with a new descriptor of the folder (`attempts`).
"""

import contextlib
import errno
import functools
import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from meshwright.errors import ConfigError
from meshwright.storage.attempts import attempt, may_pass
from meshwright.storage.paths import bucket_path, in_bucket

_FLAGS = {
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "a+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "r+": os.O_RDWR,
    "lock": os.O_RDWR | os.O_CREAT,
}
"""Flags of a mode without its `b`; `lock` reads and writes a file that may be there."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_OTHERS = ("wandb",)
"""Folders in which another library writes, and makes links of its own."""


def open_descriptor(file: Path, mode: str) -> int:
    """Opens a local file for writing; returns its descriptor.

    mode: as of `open`, or `lock`.
    Raises OSError, and ConfigError where the file is a link or is not a regular file.
    """
    return attempt(functools.partial(_open_descriptor, file, mode))


def _open_descriptor(file: Path, mode: str) -> int:
    folder = os.open(file.parent, _FOLDER)
    try:
        return _open_below(folder, file, mode)
    finally:
        os.close(folder)


def _open_below(folder: int, file: Path, mode: str) -> int:
    # A pipe without a reader would not open, and O_TRUNC waits until it is known to be a file.
    flags = _FLAGS[mode] & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(file.name, flags, 0o644, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EEXIST):
            refuse_special(folder, file)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(file, "it is not a regular file")
    if _FLAGS[mode] & os.O_TRUNC:
        try:
            os.ftruncate(descriptor, 0)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def open_file(file: Path, mode: str, **options: Any) -> IO[Any]:
    """Opens a file for writing, as `Path.open` does. Raises OSError, and ConfigError for a link."""
    if in_bucket(file):
        return file.open(mode, **options)
    descriptor = open_descriptor(file, mode.replace("b", ""))
    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    # The descriptor has been opened by the mode: `a` and `x` would be `w` for a descriptor.
    return os.fdopen(descriptor, mode.replace("x", "w"), **options)


def write_text(file: Path, text: str) -> None:
    """Writes a text file. Raises OSError, and ConfigError for a link."""

    def write() -> None:
        with open_file(file, "w") as opened:
            opened.write(text)

    attempt(write)


def copy_file(source: Path, target: Path) -> None:
    """Copies the content of a file. Raises OSError, and ConfigError where the target is a link."""

    def copy() -> None:
        with source.open("rb") as read, open_file(target, "wb") as written:
            shutil.copyfileobj(read, written)

    attempt(copy)


def write_atomically(file: Path, content: str | bytes) -> None:
    """Replaces a file as a whole: a crash leaves the old content or the new one.

    Where it fails for now, all of it is written again: after a failed fsync no page of the file is
    sure, and a file server may have renamed it and lost its answer. Raises OSError, and ConfigError
    where the file is a link.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if in_bucket(file):
        bucket_path(file).write_bytes(data)  # an object appears as a whole
        return
    attempt(functools.partial(_replace, file, data))


def _replace(file: Path, data: bytes) -> None:
    folder = os.open(file.parent, _FOLDER)
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        refuse_special(folder, file)
        try:
            with os.fdopen(_open_below(folder, part, "x"), "wb") as opened:
                opened.write(data)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(part.name, file.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                os.unlink(part.name, dir_fd=folder)
            raise
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(root: Path, *names: str) -> Path:
    """Makes the folder of `names` below `root`, and returns it; none of them may be a link.

    root: made with its parents where it is missing; it may be reached through links.
    Raises OSError and ConfigError.
    """
    attempt(lambda: root.mkdir(parents=True, exist_ok=True))
    return make_folder_below(root, *names)


def make_folder_below(root: Path, *names: str, descriptor: int | None = None) -> Path:
    """Makes the folder of `names` below `root` as `make_folder` does, and never `root` itself.

    descriptor: of `root`, where it is open already: the path may lead elsewhere by now. Raises
    OSError, also where `root` is gone, and ConfigError.
    """
    made = root.joinpath(*names)
    if in_bucket(root):
        made.mkdir(parents=True, exist_ok=True)
        return made
    attempt(functools.partial(_make_below, root, names, descriptor))
    return made


def _make_below(root: Path, names: Sequence[str], descriptor: int | None) -> None:
    folder = os.open(root, _FOLDER) if descriptor is None else os.dup(descriptor)
    below = root
    try:
        for name in names:
            below = below / name
            try:
                os.mkdir(name, dir_fd=folder)
            except FileExistsError:
                refuse_special(folder, below, folders=True)
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
    finally:
        os.close(folder)


def refuse_links(folder: Path, depth: int = 2) -> None:
    """Raises ConfigError for a link in a local folder that is to be written,
    before anything is written there.

    depth: levels that are looked at. A folder that is not there, or that may not be listed, has
    none. Raises OSError for one that cannot be listed for now.
    """
    if in_bucket(folder):
        return

    def scan() -> list[os.DirEntry[str]]:
        with os.scandir(folder) as listed:
            return sorted(listed, key=lambda entry: entry.name)

    try:
        entries = attempt(scan)
    except OSError as error:
        if may_pass(error):
            raise
        return  # whoever writes there meets the error, and explains it
    for entry in entries:
        if entry.is_symlink():
            raise _link_error(folder / entry.name, os.readlink(entry.path))
        if depth > 1 and entry.name not in _OTHERS and entry.is_dir(follow_symlinks=False):
            refuse_links(folder / entry.name, depth - 1)


def refuse_link(file: Path) -> None:
    """Raises ConfigError where a local file that is to be written is a link."""
    if not in_bucket(file) and file.is_symlink():
        raise _link_error(file, os.readlink(file))


def refuse_special(folder: int, file: Path, *, folders: bool = False) -> None:
    """Raises ConfigError where `file`, in the folder of a descriptor, is a link,
    or neither a file nor missing."""
    try:
        mode = os.stat(file.name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise _link_error(file, os.readlink(file.name, dir_fd=folder))
    if folders and not stat.S_ISDIR(mode):
        raise _refused(file, "it is not a folder")
    if not folders and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise _refused(file, "it is not a regular file")


def _link_error(file: Path, target: str) -> ConfigError:
    return _refused(
        file,
        f"it is a link to {target!r}, so that what is written would land there; nothing is written "
        "through links in a folder, which may come from someone else",
    )


def _refused(file: Path, truth: str) -> ConfigError:
    return ConfigError(f"writing {file}", truth, f"rm '{file}', or another folder")
