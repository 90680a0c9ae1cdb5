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
        return _rate_column(heading or key, key, unit)
    if unit in _UNITS:
        return Column(heading or key, _UNITS[unit], key, bar=unit == "%")
    return Column(heading or rest, cell=lambda row: row.get(rest))


def _rate_column(heading: str, key: str, unit: str) -> Column:
    scale = _RATES[unit]
    return Column(
        heading, cell=lambda row: f"{row[key] / scale:.3g} {unit}" if row.get(key) else ""
    )


def _derived(row: Row) -> dict[str, Any]:
    """Returns the figures of a measurement with those that follow from them, as text."""
    found = dict(row)
    for label, error in row.get("errors", {}).items():
        found[label] = f"{error[0]:.1e}"
    problems = "; ".join(row.get("problems", ()))
    found["outcome"] = row.get("failed") or row.get("unsupported") or problems
    found["m x k x n"] = " x ".join(str(row.get(name)) for name in "mkn")
    options = row.get("compiler_options", {})
    found["compiler options"] = ", ".join(f"{name}={value}" for name, value in options.items())
    measured = row.get("loop_seconds")
    for over, key in (("planned", "predicted_seconds"), ("simulated", "simulated_seconds")):
        if row.get(key) and measured:
            found[f"{over} / measured"] = f"{row[key] / measured:.2f}"
    if "gradient_difference" in row:
        found |= _compared_meshes(row)
    return found


def _compared_meshes(row: Row) -> dict[str, str]:
    """Returns how far a mesh is from one device. Its losses are pairs: of the mesh, and of the device."""
    of_mesh = [f"{losses[0]:.6f}" for losses in row["losses"]]
    of_device = [f"{losses[1]:.6f}" for losses in row["losses"]]
    return {
        "gradients differ by": f"{row['gradient_difference']:.1e}",
        "initial values": "bitwise equal" if row["initial_values_equal"] else "differ",
        "losses": ", ".join(of_mesh),
        "on one device": ", ".join(of_device),
    }


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
    compared = [row for row in rows if "errors" in row]
    right = sum(not row["problems"] for row in compared)
    text = f"{right} of {len(compared)} comparisons with float64 agree"
    timed = [row for row in rows if row.get("fraction")]
    if timed:
        best = max(timed, key=lambda row: row["fraction"])
        text += f"; best {best['kernel']}, {best['case']}: {best['fraction']:.0%} of the peak"
    return text


def _meshes(rows: Sequence[Row]) -> str:
    compared = [row for row in rows if "gradient_difference" in row]
    worst = max((row["gradient_difference"] for row in compared), default=0.0)
    equal = sum(row["first_divergence"] is None for row in compared)
    return f"{equal} of {len(compared)} meshes agree with one device; gradients within {worst:.1e}"


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


def _experts(rows: Sequence[Row]) -> str:
    best = max(rows, key=lambda row: row["bytes_per_second"])
    return f"exchange up to {best['bytes_per_second'] / 1e9:.3g} GB/s, with {best['updates']} updates per device"


def _steps(rows: Sequence[Row]) -> str:
    texts = []
    for row in map(_derived, rows):
        if "loop_seconds" not in row:
            continue
        text = f"{row['item']} {format_step(row['loop_seconds'])}"
        if row.get("mfu"):
            text += f", MFU {row['mfu']:.1%}"
        if "planned / measured" in row:
            text += f", planned / measured {row['planned / measured']}"
        texts.append(text)
    return "; ".join(texts)


def _checkpoint(rows: Sequence[Row]) -> str:
    save = rows[0]["save_bandwidth"] / 1e9
    restore = rows[0]["restore_bandwidth"] / 1e9
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
    for title, (key, spec) in TABLES.get(name, {}).items():
        rows = [_derived(row) for row in result["rows"] if row.get(key) is not None]
        columns = [_column(text) for text in spec.split("|")]
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
