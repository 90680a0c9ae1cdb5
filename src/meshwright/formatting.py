"""Numbers (bytes, counts, durations) as text, counts from text,
and text that is safe for a terminal."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from meshwright.errors import ConfigError
from xlacensus.formatting import format_bytes as format_bytes
from xlacensus.formatting import format_count as format_count
from xlacensus.formatting import format_step as format_step


class Brief:
    """Result that prints as a short text: its type, and its `brief`."""

    def brief(self) -> str:
        """Returns the result in one or a few lines."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.brief()}>"


class Shown(Brief):
    """Result that a notebook shows as a page, and any other shell as a short text."""

    page_of: ClassVar[Callable[[Any], Any]]
    """Returns the `views.report.Report` of a result.
    The package binds it: pages know results, and no result a page."""

    def page(self) -> Any:
        """Returns the report of this result."""
        return Shown.page_of(self)

    def _repr_html_(self) -> str:
        return self.page().frame()


def relative_paths(text: str) -> str:
    """Returns a text in which paths in the working directory begin there;
    parts of other paths stay."""
    if "/" not in text:
        return text
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # deleted while this process is in it
        return text
    return _without_prefix(text, f"{folder}/", "")


def short_paths(text: str) -> str:
    """Returns a text in which paths begin in the working directory,
    or at `~` where they are in the home directory.

    For what a reader looks at. A command that is printed to be copied has `relative_paths`: no
    shell expands `--out=~/x`.
    """
    if "/" not in text:
        return text
    return _without_prefix(relative_paths(text), f"{os.path.expanduser('~')}/", "~/")


def _without_prefix(text: str, prefix: str, replacement: str) -> str:
    if not prefix.strip("/") or prefix not in text:  # the root is no place to begin at
        return text
    return re.sub(rf"(?<![\w./:~-]){re.escape(prefix)}", lambda _: replacement, text)


BRIEF_ITEMS = 8
"""Items of a list in a short text."""


def first_of(items: Sequence[str]) -> list[str]:
    """Returns the first items of a list, and how many more there are."""
    more = len(items) - BRIEF_ITEMS
    return [*items[:BRIEF_ITEMS], f"{more} more"] if more > 0 else list(items)


def shortened(text: str, most: int = 60) -> str:
    """Returns a text in quotes, its end cut where it is long."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def format_time(seconds: float) -> str:
    """Formats a duration: `4.2 s`, `3 min 20 s`, `2 h 5 min`, `3 days 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    for size, unit, part, small in ((1440, "days", 60, "h"), (60, "h", 1, "min")):
        if minutes >= (2 * size if unit == "days" else size):
            rest = minutes % size // part
            return (
                f"{minutes // size} {unit} {rest} {small}" if rest else f"{minutes // size} {unit}"
            )
    rest = round(seconds) % 60
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def parse_count(text: str, option: str) -> int:
    """Parses a count: `4M` is 4,000,000. Raises ConfigError on anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbgt]?)", text.strip().lower())
    count = float(match[1]) * _MULTIPLES[match[2]] if match else 0.0
    if not 1 <= count <= 1e18:
        truth = "it takes a number of at least 1 and at most 1e18, with k, M, B or T behind it"
        raise ConfigError(f"{option} {text}", truth, f"{option} 4M")
    return round(count)


def printable(text: str, *, keep: str = "") -> str:
    r"""Returns the text with escapes such as `\x1b` for characters
    that a terminal obeys, except those in `keep`."""
    return "".join(c if c in keep or c.isprintable() else ascii(c)[1:-1] for c in text)
