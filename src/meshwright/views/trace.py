"""Simulated schedule as a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing."""

import json
from pathlib import Path
from typing import Any

from meshwright.analysis.simulate import SimulatedSchedule

_MICRO = 1e6


def trace_events(schedule: SimulatedSchedule) -> list[dict[str, Any]]:
    """Returns events in Chrome's trace format: loops, computation, then a row for the links of each set of axes.

    A loop's body is drawn once, at the beginning of the loop; `count` is its number of iterations.
    """
    rows = ["loops", "computation", *sorted({s.axes for s in schedule.spans if s.kind == "collective"}), "host"]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"one {schedule.chip}, predicted"}}
    ]
    for number, row in enumerate(rows):
        name = row if row in ("loops", "computation", "host") else f"{row} ({schedule.routes.get(row, 'links')})"
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": number, "args": {"sort_index": number}})
    for span in schedule.spans:
        row = {"loop": "loops", "collective": span.axes, "host": "host"}.get(span.kind, "computation")
        place = {"ph": "X", "name": span.name, "cat": span.kind, "pid": 1, "tid": rows.index(row)}
        time = {"ts": round(span.start * _MICRO, 3), "dur": round(max(span.seconds, 1e-9) * _MICRO, 3)}
        args = {"count": span.count, "kind": span.kind, "exposed_us": round(span.exposed * _MICRO, 3)}
        events.append({**place, **time, "args": args})
    return events


def write_trace(schedule: SimulatedSchedule, file: Path) -> None:
    """Writes the trace of a simulated schedule as JSON."""
    trace = {"traceEvents": trace_events(schedule), "displayTimeUnit": "ms"}
    file.write_text(json.dumps(trace) + "\n", encoding="utf-8")
