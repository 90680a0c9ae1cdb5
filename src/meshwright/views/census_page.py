"""Page of a census: findings, the simulated schedule, memory over it, the ledger, FLOPs; and of two the difference."""

from collections.abc import Sequence

from meshwright.analysis.census import Census, summarise_traffic
from meshwright.analysis.compare import Change
from meshwright.analysis.simulate import SimulatedSchedule
from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.models.flops import FORMULAS
from meshwright.views.census_tables import census_title, operands_text, unpriced_text
from meshwright.views.draw.colours import WORK
from meshwright.views.pages import (
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
    Page,
    Section,
    Series,
    Table,
    Text,
    Timeline,
    Tone,
    Unit,
    WorkKind,
    WorkSpans,
    inline,
)

_FACTS: tuple[tuple[str, Unit], ...] = (
    ("collective", "text"), ("mesh axes", "text"), ("links", "text"), ("devices of a group", "integer"),
    ("payload of one", "bytes"), ("executions", "integer"), ("sent by a device", "bytes"), ("exposed", "seconds"),
    ("operands", "text"), ("overlapped with", "text"), ("source line", "text"), ("operation", "text"),
    ("instruction", "text"),
)  # fmt: skip
"""Facts of an entry of the ledger, with their units."""
_MEMORY_COLOURS = {
    "parameters": "c1", "optimizer state": "c6", "gradients": "c4", "saved activations": "c3", "weights in use": "c5",
    "recomputed activations": "good", "temporaries": "c8", "copies of arguments": "c7", "results": "c2",
    "packing": "quiet", "other": "muted",
}  # fmt: skip
"""Category of memory -> its colour."""
_PARTS = {"flops": "FLOPs"}
_MAX_ENTRIES = 3000
"""Entries of a ledger on a page; the largest are kept."""
_ORDER = {"unexpected": 0, "replicated": 1, "duplicated": 2, "layout": 3, "overlap": 4}
"""Findings that cost most come first; others follow by their bytes."""


def census_page(census: Census) -> Page:
    """Returns the page of one census, for a notebook or a file of its own."""
    lead = f"{census_title(census)}; every figure is of one device"
    return Page(census.name, census_sections(census), topic="census", lead=lead)


def census_html(census: Census) -> str:
    """Returns the page of a census as a frame for a notebook."""
    return inline(census_page(census))


def census_sections(census: Census, suffix: str = "") -> list[Section]:
    """Returns the sections of a census. suffix: after each heading, where a page has two censuses."""
    link = f"ledger{suffix}".replace(" ", "-").replace("=", "-").replace(",", "-").replace(":", "")
    sections = [
        Section(f"Verdict{suffix}", _verdict(census)),
        Section(f"Findings{suffix}", _findings(census), "" if census.findings else "Nothing to mend was found."),
    ]
    if census.schedule is not None:
        sections.append(
            Section(
                f"Predicted schedule{suffix}", schedule_blocks(census.schedule, census, link),
                f"{census.schedule.step_seconds:.4g} s per step on {census.schedule.chip}, simulated: the compiler "
                "fixes the order of the instructions, every time is predicted.",
            )
        )  # fmt: skip
    return [
        *sections,
        Section(f"Memory of one device{suffix}", _memory(census)),
        Section(f"Communication ledger{suffix}", _ledger(census, link)),
        Section(f"FLOPs{suffix}", _flops(census)),
    ]


def difference_section(changes: Sequence[Change], names: tuple[str, str]) -> Section:
    """Returns two censuses side by side."""
    columns = [
        Column("quantity"),
        Column("part", choices=True),
        Column(names[0]),
        Column(names[1]),
        Column("ratio", "number"),
    ]
    rows: list[list[Cell]] = [
        [
            change.quantity,
            _PARTS.get(change.part, change.part),
            *change.formatted[:2],
            None if change.ratio is None else round(change.ratio, 2),
        ]
        for change in changes
    ]
    tones: list[Tone] = ["bad" if (c.ratio or 0) > 1.02 or (c.ratio is None and c.after) else "" for c in changes]
    table = Table(columns, rows, searchable=True, tones=tones, title=f"{names[0]} against {names[1]}")
    return Section(
        "Difference", [table], "Of one device; traffic is in bytes sent. Marked rows are larger in the second."
    )


def _verdict(census: Census) -> list[Block]:
    memory, schedule = census.memory.compiled, census.schedule
    sent = sum(entry.sent for entry in census.ledger)
    figures = []
    if schedule is not None:
        exposed = schedule.by_kind.get("exposed", 0.0)
        part = exposed / schedule.step_seconds if schedule.step_seconds else 0.0
        figures.append(Figure("predicted step", format_step(schedule.step_seconds), f"on {schedule.chip}, simulated"))
        figures.append(
            Figure("exposed communication", f"{part:.1%}", format_step(exposed), "bad" if part > 0.2 else "")
        )
    figures += [
        Figure("peak memory", format_bytes(memory.peak), f"allocated; {format_bytes(memory.live)} live"),
        Figure(
            "sent by a device",
            format_bytes(sent),
            f"{sum(e.count for e in census.ledger):,} collectives of {len(census.ledger)} instructions",
        ),
        Figure("compiled FLOPs", format_count(census.flops.compiled), "matrix products of a device"),
        Figure("findings", str(len(census.findings)), "", "bad" if census.findings else "good"),
    ]
    doubts = [f"This census does not trust itself: {doubt}." for doubt in census.doubts]
    if census.unread:
        doubts.append(
            f"Incomplete: {len(census.unread)} instructions look like collectives and are not understood; bytes and "
            f"predicted time lack them: {', '.join(census.unread[:4])}."
        )
    return [Figures(figures), *([Text(doubts, "warning")] if doubts else [])]


def _findings(census: Census) -> list[Block]:
    ordered = sorted(census.findings, key=lambda f: (_ORDER.get(f.kind, 9), -f.bytes))
    items = [
        Finding(f.kind, f.subject, f.reason, f.fix, f.line, format_bytes(f.bytes), "bad" if f.bytes >= 2**20 else "")
        for f in ordered
    ]
    return [Findings(items)] if items else []


def schedule_blocks(schedule: SimulatedSchedule, census: Census | None = None, link: str = "") -> list[Block]:
    """Returns the step on a timeline and as a bar of its parts. census, link: whose ledger a click on a box selects."""
    kinds = list(dict.fromkeys(span.kind for span in schedule.spans))
    links = sorted({span.axes for span in schedule.spans if span.kind == "collective"})
    lanes = ["computation", *(f"{axes} ({schedule.routes.get(axes, 'links')})" for axes in links), "host", "loops"]
    entries = {} if census is None else {e.instruction: str(i) for i, e in enumerate(census.ledger) if e.instruction}
    names: dict[str, int] = {}

    def lane(kind: str, axes: str) -> int:
        return {"collective": 1 + links.index(axes) if axes in links else 0, "host": len(lanes) - 2,
                "loop": len(lanes) - 1}.get(kind, 0)  # fmt: skip

    spans = schedule.spans
    columns = WorkSpans(
        lane=[lane(s.kind, s.axes) for s in spans],
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
        lanes, [WorkKind(kind, WORK[kind][1], kind) for kind in kinds], list(names), columns, schedule.step_seconds,
        link, title="The step on one device",
        note="Every iteration of a loop is drawn. A red foot marks the part of a transfer in which nothing else runs.",
    )  # fmt: skip
    doubts = [f"Not to be trusted: {schedule.doubt}."] if schedule.doubt else []
    doubts += [f"Not priced: {unpriced_text(schedule.unpriced)}."] if schedule.unpriced else []
    return [timeline, _step_parts(schedule), *([Text(doubts, "warning")] if doubts else [])]


def _step_parts(schedule: SimulatedSchedule) -> Bars:
    parts = [(WORK[kind][1], kind, n) for kind, n in schedule.by_kind.items() if kind != "exposed" and n]
    parts += [
        (f"exposed, {axes} ({schedule.routes.get(axes, 'HBM')})", "exposed", n)
        for axes, n in schedule.exposed.items()
        if n
    ]
    parts += [("pipeline bubble", "bubble", schedule.bubble)] if schedule.bubble else []
    bar = Bar("one step", [n for _, _, n in parts])
    busy = [Bar(f"links of {axes}", [n]) for axes, n in schedule.link_seconds.items()]
    rows = [bar, *(Bar(b.label, [0.0] * len(parts) + list(b.values)) for b in busy)]
    rows[0] = Bar(bar.label, [*bar.values, 0.0] if busy else bar.values)
    return Bars(
        "seconds", [name for name, _, _ in parts] + (["busy links"] if busy else []),
        [colour for _, colour, _ in parts] + (["collective"] if busy else []), rows, legend_row=0,
        title="Where the seconds go",
        note="Links are busy beside the computation; what of it nothing overlaps is exposed.",
    )  # fmt: skip


def _memory(census: Census) -> list[Block]:
    memory, profile = census.memory, census.memory.profile
    categories = memory.by_category()
    shown = {name: _shown_category(name) for name in categories}
    names = sorted(set(shown.values()), key=list(_MEMORY_COLOURS).index)
    colours = [_MEMORY_COLOURS[name] for name in names]
    by_module: dict[str, list[float]] = {}
    for part in memory.parts:
        values = by_module.setdefault(part.module or "no module", [0.0] * len(names))
        values[names.index(shown[part.category])] += part.bytes
    rows = [Bar("all", [sum(max(0.0, n) for c, n in categories.items() if shown[c] == name) for name in names])]
    ordered = sorted(by_module.items(), key=lambda pair: -sum(pair[1]))
    rows += [Bar(module, [max(0.0, n) for n in values]) for module, values in ordered[:16] if sum(values) > 0]
    title = f"{format_bytes(memory.compiled.peak)} at the peak, by module and category"
    blocks: list[Block] = [Bars("bytes", names, colours, rows, legend_row=0, title=title)]
    if profile is None or not profile.moments:
        return blocks
    marks = [Mark("x", profile.peak, "peak", "limit")]
    marks += [] if profile.backward is None else [Mark("x", profile.backward, "the backward pass begins", "accent")]
    chart = Chart(
        Axis("instruction of the schedule", "integer"), Axis("live temporaries", "bytes", zero=True),
        [Series("temporaries", profile.moments, profile.live_bytes, "c1", "area")], marks,
        title="Temporaries over the schedule", height=280,
        note="A loop's body counts once; arguments are always there.",
    )  # fmt: skip
    columns = [
        Column("bytes", "bytes", bar=True), Column("category", choices=True), Column("whose", choices=True),
        Column("array"), Column("source line"), Column("lives from", "integer"), Column("to", "integer"),
        Column("instruction"), Column("operation", wide=True),
    ]  # fmt: skip
    table = Table(
        columns,
        [[b.bytes, b.category, b.module, b.array, b.line, b.start, b.end, b.instruction, b.op_name]
         for b in profile.buffers],
        searchable=True, title="What makes the peak",
        note=f"The {len(profile.buffers)} largest temporaries that are live at instruction {profile.peak:,}.", shown=14,
    )  # fmt: skip
    return [chart, *blocks, table]


def _shown_category(name: str) -> str:
    """Name of a category on the bars: those that are small beside the others share one."""
    return "copies of arguments" if name.startswith("copies of ") else name if name in _MEMORY_COLOURS else "other"


def _ledger(census: Census, link: str) -> list[Block]:
    if not census.ledger:
        return [Text(["No communication."])]
    traffic = summarise_traffic(census.ledger)
    kinds = list(dict.fromkeys(row["kind"] for row in traffic))
    axes = list(dict.fromkeys(row["axes"] for row in traffic))
    sent = {(row["kind"], row["axes"]): row["sent"] for row in traffic}
    matrix = Matrix(
        "bytes", kinds, axes, [[sent.get((kind, name)) for name in axes] for kind in kinds], link,
        [[f"{kind} {name}" for name in axes] for kind in kinds], title="Bytes sent by a device, by mesh axis",
        note="Click a cell to filter the table.",
    )  # fmt: skip
    exposed = _exposed(census)
    entries = sorted(enumerate(census.ledger), key=lambda pair: -pair[1].sent)[:_MAX_ENTRIES]
    routes = {} if census.schedule is None else census.schedule.routes
    columns = [
        Column("tensor or scope"), Column("collective", choices=True), Column("axes", choices=True),
        Column("sent", "bytes", bar=True), Column("count", "integer"), Column("payload", "bytes"),
        Column("exposed", "seconds"), Column("overlap"), Column("source line"),
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [e.tensor or e.instruction, e.kind, e.axes_label, e.sent, e.count, e.payload, exposed.get(e.instruction),
         _overlap(e.asynchronous, len(e.overlapped)), e.line]
        for _, e in entries
    ]  # fmt: skip
    items = {
        str(i): Item(
            e.tensor or e.instruction, "",
            [e.kind, e.axes_label, routes.get(e.axes_label, ""), e.group_size, e.payload, e.count, e.sent,
             exposed.get(e.instruction), operands_text(e), ", ".join(e.overlapped[:6]), e.line, e.op_name,
             e.instruction],
        )
        for i, e in entries
    }  # fmt: skip
    inspector = Inspector(
        link, [name for name, _ in _FACTS], [unit for _, unit in _FACTS], items, title="Entry",
        empty="Click a row, or a transfer on the timeline.", at_most=2,
        first=str(entries[0][0]),
    )  # fmt: skip
    left = len(census.ledger) - len(entries)
    note = f"{left} smaller ones are left out; --json has all." if left else ""
    table = Table(columns, rows, [str(i) for i, _ in entries], link=link, searchable=True, title="Every collective",
                  note=note, shown=24)  # fmt: skip
    return [Grid([matrix, inspector]), table]


def _exposed(census: Census) -> dict[str, float]:
    """Seconds of a step for which each collective is exposed, by instruction."""
    found: dict[str, float] = {}
    for span in census.schedule.spans if census.schedule is not None else ():
        if span.kind == "collective":
            name = span.name.rpartition(": ")[2]
            found[name] = found.get(name, 0.0) + span.exposed * span.count
    return found


def _overlap(asynchronous: bool, overlapped: int) -> str:
    if not asynchronous:
        return "synchronous"
    return f"overlaps {overlapped} instructions" if overlapped else "exposed"


def _flops(census: Census) -> list[Block]:
    flops = census.flops
    total = f"{format_count(flops.compiled)} in the compiled matmuls."
    if flops.unpriced:
        total += f" Not in it, FLOPs unknown: {unpriced_text(flops.unpriced)}."
    blocks: list[Block] = [Text([total])]
    tables: list[Block] = []
    if flops.model:
        rows: list[list[Cell]] = [[item, n, FORMULAS.get(item, "")] for item, n in flops.model.items()]
        columns = [Column("item"), Column("FLOPs", "count", bar=True), Column("formula", wide=True)]
        tables.append(Table(columns, rows, title="Model FLOPs"))
    compiled: list[list[Cell]] = [[matmul.phase, matmul.module, matmul.flops] for matmul in flops.matmuls]
    columns = [Column("phase", choices=True), Column("module", choices=True), Column("FLOPs", "count", bar=True)]
    tables.append(Table(columns, compiled, searchable=True, title="Compiled matrix products", shown=20))
    return [*blocks, Grid(tables)]
