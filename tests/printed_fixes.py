"""Fixes of errors as the command line reads them: their options, values and whole commands."""

import functools
import re
from collections.abc import Iterator, Mapping

from meshwright.cli.main import VERBS
from meshwright.cli.parse import Option, options_of
from meshwright.cli.verbs import kind_of, parse_verb
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.models.families import find_family
from meshwright.plugins import PARTS
from meshwright.ranges import check_words

HOLE = "\0"
"""Stands in a text for what is known when the error is raised."""
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*(?:\.[a-z0-9-]+)*)(?:[ =]([^\s;)`]+))?")
NOT_OURS = (
    *("--help", "--local-dir", "--no-deps", "--repo-type", "--revision", "--shm-size", "--version"),
)
"""Options of other programs that fixes name, and of every verb."""
WORDS = ("or", "and", "in", "with", "to", "is", "out")
"""Words that follow an option in a sentence."""
COMMAND = re.compile(
    rf"(?<![\w-])meshwright ({'|'.join(VERBS)})\b((?: (?!or |and |to |which )[^\s`;,()]*[^\s`;,:()])*)"
)
"""A command in a text, as far as the sentence goes on."""
PLACES = {"PATH": ".", "AXIS=N": "fsdp=2"}
"""Values for what a fix leaves to its reader."""


@functools.cache
def known_options() -> dict[str, Option]:
    """Every option that some verb takes with some model family, by each of its names."""
    found: dict[str, Option] = {}
    for verb in VERBS:
        if verb == "recipes":
            continue
        kinds = kind_of(verb)
        for kind in kinds.values() if isinstance(kinds, Mapping) else (kinds,):
            for option in options_of(kind, parts=True):
                found |= dict.fromkeys(option.names, option)
    for family in PARTS["model family"]:
        for option in options_of(find_family(family), prefix="model.", parts=True):
            found |= dict.fromkeys(option.names, option)
    return found


def wrong_in(text: str) -> Iterator[str]:
    """What a fix gets wrong: an option that there is not; a value it refuses."""
    for found in OPTION.finditer(text):
        name, value = found[1], (found[2] or "").rstrip(".,:")
        option = known_options().get(name)
        if name in NOT_OURS or text[found.end(1) :].startswith((HOLE, f".{HOLE}")):
            continue
        if option is None:
            yield f"no verb has {name}"
        elif value and HOLE not in value and re.match(r"[\d.]+$", value):
            if option.numbers is not None:
                try:
                    check_words(name, [value], option.numbers, option.default)
                except ConfigError as refused:
                    yield str(refused)
        elif value.isidentifier() and option.choices and value not in (*option.choices, *WORDS):
            yield f"{name} takes {option.choices}, not {value}"


def wrong_commands(text: str) -> Iterator[str]:
    """What the parser of a verb says to the commands in a fix, where it does not take them."""
    for found in COMMAND.finditer(text):
        verb, words = found[1], [PLACES.get(word, word) for word in found[2].split()]
        if verb == "recipes" or not words:
            continue
        try:
            parse_verb(verb, words)
        except SystemExit:
            continue  # a help
        except MeshwrightError as refused:
            # What is not there, such as the folder of a placeholder, is not a fault of the command.
            if refused.asked.startswith(f"meshwright {verb}"):
                yield f"{found[0]}: {refused.truth}"
