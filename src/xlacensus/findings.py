"""One thing to change in a program, as the checks report it."""

import dataclasses

MIN_REPLICATED_BYTES = 2**20
"""Size from which a replicated array, or a parameter with padded tiles, is reported."""
MAX_PADDING = 0.1
"""Fraction of padding from which an array is reported."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to change in a program."""

    kind: str
    """layout, replicated, duplicated, rematerialised, unexpected, overlap, padding, precision,
    donation, experts, kernel, host, or determinism."""
    subject: str
    """Array or operation that it is about."""
    reason: str
    fix: str
    bytes: int
    """Bytes that a device stores or sends unnecessarily in one execution."""
    line: str = ""
    """FILE:LINE, if the program records it."""
