"""Fixes that errors print: every option in the source of one is an option that some verb has, with a legal value."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from printed_fixes import HOLE, wrong_commands, wrong_in

import meshwright
from meshwright.cli.explain import refused_error
from meshwright.cli.main import run
from meshwright.errors import ConfigError, MeshwrightError

SOURCE = Path(meshwright.__file__).parent


def text_of(node: ast.AST) -> str:
    """Text of a string expression; what is computed is a hole."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)} ; {text_of(node.orelse)}"
    return HOLE


def fixes_in(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every fix: third argument of an error or of a case of `refuse`, and what is called `fix`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id.endswith("Error") and len(node.args) == 3:
                yield node.lineno, text_of(node.args[2])
            for case in node.args if node.func.id == "refuse" else ():
                if isinstance(case, ast.Tuple) and len(case.elts) == 4:
                    yield node.lineno, text_of(case.elts[3])
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "fix" for target in targets):
                yield node.lineno, text_of(node.value)


@pytest.mark.parametrize("room", sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
def test_every_option_in_a_fix_is_one_that_a_verb_takes(room: str) -> None:
    wrong: list[str] = []
    for file in sorted((SOURCE / room).rglob("*.py")):
        for line, text in fixes_in(file):
            wrong += [f"{file.relative_to(SOURCE)}:{line}: {each}" for each in wrong_in(text)]
    assert not wrong, "\n".join(wrong)


def test_the_other_trainers_words_lead_to_options_that_parse() -> None:
    from meshwright.cli.explain import OPTIONS, SETTINGS

    for meant in {*OPTIONS.values(), *SETTINGS.values()}:
        # A field that the command line does not have is answered by its place in run.json.
        assert not [wrong for wrong in wrong_in(meant) if "is a field" not in wrong]


MISTAKES: dict[str, tuple[str, str]] = {
    "a mesh in two words": ("train --mesh fsdp=2 tensor=2", "--mesh fsdp=2,tensor=2"),
    "epochs": ("train --epochs 3", "--steps 1000"),
    "an unrelated word": ("train --cache x", "--help"),
    "a file in the place of a recipe": ("train {file}", "--data {file}"),
    "a data set by the name of a model": (
        "tokenize hf:wikitext --out {folder}/tokens",
        "hf://datasets/OWNER/wikitext",
    ),
    "a bad conversation": (
        "finetune tiny --init-from {folder} --data {file} --data.tokenizer bytes --devices 8",
        "repair it",
    ),
}
"""What a new user types -> what the fix has to hold."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_by_what_works(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("{not JSON\n", encoding="utf-8")
    command, fix = (text.format(file=file, folder=tmp_path) for text in MISTAKES[name])
    with pytest.raises(MeshwrightError) as refused:
        run(command.split())
    assert fix in refused.value.fix
    assert "--process" not in refused.value.fix
    assert "bad-records" not in refused.value.fix or name != "a bad conversation"


def test_a_rule_is_proposed_for_a_matrix() -> None:
    import numpy as np

    import meshwright as mw
    from meshwright.runs.placed_run import place_run

    params: Any = {"bias": np.zeros(4, np.float32), "w": np.zeros((4, 4), np.float32)}

    def loss(p: Any, batch: Any) -> Any:
        return (batch @ p["w"] + p["bias"]).mean()

    model = mw.wrap(params, loss, lambda step: np.ones((8, 4), np.float32))
    with pytest.raises(ConfigError) as refused:
        place_run(model.run(mesh="tensor=2"))
    assert "rules={'w': (None, 'tensor')}" in refused.value.fix


def test_a_number_that_a_range_refuses_is_found() -> None:
    assert list(wrong_in("--training.remat wrong")) and list(wrong_in("--no-such-option 3"))
    assert list(wrong_in("--batch 0"))
    assert not list(wrong_in(f"--batch {HOLE} or --seq 128"))


def test_commands_in_a_fix_are_parsed() -> None:
    assert list(wrong_commands("meshwright tokenize hf://datasets/A/B"))  # without --out
    assert list(wrong_commands("`meshwright tokenize TEXT --outt FOLDER` and --data FOLDER"))
    assert not list(wrong_commands("`meshwright tokenize TEXT --out s3://BUCKET/A` and --data A"))
    assert not list(wrong_commands("meshwright train --help, which lists all options"))


def test_a_box_without_its_characters_is_read_alike() -> None:
    lines = ["Missing from meshwright bench:", "  WHAT", "For full helptext, run:"]
    width = max(map(len, lines))
    plain = [" Required options", f" {'-' * width}", f"  {lines[0]}", f"  {lines[1]}"]
    boxed = ["╭─ Required options ─╮", f"│ {lines[0]} │", f"│ {lines[1]} │"]
    for rule, shown in (("-", plain), ("─", boxed)):
        text = "\n".join([*shown, f"  {rule * width}", f"  {lines[2]}"])
        error = refused_error("meshwright bench", text, {}, {})
        assert error.truth == "Missing from meshwright bench: WHAT"
