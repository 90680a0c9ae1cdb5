"""Tables in columns: Parquet."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from meshwright.data.sources import Place, Records
from meshwright.errors import DataError, by_class, reason_of
from meshwright.formatting import format_bytes

_ROWS = 1024
"""Rows that are decoded at a time."""
_BUFFER = 2**20
"""Bytes of the file that are read at a time."""
_DECODED = 256 * 2**20
"""Decoded bytes of a column in a row group below which they are not compared with the stored ones.
"""
_RATIO = 64
"""Largest ratio of decoded to stored bytes above that: text compresses 3 to 10 times, logs up to
50."""
_SHOWN = 24
"""Columns that an error lists."""


def zstd_stream(raw: IO[bytes]) -> Any:
    """Returns the contents of an open file that zstd compressed."""
    return pyarrow.CompressedInputStream(raw, "zstd")


def read_columns(file: Path, raw: IO[bytes], records: Records, field: str) -> Iterator[str]:
    """Yields the texts of a Parquet file's column from row `records.number` on.

    Raises DataError where there is no such column, or it has no text, or it decodes to far more
    bytes than it has.

    Pages are read one after another. A value that many rows share is in memory once, as in the
    file: repeated values stay in their dictionary, and each row is a Python text only while it is
    yielded.
    """
    metadata = pyarrow.parquet.read_metadata(raw)
    path = _column(file, metadata.schema.to_arrow_schema(), field)
    name = ".".join(path)
    raw.seek(0)
    table = pyarrow.parquet.ParquetFile(
        raw, metadata=metadata, read_dictionary=[name], pre_buffer=False, buffer_size=_BUFFER
    )
    size = os.fstat(raw.fileno()).st_size
    rows = max(1, metadata.num_rows)
    first = 0
    records.bytes_here = lambda: size * records.number / rows
    for group in range(table.num_row_groups):
        at, first = first, first + table.metadata.row_group(group).num_rows
        if first <= records.number:
            continue
        _check_decoded(file, metadata.row_group(group), group, name)
        for batch in table.iter_batches(_ROWS, row_groups=[group], columns=[name]):
            column = _column_of(batch, path)
            skip = max(0, records.number - at)
            for number, value in enumerate(_values(column.slice(skip)), at + skip + 1):
                records.number = number
                place = Place(file, "row", number)
                if value is None:
                    records.skip(place, f"no text: its {field!r} is null")
                elif not isinstance(value, str):
                    records.skip(place, "not UTF-8")
                elif text := records.text(value, place):
                    yield text
            at += batch.num_rows


def _check_decoded(file: Path, group: Any, number: int, name: str) -> None:
    """Raises DataError for a column that decodes to far more bytes than are stored.

    The limit is the larger of `_DECODED` bytes and `_RATIO` times the stored ones.
    Its pages are decompressed as a whole, and no text compresses so far: the file is damaged, or
    made to fill memory.
    """
    chunks = (group.column(i) for i in range(group.num_columns))
    for chunk in chunks:
        if chunk.path_in_schema != name:
            continue
        decoded, stored = chunk.total_uncompressed_size, chunk.total_compressed_size
        if decoded > max(_DECODED, _RATIO * stored):
            raise DataError(
                f"reading {file}",
                f"row group {number} has {format_bytes(stored)} of {name!r} that decode to "
                f"{format_bytes(decoded)}, "
                f"{decoded // max(stored, 1):,} times as many, in {group.num_rows:,} rows; text "
                f"takes at most {_RATIO} "
                f"times as many, and a page is decoded as a whole",
                "remove it, or write it as .jsonl.zst, which is read line by line",
            )


def _column(file: Path, schema: Any, field: str) -> tuple[str, ...]:
    """Returns the names that lead to the column of text.

    Raises DataError where there is none, or it is not text.
    """
    if schema.names.count(field) > 1:
        truth = f"{schema.names.count(field)} of its columns are named {field!r}"
        raise DataError(f"reading {file}", truth, "give each a name of its own")
    path: tuple[str, ...] = (field,)
    parts = field.split(".")
    if field not in schema.names and len(parts) > 1 and parts[0] in schema.names:
        path = tuple(parts)
    kind: Any = schema.field(path[0]).type if path[0] in schema.names else None
    for name in path[1:]:
        found = pyarrow.types.is_struct(kind) and kind.get_field_index(name) >= 0
        kind = kind.field(name).type if found else None
    known = [f"{column.name} ({column.type})" for column in itertools.islice(schema, _SHOWN)]
    texts = [column.name for column in schema if _is_text(column.type)]
    fix = f"--data.text-field {texts[0] if texts else 'NAME.NAME, of a text inside a struct'}"
    if kind is None:
        raise DataError(f"reading {file}", f"no column {field!r} among {', '.join(known)}", fix)
    if not _is_text(kind):
        others = f"; it has {', '.join(known)}" if len(known) > 1 else ""
        raise DataError(
            f"reading {file}", f"its column {field!r} is of type {kind}, and no text{others}", fix
        )
    return path


def _is_text(kind: Any) -> bool:
    types = pyarrow.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _column_of(batch: Any, path: tuple[str, ...]) -> Any:
    """Returns the column of text of a batch; null where what contains it is null."""
    column = batch.column(batch.schema.get_field_index(path[0]))
    for name in path[1:]:
        column = pyarrow.compute.struct_field(column, name)
    return column


def _values(column: Any) -> Iterator[str | bytes | None]:
    """Yields the values of a column of text, one in memory at a time.

    Those that are not UTF-8 are bytes.
    """
    for scalar in column:
        value = scalar.value if isinstance(scalar, pyarrow.DictionaryScalar) else scalar
        try:
            yield None if value is None else value.as_py()
        except UnicodeDecodeError:
            yield value.as_buffer().to_pybytes()


def read_rows(file: Path, raw: IO[bytes]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields the place and the fields of every row of a Parquet file.

    A struct has every field of its column: what is null in it is absent, except a message's
    content. Raises DataError where the file is damaged.
    """
    try:
        table = pyarrow.parquet.ParquetFile(raw)
        number = 0
        for batch in table.iter_batches(_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield Place(file, "row", number), _without_nulls(row)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        refusal = DataError(
            f"reading {file}", f"{type(error).__name__}: {reason_of(error)}", "repair or remove it"
        )
        raise by_class(error, refusal) from error


def _without_nulls(value: Any) -> Any:
    """Returns nested values without the fields that are null, except `content`."""
    if isinstance(value, dict):
        return {
            name: _without_nulls(item)
            for name, item in value.items()
            if item is not None or name == "content"
        }
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
