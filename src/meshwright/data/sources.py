"""Documents out of files."""

import dataclasses
import glob
import gzip
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from meshwright.errors import DataError

_PLAIN = (".txt", ".py", ".md", ".rst", ".text")
_SUFFIXES = (*_PLAIN, ".jsonl", ".jsonl.gz", ".parquet")
_FIELD = "text"


@dataclasses.dataclass(frozen=True)
class Source:
    """Files that are read as one, and how often they are drawn in a mixture."""

    path: str
    weight: float = 1.0


def parse_source(text: str) -> Source:
    """`PATH` or `PATH=WEIGHT`. Raises DataError where the weight is not positive."""
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


def find_files(path: str) -> list[Path]:
    """The files of a source, sorted. Raises DataError where there is none that can be read."""
    if path == "stdlib":
        return _stdlib()
    here = Path(path)
    if here.is_dir():
        found = [f for f in here.rglob("*") if f.is_file() and f.name.endswith(_SUFFIXES)]
    elif here.is_file():
        found = [here]
    else:
        found = [Path(f) for f in glob.glob(path, recursive=True) if Path(f).is_file()]
    if not found:
        what = "a folder without a file of a known kind" if here.is_dir() else "neither a file, a folder nor a glob"
        raise DataError(f"--data {path}", f"it is {what}", "one of " + ", ".join(_SUFFIXES))
    for file in found:
        if not file.name.endswith(_SUFFIXES):
            raise DataError(f"--data {path}", f"{file.name} is of no known kind", "one of " + ", ".join(_SUFFIXES))
    return sorted(found)


def _stdlib() -> list[Path]:
    """Modules of Python's standard library that people read: packages' tests and generated tables left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    folders = (root, *(root / name for name in ("asyncio", "concurrent/futures", "collections", "email", "http",
               "importlib", "json", "logging", "multiprocessing", "unittest", "urllib", "xml/etree")))  # fmt: skip
    return sorted(f for folder in folders for f in folder.glob("*.py") if f.stat().st_size > 0)


def read_documents(files: list[Path]) -> Iterator[str]:
    """Documents in an order that depends on nothing but the list: shuffled once, so a held-out tail is no
    alphabetical corner."""
    for i in np.random.default_rng(0).permutation(len(files)):
        try:
            yield from _read(files[i])
        except (OSError, UnicodeDecodeError, EOFError, ValueError, pa.ArrowException) as error:
            raise DataError(f"reading {files[i]}", f"{type(error).__name__}: {error}", "repair or remove it") from error


def _read(file: Path) -> Iterator[str]:
    if file.name.endswith(".parquet"):
        table = pyarrow.parquet.ParquetFile(file)
        if _FIELD not in table.schema_arrow.names:
            raise ValueError(f"no column {_FIELD!r} among {', '.join(table.schema_arrow.names)}")
        for batch in table.iter_batches(columns=[_FIELD]):
            yield from (text for text in batch.column(0).to_pylist() if text)
    elif file.name.endswith((".jsonl", ".jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _field(json.loads(line), number)
    else:
        text = file.read_text(encoding="utf-8")
        if text:
            yield text


def _field(record: object, number: int) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(_FIELD), str):
        raise ValueError(f"line {number} has no string field {_FIELD!r}")
    return str(record[_FIELD])
