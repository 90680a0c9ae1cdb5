"""Report of `meshwright bench hardware`: an overview of its sections, and the figures of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from meshwright.bench.hardware.section import DONE
from meshwright.formatting import format_bytes, format_step, format_time
from meshwright.views.blocks import Block, Code, Column, Facts, Finding, Findings, Table, Text, Unit
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
_UNITS: dict[str, Unit] = {
    "s": "seconds",
    "B": "bytes",
    "n": "count",
    "i": "integer",
    "%": "fraction",
}
_RATES = {"TFLOP/s": 1e12, "GB/s": 1e9}
"""Units of a column in `TABLES`."""
_RUN = "item | model = run | mesh"
TABLES: dict[str, dict[str, tuple[str, str]]] = {
    "kernels": {
        "Error of values and gradients, root mean square against float64": (
            "errors",
            "kernel | shape = case | type = dtype | out | dq | dk | dv | dx | dw | outcome",
        ),
        "Time": (
            "seconds",
            "kernel | shape = case | type = dtype | forward = forward_seconds s | forward and backward = seconds s"
            " | rate = flops_per_second TFLOP/s | of the peak = fraction % | of a dense matmul = of_dense %",
        ),
    },
    "meshes": {
        "Against one device, in float32": (
            "item",
            "model | mesh | bits | initial values | gradients differ by | most in = worst_tensor | losses"
            " | on one device | outcome",
        )
    },
    "matmuls": {
        "One device": (
            "m",
            "type = dtype | m x k x n | median = seconds s | rate = flops_per_second TFLOP/s"
            " | of the peak = fraction %",
        ),
        "Memory": ("bytes_per_second", "item | read and written = bytes_per_second GB/s"),
    },
    "collectives": {
        "Bandwidth": (
            "kind",
            "collective = kind | axis | devices i | size = bytes B | median = seconds s"
            " | algorithm = algorithm_bandwidth GB/s | bus = bus_bandwidth GB/s | outcome",
        )
    },
    "experts": {
        "Exchange of rows": (
            "updates",
            "item | updates i | measured = seconds s | expected = expected_seconds s | rate = bytes_per_second GB/s"
            " | outcome",
        )
    },
    "steps": {
        "Measured": (
            "loop_seconds",
            f"{_RUN} | step = loop_seconds s | tokens/s = tokens_per_second n | MFU = mfu % | memory = peak_bytes B",
        ),
        "Predicted over measured": (
            "loop_seconds",
            f"{_RUN} | measured = loop_seconds s | planned = predicted_seconds s | planned / measured"
            " | simulated = simulated_seconds s | simulated / measured | memory, planned = predicted_bytes B"
            " | compiled = compiled_bytes B | note = simulated_note",
        ),
        "Host, per step": (
            "loop_seconds",
            f"{_RUN} | only steps = bare_seconds s | in the loop = loop_seconds s | the loop adds = overhead_seconds s"
            " | each awaited = blocked_seconds s | dispatch = dispatch_seconds s | processor time = host_seconds s"
            " | waiting for data = data_wait_seconds s",
        ),
        "Start": (
            "loop_seconds",
            f"{_RUN} | placing = place_seconds s | compiling = compile_seconds s | initial values = init_seconds s"
            " | first step = first_step_seconds s",
        ),
        "Settings": (
            "loop_seconds",
            f"{_RUN} | parameters n | batch i | sequence = seq i | microbatches i | remat"
            " | attention = attention_kernel | cut = note | compiler options",
        ),
    },
    "checkpoint": {
        "Save and restore": (
            "bytes",
            "model = run | mesh | state = bytes B | save = save_seconds s | of which training waits = blocked_seconds s"
            " | written = save_bandwidth GB/s | restore and verify = restore_seconds s"
            " | read = restore_bandwidth GB/s",
        )
    },
}
"""Section -> title of a table -> the figure that each of its rows has, and its columns: `heading = key unit`."""


def _column(text: str) -> Column:
    """Parses `heading = key unit`; without a key it is the heading, without a unit the cells are text."""
    heading, _, rest = text.strip().rpartition(" = ")
    key, _, unit = rest.rpartition(" ")
    if unit in _RATES:
        scale = _RATES[unit]
        return Column(
            heading or key,
            cell=lambda row: f"{row[key] / scale:.3g} {unit}" if row.get(key) else "",
        )
    if unit in _UNITS:
        return Column(heading or key, _UNITS[unit], key, bar=unit == "%")
    return Column(heading or rest, cell=lambda row: row.get(rest))


def _derived(row: Row) -> dict[str, Any]:
    """Returns the figures of a measurement with those that follow from them, as text."""
    found = dict(row) | {label: f"{error[0]:.1e}" for label, error in row.get("errors", {}).items()}
    found["outcome"] = (
        row.get("failed") or row.get("unsupported") or "; ".join(row.get("problems", ()))
    )
    found["m x k x n"] = " x ".join(str(row.get(name)) for name in "mkn")
    found["compiler options"] = ", ".join(
        f"{k}={v}" for k, v in row.get("compiler_options", {}).items()
    )
    for over, key in (("planned", "predicted_seconds"), ("simulated", "simulated_seconds")):
        if row.get(key) and row.get("loop_seconds"):
            found[f"{over} / measured"] = f"{row[key] / row['loop_seconds']:.2f}"
    if "gradient_difference" in row:
        found["gradients differ by"] = f"{row['gradient_difference']:.1e}"
        found["initial values"] = "bitwise equal" if row["initial_values_equal"] else "differ"
        for name, losses in zip(
            ("losses", "on one device"), zip(*row["losses"], strict=True), strict=True
        ):
            found[name] = ", ".join(f"{loss:.6f}" for loss in losses)
    return found


def _headline(name: str, result: Mapping[str, Any]) -> str:
    rows = [row for row in result["rows"] if "failed" not in row]
    if name == "machine":
        facts = result["facts"]
        return (
            f"{facts.get('devices')} x {facts.get('device_kind')}, jax {facts.get('jax')}"
            if facts
            else ""
        )
    if name in _HEADLINES and rows:
        return _HEADLINES[name](rows)
    return "; ".join(result["notes"]) or f"{len(rows)} measurements"


def _kernels(rows: Sequence[Row]) -> str:
    compared = [row for row in rows if "errors" in row]
    right = sum(not row["problems"] for row in compared)
    timed = max((r for r in rows if r.get("fraction")), key=lambda r: r["fraction"], default=None)
    best = (
        f"; best {timed['kernel']}, {timed['case']}: {timed['fraction']:.0%} of the peak"
        if timed
        else ""
    )
    return f"{right} of {len(compared)} comparisons with float64 agree{best}"


def _meshes(rows: Sequence[Row]) -> str:
    compared = [row for row in rows if "gradient_difference" in row]
    worst = max((row["gradient_difference"] for row in compared), default=0.0)
    equal = sum(row["first_divergence"] is None for row in compared)
    return f"{equal} of {len(compared)} meshes agree with one device; gradients within {worst:.1e}"


def _matmuls(rows: Sequence[Row]) -> str:
    parts = []
    products = [row for row in rows if row.get("dtype") == "bfloat16"]
    if best := max(products, key=lambda row: row["flops_per_second"], default=None):
        fraction = f" ({best['fraction']:.0%} of the peak)" if best.get("fraction") else ""
        parts.append(f"bfloat16 up to {best['flops_per_second'] / 1e12:.3g} TFLOP/s{fraction}")
    memory = [row["bytes_per_second"] for row in rows if "bytes_per_second" in row]
    return ", ".join([*parts, *(f"memory {rate / 1e9:.3g} GB/s" for rate in memory[:1])])


def _collectives(rows: Sequence[Row]) -> str:
    best: dict[str, float] = {}
    for row in rows:
        best[row["kind"]] = max(best.get(row["kind"], 0.0), row["bus_bandwidth"])
    kinds = ("all-gather", "reduce-scatter", "all-to-all")
    return "bus " + ", ".join(
        f"{kind} {best[kind] / 1e9:.3g} GB/s" for kind in kinds if kind in best
    )


def _experts(rows: Sequence[Row]) -> str:
    best = max(rows, key=lambda row: row["bytes_per_second"])
    return f"exchange up to {best['bytes_per_second'] / 1e9:.3g} GB/s, with {best['updates']} updates per device"


def _steps(rows: Sequence[Row]) -> str:
    texts = []
    for row in map(_derived, rows):
        if "loop_seconds" in row:
            utilisation = f", MFU {row['mfu']:.1%}" if row.get("mfu") else ""
            ratio = (
                f", planned / measured {row['planned / measured']}"
                if "planned / measured" in row
                else ""
            )
            texts.append(f"{row['item']} {format_step(row['loop_seconds'])}{utilisation}{ratio}")
    return "; ".join(texts)


def _checkpoint(rows: Sequence[Row]) -> str:
    save, restore = (rows[0][name] / 1e9 for name in ("save_bandwidth", "restore_bandwidth"))
    return f"{format_bytes(rows[0]['bytes'])}: save {save:.3g} GB/s, restore {restore:.3g} GB/s"


_HEADLINES: dict[str, Callable[[Sequence[Row]], str]] = {
    "kernels": _kernels,
    "meshes": _meshes,
    "matmuls": _matmuls,
    "collectives": _collectives,
    "experts": _experts,
    "steps": _steps,
    "checkpoint": _checkpoint,
}


def problems_of(results: Results) -> list[str]:
    """Returns every result that is wrong."""
    return [
        f"{name}: {problem}" for name, result in results.items() for problem in result["problems"]
    ]


def unfinished_of(results: Results) -> list[str]:
    """Returns every section that failed or ran out of time, with its message."""
    return [
        f"{name}: {r['state']}: {r['message']}" for name, r in results.items() if r["state"] != DONE
    ]


def report_json(results: Results) -> dict[str, Any]:
    """Returns the report as JSON: wrong results, unfinished sections, a line about each section, all figures."""
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
    title = f"Hardware: {facts.get('devices', '?')} x {facts.get('device_kind', 'unknown')}"
    wrong, unfinished = problems_of(results), unfinished_of(results)
    lead = f"{len(wrong)} wrong results, {len(unfinished)} sections not finished; jax {facts.get('jax', '?')}"
    found = [Finding("wrong", line, "", tone="bad") for line in wrong]
    found += [Finding("not finished", line, "") for line in unfinished]
    columns = [
        Column("section", cell=lambda item: item[0]),
        Column("state", cell=lambda item: item[1]["state"]),
        Column("time", cell=lambda item: format_time(item[1]["seconds_used"])),
        Column("result", cell=lambda item: _headline(*item), wide=True),
    ]
    notes = [f"{name}: {note}" for name, result in results.items() for note in result["notes"]]
    overview = [
        *([Findings(found, printed=len(found))] if found else []),
        Table.of(results.items(), columns, title="Sections", printed=None),
        *([Text(notes, where="terminal")] if notes else []),
    ]
    sections = [Section("Overview", overview)]
    sections += [
        Section(name.capitalize(), _blocks(name, result), where="page")
        for name, result in results.items()
    ]
    footer = "Measured on this machine. This file loads nothing."
    return Report(title, sections, topic="hardware", lead=lead, footer=footer)


def _blocks(name: str, result: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = [Text(list(result["notes"]))] if result["notes"] else []
    if name == "machine":
        facts = result["facts"]
        known = [
            (field.replace("_", " "), str(facts[field])) for field in _MACHINE if facts.get(field)
        ]
        blocks.append(Facts(known))
        for field in _PREFORMATTED:
            value = facts.get(field)
            text = (
                "\n".join(f"{k}={v}" for k, v in value.items())
                if isinstance(value, Mapping)
                else value
            )
            blocks += [Code(str(text), title=field)] if text else []
        return blocks
    for title, (key, spec) in TABLES.get(name, {}).items():
        rows = [_derived(row) for row in result["rows"] if row.get(key) is not None]
        blocks += (
            [Table.of(rows, [_column(text) for text in spec.split("|")], title=title)]
            if rows
            else []
        )
    not_run = [
        (row["item"], row.get("failed") or row.get("unsupported", "")) for row in result["rows"]
    ]
    if any(reason for _, reason in not_run):
        columns = [Column("item"), Column("because", wide=True)]
        blocks.append(Table(columns, [pair for pair in not_run if pair[1]], title="Not run"))
    if name not in TABLES:  # a section from outside the package
        figures = [
            (
                row["item"],
                ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("item", "problems")),
            )
            for row in result["rows"]
        ]
        blocks.append(
            Table([Column("measurement"), Column("figures", wide=True)], figures, title=name)
        )
    return blocks
