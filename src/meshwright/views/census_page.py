"""Report of a census: findings, the simulated schedule, memory over it, the ledger, FLOPs; of two the difference."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.analysis.census import Census, summarise_traffic
from meshwright.analysis.compare import Change, LimitExceeded
from meshwright.analysis.run_memory import MeasuredMemory, SavingMemory
from meshwright.analysis.simulate import SimulatedSchedule
from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.hardware.targets import Target
from meshwright.hlo.ledger import LedgerEntry
from meshwright.models.flops import FORMULAS
from meshwright.planner.estimate import Estimate
from meshwright.planner.explain import Remedy
from meshwright.views.blocks import (
    Axis,
    Bar,
    Bars,
    Block,
    Cell,
    Chart,
    Column,
    Figure,
    Figures,
    Finding,
    Findings,
    Grid,
    Inspector,
    Item,
    Mark,
    Matrix,
    Series,
    Table,
    Text,
    Timeline,
    Unit,
    WorkKind,
    WorkSpans,
)
from meshwright.views.colours import WORK
from meshwright.views.report import Report, Section

_FACTS: dict[str, Unit] = {
    "collective": "text",
    "mesh axes": "text",
    "links": "text",
    "devices of a group": "integer",
    "payload of one": "bytes",
    "executions": "integer",
    "sent by a device": "bytes",
    "exposed": "seconds",
    "operands": "text",
    "overlapped with": "text",
    "source line": "text",
    "operation": "text",
    "instruction": "text",
}
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
"""Category of memory -> its colour."""
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


def census_html(census: Census) -> str:
    """Returns the report of a census as a frame for a notebook."""
    return census_page(census).frame()


def census_sections(census: Census, suffix: str = "") -> list[Section]:
    """Returns the sections of a census. suffix: after each heading, if a report has two censuses."""
    link = f"ledger{suffix}".replace(" ", "-").replace("=", "-").replace(",", "-").replace(":", "")
    schedule = census.schedule
    simulated = []
    if schedule is not None:
        note = (
            f"{schedule.step_seconds:.4g} s per step on {schedule.chip}, simulated: the compiler fixes the order of "
            "the instructions, every time is predicted."
        )
        simulated = [Section(f"Predicted schedule{suffix}", schedule_blocks(schedule, census, link), note)]
    return [
        Section(f"Verdict{suffix}", _verdict(census)),
        Section(f"Findings{suffix}", _findings(census), "" if census.findings else "Nothing to mend was found."),
        *simulated,
        Section(f"Memory of one device{suffix}", _memory(census)),
        Section(f"Communication ledger{suffix}", _ledger(census, link)),
        Section(f"FLOPs{suffix}", _flops(census)),
    ]


def difference_section(changes: Sequence[Change], names: tuple[str, str]) -> Section:
    """Returns two censuses side by side."""
    columns = [
        Column("quantity", cell=lambda change: change.quantity),
        Column("part", cell=lambda change: "FLOPs" if change.part == "flops" else change.part, choices=True),
        Column(names[0], cell=lambda change: change.formatted[0]),
        Column(names[1], cell=lambda change: change.formatted[1]),
        Column("ratio", "number", lambda change: None if change.ratio is None else round(change.ratio, 2)),
    ]
    tones = ["bad" if (c.ratio or 0) > 1.02 or (c.ratio is None and c.after) else "" for c in changes]
    title = f"{names[0]} against {names[1]}"
    table = Table.of(changes, columns, searchable=True, tones=tones, title=title, printed=len(changes))
    return Section(
        "Difference", [table], "Of one device; traffic is in bytes sent. Marked rows are larger in the second."
    )


def prediction_section(census: Census, target: Target, estimate: Estimate | None) -> Section:
    """Returns the predicted step, and the planner's estimate of the same run against the compiled memory."""
    schedule, compiled, figures = census.schedule, census.memory.compiled, []
    if schedule is not None:
        mfu = schedule.mfu(sum(census.flops.model.values()), target.chip.flops_bf16)
        step = f"{schedule.step_seconds:.3g} s per step"
        figures.append(Figure("simulated schedule", step, f"{mfu:.0%} MFU on {target}"))
    if estimate is not None:
        planned = f"{format_bytes(estimate.bytes)} per device, {estimate.seconds:.3g} s per step"
        difference = f"planned {estimate.bytes / compiled.live - 1:+.0%}"
        figures.append(Figure("planned by arithmetic", planned))
        live = f"{format_bytes(compiled.live)} live at the peak"
        figures.append(Figure("compiled", live, f"{difference}; in a heap of {format_bytes(compiled.peak)}"))
    return Section("Predicted", [Figures(figures)] if figures else [])


def saving_section(saving: SavingMemory) -> Section:
    """Returns what a save and a restore take of the device and of the hosts."""
    figures = [
        Figure("save", format_bytes(saving.save), f"{saving.save_by}; the state is {format_bytes(saving.state)}"),
        Figure("restore", format_bytes(saving.restore), saving.restore_by),
        Figure("host memory", format_bytes(saving.host), "of the process with most, until a save is committed"),
    ]
    reordered = f"The rows of {saving.reordered} tensors are reordered, one after another." if saving.reordered else ""
    return Section("Saving", [Figures(figures, note=reordered)])


def remedies_section(over: float, remedies: Sequence[Remedy]) -> Section:
    """Returns the options that reduce the memory of a step, cheapest first. over: bytes too many."""
    columns = [
        Column("option", cell=lambda remedy: remedy.option),
        Column("saves", "bytes", lambda remedy: remedy.saved_bytes),
        Column("per step", cell=lambda remedy: f"{remedy.extra_seconds * 1e3:+,.0f} ms"),
        Column("", cell=lambda remedy: "" if remedy.saved_bytes >= over else "not enough alone"),
    ]
    table = Table.of(remedies, columns, title="Options that save memory, predicted")
    return Section(f"{format_bytes(over)} too many", [table])


def measured_section(measured: MeasuredMemory) -> Section:
    """Returns the memory of some real steps, against the census's peak."""
    rows = [*measured.live.categories.items()]
    for device, stats in measured.live.devices.items():
        rows += [(f"{device}, {key}", stats[key]) for key in ("bytes_in_use", "peak_bytes_in_use") if key in stats]
    table = Table([Column("live between steps"), Column("bytes", "bytes")], rows, printed=len(rows))
    growth = measured.resident_growth
    text = (
        []
        if growth is None
        else [
            f"resident memory of this process grew by {format_bytes(growth)}; the census's peak of its devices is "
            f"{format_bytes(measured.predicted_peak)} (ratio {growth / measured.predicted_peak:.2f})"
        ]
    )
    return Section(f"{measured.steps} steps measured here", [table, Text(text)])


def budget_section(exceeded: Sequence[LimitExceeded]) -> Section:
    """Returns the limits of a budget that a program exceeds."""
    rows = []
    for limit in exceeded:
        over = f" ({limit.actual / limit.limit - 1:+.1%})" if limit.limit else ""
        rows.append(f"over budget {limit.quantity}: {limit.actual:,.0f}, limit {limit.limit:,.0f}{over}")
    return Section("Budget", [Text(rows, "bad")])


def unpriced_text(unpriced: Mapping[str, int]) -> str:
    """Returns the kernels whose FLOPs are not known, with their executions; empty if there are none."""
    return ", ".join(f"{name} ({count} x)" for name, count in unpriced.items())


def operands_text(entry: LedgerEntry) -> str:
    """Returns the first two operands of a collective as text."""
    return " ".join(entry.operands[:2]) + (" ..." if len(entry.operands) > 2 else "")


def _verdict(census: Census) -> list[Block]:
    memory, schedule = census.memory.compiled, census.schedule
    sent, count = sum(entry.sent for entry in census.ledger), sum(entry.count for entry in census.ledger)
    figures = []
    if schedule is not None:
        exposed = schedule.by_kind.get("exposed", 0.0)
        part = exposed / schedule.step_seconds if schedule.step_seconds else 0.0
        figures.append(Figure("predicted step", format_step(schedule.step_seconds), f"on {schedule.chip}, simulated"))
        figures.append(
            Figure("exposed communication", f"{part:.1%}", format_step(exposed), "bad" if part > 0.2 else "")
        )
    collectives = f"{count:,} collectives of {len(census.ledger)} instructions"
    figures += [
        Figure("peak memory", format_bytes(memory.peak), f"allocated; {format_bytes(memory.live)} live"),
        Figure("sent by a device", format_bytes(sent), collectives),
        Figure("compiled FLOPs", format_count(census.flops.compiled), "matrix products of a device"),
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
        Finding(f.kind, f.subject, f.reason, f.fix, f.line, format_bytes(f.bytes), "bad" if f.bytes >= 2**20 else "")
        for f in sorted(census.findings, key=lambda f: (_ORDER.get(f.kind, 9), -f.bytes))
    ]
    return [Findings(items)] if items else []


def schedule_blocks(schedule: SimulatedSchedule, census: Census | None = None, link: str = "") -> list[Block]:
    """Returns the step on a timeline and as a bar of its parts. census, link: whose ledger a click on a box selects."""
    spans = schedule.spans
    links = sorted({span.axes for span in spans if span.kind == "collective"})
    lanes = ["computation", *(f"{axes} ({schedule.routes.get(axes, 'links')})" for axes in links), "host", "loops"]
    lane_of = {"host": len(lanes) - 2, "loop": len(lanes) - 1}
    entries = {} if census is None else {e.instruction: str(i) for i, e in enumerate(census.ledger) if e.instruction}
    names: dict[str, int] = {}
    columns = WorkSpans(
        lane=[1 + links.index(s.axes) if s.kind == "collective" else lane_of.get(s.kind, 0) for s in spans],
        kind=[s.kind for s in spans],
        name=[names.setdefault(s.name, len(names)) for s in spans],
        start=[s.start for s in spans],
        seconds=[s.seconds for s in spans],
        count=[s.count for s in spans],
        depth=[s.depth for s in spans],
        exposed=[s.exposed for s in spans],
        key=[entries.get(s.name.rpartition(": ")[2], "") if s.kind == "collective" else "" for s in spans],
    )
    timeline = Timeline(
        lanes,
        [WorkKind(kind, WORK[kind][1], kind) for kind in dict.fromkeys(span.kind for span in spans)],
        list(names),
        columns,
        schedule.step_seconds,
        link,
        title="The step on one device",
        note="Every iteration of a loop is drawn. A red foot marks where only the transfer runs.",
    )
    doubts = [f"Not to be trusted: {schedule.doubt}."] if schedule.doubt else []
    doubts += [f"Not priced: {unpriced_text(schedule.unpriced)}."] if schedule.unpriced else []
    return [timeline, _step_parts(schedule), *([Text(doubts, "warning")] if doubts else [])]


def _step_parts(schedule: SimulatedSchedule) -> Bars:
    parts = [(WORK[kind][1], kind, n) for kind, n in schedule.by_kind.items() if kind != "exposed" and n]
    for axes, n in schedule.exposed.items():
        if n:
            parts.append((f"exposed, {axes} ({schedule.routes.get(axes, 'HBM')})", "exposed", n))
    if schedule.bubble:
        parts.append(("pipeline bubble", "bubble", schedule.bubble))
    rows = [Bar("one step", [n for _, _, n in parts])]
    if schedule.link_seconds:
        parts.append(("busy links", "collective", 0.0))
        rows[0] = Bar("one step", [n for _, _, n in parts])
        idle = [0.0] * (len(parts) - 1)
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


def _memory(census: Census) -> list[Block]:
    memory, profile = census.memory, census.memory.profile
    categories = memory.by_category()
    shown = {name: _shown_category(name) for name in categories}
    names = sorted(set(shown.values()), key=list(_MEMORY_COLOURS).index)
    by_module: dict[str, list[float]] = {}
    for part in memory.parts:
        values = by_module.setdefault(part.module or "no module", [0.0] * len(names))
        values[names.index(shown[part.category])] += part.bytes
    rows = [Bar("all", [sum(max(0.0, n) for c, n in categories.items() if shown[c] == name) for name in names])]
    ordered = sorted(by_module.items(), key=lambda pair: -sum(pair[1]))
    rows += [Bar(module, [max(0.0, n) for n in values]) for module, values in ordered[:16] if sum(values) > 0]
    title = f"{format_bytes(memory.compiled.peak)} at the peak, by module and category"
    bars = Bars("bytes", names, [_MEMORY_COLOURS[name] for name in names], rows, legend_row=0, title=title)
    if profile is None or not profile.moments:
        return [bars]
    marks = [Mark("x", profile.peak, "peak", "limit")]
    marks += [] if profile.backward is None else [Mark("x", profile.backward, "the backward pass begins", "accent")]
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
        Column("bytes", "bytes", lambda b: b.bytes, bar=True),
        Column("category", cell=lambda b: b.category, choices=True),
        Column("module", cell=lambda b: b.module, choices=True),
        Column("array", cell=lambda b: b.array),
        Column("source line", cell=lambda b: b.line),
        Column("lives from", "integer", lambda b: b.start, where="page"),
        Column("to", "integer", lambda b: b.end, where="page"),
        Column("instruction", cell=lambda b: b.instruction, where="page"),
        Column("operation", cell=lambda b: b.op_name, wide=True, where="page"),
    ]
    note = f"The {len(profile.buffers)} largest temporaries that are live at instruction {profile.peak:,}."
    table = Table.of(
        profile.buffers, columns, searchable=True, title="What makes the peak", note=note, shown=14, printed=3
    )
    return [chart, bars, table]


def _shown_category(name: str) -> str:
    """Name of a category on the bars: small ones share a name."""
    return "copies of arguments" if name.startswith("copies of ") else name if name in _MEMORY_COLOURS else "other"


def _ledger(census: Census, link: str) -> list[Block]:
    if not census.ledger:
        return [Text(["No communication."])]
    traffic = sorted(summarise_traffic(census.ledger), key=lambda row: -row["sent"])
    kinds = list(dict.fromkeys(row["kind"] for row in traffic))
    axes = list(dict.fromkeys(row["axes"] for row in traffic))
    sent = {(row["kind"], row["axes"]): row["sent"] for row in traffic}
    matrix = Matrix(
        "bytes",
        kinds,
        axes,
        [[sent.get((kind, name)) for name in axes] for kind in kinds],
        link,
        [[f"{kind} {name}" for name in axes] for kind in kinds],
        title="Bytes sent by a device, by mesh axis",
        hint="Click a cell to filter the table.",
        where="page",
    )
    sums = [
        Column("collective", cell="kind"),
        Column("axes", cell="axes"),
        Column("count", "integer", "count"),
        Column("payload", "bytes", "total"),
        Column("sent", "bytes", "sent"),
    ]
    exposed = _exposed(census)
    entries = sorted(enumerate(census.ledger), key=lambda pair: -pair[1].sent)
    largest = entries[:_MAX_ENTRIES]
    routes = {} if census.schedule is None else census.schedule.routes
    columns = [
        Column("tensor or scope", cell=lambda e: e.tensor or e.instruction),
        Column("collective", cell=lambda e: e.kind, choices=True),
        Column("axes", cell=lambda e: e.axes_label, choices=True),
        Column("operands", cell=operands_text, where="terminal"),
        Column("sent", "bytes", lambda e: e.sent, bar=True),
        Column("count", "integer", lambda e: e.count),
        Column("payload", "bytes", lambda e: e.payload, where="page"),
        Column("exposed", "seconds", lambda e: exposed.get(e.instruction)),
        Column("overlap", cell=_overlap),
        Column("source line", cell=lambda e: e.line),
    ]
    items = {}
    for i, e in largest:
        facts: list[Any] = [e.kind, e.axes_label, routes.get(e.axes_label, ""), e.group_size, e.payload, e.count]
        facts += [e.sent, exposed.get(e.instruction), operands_text(e), ", ".join(e.overlapped[:6]), e.line]
        items[str(i)] = Item(e.tensor or e.instruction, "", [*facts, e.op_name, e.instruction])
    inspector = Inspector(
        link,
        list(_FACTS),
        list(_FACTS.values()),
        items,
        title="Entry",
        empty="Click a row, or a transfer on the timeline.",
        at_most=2,
        first=str(largest[0][0]),
        where="page",
    )
    left = len(entries) - len(largest)
    table = Table.of(
        [e for _, e in largest],
        columns,
        keys=[str(i) for i, _ in largest],
        link=link,
        searchable=True,
        title="Every collective",
        note=f"{left} smaller ones are left out; --json has all." if left else "",
        shown=24,
        printed=16,
    )
    return [Grid([matrix, inspector]), Table.of(traffic, sums, where="terminal", printed=len(traffic)), table]


def _exposed(census: Census) -> dict[str, float]:
    """Seconds of a step for which each collective is exposed, by instruction."""
    found: dict[str, float] = {}
    for span in census.schedule.spans if census.schedule is not None else ():
        if span.kind == "collective":
            name = span.name.rpartition(": ")[2]
            found[name] = found.get(name, 0.0) + span.exposed * span.count
    return found


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
    unpriced = f"Not in it, FLOPs unknown: {unpriced_text(flops.unpriced)}."
    warnings = [Text([unpriced], "warning")] if flops.unpriced else []
    tables: list[Block] = []
    if flops.model:
        columns = [Column("item"), Column("FLOPs", "count", bar=True), Column("formula", wide=True)]
        rows: list[list[Cell]] = [[item, n, FORMULAS.get(item, "")] for item, n in flops.model.items()]
        note = "formula of the forward pass; a training step is three of it"
        tables.append(Table(columns, rows, title="Model FLOPs", note=note))
    columns = [
        Column("phase", cell=lambda matmul: matmul.phase, choices=True),
        Column("module", cell=lambda matmul: matmul.module, choices=True),
        Column("FLOPs", "count", lambda matmul: matmul.flops, bar=True),
    ]
    tables.append(
        Table.of(flops.matmuls, columns, searchable=True, title="Compiled matrix products", shown=20, printed=8)
    )
    return [Text([f"{text}."]), *warnings, Grid(tables)]
