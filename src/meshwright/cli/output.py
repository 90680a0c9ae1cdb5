"""Standard output: plain text and strict JSON, quiet where the reader has gone."""

import io
import json
import math
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from meshwright.activity import Activity, notice


def write(text: str, stream: TextIO | None = None) -> None:
    """Writes to `stream`, by default standard output.

    A closed pipe (`meshwright ... | head`) discards the text.
    """
    stream = stream or sys.stdout
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_QUIET = 1.0
"""Seconds without output after which a command prints what it is doing."""
_said = threading.Event()


class Stream(io.TextIOWrapper):
    """Standard output or standard error, which notices the first text that is written."""

    def write(self, text: str) -> int:
        """Writes text."""
        _said.set()
        return super().write(text)


class Notices:
    """Watcher of activities that prints what a command is doing.

    It writes to standard error until the command prints something.
    One line after a second, and one for each other work; none after the first output of the command
    itself.
    """

    def __init__(self, command: str):
        self._command, self._doing = command, ["preparing"]
        threading.Thread(target=self._watch, daemon=True, name="notices").start()

    def began(self, activity: Activity) -> None:
        """Notes what is done now."""
        self._doing.append(activity.doing)

    def ended(self, activity: Activity, *, failed: bool) -> None:
        """Returns to what was done before."""
        self._doing.remove(activity.doing)

    def _watch(self) -> None:
        said = set[str]()
        while not _said.wait(_QUIET):
            doing = self._doing[-1]
            if doing not in said and sys.__stderr__ is not None:
                said.add(doing)
                print(notice(self._command, doing), file=sys.__stderr__, flush=True)


_NARROW = 30
"""Columns below which a description is not written beside its name."""


def columns(rows: Mapping[str, str]) -> str:
    """Formats names and descriptions in two columns.

    In a narrow terminal each description is below its name, which is wrapped where it is too long.
    """
    width = shutil.get_terminal_size((120, 24)).columns
    column = max(map(len, rows), default=0) + 2
    text = ""
    for name, docstring in rows.items():
        description = " ".join(docstring.split())
        if width - column < _NARROW:
            if len(name) > width:
                words = " ".join(name.split())
                name = textwrap.fill(words, width, break_on_hyphens=False)
            below = textwrap.fill(description, width, initial_indent="  ", subsequent_indent="  ")
            text += f"{name}\n{below}\n"
        else:
            lines = textwrap.wrap(description, width - column) or [""]
            text += f"{name:<{column}}" + f"\n{'':<{column}}".join(lines) + "\n"
    return text


def write_json(value: Any) -> None:
    """Writes one line of strict JSON.

    NaN and infinity become null, paths text, NumPy's scalars numbers.
    """
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
