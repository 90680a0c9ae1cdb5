"""A census as HTML: memory bars, ledger, FLOPs, findings."""

from html import escape

from meshwright.census.take import Census, summarise
from meshwright.draw.page import bar, html_table
from meshwright.flops import SOURCES
from meshwright.report.console import spell_bytes, spell_count

_ROWS = 40
"""Rows of the ledger on a page."""


def census_sections(census: Census) -> list[tuple[str, str]]:
    """Heading and HTML of each part."""
    return [
        ("Memory of one device", _memory(census)),
        ("Ledger: what crosses the links", _ledger(census)),
        ("FLOPs", _flops(census)),
        ("Lint", _lint(census)),
    ]


def census_html(census: Census) -> str:
    """All parts below each other, for a notebook."""
    parts = "".join(f"<h4>{escape(heading)}</h4>{body}" for heading, body in census_sections(census))
    return f"<p>{escape(lead(census))}; every figure is of one device</p>{parts}"


def lead(census: Census) -> str:
    """One line on what was compiled."""
    mesh = ",".join(f"{axis}={n}" for axis, n in census.mesh.items() if n > 1) or "one device"
    return f"{census.name} on mesh {mesh}, compiled for {census.device} in {census.seconds:.1f} s ({census.versions})"


def _memory(census: Census) -> str:
    memory = census.memory
    peak = memory.compiled.peak or 1
    rows = [[name, spell_bytes(n), f"{n / peak:.1%}", bar(n / peak)] for name, n in memory.by_category().items()]
    rows.append(["peak", spell_bytes(peak), "", ""])
    modules = [[name or "(no module)", spell_bytes(n), bar(n / peak)] for name, n in memory.by_module().items()]
    largest = [[kind, part, array, spell_bytes(n)] for kind, part, array, n in memory.largest]
    return (
        html_table(("category", "bytes", "share", ""), rows, (1, 2))
        + "<p>By module:</p>" + html_table(("module", "bytes", ""), modules, (1,))
        + "<p>Largest temporaries at the peak:</p>"
        + html_table(("category", "module", "array", "bytes"), largest, (3,))
    )  # fmt: skip


def _ledger(census: Census) -> str:
    if not census.ledger:
        return "<p>The program sends nothing.</p>"
    traffic = sorted(summarise(census.ledger), key=lambda row: -row["sent"])
    total = sum(row["sent"] for row in traffic) or 1.0
    rows = [
        [r["kind"], r["over"], str(r["times"]), spell_bytes(r["total"]), spell_bytes(r["sent"]), bar(r["sent"] / total)]
        for r in traffic
    ]
    entries = sorted(census.ledger, key=lambda e: -e.sent)
    detail = [
        [
            e.tensor, e.kind, e.over, " ".join(e.arrays[:2]) + (" ..." if len(e.arrays) > 2 else ""), str(e.times),
            spell_bytes(e.sent), ("hidden behind " + str(len(e.hides)) if e.hides else "exposed")
            if e.asynchronous else "synchronous", e.line,
        ]
        for e in entries[:_ROWS]
    ]  # fmt: skip
    more = f"<p>and {len(entries) - _ROWS} more; --json has all.</p>" if len(entries) > _ROWS else ""
    return (
        html_table(("collective", "over", "times", "payload", "sent by a device", ""), rows, (2, 3, 4))
        + "<p>Largest first:</p>"
        + html_table(("tensor or scope", "collective", "over", "of", "times", "sent", "", "line"), detail, (4, 5))
        + more
    )


def _flops(census: Census) -> str:
    rows = [[item, spell_count(n), SOURCES.get(item, "")] for item, n in census.flops.formula.items()]
    compiled = [[p.step, p.module, spell_count(p.flops)] for p in census.flops.products]
    total = f"<p>{spell_count(census.flops.compiled)} in the compiled program's matrix products.</p>"
    model = html_table(("item", "model FLOPs", "formula"), rows, (1,)) if rows else ""
    return total + model + "<p>Compiled:</p>" + html_table(("pass", "module", "FLOPs"), compiled, (2,))


def _lint(census: Census) -> str:
    if not census.findings:
        return "<p>Nothing to report.</p>"
    return "".join(
        f'<div class="finding"><b>{escape(f.kind)}</b> {escape(f.subject)} '
        f"{escape('at ' + f.line if f.line else '')} ({spell_bytes(f.bytes)})<br>{escape(f.says)}<br>"
        f"<b>fix:</b> {escape(f.fix)}</div>"
        for f in census.findings
    )
