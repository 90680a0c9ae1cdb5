"""Recipes by name, read from their files; nothing is imported for it."""

import ast
from pathlib import Path


def list_recipes() -> dict[str, str]:
    """Returns the first line of every recipe's docstring, by name. Reads the files, and imports none of them.

    Example:
        >>> mw.recipes()["llama3-70b"]
        'Llama 3 70B (arXiv:2407.21783, table 3).'
    """
    return {name: summary for name, (_, summary) in catalogue().items()}


def catalogue() -> dict[str, tuple[Path, str]]:
    """Returns the file and the summary of every recipe, by name. Recipes are in the package, or beside `src`."""
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
