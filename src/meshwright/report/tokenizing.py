"""Progress of a tokenisation on a terminal; elsewhere a line now and then."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from meshwright.formatting import format_bytes, format_count, format_time

_EVERY = 15.0
"""Seconds between lines where the output is not a terminal."""
_QUIET = 2.0
"""Seconds for which nothing is shown: short texts need no progress."""


class TokenizeReport:
    """Display of files, bytes and tokens per second, and the time left."""

    def __init__(self, console: Console):
        self._console = console
        self._start = self._shown = time.perf_counter()
        self._label, self._first = "", (0.0, 0)
        self._live = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}", markup=False),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._live.add_task("", total=None, text="", visible=False)

    def update(self, label: str, read: float, size: float, files: tuple[int, int], tokens: int) -> None:
        """Shows the progress of one part of the work; rates count from the first call for it."""
        now = time.perf_counter()
        if label != self._label:
            self._label, self._start, self._shown, self._first = label, now, now, (read, tokens)
        if now - self._start < _QUIET or now - self._shown < (0.2 if self._console.is_terminal else _EVERY):
            return
        self._shown = now
        text = _text(read, size, files, tokens, (read - self._first[0], tokens - self._first[1], now - self._start))
        if self._console.is_terminal:
            self._live.start()
            self._live.update(
                self._task, description=label, total=size or None, completed=read, text=text, visible=True
            )
        else:
            self._console.print(f"{label}  {text}", highlight=False, markup=False)

    def write(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Removes the live line."""
        self._live.stop()


def _text(
    read: float, size: float, files: tuple[int, int], tokens: int, done: tuple[float, int, float]
) -> str:  # fmt: skip
    """Describes the progress. done: bytes, tokens and seconds since the display began."""
    got, made, seconds = done
    parts = [f"file {min(files[0] + 1, files[1]):,}/{files[1]:,}"] if files[1] > 1 else []
    parts.append(f"{format_bytes(read)}/{format_bytes(size)}" if size else f"{format_bytes(read)}")
    parts.append(f"{format_bytes(got / seconds)}/s")
    if tokens:
        parts += [f"{format_count(tokens)} tokens", f"{format_count(made / seconds)} tokens/s"]
    if size and got:
        parts.append(f"{format_time((size - read) * seconds / got)} left")
    return "  ".join(parts)
