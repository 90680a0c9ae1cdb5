"""Progress on a console: a live line on a terminal, and lasting lines at a period."""

import dataclasses
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from meshwright.activity import Activity
from meshwright.errors import ConfigError
from meshwright.formatting import format_bytes, format_count, format_step, format_time
from meshwright.reporters import Values

_PIPED_WIDTH = 120
"""Columns where the output is not a terminal and COLUMNS is not set."""
_EVERY = 15.0
"""Seconds between lines of a tokenisation where the output is not a terminal."""
_QUIET = 2.0
"""Seconds for which no tokenisation is shown: short texts need no progress."""
_ANNOUNCED = 5.0
"""Seconds after which unfinished work is announced where there is no live line."""


class _PatientConsole(Console):
    """Console that goes quiet when its reader is gone (`meshwright ... | head`).

    The work is finished all the same.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def open_console(file: IO[str] | None = None) -> Console:
    """Opens a console on `file`, or on standard output.

    A closed pipe silences it and raises nothing.
    """
    target = sys.stdout if file is None else file
    columns = os.environ.get("COLUMNS")
    width = None if target.isatty() or columns is not None else _PIPED_WIDTH
    if columns and not columns.strip("0"):  # rich would write nothing into 0 columns
        width = shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns
    return _PatientConsole(file=target, highlight=False, width=width)


@dataclasses.dataclass(frozen=True)
class Period:
    """Time between lasting lines: both the seconds and the steps have to pass."""

    seconds: float = 30.0
    steps: int = 10

    @classmethod
    def parse(cls, text: str) -> "Period":
        """Parses `30s` (or min, h), `10` (steps), or both, `30s,10`.

        Raises ConfigError on anything else.
        """
        seconds, steps = 0.0, 1
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|steps|)\s*", part)
            whole = match is not None and (
                match[2] in ("s", "min", "h") or float(match[1]).is_integer()
            )
            if match is None or not whole or not float(match[1]):
                truth = "it is a time, a number of steps, or both: the later of the two counts"
                raise ConfigError(f"--log-every {text}", truth, "--log-every 30s,10")
            if match[2] in ("s", "min", "h"):
                seconds = float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]
            else:
                steps = int(float(match[1]))
        return cls(seconds, steps)


class ConsoleReport:
    """Reporter and watcher that shows progress on a console.

    On a terminal a live line follows every step. Lasting lines are those of the first and the last
    step, one each `period` between them, and one for every activity that is over. Speeds are means
    since the last lasting line.
    """

    def __init__(
        self,
        console: Console,
        period: Period | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._console, self._period, self._clock = console, period or Period(), clock
        self._start = self._steps = 0
        self._first: tuple[int, float] | None = None
        self._printed = (-math.inf, -math.inf)
        """Step of the last lasting line, and its time."""
        self._last: tuple[int, Values] | None = None
        self._since = _Speed()
        """Speed since the last lasting line."""
        self._activities: list[Activity] = []
        self._timer: threading.Timer | None = None
        self._live: Live | None = None

    def begin(self, start: int, steps: int, warmup_steps: int = 0) -> "ConsoleReport":
        """Shows the steps of a run from now on.

        start: steps done before.  steps: its last step. Returns itself.
        warmup_steps: those that were asked for; a line tells where the run is too short for them.
        """
        self._start, self._steps = start, steps
        if warmup_steps >= steps > start:
            cut, asked = (
                f"warm-up cut to {steps - 1} of {steps} steps:",
                f"--optimizer.warmup-steps {warmup_steps}",
            )
            self._print([cut, f"{asked} leaves no step after it"])
        self._show()
        return self

    def write(self, step: int, values: Values) -> None:
        """Shows the metrics of a step; the result of an evaluation is that of its activity."""
        if "loss" not in values:
            return
        now = self._clock()
        self._since.add(values)
        self._last = (step, {**values, **self._since.mean()})
        if self._first is None:
            self._first = (step, now)
        printed_step, printed_at = self._printed
        due = step - printed_step >= self._period.steps and now - printed_at >= self._period.seconds
        if due or step >= self._steps:
            self._printed = (step, now)
            self._print(self._line(*self._last, now))
            self._since = _Speed()

    def rewind(self, step: int) -> None:
        """Continues from an earlier step."""
        self._first = self._last = None
        self._printed = (-math.inf, -math.inf)
        self._since = _Speed()

    def began(self, activity: Activity) -> None:
        """Shows work that is under way: at once on a terminal, elsewhere after some seconds."""
        self._activities.append(activity)
        self._show()
        if self._live is None:
            self._cancel_timer()
            self._timer = threading.Timer(_ANNOUNCED, self._print, [[f"{activity.doing} ..."]])
            self._timer.daemon = True
            self._timer.start()

    def ended(self, activity: Activity, *, failed: bool) -> None:
        """Prints the result of an activity and how long it took.

        Prints nothing if it failed: the error tells.
        """
        self._cancel_timer()
        self._activities.remove(activity)
        if failed:
            return
        at = activity.step if activity.step is not None or self._last is None else self._last[0]
        step = [] if at is None else [self._number(at)]
        result = [activity.result] if activity.result else []
        self._print([*step, *result, f"{activity.done} in {format_time(activity.seconds)}"])

    def close(self) -> None:
        """Removes the live line."""
        self._cancel_timer()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _show(self) -> None:
        if self._live is None and self._console.is_terminal and not self._console.quiet:
            self._live = Live(
                console=self._console, transient=True, get_renderable=self._renderable
            )
            self._live.start()

    def _renderable(self) -> Text:
        last = self._last
        parts = [self._number(self._start)] if self._steps else []
        if last is not None:
            parts = self._line(*last, self._clock())
        if self._activities:
            current = self._activities[-1]
            parts.append(f"{current.doing}, {format_time(time.perf_counter() - current.began)}")
        return Text(fold(parts, self._console.width), no_wrap=True, style="bold")

    def _line(self, step: int, values: Values, now: float) -> list[str]:
        parts = [
            self._number(step),
            *(text(values[name]) for name, text in _METRICS.items() if name in values),
        ]
        if self._first is not None and self._first[0] < step < self._steps:
            first, began = self._first
            parts.append(
                f"{format_time((now - began) / (step - first) * (self._steps - step))} left"
            )
        return parts

    def _number(self, step: int) -> str:
        return f"step {step:>{len(str(self._steps))}}/{self._steps}"

    def _print(self, parts: Sequence[str]) -> None:
        text = fold(parts, self._console.width)
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def fold(parts: Sequence[str], width: int) -> str:
    """Joins parts with two spaces.

    A line that gets too wide breaks between parts, never inside one.
    """
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}  {part}" if lines[-1].strip() else f"{lines[-1]}{part}"
        if len(joined) > width and lines[-1].strip():
            lines.append(f"  {part}")
        else:
            lines[-1] = joined
    return "\n".join(lines)


class _Speed:
    """Seconds per step, tokens/s and MFU over several steps."""

    def __init__(self) -> None:
        self._steps, self._seconds, self._sums = 0, 0.0, dict[str, float]()

    def add(self, values: Values) -> None:
        """Adds a step; the first that is seen has no duration."""
        seconds = values.get("step seconds")
        if seconds is None:
            return
        self._steps += 1
        self._seconds += seconds
        for name in ("tokens/s", "examples/s", "MFU"):
            if name in values:
                self._sums[name] = self._sums.get(name, 0.0) + values[name] * seconds

    def mean(self) -> Values:
        """Returns the means; nothing where no time has passed."""
        if self._seconds <= 0:
            return {}
        rates = {name: total / self._seconds for name, total in self._sums.items()}
        return {"step seconds": self._seconds / self._steps, **rates}


_METRICS: dict[str, Callable[[float], str]] = {
    "loss": lambda n: f"loss {n:.4f}",
    "learning rate": lambda n: f"lr {n:.2e}",
    "gradient norm": lambda n: f"grad norm {n:.3g}",
    "step seconds": lambda n: f"{format_step(n)}/step",
    "tokens/s": lambda n: f"{n:,.0f} tokens/s",
    "examples/s": lambda n: f"{n:,.0f} examples/s",
    "MFU": lambda n: f"MFU {n:.1%}",
    "largest expert load": lambda n: f"largest expert load {n:.2f}x",
}
"""Metrics on the line of a step, in their order."""


class TokenizeReport:
    """Display of files, bytes and tokens per second, and the time left."""

    def __init__(self, console: Console):
        self._console = console
        self._start = self._shown = time.perf_counter()
        self._label, self._first = "", (0.0, 0)
        text = TextColumn("{task.fields[text]}", markup=False)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), text)
        self._live = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._live.add_task("", total=None, text="", visible=False)

    def update(
        self, label: str, read: float, size: float, files: tuple[int, int], tokens: int
    ) -> None:
        """Shows the progress of one part of the work; rates count from the first call for it."""
        now = time.perf_counter()
        if label != self._label:
            self._label, self._start, self._shown, self._first = label, now, now, (read, tokens)
        if now - self._start < _QUIET or now - self._shown < (
            0.2 if self._console.is_terminal else _EVERY
        ):
            return
        self._shown = now
        got, made, seconds = read - self._first[0], tokens - self._first[1], now - self._start
        parts = [f"file {min(files[0] + 1, files[1]):,}/{files[1]:,}"] if files[1] > 1 else []
        parts += [f"{format_bytes(read)}/{format_bytes(size)}" if size else format_bytes(read)]
        parts += [f"{format_bytes(got / seconds)}/s"]
        if tokens:
            parts += [f"{format_count(tokens)} tokens", f"{format_count(made / seconds)} tokens/s"]
        if size and got:
            parts.append(f"{format_time((size - read) * seconds / got)} left")
        text = "  ".join(parts)
        if self._console.is_terminal:
            self._live.start()
            self._live.update(
                self._task,
                description=label,
                total=size or None,
                completed=read,
                text=text,
                visible=True,
            )
        else:
            self._console.print(f"{label}  {text}", highlight=False, markup=False)

    def write(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Removes the live line."""
        self._live.stop()
