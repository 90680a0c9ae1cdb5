"""Progress on a terminal: a live line on a terminal, a line now and then elsewhere."""

import os
import sys
import time
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from meshwright.formatting import format_time
from meshwright.report import Values

_PIPED_WIDTH = 120
"""Columns where the output is not a terminal and COLUMNS is not set."""


class _PatientConsole(Console):
    """Console that goes quiet when its reader has gone (`meshwright ... | head`), so that the work is finished."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def open_console(file: IO[str] | None = None) -> Console:
    """Opens a console on `file`, or on standard output. A closed pipe silences it and raises nothing."""
    target = sys.stdout if file is None else file
    width = None if target.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH
    return _PatientConsole(file=target, highlight=False, width=width)


class ConsoleReport:
    """Reporter that shows progress on a console.

    start: steps done before this run.  steps: last step of the run.
    """

    _LINES = 20
    """Lines of a whole run where the output is not a terminal."""

    def __init__(self, console: Console, *, start: int, steps: int):
        self._console, self._steps = console, steps
        self._first_time: float | None = None
        self._first_step = start
        self._every = max(1, steps // self._LINES)
        self._live = Progress(
            TextColumn("step {task.completed:>{task.fields[width]}}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task("", total=steps, completed=start, text="compiling", width=len(str(steps)))
        self._live.start()

    def write(self, step: int, values: Values) -> None:
        """Shows the metrics of a step, or the loss of an evaluation."""
        number = f"{step:>{len(str(self._steps))}}"
        if "held-out loss" in values:
            self._console.print(f"step {number}  held-out loss {values['held-out loss']:.4f}")
            return
        text = "  ".join([*_parts(values), *self._time_left(step)])
        self._live.update(self._task, completed=step, text=text)
        if not self._console.is_terminal and (
            step in (self._first_step, self._steps) or step % self._every == 0
        ):  # fmt: skip
            self._console.print(f"step {number}/{self._steps}  {text}", highlight=False, markup=False)

    def _time_left(self, step: int) -> list[str]:
        """Returns the estimated time to the last step; nothing at the first step that is seen."""
        now = time.perf_counter()
        if self._first_time is None:
            self._first_time, self._first_step = now, step
        if step == self._first_step:
            return []
        seconds = (now - self._first_time) / (step - self._first_step) * (self._steps - step)
        return [f"{format_time(seconds)} left"]

    def close(self) -> None:
        """Removes the live line."""
        self._live.stop()


def _parts(values: Values) -> list[str]:
    """Returns the metrics worth a place on the line."""
    parts = [f"loss {values['loss']:.4f}"]
    parts += [f"{values[unit]:,.0f} {unit}" for unit in ("tokens/s", "examples/s") if unit in values]
    if "MFU" in values:
        parts.append(f"MFU {values['MFU']:.1%}")
    if "largest expert load" in values:
        parts.append(f"largest expert load {values['largest expert load']:.2f}x")
    return parts
