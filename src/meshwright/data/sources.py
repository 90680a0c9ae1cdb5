"""Sources of documents: files, Python's standard library, the hub, or a function of the user's.

What a source is and when it has changed is known here; `readers` reads it.
"""

import dataclasses
import functools
import glob
import hashlib
import inspect
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import msgspec

from meshwright.data.megatron import is_megatron
from meshwright.data.selection import relative_names, select_data
from meshwright.documents import GGUF_KIND
from meshwright.errors import DataError, by_class, reason_of
from meshwright.formatting import printable
from meshwright.plugins import load
from meshwright.storage.hub import DATASET, download_from_hub
from meshwright.trust import is_reference

PLAIN = (".txt", ".py", ".md", ".rst", ".text")
LINES = (".jsonl", ".ndjson")
COLUMNS = ".parquet"
COMPRESSED = (".gz", ".zst")
_TEXTS = (*PLAIN, *LINES)
SUFFIXES = (
    *_TEXTS,
    COLUMNS,
    *(kind + compression for kind in _TEXTS for compression in COMPRESSED),
)
"""Ends of the names of files that are read."""
_PROSE = (".py", ".md", ".rst", *(k + c for k in (".py", ".md", ".rst") for c in COMPRESSED))
"""Those that are scripts and pages where a folder has files of data too."""
_DATA = tuple(suffix for suffix in SUFFIXES if suffix not in _PROSE)
_KINDS = (
    f"one of {', '.join(_TEXTS)}, each also with {', '.join(COMPRESSED)}; {COLUMNS} (`to_parquet` "
    f"of datasets or "
    "pandas); or module:attribute"
)
_STDLIB = (
    "asyncio concurrent/futures collections email http importlib json logging "
    "multiprocessing unittest urllib xml/etree"
)
"""Packages of Python's standard library that the source `stdlib` reads, besides its single modules.
"""
_EXAMPLES = 20
"""Bad records that are kept with their places in `tokens.json`; all of them are in `skipped.jsonl`.
"""


class Place(NamedTuple):
    """Place of a record, for errors: `FILE, line 7`."""

    file: Path | str
    unit: str = ""
    """`line`, `row` or `document`; empty where the file is the record."""
    number: int = 0

    def __str__(self) -> str:
        name = printable(str(self.file))  # line feeds too
        return f"{name}, {self.unit} {self.number}" if self.unit else name


@dataclasses.dataclass
class _Counts:
    """Counts that `Records` keeps of an interrupted reading, as JSON values."""

    read: int = 0
    empty: int = 0
    bad: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)
    file: int = 0
    """Files read to their end, in the order of reading."""
    number: int = 0
    """Lines, rows or documents read of the next file."""
    logged: int = 0
    """Bytes written to `Records.log`."""


class Records(_Counts):
    """Counts and position of one reading of a source.

    source: entry of `data.paths`.  share: largest share of records that may be bad.  skippable:
    whether an option raises it.
    """

    def __init__(self, source: str, share: float = 0.0, skippable: bool = True):
        super().__init__()
        self.source = source
        self.share = share
        self.skippable = skippable
        self.place = Place("")
        """Place of the last document."""
        self.log: IO[bytes] | None = None
        """File that takes every skipped record as a line of JSON."""
        self.bytes_before = 0
        """Bytes of the files before the one that is being read."""
        self.bytes_here: Callable[[], float] = float
        """Returns the bytes read of that one."""

    def text(self, text: str, place: Place) -> str | None:
        """Counts a document and returns its text without a byte-order mark.

        None: it is empty or bad.
        """
        text = text.removeprefix("\ufeff")
        if "\0" in text:
            at = text.index("\0") + 1
            self.skip(
                place,
                f"character {at} is NUL, which no text has: binary data, or part of a damaged file",
            )
            return None
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                self.skip(
                    place,
                    f"character {error.start + 1} is half of a surrogate pair, which is no text",
                )
                return None
        self.read += 1
        self.empty += not text
        self.place = place
        return text or None

    def skip(self, place: Place, reason: str, fix: str = "repair it") -> None:
        """Counts a bad record. Raises DataError where none may be skipped."""
        if not self.share:
            if self.skippable:
                fix = f"{fix}, or --faults.bad-records 0.001 to skip up to a thousandth"
            raise DataError(f"reading {place}", reason, fix)
        self.read += 1
        self.bad += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{place}: {reason}")
        if self.log is not None:
            where: dict[str, Any] = {
                "file": str(place.file),
                **({place.unit: place.number} if place.unit else {}),
            }
            self.logged += self.log.write(json.dumps({**where, "reason": reason}).encode() + b"\n")

    def check(self) -> None:
        """Raises DataError if more records were bad than may be skipped.

        Called when all are read.
        """
        check_skipped(self.source, self.summary(), self.share)

    def summary(self) -> dict[str, Any]:
        """Returns the counts as JSON values."""
        share = self.bad / self.read if self.read else 0.0
        return {
            "read": self.read,
            "empty": self.empty,
            "bad": self.bad,
            "share": share,
            "examples": self.examples,
        }

    def state(self) -> dict[str, Any]:
        """Returns counts and position as JSON values, from which `resume` goes on."""
        return dataclasses.asdict(self)

    def resume(self, state: dict[str, Any]) -> None:
        """Takes counts and position of an earlier reading. Raises ValueError for anything else."""
        vars(self).update(vars(msgspec.convert(state, _Counts)))


def check_skipped(source: str, skipped: Mapping[str, Any], allowed: float) -> None:
    """Raises DataError where a larger share of records was skipped than is allowed.

    source: entry of `data.paths`.  skipped: counts as of `Records.summary`; a token file keeps
    them, so tokens that another run made are judged by their description.
    """
    bad, read = skipped.get("bad", 0), skipped.get("read", 0)
    if bad > allowed * read:
        raise DataError(
            f"--data {source}",
            f"{bad:,} of {read:,} records cannot be read, {bad / read:.2%}, and "
            f"--faults.bad-records {allowed:g} allows {allowed:.2%}; "
            f"the first: {'; '.join(skipped.get('examples', ())[:3])}",
            f"repair them, or --faults.bad-records {bad / read * 1.01:.2g}",
        )


@dataclasses.dataclass(frozen=True)
class FileDocuments:
    """Documents in files. field: name of the field or column with the text."""

    files: tuple[Path, ...]
    field: str = "text"
    note: str = ""
    """What was taken of a folder, and what was left out; "" for files that were named."""

    def fingerprint(self) -> list[str]:
        """Returns path, size and modification time of every file.

        Raises DataError for one that is not regular.
        """
        folders: dict[str, str] = {}  # most files share one: resolving each takes 20 times as long
        lines = []
        for file in map(os.fspath, self.files):
            folder, name = os.path.split(file)
            try:
                status = os.stat(file)
            except OSError as error:
                raise by_class(
                    error, DataError(f"reading {file}", reason_of(error), "repair or remove it")
                ) from error
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
class FunctionDocuments:
    """Documents from a callable `() -> Iterable[str]` of the user's (`--data module:attribute`)."""

    name: str
    """Name in `data.paths`: `module:attribute` or `FILE.py:attribute`."""
    function: Callable[[], Iterable[str]]
    note: ClassVar[str] = ""

    def fingerprint(self) -> list[str]:
        """Returns the name, and what changes when the documents do.

        That is the callable's `fingerprint` attribute, or the hash of the file that defines it.
        Raises DataError where it has neither, such as an instance of a class.
        """
        own: Any = getattr(self.function, "fingerprint", None)
        if own is not None:
            return [self.name, str(own() if callable(own) else own)]
        try:
            code = Path(inspect.getsourcefile(self.function) or "").read_bytes()
        except (TypeError, OSError) as error:
            raise by_class(
                error,
                DataError(
                    f"--data {self.name}",
                    f"an object of type {type(self.function).__name__} has no source file whose "
                    f"change would be noticed",
                    "give it an attribute `fingerprint`: a text that changes when the documents do",
                ),
            ) from error
        return [self.name, hashlib.sha256(code).hexdigest()]

    def size(self) -> tuple[int, int]:
        """Returns 0, 0: what a function yields is not known beforehand."""
        return 0, 0

    def __str__(self) -> str:
        return self.name


Documents = FileDocuments | FunctionDocuments
"""Documents of one source. Token files are cached under the hash of their `fingerprint`."""


def open_source(path: str, field: str = "text") -> Documents:
    """Opens a source: files, `stdlib`, `hf://datasets/OWNER/NAME`, or the reference of a function.

    field: name of the field or column with the text. Raises DataError where there is no readable
    file, ConfigError where the module or the attribute is missing.
    """
    if path.startswith("hf://"):
        return _of_files(download_dataset(path), field)
    if path.startswith("hf:") and not os.path.exists(path):
        owner, _, name = path.removeprefix("hf:").rpartition("/")
        truth = "hf: names a model; a data set of the hub has the form hf://datasets/OWNER/NAME"
        fix = f"--data hf://datasets/{owner or 'OWNER'}/{name}"
        raise DataError(f"--data {path}", truth, fix)
    if is_megatron(path):
        truth = "it is a Megatron dataset, which has tokens and no text"
        raise DataError(f"--data {path}", truth, f"meshwright train RECIPE --data {path}")
    if is_reference(path) and not os.path.exists(path):
        return FunctionDocuments(path, load("data source", path))
    return _of_files(find_files(path), field)


def _of_files(found: "Found", field: str) -> FileDocuments:
    return FileDocuments(tuple(found.files), field, found.note)


def kind_of(name: str) -> tuple[str, str]:
    """Returns kind and compression by a file's name: `a.jsonl.zst` is `.jsonl` and `.zst`."""
    name = name.lower()
    compression = next((end for end in COMPRESSED if name.endswith(end)), "")
    stem = name.removesuffix(compression)
    return next((kind for kind in (*_TEXTS, COLUMNS) if stem.endswith(kind)), ""), compression


class Found(NamedTuple):
    """Files of a source, and what was taken and left out of a folder."""

    files: list[Path]
    note: str = ""


def download_dataset(path: str) -> Found:
    """Downloads `hf://datasets/OWNER/NAME[@REVISION][/FOLDER or GLOB]`.

    Returns its files in the hub's cache.
    Downloads what is not there. Raises DataError where huggingface_hub is not installed, the name
    is none, or the hub does not give it.
    """
    kind, _, rest = path.removeprefix("hf://").partition("/")
    owner, _, rest = rest.partition("/")
    name, _, inside = rest.partition("/")
    name, _, revision = name.partition("@")
    asked = f"--data {path}"
    if kind != "datasets" or not owner or not name:
        form = "hf://datasets/OWNER/NAME, or hf://datasets/OWNER/NAME@REVISION/FOLDER"
        raise DataError(asked, "it names no dataset of the hub", form)
    wanted = (
        [f"{inside}{end}" for end in ("", "/**")] if inside else [f"*{end}" for end in SUFFIXES]
    )
    refusal = functools.partial(DataError, asked)
    folder = download_from_hub(f"{owner}/{name}", DATASET, wanted, refusal, revision or None)
    return find_files(os.path.join(folder, inside) if inside else str(folder))


def find_files(path: str) -> Found:
    """Returns the files of a source, sorted; of a folder those that are its data (`selection`).

    Raises DataError where no file of a known kind is found.
    """
    if path == "stdlib":  # without the packages' tests and generated tables
        root = Path(sysconfig.get_paths()["stdlib"])
        folders = (root, *(root / name for name in _STDLIB.split()))
        code = (file for folder in folders for file in folder.glob("*.py"))
        return Found(sorted(file for file in code if file.stat().st_size > 0))
    location = Path(path)
    if not path:
        raise DataError("--data ''", "it is no name", _KINDS)
    if os.path.isdir(path):  # false for names that no file can have
        found = sorted(_walk(path), key=lambda file: file.split(os.sep))
        selection = select_data(relative_names(path, found), _DATA, _PROSE)
        files = _without_duplicates([os.path.join(path, name) for name in selection.files])
        if files:
            return Found(files, selection.note)
        truth = f"it is a folder without a file of a known kind: {selection.note}"
        raise DataError(f"--data {path}", truth, _KINDS)
    if os.path.exists(path):
        files = [location]
    else:
        matches = sorted(glob.glob(path, recursive=True))
        files = _without_duplicates([file for file in matches if not os.path.isdir(file)])
    if not files:
        raise DataError(f"--data {path}", "it is neither a file, a folder nor a glob", _KINDS)
    for file in files:
        if file.name.lower().endswith(".gguf"):
            raise DataError(f"--data {path}", f"{file.name} is {GGUF_KIND}, not text", _KINDS)
        if not file.name.lower().endswith(SUFFIXES):
            raise DataError(f"--data {path}", f"{file.name} is of no known kind", _KINDS)
    return Found(sorted(files))


def _without_duplicates(found: Sequence[str]) -> list[Path]:
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


def _refuse_folder(error: OSError) -> None:
    """Raises DataError for a folder that cannot be listed."""
    asked = f"reading {error.filename}"
    refusal = DataError(asked, reason_of(error), "make it readable, or move it out")
    raise by_class(error, refusal) from error


def _walk(path: str) -> Iterator[str]:
    """Yields all files in a folder; linked folders are read too, each folder once.

    Raises DataError where a folder inside cannot be listed.
    """
    seen = {os.path.realpath(path)}
    for folder, folders, names in os.walk(path, onerror=_refuse_folder, followlinks=True):
        inside = sorted((os.path.islink(os.path.join(folder, name)), name) for name in folders)
        folders.clear()
        for _, name in inside:
            real = os.path.realpath(os.path.join(folder, name))
            if real not in seen:
                seen.add(real)
                folders.append(name)
        yield from (os.path.join(folder, name) for name in names)
