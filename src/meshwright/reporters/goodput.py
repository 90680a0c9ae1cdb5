"""Goodput of a run so far: the share of its time in steps that count, and where the rest went.

    begin                                                                         now, or the end
    | compile | steps, their data | save | steps | evaluate | ... gone ... | restore | steps
                                                        lost ------------------------------------>

    goodput = seconds in steps that count / seconds since the begin

The run itself (its summary and `metrics.jsonl`) and the page of its folder take it from the same
lines. Times of activities are sums over `events.jsonl`. Time in steps is the usual time of a step
times the number of steps, since with `--training.log-every` not every step has a line: of each
hundred lines of `metrics.jsonl` the median, so that a step that hangs is not taken for training.
What is left is time in which no process ran, the starts of processes before their first event, and
what single steps took above the usual. The begin is the first event, after texts are prepared.

Each `start` in `events.jsonl` holds the sums until then,
so that the next start reads the lines after it alone.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.documents import parse_json, real, step_of
from meshwright.errors import StorageError
from meshwright.reporters.lines import reversed_lines

STEPS = "steps"
LOST = "steps taken again"
DATA = "waiting for data"
REST = "not running, starting or stalled"
_ACTIVITIES = {
    "compile": "compiling",
    "restore": "restoring",
    "save": "saving",
    "evaluate": "evaluating",
    "sample": "sampling",
    "initialise": "initializing",
    "first tensor": "looking for bad tensors",
    "replica": "replacing replicas",
}
"""Kind of an activity -> cause."""
CAUSES = (LOST, DATA, *_ACTIVITIES.values(), REST)
"""Where the time went that was not in steps that count."""
METRIC = "goodput"
METRICS = (METRIC, *(f"time {cause}" for cause in CAUSES))
"""Names in `metrics.jsonl`: shares of the time of the run so far."""
TIMES = "times"
"""Name of the sums in a `start` of `events.jsonl`."""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Time of a run by cause."""

    wall: float
    """Seconds from the first event of the run to its end, or to now."""
    seconds: Mapping[str, float]
    """Seconds by cause: `STEPS` first, then `CAUSES`."""

    @property
    def fraction(self) -> float:
        """Share of the time in steps that count."""
        return self.seconds[STEPS] / self.wall

    def metrics(self) -> dict[str, float]:
        """Returns the shares of the time as metrics: `goodput`, and each cause that took some."""
        values = {METRIC: self.fraction}
        for cause in CAUSES:
            if self.seconds[cause]:
                values[f"time {cause}"] = self.seconds[cause] / self.wall
        return values


class EventTimes:
    """Sums over the events of a run."""

    def __init__(self) -> None:
        self.first_time: float | None = None
        """Time (Unix seconds) at which the first thing that has an event began."""
        self.activity_seconds = collections.defaultdict[str, float](float)
        """Seconds of all activities by cause."""
        self.steps_lost = 0
        """Steps that were taken and had to be taken again."""

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds a line of `events.jsonl`."""
        if self.first_time is None:
            self.first_time = real(event.get("time"))
        kind = event.get("event")
        if kind in ("restore", "start"):
            self.steps_lost += _count(event.get("taken again"))
        if kind == "roll back":
            self.steps_lost += max(0, _count(event.get("step")) - _count(event.get("to")))
        if isinstance(kind, str) and kind in _ACTIVITIES:
            self.activity_seconds[_ACTIVITIES[kind]] += real(event.get("seconds")) or 0.0


_BLOCK = 100
"""Lines of which a median is taken."""
_READ = 300
"""Lines of steps that are read of an earlier start."""


class StepTimes:
    """Usual times of the steps that have a line of metrics."""

    def __init__(self) -> None:
        self.lines = 0
        """Lines of complete blocks."""
        self.sums = np.zeros(2)
        """Over these lines: usual seconds of a step without its wait for data, and of that wait."""
        self.times: list[Sequence[float]] = []
        """Of the lines after them: seconds of the step without its wait for data,
        and of that wait."""

    @property
    def is_empty(self) -> bool:
        """Whether no step has had a line."""
        return not self.lines and not self.times

    def usual(self) -> tuple[float, float]:
        """Returns the usual seconds of a step without its wait for data, and of that wait."""
        lines, sums = self._with_the_last()
        step, data = sums / lines
        return float(step), float(data)

    def _with_the_last(self) -> tuple[int, np.ndarray]:
        """Returns lines and sums with those of the block that is not complete."""
        if not self.times:
            return self.lines, self.sums
        count = len(self.times)
        return self.lines + count, self.sums + count * np.median(self.times, axis=0)

    def add(self, values: Mapping[str, Any]) -> None:
        """Adds a line of `metrics.jsonl`."""
        seconds = real(values.get("step seconds"))
        if seconds is None:
            return
        data_seconds = real(values.get("input wait seconds")) or 0.0
        self.times.append((seconds - data_seconds, data_seconds))
        if len(self.times) == _BLOCK:
            self.lines, self.sums = self._with_the_last()
            self.times = []


@dataclasses.dataclass
class RunTimes:
    """Times of a run so far, from the lines of its folder."""

    events: EventTimes = dataclasses.field(default_factory=EventTimes)
    steps: StepTimes = dataclasses.field(default_factory=StepTimes)

    def to_json(self) -> dict[str, Any]:
        """Returns the sums, for the record of a start."""
        step_seconds, data_seconds = map(float, self.steps.sums)
        return {
            "first": self.events.first_time,
            "activities": dict(self.events.activity_seconds),
            "steps lost": self.events.steps_lost,
            "lines": self.steps.lines,
            "step seconds": step_seconds,
            "data seconds": data_seconds,
            "last": [[round(value, 6) for value in line] for line in self.steps.times],
        }

    @classmethod
    def from_json(cls, record: Any) -> "RunTimes | None":
        """Returns the sums in the record of a start; None where it has none, or what is no sum."""
        record = record if isinstance(record, dict) else {}
        activities, last = record.get("activities"), record.get("last")
        if not isinstance(activities, dict) or not isinstance(last, list):
            return None
        seconds = _numbers(activities.values())
        pairs = [_numbers(line) if isinstance(line, list) else [] for line in last]
        numbers = _numbers(record.get(name) for name in _SUMS)
        are_pairs = all(len(pair) == 2 for pair in pairs)
        if len(seconds) < len(activities) or len(numbers) < len(_SUMS) or not are_pairs:
            return None
        is_negative = any(number < 0 for number in (*seconds, *numbers))
        if is_negative or len(pairs) >= _BLOCK:  # `to_json` writes neither
            return None
        first, lost, lines, step_seconds, data_seconds = numbers
        times = cls()
        times.events.first_time = first
        times.events.activity_seconds.update(zip(activities, seconds, strict=True))
        times.events.steps_lost = int(lost)
        times.steps.lines = int(lines)
        times.steps.sums = np.array([step_seconds, data_seconds])
        times.steps.times.extend(pairs)
        return times


_SUMS = ("first", "steps lost", "lines", "step seconds", "data seconds")
"""Numbers in the record of a start."""


def _numbers(values: Iterable[Any]) -> list[float]:
    """Returns those values that are numbers."""
    return [number for number in map(real, values) if number is not None]


def split_time(events: EventTimes, steps: StepTimes, step: int, until: float) -> Goodput | None:
    """Returns the time of a run by cause; None before it has a time and a step.

    step: steps that count.  until: Unix seconds.
    """
    if events.first_time is None or steps.is_empty or until <= events.first_time:
        return None
    wall = until - events.first_time
    step_seconds, data_seconds = steps.usual()
    seconds = {
        STEPS: step_seconds * step,
        LOST: step_seconds * events.steps_lost,
        DATA: data_seconds * (step + events.steps_lost),
    }
    for cause in _ACTIVITIES.values():
        seconds[cause] = events.activity_seconds[cause]
    seconds[REST] = wall - sum(seconds.values())
    return Goodput(wall, seconds)


def read_times(out: Path) -> RunTimes:
    """Returns the times that earlier starts of a run have left in its folder.

    Read from the end to the last start that has sums. Of the steps after it the last lines tell the
    usual time: a long run has millions of lines, and hosts wait for this. Where a file cannot be
    read, or is a pipe or a link, the times of the run begin with this start: its page names what is
    damaged.
    """
    times = RunTimes()
    since = []
    step = 0.0
    with contextlib.suppress(OSError, StorageError, ValueError):
        for record in _records(reversed_lines(out / "events.jsonl")):
            since.append(record)
            sums = RunTimes.from_json(record.get(TIMES)) if record.get("event") == "start" else None
            if sums is not None:
                times, step = sums, record["step"]
                break
    for record in reversed(since):
        times.events.add(record)
    with contextlib.suppress(OSError, StorageError, ValueError):
        lines = _records(reversed_lines(out / "metrics.jsonl"))
        new = itertools.takewhile(lambda line: line["step"] > step, lines)
        for record in reversed(list(itertools.islice(new, _READ))):
            times.steps.add(record)
    return times


def _records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the lines that are objects with a step."""
    for line in lines:
        record = None
        with contextlib.suppress(ValueError):
            record = parse_json(line)
        if isinstance(record, dict) and step_of(record) is not None:
            yield record


def _count(value: Any) -> int:
    number = real(value)
    return int(number) if number is not None and number >= 0 else 0
