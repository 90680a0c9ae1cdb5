"""Sources of documents: files, Python's standard library, or a function from outside the package."""

import dataclasses
import glob
import gzip
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from meshwright.data.records import LARGEST, Records, place
from meshwright.documents import parse_json
from meshwright.errors import DataError
from meshwright.plugins import is_reference, load

_PLAIN = (".txt", ".py", ".md", ".rst", ".text")
_SUFFIXES = (*_PLAIN, ".jsonl", ".jsonl.gz", ".parquet")
_FIELD = "text"
_UNREADABLE = (OSError, EOFError, zlib.error, ValueError, LookupError, RuntimeError, MemoryError)
"""Errors of damaged files; those of pyarrow and of the decoders are subclasses."""


class Documents(Protocol):
    """Documents of one source. `read` may be called several times and yields the same documents each time."""

    def read(self, records: Records) -> Iterator[str]:
        """Yields the documents that are not empty, and counts what it reads in `records`."""
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

    def read(self, records: Records) -> Iterator[str]:
        """Yields the documents of all files."""
        return read_documents(self.files, records)

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
        return lines

    def __str__(self) -> str:
        return f"{len(self.files)} file(s)"


def find_files(path: str) -> list[Path]:
    """Returns the files of a source, sorted. Raises DataError where no file of a known kind is found."""
    if path == "stdlib":
        return _stdlib()
    location = Path(path)
    if location.is_dir():
        found = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        files = [Path(file) for file in sorted(found, key=lambda f: f.split(os.sep)) if file.endswith(_SUFFIXES)]
        if files:
            return files
    elif location.exists():
        files = [location]
    else:
        files = [Path(f) for f in glob.glob(path, recursive=True) if not Path(f).is_dir()]
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


def read_documents(files: Sequence[Path], records: Records) -> Iterator[str]:
    """Yields the documents of `files`, which are shuffled once so that the held-out tail is a sample of all of them.

    The order depends on the list alone. Raises DataError where a file cannot be read, or too many records are bad.
    """
    for i in np.random.default_rng(0).permutation(len(files)):
        try:
            yield from _read(files[i], records)
        except _UNREADABLE as error:
            raise DataError(f"reading {files[i]}", f"{type(error).__name__}: {error}", "repair or remove it") from error
    records.check()


def _read(file: Path, records: Records) -> Iterator[str]:
    if file.name.endswith(".parquet"):
        yield from _read_parquet(file, records)
        return
    # A pipe without a writer would never open.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError("it is no regular file")
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            lines = gzip.GzipFile(fileobj=opened) if file.suffix == ".gz" else opened
            yield from _read_lines(file, lines, records)  # type: ignore[arg-type]
            return
        content = opened.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it is one document of more than {LARGEST:,} bytes; split it, or write it as .jsonl")
    text = _decoded(content, str(file), records)
    if text is not None and (text := records.text(text, str(file))):
        yield text


def _decoded(content: bytes, where: str, records: Records) -> str | None:
    """Returns the text of UTF-8 bytes; None, and a bad record, where they are none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start)
        place_in = "" if ", line " in where else f" on line {line + 1}"
        wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        reason = "it is UTF-16" if wide else f"byte {error.start + 1} (0x{content[error.start]:02x}){place_in}"
        records.skip(where, f"not UTF-8: {reason}")
        return None


def _read_lines(file: Path, lines: IO[bytes], records: Records) -> Iterator[str]:
    """Yields the text of each line of JSON."""
    number = 0
    while line := lines.readline(LARGEST + 1):
        number += 1
        where = place(file, number)
        if len(line) > LARGEST:
            raise ValueError(f"line {number} has more than {LARGEST:,} bytes")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        decoded = _decoded(line, where, records) if line.strip() else None
        if decoded is None:
            continue
        try:
            record = parse_json(decoded.rstrip("\r\n"))
        except ValueError as error:
            at = f" at column {error.colno}" if hasattr(error, "colno") else ""
            records.skip(where, f"not JSON: {str(getattr(error, 'msg', error)).removesuffix(' at')}{at}")
            continue
        value = record.get(_FIELD) if isinstance(record, dict) else None
        if not isinstance(value, str):
            found = f"its {_FIELD!r} is {_kind(value)}" if isinstance(record, dict) and _FIELD in record else (
                f"it has no field {_FIELD!r}" if isinstance(record, dict) else f"it is {_kind(record)}, and no object"
            )  # fmt: skip
            records.skip(where, f"no text: {found}")
        elif text := records.text(value, where):
            yield text


def _kind(value: object) -> str:
    """Names the JSON type of a value."""
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    return kinds.get(type(value), "null")


def _read_parquet(file: Path, records: Records) -> Iterator[str]:
    import pyarrow  # 0.2 s of import that other files do not need
    import pyarrow.parquet

    if not file.is_file():
        raise ValueError("it is no regular file")
    table = pyarrow.parquet.ParquetFile(file)
    if _FIELD not in table.schema_arrow.names:
        raise ValueError(f"no column {_FIELD!r} among {', '.join(table.schema_arrow.names)}")
    kind = table.schema_arrow.field(_FIELD).type
    stored = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not (pyarrow.types.is_string(stored) or pyarrow.types.is_large_string(stored)):
        raise ValueError(f"its column {_FIELD!r} is of type {kind}, and no text")
    row = 0
    for batch in table.iter_batches(batch_size=1024, columns=[_FIELD]):
        for value in _values(batch.column(0)):
            row += 1
            where = f"{file}, row {row}"
            if not isinstance(value, str):
                records.skip(where, f"no text: its {_FIELD!r} is null" if value is None else "not UTF-8")
            elif text := records.text(value, where):
                yield text


def _values(column: Any) -> list[str | bytes | None]:
    """Returns the values of a column of text; those that are not UTF-8 as bytes."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast("large_binary").to_pylist()
        return [_text_or_bytes(value) for value in values]


def _text_or_bytes(value: bytes | None) -> str | bytes | None:
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return value
