"""Report of `meshwright bench hardware`: an overview of its sections, and the figures of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from meshwright.bench.hardware.section import DONE
from meshwright.formatting import format_bytes, format_step, format_time
from meshwright.views.blocks import Block, Cell, Code, Column, Facts, Finding, Findings, Table, Text, Unit
from meshwright.views.report import Report, Section

Row = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]
"""Section -> contents of its file."""

_TERA, _GIGA = 1e12, 1e9
_MACHINE = ("device_kind", "devices", "chip", "runtime", "driver", "host", "memory_limit", "peak_bfloat16")
_PREFORMATTED = ("links", "versions", "environment", "coordinates")


_UNITS: dict[str, tuple[Unit, str, float]] = {
    "s": ("seconds", "", 1),
    "B": ("bytes", "", 1),
    "n": ("count", "", 1),
    "i": ("integer", "", 1),
    "%": ("fraction", "", 1),
    "TFLOP/s": ("text", " TFLOP/s", 1e12),
    "GB/s": ("text", " GB/s", 1e9),
}
"""Unit of a column in `TABLES` -> unit of its cells, or a suffix and what the figure is divided by."""
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
            "model | mesh | initial values | gradients differ by | most in = worst_tensor | losses | on one device"
            " | outcome",
        ),
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
        ),
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
    "overlap": {
        "Of one step": (
            "profile",
            "item | mesh | step = profiled_seconds s | computing = measured_compute s"
            " | communicating = measured_communication s | exposed = measured_exposed s | idle = measured_idle s"
            " | simulated step = simulated_seconds s | simulated exposed = simulated_exposed s | note = measured_note",
        ),
    },
    "checkpoint": {
        "Save and restore": (
            "bytes",
            "model = run | mesh | state = bytes B | save = save_seconds s | of which training waits = blocked_seconds s"
            " | written = save_bandwidth GB/s | restore and verify = restore_seconds s"
            " | read = restore_bandwidth GB/s",
        ),
    },
}
"""Section -> title of a table -> the figure that each of its rows has, and its columns: `heading = key unit`."""


def _column(text: str) -> Column:
    """Parses `heading = key unit`; without a key it is the heading, without a unit the cells are text."""
    heading, _, rest = text.strip().rpartition(" = ")
    key, _, unit = rest.rpartition(" ")
    if unit not in _UNITS:
        return Column(heading or rest, cell=rest)
    cells, suffix, scale = _UNITS[unit]
    if cells != "text":
        return Column(heading or key, cells, key, bar=unit == "%")
    return Column(heading or key, cell=lambda row: f"{row[key] / scale:.3g}{suffix}" if row.get(key) else "")


def _derived(row: Row) -> dict[str, Cell]:
    """Returns the figures of a measurement with those that follow from them, as text."""

    def ratio(over: str) -> str:
        return f"{row[over] / row['loop_seconds']:.2f}" if row.get(over) and row.get("loop_seconds") else ""

    found = dict(row) | {label: f"{error[0]:.1e}" for label, error in row.get("errors", {}).items()}
    found["outcome"] = row.get("failed") or row.get("unsupported") or "; ".join(row.get("problems", ()))
    found["m x k x n"] = " x ".join(str(row.get(name)) for name in "mkn")
    found["planned / measured"], found["simulated / measured"] = ratio("predicted_seconds"), ratio("simulated_seconds")
    found["compiler options"] = ", ".join(f"{k}={v}" for k, v in row.get("compiler_options", {}).items())
    if "gradient_difference" in row:
        found["gradients differ by"] = f"{row['gradient_difference']:.1e}"
        found["initial values"] = "bitwise equal" if row["initial_values_equal"] else "differ"
        found["losses"] = ", ".join(f"{loss:.6f}" for loss, _ in row["losses"])
        found["on one device"] = ", ".join(f"{loss:.6f}" for _, loss in row["losses"])
    return found


def headline(name: str, result: Mapping[str, Any]) -> str:
    """Returns the outcome of a section in one line: its best or most telling figures."""
    rows = [row for row in result["rows"] if "failed" not in row]
    if name == "machine":
        facts = result["facts"]
        return f"{facts.get('devices')} x {facts.get('device_kind')}, jax {facts.get('jax')}" if facts else ""
    tell = _HEADLINES.get(name)
    return tell(rows) if tell and rows else "; ".join(result["notes"]) or f"{len(rows)} measurements"


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
        parts.append(f"bfloat16 up to {best['flops_per_second'] / _TERA:.3g} TFLOP/s{fraction}")
    return ", ".join([*parts, *([f"memory {memory / _GIGA:.3g} GB/s"] if memory else [])])


def _collectives_headline(rows: Sequence[Row]) -> str:
    best: dict[str, float] = {}
    for row in rows:
        best[row["kind"]] = max(best.get(row["kind"], 0.0), row["bus_bandwidth"])
    kinds = ("all-gather", "reduce-scatter", "all-to-all")
    return "bus " + ", ".join(f"{kind} {best[kind] / _GIGA:.3g} GB/s" for kind in kinds if kind in best)


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
    save, restore = (rows[0][name] / _GIGA for name in ("save_bandwidth", "restore_bandwidth"))
    return f"{format_bytes(rows[0]['bytes'])}: save {save:.3g} GB/s, restore {restore:.3g} GB/s"


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
    """Returns the report as JSON: wrong results, unfinished sections, a line about each section, all figures."""
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
    console.print(f"[bold]{escape(name)}[/] ({took}): {state}{escape(headline(name, result))}")


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
        Column("result", cell=lambda item: headline(*item), wide=True),
    ]
    notes = [f"{name}: {note}" for name, result in results.items() for note in result["notes"]]
    overview = [
        *([Findings(found, printed=len(found))] if found else []),
        Table.of(results.items(), columns, title="Sections", printed=len(results)),
        *([Text(notes, where="terminal")] if notes else []),
    ]
    sections = [Section("Overview", overview)]
    sections += [Section(name.capitalize(), _blocks(name, result), where="page") for name, result in results.items()]
    footer = "Measured on this machine. This file loads nothing."
    return Report(title, sections, topic="hardware", lead=lead, footer=footer)


def _blocks(name: str, result: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = [Text(list(result["notes"]))] if result["notes"] else []
    if name == "machine":
        return [*blocks, *_machine_blocks(result["facts"])]
    for title, (key, spec) in TABLES.get(name, {}).items():
        rows = [_derived(row) for row in result["rows"] if row.get(key) is not None]
        blocks += [Table.of(rows, [_column(text) for text in spec.split("|")], title=title)] if rows else []
    not_run = [(row["item"], row.get("failed") or row.get("unsupported", "")) for row in result["rows"]]
    reasons = [pair for pair in not_run if pair[1]]
    if reasons:
        blocks.append(Table([Column("item"), Column("because", wide=True)], reasons, title="Not run"))
    if name not in TABLES:  # a section from outside the package
        figures = [
            (row["item"], ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("item", "problems")))
            for row in result["rows"]
        ]
        blocks.append(Table([Column("measurement"), Column("figures", wide=True)], figures, title=name))
    return blocks


def _machine_blocks(facts: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = [Facts([(name.replace("_", " "), str(facts[name])) for name in _MACHINE if facts.get(name)])]
    for name in _PREFORMATTED:
        value = facts.get(name)
        text = "\n".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, Mapping) else value
        blocks += [Code(str(text), title=name)] if text else []
    return blocks
