"""Reporters that write files: metrics and events as JSON lines, also into buckets, which have no appending."""

import contextlib
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import IO, Any

from meshwright.activity import Activity
from meshwright.documents import LARGE, parse_json, read_text, write_atomically
from meshwright.errors import reason_of
from meshwright.reporters import Values
from meshwright.storage.attempts import attempt, may_pass


class JsonLines:
    """Reporter that writes one JSON object per line: `{"step": 7, "loss": 2.31, ...}`, with null for NaN and infinity.

    On a full disk the lines wait in memory until there is room; the next checkpoint then ends the run with an error
    that names the disk. Lines still waiting at `close` are lost, which a message on standard error states.
    """

    def __init__(self, file: Path, *, upto: int, every: int = 0):
        """Opens `file`, and drops its lines of steps after `upto`, which a resumed run writes again.

        every: most steps between two lines of metrics; where more are missing, `hole` and standard error name them.
        """
        self._path, self._waiting, self.hole = file, b"", ""
        steps = sorted({0, *self._open(upto), upto + 1})
        gaps = [
            (before, after)
            for before, after in itertools.pairwise(steps)
            if every and after - before > every
        ]
        if gaps:
            more = f", and in {len(gaps) - 1} more places" if len(gaps) > 1 else ""
            self.hole = f"lines of steps {gaps[0][0] + 1:g} to {gaps[0][1] - 1:g} are missing{more}"
            print(f"{file}: {self.hole}; the run goes on without them", file=sys.stderr)

    def _open(self, upto: int) -> list[float]:
        """Opens the file without the lines after `upto`; a file that cannot be read is kept under another name.

        Returns the steps of the lines that have a loss.
        """
        kept, steps = "", list[float]()
        try:
            if attempt(self._path.exists):
                text = attempt(self._read)
                lines = [line for line in text.splitlines() if _step_of(line) <= upto]
                kept, steps = (
                    "".join(f"{line}\n" for line in lines),
                    [_step_of(s) for s in lines if '"loss"' in s],
                )
        except OSError as error:
            if may_pass(error):
                raise  # another start reads it
            aside = self._path.with_name(
                f"{self._path.name}.unreadable-{time.strftime('%Y%m%d-%H%M%S')}"
            )
            print(f"{self._path}: {reason_of(error)}; moved to {aside.name}", file=sys.stderr)
            self._path.rename(aside)
        if kept or self._path.exists():
            write_atomically(self._path, kept)
        self._file: IO[bytes] = attempt(lambda: self._path.open("ab", buffering=0))
        return steps

    def _read(self) -> str:
        return self._path.read_text(encoding="utf-8", errors="replace")

    def rewind(self, step: int) -> None:
        """Drops the lines of steps after `step`, which are taken again."""
        self._drain()
        self._file.close()
        self._open(step)

    def write(self, step: int, values: Values) -> None:
        """Appends the line of a step."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._waiting += (json.dumps({"step": step, **finite}) + "\n").encode()
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        """Writes the lines that wait, and closes the file."""
        self._drain()
        if self._waiting:
            lost = self._waiting.count(b"\n")
            print(f"{self._file.name}: no room for its last {lost} lines", file=sys.stderr)
        self._file.close()


def _step_of(line: str) -> float:
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return math.inf  # a line cut off by a crash, or damaged


def last_start(out: Path) -> dict[str, Any]:
    """Returns the last `start` among the events of an output folder; nothing where it has none that can be read.

    Raises OSError and StorageError where it cannot be read for now: a run does not lose its identity for that.
    """
    try:
        text = read_text(out / "events.jsonl", LARGE)
    except (OSError, ValueError) as error:
        if may_pass(error):
            raise
        return {}
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict) and record.get("event") == "start":
                return record if isinstance(record.get("devices"), int) else {}
    return {}


class EventLog:
    """Reporter and watcher that appends what happened besides the steps to a file of JSON lines.

    Each line has `time` (Unix seconds), `step`, `event` (`start`, `roll back`, `end`, or the kind of an activity) and
    `seconds` of an activity. Nothing is ever dropped from it: a restart is a further `start`.
    """

    def __init__(self, file: Path):
        self._file, self._step = file, 0

    def start(self, step: int, **values: Any) -> None:
        """Appends that a run starts, or goes on, after `step`."""
        self._step = step
        self.add("start", **values)

    def add(self, event: str, **values: Any) -> None:
        """Appends a line. A disk without room loses it: the run is not about its log."""
        line = json.dumps(
            {"time": round(time.time(), 3), "step": self._step, "event": event, **values}
        )
        with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def write(self, step: int, values: Values) -> None:
        """Takes note of the step."""
        self._step = step

    def rewind(self, step: int) -> None:
        """Appends that the run returned to `step`."""
        self.add("roll back", to=step)
        self._step = step

    def began(self, activity: Activity) -> None:
        """Waits for its end."""

    def ended(self, activity: Activity, *, failed: bool) -> None:
        """Appends an activity with its seconds and its record."""
        if activity.step is not None:
            self._step = activity.step
        failure = {"failed": True} if failed else {}
        self.add(activity.kind, seconds=round(activity.seconds, 4), **failure, **activity.record)

    def close(self) -> None:
        """Appends the end; a run that was killed has none."""
        self.add("end")
