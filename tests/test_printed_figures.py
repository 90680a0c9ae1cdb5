"""Figures that pages print are those of today: every command of arithmetic (plan, show, launch, recipes) runs again.

Such a page has an owner: whoever changes the planner, a chip or a kernel runs `python docs/terminal.py`, which writes the
blocks anew. Commands that train or compile are left to that program; the ladder has a test of its own (seeds/).
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.errors import MeshwrightError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import terminal  # noqa: E402

_ARITHMETIC = ("plan", "show", "launch", "recipes")
_TOOK = re.compile(r"\d+(\.\d+)? m?s\b(?= *$)|(?<=priced in )\S+ s|(?<=plans in )\S+ s", re.M)
"""Times that a command itself took."""


def blocks() -> dict[str, tuple[terminal.Block, str, str]]:
    """Returns the blocks of arithmetic by page and command, each with what its page shows and its indentation."""
    found = {}
    for page in terminal.pages():
        for match in terminal._MARK.finditer(page.read_text(encoding="utf-8")):
            block = terminal.block_of(match)
            words = block.what.split()
            if "quiet" in block.how or words[:1] != ["meshwright"] or words[1] not in _ARITHMETIC:
                continue
            name = f"{page.relative_to(ROOT / 'docs')}: {' '.join(words[1:4])} {len(found)}"
            found[name] = (block, match[0], match["indent"])
    return found


BLOCKS = blocks()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BLOCKS)
def test_a_page_prints_what_its_command_prints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block, page, indent = BLOCKS[name]
    monkeypatch.setenv("COLUMNS", block.how.get("columns", str(terminal.COLUMNS)))
    # Files that `docs/adding.md` shows lie there; what a command writes must not.
    folder = ROOT / "tests" / "outside" / "extensions" if ".py:" in block.what else tmp_path
    monkeypatch.chdir(folder)
    code = 0
    try:
        code = run(shlex.split(block.what)[1:])
        printed = capsys.readouterr().out
    except MeshwrightError as error:
        code = error.exit_code
        printed = f"{capsys.readouterr().out}error: {error}\n"
    assert code == int(block.how.get("exit", "0"))
    now = terminal.trimmed(printed.replace(f"{folder}/", ""), block.how).splitlines()
    lines = [line.removeprefix(indent) for line in page.splitlines()]
    then = lines[lines.index("```console") + 2 : len(lines) - 1 - lines[::-1].index("```")]
    assert [_TOOK.sub("-", line) for line in now] == [_TOOK.sub("-", line) for line in then]


def test_pages_have_commands_of_arithmetic() -> None:
    assert len(BLOCKS) >= 15
