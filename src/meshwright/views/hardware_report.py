"""Report of `meshwright bench hardware`: an overview in the terminal, one HTML page, and the figures as JSON."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape as escape_markup

from meshwright.bench.hardware.section import DONE
from meshwright.formatting import format_bytes, format_step, format_time
from meshwright.views import pages
from meshwright.views.hardware_tables import GIGA, TABLES, TERA, Row
from meshwright.views.pages import Block, Code, Facts, Finding, Findings, Page, Section, Table, Text
from meshwright.views.plain_table import plain_table

Results = Mapping[str, Mapping[str, Any]]
"""Section -> contents of its file."""


_MACHINE = ("device_kind", "devices", "chip", "runtime", "driver", "host", "memory_limit", "peak_bfloat16")
_PREFORMATTED = ("links", "versions", "environment", "coordinates")


def headline(name: str, result: Mapping[str, Any]) -> str:
    """Returns the outcome of a section in one line: its best or most telling figures."""
    rows = [row for row in result["rows"] if "failed" not in row]
    if name == "machine":
        facts = result["facts"]
        return f"{facts.get('devices')} x {facts.get('device_kind')}, jax {facts.get('jax')}" if facts else ""
    tell = _HEADLINES.get(name)
    text = tell(rows) if tell and rows else "; ".join(result["notes"]) or f"{len(rows)} measurements"
    return text


def _kernels_headline(rows: Sequence[Row]) -> str:
    compared = [row for row in rows if "errors" in row]
    right = sum(not row["problems"] for row in compared)
    timed = max((r for r in rows if r.get("fraction")), key=lambda r: r["fraction"], default=None)
    best = f"; best {timed['kernel']}, {timed['case']}: {timed['fraction']:.0%} of the peak" if timed else ""
    return f"{right} of {len(compared)} comparisons with float64 agree{best}"


def _meshes_headline(rows: Sequence[Row]) -> str:
    compared = [row for row in rows if "gradient_difference" in row]
    worst = max((row["gradient_difference"] for row in compared), default=0.0)
    equal = sum(row["first_divergence"] is None for row in compared)
    return f"{equal} of {len(compared)} meshes agree with one device; gradients within {worst:.1e}"


def _matmuls_headline(rows: Sequence[Row]) -> str:
    best = max((r for r in rows if r.get("dtype") == "bfloat16"), key=lambda r: r["flops_per_second"], default=None)
    memory = next((r["bytes_per_second"] for r in rows if "bytes_per_second" in r), None)
    parts = []
    if best is not None:
        fraction = f" ({best['fraction']:.0%} of the peak)" if best.get("fraction") else ""
        parts.append(f"bfloat16 up to {best['flops_per_second'] / TERA:.3g} TFLOP/s{fraction}")
    return ", ".join([*parts, *([f"memory {memory / GIGA:.3g} GB/s"] if memory else [])])


def _collectives_headline(rows: Sequence[Row]) -> str:
    best: dict[str, float] = {}
    for row in rows:
        best[row["kind"]] = max(best.get(row["kind"], 0.0), row["bus_bandwidth"])
    kinds = ("all-gather", "reduce-scatter", "all-to-all")
    return "bus " + ", ".join(f"{kind} {best[kind] / GIGA:.3g} GB/s" for kind in kinds if kind in best)


def _steps_headline(rows: Sequence[Row]) -> str:
    def one(row: Row) -> str:
        utilisation = f", MFU {row['mfu']:.1%}" if row.get("mfu") else ""
        planned = row.get("predicted_seconds")
        ratio = f", planned / measured {planned / row['loop_seconds']:.2f}" if planned else ""
        return f"{row['item']} {format_step(row['loop_seconds'])}{utilisation}{ratio}"

    return "; ".join(one(row) for row in rows if "loop_seconds" in row)


def _overlap_headline(rows: Sequence[Row]) -> str:
    row = rows[0]
    if "measured_note" in row:
        return str(row["measured_note"])
    simulated = f", simulated {format_step(row['simulated_exposed'])}" if "simulated_exposed" in row else ""
    return f"exposed {format_step(row['measured_exposed'])} of {format_step(row['profiled_seconds'])}{simulated}"


def _checkpoint_headline(rows: Sequence[Row]) -> str:
    row = rows[0]
    return (
        f"{format_bytes(row['bytes'])}: save {row['save_bandwidth'] / GIGA:.3g} GB/s, "
        f"restore {row['restore_bandwidth'] / GIGA:.3g} GB/s"
    )


_HEADLINES: dict[str, Callable[[Sequence[Row]], str]] = {
    "kernels": _kernels_headline,
    "meshes": _meshes_headline,
    "matmuls": _matmuls_headline,
    "collectives": _collectives_headline,
    "steps": _steps_headline,
    "overlap": _overlap_headline,
    "checkpoint": _checkpoint_headline,
}


def problems_of(results: Results) -> list[str]:
    """Returns every result that is wrong."""
    return [f"{name}: {problem}" for name, result in results.items() for problem in result["problems"]]


def unfinished_of(results: Results) -> list[str]:
    """Returns every section that failed or ran out of time, with its message."""
    return [f"{name}: {r['state']}: {r['message']}" for name, r in results.items() if r["state"] != DONE]


def report_json(results: Results) -> dict[str, Any]:
    """Returns the whole report: wrong results, unfinished sections, a line about each section, all figures."""
    return {
        "problems": problems_of(results),
        "unfinished": unfinished_of(results),
        "headlines": {name: headline(name, result) for name, result in results.items()},
        "sections": dict(results),
    }


def print_section(console: Console, name: str, result: Mapping[str, Any]) -> None:
    """Prints a section when it has ended."""
    state = "" if result["state"] == DONE else f"[red]{result['state']}[/] "
    took = format_time(result["seconds_used"])
    console.print(f"[bold]{escape_markup(name)}[/] ({took}): {state}{escape_markup(headline(name, result))}")


def print_report(console: Console, results: Results) -> None:
    """Prints the overview, then what is wrong and what did not finish."""
    table = plain_table("section", "state", "time", "result", right=("time",))
    for name, result in results.items():
        cells = (name, result["state"], format_time(result["seconds_used"]), headline(name, result))
        table.add_row(*map(escape_markup, cells))
    console.print()
    console.print(table)
    found = {
        "[dim]notes": [f"{name}: {note}" for name, result in results.items() for note in result["notes"]],
        "[bold red]wrong results": problems_of(results),
        "[bold red]not finished": unfinished_of(results),
    }
    for title, lines in found.items():
        if lines:
            console.print(f"\n{title}[/]")
            for line in lines:
                console.print(f"  {line}", markup=False, soft_wrap=True)


def report_page(results: Results) -> Page:
    """Returns the report as one offline page."""
    facts = results["machine"]["facts"] if "machine" in results else {}
    title = f"Hardware: {facts.get('devices', '?')} x {facts.get('device_kind', 'unknown')}"
    wrong, unfinished = problems_of(results), unfinished_of(results)
    lead = f"{len(wrong)} wrong results, {len(unfinished)} sections not finished; jax {facts.get('jax', '?')}"
    found = [Finding("wrong", line, "", tone="bad") for line in wrong]
    found += [Finding("not finished", line, "") for line in unfinished]
    overview = [[name, r["state"], format_time(r["seconds_used"]), headline(name, r)] for name, r in results.items()]
    columns = [pages.Column("section"), pages.Column("state"), pages.Column("time"), pages.Column("result", wide=True)]
    first = [*([Findings(found)] if found else []), Table(columns, overview, title="Sections")]
    sections = [Section("Overview", first)]
    sections += [Section(name.capitalize(), _section_blocks(name, result)) for name, result in results.items()]
    footer = "Measured on this machine. This file loads nothing."
    return Page(title, sections, topic="hardware", lead=lead, footer=footer)


def _section_blocks(name: str, result: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = [Text(list(result["notes"]))] if result["notes"] else []
    if name == "machine":
        return [*blocks, *_machine_blocks(result["facts"])]
    for title, key, columns in TABLES.get(name, ()):
        rows = [row for row in result["rows"] if row.get(key) is not None]
        if rows:
            shown = [c for c in columns if any(c.cell(row) not in ("", None) for row in rows)]
            heads = [
                pages.Column(c.heading or ("item" if i == 0 else "outcome"), "fraction" if c.bar else "text", c.bar)
                for i, c in enumerate(shown)
            ]
            blocks.append(Table(heads, [[c.cell(row) for c in shown] for row in rows], title=title))
    not_run = [[row["item"], row.get("failed") or row.get("unsupported", "")] for row in result["rows"]]
    if any(reason for _, reason in not_run):
        heads = [pages.Column("item"), pages.Column("because", wide=True)]
        blocks.append(Table(heads, [pair for pair in not_run if pair[1]], title="Not run"))
    if name not in TABLES:  # a section from outside the package
        heads = [pages.Column("measurement"), pages.Column("figures", wide=True)]
        blocks.append(Table(heads, [[r["item"], _figures(r)] for r in result["rows"]], title=name))
    return blocks


def _figures(row: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("item", "problems"))


def _machine_blocks(facts: Mapping[str, Any]) -> list[Block]:
    rows = [(name.replace("_", " "), str(facts[name])) for name in _MACHINE if facts.get(name)]
    blocks: list[Block] = [Facts(rows)]
    for name in _PREFORMATTED:
        value = facts.get(name)
        if isinstance(value, Mapping):
            value = "\n".join(f"{key}={item}" for key, item in value.items())
        if value:
            blocks.append(Code(str(value), title=name))
    return blocks
