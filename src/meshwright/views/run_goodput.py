"""Goodput of a run, of the files in its output folder."""

from meshwright.documents import real
from meshwright.reporters.goodput import Goodput, split_time
from meshwright.views.run_folder import RunFolder
from meshwright.views.run_status import RunStatus


def goodput_of(folder: RunFolder, status: RunStatus, now: float) -> Goodput | None:
    """Returns the goodput of a run; None before it has a time and a step. now: Unix seconds."""
    end = _end(folder, status, now)
    if end is None:
        return None
    return split_time(folder.event_times, folder.step_times, status.step, end)


def _end(folder: RunFolder, status: RunStatus, now: float) -> float | None:
    """Returns the time until which a run is looked at: its end, its last step
    where it is silent, or now."""
    if status.state == "ended":
        return real(folder.last_event.get("time"))
    if status.state == "silent" and status.age is not None:
        return now - status.age
    return now
