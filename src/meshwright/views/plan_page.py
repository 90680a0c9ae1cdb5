"""Page of a search: every plan by step time and memory, why each loses, and the chosen one on the hardware."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.hardware.chips import Torus
from meshwright.hardware.interconnect import all_coordinates
from meshwright.hardware.targets import Target
from meshwright.planner.estimate import Estimate
from meshwright.planner.explain import STEP_PARTS, alternatives, memory_shortfall, slowdown_reason
from meshwright.planner.search import Plan, SearchResult
from meshwright.views.draw.colours import series_colour
from meshwright.views.draw.machine import MachineGrid
from meshwright.views.layout_page import layout_sections, machine_block, mesh_axes_on
from meshwright.views.pages import (
    Axis,
    BarScale,
    Block,
    Cell,
    Chart,
    Column,
    Figure,
    Figures,
    Grid,
    Inspector,
    Item,
    Mark,
    Page,
    Section,
    Series,
    Table,
    Tone,
    Unit,
)

_PLANS = 500
"""Plans that fit, and as many that do not, on a page; the best are kept."""
_MESHES = 80
"""Plans whose mesh can be drawn over the machine."""
_FAMILIES = 6
"""Kinds of meshes with a colour of their own."""
_CHARTED = 2.5
"""Memory over that of the device above which a plan that does not fit is in the table alone."""
_SLOWER = 1.2
"""Step time over that of the slowest plan that fits above which one that does not is in the table alone."""
PART_COLOURS = {
    "matmul": "matmul", "attention": "attention", "recomputation": "c7", "elementwise": "memory", "optimizer": "c2",
    "exposed": "exposed", "host": "host", "bubble": "bubble",
}  # fmt: skip
"""Part of a step -> its colour."""
MEMORY_COLOURS = {
    "parameters": "c1", "optimizer state": "c6", "gradients": "c4", "activations": "c3", "gathered weights": "c5",
    "one layer": "c8", "loss and its table": "c7", "optimizer update": "c2",
}  # fmt: skip
"""Category of memory -> its colour."""
_FACTS: tuple[tuple[str, Unit], ...] = (
    ("step", "seconds"), ("MFU", "fraction"), ("tokens per second", "count"), ("memory of a device", "bytes"),
    ("part of the device's memory", "fraction"), ("bound by", "text"), ("rank", "integer"), ("remat", "text"),
    ("microbatches", "integer"), ("pipeline", "text"), ("layout", "text"), ("mesh axes on the hardware", "text"),
    ("links", "text"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ShownPlans:
    """Plans of a search that a page shows: by the keys of their points and rows, with the reason of each."""

    plans: dict[str, Plan]
    reasons: dict[str, str]
    first: str
    """Keys that are selected when the page opens."""
    ranked: int
    """How many of the first are ranked: those after them were not found by the search, or do not fit."""


def shown_plans(
    result: SearchResult, opened: Sequence[Plan], also: Sequence[Plan] = (), most: int = _PLANS
) -> ShownPlans:
    """Returns the best plans of a search, and others that a page is about.

    opened: one plan, or two that are side by side, selected when the page opens. also: plans that the page has in any
    case. most: plans that fit, and as many that do not, which are shown.
    """
    fits, too_large = list(result.plans[:most]), list(result.too_large[:most])
    ranked = len(fits)
    names = {plan.name for plan in (*fits, *too_large)}
    others = {plan.name: plan for plan in (*opened, *also) if plan.name not in names}
    fits += [plan for plan in others.values() if plan.estimate.fits]
    too_large += [plan for plan in others.values() if not plan.estimate.fits]
    keyed = {f"p{i}": plan for i, plan in enumerate([*fits, *too_large])}
    winner = result.plans[0] if result.plans else None
    reasons = {
        key: "the fastest plan that fits" if plan is winner else slowdown_reason(plan, winner) if plan.estimate.fits
        else memory_shortfall(plan)
        for key, plan in keyed.items()
    }  # fmt: skip
    chosen = {plan.name for plan in opened}
    return ShownPlans(keyed, reasons, "~".join(key for key, plan in keyed.items() if plan.name in chosen), ranked)


def plans_section(shown: ShownPlans, result: SearchResult, title: str = "All plans", note: str = "") -> Section:
    """Returns the chart, the inspector and the table of a search's plans, and every refused mesh.

    note: what comes before the sentence about clicking.
    """
    table = _table(shown, result)
    if not shown.plans:
        return Section(title, [table], note)
    inspector = plan_inspector(shown.plans, shown.reasons, shown.first, shown.ranked)
    return Section(
        title,
        [Grid([_scatter(shown.plans, shown.reasons, result.target), inspector], wide=True), table],
        f"{note} Click a point or a row to see its parts; click a second one to compare the two.".strip(),
    )


def plan_page(
    plan: Plan,
    result: SearchResult,
    compiled: Sequence[Section] = (),
    compared: Sequence[Plan] = (),
    most: int = _PLANS,
) -> Page:
    """Returns the page of a plan and of the search that it comes from.

    compiled: sections of what the target's compiler proved.  compared: two plans that are side by side when it opens.
    most: plans that fit, and as many that do not, which are shown.
    """
    e, target = plan.estimate, result.target
    shown = shown_plans(result, compared or (plan,), (plan,), most)
    machine = machine_of_target(target)
    sections = [
        Section("At a glance", [_figures(e, result)]),
        *compiled,
        plans_section(shown, result),
        Section("Mesh of the chosen plan", [_machine(plan, shown.plans, machine)]),
        Section("Why not other mesh axes", [_alternatives(result)]),
        *(s for s in layout_sections(plan.placed, machine) if s.title != "Mesh over the machine"),
    ]
    lead = (
        f"{plan.name} on {target}, predicted: {e.seconds:.3g} s per step, {e.mfu:.0%} MFU, "
        f"{format_count(e.tokens_per_second)} tokens/s, {format_bytes(e.bytes)} of "
        f"{format_bytes(e.hbm_bytes)} per device"
    )
    footer = "Every figure is predicted by arithmetic; meshwright prove compiles a plan. This file loads nothing."
    return Page(f"{plan.run.name} on {target}", sections, topic="plan", lead=lead, footer=footer)


def _figures(e: Estimate, result: SearchResult) -> Figures:
    part = e.bytes / e.hbm_bytes
    refused = f"; {len(result.refused)} meshes refused" if result.refused else ""
    return Figures(
        [
            Figure("step", format_step(e.seconds), f"{e.tokens / 1e6:.3g} M tokens"),
            Figure("MFU", f"{e.mfu:.1%}", f"bound by {e.bound_by}"),
            Figure("tokens per second", format_count(e.tokens_per_second), f"on {e.devices:,} devices"),
            Figure("memory of a device", format_bytes(e.bytes), f"{part:.0%} of {format_bytes(e.hbm_bytes)}",
                   "bad" if not e.fits else ""),
            Figure("plans priced", f"{result.priced:,}", f"best of each mesh and schedule: {len(result.plans)} fit, "
                   f"{len(result.too_large)} do not{refused}"),
        ]
    )  # fmt: skip


def family(plan: Plan) -> str:
    """Names how a plan splits the model, besides over data: `pipeline + tensor`, `data and FSDP alone`."""
    words = {"stage": "pipeline", "expert": "experts", "context": "context", "tensor": "tensor"}
    degrees = plan.mesh.degrees()
    return " + ".join(word for axis, word in words.items() if degrees[axis] > 1) or "data and FSDP alone"


def _scatter(keyed: dict[str, Plan], reasons: dict[str, str], target: Target) -> Chart:
    """Step time against memory: plans that fit by family, those that do not, the Pareto front, and the limit."""
    counts = Counter(family(p) for p in keyed.values() if p.estimate.fits)
    best = next((family(p) for p in keyed.values()), "")
    names = sorted(counts, key=lambda name: (name != best, -counts[name]))[:_FAMILIES]
    markers = ("circle", "square", "diamond", "triangle")
    groups: dict[str, list[str]] = {name: [] for name in (*names, "others", "does not fit")}
    slowest = max((p.estimate.seconds for p in keyed.values() if p.estimate.fits), default=float("inf"))
    for key, p in keyed.items():
        if p.estimate.fits:
            groups[family(p) if family(p) in names else "others"].append(key)
        elif p.estimate.bytes <= _CHARTED * p.estimate.hbm_bytes and p.estimate.seconds <= _SLOWER * slowest:
            groups["does not fit"].append(key)

    def points(name: str, keys: list[str], number: int) -> Series:
        plans = [keyed[key] for key in keys]
        bad = name == "does not fit"
        return Series(
            name, [p.estimate.seconds for p in plans], [p.estimate.bytes for p in plans],
            "muted" if bad else series_colour(number), "points",
            "cross" if bad else markers[number % len(markers)],  # type: ignore[arg-type]
            keys=keys, tips=[f"{p.name}\n{reasons[key]}" for key, p in zip(keys, plans, strict=True)],
        )  # fmt: skip

    series = [points(name, keys, i) for i, (name, keys) in enumerate(groups.items()) if keys]
    front: list[Plan] = []
    for p in sorted(
        (p for p in keyed.values() if p.estimate.fits), key=lambda p: (p.estimate.seconds, p.estimate.bytes)
    ):
        if not front or p.estimate.bytes < front[-1].estimate.bytes:
            front.append(p)
    if len(front) > 1:
        seconds, memory = [p.estimate.seconds for p in front], [p.estimate.bytes for p in front]
        series.append(Series("Pareto front", seconds, memory, "ink", "step", dashed=True))
    hbm, kept = target.chip.hbm_bytes, target.chip.fragmentation
    marks = [Mark("y", hbm / kept, f"fits below {format_bytes(hbm / kept)}", fit=True)]
    if kept > 1:
        marks.append(Mark("y", hbm, f"memory of {target.name}: {format_bytes(hbm)}", "muted", fit=True))
    times = [p.estimate.seconds for p in keyed.values() if p.estimate.seconds <= _SLOWER * slowest]
    log = max(times) > 12 * min(times)
    return Chart(
        Axis("predicted step", "seconds", log=log, toggle=True),
        Axis("memory of a device", "bytes", toggle=True),
        series, marks, "plans", title="Step time and memory of every plan", height=560,
        note=f"Left is faster, low is smaller. Plans that do not fit are in the table alone where they take over "
        f"{_CHARTED:g} times the memory, or {_SLOWER:g} times as long as all that fit.",
    )  # fmt: skip


def plan_inspector(keyed: dict[str, Plan], reasons: dict[str, str], first: str, ranked: int) -> Inspector:
    """Returns what is known of each plan: facts, and bars of its seconds and bytes. ranked: how many have a rank."""
    categories = list(dict.fromkeys(name for p in keyed.values() for name, n in p.estimate.memory.items() if n))
    limits = {p.estimate.hbm_bytes for p in keyed.values()}
    items = {}
    for rank, (key, p) in enumerate(keyed.items(), 1):
        e, training = p.estimate, p.run.training
        links = "\n".join(
            f"{axes} over {e.routes[axes]}: {format_step(n)} busy, {format_step(e.exposed.get(axes, 0.0))} exposed"
            for axes, n in e.busy.items()
        )
        facts: list[Cell] = [
            e.seconds, e.mfu, e.tokens_per_second, e.bytes, e.bytes / e.hbm_bytes, e.bound_by,
            rank if rank <= ranked else None, training.remat, training.microbatches,
            training.pipeline_schedule if p.mesh.stage > 1 else "", p.run.layout, str(e.axis_mapping), links,
        ]  # fmt: skip
        values = [[e.parts[part] for part in STEP_PARTS], [e.memory.get(name, 0.0) for name in categories]]
        items[key] = Item(p.name, reasons[key], facts, values)
    scales = [
        BarScale("Where the seconds go", "seconds", list(STEP_PARTS.values()), [PART_COLOURS[p] for p in STEP_PARTS]),
        BarScale("Where the bytes go", "bytes", categories, [MEMORY_COLOURS.get(name, "c7") for name in categories],
                 limits.pop() if len(limits) == 1 else None),
    ]  # fmt: skip
    names, units = zip(*_FACTS, strict=True)
    return Inspector("plans", names, units, items, scales, at_most=2, first=first, title="Chosen",
                     empty="Click a point or a row.")  # fmt: skip


def _table(shown: ShownPlans, result: SearchResult) -> Table:
    keyed, reasons = shown.plans, shown.reasons
    columns = [
        Column("mesh"), Column("remat", choices=True), Column("microbatches", "integer", choices=True),
        Column("pipeline", choices=True), Column("step", "seconds", bar=True), Column("MFU", "fraction"),
        Column("memory", "bytes", bar=True), Column("state", choices=True), Column("bound by", choices=True),
        Column("reason", wide=True),
    ]  # fmt: skip
    rows: list[list[Cell]] = []
    for key, p in keyed.items():
        e, training = p.estimate, p.run.training
        pipeline = training.pipeline_schedule if p.mesh.stage > 1 else "none"
        rows.append(
            [str(p.mesh), training.remat, training.microbatches, pipeline, e.seconds, e.mfu, e.bytes,
             "fits" if e.fits else "does not fit", e.bound_by, reasons[key]]
        )  # fmt: skip
    tones = ["" if p.estimate.fits else "faded" for p in keyed.values()]
    for mesh, error in result.refused.items():
        because = next((line.split(":", 1)[1] for line in error.splitlines() if "because:" in line), error)
        rows.append([mesh, "", None, "", None, None, None, "refused", "", " ".join(because.split())])
        tones.append("faded")
    return Table(
        columns, rows, list(keyed), tones, "plans", searchable=True, shown=15, title="Every plan and its reason",  # type: ignore[arg-type]
        note=f"{result.priced:,} were priced; of each mesh and schedule the best is here, and every mesh that the "
        "trainer refuses.",
    )  # fmt: skip


def _machine(plan: Plan, keyed: dict[str, Plan], machine: MachineGrid) -> Block:
    block = machine_block(plan.placed, machine)
    meshes = {key: mesh_axes_on(p.placed, machine) for key, p in list(keyed.items())[:_MESHES]}
    return type(block)(
        block.mesh, block.panels, "plans", meshes, title=f"{plan.target}: {plan.target.devices:,} devices",
        note=f"Mesh axes on the hardware: {plan.estimate.axis_mapping}. Point at an axis to see who communicates along "
        "it; the drawing follows the plan that is chosen above.",
    )  # fmt: skip


def _alternatives(result: SearchResult) -> Table:
    columns = [Column("mesh axes"), Column("best plan"), Column("step", "seconds", bar=True),
               Column("memory", "bytes"), Column("reason", wide=True)]  # fmt: skip
    found = alternatives(result)
    rows: list[list[Cell]] = [
        [a.axes, a.best.name, a.best.estimate.seconds, a.best.estimate.bytes, a.reason] for a in found
    ]
    tones: list[Tone] = ["" if a.fits else "faded" for a in found]
    return Table(columns, rows, tones=tones, title="Best plan of other axes", shown=12)


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
