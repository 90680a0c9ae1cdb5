"""Files and folders that are deleted or renamed: below the descriptor
of their folder, without following links.

As `writing` has it for what is written: a folder may come from a stranger, with a link where the
package expects a folder of its own. Deleting `checkpoints/4` where `checkpoints` is a link would
delete in another place. A link at the name itself is deleted, never what it leads to.

`below` is the folder that the user named, or that this process has made. It may be reached through
links, and nothing between it and the name may be one.
"""

import contextlib
import functools
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from meshwright.storage.attempts import attempt
from meshwright.storage.paths import bucket_path, in_bucket
from meshwright.storage.writing import refuse_special

_FOLDER = os.O_RDONLY | os.O_DIRECTORY


@contextlib.contextmanager
def _parent_of(path: Path, below: Path) -> Iterator[int]:
    """Opens the folder of a path, and yields its descriptor.
    Raises OSError, and ConfigError for a link on the way."""
    folder, reached = os.open(below, _FOLDER), below
    try:
        for name in path.parent.relative_to(below).parts:
            reached = reached / name
            refuse_special(folder, reached, folders=True)
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def remove_file(file: Path, *, below: Path, missing_ok: bool = False) -> None:
    """Deletes a file or an object.
    Raises OSError, and ConfigError for a link between `below` and the file."""
    if in_bucket(file):
        bucket_path(file).unlink(missing_ok=missing_ok)
        return
    try:
        attempt(functools.partial(_unlink, file, below))
    except FileNotFoundError:
        if not missing_ok:
            raise


def _unlink(file: Path, below: Path) -> None:
    with _parent_of(file, below) as folder:
        os.unlink(file.name, dir_fd=folder)


def remove_empty_folder(folder: Path, *, below: Path) -> None:
    """Deletes an empty folder. Raises OSError,
    and ConfigError for a link between `below` and the folder."""
    with _parent_of(folder, below) as parent:
        os.rmdir(folder.name, dir_fd=parent)


def remove_tree(folder: Path, *, below: Path, ignore_errors: bool = False) -> None:
    """Deletes a folder and all in it, if it is there.

    ignore_errors: what the system refuses to delete stays. Raises OSError otherwise, and
    ConfigError for a link between `below` and the folder.
    """
    if in_bucket(folder):
        bucket_path(folder).remove_tree()
        return
    try:
        with _parent_of(folder, below) as parent:
            mode = os.stat(folder.name, dir_fd=parent, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                shutil.rmtree(folder.name, ignore_errors=ignore_errors, dir_fd=parent)
            else:
                os.unlink(folder.name, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError:
        if not ignore_errors:
            raise


def rename(source: Path, target: Path, *, below: Path) -> None:
    """Renames a file or folder; replaces a file that has the name, or an empty folder.
    Raises OSError and ConfigError.

    below: folder of both.
    """
    failed_before = False

    def call() -> None:
        nonlocal failed_before
        try:
            with _parent_of(source, below) as before, _parent_of(target, below) as after:
                os.replace(source.name, target.name, src_dir_fd=before, dst_dir_fd=after)
        except FileNotFoundError:
            # A file server may have renamed it and lost its answer.
            if not (failed_before and target.exists() and not source.exists()):
                raise
        except OSError:
            failed_before = True
            raise

    attempt(call)


def replace_durably(source: Path, target: Path, *, below: Path) -> None:
    """Renames a file or folder as `rename` does, and waits until the disk has its new name."""
    rename(source, target, below=below)
    attempt(functools.partial(_sync_folder_of, target, below))


def _sync_folder_of(target: Path, below: Path) -> None:
    with _parent_of(target, below) as folder:
        os.fsync(folder)
