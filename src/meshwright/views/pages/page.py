"""A page as one offline file: its data as JSON, style and script inlined, and a policy that forbids the network."""

import base64
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.views.draw.colours import css_variables
from meshwright.views.pages.blocks import Block, Grid, to_json

SCRIPTS = ("dom", "scale", "store", "chart", "table", "timeline", "blocks", "drawings", "page")
"""Modules of the script, each after those that it imports."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async )?(function|class|const|let))", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Section:
    """Section of a page, with a deep link `#id` of its own."""

    title: str
    blocks: Sequence[Block]
    note: str = ""
    """A sentence below the heading."""

    @property
    def id(self) -> str:
        """Anchor of the section, from its title."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") or "section"


@dataclasses.dataclass(frozen=True)
class Live:
    """Source of new data for a page that a server of this machine shows."""

    url: str
    """Path on the same server that returns `Page.to_json()`."""
    seconds: float = 2.0
    """Seconds between two questions."""


@dataclasses.dataclass(frozen=True)
class Page:
    """Title, sections and what is around them.

    Example:
        >>> page = Page("Two and two", [Section("Sum", [Text(["2 + 2 = 4"])])], topic="arithmetic")
        >>> page.html().startswith("<!doctype html>")
        True
    """

    title: str
    sections: Sequence[Section]
    topic: str = ""
    """Small line above the title: plan, proof, layout, run."""
    lead: str = ""
    """The page in one sentence."""
    footer: str = "Figures are of one device where nothing else is written. This file loads nothing."
    live: Live | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the page's data; every block has an id, which stays the same as long as titles and order do."""
        sections = []
        taken: dict[str, int] = {}
        for section in self.sections:
            blocks = [_block_json(block, path) for block, path in _numbered(section.blocks, section.id)]
            number = taken[section.id] = taken.get(section.id, 0) + 1
            anchor = section.id if number == 1 else f"{section.id}-{number}"
            sections.append({"id": anchor, "title": section.title, "note": section.note, "blocks": blocks})
        return {
            "title": self.title, "topic": self.topic, "lead": self.lead, "footer": self.footer, "sections": sections,
            "live": None if self.live is None else to_json(self.live),
        }  # fmt: skip

    def html(self) -> str:
        """Returns the page as one HTML document."""
        return document(self.to_json())

    def write(self, path: Path) -> None:
        """Writes the page. Raises ConfigError where the file cannot be written."""
        try:
            path.write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"writing {path}", f"the file cannot be written: {error.strerror}", "a folder that exists"
            ) from error


def document(data: dict[str, Any]) -> str:
    """Returns the HTML document of a page's data (`Page.to_json`), with the present style and script."""
    style, script = _style(), _script()
    connect = "connect-src 'self'; " if data["live"] is not None else ""
    policy = (
        f"default-src 'none'; {connect}script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(data['title'])}</title>\n<style>{style}</style></head>\n"
        f'<body><div id="page"></div>\n<script type="application/json" id="page-data">{_json(data)}'
        f'</script>\n<script type="module">{script}</script></body></html>\n'
    )


def inline(page: Page, height: int = 720) -> str:
    """Returns a page as an HTML frame for a notebook; the frame keeps its styles and script to itself."""
    return frame(page.html(), page.title, height)


def frame(html: str, title: str, height: int = 720) -> str:
    """Returns an HTML document as a frame for a notebook."""
    return (
        f'<iframe srcdoc="{escape(html)}" title="{escape(title)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )


def _numbered(blocks: Sequence[Block], prefix: str) -> Iterator[tuple[Block, str]]:
    for number, block in enumerate(blocks):
        yield block, f"{prefix}-{number}"


def _block_json(block: Block, path: str) -> dict[str, Any]:
    if isinstance(block, Grid):
        inner = [_block_json(child, name) for child, name in _numbered(block.blocks, path)]
        return {"block": "Grid", "id": path, "columns": block.columns, "wide": block.wide, "blocks": inner}
    return {"id": path, **to_json(block)}


def _json(document: dict[str, Any]) -> str:
    """Returns strict JSON that neither ends its script element nor opens a comment."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return (resources.files("meshwright.views.pages") / "assets" / name).read_text(encoding="utf-8")


@functools.cache
def _style() -> str:
    return css_variables() + _asset("style.css")


@functools.cache
def _script() -> str:
    """Joins the modules into one scope; no two of them declare the same name, which a test checks."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _asset(f"{name}.js"))) for name in SCRIPTS)
