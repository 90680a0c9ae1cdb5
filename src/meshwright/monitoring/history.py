"""History of a machine's counters, and the warnings that it gives.

          hour ago                                    now
count     |--- increase >= limit: a warning ----------|
rate      |--- median rate before ---|--- last 10 ----|   ten times as fast, and >= limit an hour
level                                   |- readings --|   all of them beyond the limit
"""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from meshwright.formatting import format_time
from meshwright.monitoring.counters import Counter, Rule, rule_of

HOUR = 3600.0
RECENT = 600.0
"""Seconds whose readings are kept for the report of a failure, and that a rate is of."""
_FASTER = 10.0
"""Times its usual rate that a rate is a warning."""
_FEWEST_OTHERS = 4
"""Parts of a kind of which a median is taken."""
_FEWEST = 20
"""Readings before the recent ones from which a usual rate is known."""


class Reading(NamedTuple):
    """Counters at one time."""

    at: float
    """Unix seconds."""
    values: dict[tuple[str, str], float]
    """Value by part and counter."""


@dataclasses.dataclass(frozen=True)
class Warning:
    """Counter that has left what a healthy machine has."""

    part: str
    name: str
    value: float
    """Increase of a count or rate, or a level."""
    text: str
    """Part, value, and what to do: `GPU 3 (...), NVLink 14: 505 NVLink recoveries in 60 min: cordon
    ...`."""


class History:
    """Readings of the last hour."""

    def __init__(self) -> None:
        self._readings: collections.deque[Reading] = collections.deque()
        self._warned: dict[tuple[str, str], tuple[float, float]] = {}
        """Time and value of the last warning of each counter."""

    def add(self, at: float, counters: Iterable[Counter]) -> list[Warning]:
        """Adds a reading; returns what is a warning in it and was not in the last hour,
        or has grown tenfold."""
        values = {(counter.part, counter.name): counter.value for counter in counters}
        self._readings.append(Reading(at, values))
        while self._readings[0].at < at - HOUR:
            self._readings.popleft()
        return [warning for warning in self._warnings() if self._is_news(at, warning)]

    def recent(self) -> list[Reading]:
        """Returns the readings of the last ten minutes."""
        last = self._readings[-1].at if self._readings else 0.0
        return [reading for reading in self._readings if reading.at >= last - RECENT]

    def _is_news(self, at: float, warning: Warning) -> bool:
        key = (warning.part, warning.name)
        before, value = self._warned.get(key, (-HOUR, 0.0))
        has_grown = rule_of(warning.name).kind in ("count", "rate") and warning.value >= 10 * value
        if at - before < HOUR and not has_grown:
            return False
        self._warned[key] = (at, warning.value)
        return True

    def _warnings(self) -> Iterator[Warning]:
        readings = list(self._readings)
        for part, name in readings[-1].values:
            rule = rule_of(name)
            if rule.kind == "below others":
                yield from self._below_others(rule, part, name)
                continue
            points = [
                (reading.at, reading.values[part, name])
                for reading in readings
                if (part, name) in reading.values
            ]
            found = _judge(rule, name, points)
            if found is not None:
                value, summary = found
                yield Warning(part, name, value, f"{part}: {summary}: {rule.advice}")

    def _below_others(self, rule: Rule, part: str, name: str) -> Iterator[Warning]:
        """Compares a part with the median of all in each
        of the last readings: the slowest sets the pace of all."""
        shares: list[float] = []
        for reading in list(self._readings)[-rule.readings :]:
            values = [value for (_, counter), value in reading.values.items() if counter == name]
            if (part, name) in reading.values and len(values) >= _FEWEST_OTHERS:
                shares.append(reading.values[part, name] / statistics.median(values))
        if len(shares) == rule.readings and max(shares) < rule.limit:
            value = self._readings[-1].values[part, name]
            summary = f"{name} {value:g} {rule.unit}, {shares[-1]:.0%} of the median of all"
            yield Warning(part, name, value, f"{part}: {summary}: {rule.advice}")


def _judge(
    rule: Rule, name: str, points: Sequence[tuple[float, float]]
) -> tuple[float, str] | None:
    """Returns the value of a warning and its summary; None where there is none."""
    if rule.kind == "count":
        increase = _increase(points)
        seconds = points[-1][0] - points[0][0]
        if increase >= rule.limit:
            return increase, f"{increase:g} {name} in {format_time(seconds)}"
        return None
    if rule.kind == "rate":
        return _judge_rate(rule, name, points)
    last = [Counter("", name, value) for _, value in points[-rule.readings :]]
    if len(last) == rule.readings and all(level_warning(counter) for counter in last):
        return last[-1].value, level_warning(last[-1])
    return None


def level_warning(counter: Counter) -> str:
    """Returns the summary of a level that is beyond its limit in one reading;
    empty for any other counter."""
    rule = rule_of(counter.name)
    is_high = rule.kind == "level" and counter.value >= rule.limit
    is_low = rule.kind == "low level" and counter.value <= rule.limit
    if is_high or is_low:
        return f"{counter.name} {counter.value:.4g} {rule.unit}".rstrip()
    return ""


def _judge_rate(
    rule: Rule, name: str, points: Sequence[tuple[float, float]]
) -> tuple[float, str] | None:
    """Compares the rate of the last ten minutes with the median of the rates before."""
    begin = points[-1][0] - RECENT
    earlier = [point for point in points if point[0] <= begin]
    recent = [point for point in points if point[0] >= begin]
    if len(earlier) < _FEWEST or len(recent) < 2:
        return None
    usual = statistics.median(_rate(pair) for pair in itertools.pairwise(earlier))
    rate = _rate(recent)
    if rate * HOUR >= rule.limit and rate >= _FASTER * usual:
        increase = _increase(recent)
        seconds = recent[-1][0] - recent[0][0]
        summary = (
            f"{increase:g} {name} in {format_time(seconds)}, {usual * HOUR:.3g} an hour before"
        )
        return increase, summary
    return None


def _rate(points: Sequence[tuple[float, float]]) -> float:
    """Returns the increase per second."""
    return _increase(points) / (points[-1][0] - points[0][0])


def _increase(points: Sequence[tuple[float, float]]) -> float:
    """Returns the growth of a count; one that is smaller than before was reset, and began anew."""
    increase = 0.0
    for (_, before), (_, after) in itertools.pairwise(points):
        increase += after - before if after >= before else after
    return increase
