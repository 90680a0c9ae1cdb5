"""Standard output: plain text and strict JSON, quiet where the reader has gone."""

import json
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any


def write(text: str) -> None:
    """Writes to standard output. A closed pipe (`meshwright ... | head`) discards the text and raises nothing."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_NARROW = 30
"""Columns below which a description is not written beside its name."""


def write_table(rows: Mapping[str, str], width: int) -> None:
    """Writes names and their descriptions in two columns; in a narrow terminal each description below its name."""
    column = max(map(len, rows), default=0) + 2
    if width - column < _NARROW:
        for name, description in rows.items():
            write(f"{name}\n{textwrap.fill(description, width, initial_indent='  ', subsequent_indent='  ')}\n")
        return
    for name, description in rows.items():
        lines = textwrap.wrap(description, width - column) or [""]
        write(
            "".join(f"{left:<{column}}{line}\n" for left, line in zip([name, *[""] * len(lines)], lines, strict=False))
        )


def write_json(value: Any) -> None:
    """Writes one line of strict JSON: NaN and infinity become null, paths text, NumPy's scalars numbers."""
    write(json.dumps(_strict(value), allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _strict(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):  # a scalar of NumPy or JAX
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
