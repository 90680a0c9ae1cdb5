"""Recipes by name, read from their files; nothing is imported for it."""

import ast
import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def list_recipes() -> dict[str, str]:
    """Returns the first line of every recipe's docstring, by name.

    Families come in order, each from small to large.
    Reads the files, and imports none of them.

    Example:
        >>> mw.recipes()["llama3-70b"]
        'Llama 3 70B: 70.6 B parameters (arXiv:2407.21783, table 3).'
    """
    summaries = {name: summary for name, (_, summary) in catalogue().items()}
    ordered = sorted(summaries, key=lambda name: (_family(name), parameters_of(summaries[name])))
    return {name: summaries[name] for name in ordered}


def matching(recipes: dict[str, str], words: Sequence[str]) -> dict[str, str]:
    """Returns the recipes whose name or summary contains every one of some words, in any case."""
    found = {}
    for name, summary in recipes.items():
        text = f"{name} {summary}".lower()
        if all(word.lower() in text for word in words):
            found[name] = summary
    return found


def families(recipes: Iterable[str]) -> list[str]:
    """Returns the letters that the names of recipes begin with, each once."""
    return list(dict.fromkeys(map(_family, recipes)))


_SIZE = re.compile(r"([\d.]+) ([MBT]) parameters")


def size_of(summary: str) -> str:
    """Returns the parameters of a model as its summary states them: `8.03 B`.

    Raises ValueError where it does not.
    """
    stated = _SIZE.search(summary)
    if stated is None:
        raise ValueError(f"a recipe's first line states its size, `8.03 B parameters`: {summary!r}")
    return f"{stated[1]} {stated[2]}"


def parameters_of(summary: str) -> float:
    """Returns the parameters of a model as a number."""
    number, unit = size_of(summary).split()
    return float(number) * {"M": 1e6, "B": 1e9, "T": 1e12}[unit]


def _family(name: str) -> str:
    """Returns the letters that a name begins with: `llama` of `llama31-8b`."""
    letters = re.match(r"[a-z]+", name)
    return letters[0] if letters else name


def catalogue() -> dict[str, tuple[Path, str]]:
    """Returns the file and the summary of every recipe, by name.

    Recipes are in the package, or beside `src`.
    """
    package = Path(__file__).parents[1]
    folder = package / "recipes"
    return {
        recipe_name(node.name): (file, (ast.get_docstring(node) or "").partition("\n")[0])
        for file in sorted(
            (folder if folder.is_dir() else package.parents[1] / "recipes").glob("*.py")
        )
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def recipe_name(function: str) -> str:
    """Returns the name of the recipe that a function builds."""
    return function.replace("_", "-")
