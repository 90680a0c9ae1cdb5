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
    Tone,
    format_amount,
    format_cell,
)
from meshwright.views.charts import MARKERS, Axis, Chart, Drawing, Mark, Series
from meshwright.views.colours import series_colour
from meshwright.views.draw import MachineGrid, machine_of_target
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
"""Step time over that of the slowest plan that fits above which one that does not is only
in the table."""
_TOO_LARGE = "does not fit"
"""Group of the plans that take more memory than a device has."""
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
            f"{axes} over {e.routes[axes]}: {format_step(n)} busy, "
            f"{format_step(e.exposed.get(axes, 0.0))} exposed"
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


_INSPECTED = (
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
    "layout",
    "mesh axes on the hardware",
    "links",
)
"""Columns of the chosen plan."""
_SEARCHED = (
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
    "bound by",
    "days",
    "reason",
)
"""Columns of the table of a search."""


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

    compiled: sections of what the target's compiler proved.
    compared: two plans that are side by side when it opens.
    most: plans that fit, and as many that do not, on a page.
    shown: rows of each table on a terminal.
    offer: training of the plan, which gives its days and dollars.
    """
    target = result.target
    opened = compared or (plan,)
    tokens = None if offer is None else offer.tokens
    rows = _rows(result, opened, plan, most, tokens)
    opened_names = {each.name for each in opened}
    first = "~".join(row.key for row in rows if row.plan.name in opened_names)
    machine = machine_of_target(target)

    sections = [_glance_section(plan, result, offer, notes)]
    if plan.estimate.phases:
        sections.append(phases_section(plan.estimate.phases))
    sections += [
        *compiled,
        _all_plans_section(rows, result, first, shown),
        Section("Mesh of the chosen plan", [_mesh_drawing(plan, rows, target, machine)]),
        Section("Why not other mesh axes", [_alternatives(result, shown)]),
    ]
    for section in layout_sections(plan.placed, machine):
        if section.title != "Mesh over the machine":  # drawn above
            sections.append(dataclasses.replace(section, where="page"))
    footer = (
        "Every figure is predicted by arithmetic; meshwright prove compiles a plan. "
        "This file loads nothing."
    )
    title = f"{plan.run.name} on {target}"
    return Report(title, sections, topic="plan", lead=_lead(plan), footer=footer)


def _lead(plan: Plan) -> str:
    return f"{plan.name}, {_predicted(plan)}"


def _glance_section(
    plan: Plan, result: SearchResult, offer: Offer | None, notes: Sequence[str]
) -> Section:
    """Returns the figures of a plan, and where its efficiency and its days come from."""
    sentences = []
    source = result.target.efficiency_source
    if source:
        sentences.append(f"efficiency: {source}")
    sentences += [f"note: {note}" for note in notes]
    if offer is not None:
        sentences += [f"training: {_arithmetic(offer)}", *_assumptions([offer])]
    blocks: list[Block] = [Figures(_plan_figures(plan, result))]
    if sentences:
        blocks.append(Text(sentences))
    return Section("At a glance", blocks)


def _plan_figures(plan: Plan, result: SearchResult) -> list[Figure]:
    e = plan.estimate
    figures = [Figure("step", format_step(e.seconds), _tokens_of_step(plan))]
    if result.bound:
        over = (
            "over the best searched mesh without its bubble, "
            f"{format_step(result.bound)} by the same rates"
        )
        figures.append(Figure("missed by the search", f"{e.seconds / result.bound - 1:.1%}", over))
    bound_by = f"bound by {e.bound_by}; recomputation is left out{_record(plan)}"
    used = f"{e.bytes / e.hbm_bytes:.0%} of {format_bytes(e.hbm_bytes)}"
    tone: Tone = ""
    if not e.fits:
        used += f"; {e.shortfall}"
        tone = "bad"
    priced = (
        f"best of each mesh and schedule: {len(result.plans)} fit, {len(result.too_large)} do not"
    )
    if result.refused:
        priced += f"; {len(result.refused)} meshes refused"
    rate = f"{plan.run.model.unit} per second"
    return [
        *figures,
        Figure("MFU", f"{e.mfu:.1%}", bound_by),
        Figure(rate, format_count(e.tokens_per_second), f"on {e.devices:,} devices"),
        Figure("memory of a device", format_bytes(e.bytes), used, tone),
        Figure("plans priced", f"{result.priced:,}", priced),
    ]


def _tokens_of_step(plan: Plan) -> str:
    """Formats what a step computes: `1.05 M tokens of 128 x 8192`, or `256 examples`."""
    unit = plan.run.model.unit
    text = f"{format_count(plan.estimate.tokens)} {unit}"
    if unit == "tokens":
        text += f" of {plan.run.training.batch} x {plan.run.training.seq}"
    return text


def _all_plans_section(
    rows: Sequence[_Row], result: SearchResult, first: str, shown: int
) -> Section:
    """Returns the chart, the chosen plan and the table of a search.
    first: key that is chosen at first."""
    chart_and_choice = Grid([_plans_chart(rows, result.target), _inspector(rows, first)], wide=True)
    return Section(
        "All plans",
        [chart_and_choice, _search_table(rows, result, shown)],
        hint="Click a point or a row to see its parts; click a second one to compare the two.",
    )


def _mesh_drawing(
    plan: Plan, rows: Sequence[_Row], target: Target, machine: MachineGrid
) -> Drawing:
    """Returns the mesh of the plan that is chosen, over the target."""
    others = {row.key: row.plan.placed for row in rows[:_MESHES]}
    return dataclasses.replace(
        machine_drawing(plan.placed, machine, "plans", others),
        title=f"{target}: {target.devices:,} devices",
        note=f"Mesh axes on the hardware: {plan.estimate.axis_mapping}.",
        hint=(
            "Point at an axis to see who communicates along it; "
            "the drawing follows the plan that is chosen above."
        ),
    )


def _record(plan: Plan) -> str:
    """Returns the highest published MFU of a plan's chip, where it is known."""
    record = record_of(plan.estimate, plan.run.training.matmul_precision)
    return "" if record is None else f"; published: at most {record.mfu:.1%}"


def single_plan_page(plan: Plan) -> Report:
    """Returns the report of one plan without its search: where its seconds and bytes go,
    and its tensors on devices."""
    row = _Row("p0", plan)
    row = dataclasses.replace(row, reason=row.state)
    sections = [
        Section("Prediction", [_inspector([row], "p0")]),
        *layout_sections(plan.placed, machine_of_target(plan.target)),
    ]
    title = f"{plan.run.name} on {plan.target}"
    return Report(title, sections, topic="plan", lead=_lead(plan))


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
    """Returns the best plans of a search, and those that the page is about: first what fits,
    then what does not."""
    fits = list(result.plans[:most])
    too_large = list(result.too_large[:most])
    ranked = len(fits)
    listed = {plan.name for plan in (*fits, *too_large)}
    others = {plan.name: plan for plan in (*opened, chosen) if plan.name not in listed}
    for plan in others.values():
        if plan.estimate.fits:
            fits.append(plan)
        else:
            too_large.append(plan)
    winner = result.plans[0] if result.plans else None
    rows = []
    for number, plan in enumerate([*fits, *too_large]):
        rank = number + 1 if number < ranked else None
        days = None
        if tokens is not None:
            days = tokens / plan.estimate.tokens_per_second / 86400
        rows.append(_Row(f"p{number}", plan, _reason(plan, winner), rank, days))
    return rows


def _reason(plan: Plan, winner: Plan | None) -> str:
    """Returns why a plan is not the first: what it lacks of memory, or what makes it slower."""
    if plan is winner:
        return "the fastest plan that fits"
    if not plan.estimate.fits:
        return plan.estimate.shortfall
    return slowdown_reason(plan, winner)


def _splits(plan: Plan) -> str:
    """Names how a plan splits the model, besides
    over data: `pipeline + tensor`, `data and FSDP only`."""
    words = {"stage": "pipeline", "expert": "experts", "context": "context", "tensor": "tensor"}
    degrees = plan.mesh.degrees()
    splits = [word for axis, word in words.items() if degrees[axis] > 1]
    return " + ".join(splits) or "data and FSDP only"


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
    """Returns step time against memory: plans that fit,
    by how they split the model, others, the front, the limit."""
    fitting = [row for row in rows if row.plan.estimate.fits]
    times_of_fitting = [row.plan.estimate.seconds for row in fitting]
    slowest = _SLOWER * max(times_of_fitting, default=float("inf"))
    series = [
        *_points_of_groups(_grouped(rows, fitting, slowest)),
        *_pareto_front(fitting),
    ]
    times = [row.plan.estimate.seconds for row in rows]
    times = [seconds for seconds in times if seconds <= slowest]
    return Chart(
        Axis("predicted step", "seconds", log=max(times) > 12 * min(times), toggle=True),
        Axis("memory of a device", "bytes", toggle=True),
        series,
        _memory_marks(target),
        "plans",
        title="Step time and memory of every plan",
        height=560,
        note="Left is faster, low is smaller. Plans that do not fit are only in the table where "
        f"they take over {_CHARTED:g} times the memory, or {_SLOWER:g} times as long as all that "
        "fit.",
    )


def _grouped(
    rows: Sequence[_Row], fitting: Sequence[_Row], slowest: float
) -> dict[str, list[_Row]]:
    """Returns the rows of a chart by how they split the model; those that do not fit are a group.

    The split of the first plan has the first color, the most frequent others the next ones.
    slowest: seconds above which a plan that does not fit is left out.
    """
    counts = Counter(_splits(row.plan) for row in fitting)
    of_first = _splits(rows[0].plan)
    names = sorted(counts, key=lambda name: (name != of_first, -counts[name]))[:_COLOURED]
    groups: dict[str, list[_Row]] = {name: [] for name in (*names, "others", _TOO_LARGE)}
    for row in rows:
        e = row.plan.estimate
        name = _splits(row.plan)
        if e.fits:
            groups[name if name in names else "others"].append(row)
        elif e.bytes <= _CHARTED * e.hbm_bytes and e.seconds <= slowest:
            groups[_TOO_LARGE].append(row)
    return groups


def _points_of_groups(groups: Mapping[str, Sequence[_Row]]) -> list[Series]:
    series = []
    for number, (name, group) in enumerate(groups.items()):
        if not group:
            continue
        seconds = [row.plan.estimate.seconds for row in group]
        sizes = [row.plan.estimate.bytes for row in group]
        colour = series_colour(number)
        marker = MARKERS[number % 4]
        if name == _TOO_LARGE:
            colour = "muted"
            marker = "cross"
        series.append(_points(name, group, seconds, sizes, colour, marker))
    return series


def _pareto_front(fitting: Sequence[_Row]) -> list[Series]:
    """Returns the plans of which none is both faster and smaller, as a line;
    nothing for a single one."""
    points = sorted((row.plan.estimate.seconds, row.plan.estimate.bytes) for row in fitting)
    times: list[float] = []
    sizes: list[float] = []
    for seconds, size in points:
        if not sizes or size < sizes[-1]:
            times.append(seconds)
            sizes.append(size)
    if len(sizes) < 2:
        return []
    return [Series("Pareto front", times, sizes, "ink", "step", dashed=True)]


def _memory_marks(target: Target) -> list[Mark]:
    """Returns the memory below which a plan fits,
    and that of the device where fragmentation takes a part."""
    hbm = target.chip.hbm_bytes
    usable = hbm / target.chip.fragmentation
    marks = [Mark("y", usable, f"fits below {format_bytes(usable)}", fit=True)]
    if target.chip.fragmentation > 1:
        label = f"memory of {target.name}: {format_bytes(hbm)}"
        marks.append(Mark("y", hbm, label, "muted", fit=True))
    return marks


def _inspector(rows: Sequence[_Row], first: str) -> Inspector:
    categories = _categories(rows)
    columns = _columns(*_INSPECTED, unit=rows[0].plan.run.model.unit)
    columns[columns.index(_COLUMNS[""])] = Column("rank", "integer", "rank")
    items = {}
    for row in rows:
        e = row.plan.estimate
        facts = [column.of(row) for column in columns]
        seconds = [e.parts[part] for part in STEP_PARTS]
        sizes = [e.memory.get(name, 0.0) for name in categories]
        items[row.key] = Item(row.plan.name, row.reason, facts, [seconds, sizes])
    limits = {row.plan.estimate.hbm_bytes for row in rows}
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
    empty = "Click a point or a row."
    return Inspector("plans", columns, items, bars, first=first, title="Chosen", empty=empty)


def _categories(rows: Sequence[_Row]) -> list[str]:
    """Returns the categories of memory that any of the plans has."""
    found: dict[str, None] = {}
    for row in rows:
        found |= {name: None for name, size in row.plan.estimate.memory.items() if size}
    return list(found)


def _search_table(rows: Sequence[_Row], result: SearchResult, printed: int) -> Table:
    columns = _columns(*_SEARCHED, unit=rows[0].plan.run.model.unit)
    # On a page the parts of a plan's name are columns.
    columns[1] = dataclasses.replace(columns[1], where="terminal")
    cells: list[list[Cell]] = [[column.of(row) for column in columns] for row in rows]
    tones: list[Tone] = ["" if row.plan.estimate.fits else "faded" for row in rows]
    for mesh, error in result.refused.items():
        refused = {"mesh": mesh, "state": "refused", "reason": _because(error)}
        cells.append([refused.get(column.heading) for column in columns])
        tones.append("faded")
    priced = f"{result.priced:,} were priced"
    return Table(
        columns,
        cells,
        keys=[row.key for row in rows],
        tones=tones,
        link="plans",
        searchable=True,
        shown=15,
        printed=min(printed, max(1, len(result.plans))),
        title="Every plan and its reason",
        note=f"{priced}; here is the best of each mesh and schedule, and every refused mesh.",
    )


def _because(error: str) -> str:
    """Returns the reason in the text of an error, on one line."""
    for line in error.splitlines():
        if "because:" in line:
            return " ".join(line.split(":", 1)[1].split())
    return " ".join(error.split())


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
    """Returns the report of ranked offers, the best first: days against cost,
    and the arithmetic of each.

    refused: targets and batches that no plan fits, and why.
    beyond: offers that do not keep the deadline or budget.
    notes: lines of the first section.
    shown: offers on a terminal.
    """
    best = offers[0]
    rows = _offer_rows(offers)
    tokens = format_count(best.tokens)
    glance: list[Block] = [Figures(_offer_figures(best))]
    if notes:
        glance.append(Text(notes))
    chart: list[Block] = [_offers_chart(offers, rows), _inspector(rows, "o0")]
    calculated = [f"{row.rank}  {row.reason}" for row in rows[:shown]]
    sections = [
        Section("At a glance", glance),
        Section(
            "Days and cost",
            [Grid(chart, wide=True, where="page"), offers_table(offers, shown)],
            f"Training on {tokens} tokens.",
            "Click two to compare them.",
        ),
        Section("Arithmetic", [Text(calculated), Text(_assumptions(offers[:shown]))]),
    ]
    lead = (
        f"{len(offers)} plans for {tokens} tokens; "
        f"first {best.plan.target}: {format_amount(best.days)} days, "
        f"{format_bytes(best.plan.estimate.bytes)} per device"
    )
    left_out = _left_out(refused, beyond)
    if left_out:
        lead += f"; {len(left_out)} left out"
        sections.append(_left_out_section(left_out))
    targets = {str(offer.plan.target) for offer in offers}
    title = f"{best.plan.run.name} on {len(targets)} targets"
    footer = "Every figure is predicted by arithmetic from list prices. This file loads nothing."
    return Report(title, sections, topic="plan", lead=lead, footer=footer)


def _offer_figures(best: Offer) -> list[Figure]:
    cost = format_cell(best.dollars, "dollars") or "-"
    price = "no list price" if best.price is None else str(best.price)
    return [
        Figure("first", str(best.plan.target), best.plan.name),
        Figure("days", format_amount(best.days), f"{best.goodput.fraction:.1%} goodput"),
        Figure("cost", cost, price),
    ]


def _left_out(
    refused: Mapping[str, MeshwrightError], beyond: Sequence[Offer]
) -> list[tuple[str, str, str, str]]:
    """Returns target, kind, reason and what would mend it, of targets without an offer."""
    rows = []
    for name, error in refused.items():
        rows.append((name, "nothing fits", error.truth, error.fix))
    for offer in beyond:
        cost = format_cell(offer.dollars, "dollars") or "no list price"
        reason = f"{format_amount(offer.days)} days, {cost}: {offer.plan.name} is its fastest plan"
        mended_by = "a later deadline, or more to spend"
        rows.append((str(offer.plan.target), "beyond the limits", reason, mended_by))
    return rows


def _left_out_section(rows: Sequence[tuple[str, str, str, str]]) -> Section:
    columns = [
        Column("target", wide=True),
        Column("left out", choices=True),
        Column("reason", wide=True),
        Column("what would mend it", wide=True),
    ]
    table = Table(columns, rows, title="Targets without an offer")
    note = "Targets that were asked for and have no offer above."
    return Section("Left out", [table], note)


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
    cost = Axis("chip-hours", "count", toggle=True)
    if priced:
        cost = Axis("cost", "dollars", toggle=True)
    by_chip: dict[str, list[int]] = {}
    for number, offer in enumerate(offers):
        by_chip.setdefault(offer.plan.target.name, []).append(number)
    series = []
    for number, (chip, group) in enumerate(by_chip.items()):
        days = [offers[i].days for i in group]
        costs: list[Any] = [offers[i].dollars if priced else offers[i].chip_hours for i in group]
        group_rows = [rows[i] for i in group]
        marker = MARKERS[number % 4]
        series.append(_points(chip, group_rows, days, costs, series_colour(number), marker))
    return Chart(
        Axis("days of training", "days", toggle=True),
        cost,
        series,
        link="plans",
        title=f"Days and {cost.label} of each offer",
        height=640,
        note="Left is sooner, low is cheaper.",
    )


def _arithmetic(offer: Offer) -> str:
    """Returns how the days and dollars of an offer follow from its speed."""
    speed = offer.plan.estimate.tokens_per_second
    parts = [
        f"{offer.plan.target}: {format_count(offer.tokens)} tokens / {speed:,.0f} tokens/s = "
        f"{format_amount(offer.step_days)} days of steps",
        f"/ {offer.goodput.fraction:.4f} goodput = {format_amount(offer.days)} days",
        f"x 24 h x {offer.plan.target.chips:,} chips = {offer.chip_hours:,.0f} chip-hours",
    ]
    if offer.price is not None:
        dollars = format_cell(offer.dollars, "dollars")
        parts.append(f"x ${offer.price.dollars:g} = {dollars}")
    parts.append(_expected_days(offer))
    return "; ".join(parts)


def _expected_days(offer: Offer) -> str:
    """Returns the range of days in which 8 of 10 published runs of this kind would lie,
    or why there is none."""
    if offer.band is None:
        chip = offer.plan.target.chip.name
        return (
            f"no range of days: {chip} is announced, and no run on it tells how wrong these "
            "figures are"
        )
    low = format_amount(offer.days * offer.band.low)
    high = format_amount(offer.days * offer.band.high)
    return f"expect {low} to {high} days: {offer.band}"


def _assumptions(offers: Sequence[Offer]) -> list[str]:
    """Returns the reliability and the prices that offers were made with, and what is missing."""
    goodputs = []
    prices = []
    for offer in offers:
        goodput = offer.goodput
        goodputs.append(
            f"goodput of {offer.plan.target}: a failure every "
            f"{format_time(goodput.failure_seconds)}, a checkpoint every "
            f"{format_time(goodput.period)} of steps that stops "
            f"{format_step(goodput.save_seconds)} of them, {format_time(goodput.restart_seconds)} "
            f"of restart: {goodput.fraction:.2%}"
        )
        source = "none on these --terms; --prices FILE adds one"
        if offer.price:
            source = f"{offer.price}; {offer.price.source}, read {offer.price.read_on}"
        prices.append(f"price of {offer.plan.target.name}: {source}")
    return list(dict.fromkeys((*goodputs, *prices)))
