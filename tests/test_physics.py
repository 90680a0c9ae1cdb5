"""The planner prices one step: its constants are documented, and it knows no other program."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_programs import SOFTWARE, Software

from meshwright.planner import physics
from meshwright.planner.physics import Physics

PLANNER = Path(physics.__file__).parent


def documented(source: str, name: str) -> dict[str, str]:
    """Fields of a class, and the string below each."""
    tree = ast.parse(source)
    body = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name).body
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[node.target.id] = str(after.value.value) if is_text else ""
    return found


UNIT = re.compile(
    r"[Ss]econds|bytes|Bytes|[Cc]opies|over what|over the|Launches|[Ff]raction|Most|Arrays"
)


def test_each_constant_says_its_unit() -> None:
    texts = documented(Path(physics.__file__).read_text(encoding="utf-8"), "Physics")
    assert texts.keys() == {field.name for field in dataclasses.fields(Physics)}
    for name, text in texts.items():
        assert UNIT.search(text), f"{name}: {text or 'no text below it'}"


def names_of(tree: ast.AST) -> Iterator[str]:
    """Every name that a module binds, reads or imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.alias(name=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


OTHERS = re.compile(r"software|other_program|megatron|maxtext|torchtitan|transformer_engine", re.I)


@pytest.mark.parametrize("file", sorted(PLANNER.glob("*.py")), ids=lambda file: file.stem)
def test_the_planner_knows_no_other_program(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert not [name for name in names_of(tree) if OTHERS.search(name)]


def test_each_knob_of_another_program_is_read_in_the_bench() -> None:
    """A knob that nothing reads would change no price, and one that only the planner reads cannot be."""
    source = (Path(__file__).parents[1] / "bench/foresight/other_programs.py").read_text("utf-8")
    for field in dataclasses.fields(Software):
        if field.name != "name":
            assert re.search(rf"(self|program)\.{field.name}\b", source), field.name
    assert all(isinstance(program, Software) for program in SOFTWARE.values())
