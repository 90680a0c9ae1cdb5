"""The verb `recipes`: the recipes by name."""

import shutil
from collections.abc import Sequence

from meshwright.cli.main import VERBS
from meshwright.cli.output import write, write_json, write_table
from meshwright.errors import ConfigError
from meshwright.runs.catalogue import list_recipes


def main(args: Sequence[str]) -> int:
    """Prints the name of every recipe and the first line of its description."""
    if "-h" in args or "--help" in args:  # without tyro, whose import takes longer than the answer
        write(f"usage: meshwright recipes [options]\n\n{VERBS['recipes']}\n\noptions:\n  --json  Print JSON.\n")
        return 0
    for arg in args:
        if arg != "--json":
            raise ConfigError(f"meshwright recipes {arg}", "recipes has one option, --json", "meshwright recipes")
    recipes = list_recipes()
    if args:
        write_json(recipes)
    else:
        write_table(recipes, shutil.get_terminal_size((120, 24)).columns)
    return 0
