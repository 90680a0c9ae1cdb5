"""Report of a search: every plan by step time and memory, why each loses, and the chosen one on the hardware."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from meshwright.formatting import format_bytes, format_count, format_step, format_time
from meshwright.hardware.chips import Torus
from meshwright.hardware.interconnect import all_coordinates
from meshwright.hardware.targets import Target
from meshwright.planner.explain import STEP_PARTS, alternatives, memory_shortfall, slowdown_reason
from meshwright.planner.offers import Offer
from meshwright.planner.search import Plan, SearchResult
from meshwright.views.blocks import (
    Axis,
    BarScale,
    Cell,
    Chart,
    Column,
    Figure,
    Figures,
    Grid,
    Inspector,
    Item,
    Machine,
    Mark,
    Marker,
    Series,
    Table,
    Text,
    Tone,
    Unit,
    format_amount,
)
from meshwright.views.colours import series_colour
from meshwright.views.draw.machine import MachineGrid
from meshwright.views.layout_page import layout_sections, machine_block
from meshwright.views.report import Report, Section

_MOST = 500
"""Plans that fit, and as many that do not, on a page; the best are kept."""
_MESHES = 80
"""Plans whose mesh can be drawn over the machine."""
_FAMILIES = 6
"""Kinds of meshes with a colour of their own."""
_CHARTED = 2.5
"""Memory over that of the device above which a plan that does not fit is only in the table."""
_SLOWER = 1.2
"""Step time over that of the slowest plan that fits above which one that does not is only in the table."""
MARKERS: tuple[Marker, ...] = ("circle", "square", "diamond", "triangle")
PART_COLOURS = {
    "matmul": "matmul",
    "attention": "attention",
    "recomputation": "c7",
    "elementwise": "memory",
    "optimizer": "c2",
    "exposed": "exposed",
    "host": "host",
    "bubble": "bubble",
}
"""Part of a step -> its colour."""
MEMORY_COLOURS = {
    "parameters": "c1",
    "optimizer state": "c6",
    "gradients": "c4",
    "activations": "c3",
    "gathered weights": "c5",
    "one layer": "c8",
    "loss and its table": "c7",
    "optimizer update": "c2",
}
"""Category of memory -> its colour."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Plan of a search with its key on the page and why it is not the first."""

    key: str
    plan: Plan
    reason: str
    rank: int | None
    """None for plans that the search did not find, or that do not fit."""


def plan_page(
    plan: Plan,
    result: SearchResult,
    compiled: Sequence[Section] = (),
    compared: Sequence[Plan] = (),
    most: int = _MOST,
    *,
    offer: Offer | None = None,
    notes: Sequence[str] = (),
    shown: int = 8,
) -> Report:
    """Returns the report of a plan and of the search that it comes from.

    compiled: sections of what the target's compiler proved.  compared: two plans that are side by side when it opens.
    most: plans that fit, and as many that do not, on a page.  shown: rows of each table on a terminal.
    offer: training of the plan, which gives its days and dollars.
    """
    e, target = plan.estimate, result.target
    rows = _rows(result, compared or (plan,), plan, most)
    first = "~".join(row.key for row in rows if row.plan.name in {p.name for p in compared or (plan,)})
    refused = f"; {len(result.refused)} meshes refused" if result.refused else ""
    tokens = f"{format_count(e.tokens)} tokens of {plan.run.training.batch} x {plan.run.training.seq}"
    figures = [
        Figure("step", format_step(e.seconds), tokens),
        Figure("MFU", f"{e.mfu:.1%}", f"bound by {e.bound_by}; recomputation is left out"),
        Figure("tokens per second", format_count(e.tokens_per_second), f"on {e.devices:,} devices"),
        Figure(
            "memory of a device",
            format_bytes(e.bytes),
            f"{e.bytes / e.hbm_bytes:.0%} of {format_bytes(e.hbm_bytes)}",
            "" if e.fits else "bad",
        ),
        Figure("host memory while saving", format_bytes(e.saved), "for each of a host's devices"),
        Figure(
            "plans priced",
            f"{result.priced:,}",
            f"best of each mesh and schedule: {len(result.plans)} fit, {len(result.too_large)} do not{refused}",
        ),
    ]
    known = [f"efficiency: {target.efficiency_source}"] if target.efficiency_source else []
    known += [f"note: {note}" for note in notes]
    known += [f"training: {arithmetic(offer)}", *assumptions([offer])] if offer is not None else []
    grid = Grid([_scatter(rows, target), plan_inspector(rows, first)], wide=True)
    machine = machine_of_target(target)
    meshes = {row.key: machine_block(row.plan.placed, machine).mesh for row in rows[:_MESHES]}
    drawn = dataclasses.replace(
        machine_block(plan.placed, machine),
        link="plans",
        meshes=meshes,
        title=f"{target}: {target.devices:,} devices",
        note=f"Mesh axes on the hardware: {e.axis_mapping}.",
        hint="Point at an axis to see who communicates along it; the drawing follows the plan that is chosen above.",
    )
    sections = [
        Section("At a glance", [Figures(figures), *([Text(known)] if known else [])]),
        *compiled,
        Section(
            "All plans",
            [grid, _table(rows, result, shown, None if offer is None else offer.tokens)],
            hint="Click a point or a row to see its parts; click a second one to compare the two.",
        ),
        Section("Mesh of the chosen plan", [drawn]),
        Section("Why not other mesh axes", [_alternatives(result, shown)]),
        *(
            dataclasses.replace(section, where="page")
            for section in layout_sections(plan.placed, machine)
            if not isinstance(section.blocks[0], Machine)
        ),
    ]
    footer = "Every figure is predicted by arithmetic; meshwright prove compiles a plan. This file loads nothing."
    return Report(
        f"{plan.run.name} on {target}", sections, topic="plan", lead=f"{plan.name}, {predicted(plan)}", footer=footer
    )


def single_plan_page(plan: Plan) -> Report:
    """Returns the report of one plan without its search: where its seconds and bytes go, and its tensors on devices."""
    row = Row("p0", plan, "fits" if plan.estimate.fits else "does not fit", None)
    sections = [
        Section("Prediction", [plan_inspector([row], "p0")]),
        *layout_sections(plan.placed, machine_of_target(plan.target)),
    ]
    lead = f"{plan.name}, {predicted(plan)}"
    return Report(f"{plan.run.name} on {plan.target}", sections, topic="plan", lead=lead)


def predicted(plan: Plan) -> str:
    """Returns the step time, MFU, speed and memory of a plan in one line."""
    e = plan.estimate
    return (
        f"predicted by arithmetic: {format_step(e.seconds)} per step, {e.mfu:.0%} MFU, "
        f"{format_count(e.tokens_per_second)} tokens/s, "
        f"{format_bytes(e.bytes)} of {format_bytes(e.hbm_bytes)} per device"
    )


def _rows(result: SearchResult, opened: Sequence[Plan], chosen: Plan, most: int) -> list[Row]:
    """Returns the best plans of a search, and those that the page is about: first what fits, then what does not."""
    fits, too_large = list(result.plans[:most]), list(result.too_large[:most])
    ranked, names = len(fits), {plan.name for plan in (*fits, *too_large)}
    others = {plan.name: plan for plan in (*opened, chosen) if plan.name not in names}
    fits += [plan for plan in others.values() if plan.estimate.fits]
    too_large += [plan for plan in others.values() if not plan.estimate.fits]
    winner = result.plans[0] if result.plans else None
    rows = []
    for i, plan in enumerate([*fits, *too_large]):
        reason = slowdown_reason(plan, winner) if plan.estimate.fits else memory_shortfall(plan)
        reason = "the fastest plan that fits" if plan is winner else reason
        rows.append(Row(f"p{i}", plan, reason, i + 1 if i < ranked else None))
    return rows


def family(plan: Plan) -> str:
    """Names how a plan splits the model, besides over data: `pipeline + tensor`, `data and FSDP only`."""
    words = {"stage": "pipeline", "expert": "experts", "context": "context", "tensor": "tensor"}
    degrees = plan.mesh.degrees()
    return " + ".join(word for axis, word in words.items() if degrees[axis] > 1) or "data and FSDP only"


def _scatter(rows: Sequence[Row], target: Target) -> Chart:
    """Step time against memory: plans that fit by family, those that do not, the Pareto front, and the limit."""
    fitting = [row for row in rows if row.plan.estimate.fits]
    counts = Counter(family(row.plan) for row in fitting)
    names = sorted(counts, key=lambda name: (name != family(rows[0].plan), -counts[name]))[:_FAMILIES]
    groups: dict[str, list[Row]] = {name: [] for name in (*names, "others", "does not fit")}
    slowest = max((row.plan.estimate.seconds for row in fitting), default=float("inf"))
    for row in rows:
        e, name = row.plan.estimate, family(row.plan)
        if e.fits:
            groups[name if name in names else "others"].append(row)
        elif e.bytes <= _CHARTED * e.hbm_bytes and e.seconds <= _SLOWER * slowest:
            groups["does not fit"].append(row)
    series = [
        Series(
            name,
            [row.plan.estimate.seconds for row in group],
            [row.plan.estimate.bytes for row in group],
            "muted" if name == "does not fit" else series_colour(number),
            "points",
            "cross" if name == "does not fit" else MARKERS[number % len(MARKERS)],
            keys=[row.key for row in group],
            tips=[f"{row.plan.name}\n{row.reason}" for row in group],
        )
        for number, (name, group) in enumerate(groups.items())
        if group
    ]
    front: list[tuple[float, float]] = []
    for seconds, size in sorted((row.plan.estimate.seconds, row.plan.estimate.bytes) for row in fitting):
        if not front or size < front[-1][1]:
            front.append((seconds, size))
    if len(front) > 1:
        x, y = zip(*front, strict=True)
        series.append(Series("Pareto front", x, y, "ink", "step", dashed=True))
    hbm, fragmentation = target.chip.hbm_bytes, target.chip.fragmentation
    marks = [Mark("y", hbm / fragmentation, f"fits below {format_bytes(hbm / fragmentation)}", fit=True)]
    if fragmentation > 1:
        marks.append(Mark("y", hbm, f"memory of {target.name}: {format_bytes(hbm)}", "muted", fit=True))
    times = [row.plan.estimate.seconds for row in rows if row.plan.estimate.seconds <= _SLOWER * slowest]
    return Chart(
        Axis("predicted step", "seconds", log=max(times) > 12 * min(times), toggle=True),
        Axis("memory of a device", "bytes", toggle=True),
        series,
        marks,
        "plans",
        title="Step time and memory of every plan",
        height=560,
        note="Left is faster, low is smaller. Plans that do not fit are only in the table where they take over "
        f"{_CHARTED:g} times the memory, or {_SLOWER:g} times as long as all that fit.",
    )


_FACTS: dict[str, Unit] = {
    "step": "seconds",
    "MFU": "fraction",
    "tokens per second": "count",
    "memory of a device": "bytes",
    "fraction of the device's memory": "fraction",
    "bound by": "text",
    "rank": "integer",
    "remat": "text",
    "microbatches": "integer",
    "pipeline": "text",
    "layout": "text",
    "mesh axes on the hardware": "text",
    "links": "text",
}


def plan_inspector(rows: Sequence[Row], first: str) -> Inspector:
    """Returns what is known of each plan: facts, and bars of its seconds and bytes. first: keys selected at first."""
    categories = list(dict.fromkeys(name for row in rows for name, n in row.plan.estimate.memory.items() if n))
    limits = {row.plan.estimate.hbm_bytes for row in rows}
    items = {}
    for row in rows:
        e, training = row.plan.estimate, row.plan.run.training
        links = "\n".join(
            f"{axes} over {e.routes[axes]}: {format_step(n)} busy, {format_step(e.exposed.get(axes, 0.0))} exposed"
            for axes, n in e.busy.items()
        )
        pipeline = training.pipeline_schedule if row.plan.mesh.stage > 1 else ""
        facts: list[Cell] = [
            e.seconds,
            e.mfu,
            e.tokens_per_second,
            e.bytes,
            e.bytes / e.hbm_bytes,
            e.bound_by,
            row.rank,
        ]
        facts += [training.remat, training.microbatches, pipeline, row.plan.run.layout, str(e.axis_mapping), links]
        values = [[e.parts[part] for part in STEP_PARTS], [e.memory.get(name, 0.0) for name in categories]]
        items[row.key] = Item(row.plan.name, row.reason, facts, values)
    names, colours = list(STEP_PARTS.values()), [PART_COLOURS[part] for part in STEP_PARTS]
    limit = limits.pop() if len(limits) == 1 else None
    memory_colours = [MEMORY_COLOURS.get(name, "c7") for name in categories]
    bars = [
        BarScale("Where the seconds go", "seconds", names, colours),
        BarScale("Where the bytes go", "bytes", categories, memory_colours, limit),
    ]
    empty = "Click a point or a row."
    return Inspector(
        "plans",
        list(_FACTS),
        list(_FACTS.values()),
        items,
        bars,
        at_most=2,
        first=first,
        title="Chosen",
        empty=empty,
    )


def plans_table(plans: Sequence[Plan]) -> Table:
    """Returns the table of ranked plans of several targets."""
    columns = [
        Column("", "integer", lambda row: row[0]),
        Column("plan", cell=lambda row: row[1].name),
        Column("step", "seconds", lambda row: row[1].estimate.seconds),
        Column("MFU", "fraction", lambda row: row[1].estimate.mfu),
        Column("tokens/s", "count", lambda row: row[1].estimate.tokens_per_second),
        Column("memory", "bytes", lambda row: row[1].estimate.bytes),
        Column("bound by", cell=lambda row: row[1].estimate.bound_by),
        Column("machine", cell=lambda row: str(row[1].target)),
    ]
    return Table.of(enumerate(plans, 1), columns, printed=len(plans))


def _table(rows: Sequence[Row], result: SearchResult, printed: int, tokens: int | None) -> Table:
    def days(row: Row) -> float | None:
        return None if tokens is None else tokens / row.plan.estimate.tokens_per_second / 86400

    def pipeline(row: Row) -> str:
        return row.plan.run.training.pipeline_schedule if row.plan.mesh.stage > 1 else "none"

    columns = [
        Column("", "integer", lambda row: row.rank, where="terminal"),
        Column("plan", cell=lambda row: row.plan.name, where="terminal"),
        Column("mesh", cell=lambda row: str(row.plan.mesh), where="page"),
        Column("remat", cell=lambda row: row.plan.run.training.remat, choices=True, where="page"),
        Column("microbatches", "integer", lambda row: row.plan.run.training.microbatches, choices=True, where="page"),
        Column("pipeline", cell=pipeline, choices=True, where="page"),
        Column("step", "seconds", lambda row: row.plan.estimate.seconds, bar=True),
        Column("MFU", "fraction", lambda row: row.plan.estimate.mfu),
        Column("tokens/s", "count", lambda row: row.plan.estimate.tokens_per_second),
        Column("memory", "bytes", lambda row: row.plan.estimate.bytes, bar=True),
        Column(
            "state", cell=lambda row: "fits" if row.plan.estimate.fits else "does not fit", choices=True, where="page"
        ),
        Column("bound by", cell=lambda row: row.plan.estimate.bound_by, choices=True),
        Column("days", "days", days),
        Column("reason", cell=lambda row: row.reason, wide=True, where="page"),
    ]
    shown = min(printed, max(1, len(result.plans)))
    note = f"{result.priced:,} were priced; here is the best of each mesh and schedule, and every mesh that is refused."
    table = Table.of(
        rows,
        columns,
        keys=[row.key for row in rows],
        tones=["" if row.plan.estimate.fits else "faded" for row in rows],
        link="plans",
        searchable=True,
        shown=15,
        printed=shown,
        title="Every plan and its reason",
        note=note,
    )
    refused: list[list[str | None]] = []
    for mesh, error in result.refused.items():
        because = next((line.split(":", 1)[1] for line in error.splitlines() if "because:" in line), error)
        cells = {"mesh": mesh, "state": "refused", "reason": " ".join(because.split())}
        refused.append([cells.get(column.heading) for column in columns])
    tones: list[Tone] = [*table.tones, *["faded"] * len(refused)]  # type: ignore[list-item]
    return dataclasses.replace(table, rows=[*table.rows, *refused], tones=tones)


def _alternatives(result: SearchResult, printed: int) -> Table:
    columns = [
        Column("mesh axes", cell=lambda a: a.axes),
        Column("best plan", cell=lambda a: a.best.name),
        Column("step", "seconds", lambda a: a.best.estimate.seconds, bar=True),
        Column("memory", "bytes", lambda a: a.best.estimate.bytes, where="page"),
        Column("reason", cell=lambda a: a.reason, wide=True),
    ]
    found = alternatives(result)
    tones = ["" if a.fits else "faded" for a in found]
    return Table.of(found, columns, tones=tones, title="Best plan of other axes", shown=12, printed=printed)


def machine_of_target(target: Target) -> MachineGrid:
    """Returns the grid of a target's devices, for the pictures."""
    coordinates = tuple(all_coordinates(target.chip, target.topology, target.domains))
    if not isinstance(target.chip.interconnect, Torus):
        return MachineGrid("nodes", str(target), (target.domains, target.topology[1]), coordinates)
    cores = (target.chip.devices_per_chip,) if target.chip.devices_per_chip > 1 else ()
    if target.slices == 1:
        inside = tuple(coordinate[1:] for coordinate in coordinates)
        return MachineGrid("torus", str(target), (*target.topology, *cores), inside)
    # Several slices are drawn like nodes: a panel for each slice, its devices in rows.
    per_slice = len(coordinates) // target.slices
    rows = tuple((coordinate[0], number % per_slice) for number, coordinate in enumerate(coordinates))
    return MachineGrid("nodes", str(target), (target.slices, per_slice), rows)


def arithmetic(offer: Offer) -> str:
    """Returns how the days and dollars of an offer follow from its speed."""
    e, chips = offer.plan.estimate, offer.plan.target.chips
    parts = [
        f"{offer.plan.target}: {format_count(offer.tokens)} tokens / {e.tokens_per_second:,.0f} tokens/s = "
        f"{format_amount(offer.step_days)} days of steps; / {offer.goodput.fraction:.4f} goodput = "
        f"{format_amount(offer.days)} days; x 24 h x {chips:,} chips = {offer.chip_hours:,.0f} chip-hours"
    ]
    if offer.price is not None and offer.dollars is not None:
        parts.append(f"x ${offer.price.dollars:g} = ${format_amount(offer.dollars)}")
    low, high = (offer.days * factor for factor in (offer.band.low, offer.band.high))
    parts.append(f"expect {format_amount(low)} to {format_amount(high)} days: {offer.band}")
    return "; ".join(parts)


def assumptions(offers: Sequence[Offer]) -> list[str]:
    """Returns the reliability and the prices that offers were made with, and what is missing."""
    goodputs, prices = [], []
    for offer in offers:
        good, chip = offer.goodput, offer.plan.target.name
        goodputs.append(
            f"goodput of {offer.plan.target}: a failure every {format_time(good.failure_seconds)}, a checkpoint every "
            f"{format_time(good.period)} of steps that stops {format_step(good.save_seconds)} of them, "
            f"{format_time(good.restart_seconds)} of restart: {good.fraction:.2%}"
        )
        source = f"{offer.price}; {offer.price.source}, read {offer.price.read_on}" if offer.price else ""
        prices.append(f"price of {chip}: {source or 'none on these --terms; --prices FILE adds one'}")
    return list(dict.fromkeys((*goodputs, *prices)))
