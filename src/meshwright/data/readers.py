"""Readers of documents: files of plain text and lines of JSON, and functions.

Bad records are counted with their places, and refused where more of them are bad than may be
skipped.
"""

import gzip
import io
import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from meshwright.data.sources import (
    COLUMNS,
    LINES,
    Documents,
    FileDocuments,
    FunctionDocuments,
    Place,
    Records,
    kind_of,
)
from meshwright.documents import (
    ForeignFileError,
    RepeatedNameError,
    open_bytes,
    parse_json,
    unique_object,
)
from meshwright.errors import DataError, by_class, describe_failure, reason_of
from meshwright.hardware.agreement import note_progress

LARGEST = 2**30
"""Largest record in bytes: a line, or a text file."""
_SHOWN = 12
"""Fields or columns that an error lists."""
_WIDE = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_UNMARKED = {
    b"\1\0\0\0": "UTF-32LE",
    b"\0\0\0\1": "UTF-32BE",
    b"\1\0\1\0": "UTF-16LE",
    b"\0\1\0\1": "UTF-16BE",
}
"""Which of the first four bytes are not zero, where the text begins with ASCII letters (RFC 4627,
section 3)."""
_PACKED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
_UNREADABLE = (OSError, EOFError, zlib.error, ValueError, LookupError, RuntimeError, MemoryError)
"""Errors of damaged files; those of pyarrow and of the decoders are subclasses."""
_MISSING = object()


def read_documents(source: Documents, records: Records) -> Iterator[str]:
    """Yields the documents of a source that are not empty, from the position of `records` on.

    Raises DataError where it cannot be read, or too many records are bad.
    """
    texts = (
        _read_files(source, records)
        if isinstance(source, FileDocuments)
        else _call(source, records)
    )
    for text in texts:
        note_progress()
        yield text
    records.check()


def _read_files(source: FileDocuments, records: Records) -> Iterator[str]:
    """Yields the documents of all files, in a shuffled order.

    So the held-out tail is a sample of all files.
    The order depends only on the list.
    """
    order = np.random.default_rng(0).permutation(len(source.files))
    records.bytes_before = sum(os.path.getsize(source.files[i]) for i in order[: records.file])
    for file in (source.files[i] for i in order[records.file :]):
        try:
            with open_bytes(file) as raw:
                size, records.bytes_here = os.fstat(raw.fileno()).st_size, raw.tell
                if kind_of(file.name)[0] == COLUMNS:
                    from meshwright.data.columns import read_columns

                    yield from read_columns(file, raw, records, source.field)
                else:
                    yield from _read_texts(file, raw, records, source.field)
                records.bytes_before, records.bytes_here = records.bytes_before + size, float
        except ForeignFileError as error:
            raise DataError(f"reading {file}", str(error), error.fix) from error
        except _UNREADABLE as error:
            raise by_class(
                error,
                DataError(
                    f"reading {file}",
                    f"{type(error).__name__}: {reason_of(error)}",
                    "repair or remove it",
                ),
            ) from error
        records.file, records.number = records.file + 1, 0


def _call(source: FunctionDocuments, records: Records) -> Iterator[str]:
    number = 0
    skip = records.number
    asked = f"--data {source.name}"
    try:
        for number, text in enumerate(source.function(), 1):
            if number <= skip:
                continue
            records.number = number
            if not isinstance(text, str):
                raise DataError(
                    asked,
                    f"its document {number} is of type {type(text).__name__}",
                    "yield strings",
                )
            if document := records.text(text, Place(source.name, "document", number)):
                yield document
    except DataError:
        raise
    except Exception as error:
        truth = f"after {number} document(s) it {describe_failure(error)}"
        raise by_class(error, DataError(asked, truth, "correct the function")) from error


def decompressed(raw: IO[bytes], compression: str) -> IO[bytes]:
    """Returns the contents of an open file, decompressed as they are read."""
    if not compression:
        return raw
    if raw.seekable() and not raw.read(1):
        raise EOFError("it is empty, which no compressed file is")
    raw.seek(0)
    if compression == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    from meshwright.data.columns import zstd_stream

    return io.BufferedReader(zstd_stream(raw), 2**18)


def _read_texts(file: Path, raw: IO[bytes], records: Records, field: str) -> Iterator[str]:
    """Yields the documents of an open file that is not a table, from record `records.number` on."""
    kind, compression = kind_of(file.name)
    stream = decompressed(raw, compression)
    if kind in LINES:
        yield from read_json_texts(file, stream, records, field)
    elif not records.number:
        content = stream.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(
                f"it is one document of more than {LARGEST:,} bytes; split it, or write it as "
                f".jsonl"
            )
        records.number, place = 1, Place(file)
        text = _decoded(content, place, records)
        if text is not None and (text := records.text(text, place)):
            yield text


def _decoded(content: bytes, place: Place, records: Records) -> str | None:
    """Returns the text of UTF-8 bytes; for others None, after counting a bad record."""
    foreign = None if place.unit else _foreign(content, place.file)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        on_line = "" if place.unit else f" on line {content.count(b'\n', 0, error.start) + 1}"
        reason, fix = foreign or (
            f"byte {error.start + 1} (0x{content[error.start]:02x}){on_line}",
            "repair it",
        )
    else:
        if foreign is None or b"\0" not in content[:4]:
            return text
        reason, fix = foreign
    records.skip(place, f"not UTF-8: {reason}", fix)
    return None


def _foreign(content: bytes, file: Path | str) -> tuple[str, str] | None:
    """Returns the encoding or compression of bytes that are not UTF-8, and the fix.

    UTF-16 and UTF-32 are recognized with and without a byte-order mark.
    """
    unmarked = _UNMARKED.get(bytes(byte != 0 for byte in content[:4]))
    if wide := next((name for mark, name in _WIDE.items() if content.startswith(mark)), unmarked):
        return f"it is {wide}", f"iconv -f {wide} -t UTF-8 {file} > CONVERTED"
    if packed := next((name for mark, name in _PACKED.items() if content.startswith(mark)), None):
        return f"it is {packed}", f"the end {packed} of its name"
    return None


def _lines(stream: IO[bytes], file: Path | str, records: Records) -> Iterator[bytes]:
    """Yields the lines after the first `records.number`, and counts them.

    The first has no byte-order mark.
    Lines end with a line feed only: other line ends of Unicode may be in a text.
    """
    skip, records.number = records.number, 0
    while line := stream.readline(LARGEST + 1):
        records.number += 1
        if len(line) > LARGEST:
            raise ValueError(f"line {records.number} has more than {LARGEST:,} bytes")
        if records.number == 1:
            if foreign := _foreign(line, file):
                raise DataError(f"reading {file}", f"not UTF-8: {foreign[0]}", foreign[1])
            line = line.removeprefix(b"\xef\xbb\xbf")
        if records.number > skip:
            yield line


def read_json_lines(
    file: Path | str, stream: IO[bytes], records: Records, field: str | None = None
) -> Iterator[tuple[Place, Any]]:
    """Yields the place and the value of each line of JSON that is not blank.

    field: a line is bad if an object in it has one of this field's names twice (None: any name);
    JSON parsers would take the last.
    """
    names = None if field is None else {field, *field.split(".")}
    for line in _lines(stream, file, records):
        place = Place(file, "line", records.number)
        decoded = _decoded(line, place, records) if line.strip() else None
        if decoded is None:
            continue
        try:
            yield (
                place,
                parse_json(decoded.rstrip("\r\n"), lambda pairs: unique_object(pairs, names)),
            )
        except RepeatedNameError as error:
            records.skip(place, f"an object in it has the field {error.name!r} twice")
        except ValueError as error:
            at = f" at column {error.colno}" if hasattr(error, "colno") else ""
            records.skip(
                place, f"not JSON: {str(getattr(error, 'msg', error)).removesuffix(' at')}{at}"
            )


def read_json_texts(
    file: Path | str, stream: IO[bytes], records: Records, field: str
) -> Iterator[str]:
    """Yields the text of each line of JSON."""
    for place, record in read_json_lines(file, stream, records, field):
        value = _find_field(record, field)
        if isinstance(value, str):
            if text := records.text(value, place):
                yield text
        elif value is not _MISSING:
            records.skip(place, f"no text: its {field!r} is {kind_of_value(value)}")
        elif isinstance(record, dict):
            known = [
                f"{name!r} ({kind_of_value(item)})"
                for name, item in itertools.islice(record.items(), _SHOWN)
            ]
            has = f"; it has {', '.join(known)}" if known else ""
            records.skip(
                place, f"no text: it has no field {field!r}{has}", "--data.text-field NAME"
            )
        else:
            records.skip(place, f"no text: it is {kind_of_value(record)}, and no object")


def _find_field(record: Any, field: str) -> Any:
    """Returns a field by its own name, or by the names of nested ones with dots between."""
    if isinstance(record, dict) and field in record:
        return record[field]
    if "." not in field:
        return _MISSING
    for name in field.split("."):
        if not isinstance(record, dict) or name not in record:
            return _MISSING
        record = record[name]
    return record


def kind_of_value(value: object) -> str:
    """Names the JSON type of a value."""
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        str: "text",
    }
    return kinds.get(type(value), "null")
