"""Checks of the docs that mkdocs does not make, the page of `CONTRIBUTING.md`, and the chapters as notebooks.

Options tables are made from the program. Checked are lost quotations, links in the Markdown files of the root, and
commands with options that do not exist. `mkdocs.yml` registers this file under `hooks:`. A failed check ends the build,
also without `--strict`.
"""

import html
import inspect
import logging
import pydoc
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(DOCS / "ladder"), str(DOCS / "ladder" / "problems")]

import build  # noqa: E402  (in the folders of this file, which mkdocs loads by its path)
import check  # noqa: E402
import terminal  # noqa: E402

from meshwright.cli import launch  # noqa: E402

# `--8<--` quotes a file. A formatter of Python code blocks turns it into `--8 < --`, and the page then shows the marker
# instead of the file. Highlighting puts tags and entities between the characters, so the text alone is searched.
_MARKER = re.compile(r"-{2,}\s*8\s*<\s*-{2,}")
_TAG = re.compile(r"<[^>]*>")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_COMMAND = re.compile(rf"meshwright ({'|'.join(verb for verb in terminal.VERBS)})\b([^`\n|]*)")
_NAMES = re.compile(r"<!-- names: (.*?) -->")
_DOCUMENTED = re.compile(r"^::: (meshwright\.[\w.]+)$", re.M)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9.-]*")
_INLINE = re.compile(r"`(--[a-z][a-z0-9.-]*)")
_FOREIGN = {"--exclusive", "--mem", "--mem=0", "--cpus-per-task", "--no-deps", "--tp", "--version"}
"""Options of other programs, and of none of the verbs, that the pages mention."""
_REFUSED = re.compile(r"<!-- run [^\n]*exit=.*?<!-- end -->", re.S)
"""Commands that are shown because they fail."""


def on_config(config: Any) -> Any:
    """Keeps warnings on under `--quiet`, which otherwise hides them from `--strict` as well."""
    logger = logging.getLogger("mkdocs")
    if config.strict and logger.level > logging.WARNING:
        logger.setLevel(logging.WARNING)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds every chapter of the ladder, and every notebook, as a file that Jupyter opens."""
    for chapter in build.chapters():
        uri = f"{chapter.parent.name}/{chapter.stem}.ipynb"
        files.append(File.generated(config, uri, content=build.as_notebook(chapter)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns `CONTRIBUTING.md` for its page, problems and public names for theirs, other pages with their options."""
    if page.file.src_uri == "ladder/problems/index.md":
        return markdown.replace("<!-- problems -->", check.problems_as_markdown())
    if page.file.src_uri == "api/index.md":
        return _NAMES.sub(lambda match: public_names(match[1].split()), markdown)
    if page.file.src_uri != "contributing.md":
        return terminal.with_options_tables(markdown)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.replace("](docs/", "](").replace(
        "](SECURITY.md)", "](https://github.com/meshwright/meshwright/security)"
    )


def public_names(pages: list[str]) -> str:
    """Returns what pages of `api/` document, each with the first line of its docstring, as a Markdown table."""
    rows = ["| name | is or does | page |", "|---|---|---|"]
    for page in pages:
        text = (DOCS / "api" / page).read_text(encoding="utf-8")
        title = text.removeprefix("# ").partition("\n")[0]
        for name in _DOCUMENTED.findall(text):
            summary = (inspect.getdoc(pydoc.locate(name)) or "").partition("\n")[0].replace("|", "\\|")
            rows.append(f"| [`{name.removeprefix('meshwright.')}`][{name}] | {summary} | [{title}]({page}) |")
    return "\n".join(rows)


def on_page_content(rendered: str, page: Any, **_: Any) -> str:
    """Raises PluginError where a rendered page still contains a snippet marker."""
    if page.file.src_uri == "contributing.md":  # which explains the marker
        return rendered
    text = html.unescape(_TAG.sub("", rendered))
    if lost := _MARKER.search(text):
        line = text[lost.start() :].splitlines()[0]
        raise PluginError(
            f"{page.file.src_uri}: a quoted file is lost: the page shows {line!r}\n"
            '  because: the marker is not exactly `--8<-- "FILE"` on a line of its own\n'
            "  fix:     restore it, and keep formatters away from the page"
        )
    return rendered


def on_pre_build(**_: Any) -> None:
    """Raises PluginError for a dead link in the root's pages, or an option that is unknown."""
    for page in sorted(ROOT.glob("*.md")):
        for target in _LINK.findall(page.read_text(encoding="utf-8")):
            file = target.partition("#")[0]
            if file and "://" not in file and not file.startswith("mailto:") and not (ROOT / file).exists():
                raise PluginError(f"{page.name}: links to {target}, which does not exist")
    known = known_options()
    # The log quotes commands of their day.
    for page in [ROOT / "README.md", *(p for p in sorted(DOCS.rglob("*.md")) if p.name != "log.md")]:
        _check_commands(page, known)


def known_options() -> dict[str, set[str]]:
    """Returns the options of each verb, those of its Run and of all model families included."""
    names = {name: _names(name) for name in (*terminal.VERBS, *terminal.FAMILIES, "run")}
    shared = {"--help", "--run"}.union(names["run"], *(names[family] for family in terminal.FAMILIES))
    own = ("evaluate", "tokenize", "convert", "bench", "doctor", *(name for name in terminal.VERBS if " " in name))
    every = {"--help", "--trust-code"}
    known = {verb: names[verb] | every | (shared if verb not in own else set()) for verb in terminal.VERBS}
    # The words after RUN are those of another verb.
    return known | {"launch": known["launch"].union(*(known[verb] for verb in launch.VERBS if verb in known))}


def _names(name: str) -> set[str]:
    return {spelling for option in terminal.options_named(name) for spelling in option.names}


def _check_commands(page: Path, known: dict[str, set[str]]) -> None:
    text = _REFUSED.sub("", page.read_text(encoding="utf-8"))
    for verb, rest in _COMMAND.findall(text):
        for option in _OPTION.findall(rest.partition("#")[0]):
            if option.rstrip(".") not in known[verb]:
                raise PluginError(f"{page.relative_to(ROOT)}: meshwright {verb} has no option {option}")
    every = _FOREIGN.union(*known.values())
    for option in _INLINE.findall(text):
        if option not in every and not option.endswith("."):  # `--model.*` names a group
            raise PluginError(f"{page.relative_to(ROOT)}: there is no option {option}")
