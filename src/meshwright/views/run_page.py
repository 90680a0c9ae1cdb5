"""Report of training runs: curves of one or several, marks of what happened, times, samples, and what was run."""

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from meshwright.formatting import format_step, format_time
from meshwright.views.blocks import (
    Axis,
    Bar,
    Bars,
    Block,
    Chart,
    Code,
    Column,
    Figure,
    Figures,
    Grid,
    Mark,
    Series,
    Table,
    Text,
)
from meshwright.views.colours import series_colour
from meshwright.views.report import Live, Report, Section
from meshwright.views.run_folder import Curve, RunFolder, flat_fields
from meshwright.views.terminal import print_blocks

_POINTS = 3000
"""Most points of a line."""
_SAMPLES = 12
"""Most samples that are shown, the last."""
_EVENTS = 400
"""Most events of a run that are shown, the last."""


@dataclasses.dataclass(frozen=True)
class _Metric:
    """A chart of one metric, and of others on the same axes as points."""

    name: str
    title: str
    axis: Axis
    points: str = ""
    note: str = ""


_HELD_OUT = "held-out loss"
_MFU_NOTE = "Model FLOPs achieved, as a fraction of the peak of all devices."
_CURVES = (
    _Metric("loss", "Loss", Axis("nats per token", toggle=True), _HELD_OUT, "Points are losses on held-out text."),
    _Metric("learning rate", "Learning rate", Axis("", toggle=True)),
    _Metric("gradient norm", "Gradient norm", Axis("before clipping", toggle=True)),
    _Metric("tokens/s", "Tokens per second", Axis("all devices", "count", zero=True)),
    _Metric("examples/s", "Examples per second", Axis("all devices", "count", zero=True)),
    _Metric("MFU", "MFU", Axis("of the chips' peak", "fraction", zero=True), "", _MFU_NOTE),
    _Metric("step seconds", "Step time", Axis("", "seconds", toggle=True)),
    _Metric("input wait seconds", "Waiting for input", Axis("in each step", "seconds", zero=True)),
    _Metric("largest expert load", "Largest expert load", Axis("times the mean", zero=True)),
    _Metric("batch", "Batch", Axis("sequences", "integer", zero=True)),
)
"""Metrics in the order of their charts; other metrics of a run follow by name."""
_BETWEEN = ("input wait", "saving", "evaluating", "compiling")
"""Parts of the time between two steps in which the loop does something else, as `trainer.loop` names them."""


def run_page(
    folders: Sequence[RunFolder], recipes: Mapping[str, Mapping[str, Any]], live: Live | None = None
) -> Report:
    """Returns the report of one run, or of several over each other.

    recipes: recipes by name, as JSON values, with which a run of that name is compared.
    """
    title = folders[0].name if len(folders) == 1 else " and ".join(folder.name for folder in folders)
    charts = _charts(folders)
    waiting = Text(["No step is over yet."], tone="faded")
    sections = [
        Section("Overview", _overview(folders)),
        Section("Curves", [Grid(charts, columns=2)] if charts else [waiting]),
        Section("Time", _times(folders), "Where the seconds between one step and the next go."),
        Section("What happened", [_event_table(folders)]),
        Section("Samples", _samples(folders), "Text sampled from the model, the last first."),
        Section("Configuration", _configuration(folders, recipes)),
        Section("Checks", [block for folder in folders for block in _checks(folder)]),
    ]
    shown = [section for section in sections if section.blocks]
    footer = "Made by Meshwright from the files in the output folder." + ("" if live else " This file loads nothing.")
    return Report(title, shown, topic="run", lead=_lead(folders), footer=footer, live=live)


def _lead(folders: Sequence[RunFolder]) -> str:
    if len(folders) > 1:
        return f"{len(folders)} runs over each other."
    run = folders[0].document("run.json")
    family = str(_at(run, "model", "family") or "a model")
    start: Mapping[str, Any] = next((e for e in reversed(folders[0].events) if e.get("event") == "start"), {})
    where = f" on mesh {start['mesh']} ({start.get('devices')} x {start.get('kind')})" if "mesh" in start else ""
    return f"{run.get('name', folders[0].name)}, {family}{where}."


# Overview


def _overview(folders: Sequence[RunFolder]) -> list[Block]:
    figures = {folder.name: _figures(folder) for folder in folders}
    if len(folders) == 1:
        return [Figures(figures[folders[0].name])]
    names = list(dict.fromkeys(figure.label for each in figures.values() for figure in each))
    rows = [
        [folder, *({figure.label: figure.value for figure in each}.get(name, "") for name in names)]
        for folder, each in figures.items()
    ]
    return [Table([Column("run"), *map(Column, names)], rows)]


def _figures(folder: RunFolder) -> list[Figure]:
    loss, held_out = folder.curves.get("loss", Curve()), folder.curves.get(_HELD_OUT)
    steps = _at(folder.document("run.json"), "training", "steps")
    done = int(loss.steps[-1]) if loss.steps else 0
    state, restarts = _state(folder)
    found = [Figure("state", state, restarts)]
    found.append(Figure("step", f"{done:,}", f"of {steps:,}" if isinstance(steps, int) else ""))
    if loss.values:
        recent = [value for value in loss.values[-20:] if math.isfinite(value)]
        found.append(Figure("loss", f"{statistics.fmean(recent):.4f}" if recent else "not finite", "mean of 20 steps"))
    if held_out is not None:
        found.append(Figure(_HELD_OUT, f"{held_out.values[-1]:.4f}", f"at step {int(held_out.steps[-1]):,}"))
    typical, predicted = _median(folder, "step seconds"), _predicted_seconds(folder)
    if typical is not None:
        detail = f"median; foreseen {format_step(predicted)}" if predicted else "median"
        found.append(Figure("step time", format_step(typical), detail))
        if isinstance(steps, int) and done < steps and state == "running":
            found.append(Figure("left", format_time(typical * (steps - done)), "at the median"))
    for name in ("tokens/s", "examples/s"):
        value = _median(folder, name)
        if value is not None:
            found.append(Figure(name, f"{value:,.0f}", "median of the last 500 steps"))
    mfu, predicted_mfu = _median(folder, "MFU"), _predicted_mfu(folder)
    if mfu is not None:
        found.append(Figure("MFU", f"{mfu:.1%}", f"foreseen {predicted_mfu:.1%}" if predicted_mfu else ""))
    return found


def _state(folder: RunFolder) -> tuple[str, str]:
    """Returns whether a run is running, by its log, and its restarts."""
    events = [e["event"] for e in folder.events if e.get("event") in ("start", "end")]
    if not events:
        return "unknown", "no events.jsonl"
    restarts = events.count("start") - 1
    text = f"{restarts} restart{'s' if restarts > 1 else ''}" if restarts > 0 else ""
    return "ended" if events[-1] == "end" else "running", text


def _median(folder: RunFolder, name: str) -> float | None:
    curve = folder.curves.get(name)
    values = [value for value in curve.values[-500:] if math.isfinite(value)] if curve else []
    return statistics.median(values) if values else None


def _predicted_seconds(folder: RunFolder) -> float | None:
    """Returns the predicted seconds of a step, from foresight.json."""
    return (
        sum(_real(row.get("predicted")) or 0.0 for row in _objects(folder.document("foresight.json"), "gaps")) or None
    )


def _predicted_mfu(folder: RunFolder) -> float | None:
    """Returns the MFU of a step that takes the predicted time."""
    seconds, mfu, predicted = _median(folder, "step seconds"), _median(folder, "MFU"), _predicted_seconds(folder)
    return mfu * seconds / predicted if seconds and mfu and predicted else None


_PREDICTED = {"MFU": _predicted_mfu, "step seconds": _predicted_seconds}
"""Metrics of which a value is predicted."""


# Curves


def _charts(folders: Sequence[RunFolder]) -> list[Block]:
    known = {name for metric in _CURVES for name in (metric.name, metric.points)}
    known |= {f"{name} seconds" for name in _BETWEEN}
    others = sorted({name for folder in folders for name in folder.curves} - known)
    metrics = [*_CURVES, *(_Metric(name, name[:1].upper() + name[1:], Axis("", toggle=True)) for name in others)]
    return [chart for metric in metrics if (chart := _chart(metric, folders)) is not None]


def _chart(metric: _Metric, folders: Sequence[RunFolder]) -> Block | None:
    series: list[Series] = []
    marks: list[Mark] = []
    for number, folder in enumerate(folders):
        colour, several = series_colour(number), len(folders) > 1
        prefix = f"{folder.name}, " if several else ""
        if metric.name in folder.curves:
            name = folder.name if several else metric.name
            series.append(Series(name, *_line(folder.curves[metric.name]), colour))
        if metric.points in folder.curves:
            x, y = _line(folder.curves[metric.points])
            series.append(Series(f"{prefix}{metric.points}", x, y, colour if several else "c2", "points", "diamond"))
        if metric.name == "loss" and metric.name in folder.curves:
            series += _checkpoints(folder, f"{prefix}checkpoints")
        marks += _marks(folder, f"{folder.name}: " if several else "")
        if metric.name in _PREDICTED and (predicted := _PREDICTED[metric.name](folder)):
            marks.append(Mark("y", predicted, "foreseen", fit=True))
    if not series:
        return None
    axis = Axis("step", "integer", toggle=True)
    return Chart(axis, metric.axis, series, marks, smoothing=0.0, height=320, title=metric.title, note=metric.note)


def _line(curve: Curve) -> tuple[list[float], list[float | None]]:
    x, y = curve.thinned(_POINTS)
    return x, [value if math.isfinite(value) else None for value in y]


def _checkpoints(folder: RunFolder, name: str) -> list[Series]:
    """Returns the checkpoints as points on the curve of the loss."""
    curve = folder.curves["loss"]
    at = dict(zip(curve.steps, curve.values, strict=True))
    saves = {e["step"]: e for e in folder.events if e.get("event") == "save" and e.get("step") in at}
    steps = [step for step in sorted(saves) if math.isfinite(at[step])][-_EVENTS:]
    if not steps:
        return []
    took = [format_time(_real(saves[step].get("seconds")) or 0.0) for step in steps]
    tips = [f"Checkpoint of step {step:,}\nsaving took {text}" for step, text in zip(steps, took, strict=True)]
    return [Series(name, steps, [at[step] for step in steps], "muted", "points", "square", tips=tips)]


def _marks(folder: RunFolder, prefix: str) -> list[Mark]:
    """Returns restarts, returns to a checkpoint and bad steps, as lines across a chart."""
    starts = [e["step"] for e in folder.events if e.get("event") == "start" and isinstance(e.get("step"), int)]
    returns = [e["to"] for e in folder.events if e.get("event") == "roll back" and isinstance(e.get("to"), int)]
    marks = [Mark("x", step, f"{prefix}restart", "c2") for step in starts[1:]]
    marks += [Mark("x", step, f"{prefix}rolled back", "c4") for step in returns]
    marks += [Mark("x", step, f"{prefix}bad step", "bad") for step, _ in folder.bad_steps()]
    return marks[-40:]


# Time


def _times(folders: Sequence[RunFolder]) -> list[Block]:
    rows = []
    for folder in folders:
        seconds = folder.curves.get("step seconds")
        if seconds is not None and seconds.values:
            count = len(seconds.values)
            other = [_sum(folder, f"{name} seconds") / count for name in _BETWEEN]
            rows.append(Bar(folder.name, [max(0.0, _sum(folder, "step seconds") / count - sum(other)), *other]))
    blocks: list[Block] = []
    if rows:
        colours = ("c1", "c2", "c3", "c4", "c5")
        blocks.append(Bars("seconds", ["step", *_BETWEEN], colours, rows, title="Mean time between steps"))
    for folder in folders:
        blocks += _foresight(folder) + profile_blocks(folder.document("profile.json"), f"Profile, {folder.name}")
    return blocks


def _sum(folder: RunFolder, name: str) -> float:
    curve = folder.curves.get(name)
    return math.fsum(value for value in curve.values if math.isfinite(value)) if curve else 0.0


def _foresight(folder: RunFolder) -> list[Block]:
    """Returns the table of the parts of a step, predicted and measured."""
    document = folder.document("foresight.json")
    columns = [
        Column("part of a step", cell=lambda row: str(row.get("part"))),
        Column("foreseen", "seconds", lambda row: _real(row.get("predicted"))),
        Column("measured", "seconds", lambda row: _real(row.get("measured"))),
    ]
    note = f"Figures of the chip: {document.get('source', '')}"
    table = Table.of(_objects(document, "gaps"), columns, title=f"Foreseen and measured, {folder.name}", note=note)
    return [table] if table.rows else []


def profile_blocks(document: Mapping[str, Any], title: str) -> list[Block]:
    """Returns the table of a profile, `bench.step_profile.Profile` as JSON: measured against simulated seconds."""
    columns = [
        Column("kind", cell=lambda row: str(row.get("kind", "")), choices=True),
        Column("what", cell=lambda row: str(row.get("name", "")), wide=True),
        Column("measured", "seconds", lambda row: _real(row.get("measured")), bar=True),
        Column("simulated", "seconds", lambda row: _real(row.get("simulated"))),
    ]
    note = str(document.get("note", ""))
    table = Table.of(_objects(document, "rows"), columns, searchable=True, printed=40, title=title, note=note)
    return [table] if table.rows else []


def print_profile(console: Console, document: Mapping[str, Any]) -> None:
    """Prints a profile: the step, its parts, its collectives and the scopes of its program, the longest first."""
    title = f"profile of steps {document['first']} to {document['last']}, of one device in one step"
    print_blocks(console, title, "", profile_blocks(document, ""))


# What happened


def _event_table(folders: Sequence[RunFolder]) -> Block:
    """Returns the table of events and bad steps, the last first."""
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for folder in folders:
        name = folder.name if len(folders) > 1 else ""
        rows += [(name, event) for event in folder.events[-_EVENTS:]]
        rows += [(name, {"step": step, "event": "bad step", "": reason}) for step, reason in folder.bad_steps()]
    columns = [
        Column("run", cell=lambda row: row[0], choices=True),
        Column("time (UTC)", cell=lambda row: _clock(row[1].get("time"))),
        Column("step", "integer", lambda row: row[1].get("step") if isinstance(row[1].get("step"), int) else None),
        Column("event", cell=lambda row: str(row[1].get("event", "")), choices=True),
        Column("took", "seconds", lambda row: _real(row[1].get("seconds"))),
        Column("detail", cell=lambda row: _detail(row[1]), wide=True),
    ]
    return Table.of(rows[::-1], columns, searchable=True, shown=30)


def _detail(event: Mapping[str, Any]) -> str:
    """Formats what an event holds besides its time: `mesh fsdp=4, devices 4, processes 1, kind cpu, fresh`."""
    known = ("time", "step", "event", "seconds", "text")
    found = {name: value for name, value in event.items() if name not in known}
    return ", ".join(f"{value}" if name in ("how", "") else f"{name} {value}" for name, value in found.items())


def _clock(value: Any) -> str:
    number = _real(value)
    if number is None or not 0 <= number < 1e11:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(number))


def _samples(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns the last texts sampled from each model, the last first."""
    several = len(folders) > 1
    return [
        Code(text, title=f"{folder.name + ', ' if several else ''}step {step:,}")
        for folder in folders
        for step, text in folder.samples()[: -_SAMPLES - 1 : -1]
    ]


# Configuration


def _configuration(folders: Sequence[RunFolder], recipes: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """Returns the Runs: how they differ from each other and from their recipes, and all of their fields."""
    fields = {folder.name: flat_fields(folder.document("run.json")) for folder in folders}
    blocks: list[Block] = []
    if len(folders) > 1:
        names = sorted({name for each in fields.values() for name in each})
        rows = [[name, *(each.get(name, "") for each in fields.values())] for name in names]
        columns = [Column("field"), *(Column(name, wide=True) for name in fields)]
        different = [row for row in rows if len(set(row[1:])) > 1]
        blocks.append(Table(columns, different, title="What differs between the runs"))
    for folder, each in fields.items():
        if each.get("name", "") in recipes:
            blocks += recipe_differences(each, recipes[each["name"]], f"{folder}: differences")
    return blocks + [fields_table(each, f"{folder}: run.json") for folder, each in fields.items() if each]


def recipe_differences(fields: Mapping[str, str], recipe: Mapping[str, Any], title: str) -> list[Block]:
    """Returns the table of the fields of a run that its recipe has otherwise; nothing if there are none.

    fields: of `flat_fields`.  recipe: as JSON values.
    """
    own, name = flat_fields(recipe), fields.get("name", "")
    rows = [[field, own.get(field, ""), value] for field, value in fields.items() if own.get(field) != value]
    columns = [Column("field"), Column(f"recipe {name}", wide=True), Column("this run", wide=True)]
    return [Table(columns, rows, title=f"{title} from the recipe {name}")] if rows else []


def fields_table(fields: Mapping[str, str], title: str) -> Block:
    """Returns the table of all fields of a run."""
    columns = [Column("field"), Column("value", wide=True)]
    return Table(columns, list(fields.items()), searchable=True, shown=20, title=title)


# Checks


def _checks(folder: RunFolder) -> list[Block]:
    """Returns the results of `meshwright parity --json` and `rehearse --json` that are kept in the folder."""
    rehearsal = folder.document("rehearsal.json")
    columns = [
        Column("part", cell=lambda row: str(row.get("name"))),
        Column("result", cell=lambda row: str(row.get("result")), wide=True),
        Column("took", "seconds", lambda row: _real(row.get("seconds"))),
    ]
    note = f"mesh {rehearsal.get('mesh', '')}"
    table = Table.of(_objects(rehearsal, "parts"), columns, title=f"Rehearsal, {folder.name}", note=note)
    return [*parity_blocks(folder.document("parity.json"), f"Parity, {folder.name}"), *([table] if table.rows else [])]


def parity_blocks(parity: Mapping[str, Any], title: str) -> list[Block]:
    """Returns the table of a parity document, `Parity` as JSON; nothing if it has no step."""

    def loss(row: Mapping[str, Any], mesh: int) -> str:
        losses = row.get("losses")
        value = _real(losses[mesh]) if isinstance(losses, list) and len(losses) == 2 else None
        return "" if value is None else f"{value:.7f}"

    meshes = [str(mesh) for mesh in parity.get("meshes", [])]
    first, second = meshes if len(meshes) == 2 else ("one mesh", "the other")
    columns = [
        Column("step", "integer", lambda row: row.get("step")),
        Column(f"loss, {first}", cell=lambda row: loss(row, 0)),
        Column(f"loss, {second}", cell=lambda row: loss(row, 1)),
        Column("gradients differ by", cell=lambda row: f"{_real(row.get('gradient_difference')) or 0.0:.1e}"),
        Column("most in", cell=lambda row: str(row.get("worst_tensor", ""))),
    ]
    divergence = parity.get("first_divergence")
    agreement = "equal within 1e-05: losses, and gradients on each tensor's own scale"
    note = f"first divergence: {divergence}" if divergence else agreement
    rows = _objects(parity, "steps")
    table = Table.of(rows, columns, title=title, note=note, printed=len(rows))
    return [table] if table.rows else []


def _objects(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    rows = document.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list | tuple) else []


def _real(value: Any) -> float | None:
    """Returns a JSON number, or None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _at(record: Any, *names: str) -> Any:
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record
