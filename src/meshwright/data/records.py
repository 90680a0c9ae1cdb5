"""Records of a source: those that are read, empty, or bad, and the bad ones that a run may skip."""

import dataclasses
from pathlib import Path
from typing import Any

from meshwright.errors import DataError

_SHOWN = 20
"""Bad records that are kept with their places."""
LARGEST = 2**30
"""Largest record in bytes: a line, or a whole text file."""


@dataclasses.dataclass
class Records:
    """Counts of one reading of a source."""

    source: str
    """Entry of `data.paths`."""
    share: float = 0.0
    """Largest share of records that may be bad."""
    read: int = 0
    empty: int = 0
    bad: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)

    def text(self, text: str, place: str) -> str | None:
        """Counts a document and returns its text without a byte-order mark; None where it is empty or bad.

        place: file and line, for errors.
        """
        text = text.removeprefix("\ufeff")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                self.skip(place, f"character {error.start + 1} is half of a surrogate pair, which is no text")
                return None
        self.read += 1
        self.empty += not text
        return text or None

    def skip(self, place: str, reason: str) -> None:
        """Counts a bad record. Raises DataError where none may be skipped."""
        self.read += 1
        self.bad += 1
        if len(self.examples) < _SHOWN:
            self.examples.append(f"{place}: {reason}")
        if not self.share:
            raise DataError(
                f"reading {place}", reason, "repair it, or --faults.bad-records 0.001 to skip up to a thousandth"
            )

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


def place(file: Path, line: int) -> str:
    """Formats the place of a record: `FILE, line N`."""
    return f"{file}, line {line}"
