"""Offline HTML page of a plan: step time, memory, links, why other meshes lose, and the layout on the hardware."""

from collections.abc import Sequence
from html import escape

from meshwright.formatting import format_bytes, format_count
from meshwright.hardware.chips import Torus
from meshwright.hardware.interconnect import all_coordinates
from meshwright.hardware.targets import Target
from meshwright.planner.estimate import Estimate
from meshwright.planner.explain import STEP_PARTS, alternatives, differences
from meshwright.planner.search import Plan, SearchResult
from meshwright.sharding.params import named_leaves
from meshwright.views import show
from meshwright.views.draw.machine import MachineGrid
from meshwright.views.draw.page import bar, html_page, html_table
from meshwright.views.draw.tracks import Box, legend, tracks_svg

_SHOWN = 20
"""Plans in the ranked table."""
_DRAWN = ("embed", "blocks.query", "blocks.up", "blocks.down")
"""Parameters whose blocks are drawn; a page has no room for all of a thousand devices."""
_TRACK_KINDS = {
    "matmul": "matmul", "attention": "attention", "recomputation": "matmul", "elementwise": "memory",
    "optimizer": "memory", "exposed": "collective", "host": "host", "bubble": "loop",
}  # fmt: skip
"""Part of a step -> kind of a box, which gives its colour."""


def plan_page(plan: Plan, result: SearchResult, compiled: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the page of a plan and of the search that it comes from.

    compiled: headings and HTML of what the target's compiler proved.
    """
    e, target = plan.estimate, result.target
    memory = f"{format_bytes(e.bytes)} of {format_bytes(e.hbm_bytes)} per device"
    lead = (
        f"{plan.name} on {target}, predicted: {e.seconds:.3g} s per step, {e.mfu:.0%} MFU, "
        f"{format_count(e.tokens_per_second)} tokens/s, {memory}"
    )
    paths = named_leaves(plan.placed.params)
    sections = [
        *compiled,
        ("Predicted step time", seconds_section(e)),
        ("Memory of one device", memory_section(e)),
        ("Communication", links_section(e)),
        ("Best plans", _ranked(result)),
        ("Why not other mesh axes", _alternatives(result)),
        *show.layout_sections(plan.placed, machine_of_target(target), tuple(path for path in _DRAWN if path in paths)),
    ]
    return html_page(f"{plan.run.name} on {target}", lead, sections)


def compare_page(a: Plan, b: Plan, target: Target) -> str:
    """Returns the page of two plans side by side."""
    seconds = [("step", a.estimate.seconds, b.estimate.seconds), *differences(a.estimate, b.estimate)]
    rows = [[part, f"{mine:.3g} s", f"{other:.3g} s", f"{other - mine:+.3g} s"] for part, mine, other in seconds]
    sections = [("Predicted step time", html_table(("", a.name, b.name, "difference"), rows, (1, 2, 3)))]
    for plan in (a, b):
        body = seconds_section(plan.estimate) + memory_section(plan.estimate) + links_section(plan.estimate)
        sections.append((plan.name, body))
    return html_page(f"{a.mesh} and {b.mesh}", f"{a.run.name} on {target}", sections)


def seconds_section(e: Estimate) -> str:
    """Returns a step as one bar of its parts, and as a table."""
    start, boxes = 0.0, []
    for part, name in STEP_PARTS.items():
        seconds = e.parts[part]
        boxes.append(Box("one step", _TRACK_KINDS[part], start, seconds, name, f"{name}: {seconds:.3g} s"))
        start += seconds
    picture = tracks_svg(f"{e.seconds:.3g} s per step, by part", boxes, ["one step"], e.seconds)
    rows = [
        [name, f"{e.parts[part]:.3g} s", f"{e.parts[part] / e.seconds:.1%}", bar(e.parts[part] / e.seconds)]
        for part, name in STEP_PARTS.items()
        if e.parts[part] > 0
    ]
    table = html_table(("part", "seconds", "of the step", ""), rows, (1, 2))
    return f'<p>{legend()}</p><div class="scroll">{picture}</div>{table}'


def memory_section(e: Estimate) -> str:
    """Returns the memory of one device as bars, by category."""
    rows = [
        [name, format_bytes(n), f"{n / e.hbm_bytes:.1%}", bar(n / e.hbm_bytes)] for name, n in e.memory.items() if n
    ]
    fraction = e.bytes / e.hbm_bytes
    rows.append(["total", format_bytes(e.bytes), f"{fraction:.1%}", bar(fraction)])
    return html_table(("category", "bytes", "of the HBM", ""), rows, (1, 2))


def links_section(e: Estimate) -> str:
    """Returns the seconds that each set of mesh axes keeps its links busy, and how many of them are exposed."""
    if not e.busy:
        return "<p>No communication.</p>"
    rows = [
        [axes, e.routes[axes], f"{n:.3g} s", f"{e.exposed.get(axes, 0.0):.3g} s", bar(n / e.seconds)]
        for axes, n in e.busy.items()
    ]
    table = html_table(("mesh axes", "links", "busy", "exposed", ""), rows, (2, 3))
    return f"<p>Mesh axes on the hardware: {escape(str(e.axis_mapping))}.</p>{table}"


def _ranked(result: SearchResult) -> str:
    fastest, rows = result.plans[0].estimate.seconds, []
    for rank, plan in enumerate(result.plans[:_SHOWN], 1):
        e = plan.estimate
        figures = [f"{e.seconds:.3g} s", f"{e.mfu:.0%}", format_bytes(e.bytes), e.bound_by]
        rows.append([str(rank), plan.name, *figures, bar(fastest / e.seconds / 2)])
    return html_table(("", "plan", "step", "MFU", "memory", "bound by", ""), rows, (0, 2, 3, 4))


def _alternatives(result: SearchResult) -> str:
    rows = [[a.axes, a.best.name, f"{a.best.estimate.seconds:.3g} s", a.reason] for a in alternatives(result)]
    return html_table(("mesh axes", "best plan", "step", "reason"), rows, (2,))


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
