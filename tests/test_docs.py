"""What the pages say exists: commands that the verbs' own parsers take, Python that compiles, names and files."""

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from meshwright.api import finetuning, planning, proving, training
from meshwright.api import verb as shared
from meshwright.cli import verbs
from meshwright.cli.main import TRUST
from meshwright.cli.parse import parse
from meshwright.errors import MeshwrightError
from meshwright.hardware.targets import parse_target
from meshwright.hugging_face.architectures import ARCHITECTURES
from meshwright.planner import plan_file
from meshwright.runs import recipe

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "meshwright").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_QUOTING = {"log.md"}
"""Pages that quote commands and files of their day."""
_BLOCK = re.compile(r"^( *)```(sh|bash|console|python)\n(.*?)^\1```", re.S | re.M)
_REFUSED = re.compile(r"<!-- run [^\n]*exit=.*?<!-- end -->", re.S)
_DOTTED = re.compile(r"(?<![\w/.@-])meshwright(?:\.[A-Za-z_]\w*)+")
_INSTALL = re.compile(r"pip install ([^`\n]*)")
_PACKAGE = re.compile(r"(?<![\w/.-])(meshwright|\.)(?:\[([a-z0-9_,{}-]*)\])?(?![\w/-])")
_FILE = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|toml|csv))[`:]")


class Parsed(Exception):
    """Ends a verb once its arguments are parsed."""


def blocks(page: Path, languages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields language and text of the fenced blocks of a page, but for commands that are shown because they fail."""
    text = _REFUSED.sub("", page.read_text(encoding="utf-8"))
    for indent, language, body in _BLOCK.findall(text):
        if language in languages:
            yield language, re.sub(rf"^{indent}", "", body, flags=re.M)


def commands(page: Path) -> Iterator[list[str]]:
    """Yields the arguments of every `meshwright` on a page, of those in lines of text the whole ones."""
    text = _REFUSED.sub("", page.read_text(encoding="utf-8"))
    for inline in re.findall(r"`meshwright ([a-z][^`\n]*)`", text):
        if not re.search(r"\.\.\.|\||\bN\b|\b[A-Z]{3,}\b|^[a-z-]+( (--)?[a-z.-]+)?$", inline):
            yield shlex.split(inline)
    for language, body in blocks(page, ("sh", "bash", "console")):
        for line in body.replace("\\\n", " ").splitlines():
            if language == "console" and not line.startswith("$ "):
                continue
            words = shlex.split(line.removeprefix("$ "), comments=True)
            for word in list(
                words
            ):  # `srun ... meshwright doctor`, and `--command "meshwright train ..."`
                words += shlex.split(word) if word.startswith("meshwright ") else []
            for start in (i for i, word in enumerate(words) if word == "meshwright"):
                rest = words[start + 1 :]
                end = next(
                    (
                        i
                        for i, word in enumerate(rest)
                        if word in ("|", ">", "&&", "&", "meshwright")
                    ),
                    len(rest),
                )
                yield rest[:end]


@pytest.fixture
def only_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets verbs go no further than their parser; files that a page only names stand for the recipe `tiny`."""
    tiny = mw.recipe("tiny")
    builder = recipe._builder

    def known(name: str) -> Any:
        absent = name.startswith("hf:") or (
            ".py" in name and not Path(name.partition(":")[0]).is_file()
        )
        return (lambda: tiny) if absent else builder(name)

    def parse_and_stop(kind: type, verb: str, args: Sequence[str], **how: Any) -> Any:
        options = parse(kind, verb, args, **how)
        machines = (getattr(options, name, None) for name in ("on", "target"))
        for target in (
            part for value in machines if isinstance(value, str) for part in value.split(",")
        ):
            if (
                ":" in target and ".toml" not in target
            ):  # launch --on slurm; a chip that a page only names
                parse_target(target.partition("..")[0])
        if verb.startswith("launch"):
            return options
        raise Parsed

    monkeypatch.setattr(recipe, "_builder", known)
    for module in (plan_file, proving):
        monkeypatch.setattr(
            module, "read_plan", lambda path: SimpleNamespace(run=tiny, target="h100:64")
        )
    monkeypatch.setattr(shared, "read_run", lambda path: tiny)
    monkeypatch.setattr(training, "run_in_folder", lambda path: tiny)
    monkeypatch.setattr(finetuning, "source_run", lambda name: tiny)
    monkeypatch.setattr(finetuning, "run_in_folder", lambda path: tiny)
    monkeypatch.setattr(verbs, "parse", parse_and_stop)


@pytest.mark.usefixtures("only_parsing")
def test_every_command_of_the_pages_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(
        ROOT / "tests" / "outside" / "extensions"
    )  # whose files `docs/adding.md` uses
    # `plan --measured RUN` reads a run that the reader of the page has.
    monkeypatch.setattr(planning, "traced_machine", lambda folder: "h100:8")
    monkeypatch.setattr(planning, "read_run", lambda file: mw.recipe("tiny"))
    found, faults = 0, []
    for page in [*PAGES, *SOURCES]:  # help and errors are in the sources
        for args in commands(page) if page.name not in _QUOTING else ():
            if not args or args[0] in ("--version", "--help", "recipes"):
                continue
            found += 1
            try:
                words = [word for word in args[1:] if word.partition("=")[0] != TRUST]
                verbs.run_verb(args[0], words)
            except Parsed:
                continue
            except (MeshwrightError, ImportError, SystemExit) as error:
                faults.append(f"{page.relative_to(ROOT)}: meshwright {shlex.join(args)}\n{error}")
    assert not faults, "\n".join(faults)
    assert found > 190


def names_of(tree: ast.AST) -> Iterator[str]:
    """Yields `mw.NAME` and the names imported from the package, with their modules."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "mw"
        ):
            yield f"meshwright.{node.attr}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwright"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named_object(name: str) -> Any:
    """Returns what a dotted name of the package is, by its modules and their attributes; None where there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute, None)
        return found
    return None


def test_dotted_names_of_the_pages_can_be_imported() -> None:
    """A module has its own name: another, such as that of a lazy attribute, is not one that can be imported from."""
    faults = []
    for page in [*PAGES, *sorted((ROOT / "docs").rglob("*.py"))]:
        if page.name in (*_QUOTING, "changelog.md"):
            continue
        for name in sorted(set(_DOTTED.findall(page.read_text(encoding="utf-8")))):
            found = named_object(name)
            if found is None or (isinstance(found, ModuleType) and found.__name__ != name):
                faults.append(f"{page.relative_to(ROOT)}: there is no module or name {name}")
    assert not faults, "\n".join(faults)


def test_lines_that_install_are_of_a_checkout_or_add_an_extra_that_there_is() -> None:
    """Nothing is released: `pip install meshwright` finds nothing, and an extra of the installed package works."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    faults = []
    for page in [*PAGES, *sorted((ROOT / "docs").rglob("*.py")), *SOURCES]:
        if page.name in _QUOTING:
            continue
        for line in page.read_text(encoding="utf-8").splitlines():
            for words in _INSTALL.findall(line):
                for name, given in _PACKAGE.findall(words):
                    if set(filter(None, given.split(","))) - extras and "{" not in given:
                        faults.append(f"{page.relative_to(ROOT)}: no such extra, {words}")
                    if name == "meshwright" and not given and "Once it is released" not in line:
                        faults.append(f"{page.relative_to(ROOT)}: nothing is released, {words}")
    assert not faults, "\n".join(faults)


def exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


def test_python_of_the_pages_compiles_and_names_what_exists() -> None:
    faults = []
    for page in PAGES:
        if page.name in _QUOTING or page.parent.name in ("ladder", "notebooks"):  # which run
            continue
        for _, body in blocks(page, ("python",)):
            if "--8<--" in body:
                continue
            try:
                tree = ast.parse(body)
            except SyntaxError as error:
                faults.append(f"{page.name}: {error}\n{body}")
                continue
            faults += [
                f"{page.name}: there is no {name}"
                for name in set(names_of(tree))
                if not exists(name)
            ]
    assert not faults, "\n".join(faults)


def test_files_that_the_pages_name_are_there() -> None:
    places = (ROOT, ROOT / "src" / "meshwright", ROOT / "docs", ROOT / "tests")
    faults = []
    for page in PAGES:
        if page.name in _QUOTING:
            continue
        for name in set(_FILE.findall(page.read_text(encoding="utf-8"))):
            if not any((place / name).exists() for place in places):
                faults.append(f"{page.relative_to(ROOT)}: {name}")
    assert not faults, "\n".join(faults)


def test_the_first_page_counts_the_architectures() -> None:
    """Without two that are compared inside larger models only."""
    alone = ARCHITECTURES.keys() - {"Gemma4UnifiedForCausalLM", "Qwen3VLMoeTextModel"}
    assert f"[{len(alone)} architectures]" in PAGES[0].read_text(encoding="utf-8")


SEARCHED = {
    "OOM": "howto/what-you-see.md",
    "RESOURCE_EXHAUSTED": "howto/what-you-see.md",
    "NaN": "howto/what-you-see.md",
    "hang": "howto/what-you-see.md",
    "NCCL timeout": "howto/what-you-see.md",
    "slow step": "howto/what-you-see.md",
    "loss spike": "howto/what-you-see.md",
    "multi-host": "howto/what-you-see.md",
    "ETA": "howto/what-you-see.md",
    "ZeRO-2": "howto/other-words.md",
    "DeepSpeed": "howto/other-words.md",
    "Accelerate": "howto/other-words.md",
    "torchrun": "howto/other-words.md",
    "DDP": "howto/other-words.md",
}
"""What people type into a search, and the page that answers it."""


@pytest.mark.parametrize("words", SEARCHED)
def test_a_search_finds_the_page_that_answers_it(words: str) -> None:
    """Symptoms stand in a heading, which a search ranks first; the log and the changelog are ranked last."""
    text = (ROOT / "docs" / SEARCHED[words]).read_text(encoding="utf-8")
    headings = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    place = headings if SEARCHED[words].endswith("what-you-see.md") else text
    assert re.search(rf"\b{re.escape(words)}", place)
    for last in ("log.md", "changelog.md"):
        page = (ROOT / "docs" / last).read_text(encoding="utf-8")
        assert page.startswith("---\nsearch:\n  boost: 0.1\n---\n")
