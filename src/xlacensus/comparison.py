"""Comparison of a census with one of another mesh or commit."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from xlacensus.formatting import format_bytes, format_count


@dataclasses.dataclass(frozen=True)
class Change:
    """One quantity in two censuses."""

    part: str
    """predicted seconds, memory, traffic, flops, or findings."""
    quantity: str
    before: float
    after: float

    @property
    def ratio(self) -> float | None:
        """After divided by before; None if before is zero."""
        return self.after / self.before if self.before else None

    @property
    def formatted(self) -> tuple[str, str]:
        """Before and after as text."""
        sizes = {PREDICTED: "{:.3g} s".format, "memory": format_bytes, "traffic": format_bytes}
        formatter = sizes.get(self.part, format_count)
        return formatter(self.before), formatter(self.after)


PREDICTED = "predicted seconds"
"""Part of the comparison that is simulated; all others are read from the compiled programs."""


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Compares every quantity of two censuses (`Census.to_json()`);
    those that are zero in both are left out."""
    changes = []
    for (part, a), b in zip(quantities(before).items(), quantities(after).values(), strict=True):
        for key in dict.fromkeys([*a, *b]) if part != PREDICTED or (a and b) else ():
            if a.get(key) or b.get(key):
                changes.append(Change(part, key, float(a.get(key, 0)), float(b.get(key, 0))))
    return changes


def quantities(census: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns what censuses are compared by: part -> quantity -> value."""
    seconds, flops, schedule = {}, dict[str, float](), census["simulated_schedule"]
    if schedule:
        work = {kind: n for kind, n in schedule["by_kind"].items() if kind != "exposed"}
        exposed = {f"exposed, {axes}": n for axes, n in schedule["exposed"].items()}
        seconds = {
            "step": schedule["step_seconds"],
            **work,
            **exposed,
            "pipeline bubble": schedule["bubble"],
        }
    for matmul in census["flops"]["matmuls"]:
        flops[matmul["phase"]] = flops.get(matmul["phase"], 0.0) + matmul["flops"]
    return {
        PREDICTED: seconds,
        "memory": {"peak": census["memory"]["peak"], **census["memory"]["categories"]},
        "traffic": {f"{row['kind']} over {row['axes']}": row["sent"] for row in census["traffic"]},
        "flops": flops,
        "findings": {"findings": len(census["findings"])},
    }
