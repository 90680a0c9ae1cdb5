"""Sources of documents: files, Python's standard library, or a function from outside the package."""

import dataclasses
import glob
import gzip
import json
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from meshwright.errors import DataError
from meshwright.plugins import is_reference, load

_PLAIN = (".txt", ".py", ".md", ".rst", ".text")
_SUFFIXES = (*_PLAIN, ".jsonl", ".jsonl.gz", ".parquet")
_FIELD = "text"
_UNREADABLE = (OSError, EOFError, zlib.error, ValueError, LookupError, RuntimeError)
"""Errors of damaged files; those of pyarrow and of the decoders are subclasses."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One entry of `data.paths`, and its weight in the mixture."""

    path: str
    weight: float = 1.0


def parse_source(text: str) -> Source:
    """Parses `PATH` or `PATH=WEIGHT`. Raises DataError where the weight is not positive."""
    path, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return Source(text)
    try:
        value = float(weight)
    except ValueError:
        return Source(text)
    if not value > 0:
        raise DataError(f"--data {text}", f"the weight {weight} is not positive", f"{path}=1")
    return Source(path, value)


class Documents(Protocol):
    """Documents of one source. `read` may be called several times and yields the same documents each time."""

    def read(self) -> Iterator[str]:
        """Yields the documents."""
        ...

    def fingerprint(self) -> list[str]:
        """Lines of text that change when the documents do; token files are cached under their hash."""
        ...

    def __str__(self) -> str:
        """A short description for errors."""
        ...


def open_source(path: str) -> Documents:
    """Opens the source `path`: files, `stdlib`, or a function named `module:attribute` or `FILE.py:attribute`.

    Raises DataError where there is no readable file, ConfigError where the module or the attribute is missing.
    """
    if is_reference(path) and not Path(path).exists():
        from meshwright.data.function_source import FunctionDocuments  # most runs read files

        return FunctionDocuments(path, load("data source", path))
    return FileDocuments(tuple(find_files(path)))


@dataclasses.dataclass(frozen=True)
class FileDocuments:
    """Documents in files."""

    files: tuple[Path, ...]

    def read(self) -> Iterator[str]:
        """Yields the documents of all files."""
        return read_documents(list(self.files))

    def fingerprint(self) -> list[str]:
        """Returns path, size and modification time of every file."""
        statuses = [(file, file.stat()) for file in self.files]
        return [f"{file.resolve()} {status.st_size} {status.st_mtime_ns}" for file, status in statuses]

    def __str__(self) -> str:
        return f"{len(self.files)} file(s)"


def find_files(path: str) -> list[Path]:
    """Returns the files of a source, sorted. Raises DataError where no file of a known kind is found."""
    if path == "stdlib":
        return _stdlib()
    location = Path(path)
    if location.is_dir():
        files = [f for f in location.rglob("*") if f.is_file() and f.name.endswith(_SUFFIXES)]
    elif location.is_file():
        files = [location]
    else:
        files = [Path(f) for f in glob.glob(path, recursive=True) if Path(f).is_file()]
    if not files:
        reason = (
            "a folder without a file of a known kind" if location.is_dir() else "neither a file, a folder nor a glob"
        )
        raise DataError(f"--data {path}", f"it is {reason}", f"one of {', '.join(_SUFFIXES)}, or module:attribute")
    for file in files:
        if not file.name.endswith(_SUFFIXES):
            raise DataError(f"--data {path}", f"{file.name} is of no known kind", "one of " + ", ".join(_SUFFIXES))
    return sorted(files)


def _stdlib() -> list[Path]:
    """Returns the modules of Python's standard library, without the packages' tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    folders = (root, *(root / name for name in ("asyncio", "concurrent/futures", "collections", "email", "http",
               "importlib", "json", "logging", "multiprocessing", "unittest", "urllib", "xml/etree")))  # fmt: skip
    return sorted(f for folder in folders for f in folder.glob("*.py") if f.stat().st_size > 0)


def read_documents(files: list[Path]) -> Iterator[str]:
    """Yields the documents of `files`, which are shuffled once so that the held-out tail is a sample of all of them.

    The order depends on the list alone. Raises DataError where a file cannot be read.
    """
    for i in np.random.default_rng(0).permutation(len(files)):
        try:
            yield from _read(files[i])
        except _UNREADABLE as error:
            raise DataError(f"reading {files[i]}", f"{type(error).__name__}: {error}", "repair or remove it") from error


def _read(file: Path) -> Iterator[str]:
    if file.name.endswith(".parquet"):
        yield from _read_parquet(file)
    elif file.name.endswith((".jsonl", ".jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _field(json.loads(line), number)
    else:
        text = file.read_text(encoding="utf-8")
        if text:
            yield text


def _read_parquet(file: Path) -> Iterator[str]:
    import pyarrow.parquet  # 0.2 s of import that other files do not need

    table = pyarrow.parquet.ParquetFile(file)
    if _FIELD not in table.schema_arrow.names:
        raise ValueError(f"no column {_FIELD!r} among {', '.join(table.schema_arrow.names)}")
    for batch in table.iter_batches(columns=[_FIELD]):
        yield from (text for text in batch.column(0).to_pylist() if text)


def _field(record: object, number: int) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(_FIELD), str):
        raise ValueError(f"line {number} has no string field {_FIELD!r}")
    return str(record[_FIELD])
