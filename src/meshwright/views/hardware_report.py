"""Report of `meshwright bench hardware`: an overview of its sections, and the figures of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from meshwright.bench.hardware.section import DONE
from meshwright.formatting import format_time
from meshwright.views.blocks import Block, Code, Column, Facts, Finding, Findings, Table, Text
from meshwright.views.report import Report, Section

Row = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]
"""Section -> contents of its file."""

_MACHINE = (
    "device_kind",
    "devices",
    "chip",
    "runtime",
    "driver",
    "host",
    "memory_limit",
    "peak_bfloat16",
)
_PREFORMATTED = ("links", "versions", "environment", "coordinates")


def _rate(heading: str, key: str, unit: str, scale: float) -> Column:
    """Returns a column of rates in `unit`, which is `scale` FLOP/s or bytes/s."""
    return Column(
        heading, cell=lambda row: f"{row[key] / scale:.3g} {unit}" if row.get(key) else ""
    )


def _bandwidth(heading: str, key: str) -> Column:
    return _rate(heading, key, "GB/s", 1e9)


def _text(heading: str, key: str = "") -> Column:
    """Returns a column of text; without a key the heading is the key."""
    return Column(heading, cell=lambda row: row.get(key or heading))


_KERNEL_TIMES = [
    _text("kernel"),
    _text("shape", "case"),
    _text("type", "dtype"),
    Column("forward", "seconds", "forward_seconds"),
    Column("forward and backward", "seconds", "seconds"),
    _rate("rate", "flops_per_second", "TFLOP/s", 1e12),
    Column("of the peak", "fraction", "fraction", bar=True),
    Column("of a dense matmul", "fraction", "of_dense", bar=True),
]
_MATMULS = [
    _text("type", "dtype"),
    _text("m x k x n"),
    Column("median", "seconds", "seconds"),
    _rate("rate", "flops_per_second", "TFLOP/s", 1e12),
    Column("of the peak", "fraction", "fraction", bar=True),
]
_COLLECTIVES = [
    _text("collective", "kind"),
    _text("axis"),
    Column("devices", "integer", "devices"),
    Column("size", "bytes", "bytes"),
    Column("median", "seconds", "seconds"),
    _bandwidth("algorithm", "algorithm_bandwidth"),
    _bandwidth("bus", "bus_bandwidth"),
    _text("outcome"),
]
TABLES: dict[str, dict[str, tuple[str, list[Column]]]] = {
    "kernels": {"Time": ("seconds", _KERNEL_TIMES)},
    "matmuls": {
        "One device": ("m", _MATMULS),
        "Memory": (
            "bytes_per_second",
            [_text("item"), _bandwidth("read and written", "bytes_per_second")],
        ),
    },
    "collectives": {"Bandwidth": ("kind", _COLLECTIVES)},
}
"""Section -> title of a table -> the figure that each of its rows has, and its columns."""


def _derived(row: Row) -> dict[str, Any]:
    """Returns the figures of a measurement with those that follow from them, as text."""
    found = dict(row)
    problems = "; ".join(row.get("problems", ()))
    found["outcome"] = row.get("failed") or row.get("unsupported") or problems
    found["m x k x n"] = " x ".join(str(row.get(name)) for name in "mkn")
    return found


def _headline(name: str, result: Mapping[str, Any]) -> str:
    if name == "machine":
        facts = result["facts"]
        if not facts:
            return ""
        return f"{facts.get('devices')} x {facts.get('device_kind')}, jax {facts.get('jax')}"
    rows = [row for row in result["rows"] if "failed" not in row]
    if name in _HEADLINES and rows:
        return _HEADLINES[name](rows)
    return "; ".join(result["notes"]) or f"{len(rows)} measurements"


def _kernels(rows: Sequence[Row]) -> str:
    timed = [row for row in rows if row.get("fraction")]
    if not timed:
        return f"{len(rows)} measurements"
    best = max(timed, key=lambda row: row["fraction"])
    return f"best {best['kernel']}, {best['case']}: {best['fraction']:.0%} of the peak"


def _matmuls(rows: Sequence[Row]) -> str:
    parts = []
    products = [row for row in rows if row.get("dtype") == "bfloat16"]
    if products:
        best = max(products, key=lambda row: row["flops_per_second"])
        rate = f"bfloat16 up to {best['flops_per_second'] / 1e12:.3g} TFLOP/s"
        if best.get("fraction"):
            rate += f" ({best['fraction']:.0%} of the peak)"
        parts.append(rate)
    memory = [row["bytes_per_second"] for row in rows if "bytes_per_second" in row]
    if memory:
        parts.append(f"memory {memory[0] / 1e9:.3g} GB/s")
    return ", ".join(parts)


def _collectives(rows: Sequence[Row]) -> str:
    best: dict[str, float] = {}
    for row in rows:
        best[row["kind"]] = max(best.get(row["kind"], 0.0), row["bus_bandwidth"])
    texts = []
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        if kind in best:
            texts.append(f"{kind} {best[kind] / 1e9:.3g} GB/s")
    return "bus " + ", ".join(texts)


_HEADLINES: dict[str, Callable[[Sequence[Row]], str]] = {
    "kernels": _kernels,
    "matmuls": _matmuls,
    "collectives": _collectives,
}


def problems_of(results: Results) -> list[str]:
    """Returns every result that is wrong."""
    problems = []
    for name, result in results.items():
        problems += [f"{name}: {problem}" for problem in result["problems"]]
    return problems


def unfinished_of(results: Results) -> list[str]:
    """Returns every section that failed or ran out of time, with its message."""
    unfinished = []
    for name, result in results.items():
        if result["state"] != DONE:
            unfinished.append(f"{name}: {result['state']}: {result['message']}")
    return unfinished


def report_json(results: Results) -> dict[str, Any]:
    """Returns the report as JSON: wrong results, unfinished sections, a line about each
    section, all figures."""
    return {
        "problems": problems_of(results),
        "unfinished": unfinished_of(results),
        "headlines": {name: _headline(name, result) for name, result in results.items()},
        "sections": dict(results),
    }


def print_section(console: Console, name: str, result: Mapping[str, Any]) -> None:
    """Prints a section when it has ended."""
    state = "" if result["state"] == DONE else f"[red]{result['state']}[/] "
    took = format_time(result["seconds_used"])
    console.print(f"[bold]{escape(name)}[/] ({took}): {state}{escape(_headline(name, result))}")


def report_page(results: Results) -> Report:
    """Returns the report; a terminal shows the overview."""
    facts = results["machine"]["facts"] if "machine" in results else {}
    wrong = problems_of(results)
    unfinished = unfinished_of(results)
    sections = [Section("Overview", _overview(results, wrong, unfinished))]
    for name, result in results.items():
        sections.append(Section(name.capitalize(), _blocks(name, result), where="page"))
    return Report(
        f"Hardware: {facts.get('devices', '?')} x {facts.get('device_kind', 'unknown')}",
        sections,
        topic="hardware",
        lead=(
            f"{len(wrong)} wrong results, {len(unfinished)} sections not finished; "
            f"jax {facts.get('jax', '?')}"
        ),
        footer="Measured on this machine. This file loads nothing.",
    )


def _overview(results: Results, wrong: Sequence[str], unfinished: Sequence[str]) -> list[Block]:
    blocks: list[Block] = []
    findings = [Finding("wrong", line, "", tone="bad") for line in wrong]
    findings += [Finding("not finished", line, "") for line in unfinished]
    if findings:
        blocks.append(Findings(findings, printed=len(findings)))
    columns = [
        Column("section", cell=lambda item: item[0]),
        Column("state", cell=lambda item: item[1]["state"]),
        Column("time", cell=lambda item: format_time(item[1]["seconds_used"])),
        Column("result", cell=lambda item: _headline(*item), wide=True),
    ]
    blocks.append(Table.of(results.items(), columns, title="Sections", printed=None))
    notes = []
    for name, result in results.items():
        notes += [f"{name}: {note}" for note in result["notes"]]
    if notes:
        blocks.append(Text(notes, where="terminal"))
    return blocks


def _blocks(name: str, result: Mapping[str, Any]) -> list[Block]:
    """Returns the notes of a section, its tables, and what was not run."""
    blocks: list[Block] = [Text(list(result["notes"]))] if result["notes"] else []
    if name == "machine":
        return blocks + _machine_blocks(result["facts"])
    for title, (key, columns) in TABLES.get(name, {}).items():
        rows = [_derived(row) for row in result["rows"] if row.get(key) is not None]
        if rows:
            blocks.append(Table.of(rows, columns, title=title))
    blocks += _not_run(result["rows"])
    if name not in TABLES:  # a section from outside the package
        blocks.append(_plain_table(name, result["rows"]))
    return blocks


def _machine_blocks(facts: Mapping[str, Any]) -> list[Block]:
    known = []
    for field in _MACHINE:
        if facts.get(field):
            known.append((field.replace("_", " "), str(facts[field])))
    blocks: list[Block] = [Facts(known)]
    for field in _PREFORMATTED:
        value = facts.get(field)
        if isinstance(value, Mapping):
            value = "\n".join(f"{name}={setting}" for name, setting in value.items())
        if value:
            blocks.append(Code(str(value), title=field))
    return blocks


def _not_run(rows: Sequence[Row]) -> list[Block]:
    """Returns the measurements that failed, and those that this machine does not support."""
    reasons = []
    for row in rows:
        reason = row.get("failed") or row.get("unsupported", "")
        if reason:
            reasons.append((row["item"], reason))
    columns = [Column("item"), Column("because", wide=True)]
    return [Table(columns, reasons, title="Not run")] if reasons else []


def _plain_table(name: str, rows: Sequence[Row]) -> Table:
    figures = []
    for row in rows:
        texts = [f"{key} {value}" for key, value in row.items() if key not in _NOT_FIGURES]
        figures.append((row["item"], ", ".join(texts)))
    columns = [Column("measurement"), Column("figures", wide=True)]
    return Table(columns, figures, title=name)


_NOT_FIGURES = ("item", "problems")
"""Keys of a measurement besides its figures."""
