"""Files from elsewhere, read as data: of bounded size and nesting, and inside their folder.

A checkpoint, a run file, a plan, weights or tokens may come from a stranger.
What reads one goes through here.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from meshwright.storage.attempts import RegularFile
from meshwright.storage.paths import bucket_path, in_bucket

SMALL = 16 * 2**20
"""Largest description in bytes: run.json, plan, tokens.json, config.json, chat template."""
LARGE = 512 * 2**20
"""Largest list of a model's parts in bytes: tokenizer, manifest, index of weights."""


def read_text(file: Path, largest: int = SMALL) -> str:
    """Returns the text of a regular file of at most `largest` bytes.

    Raises OSError where it cannot be read, ValueError where it is larger, no regular file,
    or not UTF-8.
    """
    if in_bucket(file):
        content = bucket_path(file).read_part(0, largest + 1)
    else:
        with open_bytes(file) as opened:
            content = opened.read(largest + 1)
    check_contents(file.name, content[:64], len(content))
    if len(content) > largest:
        raise ValueError(f"{file.name} is larger than {largest:,} bytes")
    return content.decode("utf-8")


GGUF_KIND = "a GGUF file, the weights of llama.cpp"
_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024
"""Bytes that a pointer of Git LFS has at most, by its specification."""


class ForeignFileError(ValueError):
    """File whose contents are of another format than its name.
    fix: what puts the right one in its place."""

    def __init__(self, truth: str, fix: str):
        super().__init__(truth)
        self.fix = fix


def check_contents(file: Path | str, start: bytes, size: int) -> None:
    """Raises ForeignFileError for a file whose first bytes are of a pointer of Git LFS or of GGUF.

    start: its first bytes, 64 or more.  size: bytes of the file.
    """
    if start.startswith(_POINTER) and size <= _LARGEST_POINTER:
        raise ForeignFileError(
            f"it is a git-lfs pointer of {size} bytes: the file that it stands for was not "
            "downloaded",
            f"`git lfs install && git lfs pull` in {Path(file).parent}, or `hf download`",
        )
    if start.startswith(b"GGUF"):
        raise ForeignFileError(
            f"it is {GGUF_KIND}", "the model's folder with config.json and .safetensors files"
        )


def fix_of(error: Exception, fix: str) -> str:
    """Returns the fix that an error of reading has itself, and else `fix`."""
    return error.fix if isinstance(error, ForeignFileError) else fix


def open_bytes(file: Path) -> IO[bytes]:
    """Opens a regular file for reading.

    A read that fails for now is made again, with a new handle. Raises OSError, and ValueError for a
    pipe, a device or a folder, and ForeignFileError.
    """
    raw = RegularFile(file)
    opened = io.BufferedReader(raw)
    try:
        check_contents(file, opened.peek(64)[:64], os.fstat(raw.fileno()).st_size)
    except ForeignFileError:
        opened.close()
        raise
    return opened


_MOST_STEPS = 2**53
"""Largest step of a record: up to here JSON's numbers are exact."""
Objects = Callable[[list[tuple[str, Any]]], Any]
"""Function that makes an object of its names and values."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_DIGITS = 300
"""Most digits of a whole number, so that arithmetic with floats does not overflow."""


def parse_json(
    text: str, objects: Objects | None = None, integers: Callable[[str], int] | None = None
) -> Any:
    """Returns the value of a JSON text.
    Raises ValueError where it is not JSON, or nested beyond Python's stack.

    objects: makes an object of its names and values, in order;
    without it the last of several of one name counts.
    integers: makes a whole number of its digits.
    """
    try:
        return json.loads(text, object_pairs_hook=objects, parse_int=integers)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def step_of(record: Mapping[str, Any]) -> int | None:
    """Returns the step of a line of metrics or events;
    None where it is not a whole number from 0 on."""
    value = record.get("step")
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= _MOST_STEPS
    ):
        return None
    return int(value) if value == int(value) else None


def real(value: Any) -> float | None:
    """Returns a finite JSON number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    number = math.nan
    with contextlib.suppress(OverflowError):
        number = float(value)
    return number if math.isfinite(number) else None


def parse_document(text: str, objects: Objects | None = None) -> Any:
    """Returns the value of a JSON document, all of whose texts can be written and
    whose numbers are those of a float.

    Raises ValueError as `parse_json` does, for half of a surrogate pair,
    and for a whole number beyond a float's range.
    """
    value = parse_json(text, objects, _whole_number)
    half = _SURROGATE.search(text)
    if half is not None:  # rare, and most are pairs
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("it has half of a surrogate pair, which is no text") from error
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


class RepeatedNameError(ValueError):
    """Name that a JSON object has twice."""

    def __init__(self, name: str):
        super().__init__(f"an object in it has {name!r} twice")
        self.name = name


def unique_object(pairs: list[tuple[str, Any]], names: set[str] | None = None) -> dict[str, Any]:
    """Returns an object, for `parse_json`.
    Raises RepeatedNameError for one of `names` (None: any) given twice."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen and (names is None or name in names):
            raise RepeatedNameError(name)
        seen.add(name)
    return dict(pairs)


def read_json(file: Path, largest: int = SMALL) -> Any:
    """Returns the JSON value in a regular file of at most `largest` bytes.
    Raises OSError or ValueError."""
    return parse_document(read_text(file, largest))


def checksum(record: Any) -> str:
    """Returns the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a document with a checksum of everything else in it; a sealed one stays as it is."""
    rest = {name: value for name, value in document.items() if name != "checksum"}
    return {**rest, "checksum": checksum(rest)}


def check_inside(folder: Path, files: Iterable[Path]) -> None:
    """Raises ValueError naming the first of `files` that a symbolic link takes out of `folder`.

    In the cache of the Hugging Face hub, the files of `models--OWNER--NAME/snapshots/REVISION` are
    links to `models--OWNER--NAME/blobs`, which belongs to the folder.
    """
    root = folder.resolve()
    roots = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    for file in files:
        found = file.resolve()
        if not any(found.is_relative_to(allowed) for allowed in roots):
            raise ValueError(f"{file.name} is a link that leaves the folder, to {found}")
