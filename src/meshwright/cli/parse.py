"""Parser of a verb's options into its dataclass: tyro parses, and every mistake is one of our errors."""

import contextlib
import copy
import dataclasses
import difflib
import io
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import tyro

from meshwright.aliases import MESH_OPTIONS, OPTIONS, SETTINGS
from meshwright.cli.options import Option, default_of, format_help, options_of, part_of
from meshwright.cli.output import write
from meshwright.errors import ConfigError

_RECIPE_OPTIONS = ("model", "recipe", "preset", "model_name", "model_name_or_path")
"""Options elsewhere for what is the first argument here."""
_CONFIG = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)


def parse[Options](kind: type[Options], verb: str, args: Sequence[str], *, default: Options | None = None) -> Options:
    """Parses the arguments of a verb.

    verb: the verb, and `[RECIPE]` where it takes one.  default: an instance whose fields are the defaults.
    Prints the help and raises SystemExit for `--help`. Raises ConfigError for an unknown option, an illegal value, or
    a missing option.
    """
    if default is not None:
        default = _with_parts(default, args)
    without: Sequence[str] = getattr(kind, "without", ())
    options = [
        dataclasses.replace(option, fixed=True) if option.path[1:2] and option.path[1] in without else option
        for option in options_of(kind, default)
    ]
    command = f"meshwright {verb.split()[0]}"
    if "-h" in args or "--help" in args:
        positional = "".join(f" {option.names[0]}" for option in options if option.positional)
        write(format_help(f"meshwright {verb}{positional} [options]", kind, options) + "\n")
        raise SystemExit(0)
    by_name = {name: option for option in options for name in option.names}
    words, given = _checked(command, args, by_name)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, strays = tyro.cli(
                kind,
                prog=command,
                args=words,
                default=tyro.MISSING_NONPROP if default is None else default,
                return_unknown_args=True,
                config=_CONFIG,
            )
    except SystemExit as error:
        raise _refused(command, complaint.getvalue(), by_name, given) from error
    except ValueError as error:  # the checks of a configuration from outside the package
        raise ConfigError(f"{command} {' '.join(args)}", str(error), f"{command} --help") from error
    if strays:
        raise _stray(command, strays[0], args, options)
    return parsed


def refuse_options(options: Any, names: Sequence[str], mode: str, fix: str) -> None:
    """Raises ConfigError where an option that a mode of a verb does not use was given.

    names: fields of the options.  mode: what was asked for, such as `--decode`.  fix: the smallest change.
    """
    for field in dataclasses.fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            raise ConfigError(f"--{field.name.replace('_', '-')} with {mode}", "it would not be used there", fix)


def value_of(args: Sequence[str], name: str) -> str | None:
    """Returns the value that `args` give the option `name`, before they are parsed; None where they do not."""
    for token, following in zip(args, [*args[1:], ""], strict=False):
        if token == name:
            return following
        if token.startswith(f"{name}="):
            return token.partition("=")[2]
    return None


def _with_parts(default: Any, args: Sequence[str]) -> Any:
    """Returns the defaults with an optional part, such as `run.model.yarn`, wherever one of its options is given."""
    for word in args:
        path = word.partition("=")[0].lstrip("-").replace("-", "_").split(".")[:-1]
        if word.startswith("--") and path and hasattr(default, "run"):
            default = _opened(default, ["run", *path])
    return default


def _opened(owner: Any, path: list[str]) -> Any:
    """Returns a copy of a dataclass in which the part at `path` has blank fields where it was None."""
    if not path or not hasattr(owner, path[0]):
        return owner
    part = getattr(owner, path[0])
    if part is None and (kind := part_of(typing.get_type_hints(type(owner))[path[0]])) is not None:
        part = object.__new__(kind)
        for field in dataclasses.fields(kind):
            object.__setattr__(part, field.name, default_of(field))
    owner = copy.copy(owner)
    object.__setattr__(owner, path[0], _opened(part, path[1:]))  # checked when tyro makes it of all options
    return owner


def _checked(
    command: str, args: Sequence[str], by_name: dict[str, Option]
) -> tuple[list[str], dict[Option, list[str]]]:
    """Returns the arguments, all values of an option that is repeated after its first mention, and the values given.

    Raises ConfigError for an unknown option, and for a path that is empty.
    """
    free: list[str] = []
    given: dict[Option, list[str]] = {}
    values = free
    for word in args:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            values.append(word)
            continue
        option = by_name.get(name.replace("_", "-"))
        if option is None or option.fixed:
            raise _unknown(command, name, list(_values_after(args, word)), by_name)
        values = given.setdefault(option, [])
        if not option.metavar.endswith("..."):
            values.clear()
        values += [value] if equals else []
    words: list[str] = [*free]
    for option, values in given.items():
        if option.metavar.startswith("PATH") and "" in values:
            truth, fix = "its value is empty, as of a shell variable that is not set", f"{option.names[0]} PATH"
            raise ConfigError(f"{command} {option.names[0]} ''", truth, f"{fix}, or leave it out")
        words += [option.names[0], *values]
    return words, given


def _values_after(args: Sequence[str], word: str) -> Iterator[str]:
    """Yields the values that follow an option."""
    _, equals, value = word.partition("=")
    if equals:
        yield value
        return
    for following in args[list(args).index(word) + 1 :]:
        if following.startswith("--"):
            return
        yield following


def _refused(command: str, text: str, by_name: dict[str, Option], given: dict[Option, list[str]]) -> ConfigError:
    """Builds the error for what tyro refuses; its first paragraph is the reason."""
    lines = [line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    end = next((i for i, line in enumerate(lines) if line.startswith("──")), len(lines))
    truth = " ".join(" ".join(lines[:end]).split())
    truth = re.sub(r" ?\(required\)|\[/?bold\]", "", truth)
    named = [name for name in by_name if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", truth, re.IGNORECASE)]
    if not named:
        return ConfigError(command, truth, f"{command} --help")
    name = min(named, key=lambda name: not name.startswith("--"))
    option = by_name[name]
    legal, wrong = option.metavar, (re.findall(r"'([^']*)'", truth) or [""])[0 if option.choices else -1]
    if option.choices:
        legal = next(iter(difflib.get_close_matches(wrong, option.choices, n=1, cutoff=0.4)), legal)
    with contextlib.suppress(ValueError, OverflowError):
        legal = str(round(float(wrong))) if option.metavar == "N" else legal
    words = [] if option.positional else [name]
    return ConfigError(
        " ".join([command, *words, *given.get(option, [])]), truth, " ".join([*(words or [command]), legal])
    )


def _stray(command: str, token: str, args: Sequence[str], options: Sequence[Option]) -> ConfigError:
    """Builds the error for a word that belongs to no option."""
    asked, rest = f"{command} {' '.join(args)}", list(args)
    rest.remove(token)
    takes_recipe = any(option.group == "run" for option in options)
    # What came first was taken for the recipe before the options are read; a second one has no place.
    if not takes_recipe or args[0] == token:
        before = "a recipe was given before it" if takes_recipe else "the verb takes no further word"
        asked = f"{command} RECIPE {' '.join(args)}" if takes_recipe else asked
        return ConfigError(asked, f"{token!r} belongs to no option, and {before}", f"leave {token!r} out")
    fix = f"{' '.join([command, token, *rest])}, or leave it out"
    return ConfigError(asked, f"{token!r} belongs to no option; a recipe comes before the options", fix)


def _unknown(command: str, name: str, values: Sequence[str], by_name: dict[str, Option]) -> ConfigError:
    """Builds the error for an option that does not exist, with the option that was probably meant."""
    asked, because = " ".join([command, name, *values]), f"there is no option {name}"
    fixed = by_name.get(name.replace("_", "-"))
    if fixed is not None:
        name = ".".join(fixed.path[1:])
        place = f"{name} in the run.json that --run takes or in a recipe of your own"
        if name.startswith("finetune."):
            place = f"meshwright finetune, which has it, or {place}"
        return ConfigError(asked, f"{because} on the command line", place)
    word = name.lstrip("-").replace("-", "_").lower()
    last = word.rpartition(".")[2]
    if last in _RECIPE_OPTIONS and any(option.group == "run" for option in by_name.values()):
        recipe = values[0] if values else "RECIPE"
        return ConfigError(asked, because, f"{command} {recipe}: a recipe is the first argument")
    by_name = {key: option for key, option in by_name.items() if not option.fixed}
    for meant in _candidates(word, last, values):
        option = by_name.get(meant.split()[0])
        if option is not None:
            example = meant if " " in meant or not option.metavar else " ".join([meant, *values])
            return ConfigError(asked, because, f"did you mean {example}?{option.gist}")
    names = {key.lstrip("-").replace("-", "_"): key for key in by_name if key.startswith("--")}
    ends = {key.rpartition(".")[2]: name for key, name in names.items()}
    for key, known in ((word, names), (last, ends)):
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        if close:
            return ConfigError(asked, because, f"did you mean {known[close[0]]}?{by_name[known[close[0]]].gist}")
    return ConfigError(asked, because, f"{command} --help, which lists all options")


def _candidates(word: str, last: str, values: Sequence[str]) -> list[str]:
    """Returns the options that `word` of another trainer may mean here, the likeliest first."""
    candidates = []
    if last in MESH_OPTIONS and (not values or values[0].isdigit()) and (values or last not in SETTINGS):
        candidates.append(f"--mesh {MESH_OPTIONS[last]}={values[0] if values else 'N'}")
    candidates += [table[key] for table in (SETTINGS, OPTIONS) for key in (word, last) if key in table]
    sections = ("model", "training", "optimizer", "data")
    return [*candidates, *(f"--{section}.{last.replace('_', '-')}" for section in sections)]
