"""Files of conversations: JSON lines, arrays of JSON, and tables in columns."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from meshwright.data.readers import LARGEST, decompressed, kind_of_value, read_json_lines
from meshwright.data.selection import relative_names, select_data
from meshwright.data.sources import (
    COLUMNS,
    COMPRESSED,
    LINES,
    PLAIN,
    Found,
    Place,
    Records,
    kind_of,
)
from meshwright.documents import ForeignFileError, open_bytes, parse_json, unique_object
from meshwright.errors import DataError
from meshwright.hardware.agreement import note_progress

ARRAY = ".json"
_LINE_ENDS = tuple(
    kind + compression for kind, compression in itertools.product(LINES, ("", *COMPRESSED))
)
KINDS = f"{', '.join(LINES)} (also with {', '.join(COMPRESSED)}), {ARRAY} or {COLUMNS}"
"""Files that are read, for errors."""
_SPACE = b" \t\r\n\xef\xbb\xbf"


def find_chat_files(path: str) -> Found:
    """Returns the files of conversations at a path, sorted.

    A path is a file, or a folder with data (`selection`).
    In a folder, `.json` files are descriptions of the others where there are others. Raises
    DataError where there is none.
    """
    location = Path(path)
    if location.is_file():
        kind, _ = kind_of(location.name)
        if kind in PLAIN:
            truth = f"it is text ({kind}), and this run reads conversations or preferences"
            fix = f"a file of records, {KINDS}; text is read by a run of `meshwright train`"
            raise DataError(f"--data {path}", truth, fix)
        return Found([location])
    reason = "it is not there"
    if location.is_dir():
        reason = f"it is a folder without a file that ends with {KINDS}"
        files = sorted(file for file in location.rglob("*") if file.is_file())
        names = relative_names(path, [str(file) for file in files])
        for ends in ((*_LINE_ENDS, COLUMNS), (ARRAY,)):
            selection = select_data(names, ends)
            if selection.files:
                return Found([location / name for name in selection.files], selection.note)
    fix = f"a file of conversations, {KINDS}, or a folder of such files"
    raise DataError(f"--data {path}", reason, fix)


def read_records(files: list[Path]) -> Iterator[tuple[int, Place, dict[str, Any]]]:
    """Yields the number of its file, the place and the fields of every record.

    Raises DataError for what is no object.
    """
    for number, file in enumerate(files):
        try:
            opened = open_bytes(file)
        except ForeignFileError as error:
            raise DataError(f"reading {file}", str(error), error.fix) from error
        with opened as raw:
            for place, record in _values(file, raw):
                if not isinstance(record, dict):
                    truth = f"it is {kind_of_value(record)}, and no object"
                    raise DataError(str(place), truth, "one JSON object for each record")
                note_progress()
                yield number, place, record


def unit_of(file: Path) -> str:
    """Returns the unit that counts the records of a file.

    It is that of their `Place`: `line`, `row` or `record`.
    """
    name = file.name.lower()
    if name.endswith(COLUMNS):
        return "row"
    if not name.endswith(ARRAY):
        return "line"
    with open_bytes(file) as raw:
        return "record" if _is_array(raw) else "line"


def _values(file: Path, raw: IO[bytes]) -> Iterator[tuple[Place, Any]]:
    name = file.name.lower()
    if name.endswith(COLUMNS):
        from meshwright.data.columns import read_rows

        yield from read_rows(file, raw)
        return
    if name.endswith(ARRAY) and _is_array(raw):
        yield from _array(file, raw)
        return
    stream = decompressed(raw, kind_of(file.name)[1])
    yield from read_json_lines(file, stream, Records(str(file), skippable=False))


def _is_array(raw: IO[bytes]) -> bool:
    """Whether the first character that is not white space opens an array.

    Many `.json` files have lines of JSON.
    """
    start = raw.read(4096).lstrip(_SPACE)
    raw.seek(0)
    return start.startswith(b"[")


def _array(file: Path, raw: IO[bytes]) -> Iterator[tuple[Place, Any]]:
    content = raw.read(LARGEST + 1)
    asked = f"reading {file}"
    if len(content) > LARGEST:
        truth = f"it is one JSON array of more than {LARGEST:,} bytes"
        raise DataError(asked, truth, "a record in each line of a .jsonl file")
    try:
        records = parse_json(content.decode("utf-8-sig"), unique_object)
    except ValueError as error:
        raise DataError(asked, f"it is not JSON: {error}", "repair it") from error
    for number, record in enumerate(records, 1):
        yield Place(file, "record", number), record
