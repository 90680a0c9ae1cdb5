"""A result described once: sections of blocks, printed on a terminal,
as one offline HTML page, and as JSON."""

import base64
import dataclasses
import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.errors import unwritable_file
from meshwright.views.blocks import Block, Grid, Table, Text, Where
from meshwright.views.charts import Drawing
from meshwright.views.colours import css_variables
from meshwright.views.terminal import print_blocks

SCRIPTS = (
    "dom",
    "scale",
    "store",
    "axis",
    "chart",
    "table",
    "timeline",
    "blocks",
    "drawings",
    "page",
)
"""Modules of the script, each after those that it imports."""


@dataclasses.dataclass(frozen=True)
class Section:
    """Section of a report; on a page it has a deep link `#id` of its own."""

    title: str
    blocks: Sequence[Block]
    note: str = ""
    """A sentence below the heading."""
    hint: str = ""
    """What a reader of the page can click or hover."""
    where: Where = "everywhere"

    @property
    def id(self) -> str:
        """Anchor of the section, from its title."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") or "section"


@dataclasses.dataclass(frozen=True)
class Live:
    """Source of new data for a page that a server of this machine shows."""

    url: str
    """Path on the same server that returns `Report.to_json()`."""
    seconds: float = 2.0
    """Seconds between two requests."""
    state: str = "live"
    """State of the source of a page: `live`, or why nothing new is expected."""
    active: bool = True
    """Whether something new is expected."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Title, sections and what is around them.

    Example:
        >>> section = Section("Sum", [Text(["2 + 2 = 4"])])
        >>> report = Report("Two and two", [section], topic="arithmetic")
        >>> report.html().startswith("<!doctype html>")
        True
        >>> print(report)
        Two and two
        <BLANKLINE>
        Sum
        2 + 2 = 4
    """

    title: str
    sections: Sequence[Section]
    topic: str = ""
    """Small line above the title of a page: plan, proof, layout, run."""
    lead: str = ""
    """The report in one sentence."""
    tab: str = ""
    """Title of the browser's tab; empty for the title of the page."""
    footer: str = (
        "Figures are of one device where nothing else is written. This file loads nothing."
    )
    live: Live | None = None
    height: int = 720
    """Pixels of its frame in a notebook."""

    def print(self, console: Console) -> None:
        """Prints the title, the lead and the sections."""
        console.print(
            f"{self.title}: {self.lead}" if self.lead else self.title, style="bold", markup=False
        )
        print_sections(console, self.sections)

    def __str__(self) -> str:
        """Text of a terminal of 120 columns."""
        console = Console(
            file=io.StringIO(), width=120, color_system=None, highlight=False, force_jupyter=False
        )
        with console.capture() as capture:
            self.print(console)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def to_json(self) -> dict[str, Any]:
        """Returns the data of the page; a block keeps its id as long as titles and order stay."""
        sections = []
        taken: dict[str, int] = {}
        for section in self.sections:
            if section.where == "terminal":
                continue
            number = taken[section.id] = taken.get(section.id, 0) + 1
            anchor = section.id if number == 1 else f"{section.id}-{number}"
            note, blocks = (
                f"{section.note} {section.hint}".strip(),
                _blocks_json(section.blocks, section.id),
            )
            sections.append({"id": anchor, "title": section.title, "note": note, "blocks": blocks})
        fields = {name: getattr(self, name) for name in ("title", "topic", "lead", "footer")}
        fields["tab"] = self.tab or self.title
        return {**fields, "sections": sections, "live": to_json(self.live)}

    def html(self) -> str:
        """Returns the page as one HTML document: data, style
        and script inlined, the network forbidden."""
        style, script = _style_and_script()
        connect = "connect-src 'self'; " if self.live is not None else ""
        digests = [
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            for text in (script, style)
        ]
        policy = (
            f"default-src 'none'; {connect}script-src 'sha256-{digests[0]}'; style-src "
            f"'sha256-{digests[1]}'; img-src data:; base-uri 'none'; form-action 'none'"
        )
        data = json.dumps(
            self.to_json(), allow_nan=False, ensure_ascii=False, separators=(",", ":")
        )
        for character in (
            "<",
            ">",
            "&",
            "\u2028",
            "\u2029",
        ):  # may neither end the element nor open a comment
            data = data.replace(character, f"\\u{ord(character):04x}")
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{escape(self.tab or self.title)}</title>\n<style>{style}</style></head>\n"
            f'<body><div id="page"></div>\n<script type="application/json" id="page-data">{data}'
            f'</script>\n<script type="module">{script}</script></body></html>\n'
        )

    def frame(self) -> str:
        """Returns the page as an HTML frame for a notebook;
        the frame keeps its styles and script to itself.

        A notebook keeps every cell's output, so what a frame of FRAME_BYTES cannot hold is left
        out, the largest tables and drawings first, and the page names it.
        """
        report = self
        framed = frame(report.html(), self.title, self.height)
        while len(framed.encode()) > FRAME_BYTES and (smaller := _without_largest(report)):
            report = smaller
            framed = frame(report.html(), self.title, self.height)
        return framed

    def _repr_html_(self) -> str:
        return self.frame()

    def write(self, path: Path) -> None:
        """Writes the page. Raises ConfigError where the file cannot be written."""
        try:
            path.write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise unwritable_file(path, error) from error


FRAME_BYTES = 200_000
"""Most bytes of a page in a cell of a notebook."""
_FEWEST_ROWS = 10
"""Rows that a table keeps in a notebook before it is left out."""


def frame(html: str, title: str, height: int = 720) -> str:
    """Returns an HTML document as a frame for a notebook."""
    # Data and scripts are full of double quotes, each of which would take six bytes.
    document = html.replace("&", "&amp;").replace("'", "&#x27;")
    return (
        f'<iframe srcdoc=\'{document}\' title="{escape(title)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )


def _without_largest(report: Report) -> Report | None:
    """Returns the report with the largest block of its page cut or left out, and a note;
    None where none is large."""
    sizes: dict[tuple[int, int], int] = {}
    for number, section in enumerate(report.sections):
        for index, block in enumerate(section.blocks):
            if block.where != "terminal" and section.where != "terminal":
                written = _blocks_json([block], "")
                sizes[number, index] = len(json.dumps(written))
    if not sizes or max(sizes.values()) < 1000:
        return None
    number, index = max(sizes, key=sizes.__getitem__)
    section = report.sections[number]
    blocks = list(section.blocks)
    blocks[index] = _smaller(blocks[index])
    sections = list(report.sections)
    sections[number] = dataclasses.replace(section, blocks=blocks)
    return dataclasses.replace(report, sections=sections)


def _smaller(block: Block) -> Block:
    """Returns a table with half its rows, or a note in the place of another block."""
    where = "a page that is written to a file has all"
    if isinstance(block, Table) and len(block.rows) > _FEWEST_ROWS:
        kept = max(_FEWEST_ROWS, len(block.rows) // 2)
        note = re.sub(r"The first [\d,]+ rows are in this notebook; .*$", "", block.note).strip()
        said = f"The first {kept:,} rows are in this notebook; {where}."
        return dataclasses.replace(
            block,
            rows=block.rows[:kept],
            keys=block.keys[:kept],
            tones=block.tones[:kept],
            note=f"{note} {said}".strip(),
        )
    title = block.title or type(block).__name__.lower()
    return Text([f"Left out of this notebook for its size: {title}; {where}."])


def print_sections(console: Console, sections: Sequence[Section]) -> None:
    """Prints sections without a report around them."""
    for section in sections:
        if section.where != "page":
            print_blocks(console, section.title, section.note, section.blocks)


_NOT_ON_PAGES = ("hint", "where", "printed", "cell")
"""Fields that no script reads."""


def to_json(value: Any) -> Any:
    """Returns a block, or a value of one, as JSON values;
    numbers that are not finite become null."""
    if isinstance(value, Table):
        value = value.without("terminal")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: getattr(value, f.name)
            for f in dataclasses.fields(value)
            if f.name not in _NOT_ON_PAGES
        }
        if isinstance(value, Block):
            fields = {
                "block": type(value).__name__,
                **fields,
                "note": f"{value.note} {value.hint}".strip(),
            }
        if isinstance(value, Drawing):
            fields |= {"block": fields.pop("kind"), **fields.pop("data")}
        return to_json(fields)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        # Seven digits, which no pixel shows, keep pages small.
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.7g}")
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars
        return to_json(value.tolist())
    raise TypeError(f"a page cannot hold a {type(value).__name__}")


def _blocks_json(blocks: Sequence[Block], prefix: str) -> list[dict[str, Any]]:
    found = []
    for number, block in enumerate(block for block in blocks if block.where != "terminal"):
        path = f"{prefix}-{number}"
        inner = {"blocks": _blocks_json(block.blocks, path)} if isinstance(block, Grid) else {}
        found.append({"id": path, **to_json(block), **inner})
    return found


@functools.cache
def _style_and_script() -> tuple[str, str]:
    """Returns the style, and the modules of the script in one scope: a test checks
    that no two declare a name."""
    assets = resources.files("meshwright.views") / "assets"
    modules = [(assets / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = re.sub(
        r"^import [^;]*;\n|^export (?=(async )?(function|class|const|let))",
        "",
        "\n".join(modules),
        flags=re.M,
    )
    return css_variables() + (assets / "style.css").read_text(encoding="utf-8"), script
