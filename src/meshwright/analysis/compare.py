"""Comparison of a census: with one of another mesh or commit, or with limits, so that CI fails when a program grows."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.analysis.census import Census
from meshwright.documents import LARGE, read_json
from meshwright.errors import CensusError, nearest, reason_of
from meshwright.formatting import format_bytes, format_count
from meshwright.hlo.ledger import traffic


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
        seconds = {"step": schedule["step_seconds"], **work, **exposed, "pipeline bubble": schedule["bubble"]}
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
        _quantities(document)
    except OSError as error:
        raise CensusError(f"the census {file}", f"it cannot be read: {reason_of(error)}", "a file of --json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CensusError(
            f"the census {file}", f"it is not a census: {error}", "what `meshwright prove --json` prints"
        ) from error
    return dict(document)


_KEYS = ("peak_bytes", "findings", "flops", "memory", "sent", "counts")


@dataclasses.dataclass(frozen=True)
class LimitExceeded:
    """A limit of a budget that the program exceeds."""

    quantity: str
    limit: float
    actual: float


def read_budget(file: Path) -> dict[str, Any]:
    """Reads the limits of a TOML file (docs/census.md). Raises CensusError for an unknown key."""
    try:
        budget = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CensusError(f"the budget {file}", f"it cannot be read: {reason_of(error)}", "a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise CensusError(f"the budget {file}", f"it is not TOML: {error}", "see docs/census.md") from error
    for key in budget:
        if key not in _KEYS:
            raise CensusError(f"the budget {file}", f"{key} is not a limit", nearest(key, _KEYS))
    return budget


def check_budget(census: Census, budget: Mapping[str, Any]) -> list[LimitExceeded]:
    """Lists the limits that `census` exceeds."""
    rows, categories = traffic(census.ledger), census.memory.by_category()
    # A key of `sent` is a set of axes, or a kind over a set of axes.
    sends = {axes: sum(row["sent"] for row in rows if row["axes"] == axes) for axes in {row["axes"] for row in rows}}
    sends |= {f"{row['kind']} over {row['axes']}": row["sent"] for row in rows}
    counts = {f"{row['kind']} over {row['axes']}": row["count"] for row in rows}
    figures = {
        "peak_bytes": ("peak memory, bytes", census.memory.compiled.peak),
        "findings": ("findings", len(census.findings)),
        "flops": ("matrix-product FLOPs", census.flops.compiled),
    }
    limits = [(name, float(budget[key]), actual) for key, (name, actual) in figures.items() if key in budget]
    limits += [(f"{k}, bytes", float(v), categories.get(k, 0)) for k, v in budget.get("memory", {}).items()]
    limits += [(f"sent: {k}, bytes", float(v), sends.get(k, 0.0)) for k, v in budget.get("sent", {}).items()]
    limits += [(f"counts: {k}", float(v), counts.get(k, 0)) for k, v in budget.get("counts", {}).items()]
    return [LimitExceeded(quantity, limit, actual) for quantity, limit, actual in limits if actual > limit]


def write_budget(census: Census) -> str:
    """Formats the census's own figures as a budget, which the program then may not exceed."""
    lines = [f"peak_bytes = {census.memory.compiled.peak}", f"findings = {len(census.findings)}", ""]
    lines += ["[memory]", *(f'"{k}" = {v}' for k, v in census.memory.by_category().items()), ""]
    lines += ["[sent]", *(f'"{row["kind"]} over {row["axes"]}" = {row["sent"]:.0f}' for row in traffic(census.ledger))]
    return "\n".join(lines) + "\n"
