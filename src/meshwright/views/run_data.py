"""Place of a run in its data: units of text it has read, how often each source was read,
and the axes that follow."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.documents import real
from meshwright.formatting import format_count
from meshwright.views.blocks import Block, Column, Figure, Figures, Table, Text
from meshwright.views.charts import Axis, AxisChoice, Scale
from meshwright.views.run_folder import Curve, RunFolder, objects

UNITS = ("tokens", "examples")
"""Metrics with what a run has read so far, by the unit of its model."""
LINK = "x"
"""Name of the choice of an x axis in the address of a page."""
STEPS = Axis("step", "integer", toggle=True)
_TIME = "hours"
_PART = 2000
"""A scale is within this part of its range everywhere: less than a pixel."""


def data_blocks(folder: RunFolder, title: str) -> list[Block]:
    """Returns the place of a run in its data; nothing for a run that does not tell."""
    place = _place(folder)
    unit = str(place.get("unit", ""))
    curve = folder.curves.get(unit, Curve())
    if unit not in UNITS or not curve.count:
        return []
    seen = curve.recent[-1]
    total = real(place.get("units"))
    per_sample = real(place.get("per sample"))
    of_total = ""
    if total:
        of_total = f"of {format_count(total)}: {seen / total:.1%}"
    figures = [Figure(unit, format_count(seen), of_total)]
    sources = _sources(place, seen, per_sample)
    if sources:
        most = max(sources, key=lambda source: source["epoch"])
        detail = "passes over the data"
        if len(sources) > 1:
            detail = f"passes over {most['source']}, the most of all sources"
        figures.append(Figure("epoch", f"{most['epoch']:.3g}", detail))
    blocks: list[Block] = [Figures(figures, title=title)]
    if sources:
        columns = [
            Column("source", cell="source", wide=True),
            Column("share", "fraction", "share"),
            Column(f"{unit} read", "count", "read"),
            Column(f"{unit} of a pass", "count", "pass"),
            Column("epoch", "number", "epoch", bar=True),
        ]
        note = (
            f"{unit.capitalize()} count every position of a batch. Epoch 1.5: in the middle of the "
            "second pass. Samples that were left out are not counted."
        )
        blocks.append(Table.of(sources, columns, note=note))
    more = real(place.get("more sources"))
    if more:
        blocks.append(Text([f"And {more:,.0f} more sources, which the events do not name."]))
    return blocks


def _place(folder: RunFolder) -> Mapping[str, Any]:
    """Returns what the last start has written of the data."""
    starts = folder.events_of("start")
    place = starts[-1].get("data") if starts else None
    return place if isinstance(place, Mapping) else {}


def _sources(
    place: Mapping[str, Any], seen: float, per_sample: float | None
) -> list[dict[str, Any]]:
    """Returns the sources of a run, with what was read of each.

    seen: units that the run has read.  per_sample: units of a sample.
    """
    if not per_sample:
        return []
    samples = seen / per_sample + (real(place.get("first sample")) or 0.0)
    found = []
    for source in objects(place, "sources"):
        share = real(source.get("share"))
        in_a_pass = real(source.get("samples"))
        if not share or not in_a_pass:
            continue
        found.append(
            {
                "source": str(source.get("name", "")),
                "share": share,
                "read": samples * share * per_sample,
                "pass": in_a_pass * per_sample,
                "epoch": samples * share / in_a_pass,
            }
        )
    return found


def axis_choice(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns the choice of an x axis for the curves of runs;
    nothing where all know only their steps."""
    axes = [STEPS]
    scales: dict[str, dict[str, Scale]] = {}
    for unit in UNITS:
        by_run = {folder.name: _scale(folder.curves.get(unit, Curve())) for folder in folders}
        if all(scale.steps for scale in by_run.values()):
            axes.append(Axis(unit, "count", toggle=True))
            scales[unit] = by_run
    by_run = {folder.name: _hours(folder) for folder in folders}
    if all(scale.steps for scale in by_run.values()):
        axes.append(Axis(_TIME, "number", toggle=True))
        scales[_TIME] = by_run
    if len(axes) == 1:
        return []
    return [AxisChoice(LINK, axes, scales, where="page")]


def _scale(curve: Curve) -> Scale:
    """Returns the points of a curve that a line through them needs."""
    steps = np.array(curve.steps)
    values = np.array(curve.values)
    known = np.isfinite(values)
    return _simplified(steps[known], values[known])


def _hours(folder: RunFolder) -> Scale:
    """Returns the hours since the first event of a run, times in
    which it did not run among them."""
    begin = folder.event_times.first_time
    if begin is None:
        return Scale([], [])
    times = _scale(folder.times)
    return Scale(times.steps, [(time - begin) / 3600 for time in times.values])


def _simplified(steps: np.ndarray, values: np.ndarray) -> Scale:
    """Returns those of some points that the line through them needs (Ramer, Douglas and Peucker).

    Between two points that are kept, the one furthest from their line is kept too,
    until all are near it.
    """
    if not len(steps):
        return Scale([], [])
    near = np.ptp(values) / _PART
    kept = {0, len(steps) - 1}
    pending = [(0, len(steps) - 1)]
    while pending:
        first, last = pending.pop()
        if last - first < 2:
            continue
        ends = [first, last]
        inside = slice(first + 1, last)
        line = np.interp(steps[inside], steps[ends], values[ends])
        distances = np.abs(values[inside] - line)
        furthest = first + 1 + int(np.argmax(distances))
        if distances[furthest - first - 1] > near:
            kept.add(furthest)
            pending += [(first, furthest), (furthest, last)]
    chosen = sorted(kept)
    return Scale(steps[chosen].tolist(), values[chosen].tolist())
