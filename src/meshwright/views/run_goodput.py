"""Goodput of a run so far: the share of its time in steps that count, and where the rest went.

    begin                                                                         now, or the end
    | tokenise | compile | steps, their data | save | steps | evaluate | ... gone ... | restore | steps
                                                        lost ------------------------------------>

    goodput = seconds in steps that count / seconds since the begin

Times of activities are sums over `events.jsonl`. Time in steps is the mean of `metrics.jsonl` times the number of steps,
since with `--training.log-every` not every step has a line. What is left is time in which no process ran, and the
starts of processes before their first event.
"""

import dataclasses
from collections.abc import Mapping

from meshwright.views.run_folder import Curve, RunFolder, real
from meshwright.views.run_status import RunStatus

STEPS = "steps"
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


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Time of a run by cause."""

    wall: float
    """Seconds from the first event of the run to its end, or to now."""
    seconds: Mapping[str, float]
    """Seconds by cause: `STEPS` first, then what did not train; the last is the rest."""

    @property
    def fraction(self) -> float:
        """Share of the time in steps that count."""
        return self.seconds[STEPS] / self.wall


def goodput_of(folder: RunFolder, status: RunStatus, now: float) -> Goodput | None:
    """Returns the goodput of a run; None before it has a time and a step. now: Unix seconds."""
    own_seconds, data_seconds = _mean_step(folder)
    end = _end(folder, status, now)
    if folder.first_time is None or end is None or not own_seconds:
        return None
    wall = end - folder.first_time
    if wall <= 0:
        return None
    seconds = {
        STEPS: own_seconds * status.step,
        "steps taken again": own_seconds * status.steps_lost,
        "waiting for data": data_seconds * (status.step + status.steps_lost),
    }
    for kind, cause in _ACTIVITIES.items():
        seconds[cause] = folder.seconds_of[kind]
    seconds[REST] = wall - sum(seconds.values())
    return Goodput(wall, seconds)


def _end(folder: RunFolder, status: RunStatus, now: float) -> float | None:
    """Returns the time until which a run is looked at: its end, its last step where it is silent, or now."""
    if status.state == "ended":
        return real(folder.last_event.get("time"))
    if status.state == "silent" and status.age is not None:
        return now - status.age
    return now


def _mean_step(folder: RunFolder) -> tuple[float, float]:
    """Returns the mean seconds of a step without its wait for data, and of that wait."""
    steps = folder.curves.get("step seconds", Curve())
    if not steps.count:
        return 0.0, 0.0
    waits = folder.curves.get("input wait seconds", Curve())
    wait = waits.total / steps.count
    return steps.total / steps.count - wait, wait
