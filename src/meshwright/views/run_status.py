"""Status of a run from its output folder.

Whether it runs, what it does, how late it is, what restarts lost.
One description; the page, the terminal and JSON render it.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

from meshwright.documents import real
from meshwright.formatting import format_step, format_time
from meshwright.trainer.heartbeat import count_age
from meshwright.views.run_folder import RunFolder

State = Literal["unknown", "ended", "starting", "busy", "running", "late", "silent"]
_BEATEN = 20.0
"""Seconds without a count in `.lock`, which counts every 5 s, after which its process is gone."""
_LATE = 5.0
"""Expected times after which a step is late, and the seconds that it is given in any case."""
_SILENT = 20.0
"""Expected times after which nothing more is expected."""
_QUIET = 60.0
"""Seconds without any sign before which no run is silent."""
_BUCKET_PERIOD = 30.0
"""Seconds for which lines wait before they are put into a bucket."""
_UNKNOWN_ACTIVITY = 1800.0
"""Seconds that an activity may take that no earlier one of its kind tells about: compiling,
restoring."""
_DOING = {
    "restore": "restoring",
    "compile": "compiling",
    "evaluate": "evaluating",
    "save": "saving",
    "sample": "sampling",
    "initialise": "initializing",
}


@dataclasses.dataclass(frozen=True)
class Restart:
    """Start of a run that had steps before, or a return to a checkpoint within one."""

    step: int
    """Step after which it goes on."""
    lost: int | None
    """Steps that were taken and are taken again; None where the log does not tell."""
    kind: Literal["restart", "rolled back"]

    @property
    def label(self) -> str:
        """The restart in a few words: `restart at step 400, 37 steps lost`."""
        words = "restart at" if self.kind == "restart" else "rolled back to"
        lost = ""
        if self.lost is not None:
            lost = f", {self.lost:,} step{'s' * (self.lost != 1)} lost"
        return f"{words} step {self.step:,}{lost}"


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """Activity of a run at one moment."""

    state: State
    summary: str
    """The state in a sentence, with the ages it follows from."""
    word: str
    """The state in one word; while the run does something else than steps, that: `compiling`."""
    step: int
    """Last step that was reported."""
    steps: int | None
    """Steps of the whole run."""
    step_seconds: float | None
    """Median of the last steps."""
    age: float | None
    """Seconds since the last step was reported."""
    seconds_left: float | None
    """Time to the last step, at the median; None unless steps come."""
    restarts: Sequence[Restart]

    @property
    def steps_lost(self) -> int:
        """Steps that were taken more than once."""
        return sum(restart.lost or 0 for restart in self.restarts)

    @property
    def progresses(self) -> bool:
        """Whether something is still expected of the run."""
        return self.state not in ("ended", "silent")

    def to_json(self) -> dict[str, Any]:
        """Returns the status as JSON values."""
        return {**dataclasses.asdict(self), "steps_lost": self.steps_lost}

    def __str__(self) -> str:
        of = f" of {self.steps:,}" if self.steps is not None else ""
        lines = [f"{self.summary}; step {self.step:,}{of}"]
        if self.seconds_left is not None:
            lines[0] += f", {format_time(self.seconds_left)} left at the median"
        lines += [restart.label for restart in self.restarts[-3:]]
        return "\n".join(lines)


def median_of(folder: RunFolder, name: str) -> float | None:
    """Returns the median of the last values of a metric; None where it has no finite one."""
    curve = folder.curves.get(name)
    values = [value for value in curve.recent if math.isfinite(value)] if curve else []
    return statistics.median(values) if values else None


def run_status(folder: RunFolder, now: float | None = None) -> RunStatus:
    """Returns the status of the run in a folder. now: Unix seconds; by default the clock's."""
    now = time.time() if now is None else now
    loss = folder.curves.get("loss")
    done = loss.last_step if loss is not None else 0
    training = folder.document("run.json").get("training")
    steps, every = None, 1
    if isinstance(training, dict):
        steps = _whole(training.get("steps"))
        every = _whole(training.get("log_every")) or 1
    median = median_of(folder, "step seconds")
    age = _age_of_step(folder, done, median, now)
    state, word, summary = _state(folder, age, median, every, now)
    left = None
    if state == "running" and median is not None and steps is not None and done < steps:
        left = median * (steps - done)
    return RunStatus(
        state=state,
        summary=summary,
        word=word,
        step=done,
        steps=steps,
        step_seconds=median,
        age=age,
        seconds_left=left,
        restarts=restarts_of(folder),
    )


def _whole(value: Any) -> int | None:
    number = real(value)
    return int(number) if number is not None and number > 0 else None


def _age_of_step(folder: RunFolder, done: int, median: float | None, now: float) -> float | None:
    """Returns the seconds since the last step was reported.

    A bucket gives no times: there the last event tells when its step was, and the median how long
    the steps after it took.
    """
    if not done:
        return None
    written = folder.last_written("metrics.jsonl")
    if written is None:
        written = real(folder.last_event.get("time"))
        at = real(folder.last_event.get("step"))
        if written is None:
            return None
        if median is not None and at is not None and done > at:
            written += median * (done - at)
    return max(0.0, now - written)


def _state(
    folder: RunFolder, age: float | None, median: float | None, every: int, now: float
) -> tuple[State, str, str]:
    """Returns the state, its word, and a sentence."""
    last = folder.last_event
    if not folder.event_counts and not folder.open_activity:
        return "unknown", "unknown", "no events.jsonl tells whether it runs"
    ended = _ago(last, now)
    if last.get("event") == "end":
        return "ended", "ended", f"ended {_ago_text(ended)}"
    beat = count_age(folder.folder, now)
    dead = beat is not None and beat > _BEATEN
    alive = beat is not None and not dead
    gone = f"; its process has not counted in .lock for {format_time(beat or 0.0)}"
    since_event = _ago(last, now)
    if folder.open_activity:
        return _busy_state(folder, since_event or 0.0, dead, alive, gone)
    if _is_starting(folder, age, since_event):
        waited = since_event if since_event is not None else age or 0.0
        if dead or (not alive and waited > _UNKNOWN_ACTIVITY):
            return "silent", "silent", f"silent: started {format_time(waited)} ago, no step{gone}"
        return "starting", "starting", f"started {format_time(waited)} ago, no step yet"
    assert age is not None  # else it is starting
    quiet = min(age, since_event) if since_event is not None else age
    taken = format_time(age)
    usual = "no median yet"
    expected = 1.0
    if median is not None:
        expected = median * every
        lines = f", one line in {every} steps" if every > 1 else ""
        usual = f"the median of a step is {format_step(median)}{lines}"
    if folder.last_written("metrics.jsonl") is None:
        expected += _BUCKET_PERIOD
    text = f"last step {taken} ago; {usual}"
    if dead and quiet > _BEATEN:
        return "silent", "silent", f"silent: {text}{gone}"
    if not alive and quiet > max(_SILENT * expected, _QUIET):
        return "silent", "silent", f"silent: {text}"
    if quiet > _LATE * expected + _LATE:
        lives = "; its process lives" if alive else ""
        return "late", "late", f"late: {text}{lives}"
    return "running", "running", f"running: {text}"


def _is_starting(folder: RunFolder, age: float | None, since_event: float | None) -> bool:
    """Whether no step was reported since the last start."""
    if age is None:
        return True
    last = folder.last_event
    if last.get("event") != "start":
        return False
    loss = folder.curves["loss"]
    return loss.last_step <= (real(last.get("step")) or 0) or (since_event or 0.0) < age


def _busy_state(
    folder: RunFolder, waited: float, dead: bool, alive: bool, gone: str
) -> tuple[State, str, str]:
    """Returns the state of a run whose log has the beginning of an activity and not its end."""
    kind = str(folder.open_activity.get("activity", ""))
    doing = str(folder.open_activity.get("doing", "")) or kind
    word = _DOING.get(kind, kind or "busy")
    longest = folder.longest.get(kind)
    text = f"{doing} for {format_time(waited)}"
    expected = _UNKNOWN_ACTIVITY
    if longest is not None:
        text += f", the longest before took {format_time(longest)}"
        expected = longest
    if dead and waited > _BEATEN:
        return "silent", "silent", f"silent while {text}{gone}"
    if longest is not None and not alive and waited > max(_SILENT * expected, _QUIET):
        return "silent", "silent", f"silent while {text}"
    if longest is None and not alive and waited > expected:
        return "silent", "silent", f"silent while {text}"
    if longest is not None and waited > _LATE * expected + _LATE:
        return "late", "late", f"late: {text}"
    return "busy", word, text


def _ago(event: dict[str, Any], now: float) -> float | None:
    at = real(event.get("time"))
    return None if at is None else max(0.0, now - at)


def _ago_text(seconds: float | None) -> str:
    return "at an unknown time" if seconds is None else f"{format_time(seconds)} ago"


def restarts_of(folder: RunFolder) -> list[Restart]:
    """Returns the restarts and roll backs that a log tells of, in its order.

    A restore comes before the start that follows it, and tells what is taken again. A start without
    one comes from an earlier version or from a folder without checkpoints.
    """
    found: list[tuple[float, Restart]] = []
    restores = folder.events_of("restore")
    lost_at: dict[int, list[int | None]] = {}
    for event in restores:
        restored = _count(event.get("restored"))
        if restored is not None:
            lost_at.setdefault(restored, []).append(_count(event.get("taken again")))
    for event in folder.events_of("start")[1:]:
        step = int(real(event.get("step")) or 0)
        known = lost_at.get(step)
        lost = known.pop(0) if known else _count(event.get("taken again"))
        found.append((real(event.get("time")) or 0.0, Restart(step, lost, "restart")))
    for event in folder.events_of("roll back"):
        to = _count(event.get("to"))
        if to is not None:
            reached = int(real(event.get("step")) or 0)
            undone = Restart(to, max(0, reached - to), "rolled back")
            found.append((real(event.get("time")) or 0.0, undone))
    return [restart for _, restart in sorted(found, key=_time_of)]


def _time_of(pair: tuple[float, Restart]) -> float:
    return pair[0]


def _count(value: Any) -> int | None:
    number = real(value)
    return int(number) if number is not None and number >= 0 else None
