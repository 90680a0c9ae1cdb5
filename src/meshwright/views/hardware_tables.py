"""Tables of the sections of `meshwright bench hardware`: which figures are shown, and how they are formatted."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.formatting import format_bytes, format_count, format_step

Row = Mapping[str, Any]
TERA, GIGA = 1e12, 1e9


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a section's table."""

    heading: str
    cell: Callable[[Row], str | float | None]
    bar: bool = False
    """Whether its cells are fractions, drawn as bars."""


def _with(format_value: Callable[[Any], str], key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else format_value(row[key])


def _seconds(heading: str, key: str) -> Column:
    return Column(heading, _with(lambda s: "-" + format_step(-s) if s < 0 else format_step(s), key))


def _rate(heading: str, key: str, unit: str, scale: float) -> Column:
    return Column(heading, _with(lambda n: f"{n / scale:.3g} {unit}", key))


def _percent(heading: str, key: str) -> Column:
    return Column(heading, _with(lambda n: f"{n:.1%}", key))


def _text(heading: str, key: str) -> Column:
    return Column(heading, _with(str, key))


def _ratio(heading: str, over: str, under: str) -> Column:
    return Column(heading, lambda row: f"{row[over] / row[under]:.2f}" if row.get(over) and row.get(under) else "")


def _bar(key: str) -> Column:
    return Column("of the peak", lambda row: None if row.get(key) is None else min(1.0, row[key]), True)


def _error(label: str) -> Column:
    return Column(label, lambda row: f"{row['errors'][label][0]:.1e}" if label in row.get("errors", {}) else "")


_OUTCOME = Column("", lambda row: row.get("failed") or row.get("unsupported") or "; ".join(row.get("problems", ())))
_RUN = (_text("", "item"), _text("model", "run"), _text("mesh", "mesh"))
TABLES: dict[str, tuple[tuple[str, str, tuple[Column, ...]], ...]] = {
    "kernels": (
        (
            "Error of values and gradients, root mean square against float64",
            "errors",
            (
                _text("kernel", "kernel"),
                _text("shape", "case"),
                _text("type", "dtype"),
                *map(_error, ("out", "dq", "dk", "dv", "dx", "dw")),
                _OUTCOME,
            ),
        ),
        (
            "Time",
            "seconds",
            (
                _text("kernel", "kernel"),
                _text("shape", "case"),
                _seconds("forward", "forward_seconds"),
                _seconds("forward and backward", "seconds"),
                _rate("rate", "flops_per_second", "TFLOP/s", TERA),
                _percent("of the peak", "fraction"),
                _percent("of a dense matmul", "of_dense"),
                _bar("fraction"),
            ),
        ),
    ),
    "meshes": (
        (
            "Against one device, in float32",
            "item",
            (
                _text("model", "model"),
                _text("mesh", "mesh"),
                Column(
                    "initial values",
                    _with(lambda equal: "bitwise equal" if equal else "differ", "initial_values_equal"),
                    False,
                ),
                Column("gradients differ by", _with(lambda n: f"{n:.1e}", "gradient_difference")),
                _text("most in", "worst_tensor"),
                Column("losses", _with(lambda losses: ", ".join(f"{a:.6f}" for a, _ in losses), "losses"), False),
                Column(
                    "on one device", _with(lambda losses: ", ".join(f"{b:.6f}" for _, b in losses), "losses"), False
                ),
                _OUTCOME,
            ),
        ),
    ),
    "matmuls": (
        (
            "One device",
            "m",
            (
                _text("type", "dtype"),
                Column("m x k x n", lambda r: f"{r['m']} x {r['k']} x {r['n']}", False),
                _seconds("median", "seconds"),
                _rate("rate", "flops_per_second", "TFLOP/s", TERA),
                _percent("of the peak", "fraction"),
                _bar("fraction"),
            ),
        ),
        (
            "Memory",
            "bytes_per_second",
            (_text("", "item"), _rate("read and written", "bytes_per_second", "GB/s", GIGA)),
        ),
    ),
    "collectives": (
        (
            "Bandwidth",
            "kind",
            (
                _text("collective", "kind"),
                _text("axis", "axis"),
                Column("devices", _with(str, "devices")),
                Column("size", _with(format_bytes, "bytes")),
                _seconds("median", "seconds"),
                _rate("algorithm", "algorithm_bandwidth", "GB/s", GIGA),
                _rate("bus", "bus_bandwidth", "GB/s", GIGA),
                _OUTCOME,
            ),
        ),
    ),
    "steps": (
        (
            "Measured",
            "loop_seconds",
            (
                *_RUN,
                _seconds("step", "loop_seconds"),
                Column("tokens/s", _with(format_count, "tokens_per_second")),
                _percent("MFU", "mfu"),
                Column("memory", _with(format_bytes, "peak_bytes")),
                _bar("mfu"),
            ),
        ),
        (
            "Predicted over measured",
            "loop_seconds",
            (
                *_RUN,
                _seconds("measured", "loop_seconds"),
                _seconds("planned", "predicted_seconds"),
                _ratio("planned / measured", "predicted_seconds", "loop_seconds"),
                _seconds("simulated", "simulated_seconds"),
                _ratio("simulated / measured", "simulated_seconds", "loop_seconds"),
                Column("memory, planned", _with(format_bytes, "predicted_bytes")),
                Column("compiled", _with(format_bytes, "compiled_bytes")),
                _text("", "simulated_note"),
            ),
        ),
        (
            "Host, per step",
            "loop_seconds",
            (
                *_RUN,
                _seconds("steps alone", "bare_seconds"),
                _seconds("in the loop", "loop_seconds"),
                _seconds("the loop adds", "overhead_seconds"),
                _seconds("each awaited", "blocked_seconds"),
                _seconds("dispatch", "dispatch_seconds"),
                _seconds("processor time", "host_seconds"),
                _seconds("waiting for data", "data_wait_seconds"),
            ),
        ),
        (
            "Start",
            "loop_seconds",
            (
                *_RUN,
                _seconds("placing", "place_seconds"),
                _seconds("compiling", "compile_seconds"),
                _seconds("initial values", "init_seconds"),
                _seconds("first step", "first_step_seconds"),
            ),
        ),
        (
            "Settings",
            "loop_seconds",
            (
                *_RUN,
                Column("parameters", _with(format_count, "parameters")),
                Column("batch", _with(str, "batch")),
                Column("sequence", _with(str, "seq")),
                Column("microbatches", _with(str, "microbatches")),
                _text("remat", "remat"),
                _text("attention", "attention_kernel"),
                _text("cut", "note"),
                Column(
                    "compiler options", lambda r: ", ".join(f"{k}={v}" for k, v in r["compiler_options"].items()), False
                ),
            ),
        ),
    ),
    "overlap": (
        (
            "Of one step",
            "profile",
            (
                _text("", "item"),
                _text("mesh", "mesh"),
                _seconds("step", "profiled_seconds"),
                _seconds("computing", "measured_compute"),
                _seconds("communicating", "measured_communication"),
                _seconds("exposed", "measured_exposed"),
                _seconds("idle", "measured_idle"),
                _seconds("simulated step", "simulated_seconds"),
                _seconds("simulated exposed", "simulated_exposed"),
                _text("", "measured_note"),
            ),
        ),
    ),
    "checkpoint": (
        (
            "Save and restore",
            "bytes",
            (
                _text("model", "run"),
                _text("mesh", "mesh"),
                Column("state", _with(format_bytes, "bytes")),
                _seconds("save", "save_seconds"),
                _seconds("of which training waits", "blocked_seconds"),
                _rate("written", "save_bandwidth", "GB/s", GIGA),
                _seconds("restore and verify", "restore_seconds"),
                _rate("read", "restore_bandwidth", "GB/s", GIGA),
            ),
        ),
    ),
}
"""Section -> its tables: title, the figure that a row of the table has, columns."""
