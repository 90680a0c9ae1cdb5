"""Page of training runs: curves of one or several, marks of what happened, times, samples, and what was run."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.formatting import format_step, format_time
from meshwright.views.pages import (
    Axis,
    Bar,
    Bars,
    Block,
    Chart,
    Column,
    Figure,
    Figures,
    Grid,
    Live,
    Mark,
    Page,
    Section,
    Series,
    Table,
    Text,
)
from meshwright.views.run_folder import Curve, RunFolder
from meshwright.views.run_page_tables import (
    EVENTS,
    checks,
    configuration,
    event_table,
    foresight,
    profile,
    real,
    samples,
)  # fmt: skip

_POINTS = 3000
"""Most points of a line."""
_COLOURS = tuple(f"c{number}" for number in range(1, 9))


@dataclasses.dataclass(frozen=True)
class _Metric:
    """A chart of one metric, and of others on the same axes as points."""

    name: str
    title: str
    axis: Axis
    points: str = ""
    note: str = ""


_CURVES = (
    _Metric("loss", "Loss", Axis("nats per token", toggle=True), "held-out loss",
            "Points are losses on held-out text."),
    _Metric("learning rate", "Learning rate", Axis("", toggle=True)),
    _Metric("gradient norm", "Gradient norm", Axis("before clipping", toggle=True)),
    _Metric("tokens/s", "Tokens per second", Axis("all devices", "count", zero=True)),
    _Metric("examples/s", "Examples per second", Axis("all devices", "count", zero=True)),
    _Metric("MFU", "MFU", Axis("of the chips' peak", "fraction", zero=True), "",
            "Model FLOPs achieved, as a fraction of the peak of all devices."),
    _Metric("step seconds", "Step time", Axis("", "seconds", toggle=True)),
    _Metric("input wait seconds", "Waiting for input", Axis("in each step", "seconds", zero=True)),
    _Metric("largest expert load", "Largest expert load", Axis("times the mean", zero=True)),
    _Metric("batch", "Batch", Axis("sequences", "integer", zero=True)),
)  # fmt: skip
"""Metrics in the order of their charts; those that a run has besides follow by name."""
_BESIDE = ("input wait", "saving", "evaluating", "compiling")
"""Parts of the time between two steps in which the loop does something else, as `trainer.loop` names them."""


def run_page(folders: Sequence[RunFolder], recipes: Mapping[str, Mapping[str, Any]], live: Live | None = None) -> Page:
    """Returns the page of one run, or of several over each other.

    recipes: recipes by name, as JSON values, with which a run of that name is compared.
    """
    one = folders[0] if len(folders) == 1 else None
    title = one.name if one else " and ".join(folder.name for folder in folders)
    sections = [
        Section("Overview", _overview(folders)),
        Section("Curves", [Grid(_charts(folders), columns=2)] if _charts(folders) else [_nothing()]),
        Section("Time", _times(folders), "Where the seconds between one step and the next go."),
        Section("What happened", [event_table(folders)]),
        Section("Samples", samples(folders), "Text sampled from the model, the last first."),
        Section("Configuration", configuration(folders, recipes)),
    ]
    checked = [block for folder in folders for block in checks(folder)]
    sections += [Section("Checks", checked)] if checked else []
    shown = [section for section in sections if section.blocks]
    footer = "Made by Meshwright from the files in the output folder." + ("" if live else " This file loads nothing.")
    return Page(title, shown, topic="run", lead=_lead(folders), footer=footer, live=live)


def _nothing() -> Block:
    return Text(["No step is over yet."], tone="faded")


def _lead(folders: Sequence[RunFolder]) -> str:
    if len(folders) > 1:
        return f"{len(folders)} runs over each other."
    run = folders[0].document("run.json")
    family = str(run.get("model", {}).get("family", "a model")) if isinstance(run.get("model"), dict) else "a model"
    start: Mapping[str, Any] = next((e for e in reversed(folders[0].events) if e.get("event") == "start"), {})
    where = f" on mesh {start['mesh']} ({start.get('devices')} x {start.get('kind')})" if "mesh" in start else ""
    return f"{run.get('name', folders[0].name)}, {family}{where}."


# Overview


def _overview(folders: Sequence[RunFolder]) -> list[Block]:
    if len(folders) == 1:
        return [Figures(_figures(folders[0]))]
    names = list(dict.fromkeys(figure.label for folder in folders for figure in _figures(folder)))
    rows = []
    for folder in folders:
        values = {figure.label: figure.value for figure in _figures(folder)}
        rows.append([folder.name, *(values.get(name, "") for name in names)])
    return [Table([Column("run"), *map(Column, names)], rows)]


def _figures(folder: RunFolder) -> list[Figure]:
    last = {name: curve.values[-1] for name, curve in folder.curves.items()}
    loss = folder.curves.get("loss", Curve())
    steps = _at(folder.document("run.json"), "training", "steps")
    done = int(loss.steps[-1]) if loss.steps else 0
    state = _state(folder)
    found = [Figure("state", state[0], state[1], "bad" if state[0] == "stopped" else "")]
    found.append(Figure("step", f"{done:,}", f"of {steps:,}" if isinstance(steps, int) else ""))
    if loss.values:
        recent = [value for value in loss.values[-20:] if math.isfinite(value)]
        found.append(Figure("loss", f"{statistics.fmean(recent):.4f}" if recent else "not finite", "mean of 20 steps"))
    if "held-out loss" in last:
        at = int(folder.curves["held-out loss"].steps[-1])
        found.append(Figure("held-out loss", f"{last['held-out loss']:.4f}", f"at step {at:,}"))
    typical = _median(folder, "step seconds")
    if typical is not None:
        foreseen = _foreseen(folder)
        detail = f"median; foreseen {format_step(foreseen)}" if foreseen else "median"
        found.append(Figure("step time", format_step(typical), detail))
        if isinstance(steps, int) and done < steps and state[0] == "running":
            found.append(Figure("left", format_time(typical * (steps - done)), "at the median"))
    for name in ("tokens/s", "examples/s"):
        value = _median(folder, name)
        if value is not None:
            found.append(Figure(name, f"{value:,.0f}", "median of the last 500 steps"))
    mfu = _median(folder, "MFU")
    if mfu is not None:
        foreseen_mfu = _foreseen_mfu(folder)
        found.append(Figure("MFU", f"{mfu:.1%}", f"foreseen {foreseen_mfu:.1%}" if foreseen_mfu else ""))
    return found


def _state(folder: RunFolder) -> tuple[str, str]:
    """Returns whether a run is running, by its log and by when its files last changed."""
    last = next((e for e in reversed(folder.events) if e.get("event") in ("start", "end")), None)
    if last is None:
        return "unknown", "no events.jsonl"
    starts = sum(e.get("event") == "start" for e in folder.events)
    restarts = f"{starts - 1} restart{'s' if starts > 2 else ''}" if starts > 1 else ""
    if last["event"] == "end":
        return "ended", restarts
    return "running", restarts


def _median(folder: RunFolder, name: str) -> float | None:
    curve = folder.curves.get(name)
    values = [value for value in curve.values[-500:] if math.isfinite(value)] if curve else []
    return statistics.median(values) if values else None


def _foreseen(folder: RunFolder) -> float | None:
    """Returns the predicted seconds of a step, from foresight.json."""
    gaps = folder.document("foresight.json").get("gaps")
    rows = gaps if isinstance(gaps, list) else []
    values = [row.get("predicted") for row in rows if isinstance(row, dict)]
    total = sum(value for value in values if isinstance(value, int | float))
    return total or None


def _foreseen_mfu(folder: RunFolder) -> float | None:
    """Returns the MFU of a step that takes the predicted time."""
    seconds, mfu, predicted = _median(folder, "step seconds"), _median(folder, "MFU"), _foreseen(folder)
    return mfu * seconds / predicted if seconds and mfu and predicted else None


_FORESEEN = {"MFU": _foreseen_mfu, "step seconds": _foreseen}
"""Metrics of which a value is predicted."""


# Curves


def _charts(folders: Sequence[RunFolder]) -> list[Block]:
    known = {metric.name for metric in _CURVES} | {metric.points for metric in _CURVES}
    known |= {f"{name} seconds" for name in _BESIDE}
    others = sorted({name for folder in folders for name in folder.curves} - known)
    metrics = [*_CURVES, *(_Metric(name, name[:1].upper() + name[1:], Axis("", toggle=True)) for name in others)]
    return [chart for metric in metrics if (chart := _chart(metric, folders)) is not None]


def _chart(metric: _Metric, folders: Sequence[RunFolder]) -> Block | None:
    series: list[Series] = []
    marks: list[Mark] = []
    for number, folder in enumerate(folders):
        colour, several = _COLOURS[number % len(_COLOURS)], len(folders) > 1
        if metric.name in folder.curves:
            series.append(_line(folder.curves[metric.name], folder.name if several else metric.name, colour))
        if metric.points in folder.curves:
            name = f"{folder.name}, {metric.points}" if several else metric.points
            other = colour if several else "c2"
            series.append(_line(folder.curves[metric.points], name, other, points=True))
        if metric.name == "loss" and metric.name in folder.curves:
            series += _checkpoints(folder, several)
        marks += _marks(folder, several)
        if metric.name in _FORESEEN and (foreseen := _FORESEEN[metric.name](folder)):
            marks.append(Mark("y", foreseen, "foreseen", fit=True))
    if not series:
        return None
    return Chart(
        Axis("step", "integer", toggle=True), metric.axis, series, marks, smoothing=0.0, height=320,
        title=metric.title, note=metric.note,
    )  # fmt: skip


def _line(curve: Curve, name: str, colour: str, *, points: bool = False) -> Series:
    x, y = curve.thinned(_POINTS)
    values = [value if math.isfinite(value) else None for value in y]
    if points:
        return Series(name, x, values, colour, "points", "diamond")
    return Series(name, x, values, colour)


def _checkpoints(folder: RunFolder, several: bool) -> list[Series]:
    """Returns the checkpoints as points on the curve of the loss."""
    curve = folder.curves["loss"]
    at = dict(zip(curve.steps, curve.values, strict=True))
    saves = {e["step"]: e for e in folder.events if e.get("event") == "save" and e.get("step") in at}
    steps = [step for step in sorted(saves) if math.isfinite(at[step])][-EVENTS:]
    if not steps:
        return []
    tips = [f"Checkpoint of step {step:,}\nsaving took {_seconds(saves[step])}" for step in steps]
    name = f"{folder.name}, checkpoints" if several else "checkpoints"
    return [Series(name, steps, [at[step] for step in steps], "muted", "points", "square", tips=tips)]


def _marks(folder: RunFolder, several: bool) -> list[Mark]:
    """Returns restarts, returns to a checkpoint and bad steps, as lines across a chart."""
    prefix = f"{folder.name}: " if several else ""
    marks = []
    starts = [e for e in folder.events if e.get("event") == "start" and isinstance(e.get("step"), int)]
    marks += [Mark("x", e["step"], f"{prefix}restart", "c2") for e in starts[1:]]
    for event in folder.events:
        if event.get("event") == "roll back" and isinstance(event.get("to"), int):
            marks.append(Mark("x", event["to"], f"{prefix}rolled back", "c4"))
    marks += [Mark("x", step, f"{prefix}bad step", "bad") for step, _ in folder.bad_steps()]
    return marks[-40:]


# Time


def _times(folders: Sequence[RunFolder]) -> list[Block]:
    names = ["step", *_BESIDE]
    rows = []
    for folder in folders:
        seconds = folder.curves.get("step seconds")
        if seconds is None or not seconds.values:
            continue
        count = len(seconds.values)
        beside = [_sum(folder, f"{name} seconds") / count for name in _BESIDE]
        rows.append(Bar(folder.name, [max(0.0, _sum(folder, "step seconds") / count - sum(beside)), *beside]))
    blocks: list[Block] = []
    if rows:
        colours = ("c1", "c2", "c3", "c4", "c5")
        blocks.append(Bars("seconds", names, colours, rows, title="Mean time between steps"))
    for folder in folders:
        blocks += foresight(folder) + profile(folder)
    return blocks


def _sum(folder: RunFolder, name: str) -> float:
    curve = folder.curves.get(name)
    return math.fsum(value for value in curve.values if math.isfinite(value)) if curve else 0.0


def _seconds(event: Mapping[str, Any]) -> str:
    return format_time(real(event.get("seconds")) or 0.0)


def _at(record: Any, *names: str) -> Any:
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record
