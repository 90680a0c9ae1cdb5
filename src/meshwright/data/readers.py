"""Readers of one file of text: plain, lines of JSON, delimited columns; each names the place of a bad record."""

import csv
import itertools
import os
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from meshwright.data.opening import COLUMNS, DELIMITED, LINES, decompressed, kind_of, open_bytes
from meshwright.data.records import LARGEST, Place, Records, place_of
from meshwright.data.unique_names import RepeatedNameError, unique_object
from meshwright.documents import parse_json
from meshwright.errors import DataError

_SHOWN = 12
"""Fields or columns that an error lists."""
_WIDE = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_UNMARKED = {b"\1\0\0\0": "UTF-32LE", b"\0\0\0\1": "UTF-32BE", b"\1\0\1\0": "UTF-16LE", b"\0\1\0\1": "UTF-16BE"}
"""Which of the first four bytes are not zero, where the text begins with ASCII letters (RFC 4627, section 3)."""
_PACKED = {b"\x1f\x8b": ".gz", b"\xfd7zXZ": ".xz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
_MISSING = object()


def read_file(file: Path, records: Records, field: str) -> Iterator[str]:
    """Yields the documents of a file, from record `records.number` on.

    field: name of the field or column with the text, dots between the names of nested ones.
    """
    with open_bytes(file) as raw:
        size, records.bytes_here = os.fstat(raw.fileno()).st_size, raw.tell
        yield from _read_open(file, raw, records, field)
        records.bytes_before, records.bytes_here = records.bytes_before + size, float


def _read_open(file: Path, raw: IO[bytes], records: Records, field: str) -> Iterator[str]:
    kind, compression = kind_of(file.name)
    if kind in COLUMNS:
        from meshwright.data.columns import read_columns  # pyarrow takes 0.2 s of import

        yield from read_columns(file, raw, kind, records, field)
        return
    stream = decompressed(raw, compression)
    if kind in LINES:
        yield from read_json_texts(file, stream, records, field)
    elif kind in DELIMITED:
        yield from _read_delimited(file, stream, "\t" if kind == ".tsv" else ",", records, field)
    elif not records.number:
        yield from _read_whole(file, stream, records)


def _read_whole(file: Path, stream: IO[bytes], records: Records) -> Iterator[str]:
    content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it is one document of more than {LARGEST:,} bytes; split it, or write it as .jsonl")
    records.number = 1
    place = place_of(file)
    text = _decoded(content, place, records)
    if text is not None and (text := records.text(text, place)):
        yield text


def _decoded(content: bytes, place: Place, records: Records) -> str | None:
    """Returns the text of UTF-8 bytes; None, and a bad record, where they are none."""
    if not place.unit and (wide := _wide(content)):
        records.skip(place, f"not UTF-8: it is {wide}", _conversion(place.file, wide))
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start)
        place_in = "" if place.unit else f" on line {line + 1}"
        reason = f"byte {error.start + 1} (0x{content[error.start]:02x}){place_in}"
        packed = _packed(content) if place.number < 2 else None
        reason, fix = (f"it is {packed}", f"the end {packed} of its name") if packed else (reason, "repair it")
        records.skip(place, f"not UTF-8: {reason}", fix)
        return None


def _wide(content: bytes) -> str | None:
    """Returns the encoding of a text in UTF-16 or UTF-32, with a mark of the order of its bytes or without."""
    given = bytes(byte != 0 for byte in content[:4])
    return next((name for mark, name in _WIDE.items() if content.startswith(mark)), _UNMARKED.get(given))


def _packed(content: bytes) -> str | None:
    return next((name for mark, name in _PACKED.items() if content.startswith(mark)), None)


def _conversion(file: str, encoding: str) -> str:
    return f"iconv -f {encoding} -t UTF-8 {file} > CONVERTED"


def _lines(stream: IO[bytes], file: Path | str, records: Records) -> Iterator[bytes]:
    """Yields lines from line `records.number` on, which counts them; the first without its byte-order mark.

    Lines end with a line feed alone: what else Unicode takes for the end of one may be in a text.
    """
    skip, records.number = records.number, 0
    expected, records.crc = records.crc, 0
    while line := stream.readline(LARGEST + 1):
        records.number += 1
        if len(line) > LARGEST:
            raise ValueError(f"line {records.number} has more than {LARGEST:,} bytes")
        records.crc = zlib.crc32(line, records.crc)
        if records.number == 1:
            if wide := _wide(line):
                raise DataError(f"reading {file}", f"not UTF-8: it is {wide}", _conversion(str(file), wide))
            if packed := _packed(line):
                fix = f"the end {packed} of its name"
                raise DataError(f"reading {file}", f"not UTF-8: it is {packed}", fix)
            line = line.removeprefix(b"\xef\xbb\xbf")
        if records.number > skip:
            yield line
        elif records.number == skip and records.crc != expected:
            break
    if records.number < skip or (skip and records.number == skip and records.crc != expected):
        raise DataError(
            f"going on with {file}", f"its first {skip:,} lines are not those that were tokenised before",
            "the same text as before, or another folder",
        )  # fmt: skip


def read_json_lines(
    file: Path | str, stream: IO[bytes], records: Records, field: str | None = None
) -> Iterator[tuple[Place, Any]]:
    """Yields the place and the value of each line of JSON; blank lines are no records.

    field: lines in which an object has two fields of one of its names are bad; None takes all names. JSON parsers would
    take the last, however the names are spelled.
    """
    names = None if field is None else {field, *field.split(".")}
    for line in _lines(stream, file, records):
        place = place_of(file, "line", records.number)
        decoded = _decoded(line, place, records) if line.strip() else None
        if decoded is None:
            continue
        try:
            value = parse_json(decoded.rstrip("\r\n"), lambda pairs: unique_object(pairs, names))
        except RepeatedNameError as error:
            records.skip(place, f"an object in it has the field {error.name!r} twice")
            continue
        except ValueError as error:
            at = f" at column {error.colno}" if hasattr(error, "colno") else ""
            records.skip(place, f"not JSON: {str(getattr(error, 'msg', error)).removesuffix(' at')}{at}")
            continue
        yield place, value


def read_json_texts(file: Path | str, stream: IO[bytes], records: Records, field: str) -> Iterator[str]:
    """Yields the text of each line of JSON."""
    for place, record in read_json_lines(file, stream, records, field):
        value = find_field(record, field)
        if isinstance(value, str):
            if text := records.text(value, place):
                yield text
        elif value is not _MISSING:
            records.skip(place, f"no text: its {field!r} is {kind_of_value(value)}")
        elif isinstance(record, dict):
            known = [f"{name!r} ({kind_of_value(item)})" for name, item in itertools.islice(record.items(), _SHOWN)]
            has = f"; it has {', '.join(known)}" if known else ""
            records.skip(place, f"no text: it has no field {field!r}{has}", "--data.text-field NAME")
        else:
            records.skip(place, f"no text: it is {kind_of_value(record)}, and no object")


def find_field(record: Any, field: str) -> Any:
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
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    return kinds.get(type(value), "null")


def _header(file: Path, rows: Iterator[list[str]]) -> list[str] | None:
    """Returns the names in the first line; None where the file is empty. Raises DataError where it has none."""
    try:
        header = next(rows, None)
    except csv.Error as error:
        raise DataError(f"reading {place_of(file, 'line', 1)}", f"no names of columns: {error}", "repair it") from error
    if header == []:
        truth = "it is blank, and the first line names the columns"
        raise DataError(f"reading {place_of(file, 'line', 1)}", truth, "remove the line")
    return header


def _column(file: Path, header: list[str], field: str) -> int:
    """Returns the number of the column `field`. Raises DataError where there is none, or several."""
    if header.count(field) == 1:
        return header.index(field)
    known = ", ".join(name.encode("utf-8", "replace").decode() for name in header[:_SHOWN])
    if field in header:
        truth = f"{header.count(field)} columns are named {field!r}: {known}"
        raise DataError(f"reading {place_of(file, 'line', 1)}", truth, "give each a name of its own")
    truth = f"no column {field!r} among {known}"
    if len(header) == 1 and (other := next((mark for mark in ";\t|," if mark in header[0]), None)):
        fix = "commas, or tabs in a .tsv"
        raise DataError(f"reading {place_of(file, 'line', 1)}", f"{truth}, which has {other!r} between its names", fix)
    meant = next((name for name in header if name.strip().lower() == field.lower()), header[0])
    raise DataError(f"reading {place_of(file)}", truth, f"--data.text-field {shlex.quote(meant)}")


def _read_delimited(file: Path, stream: IO[bytes], delimiter: str, records: Records, field: str) -> Iterator[str]:
    """Yields the text of each row; the first line has the names of the columns."""
    skip, records.number = records.number, 0
    # Bytes that are not UTF-8 become surrogates, so that their row alone is bad.
    decoded = (line.decode("utf-8", "surrogateescape") for line in _lines(stream, file, records))
    csv.field_size_limit(LARGEST)  # 128 KiB by default, shorter than many a document
    rows = csv.reader(decoded, delimiter=delimiter, strict=True)
    header = _header(file, rows)
    if header is None:
        return
    column = _column(file, header, field)
    while True:
        first = rows.line_num + 1
        place = place_of(file, "line", first)
        try:
            row = next(rows, None)
        except csv.Error as error:
            if first > skip:
                records.skip(place, f"not a row: {error}")
            continue
        if row is None:
            return
        if not row or first <= skip:
            continue
        if len(row) != len(header):
            records.skip(place, f"it has {len(row)} fields, and the first line names {len(header)}")
            continue
        value = row[column]
        if any(0xDC80 <= ord(letter) <= 0xDCFF for letter in ([] if value.isascii() else value)):
            records.skip(place, "not UTF-8")
        elif text := records.text(value, place):
            yield text
