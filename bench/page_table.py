"""Tables and figures that the scripts of this folder write into pages of the documentation.

A table stands on lines of its own, a figure anywhere but at the start of a line of prose:

    ... has a <!-- figures: bench/SCRIPT NAME -->median error of 3.9%<!-- end of the figures --> ...
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FIGURES = re.compile(
    r"(?P<begin><!-- figures: (?P<script>\S+) (?P<name>[\w-]+) -->)"
    r".*?(?P<end><!-- end of the figures -->)",
    re.S,
)
_END = "<!-- end of the table -->\n"


def put_table(page: Path, script: str, table: str) -> None:
    """Writes `table` between the marks of `script` in `page`. Raises ValueError where the page has none."""
    begin = f"<!-- table: bench/{script} -->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(before + begin + table + _END + rest.split(_END, 1)[1], encoding="utf-8")


def pages() -> Iterator[Path]:
    """Yields README.md and every page of the documentation."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def with_figures(text: str, script: str, figures: dict[str, str]) -> str:
    """Returns a page's text with the figures of `script`, by name. Raises KeyError for a name without a figure."""

    def replace(match: re.Match[str]) -> str:
        if match["script"] != f"bench/{script}":
            return match[0]
        return match["begin"] + figures[match["name"]] + match["end"]

    return _FIGURES.sub(replace, text)


def marks_of(text: str) -> list[tuple[str, str]]:
    """Returns script and name of each figure of a page."""
    return [(match["script"], match["name"]) for match in _FIGURES.finditer(text)]


def without_figures(text: str) -> str:
    """Returns a page's text without what scripts wrote into it between marks: figures, tables and sentences."""
    text = _FIGURES.sub("", text)
    return re.sub(r"<!-- (table|sentences): .*?<!-- end of the \1 -->\n", "", text, flags=re.S)


def put_figures(script: str, figures: dict[str, str]) -> None:
    """Writes the figures of `script` into every page that names them."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        changed = with_figures(text, script, figures)
        if changed != text:
            page.write_text(changed, encoding="utf-8")


def put_rows(script: str, title: str, rows: str) -> None:
    """Writes the single rows behind a page's table to results/, in a file named after `script`."""
    file = Path(__file__).parent / "results" / Path(script).with_suffix(".md").name
    file.write_text(f"# {title}\n\nWritten by `python bench/{script}`.\n\n{rows}", encoding="utf-8")
