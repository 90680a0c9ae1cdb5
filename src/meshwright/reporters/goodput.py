"""Goodput of a run so far: the share of its time in steps that count, and where the rest went.

    begin                                                                         now, or the end
    | compile | steps, their data | save | steps | evaluate | ... gone ... | restore | steps
                                                        lost ------------------------------------>

    goodput = seconds in steps that count / seconds since the begin

The run itself (its summary and `metrics.jsonl`) and the page of its folder take it from the same lines.
Times of activities are sums over `events.jsonl`. Time in steps is the usual time of a step times the number of steps,
since with `--training.log-every` not every step has a line: of each hundred lines of `metrics.jsonl` the median, so that
a step that hangs is not taken for training. What is left is time in which no process ran, the starts of processes before
their first event, and what single steps took above the usual. The begin is the first event, after texts are prepared.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.documents import parse_json, real, step_of
from meshwright.errors import StorageError
from meshwright.reporters.followed import follow_lines
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
_READ = 1000
"""Lines of steps that are read of earlier starts."""


class StepTimes:
    """Usual times of the steps that have a line of metrics."""

    def __init__(self) -> None:
        self._blocks = 0
        """Complete blocks of lines."""
        self._medians = np.zeros(2)
        """Sums over the complete blocks of the median seconds of a step, and of its wait for data."""
        self._times: list[tuple[float, float]] = []
        """Of the lines after them: seconds of the step without its wait for data, and of that wait."""

    @property
    def is_empty(self) -> bool:
        """Whether no step has had a line."""
        return not self._blocks and not self._times

    def usual(self) -> tuple[float, float]:
        """Returns the usual seconds of a step without its wait for data, and of that wait."""
        sums = self._medians * _BLOCK
        lines = self._blocks * _BLOCK + len(self._times)
        if self._times:
            sums = sums + np.median(self._times, axis=0) * len(self._times)
        step, data = sums / lines
        return float(step), float(data)

    def add(self, values: Mapping[str, Any]) -> None:
        """Adds a line of `metrics.jsonl`."""
        seconds = real(values.get("step seconds"))
        if seconds is None:
            return
        data_seconds = real(values.get("input wait seconds")) or 0.0
        self._times.append((seconds - data_seconds, data_seconds))
        if len(self._times) == _BLOCK:
            self._medians = self._medians + np.median(self._times, axis=0)
            self._blocks += 1
            self._times = []


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


def read_times(out: Path) -> tuple[EventTimes, StepTimes]:
    """Returns the times that earlier starts of a run have left in its folder.

    Of the steps the last lines tell the usual time: a long run has millions of lines, and hosts wait for
    this. Where a file cannot be read, the times of the run begin with this start: its page names what
    is damaged.
    """
    events = EventTimes()
    steps = StepTimes()
    with contextlib.suppress(OSError, StorageError):
        _, lines = follow_lines(out / "events.jsonl").read()
        for record in _records((line or b"").decode("utf-8", "replace") for line in lines):
            events.add(record)
    with contextlib.suppress(OSError, StorageError):
        last = itertools.islice(reversed_lines(out / "metrics.jsonl"), _READ)
        for record in _records(last):
            steps.add(record)
    return events, steps


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
