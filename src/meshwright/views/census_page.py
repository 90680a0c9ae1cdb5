"""Report of a census: findings, the simulated schedule, memory over it, the ledger, FLOPs; of two the difference."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from meshwright.analysis.programs import Census
from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.hardware.targets import Target
from meshwright.models.flops import formula_of
from meshwright.planner.estimate import Estimate
from meshwright.planner.explain import Remedy
from meshwright.views.blocks import (
    Bar,
    Bars,
    Block,
    Column,
    Figure,
    Figures,
    Finding,
    Findings,
    Grid,
    Inspector,
    Item,
    Table,
    Text,
)
from meshwright.views.charts import Axis, Chart, Drawing, Mark, Series
from meshwright.views.colours import WORK
from meshwright.views.report import Report, Section
from xlacensus.comparison import Change
from xlacensus.hlo.ledger import LedgerEntry, traffic
from xlacensus.schedule import SimulatedSchedule

_MEMORY_COLOURS = {
    "parameters": "c1",
    "optimizer state": "c6",
    "gradients": "c4",
    "saved activations": "c3",
    "weights in use": "c5",
    "recomputed activations": "good",
    "temporaries": "c8",
    "copies of arguments": "c7",
    "results": "c2",
    "packing": "quiet",
    "other": "muted",
}
_MAX_ENTRIES = 3000
"""Entries of a ledger on a page; the largest are kept."""
_ORDER = {"unexpected": 0, "replicated": 1, "duplicated": 2, "layout": 3, "overlap": 4}
"""Findings that cost most come first; others follow by their bytes."""


def census_title(census: Census) -> str:
    """Returns one line: mesh, device, compile time and versions."""
    mesh = ",".join(f"{axis}={n}" for axis, n in census.mesh.items() if n > 1) or "one device"
    return f"mesh {mesh}, compiled for {census.device} in {census.compile_seconds:.1f} s ({census.versions})"


def census_page(census: Census) -> Report:
    """Returns the report of one census."""
    lead = f"{census_title(census)}; every figure is of one device"
    return Report(census.name, census_sections(census), topic="census", lead=lead)


def census_sections(census: Census, suffix: str = "") -> list[Section]:
    """Returns the sections of a census. suffix: after each heading, if a report has two censuses."""
    link = "ledger" + re.sub(r"[^\w-]", "-", suffix.replace(":", ""))
    schedule = census.schedule
    simulated = []
    if schedule is not None:
        note = (
            f"{schedule.step_seconds:.4g} s per step on {schedule.chip}, simulated: the compiler fixes the order of "
            "the instructions, every time is predicted."
        )
        simulated = [Section("Predicted schedule", schedule_blocks(schedule, census, link), note)]
    sections = [
        Section("Verdict", _verdict(census)),
        Section(
            "Findings", _findings(census), "" if census.findings else "Nothing to mend was found."
        ),
        *simulated,
        Section("Memory of one device", _memory(census)),
        Section("Communication ledger", _ledger(census, link)),
        Section("FLOPs", _flops(census)),
    ]
    return [dataclasses.replace(section, title=section.title + suffix) for section in sections]


def difference_section(changes: Sequence[Change], names: tuple[str, str]) -> Section:
    """Returns two censuses side by side."""
    columns = [
        Column("quantity", cell="quantity"),
        Column(
            "part",
            cell=lambda change: "FLOPs" if change.part == "flops" else change.part,
            choices=True,
        ),
        Column(names[0], cell=lambda change: change.formatted[0]),
        Column(names[1], cell=lambda change: change.formatted[1]),
        Column(
            "ratio",
            "number",
            lambda change: None if change.ratio is None else round(change.ratio, 2),
        ),
    ]
    tones = [
        "bad" if (c.ratio or 0) > 1.02 or (c.ratio is None and c.after) else "" for c in changes
    ]
    title = f"{names[0]} against {names[1]}"
    table = Table.of(changes, columns, searchable=True, tones=tones, title=title, printed=None)
    note = "Of one device; traffic is in bytes sent. Marked rows are larger in the second."
    return Section("Difference", [table], note)


def prediction_section(
    census: Census, target: Target, estimate: Estimate | None, undetermined: float | None = None
) -> Section:
    """Returns the predicted step, and the planner's estimate of the same run against the compiled memory.

    undetermined: seconds of the step without --training.deterministic, where the run has it.
    """
    schedule, compiled, figures = census.schedule, census.memory.compiled, []
    if schedule is not None:
        step, model = f"{schedule.step_seconds:.3g} s per step", sum(census.flops.model.values())
        mfu = model / (schedule.step_seconds * target.chip.flops_bf16)
        figures.append(Figure("simulated schedule", step, f"{mfu:.0%} MFU on {target}"))
        if undetermined:
            plain, cost = f"{undetermined:.3g} s per step", schedule.step_seconds / undetermined - 1
            note = f"{cost:+.1%} with it; what kernels gain by being chosen by timing is not in it"
            figures.append(Figure("without --training.deterministic", plain, note))
    if estimate is not None:
        planned = f"{format_bytes(estimate.bytes)} per device, {estimate.seconds:.3g} s per step"
        difference = f"planned {estimate.bytes / compiled.live - 1:+.0%}"
        figures.append(Figure("planned by arithmetic", planned))
        live = f"{format_bytes(compiled.live)} live at the peak"
        figures.append(
            Figure("compiled", live, f"{difference}; in a heap of {format_bytes(compiled.peak)}")
        )
    return Section("Predicted", [Figures(figures)] if figures else [])


def remedies_section(over: float, remedies: Sequence[Remedy]) -> Section:
    """Returns the options that reduce the memory of a step, cheapest first. over: bytes too many."""
    columns = [
        Column("option", cell="option"),
        Column("saves", "bytes", "saved_bytes"),
        Column("per step", cell=lambda remedy: f"{remedy.extra_seconds * 1e3:+,.0f} ms"),
        Column("", cell=lambda remedy: "" if remedy.saved_bytes >= over else "not enough alone"),
    ]
    table = Table.of(remedies, columns, title="Options that save memory, predicted")
    return Section(f"{format_bytes(over)} too many", [table])


def _unpriced(kernels: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count} x)" for name, count in kernels.items())


def _verdict(census: Census) -> list[Block]:
    memory, schedule = census.memory.compiled, census.schedule
    sent, count = (
        sum(entry.sent for entry in census.ledger),
        sum(entry.count for entry in census.ledger),
    )
    figures = []
    if schedule is not None:
        exposed = schedule.by_kind.get("exposed", 0.0)
        part = exposed / schedule.step_seconds if schedule.step_seconds else 0.0
        figures.append(
            Figure(
                "predicted step",
                format_step(schedule.step_seconds),
                f"on {schedule.chip}, simulated",
            )
        )
        figures.append(
            Figure(
                "exposed communication",
                f"{part:.1%}",
                format_step(exposed),
                "bad" if part > 0.2 else "",
            )
        )
    collectives = f"{count:,} collectives of {len(census.ledger)} instructions"
    figures += [
        Figure(
            "peak memory", format_bytes(memory.peak), f"allocated; {format_bytes(memory.live)} live"
        ),
        Figure("sent by a device", format_bytes(sent), collectives),
        Figure(
            "compiled FLOPs", format_count(census.flops.compiled), "matrix products of a device"
        ),
        Figure("findings", str(len(census.findings)), "", "bad" if census.findings else "good"),
    ]
    doubts = [f"This census does not trust itself: {doubt}." for doubt in census.doubts]
    if census.unread:
        doubts.append(
            f"Incomplete ledger: {len(census.unread)} instructions look like collectives and are not read; bytes and "
            f"predicted time lack them: {', '.join(census.unread[:4])}."
        )
    return [Figures(figures), *([Text(doubts, "warning")] if doubts else [])]


def _findings(census: Census) -> list[Block]:
    items = [
        Finding(
            f.kind,
            f.subject,
            f.reason,
            f.fix,
            f.line,
            format_bytes(f.bytes),
            "bad" if f.bytes >= 2**20 else "",
        )
        for f in sorted(census.findings, key=lambda f: (_ORDER.get(f.kind, 9), -f.bytes))
    ]
    return [Findings(items)] if items else []


def schedule_blocks(
    schedule: SimulatedSchedule, census: Census | None = None, link: str = ""
) -> list[Block]:
    """Returns the step on a timeline and as a bar of its parts. census, link: whose ledger a click on a box selects."""
    spans, (lanes, lane_of) = schedule.spans, _lanes(schedule)
    entries = (
        {}
        if census is None
        else {e.instruction: str(i) for i, e in enumerate(census.ledger) if e.instruction}
    )
    names: dict[str, int] = {}
    boxes = {
        "lane": lane_of,
        "name": [names.setdefault(s.name, len(names)) for s in spans],
        "key": [entries.get(s.instruction, "") if s.kind == "collective" else "" for s in spans],
    }
    for field in ("kind", "start", "seconds", "count", "depth", "exposed"):
        boxes[field] = [getattr(span, field) for span in spans]
    kinds = [
        {"kind": kind, "name": WORK[kind][1], "colour": kind}
        for kind in dict.fromkeys(s.kind for s in spans)
    ]
    data = {"lanes": lanes, "kinds": kinds, "names": list(names), "spans": boxes, "link": link}
    timeline = Drawing(
        "Timeline",
        {**data, "seconds": schedule.step_seconds},
        title="The step on one device",
        note="Every iteration of a loop is drawn. A red foot marks where only the transfer runs.",
    )
    doubts = [f"Not to be trusted: {schedule.doubt}."] if schedule.doubt else []
    doubts += [f"Not priced: {_unpriced(schedule.unpriced)}."] if schedule.unpriced else []
    return [timeline, _step_parts(schedule), *([Text(doubts, "warning")] if doubts else [])]


def _lanes(schedule: SimulatedSchedule) -> tuple[list[str], list[int]]:
    """Returns the rows of a schedule, one for the links of each set of axes, and the row of each span."""
    links = sorted({span.axes for span in schedule.spans if span.kind == "collective"})
    lanes = [
        "computation",
        *(f"{axes} ({schedule.routes.get(axes, 'links')})" for axes in links),
        "host",
        "loops",
    ]
    rows = {"host": len(lanes) - 2, "loop": len(lanes) - 1}
    return lanes, [
        1 + links.index(s.axes) if s.kind == "collective" else rows.get(s.kind, 0)
        for s in schedule.spans
    ]


def _step_parts(schedule: SimulatedSchedule) -> Bars:
    parts = [
        (WORK[kind][1], kind, n) for kind, n in schedule.by_kind.items() if kind != "exposed" and n
    ]
    exposed = (
        (f"exposed, {axes} ({schedule.routes.get(axes, 'HBM')})", n)
        for axes, n in schedule.exposed.items()
    )
    parts += [(name, "exposed", n) for name, n in exposed if n]
    parts += [("pipeline bubble", "bubble", schedule.bubble)] if schedule.bubble else []
    parts += [("busy links", "collective", 0.0)] if schedule.link_seconds else []
    idle = [0.0] * (len(parts) - 1)
    rows = [Bar("one step", [n for _, _, n in parts])]
    rows += [Bar(f"links of {axes}", [*idle, n]) for axes, n in schedule.link_seconds.items()]
    return Bars(
        "seconds",
        [name for name, _, _ in parts],
        [colour for _, colour, _ in parts],
        rows,
        legend_row=0,
        title="Where the seconds go",
        note="Links are busy while the device computes; time during which only communication runs is exposed.",
    )


def _drawn(n: float) -> float:
    """Returns the length of a part of a bar: what is below zero is in the note instead."""
    return n if n > 0 else 0.0


def _memory(census: Census) -> list[Block]:
    memory, profile = census.memory, census.memory.profile
    categories = memory.by_category()
    copies = "copies of arguments"
    shown = {
        c: copies if c.startswith("copies of ") else c if c in _MEMORY_COLOURS else "other"
        for c in categories
    }
    names = sorted(set(shown.values()), key=list(_MEMORY_COLOURS).index)
    by_module: dict[str, list[float]] = {}
    for part in memory.parts:
        values = by_module.setdefault(part.module or "no module", [0.0] * len(names))
        values[names.index(shown[part.category])] += part.bytes
    totals = [sum(n for c, n in categories.items() if shown[c] == name) for name in names]
    rows = [Bar("all", [_drawn(n) for n in totals])]
    ordered = sorted(by_module.items(), key=lambda pair: -sum(pair[1]))
    for module, values in ordered[:16]:
        if sum(values) > 0:
            rows.append(Bar(module, [_drawn(n) for n in values]))
    title = f"{format_bytes(memory.compiled.peak)} at the peak, by module and category"
    less = [f"{name} {n:,.0f} bytes" for name, n in zip(names, totals, strict=True) if n < 0]
    bars = Bars(
        "bytes",
        names,
        [_MEMORY_COLOURS[name] for name in names],
        rows,
        legend_row=0,
        title=title,
        note=f"Not drawn, arrays that share memory: {', '.join(less)}." if less else "",
    )
    if profile is None or not profile.moments:
        return [bars]
    marks = [Mark("x", profile.peak, "peak", "limit")]
    marks += (
        []
        if profile.backward is None
        else [Mark("x", profile.backward, "the backward pass begins", "accent")]
    )
    chart = Chart(
        Axis("instruction of the schedule", "integer"),
        Axis("live temporaries", "bytes", zero=True),
        [Series("temporaries", profile.moments, profile.live_bytes, "c1", "area")],
        marks,
        title="Temporaries over the schedule",
        height=280,
        note="A loop's body counts once; arguments are always there.",
    )
    columns = [
        Column("bytes", "bytes", "bytes", bar=True),
        Column("category", cell="category", choices=True),
        Column("module", cell="module", choices=True),
        Column("array", cell="array"),
        Column("source line", cell="line"),
        Column("lives from", "integer", "start", where="page"),
        Column("to", "integer", "end", where="page"),
        Column("instruction", cell="instruction", where="page"),
        Column("operation", cell="op_name", wide=True, where="page"),
    ]
    note = f"The {len(profile.buffers)} largest temporaries that are live at instruction {profile.peak:,}."
    table = Table.of(
        profile.buffers,
        columns,
        searchable=True,
        title="What makes the peak",
        note=note,
        shown=14,
        printed=3,
    )
    return [chart, bars, table]


def _ledger(census: Census, link: str) -> list[Block]:
    if not census.ledger:
        return [Text(["No communication."])]
    sums = sorted(traffic(census.ledger), key=lambda row: -row["sent"])
    schedule = census.schedule
    (timed, routes) = ({}, {}) if schedule is None else (schedule.by_collective, schedule.routes)
    kind = Column("collective", cell="kind", choices=True)
    over = Column("axes", cell="axes_label", choices=True)
    sent_by = Column("sent", "bytes", "sent", bar=True)
    count = Column("count", "integer", "count")
    summed = [Column("collective", cell="kind"), Column("axes", cell="axes"), count]
    summed += [Column("payload", "bytes", "total"), sent_by]
    payload = Column("payload", "bytes", "payload", where="page")
    exposed_for = Column(
        "exposed", "seconds", lambda e: timed[e.instruction][1] if e.instruction in timed else None
    )
    operands = Column("operands", cell=_operands, where="terminal")
    line = Column("source line", cell="line")
    columns = [
        Column("tensor or scope", cell=_tensor),
        kind,
        over,
        operands,
        sent_by,
        count,
        payload,
        exposed_for,
    ]
    columns += [Column("overlap", cell=_overlap), line]
    links = Column("links", cell=lambda e: routes.get(e.axes_label, ""))
    facts = [
        kind,
        over,
        links,
        Column("devices of a group", "integer", "group_size"),
        payload,
        count,
        sent_by,
    ]
    facts += [
        exposed_for,
        operands,
        Column("overlapped with", cell=lambda e: ", ".join(e.overlapped[:6])),
        line,
    ]
    facts += [Column("operation", cell="op_name"), Column("instruction", cell="instruction")]
    entries = sorted(enumerate(census.ledger), key=lambda pair: -pair[1].sent)
    largest = {str(i): entry for i, entry in entries[:_MAX_ENTRIES]}
    left = len(entries) - len(largest)
    items = {
        key: Item(_tensor(e), "", [column.of(e) for column in facts]) for key, e in largest.items()
    }
    empty, first = "Click a row, or a transfer on the timeline.", next(iter(largest))
    inspector = Inspector(link, facts, items, first=first, title="Entry", empty=empty, where="page")
    table = Table.of(
        largest.values(),
        columns,
        keys=list(largest),
        link=link,
        searchable=True,
        title="Every collective",
        note=f"{left} smaller ones are left out; --json has all." if left else "",
        shown=24,
        printed=16,
    )
    return [Grid([Table.of(sums, summed, printed=None), inspector]), table]


def _tensor(entry: LedgerEntry) -> str:
    return entry.tensor or entry.instruction


def _operands(entry: LedgerEntry) -> str:
    return " ".join(entry.operands[:2]) + (" ..." if len(entry.operands) > 2 else "")


def _overlap(entry: LedgerEntry) -> str:
    if not entry.asynchronous:
        return "synchronous"
    return f"overlaps {len(entry.overlapped)} instructions" if entry.overlapped else "exposed"


def _flops(census: Census) -> list[Block]:
    flops, model = census.flops, sum(census.flops.model.values())
    text = f"{format_count(flops.compiled)} in the compiled matmuls"
    if model and flops.compiled:
        text += f"; model FLOPs {format_count(model)} ({model / flops.compiled:.0%})"
    if flops.intensity:
        text += f"; {flops.intensity:.1f} FLOPs per byte by the compiler's cost analysis"
    unpriced = f"Not in it, FLOPs unknown: {_unpriced(flops.unpriced)}."
    warnings = [Text([unpriced], "warning")] if flops.unpriced else []
    tables: list[Block] = []
    if flops.model:
        columns = [Column("item"), Column("FLOPs", "count", bar=True), Column("formula", wide=True)]
        note = "formula of the forward pass; a training step is three of it"
        rows = [(item, n, formula_of(item)) for item, n in flops.model.items()]
        tables.append(Table(columns, rows, title="Model FLOPs", note=note))
    columns = [
        Column("phase", cell="phase", choices=True),
        Column("module", cell="module", choices=True),
        Column("FLOPs", "count", "flops", bar=True),
    ]
    title = "Compiled matrix products"
    tables.append(
        Table.of(flops.matmuls, columns, searchable=True, title=title, shown=20, printed=8)
    )
    return [Text([f"{text}."]), *warnings, Grid(tables)]
