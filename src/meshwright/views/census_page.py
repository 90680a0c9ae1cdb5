"""Sections of an HTML page about a census: predicted schedule, memory bars, ledger, FLOPs, findings."""

import itertools
from collections.abc import Sequence
from html import escape

from meshwright.analysis.census import Census, summarise_traffic
from meshwright.analysis.compare import Change
from meshwright.analysis.simulate import SimulatedSchedule
from meshwright.analysis.timeline import Span
from meshwright.formatting import format_bytes, format_count
from meshwright.hlo.ledger import LedgerEntry
from meshwright.models.flops import FORMULAS
from meshwright.views.census_tables import census_title, operands_text, unpriced_text
from meshwright.views.draw.page import bar, html_table
from meshwright.views.draw.tracks import Box, legend, tracks_svg

_MAX_ENTRIES = 40
"""Rows of the ledger on a page."""
_MAX_LOOPS = 3
"""Loops of which one iteration is drawn."""


def census_sections(census: Census) -> list[tuple[str, str]]:
    """Returns heading and HTML of each part of a census."""
    predicted = [] if census.schedule is None else [("Predicted schedule", schedule_section(census.schedule))]
    return [
        *predicted,
        ("Compiled memory of one device", _memory(census)),
        ("Communication ledger", _ledger(census)),
        ("FLOPs", _flops(census)),
        ("Lint", _lint(census)),
    ]


def difference_section(changes: Sequence[Change], names: tuple[str, str]) -> tuple[str, str]:
    """Returns heading and HTML of two censuses side by side."""
    rows = [[change.part, change.quantity, *change.formatted] for change in changes]
    table = html_table(("", "", *names, "ratio"), rows, (2, 3, 4))
    return f"{names[0]} against {names[1]}", f"<p>Of one device; traffic is in bytes sent.</p>{table}"


def schedule_section(schedule: SimulatedSchedule) -> str:
    """Returns the step on a timeline, then one iteration of each of its longest loops, then seconds by part."""
    step = schedule.step_seconds
    links = sorted({span.axes for span in schedule.spans if span.kind == "collective"})
    host = ["host"] if any(span.kind == "host" for span in schedule.spans) else []
    rows = ["computation", *links, *host]
    drawn = [_tracks("the whole step", schedule.spans, 0, (0.0, step), rows)]
    loops = [(i, s) for i, s in enumerate(schedule.spans) if s.kind == "loop" and s.depth == 0]
    for index, loop in sorted(loops, key=lambda pair: -pair[1].seconds)[:_MAX_LOOPS]:
        body = list(itertools.takewhile(lambda s: s.depth > 0, schedule.spans[index + 1 :]))
        iteration = loop.seconds / loop.count
        title = f"one of {loop.count} iterations of {loop.name}: {iteration * 1e3:.3g} ms"
        drawn.append(_tracks(title, body, 1, (loop.start, iteration), rows))
    parts = [(kind, n) for kind, n in schedule.by_kind.items() if kind != "exposed" and n]
    parts += [(f"exposed, {axes} ({schedule.routes.get(axes, 'HBM')})", n) for axes, n in schedule.exposed.items() if n]
    parts += [("pipeline bubble", schedule.bubble)] if schedule.bubble else []
    table = html_table(
        ("part", "seconds", "of the step", ""),
        [[name, f"{n:.3g} s", f"{n / step:.1%}", bar(n / step)] for name, n in parts],
        (1, 2),
    )
    missing = f"<p><b>Not priced</b>: {escape(unpriced_text(schedule.unpriced))}.</p>" if schedule.unpriced else ""
    doubt = f"<p><b>Not to be trusted</b>: {escape(schedule.doubt)}.</p>" if schedule.doubt else ""
    pictures = "".join(f'<div class="scroll">{svg}</div>' for svg in drawn)
    return (
        f"{doubt}{missing}<p>{step:.3g} s per step on {escape(schedule.chip)}, simulated: the compiler fixes the "
        f"order of the instructions, every time is predicted. {legend()}</p>{pictures}{table}"
    )


def _tracks(title: str, spans: Sequence[Span], depth: int, window: tuple[float, float], rows: list[str]) -> str:
    """Draws the spans of one depth. window: start and seconds of the picture."""
    start, seconds = window

    def row(span: Span) -> str:
        return {"collective": span.axes, "host": "host"}.get(span.kind, "computation")

    def tip(span: Span) -> str:
        exposed = f", {span.exposed * 1e3:.3g} ms exposed" if span.exposed else ""
        return f"{span.name}: {span.seconds * 1e3:.3g} ms{exposed}"

    boxes = [
        Box(row(s), s.kind, s.start - start, s.seconds,
            s.name if s.count == 1 or depth else f"{s.name} x{s.count}", tip(s))
        for s in spans
        if s.depth == depth
    ]  # fmt: skip
    return tracks_svg(title, boxes, rows, seconds)


def census_html(census: Census) -> str:
    """Returns all parts below each other, for a notebook."""
    parts = "".join(f"<h4>{escape(heading)}</h4>{body}" for heading, body in census_sections(census))
    return f"<p>{escape(census_title(census))}; every figure is of one device</p>{parts}"


def _memory(census: Census) -> str:
    memory = census.memory
    peak = memory.compiled.peak or 1
    rows = [[name, format_bytes(n), f"{n / peak:.1%}", bar(n / peak)] for name, n in memory.by_category().items()]
    rows.append(["peak", format_bytes(peak), "", ""])
    modules = [[name or "(no module)", format_bytes(n), bar(n / peak)] for name, n in memory.by_module().items()]
    largest = [[category, module, array, format_bytes(n)] for category, module, array, n in memory.largest]
    return (
        html_table(("category", "bytes", "of the peak", ""), rows, (1, 2))
        + "<p>By module:</p>" + html_table(("module", "bytes", ""), modules, (1,))
        + "<p>Largest temporaries at the peak:</p>"
        + html_table(("category", "module", "array", "bytes"), largest, (3,))
    )  # fmt: skip


def _ledger(census: Census) -> str:
    unread = ""
    if census.unread:
        unread = (
            f"<p><b>Incomplete:</b> {len(census.unread)} instructions look like collectives and are not understood; "
            f"bytes and predicted time lack them: {escape(', '.join(census.unread[:4]))}.</p>"
        )
    if not census.ledger:
        return unread or "<p>No communication.</p>"
    traffic = sorted(summarise_traffic(census.ledger), key=lambda row: -row["sent"])
    total = sum(row["sent"] for row in traffic) or 1.0
    rows = [
        [row["kind"], row["axes"], str(row["count"]), format_bytes(row["total"]), format_bytes(row["sent"]),
         bar(row["sent"] / total)]
        for row in traffic
    ]  # fmt: skip
    entries = sorted(census.ledger, key=lambda entry: -entry.sent)
    details = [
        [e.tensor, e.kind, e.axes_label, operands_text(e), str(e.count), format_bytes(e.sent), _overlap(e), e.line]
        for e in entries[:_MAX_ENTRIES]
    ]
    more = f"<p>and {len(entries) - _MAX_ENTRIES} more; --json has all.</p>" if len(entries) > _MAX_ENTRIES else ""
    headings = ("tensor or scope", "collective", "axes", "operands", "count", "sent", "overlap", "line")
    return (
        unread
        + html_table(("collective", "axes", "count", "payload", "sent by a device", ""), rows, (2, 3, 4))
        + "<p>Largest first:</p>"
        + html_table(headings, details, (4, 5))
        + more
    )


def _overlap(entry: LedgerEntry) -> str:
    if not entry.asynchronous:
        return "synchronous"
    return f"overlaps {len(entry.overlapped)} instructions" if entry.overlapped else "exposed"


def _flops(census: Census) -> str:
    flops = census.flops
    rows = [[item, format_count(n), FORMULAS.get(item, "")] for item, n in flops.model.items()]
    model = html_table(("item", "model FLOPs", "formula"), rows, (1,)) if rows else ""
    compiled = [[matmul.phase, matmul.module, format_count(matmul.flops)] for matmul in flops.matmuls]
    table = html_table(("phase", "module", "FLOPs"), compiled, (2,))
    missing = f" <b>Not in it</b>, FLOPs unknown: {escape(unpriced_text(flops.unpriced))}." if flops.unpriced else ""
    doubts = "".join(f"<p><b>This census does not trust itself:</b> {escape(doubt)}.</p>" for doubt in census.doubts)
    total = f"<p>{format_count(flops.compiled)} in the compiled matmuls.{missing}</p>"
    return f"{doubts}{total}{model}<p>Compiled:</p>{table}"


def _lint(census: Census) -> str:
    if not census.findings:
        return "<p>No findings.</p>"
    return "".join(
        f'<div class="finding"><b>{escape(f.kind)}</b> {escape(f.subject)} '
        f"{escape('at ' + f.line if f.line else '')} ({format_bytes(f.bytes)})<br>{escape(f.reason)}<br>"
        f"<b>fix:</b> {escape(f.fix)}</div>"
        for f in census.findings
    )
