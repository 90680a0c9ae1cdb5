"""Comparison of two censuses: of two meshes, or of two commits."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import LARGE, read_json
from meshwright.errors import CensusError
from meshwright.formatting import format_bytes, format_count


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
    def formatted(self) -> tuple[str, str, str]:
        """Before, after and the ratio as text."""
        formatters = {PREDICTED: _format_seconds, "memory": format_bytes, "traffic": format_bytes}
        formatter = formatters.get(self.part, format_count)
        return formatter(self.before), formatter(self.after), "" if self.ratio is None else f"{self.ratio:.2f}"


PREDICTED = "predicted seconds"
"""Part of the comparison that is simulated; all others are read from the compiled programs."""


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Compares every quantity of two censuses (`Census.to_json()`); those that are zero in both are left out."""
    changes: list[Change] = []

    def add(part: str, a: Mapping[str, float], b: Mapping[str, float]) -> None:
        for key in dict.fromkeys([*a, *b]):
            if a.get(key) or b.get(key):
                changes.append(Change(part, key, float(a.get(key, 0)), float(b.get(key, 0))))

    if before.get("simulated_schedule") and after.get("simulated_schedule"):
        add(PREDICTED, _seconds(before["simulated_schedule"]), _seconds(after["simulated_schedule"]))
    add("memory", {"peak": before["memory"]["peak"]}, {"peak": after["memory"]["peak"]})
    add("memory", before["memory"]["categories"], after["memory"]["categories"])
    add("traffic", _traffic(before), _traffic(after))
    add("flops", _flops(before), _flops(after))
    add("findings", {"findings": len(before["findings"])}, {"findings": len(after["findings"])})
    return changes


def _seconds(schedule: Mapping[str, Any]) -> dict[str, float]:
    """Returns the predicted step time and its parts."""
    work = {kind: n for kind, n in schedule["by_kind"].items() if kind != "exposed"}
    exposed = {f"exposed, {axes}": n for axes, n in schedule["exposed"].items()}
    return {"step": schedule["step_seconds"], **work, **exposed, "pipeline bubble": schedule["bubble"]}


def _traffic(census: Mapping[str, Any]) -> dict[str, float]:
    return {f"{row['kind']} over {row['axes']}": row["sent"] for row in census["traffic"]}


def _flops(census: Mapping[str, Any]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for matmul in census["flops"]["matmuls"]:
        sums[matmul["phase"]] = sums.get(matmul["phase"], 0.0) + matmul["flops"]
    return sums


def read_census(file: Path) -> dict[str, Any]:
    """Reads a census that `--json` or `--save` wrote. Raises CensusError if the file is not a census."""
    try:
        document = read_json(file, LARGE)
        _ = document["memory"]["categories"], document["findings"], document["simulated_schedule"]
        _traffic(document), _flops(document)
    except OSError as error:
        raise CensusError(f"the census {file}", f"it cannot be read: {error.strerror}", "a file of --json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CensusError(
            f"the census {file}", f"it is not a census: {error}", "what `meshwright prove --json` prints"
        ) from error
    return dict(document)
