"""Records of a source: those that are read, empty, or bad, and the bad ones that a run may skip."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from meshwright.errors import DataError
from meshwright.formatting import printable

_SHOWN = 20
"""Bad records that are kept with their places in `tokens.json`; all of them are in `skipped.jsonl`."""
LARGEST = 2**30
"""Largest record in bytes: a line, or a whole text file."""
_COUNTS = ("read", "empty", "bad", "examples", "file", "number", "crc", "logged")


class Place(NamedTuple):
    """Place of a record, for errors: `FILE, line 7`."""

    file: str
    unit: str = ""
    """`line`, `row` or `document`; empty where the file is the record."""
    number: int = 0

    def __str__(self) -> str:
        name = printable(self.file)  # line feeds too
        return f"{name}, {self.unit} {self.number}" if self.unit else name


@dataclasses.dataclass
class Records:
    """Counts and position of one reading of a source."""

    source: str
    """Entry of `data.paths`."""
    share: float = 0.0
    """Largest share of records that may be bad."""
    read: int = 0
    empty: int = 0
    bad: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)
    file: int = 0
    """Files that were read whole, in the order of reading."""
    number: int = 0
    """Lines, rows or documents that were read of the next file."""
    crc: int = 0
    """CRC-32 of the lines that were read of it."""
    place: Place = Place("")
    """Place of the last document."""
    log: IO[bytes] | None = None
    """File that takes every skipped record as a line of JSON."""
    logged: int = 0
    """Bytes written to `log`."""
    bytes_before: int = 0
    """Bytes of the files before the one that is being read."""
    bytes_here: Callable[[], float] = float
    """Returns the bytes read of that one."""

    def text(self, text: str, place: Place) -> str | None:
        """Counts a document and returns its text without a byte-order mark; None where it is empty or bad."""
        text = text.removeprefix("\ufeff")
        if "\0" in text:
            at = text.index("\0") + 1
            self.skip(place, f"character {at} is NUL, which no text has: binary data, or part of a damaged file")
            return None
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                self.skip(place, f"character {error.start + 1} is half of a surrogate pair, which is no text")
                return None
        self.read += 1
        self.empty += not text
        self.place = place
        return text or None

    def skip(self, place: Place, reason: str, fix: str = "repair it") -> None:
        """Counts a bad record. Raises DataError where none may be skipped."""
        if not self.share:
            raise DataError(
                f"reading {place}", reason, f"{fix}, or --faults.bad-records 0.001 to skip up to a thousandth"
            )
        self.read += 1
        self.bad += 1
        if len(self.examples) < _SHOWN:
            self.examples.append(f"{place}: {reason}")
        if self.log is not None:
            where: dict[str, Any] = {"file": place.file, **({place.unit: place.number} if place.unit else {})}
            line = json.dumps({**where, "reason": reason}).encode() + b"\n"
            self.log.write(line)
            self.logged += len(line)

    def check(self) -> None:
        """Raises DataError where more records were bad than may be skipped; called when all are read."""
        if self.bad > self.share * self.read:
            first = "; ".join(self.examples[:3])
            raise DataError(
                f"--data {self.source}",
                f"{self.bad:,} of {self.read:,} records cannot be read, {self.bad / self.read:.2%}, and "
                f"--faults.bad-records {self.share:g} allows {self.share:.2%}; the first: {first}",
                f"repair them, or --faults.bad-records {self.bad / self.read * 1.01:.2g}",
            )

    def summary(self) -> dict[str, Any]:
        """Returns the counts as JSON values."""
        share = self.bad / self.read if self.read else 0.0
        return {"read": self.read, "empty": self.empty, "bad": self.bad, "share": share, "examples": self.examples}

    def state(self) -> dict[str, Any]:
        """Returns counts and position as JSON values, from which `resume` goes on."""
        return {**{name: getattr(self, name) for name in _COUNTS}, "examples": list(self.examples)}

    def resume(self, state: dict[str, Any]) -> None:
        """Takes counts and position of an earlier reading. Raises KeyError or TypeError where they are none."""
        for name in _COUNTS:
            if type(state[name]) is not type(getattr(self, name)):
                raise TypeError(f"{name} is {state[name]!r}")
            setattr(self, name, state[name])


def place_of(file: Path | str, unit: str = "", number: int = 0) -> Place:
    """Returns the place of a record of a file."""
    return Place(str(file), unit, number)
