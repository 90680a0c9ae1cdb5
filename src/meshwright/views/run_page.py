"""Report of training runs.

Curves of one or several, marks of events, times, samples, and what was run.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from meshwright.documents import real
from meshwright.formatting import format_step, format_time
from meshwright.reporters import BETWEEN
from meshwright.reporters.goodput import METRIC, METRICS, TIMES
from meshwright.runs.catalogue import list_recipes
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run_file import run_to_dict, split_chosen
from meshwright.views.blocks import (
    Bar,
    Bars,
    Block,
    Code,
    Column,
    Figure,
    Figures,
    Grid,
    Table,
    Text,
    Tone,
)
from meshwright.views.charts import Axis, Chart, Mark, Series
from meshwright.views.colours import series_colour
from meshwright.views.health_blocks import health_blocks
from meshwright.views.report import Live, Report, Section
from meshwright.views.run_data import LINK, STEPS, UNITS, axis_choice, data_blocks
from meshwright.views.run_folder import Curve, RunFolder, flat_fields, objects
from meshwright.views.run_goodput import goodput_of
from meshwright.views.run_hosts import host_blocks, memory_blocks
from meshwright.views.run_status import RunStatus, median_of, restarts_of, run_status
from meshwright.views.terminal import print_blocks

_CHECKPOINTS = 24
"""Most checkpoints that a curve carries, spread over it."""
_ALARMS = 12
"""Last alarms that a page shows."""
_SPIKE = 3.0
"""Times the median above which a time is a spike, which its axis does not reach."""
_HELD_OUT = "held-out loss"
_WRAPPED = ":Wrapped"
"""Class of a wrapped model in run.json, whose code a page does not load."""
_CURVES = {
    "loss": ("Loss", Axis("", toggle=True), "Points are losses on held-out data."),
    "learning rate": ("Learning rate", Axis("", toggle=True), ""),
    "gradient norm": ("Gradient norm", Axis("before clipping", toggle=True), ""),
    "tokens/s": ("Tokens per second", Axis("all devices", "count", zero=True), ""),
    "examples/s": ("Examples per second", Axis("all devices", "count", zero=True), ""),
    "MFU": (
        "MFU",
        Axis("of the chips' peak", "fraction", zero=True),
        "Model FLOPs achieved, as a fraction of the peak of all devices.",
    ),
    METRIC: (
        "Goodput",
        Axis("of the time so far", "fraction", zero=True),
        "Share of the time since the first event in steps that count.",
    ),
    "step seconds": ("Step time", Axis("", "seconds", toggle=True), ""),
    "input wait seconds": (
        "Waiting for input",
        Axis("in each step", "seconds", zero=True, toggle=True),
        "",
    ),
    "largest expert load": ("Largest expert load", Axis("times the mean", zero=True), ""),
    "batch": ("Batch", Axis("sequences", "integer", zero=True), ""),
}
"""Metrics in the order of their charts, with title, axis and note; other metrics of a run follow by
name."""
_PARTS = ("input wait", *BETWEEN)
"""Parts of the time from one step to the next in which the loop does something else; a step has the
first of them."""


def run_page(folders: Sequence[RunFolder], live: Live | None = None) -> Report:
    """Returns the report of one run, or of several over each other.

    Each is compared with the recipe of its name.
    """
    names = {folder.document("run.json").get("name") for folder in folders}
    recipes: dict[str, Any] = {
        name: run_to_dict(find_recipe(name)) for name in list_recipes() if name in names
    }
    sections = [
        Section("Overview", [_overview(folders), *_left_out(folders)]),
        Section("Alarms", _alarms(folders), "Times at which no step came, the last first."),
        Section("First bad tensor", _bad_steps(folders), "Who was first, step by step."),
        *_health_sections(folders),
        Section(
            "Goodput",
            _goodput_tables(folders),
            "Where the time of the run went since it began, restarts included.",
        ),
        Section("Hosts", _hosts(folders), "Each process: its last sign, and where its time goes."),
        Section(
            "Machines",
            _machine_tables(folders),
            "Devices, links and hosts that left what a healthy machine has, the last first.",
        ),
        Section("Data", _data(folders), "How far the run is in its data."),
        Section("Curves", _curves(folders)),
        Section("Memory", _memory(folders), "The most that was in use so far."),
        Section("Time", _times(folders), "Where the seconds between one step and the next go."),
        Section("What happened", [_event_table(folders)]),
        Section("Samples", _samples(folders), "Text sampled from the model, the last first."),
        Section("Configuration", _configuration(folders, recipes)),
    ]
    footer = "Made by Meshwright from the files in the output folder."
    if live is None:
        footer += " This file loads nothing."
    return Report(
        " and ".join(folder.name for folder in folders),
        [section for section in sections if section.blocks],
        topic="run",
        lead=_lead(folders),
        tab=_tab(folders),
        footer=footer,
        live=live,
    )


def _tab(folders: Sequence[RunFolder]) -> str:
    """Returns the title of the tab, which has step and loss: `step 1,200, loss 2.3145, mine`."""
    if len(folders) > 1:
        return ""
    loss = folders[0].curves.get("loss", Curve())
    if not loss.count:
        return ""
    return f"step {loss.last_step:,}, loss {loss.recent[-1]:.4f}, {folders[0].name}"


def _curves(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns the curves of runs over each other, and the choice of their x axis."""
    charts = _charts(folders)
    if not charts:
        return [Text(["No step is over yet."], tone="faded")]
    return [*axis_choice(folders), Grid(charts)]


def _hosts(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns the table of each run's processes."""
    now = time.time()
    blocks: list[Block] = []
    for folder in folders:
        blocks += host_blocks(folder, now, folder.name if len(folders) > 1 else "")
    return blocks


def _data(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns the place of each run in its data."""
    blocks: list[Block] = []
    for folder in folders:
        blocks += data_blocks(folder, folder.name if len(folders) > 1 else "")
    return blocks


def _memory(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns the memory of each run's devices and processes."""
    blocks: list[Block] = []
    for folder in folders:
        blocks += memory_blocks(folder, _suffix(folders, folder))
    return blocks


def _alarms(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns the alarms of runs whose steps did not come."""
    blocks: list[Block] = []
    for folder in folders:
        alarms = folder.events_of("alarm")[: -_ALARMS - 1 : -1]
        lines = [f"{_clock(event.get('time'))}: {event.get('said')}" for event in alarms]
        if lines:
            title = folder.name if len(folders) > 1 else ""
            blocks.append(Text(lines, tone="bad", title=title))
    return blocks


def _bad_steps(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns the lines that runs have said of their bad steps, and of replicas that differed."""
    blocks: list[Block] = []
    for folder in folders:
        prefix = f"{folder.name}, " if len(folders) > 1 else ""
        events = [*folder.events_of("first tensor"), *folder.events_of("replica")]
        for event in events:
            lines = event.get("lines")
            if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
                title = f"{prefix}step {int(real(event.get('bad')) or 0):,}"
                blocks.append(Text(lines, tone="bad", title=title))
    return blocks


def _health_sections(folders: Sequence[RunFolder]) -> list[Section]:
    """Returns a section with the health of each run that has some."""
    lead = "Every tensor by layer and step, over its own history."
    sections = []
    for folder in folders:
        name = "Health" if len(folders) == 1 else f"Health, {folder.name}"
        sections.append(Section(name, health_blocks(folder.health), lead))
    return sections


def _lead(folders: Sequence[RunFolder]) -> str:
    """Returns the first sentence: how many runs, or the model and the mesh of one."""
    if len(folders) > 1:
        return f"{len(folders)} runs over each other."
    run = folders[0].document("run.json")
    name = run.get("name", folders[0].name)
    family = _at(run, "model", "family") or "a model"
    starts = folders[0].events_of("start")
    if not starts or "mesh" not in starts[-1]:
        return f"{name}, {family}."
    start = starts[-1]
    return (
        f"{name}, {family} on mesh {start['mesh']} ({start.get('devices')} x {start.get('kind')})."
    )


def _prefix(folders: Sequence[RunFolder], folder: RunFolder, separator: str) -> str:
    """Returns what marks the parts of one run in a page of several; empty for a single run."""
    return f"{folder.name}{separator} " if len(folders) > 1 else ""


def _suffix(folders: Sequence[RunFolder], folder: RunFolder) -> str:
    """Returns what a title has behind it in a page of several runs; empty for a single run."""
    return f", {folder.name}" if len(folders) > 1 else ""


def _samples(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns the texts that were sampled from each run, the last first."""
    samples: list[Block] = []
    for folder in folders:
        prefix = _prefix(folders, folder, ",")
        texts = [event for event in folder.samples if isinstance(event.get("text"), str)]
        for event in reversed(texts):
            step = int(real(event.get("step")) or 0)
            samples.append(Code(event["text"], title=f"{prefix}step {step:,}"))
    return samples


def _at(record: Any, *names: str) -> Any:
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


# Overview


def _overview(folders: Sequence[RunFolder]) -> Block:
    figures = {folder.name: _figures(folder) for folder in folders}
    if len(folders) == 1:
        return Figures(figures[folders[0].name])
    names: dict[str, None] = {}
    for each in figures.values():
        names |= dict.fromkeys(figure.label for figure in each)
    rows = []
    for folder, each in figures.items():
        value_of = {figure.label: figure.value for figure in each}
        rows.append([folder, *(value_of.get(name, "") for name in names)])
    return Table([Column("run"), *map(Column, names)], rows)


_TONES: dict[str, Tone] = {
    "running": "good",
    "busy": "good",
    "late": "warning",
    "silent": "bad",
}


def _state_figures(status: RunStatus, restarts: int) -> list[Figure]:
    """Returns what a run does and, while steps are expected of it, the age of the last one."""
    tone = _TONES.get(status.state, "")
    details = []
    if status.state != "running" and status.summary != status.word:
        details.append(status.summary.removeprefix(f"{status.word}: "))
    if restarts > 0:
        details.append(f"{restarts} restart{'s' * (restarts > 1)}")
    if status.steps_lost:
        details.append(f"{status.steps_lost:,} steps taken again")
    found = [Figure("state", status.word, "; ".join(details), tone)]
    if status.progresses and status.age is not None:
        usual = ""
        if status.step_seconds is not None:
            usual = f"a step takes {format_step(status.step_seconds)}"
        found.append(Figure("age of last step", format_time(status.age), usual, tone))
    return found


def _left_out(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns what of the files could not be read, in words."""
    texts = []
    for folder in folders:
        prefix = _prefix(folders, folder, ":")
        for what, number in sorted(folder.left_out.items()):
            texts.append(f"{prefix}{number:,} {what} not shown.")
    return [Text(texts, tone="bad")] if texts else []


def _figures(folder: RunFolder) -> list[Figure]:
    loss = folder.curves.get("loss", Curve())
    held_out = folder.curves.get(_HELD_OUT)
    status = run_status(folder)
    of_steps = "" if status.steps is None else f"of {status.steps:,}"
    found = _state_figures(status, folder.event_counts["start"] - 1)
    found.append(Figure("step", f"{status.step:,}", of_steps))
    if loss.count:
        last = list(loss.recent)[-20:]
        recent = [value for value in last if math.isfinite(value)]
        mean = f"{statistics.fmean(recent):.4f}" if recent else "not finite"
        found.append(Figure("loss", mean, f"mean of {len(last)} step{'s' * (len(last) > 1)}"))
    if held_out is not None:
        found.append(
            Figure(_HELD_OUT, f"{held_out.recent[-1]:.4f}", f"at step {held_out.last_step:,}")
        )
    good = goodput_of(folder, status, time.time())
    if good is not None:
        since = f"of {format_time(good.wall)} in steps that count"
        found.append(Figure("goodput", f"{good.fraction:.1%}", since))
    typical = status.step_seconds
    predicted = _predicted(folder)
    if typical is not None:
        foreseen = "median"
        if predicted:
            foreseen += f"; foreseen {format_step(predicted['step seconds'])}"
        found.append(Figure("step time", format_step(typical), foreseen))
    if status.seconds_left is not None:
        found.append(Figure("left", format_time(status.seconds_left), "at the median"))
    for name in ("tokens/s", "examples/s"):
        value = median_of(folder, name)
        if value is not None:
            values = len(folder.curves[name].recent)
            found.append(Figure(name, f"{value:,.0f}", f"median of the last {values} steps"))
    mfu = median_of(folder, "MFU")
    if mfu is not None:
        foreseen = f"foreseen {predicted['MFU']:.1%}" if "MFU" in predicted else ""
        found.append(Figure("MFU", f"{mfu:.1%}", foreseen))
    return found


def _predicted(folder: RunFolder) -> dict[str, float]:
    """Returns the predicted seconds of a step, from foresight.json, and the MFU of such a step."""
    gaps = objects(folder.document("foresight.json"), "gaps")
    seconds = sum(real(row.get("predicted")) or 0.0 for row in gaps)
    if not seconds:
        return {}
    predicted = {"step seconds": seconds}
    measured = median_of(folder, "step seconds")
    mfu = median_of(folder, "MFU")
    if measured and mfu:
        predicted["MFU"] = mfu * measured / seconds
    return predicted


# Curves


def loss_unit(folder: RunFolder) -> str:
    """Returns the unit of a run's loss.

    Nats per token of a text, nats per pair, or its author's own mean.
    """
    run = folder.document("run.json")
    family = _at(run, "model", "family")
    if family is None:
        return ""
    if str(family).endswith(_WRAPPED):
        return "mean over examples"
    if _at(run, "finetune", "objective") == "preferences":
        return "nats per pair"
    return "nats per token"


def _charts(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns a chart of each metric that a run has, the known ones first."""
    known = {*_CURVES, *UNITS, _HELD_OUT, *METRICS, *(f"{name} seconds" for name in _PARTS)}
    others = {name for folder in folders for name in folder.curves} - known
    metrics = dict(_CURVES)
    for name in sorted(others):
        metrics[name] = (name[:1].upper() + name[1:], Axis("", toggle=True), "")
    units = " or ".join(dict.fromkeys(loss_unit(folder) for folder in folders))
    title, axis, note = metrics["loss"]
    metrics["loss"] = (title, dataclasses.replace(axis, label=units), note)
    found: list[Block] = []
    for metric, (title, axis, note) in metrics.items():
        series = _series(folders, metric)
        if not series or (metric == METRIC and all(len(each.x) < 2 for each in series)):
            continue
        if metric in _WITH_SPIKES:
            axis, beyond = _without_spikes(axis, series)
            note = f"{note} {beyond}".strip()
        marks: list[Mark] = []
        for folder in folders:
            marks += _marks(folder, _prefix(folders, folder, ":"))
            predicted = _predicted(folder).get(metric)
            if predicted:
                marks.append(Mark("y", predicted, "foreseen", fit=True))
        found.append(
            Chart(
                STEPS,
                axis,
                series,
                marks,
                smoothing=0.0,
                height=320,
                across=LINK,
                title=title,
                note=note,
            )
        )
    return found


def _series(folders: Sequence[RunFolder], metric: str) -> list[Series]:
    """Returns the curves of one metric, a color for each run,
    and the points on those of the loss."""
    several = len(folders) > 1
    series: list[Series] = []
    for number, folder in enumerate(folders):
        colour = series_colour(number)
        if metric in folder.curves:
            name = folder.name if several else metric
            series.append(_line(name, folder.curves[metric], colour, run=folder.name))
        if metric == "loss":
            colour_of_points = colour if several else "c2"
            series += _points_on_loss(folder, _prefix(folders, folder, ","), colour_of_points)
    return series


_WITH_SPIKES = ("step seconds", "input wait seconds")
"""Times, of which the first step after a save or an evaluation can be many times the others."""


def _without_spikes(axis: Axis, series: Sequence[Series]) -> tuple[Axis, str]:
    """Returns an axis that rare spikes do not set, and a sentence on what is beyond it."""
    values = [value for each in series for value in each.y if value is not None]
    if not values:
        return axis, ""
    top = _SPIKE * statistics.median(values)
    beyond = sum(value > top for value in values)
    if not beyond or top <= 0 or 4 * beyond > len(values):
        return axis, ""
    points = f"{beyond:,} point{'s' * (beyond > 1)} above {format_step(top)}"
    are = "is" if beyond == 1 else "are"
    note = (
        f"{points} {are} beyond the axis, the greatest {format_step(max(values))}: log y shows all."
    )
    return dataclasses.replace(axis, top=top), note


def _line(name: str, curve: Curve, colour: str, **look: Any) -> Series:
    values = [value if math.isfinite(value) else None for value in curve.values]
    return Series(name, curve.steps, values, colour, **look)


def _points_on_loss(folder: RunFolder, prefix: str, colour: str) -> list[Series]:
    """Returns the checkpoints, some of them, below the curve, and the held-out losses above it."""
    found = []
    curve = folder.curves.get("loss", Curve())
    known = [pair for pair in zip(curve.steps, curve.values, strict=True) if math.isfinite(pair[1])]
    saves = {
        int(e["step"]): real(e.get("seconds")) or 0.0
        for e in folder.events_of("save")
        if known and known[0][0] <= e["step"] <= known[-1][0]
    }
    steps = _spread(sorted(saves), _CHECKPOINTS)
    if steps:
        count = folder.event_counts["save"]
        some = f"\nthe curve carries {len(steps)} of {count:,} checkpoints"
        tips = [
            f"Checkpoint of step {step:,}\nsaving took {format_time(saves[step])}"
            + (some if count > len(steps) else "")
            for step in steps
        ]
        # On the line as it is drawn, also where that has no point of the step.
        losses = np.interp(steps, [step for step, _ in known], [value for _, value in known])
        name = f"{prefix}checkpoints"
        found.append(
            Series(
                name,
                steps,
                losses.tolist(),
                "muted",
                style="points",
                marker="square",
                tips=tips,
                under=True,
                run=folder.name,
            )
        )
    if _HELD_OUT in folder.curves:
        held_out = folder.curves[_HELD_OUT]
        found.append(
            _line(
                f"{prefix}{_HELD_OUT}",
                held_out,
                colour,
                style="points",
                marker="diamond",
                run=folder.name,
            )
        )
    return found


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """Returns at most `most` of the steps, evenly spread, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[n * (len(steps) - 1) // (most - 1)] for n in range(most)]


def _marks(folder: RunFolder, prefix: str) -> list[Mark]:
    marks = []
    for restart in restarts_of(folder):
        colour = "c2" if restart.kind == "restart" else "c4"
        label = f"{prefix}{restart.label}"
        marks.append(Mark("x", restart.step, label, colour, run=folder.name))
    for step, _ in folder.bad_steps():
        marks.append(Mark("x", step, f"{prefix}bad step", "bad", run=folder.name))
    return marks[-40:]


# Time


def _times(folders: Sequence[RunFolder]) -> list[Block]:
    rows: list[Bar] = []
    notes: list[str] = []
    for folder in folders:
        if not folder.curves.get("step seconds", Curve()).count:
            continue
        waiting, *between = (_mean_seconds(folder, name) for name in _PARTS)
        own = _mean_seconds(folder, "step") - waiting
        if own < 0:
            more = format_step(-own)
            notes.append(f"{folder.name}: waiting for data is {more} more than a step took.")
        rows.append(Bar(folder.name, [own if own > 0 else 0.0, waiting, *between]))
    blocks: list[Block] = []
    if rows:
        colours = ("c1", "c2", "c3", "c4", "c5", "c6")
        blocks.append(
            Bars(
                "seconds",
                ["step", *_PARTS],
                colours,
                rows,
                title="Mean time between steps",
                note=" ".join(notes),
            )
        )
    for folder in folders:
        document = folder.document("foresight.json")
        columns = [
            Column("part of a step", cell="part"),
            Column("foreseen", "seconds", "predicted"),
            Column("measured", "seconds", "measured"),
        ]
        note = f"Figures of the chip: {document.get('source', '')}"
        blocks += _table(
            document, "gaps", columns, title=f"Foreseen and measured, {folder.name}", note=note
        )
        blocks += profile_blocks(folder.document("profile.json"), f"Profile, {folder.name}")
    return blocks


def _goodput_tables(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns a table of the time by cause for each run."""
    tables: list[Block] = []
    for folder in folders:
        good = goodput_of(folder, run_status(folder), time.time())
        if good is None:
            continue
        rows = [
            {"cause": cause, "seconds": seconds, "share": f"{seconds / good.wall:.1%}"}
            for cause, seconds in good.seconds.items()
            if seconds
        ]
        columns = [
            Column("time in", cell="cause"),
            Column("seconds", "seconds", "seconds", bar=True),
            Column("share", cell="share"),
        ]
        tables.append(Table.of(rows, columns, title=f"Goodput, {folder.name}"))
    return tables


def _machine_tables(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns a table of the warnings of each run's machines."""
    columns = [
        Column("time (UTC)", cell=lambda row: _clock(row.get("time"))),
        Column("step", "integer", "step"),
        Column("host", cell="host", choices=True),
        Column("warning", cell="warning", wide=True),
    ]
    tables: list[Block] = []
    for folder in folders:
        events = folder.events_of("machine")
        if events:
            title = f"Machines, {folder.name}"
            tables.append(Table.of(events[::-1], columns, searchable=True, shown=30, title=title))
    return tables


def _mean_seconds(folder: RunFolder, name: str) -> float:
    """Returns the seconds of a part of the loop in one step, on average."""
    total = folder.curves.get(f"{name} seconds", Curve()).total
    return total / folder.curves["step seconds"].count


def _table(
    document: Mapping[str, Any], name: str, columns: Sequence[Column], **fields: Any
) -> list[Block]:
    rows = objects(document, name)
    return [Table.of(rows, columns, **fields)] if rows else []


def profile_blocks(document: Mapping[str, Any], title: str) -> list[Block]:
    """Returns the table of a profile: measured against planned and simulated seconds.

    profile: `bench.step_profile.Profile` as JSON.
    """
    columns = [
        Column("kind", cell="kind", choices=True),
        Column("what", cell="name", wide=True),
        Column("measured", "seconds", "measured", bar=True),
        Column("planned", "seconds", "planned"),
        Column("simulated", "seconds", "simulated"),
    ]
    lines = [str(document.get("note", ""))]
    for name in ("slow_devices", "differences"):
        sentences = document.get(name)
        if isinstance(sentences, list | tuple):
            lines += [f"{sentence}." for sentence in sentences]
    note = " ".join(lines)
    return _table(document, "rows", columns, searchable=True, printed=40, title=title, note=note)


def print_profile(console: Console, document: Mapping[str, Any]) -> None:
    """Prints a profile: the step, its parts, its collectives and the scopes of its program.

    The longest come first.
    """
    title = f"profile of steps {document['first']} to {document['last']}, of one device in one step"
    print_blocks(console, title, "", profile_blocks(document, ""))


# What happened


def _event_table(folders: Sequence[RunFolder]) -> Block:
    rows: list[dict[str, Any]] = []
    for folder in folders:
        name = folder.name if len(folders) > 1 else ""
        rows += [{**event, "run": name} for event in folder.recent_events]
        if folder.open_activity:
            rows.append({**folder.open_activity, "run": name})
        rows += [
            {"run": name, "step": step, "event": "bad step", "": why}
            for step, why in folder.bad_steps()
        ]
    columns = [
        Column("run", cell="run", choices=True),
        Column("time (UTC)", cell=lambda row: _clock(row.get("time"))),
        Column("step", "integer", "step"),
        Column("event", cell="event", choices=True),
        Column("took", "seconds", "seconds"),
        Column("detail", cell=_detail, wide=True),
    ]
    return Table.of(rows[::-1], columns, searchable=True, shown=30)


def _detail(event: Mapping[str, Any]) -> str:
    """Formats what an event has besides its time.

    For example `mesh fsdp=4, devices 4, processes 1, kind cpu, fresh`.
    """
    known = ("run", "time", "step", "event", "seconds", "text", "data", "checked", TIMES)
    found = {name: value for name, value in event.items() if name not in known}
    return ", ".join(
        f"{value}" if name in ("how", "") else f"{name} {value}" for name, value in found.items()
    )


def _clock(value: Any) -> str:
    number = real(value)
    if number is None or not 0 <= number < 1e11:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(number))


# Configuration


def _configuration(
    folders: Sequence[RunFolder], recipes: Mapping[str, Mapping[str, Any]]
) -> list[Block]:
    documents = {folder.name: folder.document("run.json") for folder in folders}
    fields = {name: flat_fields(split_chosen(each)[0]) for name, each in documents.items()}
    blocks: list[Block] = []
    if len(folders) > 1:
        names = sorted({name for each in fields.values() for name in each})
        different = []
        for name in names:
            values = [each.get(name, "") for each in fields.values()]
            if len(set(values)) > 1:
                different.append([name, *values])
        columns = [Column("field"), *(Column(name, wide=True) for name in fields)]
        blocks.append(Table(columns, different, title="What differs between the runs"))
    for folder, document in documents.items():
        recipe = recipes.get(fields[folder].get("name", ""))
        blocks += chosen_and_resolved(document, recipe, f"{folder}: ")
    return blocks + [
        fields_table(each, f"{folder}: run.json") for folder, each in fields.items() if each
    ]


def chosen_and_resolved(
    document: Mapping[str, Any], recipe: Mapping[str, Any] | None, prefix: str = ""
) -> list[Block]:
    """Returns what the user chose, what else differs from the recipe, and what was resolved.

    Each is a table.
    A field that the recipe leaves open (`auto`, or none) is resolved on the machine and the data. A
    document that does not record what was chosen has the two last tables, and chosen values are
    among them.
    document, recipe: Runs as JSON values; the recipe is None where the run has none.  prefix: of
    the titles.
    """
    own, chosen = split_chosen(document)
    fields = flat_fields(own)
    given = flat_fields(chosen or {})
    original: dict[str, str] = {}
    name = ""
    if recipe is not None:
        original = flat_fields(split_chosen(recipe)[0])
        name = fields.get("name", "")
    choices = []
    for field, value in given.items():
        resolved = fields.get(field, value)
        shown = value if value == resolved else f"{value}, resolved to {resolved}"
        choices.append([field, original.get(field, ""), shown])
    others, left_open = _differences(fields, given, original)
    by_whom = "Set by the verb, a plan or Python code."
    resolved_note = "The recipe has auto or nothing there: resolved on the machine and the data."
    if chosen is None:
        by_whom = ""
        resolved_note = f"{resolved_note[:-1]}, or given."
    columns = [
        Column("field"),
        Column(f"recipe {name}".rstrip(), wide=True),
        Column("this run", wide=True),
    ]
    found: list[Block] = []
    if choices:
        found.append(Table(columns, choices, title=f"{prefix}chosen"))
    if others:
        title = f"{prefix}differences from the recipe {name}"
        found.append(Table(columns, others, title=title, note=by_whom))
    if left_open:
        title = f"{prefix}resolved where the recipe {name} leaves it open"
        found.append(Table(columns, left_open, title=title, note=resolved_note, shown=10))
    return found


def _differences(
    fields: Mapping[str, str], given: Mapping[str, str], original: Mapping[str, str]
) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the rows of fields that differ from the recipe, and of those that it leaves open.

    given: fields that the user chose, which have no row.  original: fields of the recipe, none
    without a recipe.
    """
    others: list[list[str]] = []
    left_open: list[list[str]] = []
    if not original:
        return others, left_open
    for field, value in fields.items():
        before = original.get(field, "")
        if field in given or before == value:
            continue
        rows = left_open if _is_open(field, before) else others
        rows.append([field, before, value])
    return others, left_open


def _is_open(field: str, value: str) -> bool:
    """Whether a recipe's value stands for one that is chosen for the machine and the data."""
    if field == "training.microbatches":
        return value == "0"
    return value in ("", "auto", "none", "[]") and field != "name"


def fields_table(fields: Mapping[str, str], title: str) -> Block:
    """Returns the table of all fields of a run."""
    columns = [Column("field"), Column("value", wide=True)]
    return Table(columns, list(fields.items()), searchable=True, shown=20, title=title)
