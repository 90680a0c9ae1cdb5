"""Goodput of a run so far: the share of its time in steps that count, and where the rest went.

    begin                                                                         now, or the end
    | tokenize | compile | steps, their data | save | steps | evaluate | ... gone ... | restore | steps
                                                        lost ------------------------------------>

    goodput = seconds in steps that count / seconds since the begin

The run itself (its summary and `metrics.jsonl`) and the page of its folder take it from the same lines.
Times of activities are sums over `events.jsonl`. Time in steps is the mean of `metrics.jsonl` times the number of steps,
since with `--training.log-every` not every step has a line. What is left is time in which no process ran, and the
starts of processes before their first event.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import parse_json, real, step_of
from meshwright.errors import StorageError
from meshwright.reporters.followed import follow_lines

STEPS = "steps"
LOST = "steps taken again"
DATA = "waiting for data"
REST = "not running or starting"
_ACTIVITIES = {
    "compile": "compiling",
    "restore": "restoring",
    "save": "saving",
    "evaluate": "evaluating",
    "sample": "sampling",
    "tokenise": "tokenizing",
    "initialise": "initializing",
}
"""Kind of an activity -> cause."""
CAUSES = (LOST, DATA, *_ACTIVITIES.values(), REST)
"""Where the time went that was not in steps that count."""
METRIC = "goodput"
METRICS = (METRIC, *(f"time {cause}" for cause in CAUSES))
"""Names in `metrics.jsonl`: shares of the time of the run so far."""


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
        if kind == "restore":
            self.steps_lost += _count(event.get("taken again"))
        if kind == "roll back":
            self.steps_lost += max(0, _count(event.get("step")) - _count(event.get("to")))
        if isinstance(kind, str) and kind in _ACTIVITIES:
            self.activity_seconds[_ACTIVITIES[kind]] += real(event.get("seconds")) or 0.0


@dataclasses.dataclass
class StepTimes:
    """Sums over the steps that have a line of metrics."""

    lines: int = 0
    seconds: float = 0.0
    """Of those steps, their waits for data included."""
    data_seconds: float = 0.0
    """Of their waits for data."""

    def add(self, values: Mapping[str, Any]) -> None:
        """Adds a line of `metrics.jsonl`."""
        seconds = real(values.get("step seconds"))
        if seconds is None:
            return
        self.lines += 1
        self.seconds += seconds
        self.data_seconds += real(values.get("input wait seconds")) or 0.0


def split_time(events: EventTimes, steps: StepTimes, step: int, until: float) -> Goodput | None:
    """Returns the time of a run by cause; None before it has a time and a step.

    step: steps that count.  until: Unix seconds.
    """
    if events.first_time is None or not steps.lines or until <= events.first_time:
        return None
    wall = until - events.first_time
    data_seconds = steps.data_seconds / steps.lines
    own_seconds = steps.seconds / steps.lines - data_seconds
    seconds = {
        STEPS: own_seconds * step,
        LOST: own_seconds * events.steps_lost,
        DATA: data_seconds * (step + events.steps_lost),
    }
    for cause in _ACTIVITIES.values():
        seconds[cause] = events.activity_seconds[cause]
    seconds[REST] = wall - sum(seconds.values())
    return Goodput(wall, seconds)


def read_times(out: Path) -> tuple[EventTimes, StepTimes]:
    """Returns the sums over the lines that earlier starts of a run have left in its folder."""
    events = EventTimes()
    steps = StepTimes()
    for record in _records(out / "events.jsonl"):
        events.add(record)
    for record in _records(out / "metrics.jsonl"):
        steps.add(record)
    return events, steps


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file that are objects with a step.

    Where it cannot be read, the times of the run begin with this start: its page names what is damaged.
    """
    with contextlib.suppress(OSError, StorageError):
        _, lines = follow_lines(file).read()
        for line in lines:
            record = None
            with contextlib.suppress(ValueError):
                record = parse_json((line or b"").decode("utf-8", "replace"))
            if isinstance(record, dict) and step_of(record) is not None:
                yield record


def _count(value: Any) -> int:
    number = real(value)
    return int(number) if number is not None and number >= 0 else 0
