"""Output folders of runs, read as data while they grow: metrics, events, configuration, samples.

Nothing here runs code that a folder names, and a file that is a link out of its folder is left out.
"""

import collections
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.documents import check_inside, parse_json, read_json, real, step_of
from meshwright.errors import ConfigError
from meshwright.monitoring.processes import NAME as PROCESSES_FILE
from meshwright.reporters.followed import follow_lines
from meshwright.reporters.goodput import EventTimes, StepTimes
from meshwright.reporters.health import NAME as HEALTH_FILE
from meshwright.reporters.health import History
from meshwright.storage.paths import bucket_path, in_bucket

_DOCUMENTS = ("run.json", "foresight.json", "profile.json", PROCESSES_FILE)
_METRICS = "metrics.jsonl"
_EVENTS = "events.jsonl"
_STRETCHES = 1000
"""Most stretches of a curve; each has up to three points."""
_RECENT = 500
"""Last values of a curve that are kept as they are."""
_MOST_CURVES = 500
"""Most metrics of a run; a run has some twenty."""
_OF_WATCHES = ("alarm", "machine")
"""Events that no progress of the run causes: they come also where it hangs."""
_RECENT_EVENTS = 400
"""Last events that are kept, whatever they are."""
_EVENTS_OF_A_KIND = 2000
"""Most events of a kind that are kept, spread over the run."""
_TEXTS = 12
"""Last samples that keep their text."""

_Point = tuple[int, float, float]
"""Number of a point in its curve, its step and its value."""


class Curve:
    """Values of one metric by step, in the order of the file.

    Its memory does not grow with the run.
    Up to `2 * _STRETCHES` points all are kept. Of more, each stretch of equally many points keeps
    its first, its least and its greatest, and the last point of all is kept; when there are too
    many stretches, neighbors become one.
    """

    def __init__(self) -> None:
        self.count = 0
        """Points so far."""
        self.total = 0.0
        """Sum of the finite values."""
        self.recent: collections.deque[float] = collections.deque(maxlen=_RECENT)
        """Last values; NaN where the file has null: a loss that was not finite."""
        self.last_step = 0
        self._length = 1
        """Points of a stretch."""
        self._stretches: list[list[_Point]] = []
        self._open: list[_Point] = []
        """Points of the stretch that is not full."""

    def add(self, step: int, value: float) -> None:
        """Appends a point."""
        self._open.append((self.count, step, value))
        self.count += 1
        self.recent.append(value)
        self.last_step = step
        if math.isfinite(value):
            self.total += value
        if len(self._open) == self._length:
            self._stretches.append(_ends(self._open))
            self._open = []
            if len(self._stretches) == 2 * _STRETCHES:
                self._join_neighbors()

    def _join_neighbors(self) -> None:
        pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
        self._stretches = [_ends([*first, *second]) for first, second in pairs]
        self._length *= 2

    def _points(self) -> list[_Point]:
        found = [point for stretch in self._stretches for point in stretch]
        if self._open:
            found += _ends(self._open)
            if found[-1] != self._open[-1]:
                found.append(self._open[-1])
        return found

    @property
    def steps(self) -> list[float]:
        """Steps of the points that are kept."""
        return [step for _, step, _ in self._points()]

    @property
    def values(self) -> list[float]:
        """Values of the points that are kept; NaN where the file has null."""
        return [value for _, _, value in self._points()]


def _ends(points: Sequence[_Point]) -> list[_Point]:
    """Returns the first, the least and the greatest of some points, in their order."""
    if len(points) <= 2:
        return list(points)
    kept = {points[0][0]: points[0]}
    finite = [point for point in points if math.isfinite(point[2])]
    if finite:
        for chosen in (min(finite, key=_value_of), max(finite, key=_value_of)):
            kept[chosen[0]] = chosen
    return [kept[number] for number in sorted(kept)]


def _value_of(point: _Point) -> float:
    return point[2]


class RunFolder:
    """One output folder. `refresh` reads what is new in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = folder.resolve().name
        self.curves: dict[str, Curve] = {}
        self.times = Curve()
        """Unix seconds at which each step was reported."""
        self.step_times = StepTimes()
        self.left_out: collections.Counter[str] = collections.Counter()
        """What could not be read, by what it is, with its number."""
        self._metrics = follow_lines(folder / _METRICS)
        self._log = follow_lines(folder / _EVENTS)
        self._health_lines = follow_lines(folder / HEALTH_FILE)
        self.health = History()
        """Health of the tensors by step."""
        self._forget_events()

    def _forget_events(self) -> None:
        self.event_counts: collections.Counter[str] = collections.Counter()
        """Number of the events of each kind."""
        self.samples: collections.deque[dict[str, Any]] = collections.deque(maxlen=_TEXTS)
        """Last samples, with their text; no other event has one."""
        self.last_event: dict[str, Any] = {}
        """Last event that is a sign of the run itself."""
        self.open_activity: dict[str, Any] = {}
        """Line `began` of the activity that is under way; empty where none is."""
        self.longest: dict[str, float] = {}
        """Longest seconds of each kind of activity."""
        self.event_times = EventTimes()
        self._of_a_kind: dict[str, _Spread] = collections.defaultdict(_Spread)
        self.recent_events: collections.deque[dict[str, Any]] = collections.deque(
            maxlen=_RECENT_EVENTS
        )

    def refresh(self) -> None:
        """Reads what was written since the last call."""
        anew, lines = self._metrics.read()
        if anew:
            self.curves = {}
            self.times = Curve()
            self.step_times = StepTimes()
            self._forget_left_out(_METRICS)
        for record in self._records(lines, _METRICS):
            self._add_metrics(record)
        anew, lines = self._log.read()
        if anew:
            self._forget_events()
            self._forget_left_out(_EVENTS)
        for record in self._records(lines, _EVENTS):
            self._add_event(record)
        anew, lines = self._health_lines.read()
        if anew:
            self.health = History()
            self._forget_left_out(HEALTH_FILE)
        self.left_out += self.health.read(self._records(lines, HEALTH_FILE))

    def _forget_left_out(self, file: str) -> None:
        for what in [what for what in self.left_out if file in what]:
            del self.left_out[what]

    def _records(self, lines: Iterable[bytes | None], file: str) -> Iterator[dict[str, Any]]:
        """Yields the objects that have a step; counts the lines that have none."""
        for line in lines:
            if line is None:
                self.left_out[f"lines of {file} longer than 1 MiB"] += 1
                continue
            if not line.strip():
                continue
            try:
                record = parse_json(line.decode("utf-8", "replace"))
            except ValueError:
                record = None
            if isinstance(record, dict) and step_of(record) is not None:
                yield record
            else:
                self.left_out[f"damaged lines of {file}"] += 1

    def _add_metrics(self, record: dict[str, Any]) -> None:
        step = int(record.pop("step"))
        self.step_times.add(record)
        time = real(record.pop("time", None))
        if time is not None and "loss" in record:
            self.times.add(step, time)
        for name, value in record.items():
            # The writer has null for what is not finite; a number that is neither comes from
            # elsewhere.
            number = math.nan if value is None else real(value)
            if number is None:
                continue
            curve = self.curves.get(name)
            if curve is None:
                if len(self.curves) == _MOST_CURVES:
                    self.left_out[f"values in {_METRICS} of more than {_MOST_CURVES} metrics"] += 1
                    continue
                curve = self.curves[name] = Curve()
            curve.add(step, number)

    def _add_event(self, record: dict[str, Any]) -> None:
        kind = str(record.get("event", ""))
        self.event_times.add(record)
        if kind == "sample":
            self.samples.append(record)
        record = {name: value for name, value in record.items() if name != "text"}
        if kind not in _OF_WATCHES:
            self.last_event = record
        if kind == "began":
            self.open_activity = record
            return
        activity = self.open_activity.get("activity")
        if activity == kind or kind in ("start", "end", "roll back"):
            self.open_activity = {}
        seconds = real(record.get("seconds"))
        if seconds is not None and len(self.longest) < _MOST_CURVES:
            self.longest[kind] = max(seconds, self.longest.get(kind, 0.0))
        if len(self.event_counts) < _MOST_CURVES or kind in self.event_counts:
            self.event_counts[kind] += 1
            self._of_a_kind[kind].add(record)
        self.recent_events.append(record)

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """Returns the events of a kind, in order.

        Of very many, those spread over the run, and the last.
        """
        return self._of_a_kind[kind].events() if kind in self._of_a_kind else []

    def last_written(self, name: str) -> float | None:
        """Returns the time at which a file of the folder was written.

        None without the file or its time.
        """
        if in_bucket(self.folder):
            return None
        try:
            return (self.folder / name).lstat().st_mtime
        except OSError:
            return None

    @property
    def version(self) -> tuple[Any, ...]:
        """Numbers that change when what is shown does."""
        found: list[Any] = [
            self._metrics.version,
            self._log.version,
            self._health_lines.version,
        ]
        for name in _DOCUMENTS:
            file = self.folder / name
            try:
                if in_bucket(file):
                    found.append(bucket_path(file).generation())
                else:
                    status = file.stat()
                    found.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                found.append(None)
        return tuple(found)

    def document(self, name: str) -> dict[str, Any]:
        """Returns a JSON object of the folder; empty where there is none, or it is damaged."""
        try:
            check_inside(self.folder, [self.folder / name])
            value = read_json(self.folder / name)
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def bad_steps(self) -> list[tuple[int, str]]:
        """Returns the steps with a folder of evidence, and the reason that each gives."""
        found = []
        for folder in sorted(self.folder.glob("evidence-step-*")):
            text = folder.name.removeprefix("evidence-step-").partition(".")[0]
            if text.isdigit():
                record = self.document(f"{folder.name}/metrics.json")
                found.append((int(text), str(record.get("reason", ""))))
        return sorted(found)


class _Spread:
    """Events spread evenly over all that were added, and the last."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []
        self._count = 0
        self._every = 1
        self._last: dict[str, Any] = {}

    def add(self, event: dict[str, Any]) -> None:
        """Appends an event."""
        if self._count % self._every == 0:
            self.kept.append(event)
            if len(self.kept) > _EVENTS_OF_A_KIND:
                self.kept = self.kept[::2]
                self._every *= 2
        self._last = event
        self._count += 1

    def events(self) -> list[dict[str, Any]]:
        """Returns what is kept."""
        if self.kept and self.kept[-1] is not self._last:
            return [*self.kept, self._last]
        return list(self.kept)


def objects(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the JSON objects in a list of a document; none where it has no such list."""
    rows = document.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list | tuple) else []


def open_folders(paths: Iterable[Path]) -> list[RunFolder]:
    """Opens output folders, and names those by their paths that have one name.

    Raises ConfigError for a folder that has neither a Run nor metrics.
    """
    folders = []
    for path in paths:
        if not any((path / name).is_file() for name in ("run.json", "metrics.jsonl")):
            truth = (
                "it has no run.json and no metrics.jsonl"
                if path.is_dir()
                else "there is no such folder"
            )
            raise ConfigError(
                f"view {path}", truth, "the output folder of a training, OUT of train --out OUT"
            )
        folders.append(RunFolder(path))
        folders[-1].refresh()
    counts = collections.Counter(folder.name for folder in folders)
    for folder in folders:
        if counts[folder.name] > 1:
            folder.name = str(folder.folder)
    return folders


def flat_fields(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns nested JSON values by dotted name, each as text.

    A mesh is one field.
    """
    found: dict[str, str] = {}
    for name, value in record.items():
        if name == "mesh" and isinstance(value, Mapping):
            found[f"{prefix}{name}"] = _mesh_text(value)
        elif isinstance(value, Mapping):
            found |= flat_fields(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _value_text(value)
    return found


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _mesh_text(mesh: Mapping[str, Any]) -> str:
    """Formats the degrees of a mesh other than 1: `fsdp=4,tensor=2`."""
    crosses_slices = mesh.get("slices", 1) != 1
    degrees = []
    for axis, degree in mesh.items():
        if degree in (1, None) or (axis == "dcn_axis" and not crosses_slices):
            continue
        degrees.append(f"{axis}={degree}")
    return ",".join(degrees) or "data=1"
