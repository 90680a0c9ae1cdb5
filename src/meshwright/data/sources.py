"""Sources of documents: files, standard input, Python's standard library, or a function from outside the package."""

import dataclasses
import glob
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from meshwright.data.opening import KINDS, SUFFIXES, UNREADABLE
from meshwright.data.readers import read_file, read_json_texts
from meshwright.data.records import Records
from meshwright.errors import DataError
from meshwright.plugins import is_reference, load

STDIN = "-"
"""Source that is read from standard input, once."""


class Documents(Protocol):
    """Documents of one source. `read` may be called several times and yields the same documents each time."""

    def read(self, records: Records) -> Iterator[str]:
        """Yields the documents that are not empty from the position of `records` on, and counts what it reads there."""
        ...

    def fingerprint(self) -> list[str]:
        """Lines of text that change when the documents do; token files are cached under their hash."""
        ...

    def size(self) -> tuple[int, int]:
        """Returns the number of files and their bytes; 0 where they are not known."""
        ...

    def __str__(self) -> str:
        """A short description for errors."""
        ...


def open_source(path: str, field: str = "text") -> Documents:
    """Opens the source `path`: files, `-`, `stdlib`, or a function named `module:attribute` or `FILE.py:attribute`.

    field: name of the field or column with the text. Raises DataError where there is no readable file, ConfigError
    where the module or the attribute is missing.
    """
    if path == STDIN:
        return StandardInput(field)
    if path.startswith("hf://"):
        from meshwright.data.hub import download_dataset  # most runs read files

        return FileDocuments(tuple(download_dataset(path)), field)
    if is_reference(path) and not os.path.exists(path):
        from meshwright.data.function_source import FunctionDocuments  # most runs read files

        return FunctionDocuments(path, load("data source", path))
    return FileDocuments(tuple(find_files(path)), field)


@dataclasses.dataclass(frozen=True)
class FileDocuments:
    """Documents in files."""

    files: tuple[Path, ...]
    field: str = "text"

    def read(self, records: Records) -> Iterator[str]:
        """Yields the documents of all files."""
        return read_documents(self.files, records, self.field)

    def fingerprint(self) -> list[str]:
        """Returns path, size and modification time of every file. Raises DataError for what is no regular file."""
        folders: dict[str, str] = {}  # most files share one: resolving each takes 20 times as long
        lines = []
        for file in map(os.fspath, self.files):
            folder, name = os.path.split(file)
            try:
                status = os.stat(file)
            except OSError as error:
                raise DataError(f"reading {file}", error.strerror or str(error), "repair or remove it") from error
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"reading {file}", "it is no regular file", "leave it out")
            home = folders.get(folder) or folders.setdefault(folder, os.path.realpath(folder))
            lines.append(f"{home}/{name} {status.st_size} {status.st_mtime_ns}")
        return lines if self.field == "text" else [*lines, f"field {self.field}"]

    def size(self) -> tuple[int, int]:
        """Returns the number of files and their bytes."""
        return len(self.files), sum(os.path.getsize(file) for file in self.files)

    def __str__(self) -> str:
        return f"{len(self.files)} file(s)"


@dataclasses.dataclass(frozen=True)
class StandardInput:
    """Lines of JSON from standard input, which is read once."""

    field: str

    def read(self, records: Records) -> Iterator[str]:
        """Yields the text of each line."""
        try:
            yield from read_json_texts("standard input", sys.stdin.buffer, records, self.field)
        except UNREADABLE as error:
            raise DataError(f"--data {STDIN}", f"{type(error).__name__}: {error}", "lines of JSON") from error
        records.check()

    def fingerprint(self) -> list[str]:
        """Returns the field. Nothing else is known before it is read."""
        return [STDIN, self.field]

    def size(self) -> tuple[int, int]:
        """Returns zeros."""
        return 0, 0

    def __str__(self) -> str:
        return "standard input"


def find_files(path: str) -> list[Path]:
    """Returns the files of a source, sorted. Raises DataError where no file of a known kind is found."""
    if path == "stdlib":
        return _stdlib()
    location = Path(path)
    if not path:
        raise DataError("--data ''", "it is no name", f"one of {KINDS}")
    if os.path.isdir(path):  # false for names that no file can have
        if (location / "dataset_dict.json").is_file() or (location / "state.json").is_file():
            from meshwright.data.saved_dataset import saved_files  # few folders are datasets

            if saved := saved_files(location):
                return saved
        found = sorted(_walk(path), key=lambda file: file.split(os.sep))
        files = _once([file for file in found if file.lower().endswith(SUFFIXES)])
        if files:
            return files
    elif os.path.exists(path):
        files = [location]
    else:
        files = _once([file for file in sorted(glob.glob(path, recursive=True)) if not os.path.isdir(file)])
    if not files:
        reason = (
            "a folder without a file of a known kind" if os.path.isdir(path) else "neither a file, a folder nor a glob"
        )
        raise DataError(f"--data {path}", f"it is {reason}", f"one of {KINDS}")
    for file in files:
        if not file.name.lower().endswith(SUFFIXES):
            raise DataError(f"--data {path}", f"{file.name} is of no known kind", f"one of {KINDS}")
    return sorted(files)


def _once(found: Sequence[str]) -> list[Path]:
    """Returns files without links to others of them, and of several links to one file the first."""
    links = {file for file in found if os.path.islink(file)}
    seen = {os.path.realpath(file) for file in found if file not in links} if links else set()
    files = []
    for file in found:
        real = os.path.realpath(file) if file in links else None
        if real is None or real not in seen:
            files.append(Path(file))
        if real is not None:
            seen.add(real)
    return files


def _walk(path: str) -> Iterator[str]:
    """Yields all files in a folder. Raises DataError where one inside cannot be listed.

    Linked folders are read too, each folder once: a link to a folder above ends there.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"reading {error.filename}", f"{error.strerror}", "make it readable, or move it out") from error

    seen = {os.path.realpath(path)}
    for folder, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        inside = sorted((os.path.islink(os.path.join(folder, name)), name) for name in folders)
        folders.clear()
        for _, name in inside:
            real = os.path.realpath(os.path.join(folder, name))
            if real not in seen:
                seen.add(real)
                folders.append(name)
        for name in names:
            yield os.path.join(folder, name)


def _stdlib() -> list[Path]:
    """Returns the modules of Python's standard library, without the packages' tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    folders = (root, *(root / name for name in ("asyncio", "concurrent/futures", "collections", "email", "http",
               "importlib", "json", "logging", "multiprocessing", "unittest", "urllib", "xml/etree")))  # fmt: skip
    return sorted(f for folder in folders for f in folder.glob("*.py") if f.stat().st_size > 0)


def read_documents(files: Sequence[Path], records: Records, field: str = "text") -> Iterator[str]:
    """Yields the documents of `files`, which are shuffled once so that the held-out tail is a sample of all of them.

    The order depends on the list alone. Begins at the position of `records`. Raises DataError where a file cannot be
    read, or too many records are bad.
    """
    order = np.random.default_rng(0).permutation(len(files))
    records.bytes_before = sum(os.path.getsize(files[i]) for i in order[: records.file])
    for i in order[records.file :]:
        try:
            yield from read_file(files[i], records, field)
        except UNREADABLE as error:
            raise DataError(f"reading {files[i]}", f"{type(error).__name__}: {error}", "repair or remove it") from error
        records.file, records.number = records.file + 1, 0
    records.check()
