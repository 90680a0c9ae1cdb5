"""The help of a verb, and the errors of command lines that cannot be parsed."""

import difflib
import inspect
import re
import shutil
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from meshwright.errors import ConfigError
from meshwright.words import AXES, AXIS_ALIASES

if TYPE_CHECKING:
    from meshwright.cli.parse import Option

COMMON = (
    "--out",
    "--on",
    "--mesh",
    "--steps",
    "--batch",
    "--seq",
    "--lr",
    "--data",
    "--devices",
    "--resume",
)
"""Options that the help lists first, in this order, where a verb has them."""
_TABLE = tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text(encoding="utf-8"))
OPTIONS, SETTINGS, AXIS_OPTIONS, AXIS_NAMES = (
    {name: ours for ours, names in table.items() for name in names.split()}
    for table in (_TABLE["options"], _TABLE["settings"], _TABLE["mesh"], AXIS_ALIASES)
)
MESH_OPTIONS = AXIS_NAMES | AXIS_OPTIONS
"""Option of another trainer that gives the degree of one mesh axis -> the axis."""
_COLUMN = 30
"""Column of the help at which descriptions begin."""
_CLOSE = 0.75
"""Similarity of names from which one is taken for a slip of the other; below, unrelated words meet
by chance."""
_RECIPE_OPTIONS = ("model", "recipe", "preset", "model_name", "model_name_or_path")
"""Options of other trainers for what is the first argument here."""


def format_help(usage: str, kind: type, options: Sequence["Option"]) -> str:
    """Formats the help of a verb.

    Common options come first, then the verb's own, the Run's and those of its parts.
    """
    options = [option for option in options if not option.of_another_verb]
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    common = [option for name in COMMON for option in options if name in option.names]
    groups: dict[str, list[Option]] = {
        "arguments": [],
        "common options": common,
        "options": [],
        "run options": [],
    }
    for option in options:
        if option not in common:
            title = "arguments" if option.positional else f"{option.group} options".strip()
            groups.setdefault(title, []).append(option)
    text = [
        f"usage: {usage}",
        "",
        textwrap.fill(inspect.cleandoc(kind.__doc__ or "").replace("\n", " "), width),
    ]
    for title, members in groups.items():
        text += ["", f"{title}:"] if members else []
        for option in members:
            left = (
                "  "
                + ", ".join(option.names)
                + ("" if option.positional else f" {option.metavar}".rstrip())
            )
            default = (
                "(required)"
                if option.default is tyro.MISSING
                else f"(default: {format_value(option.default)})"
            )
            doc = (
                option.doc if option.default in (None, (), "", False) else f"{option.doc} {default}"
            )
            lines = textwrap.wrap(doc, width - _COLUMN, break_long_words=False) or [""]
            text.append(
                f"{left:<{_COLUMN}}{lines.pop(0)}".rstrip() if len(left) < _COLUMN - 1 else left
            )
            text += [" " * _COLUMN + line for line in lines]
    return "\n".join(text)


def format_value(value: Any) -> str:
    """Formats a default as it is typed."""
    if isinstance(value, tuple):
        return " ".join(map(format_value, value))
    return repr(value) if isinstance(value, str) and value != value.strip() else str(value)


def refused_error(
    command: str, text: str, by_name: dict[str, "Option"], given: dict["Option", list[str]]
) -> ConfigError:
    """Builds the error for what tyro refuses; the first paragraph of its box is the reason."""
    lines = [line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    if len(lines) > 1 and lines[1].startswith("--") and not lines[1].strip("-"):
        lines = lines[
            2:
        ]  # a terminal without the characters of a box: its title, and a line below it
    end = len(lines)
    for number, line in enumerate(lines):
        if line.startswith(("──", "--")) and not line.strip("─-"):
            end = number
            break
    truth = re.sub(r" ?\(required\)|\[/?bold\]", "", " ".join(" ".join(lines[:end]).split()))
    named = [
        name
        for name in by_name
        if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", truth, re.IGNORECASE)
    ]
    if not named:
        return ConfigError(command, truth, f"{command} --help")
    name = min(named, key=lambda name: not name.startswith("--"))
    option = by_name[name]
    legal, wrong = (
        option.metavar,
        (re.findall(r"'([^']*)'", truth) or [""])[0 if option.choices else -1],
    )
    if option.choices:
        near = difflib.get_close_matches(wrong, option.choices, n=1, cutoff=0.4)
        if near:
            legal = near[0]
        elif option.positional:
            legal = ", or ".join(option.choices)
    asked = [command, *([] if option.positional else [name]), *given.get(option, [])]
    return ConfigError(" ".join(asked), truth, f"{command if option.positional else name} {legal}")


def stray_error(
    command: str, token: str, args: Sequence[str], options: Sequence["Option"]
) -> ConfigError:
    """Builds the error for a word that belongs to no option."""
    asked, rest = f"{command} {' '.join(args)}", list(args)
    rest.remove(token)
    axis = token.partition("=")[0]
    if "--mesh" in args and axis in AXES:
        mesh = args[args.index("--mesh") + 1]
        truth = f"{token!r} belongs to no option: a mesh is one word, its axes with commas between"
        return ConfigError(asked, truth, f"--mesh {mesh},{token}")
    takes_recipe = any(option.group == "run" for option in options)
    if not takes_recipe:
        truth = f"{token!r} belongs to no option, and the verb takes no further word"
        return ConfigError(asked, truth, f"leave {token!r} out")
    if args[0] == token:  # the recipe was read before the options
        truth = f"{token!r} belongs to no option, and a recipe was given before it"
        return ConfigError(f"{command} RECIPE {' '.join(args)}", truth, f"leave {token!r} out")
    fix = f"{' '.join([command, token, *rest])}, or leave it out"
    return ConfigError(
        asked, f"{token!r} belongs to no option; a recipe comes before the options", fix
    )


def unknown_error(
    command: str, name: str, values: Sequence[str], by_name: dict[str, "Option"]
) -> ConfigError:
    """Builds the error for an unknown option, with the one that was probably meant."""
    asked, because = " ".join([command, name, *values]), f"there is no option {name}"
    word = name.lstrip("-").replace("-", "_").lower()
    last = word.rpartition(".")[2]
    candidates = [name.replace("_", "-"), *_candidates(word, last, values)]
    meant = next((meant for meant in candidates if meant.split()[0] in by_name), None)
    if meant in by_name and by_name[meant].of_another_verb:
        field = ".".join(by_name[meant].path[1:])
        fix = f"meshwright finetune, which has it, or {field} in a recipe of your own"
        return ConfigError(asked, f"{because} in this verb", fix)
    if last in _RECIPE_OPTIONS and any(option.group == "run" for option in by_name.values()):
        recipe = values[0] if values else "RECIPE"
        return ConfigError(asked, because, f"{command} {recipe}: a recipe is the first argument")
    known = {
        key: option
        for key, option in by_name.items()
        if not option.of_another_verb and key.startswith("--")
    }
    if meant is not None:
        option = by_name[meant.split()[0]]
        example = meant if " " in meant or not option.metavar else " ".join([meant, *values])
        return ConfigError(asked, because, f"did you mean {example}?{option.gist}")
    names = {key.lstrip("-").replace("-", "_"): key for key in known}
    ends = {key.rpartition(".")[2]: key for key in names}
    for text, keys in ((word, names), (last, ends)):
        for close in difflib.get_close_matches(text, keys, n=1, cutoff=_CLOSE):
            meant = names[close if keys is names else ends[close]]
            return ConfigError(asked, because, f"did you mean {meant}?{known[meant].gist}")
    return ConfigError(asked, because, f"{command} --help, which lists all options")


def _candidates(word: str, last: str, values: Sequence[str]) -> list[str]:
    """Returns the options that `word` of another trainer may mean here, the likeliest first."""
    candidates = []
    if (
        last in MESH_OPTIONS
        and (not values or values[0].isdigit())
        and (values or last not in SETTINGS)
    ):
        candidates.append(f"--mesh {MESH_OPTIONS[last]}={values[0] if values else 'N'}")
    candidates += [
        table[key] for table in (SETTINGS, OPTIONS) for key in (word, last) if key in table
    ]
    sections = ("model", "training", "optimizer", "data")
    return [*candidates, *(f"--{section}.{last.replace('_', '-')}" for section in sections)]
