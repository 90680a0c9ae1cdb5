"""Reports of plans: a search on one target, offers of several; what is known of a plan, once."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.formatting import format_bytes, format_count, format_step, format_time
from meshwright.hardware.targets import Target
from meshwright.planner.explain import STEP_PARTS, alternatives, slowdown_reason
from meshwright.planner.offers import Offer
from meshwright.planner.records import record_of
from meshwright.planner.search import Plan, SearchResult
from meshwright.views.blocks import (
    Bars,
    Block,
    Cell,
    Column,
    Figure,
    Figures,
    Grid,
    Inspector,
    Item,
    Table,
    Text,
    format_amount,
    format_cell,
)
from meshwright.views.charts import MARKERS, Axis, Chart, Mark, Series
from meshwright.views.colours import series_colour
from meshwright.views.draw import machine_of_target
from meshwright.views.layout_page import layout_sections, machine_drawing, phases_section
from meshwright.views.report import Report, Section

_MOST = 500
"""Plans that fit, and as many that do not, on a page; the best are kept."""
_MESHES = 80
"""Plans whose mesh can be drawn over the machine."""
_COLOURED = 6
"""Ways to split the model with a colour of their own."""
_CHARTED = 2.5
"""Memory over that of the device above which a plan that does not fit is only in the table."""
_SLOWER = 1.2
"""Step time over that of the slowest plan that fits above which one that does not is only in the table."""
_PART_COLOURS = ("matmul", "attention", "c7", "memory", "c2", "exposed", "host", "bubble")
"""Colours of the parts of a step, in the order of STEP_PARTS."""
_MEMORY_COLOURS = {
    "parameters": "c1",
    "optimizer state": "c6",
    "gradients": "c4",
    "activations": "c3",
    "gathered weights": "c5",
    "one layer": "c8",
    "loss and its table": "c7",
    "optimizer update": "c2",
}


@dataclasses.dataclass(frozen=True)
class _Row:
    """Plan with its key on the page and why it is not the first."""

    key: str
    plan: Plan
    reason: str = ""
    rank: int | None = None
    """None for plans that the search did not find, or that do not fit."""
    days: float | None = None
    dollars: float | None = None

    @property
    def state(self) -> str:
        return "fits" if self.plan.estimate.fits else "does not fit"

    @property
    def pipeline(self) -> str:
        return self.plan.run.training.pipeline_schedule if self.plan.mesh.stage > 1 else "none"

    @property
    def links(self) -> str:
        e = self.plan.estimate
        return "\n".join(
            f"{axes} over {e.routes[axes]}: {format_step(n)} busy, {format_step(e.exposed.get(axes, 0.0))} exposed"
            for axes, n in e.busy.items()
        )


_COLUMNS = {
    column.heading: column
    for column in (
        Column("", "integer", "rank", where="terminal"),
        Column("target", cell="plan.target"),
        Column("plan", cell="plan.name"),
        Column("mesh", cell="plan.mesh", where="page"),
        Column("remat", cell="plan.run.training.remat", choices=True, where="page"),
        Column(
            "microbatches", "integer", "plan.run.training.microbatches", choices=True, where="page"
        ),
        Column("pipeline", cell="pipeline", choices=True, where="page"),
        Column("step", "seconds", "plan.estimate.seconds", bar=True),
        Column("MFU", "fraction", "plan.estimate.mfu"),
        Column("tokens/s", "count", "plan.estimate.tokens_per_second"),
        Column("memory", "bytes", "plan.estimate.bytes", bar=True),
        Column(
            "of the device's memory",
            "fraction",
            lambda row: row.plan.estimate.bytes / row.plan.estimate.hbm_bytes,
        ),
        Column("state", cell="state", choices=True, where="page"),
        Column("bound by", cell="plan.estimate.bound_by", choices=True),
        Column("days", "days", "days", bar=True),
        Column("cost", "dollars", "dollars", bar=True),
        Column("layout", cell="plan.run.layout"),
        Column("mesh axes on the hardware", cell="plan.estimate.axis_mapping"),
        Column("links", cell="links"),
        Column("reason", cell="reason", wide=True, where="page"),
    )
}
"""What tables and inspectors show of a plan."""


def _columns(*names: str, unit: str = "tokens") -> list[Column]:
    """Returns columns by name. unit: what the speed of the plans counts."""
    columns = [_COLUMNS[name] for name in names]
    return [dataclasses.replace(c, heading=c.heading.replace("tokens", unit)) for c in columns]


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
    rows = _rows(result, compared or (plan,), plan, most, None if offer is None else offer.tokens)
    first = "~".join(
        row.key for row in rows if row.plan.name in {p.name for p in compared or (plan,)}
    )
    refused = f"; {len(result.refused)} meshes refused" if result.refused else ""
    unit = plan.run.model.unit
    tokens = f"{format_count(e.tokens)} {unit}"
    tokens += f" of {plan.run.training.batch} x {plan.run.training.seq}" if unit == "tokens" else ""
    used = f"{e.bytes / e.hbm_bytes:.0%} of {format_bytes(e.hbm_bytes)}"
    if not e.fits:
        used += f"; {e.shortfall}"
    bound = f"over the best searched mesh without its bubble, {format_step(result.bound)} by the same rates"
    priced = f"best of each mesh and schedule: {len(result.plans)} fit, {len(result.too_large)} do not{refused}"
    figures = [
        Figure("step", format_step(e.seconds), tokens),
        *(
            [Figure("missed by the search", f"{e.seconds / result.bound - 1:.1%}", bound)]
            if result.bound
            else []
        ),
        Figure(
            "MFU",
            f"{e.mfu:.1%}",
            f"bound by {e.bound_by}; recomputation is left out{_record(plan)}",
        ),
        Figure(
            f"{unit} per second", format_count(e.tokens_per_second), f"on {e.devices:,} devices"
        ),
        Figure("memory of a device", format_bytes(e.bytes), used, "" if e.fits else "bad"),
        Figure("plans priced", f"{result.priced:,}", priced),
    ]
    known = [f"efficiency: {target.efficiency_source}"] if target.efficiency_source else []
    known += [f"note: {note}" for note in notes]
    known += (
        [f"training: {_arithmetic(offer)}", *_assumptions([offer])] if offer is not None else []
    )
    machine = machine_of_target(target)
    drawn = dataclasses.replace(
        machine_drawing(
            plan.placed, machine, "plans", {row.key: row.plan.placed for row in rows[:_MESHES]}
        ),
        title=f"{target}: {target.devices:,} devices",
        note=f"Mesh axes on the hardware: {e.axis_mapping}.",
        hint="Point at an axis to see who communicates along it; the drawing follows the plan that is chosen above.",
    )
    layout = [dataclasses.replace(s, where="page") for s in layout_sections(plan.placed, machine)]
    sections = [
        Section("At a glance", [Figures(figures), *([Text(known)] if known else [])]),
        *([phases_section(e.phases)] if e.phases else []),
        *compiled,
        Section(
            "All plans",
            [
                Grid([_plans_chart(rows, target), _inspector(rows, first)], wide=True),
                _search_table(rows, result, shown),
            ],
            hint="Click a point or a row to see its parts; click a second one to compare the two.",
        ),
        Section("Mesh of the chosen plan", [drawn]),
        Section("Why not other mesh axes", [_alternatives(result, shown)]),
        *(section for section in layout if section.title != "Mesh over the machine"),
    ]
    footer = "Every figure is predicted by arithmetic; meshwright prove compiles a plan. This file loads nothing."
    lead = f"{plan.name}, {_predicted(plan)}"
    return Report(f"{plan.run.name} on {target}", sections, topic="plan", lead=lead, footer=footer)


def _record(plan: Plan) -> str:
    """Returns the highest published MFU of a plan's chip, where it is known."""
    record = record_of(plan.estimate, plan.run.training.matmul_precision)
    return "" if record is None else f"; published: at most {record.mfu:.1%}"


def single_plan_page(plan: Plan) -> Report:
    """Returns the report of one plan without its search: where its seconds and bytes go, and its tensors on devices."""
    row = _Row("p0", plan)
    sections = [
        Section("Prediction", [_inspector([dataclasses.replace(row, reason=row.state)], "p0")]),
        *layout_sections(plan.placed, machine_of_target(plan.target)),
    ]
    lead = f"{plan.name}, {_predicted(plan)}"
    return Report(f"{plan.run.name} on {plan.target}", sections, topic="plan", lead=lead)


def plans_table(plans: Sequence[Plan]) -> Table:
    """Returns the table of ranked plans of several targets."""
    rows = [_Row(str(i), plan, rank=i) for i, plan in enumerate(plans, 1)]
    unit = plans[0].run.model.unit if plans else "tokens"
    columns = _columns(
        "", "plan", "step", "MFU", "tokens/s", "memory", "bound by", "target", unit=unit
    )
    return Table.of(rows, columns, printed=None)


def _predicted(plan: Plan) -> str:
    e = plan.estimate
    return (
        f"predicted by arithmetic: {format_step(e.seconds)} per step, {e.mfu:.0%} MFU, "
        f"{format_count(e.tokens_per_second)} {plan.run.model.unit}/s, "
        f"{format_bytes(e.bytes)} of {format_bytes(e.hbm_bytes)} per device"
    )


def _rows(
    result: SearchResult, opened: Sequence[Plan], chosen: Plan, most: int, tokens: int | None
) -> list[_Row]:
    """Returns the best plans of a search, and those that the page is about: first what fits, then what does not."""
    fits, too_large = list(result.plans[:most]), list(result.too_large[:most])
    ranked, names = len(fits), {plan.name for plan in (*fits, *too_large)}
    others = {plan.name: plan for plan in (*opened, chosen) if plan.name not in names}
    fits += [plan for plan in others.values() if plan.estimate.fits]
    too_large += [plan for plan in others.values() if not plan.estimate.fits]
    winner = result.plans[0] if result.plans else None
    rows = []
    for i, plan in enumerate([*fits, *too_large]):
        reason = slowdown_reason(plan, winner) if plan.estimate.fits else plan.estimate.shortfall
        reason = "the fastest plan that fits" if plan is winner else reason
        days = None if tokens is None else tokens / plan.estimate.tokens_per_second / 86400
        rows.append(_Row(f"p{i}", plan, reason, i + 1 if i < ranked else None, days))
    return rows


def _splits(plan: Plan) -> str:
    """Names how a plan splits the model, besides over data: `pipeline + tensor`, `data and FSDP only`."""
    words = {"stage": "pipeline", "expert": "experts", "context": "context", "tensor": "tensor"}
    degrees = plan.mesh.degrees()
    return (
        " + ".join(word for axis, word in words.items() if degrees[axis] > 1)
        or "data and FSDP only"
    )


def _points(
    name: str,
    rows: Sequence[_Row],
    x: Sequence[float],
    y: Sequence[float],
    colour: str,
    marker: str,
) -> Series:
    tips = [f"{row.plan.name}\n{row.reason}" for row in rows]
    return Series(name, x, y, colour, "points", marker, keys=[row.key for row in rows], tips=tips)


def _plans_chart(rows: Sequence[_Row], target: Target) -> Chart:
    """Step time against memory: plans that fit, by how they split the model, others, the Pareto front, the limit."""
    fitting = [row for row in rows if row.plan.estimate.fits]
    counts = Counter(_splits(row.plan) for row in fitting)
    names = sorted(counts, key=lambda name: (name != _splits(rows[0].plan), -counts[name]))[
        :_COLOURED
    ]
    groups: dict[str, list[_Row]] = {name: [] for name in (*names, "others", "does not fit")}
    slowest = max((row.plan.estimate.seconds for row in fitting), default=float("inf"))
    for row in rows:
        e, name = row.plan.estimate, _splits(row.plan)
        if e.fits:
            groups[name if name in names else "others"].append(row)
        elif e.bytes <= _CHARTED * e.hbm_bytes and e.seconds <= _SLOWER * slowest:
            groups["does not fit"].append(row)
    series = []
    for number, (name, group) in enumerate(groups.items()):
        x, y = ([getattr(row.plan.estimate, of) for row in group] for of in ("seconds", "bytes"))
        look = (
            ("muted", "cross")
            if name == "does not fit"
            else (series_colour(number), MARKERS[number % 4])
        )
        series += [_points(name, group, x, y, *look)] if group else []
    front: list[tuple[float, float]] = []
    for seconds, size in sorted(
        (row.plan.estimate.seconds, row.plan.estimate.bytes) for row in fitting
    ):
        if not front or size < front[-1][1]:
            front.append((seconds, size))
    if len(front) > 1:
        x, y = map(list, zip(*front, strict=True))
        series.append(Series("Pareto front", x, y, "ink", "step", dashed=True))
    hbm, fragmentation = target.chip.hbm_bytes, target.chip.fragmentation
    marks = [
        Mark("y", hbm / fragmentation, f"fits below {format_bytes(hbm / fragmentation)}", fit=True)
    ]
    if fragmentation > 1:
        marks.append(
            Mark("y", hbm, f"memory of {target.name}: {format_bytes(hbm)}", "muted", fit=True)
        )
    times = [
        row.plan.estimate.seconds for row in rows if row.plan.estimate.seconds <= _SLOWER * slowest
    ]
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


def _inspector(rows: Sequence[_Row], first: str) -> Inspector:
    estimates = [row.plan.estimate for row in rows]
    categories = list(dict.fromkeys(name for e in estimates for name, n in e.memory.items() if n))
    limits = {e.hbm_bytes for e in estimates}
    bars = [
        Bars("seconds", list(STEP_PARTS.values()), _PART_COLOURS, title="Where the seconds go"),
        Bars(
            "bytes",
            categories,
            [_MEMORY_COLOURS.get(name, "c7") for name in categories],
            limit=limits.pop() if len(limits) == 1 else None,
            title="Where the bytes go",
        ),
    ]
    columns = _columns(
        *(
            "step",
            "MFU",
            "tokens/s",
            "memory",
            "of the device's memory",
            "bound by",
            "",
            "remat",
            "microbatches",
            "pipeline",
        ),
        *("layout", "mesh axes on the hardware", "links"),
        unit=rows[0].plan.run.model.unit,
    )
    columns[columns.index(_COLUMNS[""])] = Column("rank", "integer", "rank")
    items = {}
    for row, e in zip(rows, estimates, strict=True):
        values = [
            [e.parts[part] for part in STEP_PARTS],
            [e.memory.get(name, 0.0) for name in categories],
        ]
        items[row.key] = Item(
            row.plan.name, row.reason, [column.of(row) for column in columns], values
        )
    return Inspector(
        "plans", columns, items, bars, first=first, title="Chosen", empty="Click a point or a row."
    )


def _search_table(rows: Sequence[_Row], result: SearchResult, printed: int) -> Table:
    columns = _columns(
        *(
            "",
            "plan",
            "mesh",
            "remat",
            "microbatches",
            "pipeline",
            "step",
            "MFU",
            "tokens/s",
            "memory",
            "state",
        ),
        *("bound by", "days", "reason"),
        unit=rows[0].plan.run.model.unit,
    )
    columns[1] = dataclasses.replace(
        columns[1], where="terminal"
    )  # on a page its parts are columns
    cells: list[list[Cell]] = [[column.of(row) for column in columns] for row in rows]
    for mesh, error in result.refused.items():
        because = next(
            (line.split(":", 1)[1] for line in error.splitlines() if "because:" in line), error
        )
        refused = {"mesh": mesh, "state": "refused", "reason": " ".join(because.split())}
        cells.append([refused.get(column.heading) for column in columns])
    return Table(
        columns,
        cells,
        keys=[row.key for row in rows],
        tones=[
            "" if i < len(rows) and rows[i].plan.estimate.fits else "faded"
            for i in range(len(cells))
        ],
        link="plans",
        searchable=True,
        shown=15,
        printed=min(printed, max(1, len(result.plans))),
        title="Every plan and its reason",
        note=f"{result.priced:,} were priced; here is the best of each mesh and schedule, and every refused mesh.",
    )


def _alternatives(result: SearchResult, printed: int) -> Table:
    columns = [
        Column("mesh axes", cell="axes"),
        Column("best plan", cell="best.name"),
        Column("step", "seconds", "best.estimate.seconds", bar=True),
        Column("memory", "bytes", "best.estimate.bytes", where="page"),
        Column("reason", cell="reason", wide=True),
    ]
    found = alternatives(result)
    tones = ["" if a.fits else "faded" for a in found]
    return Table.of(
        found, columns, tones=tones, title="Best plan of other axes", shown=12, printed=printed
    )


# Offers


def offer_page(
    offers: Sequence[Offer],
    refused: Mapping[str, MeshwrightError] = MappingProxyType({}),
    beyond: Sequence[Offer] = (),
    *,
    notes: Sequence[str] = (),
    shown: int = 30,
) -> Report:
    """Returns the report of ranked offers, the best first: days against cost, and the arithmetic of each.

    refused: targets and batches that no plan fits, and why.  beyond: offers that do not keep the deadline or budget.
    notes: lines of the first section.  shown: offers on a terminal.
    """
    best, tokens, rows = offers[0], format_count(offers[0].tokens), _offer_rows(offers)
    cost = format_cell(best.dollars, "dollars")
    figures = [
        Figure("first", str(best.plan.target), best.plan.name),
        Figure("days", format_amount(best.days), f"{best.goodput.fraction:.1%} goodput"),
        Figure("cost", cost or "-", "no list price" if best.price is None else str(best.price)),
    ]
    calculated = [f"{row.rank}  {row.reason}" for row in rows[:shown]]
    grid: list[Block] = [_offers_chart(offers, rows), _inspector(rows, "o0")]
    sections = [
        Section("At a glance", [Figures(figures), *([Text(notes)] if notes else [])]),
        Section(
            "Days and cost",
            [Grid(grid, wide=True, where="page"), offers_table(offers, shown)],
            f"Training on {tokens} tokens.",
            "Click two to compare them.",
        ),
        Section("Arithmetic", [Text(calculated), Text(_assumptions(offers[:shown]))]),
    ]
    left_out = [[name, "nothing fits", error.truth, error.fix] for name, error in refused.items()]
    for offer in beyond:
        cost = format_cell(offer.dollars, "dollars") or "no list price"
        reason = f"{format_amount(offer.days)} days, {cost}: {offer.plan.name} is its fastest plan"
        left_out.append(
            [
                str(offer.plan.target),
                "beyond the limits",
                reason,
                "a later deadline, or more to spend",
            ]
        )
    lead = (
        f"{len(offers)} plans for {tokens} tokens; first {best.plan.target}: {format_amount(best.days)} days, "
        f"{format_bytes(best.plan.estimate.bytes)} per device"
    )
    if left_out:
        lead += f"; {len(left_out)} left out"
        headings = ("target", "left out", "reason", "what would mend it")
        columns = [
            Column(heading, choices=heading == "left out", wide=heading != "left out")
            for heading in headings
        ]
        table = Table(columns, left_out, title="Targets without an offer")
        note = "Targets that were asked for and have no offer above."
        sections.append(Section("Left out", [table], note))
    title = f"{best.plan.run.name} on {len({str(offer.plan.target) for offer in offers})} targets"
    footer = "Every figure is predicted by arithmetic from list prices. This file loads nothing."
    return Report(title, sections, topic="plan", lead=lead, footer=footer)


def _offer_rows(offers: Sequence[Offer]) -> list[_Row]:
    return [
        _Row(f"o{i}", o.plan, _arithmetic(o), i + 1, o.days, o.dollars)
        for i, o in enumerate(offers)
    ]


def offers_table(offers: Sequence[Offer], printed: int = 30) -> Table:
    """Returns the table of ranked offers."""
    rows = _offer_rows(offers)
    columns = _columns("", "target", "plan", "step", "MFU", "tokens/s", "days", "cost", "bound by")
    table = Table.of(rows, columns, keys=[row.key for row in rows], link="plans", searchable=True)
    return dataclasses.replace(table, title="Every offer", shown=30, printed=printed)


def _offers_chart(offers: Sequence[Offer], rows: Sequence[_Row]) -> Chart:
    priced = all(offer.dollars is not None for offer in offers)
    axis = (
        Axis("cost", "dollars", toggle=True) if priced else Axis("chip-hours", "count", toggle=True)
    )
    series = []
    for number, chip in enumerate(dict.fromkeys(offer.plan.target.name for offer in offers)):
        group = [i for i, offer in enumerate(offers) if offer.plan.target.name == chip]
        costs: list[Any] = [offers[i].dollars if priced else offers[i].chip_hours for i in group]
        days = [offers[i].days for i in group]
        look = (series_colour(number), MARKERS[number % 4])
        series.append(_points(chip, [rows[i] for i in group], days, costs, *look))
    return Chart(
        Axis("days of training", "days", toggle=True),
        axis,
        series,
        link="plans",
        title=f"Days and {axis.label} of each offer",
        height=640,
        note="Left is sooner, low is cheaper.",
    )


def _arithmetic(offer: Offer) -> str:
    """Returns how the days and dollars of an offer follow from its speed."""
    e, chips = offer.plan.estimate, offer.plan.target.chips
    parts = [
        f"{offer.plan.target}: {format_count(offer.tokens)} tokens / {e.tokens_per_second:,.0f} tokens/s = "
        f"{format_amount(offer.step_days)} days of steps; / {offer.goodput.fraction:.4f} goodput = "
        f"{format_amount(offer.days)} days; x 24 h x {chips:,} chips = {offer.chip_hours:,.0f} chip-hours"
    ]
    if offer.price is not None:
        parts.append(f"x ${offer.price.dollars:g} = {format_cell(offer.dollars, 'dollars')}")
    low, high = (offer.days * factor for factor in (offer.band.low, offer.band.high))
    parts.append(f"expect {format_amount(low)} to {format_amount(high)} days: {offer.band}")
    return "; ".join(parts)


def _assumptions(offers: Sequence[Offer]) -> list[str]:
    """Returns the reliability and the prices that offers were made with, and what is missing."""
    goodputs, prices = [], []
    for offer in offers:
        good, chip = offer.goodput, offer.plan.target.name
        goodputs.append(
            f"goodput of {offer.plan.target}: a failure every {format_time(good.failure_seconds)}, a checkpoint every "
            f"{format_time(good.period)} of steps that stops {format_step(good.save_seconds)} of them, "
            f"{format_time(good.restart_seconds)} of restart: {good.fraction:.2%}"
        )
        source = (
            f"{offer.price}; {offer.price.source}, read {offer.price.read_on}"
            if offer.price
            else ""
        )
        prices.append(
            f"price of {chip}: {source or 'none on these --terms; --prices FILE adds one'}"
        )
    return list(dict.fromkeys((*goodputs, *prices)))
