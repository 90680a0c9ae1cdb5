"""Recipes by name: Python functions that return a complete Run, kept outside the package."""

import ast
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from meshwright.errors import ConfigError, MeshwrightError, describe_failure, nearest
from meshwright.plugins import is_reference, load, load_file

if TYPE_CHECKING:
    from meshwright.runs.run import Run


def recipes_folder() -> Path:
    """Returns the folder of recipes: beside `src` in a checkout, inside the package in a wheel."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def list_recipes() -> dict[str, str]:
    """Returns the first line of every recipe's docstring, by name. Reads the files, and imports none of them.

    Example:
        >>> mw.recipes()["llama3-70b"]
        'Llama 3 70B (arXiv:2407.21783, table 3).'
    """
    return {name: summary for name, (_, summary) in _catalogue().items()}


def _catalogue() -> dict[str, tuple[Path, str]]:
    """Returns the file and the summary of every recipe, by name."""
    return {
        _recipe_name(node.name): (file, (ast.get_docstring(node) or "").partition("\n")[0])
        for file in sorted(recipes_folder().glob("*.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def _recipe_name(function: str) -> str:
    return function.replace("_", "-")


def find_recipe(name: str) -> "Run":
    """Builds the Run of a recipe: a name, FILE.py, FILE.py:FUNCTION, module:function, or hf:PATH of a model's folder.

    Raises ConfigError with the nearest name, or with the failure of a recipe's own code.
    """
    try:
        return _checked(name, _builder(name)())
    except MeshwrightError:
        raise
    except Exception as error:
        raise ConfigError(f"recipe {name}", f"it {describe_failure(error)}", "correct the recipe") from error


def _builder(name: str) -> "Callable[[], Run]":
    """Returns the function of a recipe. Raises ConfigError where there is none."""
    if name.startswith("hf:"):
        from meshwright.runs.hugging_face import run_of_hugging_face  # a recipe of Meshwright's own needs none of it

        return functools.partial(run_of_hugging_face, name)
    path, colon, function = name.partition(":")
    if path.endswith(".py"):
        return _in_file(Path(path), function if colon else None)
    if is_reference(name):
        builder: Callable[[], Run] = load("recipe", name)
        return builder
    catalogue = _catalogue()
    if name not in catalogue:
        raise ConfigError(f"recipe {name!r}", "there is no recipe of that name", nearest(name, catalogue))
    return _functions(load_file(catalogue[name][0]))[name]


def _in_file(file: Path, function: str | None) -> "Callable[[], Run]":
    if not file.is_file():
        raise ConfigError(f"recipe {file}", "there is no such file", "a recipe's name, or FILE.py:FUNCTION")
    functions = _functions(load_file(file))
    name = _recipe_name(function) if function else next(iter(functions), None)
    if name is None or name not in functions:
        raise ConfigError(f"recipe {file}:{function}", "it has no such function", nearest(name or "", functions))
    return functions[name]


def _checked(name: str, built: object) -> "Run":
    from meshwright.runs.run import Run

    if not isinstance(built, Run):
        raise ConfigError(f"recipe {name}", f"it returned {type(built).__name__}", "return a Run")
    return built


def _functions(module: ModuleType) -> "dict[str, Callable[[], Run]]":
    """Returns the public functions defined in a module, in their order, by recipe name."""
    return {
        _recipe_name(name): value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
