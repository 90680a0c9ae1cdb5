"""One section of the hardware benchmark: named measurements, each written
to the section's file as soon as it is made.

A measurement that raises is a row with its message, and the next one follows.
"""

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError, describe_failure
from meshwright.storage.writing import write_atomically

Measurement = Callable[[], Mapping[str, Any]]

DONE, FAILED, RUNNING, OUT_OF_TIME = "done", "failed", "running", "out of time"
"""States of a section. `running` in the file of a section that does not run: it was killed."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Options of the benchmark that every section reads."""

    folder: str
    devices: int
    """Simulated devices where there is no accelerator."""
    kernels: tuple[str, ...] = ()
    """Attention kernels from outside the package, as `module:attribute`."""

    def write(self) -> None:
        """Writes the request into its folder."""
        write_json_file(Path(self.folder) / "request.json", self)

    @classmethod
    def read(cls, folder: Path) -> "Request":
        """Reads the request of a folder."""
        return msgspec.json.decode((folder / "request.json").read_bytes(), type=cls)


class Section:
    """Recorder of one section. It ends at `seconds`, and names what is not measured by then."""

    def __init__(self, name: str, request: Request, seconds: float):
        self.name, self.request, self.seconds = name, request, seconds
        self.folder = Path(request.folder)
        self._file = section_file(self.folder, name)
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        # Figures of one measurement by name; `item` is what was measured.
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._state, self._message = RUNNING, ""
        self._began = time.monotonic()

    def measure(self, items: Mapping[str, Measurement]) -> None:
        """Makes the measurements in their order, until the time is up.

        A measurement returns its figures; `problems` among them are results that are wrong. One
        that raises is recorded with its message. At least one is made.
        """
        for number, name in enumerate(items):
            if number and self.seconds <= time.monotonic() - self._began:
                self._state = OUT_OF_TIME
                self._message = (
                    f"{len(items) - number} not measured: {', '.join([*items][number:])}"
                )
                break
            began = time.perf_counter()
            try:
                figures: Mapping[str, Any] = items[name]()
            except Exception as error:
                traceback.print_exc()
                figures = {"failed": describe(error)}
            row = {"item": name, **figures, "took": round(time.perf_counter() - began, 3)}
            self.rows.append(row)
            self.problems += row.get("problems", ())
            self.save()
        self.save()

    def finish(self, failure: str = "") -> None:
        """Writes the section's end. failure: message of an error that ended it."""
        failed = [f"{row['item']}: {row['failed']}" for row in self.rows if "failed" in row]
        if failure or failed:
            self._state = FAILED
            self._message = "; ".join(text for text in (failure, *failed, self._message) if text)
        elif self._state == RUNNING:
            self._state = DONE
        self.save()

    def save(self) -> None:
        """Writes everything measured so far to the section's file."""
        contents = {
            "section": self.name,
            "state": self._state,
            "message": self._message,
            "seconds": self.seconds,
            "seconds_used": round(time.monotonic() - self._began, 2),
            "problems": self.problems,
            "notes": self.notes,
            "facts": self.facts,
            "rows": self.rows,
        }
        write_json_file(self._file, contents)


def section_file(folder: Path, name: str) -> Path:
    """Returns the file of a section."""
    return folder / "sections" / f"{file_name(name)}.json"


def file_name(name: str) -> str:
    """Returns a section's name as a file name: a section
    from outside is called `module:attribute`."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def read_section(folder: Path, name: str) -> dict[str, Any] | None:
    """Reads the file of a section; None where there is none, or it cannot be read."""
    try:
        contents: dict[str, Any] = json.loads(
            section_file(folder, name).read_text(encoding="utf-8")
        )
    except (OSError, ValueError, RecursionError):
        return None
    return contents if isinstance(contents, dict) else None


def write_json_file(file: Path, contents: Any) -> None:
    """Writes JSON so that a reader finds the old contents or the new, never a part.
    NaN and infinity become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        return value.item() if hasattr(value, "item") else str(value)

    file.parent.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode(contents, enc_hook=plain)
    write_atomically(file, msgspec.json.format(encoded, indent=1).decode() + "\n")


def describe(error: BaseException) -> str:
    """Formats an error on one line: this package's own with its reason, any other
    with its type and place."""
    if isinstance(error, MeshwrightError):
        return " ".join(f"{error.asked}: {error.truth} (fix: {error.fix})".split())
    return " ".join(describe_failure(error).split())[:600]


def end_with_parent() -> None:
    """Makes Linux end this process when its parent ends: a killed benchmark leaves no process
    on the accelerator."""
    parent = os.getppid()
    if sys.platform.startswith("linux"):
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)
