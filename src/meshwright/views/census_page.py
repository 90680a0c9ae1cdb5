"""Report of a census: findings, simulated schedule, memory, communication ledger, FLOPs.

Two censuses have a section with their difference.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    Tone,
)
from meshwright.views.charts import Axis, Chart, Drawing, Mark, Series
from meshwright.views.colours import WORK
from meshwright.views.report import Report, Section
from xlacensus.comparison import Change
from xlacensus.hlo.flops import CompiledMatmul
from xlacensus.hlo.ledger import LedgerEntry, traffic
from xlacensus.peak_memory import Memory, MemoryProfile
from xlacensus.schedule import SimulatedSchedule, Span

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
_COPIES = "copies of arguments"
"""Category on a page of all categories of memory that begin with `copies of`."""
_MAX_ENTRIES = 3000
"""Entries of a ledger on a page; the largest are kept."""
_MAX_MODULES = 16
"""Modules with a bar of their own in the picture of memory; the largest are kept."""
_ORDER = {"unexpected": 0, "replicated": 1, "duplicated": 2, "layout": 3, "overlap": 4}
"""Kind of a finding -> its rank: what costs most comes first. Other kinds follow by their bytes."""
_LAST = 9
"""Rank of the other kinds of findings."""
_SPAN_FIELDS = ("kind", "start", "seconds", "count", "depth", "exposed")
"""Fields of a span that the timeline draws as they are."""


def census_title(census: Census) -> str:
    """Returns one line: mesh, device, compile time and versions."""
    degrees = [f"{axis}={n}" for axis, n in census.mesh.items() if n > 1]
    mesh = ",".join(degrees) or "one device"
    compiled = f"compiled for {census.device} in {census.compile_seconds:.1f} s"
    return f"mesh {mesh}, {compiled} ({census.versions})"


def census_page(census: Census) -> Report:
    """Returns the report of one census."""
    lead = f"{census_title(census)}; every figure is of one device"
    return Report(census.name, census_sections(census), topic="census", lead=lead)


def census_sections(census: Census, suffix: str = "") -> list[Section]:
    """Returns the sections of a census.
    suffix: after each heading, if a report has two censuses."""
    link = "ledger" + re.sub(r"[^\w-]", "-", suffix.replace(":", ""))
    nothing_found = "" if census.findings else "Nothing to mend was found."
    sections = [
        Section("Verdict", _verdict(census)),
        Section("Findings", _findings(census), nothing_found),
    ]
    if census.schedule is not None:
        sections.append(_schedule_section(census.schedule, census, link))
    sections += [
        Section("Memory of one device", _memory(census)),
        Section("Communication ledger", _ledger(census, link)),
        Section("FLOPs", _flops(census)),
    ]
    return [dataclasses.replace(section, title=section.title + suffix) for section in sections]


def _schedule_section(schedule: SimulatedSchedule, census: Census, link: str) -> Section:
    note = (
        f"{schedule.step_seconds:.4g} s per step on {schedule.chip}, simulated: "
        "the compiler fixes the order of the instructions, every time is predicted."
    )
    return Section("Predicted schedule", schedule_blocks(schedule, census, link), note)


# Two censuses


def difference_section(changes: Sequence[Change], names: tuple[str, str]) -> Section:
    """Returns two censuses side by side."""
    columns = [
        Column("quantity", cell="quantity"),
        Column("part", cell=_part_of_change, choices=True),
        Column(names[0], cell=lambda change: change.formatted[0]),
        Column(names[1], cell=lambda change: change.formatted[1]),
        Column("ratio", "number", _rounded_ratio),
    ]
    tones: list[Tone] = ["bad" if _is_larger(change) else "" for change in changes]
    title = f"{names[0]} against {names[1]}"
    table = Table.of(changes, columns, searchable=True, tones=tones, title=title, printed=None)
    note = "Of one device; traffic is in bytes sent. Marked rows are larger in the second."
    return Section("Difference", [table], note)


def _part_of_change(change: Change) -> str:
    return "FLOPs" if change.part == "flops" else change.part


def _rounded_ratio(change: Change) -> float | None:
    return None if change.ratio is None else round(change.ratio, 2)


def _is_larger(change: Change) -> bool:
    """Whether a quantity grows by more than 2 %, or from zero."""
    if change.ratio is None:
        return bool(change.after)
    return change.ratio > 1.02


# The predicted step


def prediction_section(
    census: Census, target: Target, estimate: Estimate | None, undetermined: float | None = None
) -> Section:
    """Returns the predicted step, and the planner's estimate
    of the same run against the compiled memory.

    undetermined: seconds of the step without --training.deterministic, where the run has it.
    """
    figures: list[Figure] = []
    if census.schedule is not None:
        figures += _predicted_step(census, census.schedule, target, undetermined)
    if estimate is not None:
        figures += _planned_and_compiled(census, estimate)
    return Section("Predicted", [Figures(figures)] if figures else [])


def _predicted_step(
    census: Census, schedule: SimulatedSchedule, target: Target, undetermined: float | None
) -> list[Figure]:
    """Returns the simulated step, and what deterministic sums add to it.

    MFU = model FLOPs / (step seconds x peak FLOP/s).
    """
    seconds = schedule.step_seconds
    model_flops = sum(census.flops.model.values())
    mfu = model_flops / (seconds * target.chip.flops_bf16)
    step = Figure("simulated schedule", f"{seconds:.3g} s per step", f"{mfu:.0%} MFU on {target}")
    if not undetermined:
        return [step]
    cost = seconds / undetermined - 1
    note = f"{cost:+.1%} with it; what kernels gain by being chosen by timing is not in it"
    name = "without --training.deterministic"
    return [step, Figure(name, f"{undetermined:.3g} s per step", note)]


def _planned_and_compiled(census: Census, estimate: Estimate) -> list[Figure]:
    """Returns the memory and seconds of the planner's arithmetic, and the compiled memory."""
    compiled = census.memory.compiled
    planned = f"{format_bytes(estimate.bytes)} per device, {estimate.seconds:.3g} s per step"
    difference = f"planned {estimate.bytes / compiled.live - 1:+.0%}"
    heap = f"in a heap of {format_bytes(compiled.peak)}"
    return [
        Figure("planned by arithmetic", planned),
        Figure(
            "compiled", f"{format_bytes(compiled.live)} live at the peak", f"{difference}; {heap}"
        ),
    ]


def remedies_section(over: float, remedies: Sequence[Remedy]) -> Section:
    """Returns the options that reduce the memory of a step, cheapest first.
    over: bytes too many."""
    columns = [
        Column("option", cell="option"),
        Column("saves", "bytes", "saved_bytes"),
        Column("per step", cell=lambda remedy: f"{remedy.extra_seconds * 1e3:+,.0f} ms"),
        Column("", cell=lambda remedy: "" if remedy.saved_bytes >= over else "not enough alone"),
    ]
    table = Table.of(remedies, columns, title="Options that save memory, predicted")
    return Section(f"{format_bytes(over)} too many", [table])


# Verdict and findings


def _verdict(census: Census) -> list[Block]:
    figures: list[Figure] = []
    if census.schedule is not None:
        figures += _step_figures(census.schedule)
    memory = census.memory.compiled
    count = sum(entry.count for entry in census.ledger)
    sent = sum(entry.sent for entry in census.ledger)
    live = f"allocated; {format_bytes(memory.live)} live"
    collectives = f"{count:,} collectives of {len(census.ledger)} instructions"
    flops = format_count(census.flops.compiled)
    tone: Tone = "bad" if census.findings else "good"
    figures += [
        Figure("peak memory", format_bytes(memory.peak), live),
        Figure("sent by a device", format_bytes(sent), collectives),
        Figure("compiled FLOPs", flops, "matrix products of a device"),
        Figure("findings", str(len(census.findings)), "", tone),
    ]
    doubts = [f"This census does not trust itself: {doubt}." for doubt in census.doubts]
    if census.unread:
        doubts.append(
            f"Incomplete ledger: {len(census.unread)} instructions look like collectives and are "
            "not read; bytes and predicted time lack them: "
            f"{', '.join(census.unread[:4])}."
        )
    return [Figures(figures), *_warning(doubts)]


def _step_figures(schedule: SimulatedSchedule) -> list[Figure]:
    """Returns the predicted step, and the fraction of it in which only communication runs."""
    seconds = schedule.step_seconds
    exposed = schedule.by_kind.get("exposed", 0.0)
    fraction = exposed / seconds if seconds else 0.0
    tone: Tone = "bad" if fraction > 0.2 else ""
    return [
        Figure("predicted step", format_step(seconds), f"on {schedule.chip}, simulated"),
        Figure("exposed communication", f"{fraction:.1%}", format_step(exposed), tone),
    ]


def _warning(sentences: Sequence[str]) -> list[Block]:
    return [Text(sentences, "warning")] if sentences else []


def _findings(census: Census) -> list[Block]:
    ordered = sorted(census.findings, key=lambda f: (_ORDER.get(f.kind, _LAST), -f.bytes))
    items = []
    for f in ordered:
        tone: Tone = "bad" if f.bytes >= 2**20 else ""
        size = format_bytes(f.bytes)
        items.append(Finding(f.kind, f.subject, f.reason, f.fix, f.line, size, tone))
    return [Findings(items)] if items else []


# The simulated schedule


def schedule_blocks(
    schedule: SimulatedSchedule, census: Census | None = None, link: str = ""
) -> list[Block]:
    """Returns the step on a timeline and as a bar of its parts.

    census, link: whose ledger a click on a box selects.
    """
    doubts = []
    if schedule.doubt:
        doubts.append(f"Not to be trusted: {schedule.doubt}.")
    if schedule.unpriced:
        doubts.append(f"Not priced: {_counted(schedule.unpriced)}.")
    return [_timeline(schedule, census, link), _step_parts(schedule), *_warning(doubts)]


def _timeline(schedule: SimulatedSchedule, census: Census | None, link: str) -> Drawing:
    spans = schedule.spans
    lanes, lane_of_span = _lanes(schedule)
    # Boxes refer to their names by number, since those of a loop's iterations repeat.
    names = list(dict.fromkeys(span.name for span in spans))
    numbers = {name: number for number, name in enumerate(names)}
    entries = {} if census is None else _keys_of_entries(census)
    boxes: dict[str, list[Any]] = {
        "lane": lane_of_span,
        "name": [numbers[span.name] for span in spans],
        "key": [_key_of(span, entries) for span in spans],
    }
    for field in _SPAN_FIELDS:
        boxes[field] = [getattr(span, field) for span in spans]
    kinds = []
    for kind in dict.fromkeys(span.kind for span in spans):
        kinds.append({"kind": kind, "name": WORK[kind][1], "colour": kind})
    data = {
        "lanes": lanes,
        "kinds": kinds,
        "names": names,
        "spans": boxes,
        "link": link,
        "seconds": schedule.step_seconds,
    }
    note = "Every iteration of a loop is drawn. A red foot marks where only the transfer runs."
    return Drawing("Timeline", data, title="The step on one device", note=note)


def _keys_of_entries(census: Census) -> dict[str, str]:
    """Returns the key of each instruction's entry in the ledger: its number."""
    return {
        entry.instruction: str(number)
        for number, entry in enumerate(census.ledger)
        if entry.instruction
    }


def _key_of(span: Span, entries: Mapping[str, str]) -> str:
    return entries.get(span.instruction, "") if span.kind == "collective" else ""


def _lanes(schedule: SimulatedSchedule) -> tuple[list[str], list[int]]:
    """Returns the lanes of a schedule, and the lane of each span.

    0            computation
    1 .. n       links of each set of axes
    n + 1        host
    n + 2        loops
    """
    axes = sorted({span.axes for span in schedule.spans if span.kind == "collective"})
    links = [f"{name} ({schedule.routes.get(name, 'links')})" for name in axes]
    names = ["computation", *links, "host", "loops"]
    lane_of_kind = {"host": len(axes) + 1, "loop": len(axes) + 2}
    numbers = []
    for span in schedule.spans:
        if span.kind == "collective":
            numbers.append(1 + axes.index(span.axes))
        else:
            numbers.append(lane_of_kind.get(span.kind, 0))
    return names, numbers


def _step_parts(schedule: SimulatedSchedule) -> Bars:
    """Returns the parts of one step as a bar,
    and below it how long the links of each axis are busy.

    one step         | matmul | memory | ... | exposed | bubble |
    links of fsdp    | busy links |
    """
    names: list[str] = []
    colours: list[str] = []
    seconds: list[float] = []

    for kind, n in schedule.by_kind.items():
        if kind != "exposed" and n:
            names.append(WORK[kind][1])
            colours.append(kind)
            seconds.append(n)
    for axes, n in schedule.exposed.items():
        if n:
            names.append(f"exposed, {axes} ({schedule.routes.get(axes, 'HBM')})")
            colours.append("exposed")
            seconds.append(n)
    if schedule.bubble:
        names.append("pipeline bubble")
        colours.append("bubble")
        seconds.append(schedule.bubble)
    no_work = [0.0] * len(seconds)
    if schedule.link_seconds:
        names.append("busy links")
        colours.append("collective")
        seconds.append(0.0)

    rows = [Bar("one step", seconds)]
    for axes, n in schedule.link_seconds.items():
        rows.append(Bar(f"links of {axes}", [*no_work, n]))
    note = (
        "Links are busy while the device computes; "
        "time during which only communication runs is exposed."
    )
    return Bars(
        "seconds", names, colours, rows, legend_row=0, title="Where the seconds go", note=note
    )


# Memory


def _memory(census: Census) -> list[Block]:
    bars = _memory_bars(census.memory)
    profile = census.memory.profile
    if profile is None or not profile.moments:
        return [bars]
    return [_temporaries_chart(profile), bars, _peak_table(profile)]


def _memory_bars(memory: Memory) -> Bars:
    """Returns the memory at the peak by module and category.

    Arrays that share memory make a sum negative: such a bar is not drawn, and the note gives it.
    """
    shown = {category: _shown_category(category) for category in memory.by_category()}
    names = sorted(set(shown.values()), key=list(_MEMORY_COLOURS).index)
    totals = dict.fromkeys(names, 0)
    for category, size in memory.by_category().items():
        totals[shown[category]] += size

    rows = [_memory_bar("all", list(totals.values()))]
    for module, sizes in _largest_modules(memory, shown, names):
        if sum(sizes) > 0:
            rows.append(_memory_bar(module, sizes))

    negative = [f"{name} {size:,.0f} bytes" for name, size in totals.items() if size < 0]
    note = f"Not drawn, arrays that share memory: {', '.join(negative)}." if negative else ""
    title = f"{format_bytes(memory.compiled.peak)} at the peak, by module and category"
    colours = [_MEMORY_COLOURS[name] for name in names]
    return Bars("bytes", names, colours, rows, legend_row=0, title=title, note=note)


def _shown_category(category: str) -> str:
    """Returns the category that a page shows one as: all copies are one, unknown ones
    are `other`."""
    if category.startswith("copies of "):
        return _COPIES
    return category if category in _MEMORY_COLOURS else "other"


def _largest_modules(
    memory: Memory, shown: Mapping[str, str], names: Sequence[str]
) -> list[tuple[str, list[float]]]:
    """Returns the modules that hold most, each with its bytes in the order
    of the categories' names."""
    by_module: dict[str, list[float]] = {}
    for part in memory.parts:
        sizes = by_module.setdefault(part.module or "no module", [0.0] * len(names))
        sizes[names.index(shown[part.category])] += part.bytes
    ordered = sorted(by_module.items(), key=lambda module: -sum(module[1]))
    return ordered[:_MAX_MODULES]


def _memory_bar(label: str, sizes: Sequence[float]) -> Bar:
    return Bar(label, [size if size > 0 else 0.0 for size in sizes])


def _temporaries_chart(profile: MemoryProfile) -> Chart:
    marks = [Mark("x", profile.peak, "peak", "limit")]
    if profile.backward is not None:
        marks.append(Mark("x", profile.backward, "the backward pass begins", "accent"))
    return Chart(
        Axis("instruction of the schedule", "integer"),
        Axis("live temporaries", "bytes", zero=True),
        [Series("temporaries", profile.moments, profile.live_bytes, "c1", "area")],
        marks,
        title="Temporaries over the schedule",
        height=280,
        note="A loop's body counts once; arguments are always there.",
    )


def _peak_table(profile: MemoryProfile) -> Table:
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
    largest = f"The {len(profile.buffers)} largest temporaries"
    return Table.of(
        profile.buffers,
        columns,
        searchable=True,
        title="What makes the peak",
        note=f"{largest} that are live at instruction {profile.peak:,}.",
        shown=14,
        printed=3,
    )


# The ledger of communication

_KIND = Column("collective", cell="kind", choices=True)
_AXES = Column("axes", cell="axes_label", choices=True)
_COUNT = Column("count", "integer", "count")
_PAYLOAD = Column("payload", "bytes", "payload", where="page")
_SENT = Column("sent", "bytes", "sent", bar=True)
_LINE = Column("source line", cell="line")


def _ledger(census: Census, link: str) -> list[Block]:
    """Returns the traffic by kind and axes, every collective,
    and what is known of the chosen one."""
    if not census.ledger:
        return [Text(["No communication."])]
    by_size = sorted(enumerate(census.ledger), key=lambda numbered: -numbered[1].sent)
    largest = {str(number): entry for number, entry in by_size[:_MAX_ENTRIES]}
    exposed = _exposed_column(census.schedule)
    routes = {} if census.schedule is None else census.schedule.routes
    inspector = _entry_inspector(largest, exposed, routes, link)
    omitted = len(census.ledger) - len(largest)
    table = Table.of(
        largest.values(),
        _columns_of_entries(exposed),
        keys=list(largest),
        link=link,
        searchable=True,
        title="Every collective",
        note=f"{omitted} smaller ones are left out; --json has all." if omitted else "",
        shown=24,
        printed=16,
    )
    return [Grid([_traffic_table(census.ledger), inspector]), table]


def _traffic_table(ledger: Sequence[LedgerEntry]) -> Table:
    columns = [
        Column("collective", cell="kind"),
        Column("axes", cell="axes"),
        _COUNT,
        Column("payload", "bytes", "total"),
        _SENT,
    ]
    sums = sorted(traffic(ledger), key=lambda row: -row["sent"])
    return Table.of(sums, columns, printed=None)


def _exposed_column(schedule: SimulatedSchedule | None) -> Column:
    """Returns the seconds of a collective in which nothing else runs,
    where it is in the schedule."""
    timed = {} if schedule is None else schedule.by_collective
    exposed = {instruction: seconds for instruction, (_, seconds) in timed.items()}
    return Column("exposed", "seconds", lambda entry: exposed.get(entry.instruction))


def _columns_of_entries(exposed: Column) -> list[Column]:
    return [
        Column("tensor or scope", cell=_tensor),
        _KIND,
        _AXES,
        Column("operands", cell=_operands, where="terminal"),
        _SENT,
        _COUNT,
        _PAYLOAD,
        exposed,
        Column("overlap", cell=_overlap),
        _LINE,
    ]


def _entry_inspector(
    entries: Mapping[str, LedgerEntry], exposed: Column, routes: Mapping[str, str], link: str
) -> Inspector:
    """Returns the facts of the chosen entry; the largest is chosen when the page opens."""
    facts = [
        _KIND,
        _AXES,
        Column("links", cell=lambda entry: routes.get(entry.axes_label, "")),
        Column("devices of a group", "integer", "group_size"),
        _PAYLOAD,
        _COUNT,
        _SENT,
        exposed,
        Column("operands", cell=_operands, where="terminal"),
        Column("overlapped with", cell=lambda entry: ", ".join(entry.overlapped[:6])),
        _LINE,
        Column("operation", cell="op_name"),
        Column("instruction", cell="instruction"),
    ]
    items = {}
    for key, entry in entries.items():
        items[key] = Item(_tensor(entry), "", [column.of(entry) for column in facts])
    return Inspector(
        link,
        facts,
        items,
        first=next(iter(entries)),
        title="Entry",
        empty="Click a row, or a transfer on the timeline.",
        where="page",
    )


def _tensor(entry: LedgerEntry) -> str:
    return entry.tensor or entry.instruction


def _operands(entry: LedgerEntry) -> str:
    more = " ..." if len(entry.operands) > 2 else ""
    return " ".join(entry.operands[:2]) + more


def _overlap(entry: LedgerEntry) -> str:
    if not entry.asynchronous:
        return "synchronous"
    return f"overlaps {len(entry.overlapped)} instructions" if entry.overlapped else "exposed"


# FLOPs


def _flops(census: Census) -> list[Block]:
    flops = census.flops
    tables: list[Block] = [_matmuls_table(flops.matmuls)]
    if flops.model:
        tables.insert(0, _model_flops_table(flops.model))
    warnings: list[Block] = []
    if flops.unpriced:
        warnings = _warning([f"Not in it, FLOPs unknown: {_counted(flops.unpriced)}."])
    return [Text([_flops_sentence(census)]), *warnings, Grid(tables)]


def _flops_sentence(census: Census) -> str:
    flops = census.flops
    model = sum(flops.model.values())
    text = f"{format_count(flops.compiled)} in the compiled matmuls"
    if model and flops.compiled:
        text += f"; model FLOPs {format_count(model)} ({model / flops.compiled:.0%})"
    if flops.intensity:
        text += f"; {flops.intensity:.1f} FLOPs per byte by the compiler's cost analysis"
    return f"{text}."


def _model_flops_table(model: Mapping[str, float]) -> Table:
    columns = [Column("item"), Column("FLOPs", "count", bar=True), Column("formula", wide=True)]
    rows = [(item, n, formula_of(item)) for item, n in model.items()]
    note = "formula of the forward pass; a training step is three of it"
    return Table(columns, rows, title="Model FLOPs", note=note)


def _matmuls_table(matmuls: Sequence[CompiledMatmul]) -> Table:
    columns = [
        Column("phase", cell="phase", choices=True),
        Column("module", cell="module", choices=True),
        Column("FLOPs", "count", "flops", bar=True),
    ]
    title = "Compiled matrix products"
    return Table.of(matmuls, columns, searchable=True, title=title, shown=20, printed=8)


def _counted(kernels: Mapping[str, int]) -> str:
    """Formats kernels with their number of calls: `flash (12 x), ragged (3 x)`."""
    return ", ".join(f"{name} ({count} x)" for name, count in kernels.items())
