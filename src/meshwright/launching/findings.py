"""Results of checks: what was looked at, what was found, and how to mend it."""

import dataclasses
from typing import Any, Literal

Verdict = Literal["ok", "warning", "fault"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check on one host."""

    check: str
    """Name of the check: a column of the table."""
    verdict: Verdict
    """`warning` may be meant; `fault` stops a run, or spoils it."""
    found: str
    """What is true, with its number."""
    fix: str = ""
    """Smallest change that mends it; empty where nothing is wrong."""


def ok(check: str, found: str) -> Finding:
    """Returns a finding of a check that passed."""
    return Finding(check, "ok", found)


def fault(check: str, found: str, fix: str) -> Finding:
    """Returns a finding that stops or spoils a run."""
    return Finding(check, "fault", found, fix)


def read_findings(values: Any) -> list[Finding]:
    """Reads findings that another host sent. Raises ValueError for anything else."""
    found = []
    for value in values:
        fields = {name: str(value[name]) for name in ("check", "verdict", "found", "fix")}
        if fields["verdict"] not in ("ok", "warning", "fault"):
            raise ValueError(f"no verdict: {fields['verdict']!r}")
        found.append(Finding(**fields))  # type: ignore[arg-type]
    return found
