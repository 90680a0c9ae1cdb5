"""The examples of the public API run, and every public function and class has one."""

import ast
import doctest
import importlib
import inspect
import types
from pathlib import Path

import pytest

import meshwright as mw

NAMES = [name for name in mw.__all__ if not name.startswith("__")]


def examples_of(name: str) -> list[doctest.DocTest]:
    """Docstrings with examples: of the object itself, of its methods, and of the functions of a module."""
    return [test for test in doctest.DocTestFinder().find(getattr(mw, name), name) if test.examples]


@pytest.mark.parametrize("name", [name for name in NAMES if examples_of(name)])
def test_the_examples_of_a_docstring_run(name: str, cache: Path) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False
    )
    for example in examples_of(name):
        example.globs = {**example.globs, "mw": mw, "tmp": cache}
        runner.run(example, out=report.append)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(mw, name)
    assert value.__doc__, f"mw.{name} has no docstring"
    error = inspect.isclass(value) and issubclass(value, mw.MeshwrightError)
    if not error and not isinstance(value, types.ModuleType):
        assert ">>>" in value.__doc__, f"the docstring of mw.{name} has no example"


def test_type_checkers_see_what_is_loaded() -> None:
    """The imports under TYPE_CHECKING in `__init__.py` are the table from which names are loaded when first used."""
    tree = ast.parse(inspect.getsource(mw))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname or alias.name: getattr(importlib.import_module(node.module), alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert imported == {name: getattr(mw, name) for name in NAMES}
    assert dir(mw) == sorted(mw.__all__) == mw.__all__
