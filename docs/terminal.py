"""Runs the commands that the docs show, and writes their output into the pages and pictures.

    python docs/terminal.py                  # every page: output of the quick commands
    python docs/terminal.py docs/plan.md     # one page
    python docs/terminal.py --once PAGE      # also the commands marked `once`, which take minutes
    python docs/terminal.py --pictures NAME  # docs/img/NAME: a terminal (pages: docs/screens.py)

A page holds marks, each followed by a block that this program rewrites, up to `<!-- end -->`:

    <!-- run: COMMAND -->                    shows the command and all it prints
    <!-- run lines=8,3: COMMAND -->          the first 8 and the last 3 lines
    <!-- run from="text" lines=8: COMMAND -->  8 lines, the first of which holds the text
    <!-- run once=DATE: COMMAND -->          is run with --once alone, and keeps the date of that
    <!-- run exit=2: COMMAND -->             has to end with that exit code; 0 without it
    <!-- run columns=140: COMMAND -->        on a wider terminal
    <!-- run quiet: COMMAND -->              is run for what it leaves behind, and not shown

The commands of a page run in one temporary folder, in their order. `<!-- options: VERB -->` (a verb, `run`, or a model
family) is no block: `docs/hooks.py` puts the options table there whenever the docs are built, and refuses options that
do not exist.
"""

import datetime
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.text import Text

from meshwright.api.checkpoints import ACTIONS
from meshwright.cli.verbs import kind_of

DOCS = Path(__file__).parent
ROOT = DOCS.parent
COLUMNS = 120
"""Width of the terminal that the commands see."""
CACHE = Path(tempfile.gettempdir()) / "meshwright-docs-cache"
"""Cache of the commands: token files, compiled programs, proofs."""

VERBS = (
    "train",
    "finetune",
    "evaluate",
    "generate",
    "tokenize",
    "convert",
    "show",
    "plan",
    "prove",
    "launch",
    "doctor",
    "rehearse",
    "parity",
    "view",
    "bench",
    *(f"checkpoint {action}" for action in ACTIONS),
)
"""Verbs with options, and the actions of `checkpoint`."""

FAMILIES = {
    "arcee": ("meshwright.models.families.arcee", "Arcee"),
    "cohere": ("meshwright.models.families.cohere", "Cohere"),
    "cohere2": ("meshwright.models.families.cohere", "Cohere2"),
    "deepseek": ("meshwright.models.families.deepseek", "Deepseek"),
    "deepseek_sparse": ("meshwright.models.families.deepseek_sparse", "DeepseekSparse"),
    "gemma2": ("meshwright.models.families.gemma", "Gemma2"),
    "gemma3": ("meshwright.models.families.gemma", "Gemma3"),
    "gemma4": ("meshwright.models.families.gemma4", "Gemma4"),
    "glm4_moe": ("meshwright.models.families.glm4_moe", "Glm4Moe"),
    "gpt2": ("meshwright.models.families.gpt2", "Gpt2"),
    "gpt_oss": ("meshwright.models.families.gpt_oss", "GptOss"),
    "granite": ("meshwright.models.families.granite", "Granite"),
    "granite_hybrid": ("meshwright.models.families.granite_hybrid", "GraniteHybrid"),
    "granite_moe": ("meshwright.models.families.granite", "GraniteMoe"),
    "hunyuan": ("meshwright.models.families.hunyuan", "Hunyuan"),
    "kimi_linear": ("meshwright.models.families.kimi_linear", "KimiLinear"),
    "llama": ("meshwright.models.families.llama", "Llama"),
    "llama4": ("meshwright.models.families.llama4", "Llama4"),
    "ministral3": ("meshwright.models.families.ministral3", "Ministral3"),
    "mistral4": ("meshwright.models.families.mistral4", "Mistral4"),
    "mixtral": ("meshwright.models.families.mixtral", "Mixtral"),
    "nemotron_h": ("meshwright.models.families.nemotron_h", "NemotronH"),
    "olmo3": ("meshwright.models.families.olmo3", "Olmo3"),
    "qwen2_moe": ("meshwright.models.families.qwen2_moe", "Qwen2Moe"),
    "qwen3_5": ("meshwright.models.families.qwen3_5", "Qwen35"),
    "qwen3_5_moe": ("meshwright.models.families.qwen3_5", "Qwen35Moe"),
    "qwen3_next": ("meshwright.models.families.qwen3_next", "Qwen3Next"),
    "smollm3": ("meshwright.models.families.smollm3", "SmolLM3"),
}

TERMINALS = {
    "train.svg": "meshwright train --out runs/tiny",
    "show.svg": "meshwright show llama3-70b --mesh fsdp=64,tensor=8",
    "prove.svg": "meshwright prove tiny --mesh data=2,fsdp=2,tensor=2",
}
"""Picture of a terminal -> its command."""

_MARK = re.compile(r"^(?P<indent> *)<!-- run(?P<how>[^:\n]*): (?P<what>[^\n]*?) -->\n.*?<!-- end -->", re.S | re.M)
_WAITING = re.compile(r"^meshwright [a-z]+: .*\.\.\.\n", re.M)
"""What a command says on standard error where it has printed nothing for a second: on a busy machine."""
_OPTIONS = re.compile(r"^<!-- options: (?P<name>[a-z0-9_ ]+) -->$", re.M)


@dataclass(frozen=True)
class Block:
    """Mark of a page: what to run, and how to show it."""

    what: str
    how: dict[str, str]


def block_of(match: re.Match[str]) -> Block:
    """Parses a mark."""
    how = dict(pair.partition("=")[::2] for pair in shlex.split(match["how"]))
    return Block(match["what"], how)


def mark_of(block: Block) -> str:
    """Formats a mark."""
    how = "".join(f" {key}={shlex.quote(value)}" if value else f" {key}" for key, value in block.how.items())
    return f"<!-- run{how}: {block.what} -->\n"


def options_table(name: str) -> str:
    """Returns the options of a verb, of `run`, or of a model family, as a Markdown table."""
    rows = ["| option | default | description |", "|---|---|---|"]
    for names, default, doc in option_rows(name):
        rows.append(f"| {names} | {default} | {doc} |")
    return "\n".join(rows) + "\n"


def option_rows(name: str) -> Iterator[tuple[str, str, str]]:
    """Yields names with the values they take, default, and description, each as Markdown."""
    from meshwright.cli.explain import format_value
    from meshwright.cli.parse import Option

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    def default_of(option: Option) -> str:
        if option.default is tyro.MISSING:
            return "required"
        return "" if option.default in (None, (), "", False) else f"`{format_value(option.default)}`"

    for option in options_named(name):
        names, choices = ", ".join(f"`{name}`" for name in option.names), option.choices
        metavar = "" if option.positional or choices or not option.metavar else f" `{option.metavar}`"
        doc = f"{option.doc} One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else option.doc
        yield names + metavar, cell(default_of(option)), cell(doc)


def options_named(name: str) -> list[Any]:
    """Returns the options of a verb without those of its Run, of `run`, or of a model family."""
    from meshwright.cli.parse import options_of
    from meshwright.runs.run import Run

    if name == "run":
        return [option for option in options_of(Run) if not option.names[-1].startswith("--model")]
    if name in FAMILIES:
        module, kind = FAMILIES[name]
        owner = getattr(importlib.import_module(module), kind)
        return list(options_of(owner, prefix="model.", group="model", parts=True))
    verb, _, action = name.partition(" ")
    return [
        option
        for option in options_of(ACTIONS[action] if action else kind_of(verb))
        if option.path[0] != "run" and option.names[-1] != "--"
    ]


def capture(command: str, folder: Path, code: int, columns: int = COLUMNS) -> str:
    """Runs a command in `folder` and returns what it prints. Raises SystemExit where its exit code is not `code`."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": str(columns)}
    env |= {"DOCS": str(DOCS), "MESHWRIGHT_CACHE": str(CACHE)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != code:
        raise SystemExit(f"{command}\nends with {done.returncode}, not {code}:\n{done.stdout[-3000:]}")
    return _WAITING.sub("", done.stdout.replace(f"{folder}/", ""))


def trimmed(text: str, how: dict[str, str]) -> str:
    """Returns the lines of an output that are shown."""
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    if "from" in how:
        first = next((i for i, line in enumerate(lines) if how["from"] in line), None)
        if first is None:
            raise SystemExit(f"no line holds {how['from']!r}:\n{text}")
        lines = lines[first:]
    if "lines" in how:
        head, _, tail = how["lines"].partition(",")
        keep = int(head), int(tail or 0)
        if len(lines) > sum(keep):
            lines = [*lines[: keep[0]], "...", *(lines[-keep[1] :] if keep[1] else [])]
            lines = lines[:-1] if "from" in how and not keep[1] else lines
    return "\n".join(lines)


def shown(block: Block, folder: Path, page: Path) -> str:
    """Runs the command of a block and returns it with its output, as Markdown; empty where it is not shown."""
    print(f"{page.name}: {block.what}", file=sys.stderr, flush=True)
    columns = int(block.how.get("columns", COLUMNS))
    output = capture(block.what, folder, int(block.how.get("exit", "0")), columns)
    if "once" in block.how:
        block.how["once"] = datetime.date.today().isoformat()
    if "quiet" in block.how:
        return ""
    # `(A & B; wait)` shows as two commands.
    commands = block.what.removeprefix("(").removesuffix("; wait)").replace(" & ", " &\n$ ")
    text = f"$ {commands}\n{trimmed(output, block.how)}".rstrip()
    return f"\n```console\n{text}\n```\n\n"


def with_options_tables(markdown: str) -> str:
    """Returns a page with its options tables, which are made from the program."""
    return _OPTIONS.sub(lambda match: options_table(match["name"]), markdown)


def rebuild(page: Path, *, once: bool) -> None:
    """Rewrites the blocks of a page. once: also those that take minutes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def replace(match: re.Match[str]) -> str:
            block = block_of(match)
            if "once" in block.how and not once:
                return match[0]
            body = shown(block, folder, page)
            lines = f"{mark_of(block)}{body}<!-- end -->".splitlines()
            return "\n".join(f"{match['indent']}{line}".rstrip() for line in lines)

        old = page.read_text(encoding="utf-8")
        new = _MARK.sub(replace, old)
    shutil.rmtree(CACHE / "calibration", ignore_errors=True)  # of `bench`, which would add predictions to other pages
    if new != old:
        page.write_text(new, encoding="utf-8")


def draw_terminal(image: Path, command: str) -> None:
    """Draws a command and its output as an SVG."""
    with tempfile.TemporaryDirectory() as folder:
        # Where libtpu is installed and there is no TPU, it warns on every start. `train` has a live line on a terminal,
        # whose control codes are no part of a picture.
        styled = f"JAX_PLATFORMS=cpu {'' if ' train ' in command else 'FORCE_COLOR=1 '}{command}"
        output = capture(styled, Path(folder), 0)
    lines = Text.from_ansi(output.rstrip())
    console = Console(record=True, width=max(map(len, lines.plain.splitlines())), file=io.StringIO())
    console.print(lines, soft_wrap=True)
    picture = console.export_svg(title=command, font_aspect_ratio=0.61)
    # The picture loads nothing: a reader's own monospaced font will do.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S)
    image.write_text(re.sub(r"<!-- Generated.*?-->", "", picture), encoding="utf-8")


def pages() -> list[Path]:
    """Returns the pages that hold a mark."""
    return [page for page in sorted(DOCS.rglob("*.md")) if _MARK.search(page.read_text(encoding="utf-8"))]


def main(args: list[str]) -> None:
    """Rewrites pages, or draws pictures."""
    if args[:1] == ["--pictures"]:
        for image in args[1:] or TERMINALS:
            print(image, file=sys.stderr, flush=True)
            draw_terminal(DOCS / "img" / image, TERMINALS[image])
        return
    flags, names = {a for a in args if a.startswith("--")}, [a for a in args if not a.startswith("--")]
    for page in [Path(name).resolve() for name in names] or pages():
        rebuild(page, once="--once" in flags)


if __name__ == "__main__":
    main(sys.argv[1:])
