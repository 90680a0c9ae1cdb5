"""Reporters that write metrics and events as JSON lines.

Buckets, to which nothing can be appended, get segments.
"""

import contextlib
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.activity import Activity
from meshwright.documents import parse_json, step_of
from meshwright.errors import reason_of
from meshwright.reporters import Values
from meshwright.reporters.goodput import TIMES, Goodput, read_times, split_time
from meshwright.reporters.lines import Lines, open_lines, reversed_lines
from meshwright.storage.attempts import may_pass
from meshwright.storage.removing import rename


class JsonLines:
    """Reporter that writes one JSON object per line: `{"step": 7, "time": 1796000000.0, "loss":
    2.31, ...}`.

    `time` (Unix seconds) is that of writing. NaN and infinity become null.
    On a full disk the lines wait in memory until there is room; the next checkpoint then ends the
    run with an error that names the disk. Lines still waiting at `close` are lost, which a message
    on standard error states.
    """

    def __init__(self, file: Path, *, upto: int, every: int = 0, since: Any = None):
        """Opens `file` and drops its lines of steps after `upto`.

        A resumed run writes those again.
        every: most steps between two lines of metrics; where more are missing, `hole` and standard
        error name them.
        since: `checked` of an earlier start; lines before it are not read again.
        """
        self._path, self._waiting, self.hole = file, b"", ""
        self._file = self._open(upto)
        if every:
            self.hole = self._find_hole(upto, every, since)
        self.checked = [self._file.position, upto]
        """Position in the file until which lines were looked for, and the step there, as JSON
        values."""
        if self.hole:
            print(f"{file}: {self.hole}; the run goes on without them", file=sys.stderr)

    def _open(self, upto: int) -> Lines:
        """Opens the file without the lines after `upto`.

        A file that cannot be read is kept under another name.
        """
        try:
            lines = open_lines(self._path)
        except OSError as error:
            if may_pass(error):
                raise  # another start reads it
            aside = self._path.with_name(
                f"{self._path.name}.unreadable-{time.strftime('%Y%m%d-%H%M%S')}"
            )
            print(f"{self._path}: {reason_of(error)}; moved to {aside.name}", file=sys.stderr)
            rename(self._path, aside, below=self._path.parent)
            lines = open_lines(self._path)
        lines.cut(lambda line: step_of_line(line) <= upto)
        return lines

    def _find_hole(self, upto: int, every: int, since: Any) -> str:
        """Names the steps without a line of metrics after `since`; "" where there are none."""
        position, before = 0, 0.0
        with contextlib.suppress(TypeError, ValueError):
            known, reached = (int(value) for value in since)
            if 0 <= known <= self._file.position and reached <= upto:
                position, before = known, float(reached)
        gaps = list[tuple[float, float]]()
        steps = (step_of_line(line) for line in self._file.lines(position) if '"loss"' in line)
        for step in itertools.chain(steps, [upto + 1]):
            if before + every < step <= upto + 1:
                gaps.append((before, step))
            if step <= upto + 1:
                before = max(before, step)
        if not gaps:
            return ""
        more = f", and in {len(gaps) - 1} more places" if len(gaps) > 1 else ""
        return f"lines of steps {gaps[0][0] + 1:g} to {gaps[0][1] - 1:g} are missing{more}"

    def _read(self) -> str:
        return self._path.read_text(encoding="utf-8", errors="replace")

    def rewind(self, step: int) -> None:
        """Drops the lines of steps after `step`, which are taken again."""
        self._drain()
        self._file.cut(lambda line: step_of_line(line) <= step)

    def write(self, step: int, values: Values) -> None:
        """Appends the line of a step."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step, "time": round(time.time(), 3), **finite}
        self._waiting += (json.dumps(record) + "\n").encode()
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


def step_of_line(line: str) -> float:
    """Returns the step of a line; infinity for one without."""
    step = None
    with contextlib.suppress(ValueError):
        record = parse_json(line)
        step = step_of(record) if isinstance(record, dict) else None
    return math.inf if step is None else step  # a line cut off by a crash, or damaged


def last_start(out: Path) -> dict[str, Any]:
    """Returns the last `start` among the events of an output folder.

    Empty without one that can be read.
    Raises OSError and StorageError where it cannot be read for now: a run does not lose its
    identity for that.
    """
    try:
        for line in reversed_lines(out / "events.jsonl"):
            with contextlib.suppress(ValueError):
                record = parse_json(line)
                if isinstance(record, dict) and record.get("event") == "start":
                    return record if isinstance(record.get("devices"), int) else {}
    except (OSError, ValueError) as error:
        if may_pass(error):
            raise
    return {}


def last_step(out: Path) -> int:
    """Returns the last step in the metrics of an output folder.

    0 without metrics that can be read.
    Raises OSError and StorageError where they cannot be read for now.
    """
    try:
        for line in reversed_lines(out / "metrics.jsonl"):
            step = step_of_line(line)
            if math.isfinite(step):
                return int(step)
    except (OSError, ValueError) as error:
        if may_pass(error):
            raise
    return 0


class EventLog:
    """Reporter and watcher that appends what happened besides the steps to a file of JSON lines.

    Each line has `time` (Unix seconds), `step`, `event` (`start`, `roll back`, `end`, `began`, or
    the kind of an activity) and `seconds` of an activity. An activity has a line when it begins
    (`began`, with its kind as `activity`), so that a reader knows what a run is about that takes no
    steps. Nothing is ever dropped: a restart is a further `start`.
    """

    def __init__(self, file: Path):
        self._path, self._step = file, 0
        self._file: Lines | None = None
        """Stays open: where the folder is gone, no other file is made in its place."""
        self._end_of_torn = ""
        """What ends the last line, of which a full disk has taken a part."""
        self._lock = threading.Lock()
        """Held while a line is written: the watch of the machine adds lines from its own thread."""
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        """Called with each event, in the thread that adds it."""
        self._times = read_times(file.parent)

    def start(self, step: int, **values: Any) -> None:
        """Appends that a run starts, or goes on, after `step`."""
        self._step = step
        self.add("start", **values, **{TIMES: self._times.to_json()})

    def add(self, event: str, **values: Any) -> None:
        """Appends a line. A disk without room loses it: the run is not about its log."""
        record = {"time": round(time.time(), 3), "step": self._step, "event": event, **values}
        line = json.dumps(record)
        with self._lock, contextlib.suppress(OSError):
            self._times.events.add(record)
            if self._file is None:
                self._file = open_lines(self._path)
            data = f"{self._end_of_torn}{line}\n".encode()
            self._end_of_torn = "" if self._file.write(data) == len(data) else "\n"
        for listener in self.listeners:
            listener(record)

    def write(self, step: int, values: Values) -> None:
        """Takes note of the step and its time."""
        self._step = step
        self._times.steps.add(values)

    def goodput(self, step: int) -> Goodput | None:
        """Returns the goodput of the run until now, after `step` steps; None before it is known."""
        return split_time(self._times.events, self._times.steps, step, time.time())

    def rewind(self, step: int) -> None:
        """Appends that the run returned to `step`."""
        self.add("roll back", to=step)
        self._step = step

    def began(self, activity: Activity) -> None:
        """Appends that an activity begins."""
        if activity.step is not None:
            self._step = activity.step
        self.add("began", activity=activity.kind, doing=activity.doing)

    def ended(self, activity: Activity, *, failed: bool) -> None:
        """Appends an activity with its seconds and its record."""
        if activity.step is not None:
            self._step = activity.step
        failure = {"failed": True} if failed else {}
        self.add(activity.kind, seconds=round(activity.seconds, 4), **failure, **activity.record)

    def close(self) -> None:
        """Appends the end; a run that was killed has none."""
        self.add("end")
        self.release()

    def release(self) -> None:
        """Closes the file, if it is open."""
        with self._lock:
            file = self._file
            self._file = None
        if file is not None:
            file.close()
