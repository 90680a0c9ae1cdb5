"""Comparison of a census with one of another mesh or commit."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import LARGE, read_json
from meshwright.errors import CensusError, by_class, reason_of
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
    def formatted(self) -> tuple[str, str]:
        """Before and after as text."""
        sizes = {PREDICTED: "{:.3g} s".format, "memory": format_bytes, "traffic": format_bytes}
        formatter = sizes.get(self.part, format_count)
        return formatter(self.before), formatter(self.after)


PREDICTED = "predicted seconds"
"""Part of the comparison that is simulated; all others are read from the compiled programs."""


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Compares every quantity of two censuses (`Census.to_json()`); those that are zero in both are left out."""
    changes = []
    for (part, a), b in zip(_quantities(before).items(), _quantities(after).values(), strict=True):
        for key in dict.fromkeys([*a, *b]) if part != PREDICTED or (a and b) else ():
            if a.get(key) or b.get(key):
                changes.append(Change(part, key, float(a.get(key, 0)), float(b.get(key, 0))))
    return changes


def _quantities(census: Mapping[str, Any]) -> dict[str, dict[str, float]]:
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


def read_census(file: Path) -> dict[str, Any]:
    """Reads a census that `--json` or `--save` wrote. Raises CensusError if the file is not a census."""
    try:
        document = read_json(file, LARGE)
        for quantities in _quantities(document).values():
            for name, value in quantities.items():
                if not isinstance(value, int | float) or not math.isfinite(value):
                    raise ValueError(f"{name} is {value!r:.80}, not a number")
    except OSError as error:
        raise by_class(
            error,
            CensusError(
                f"the census {file}", f"it cannot be read: {reason_of(error)}", "a file of --json"
            ),
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CensusError(
            f"the census {file}",
            f"it is not a census: {error}",
            "what `meshwright prove --json` prints",
        ) from error
    return dict(document)
