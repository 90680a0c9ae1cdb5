"""Command line of a verb: tyro parses it into the verb's dataclass; help and errors name options as they are typed."""

import contextlib
import copy
import dataclasses
import difflib
import inspect
import io
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import docstring_parser
import tyro

from meshwright.aliases import MESH_OPTIONS, OPTIONS, SETTINGS
from meshwright.cli.output import write
from meshwright.errors import ConfigError

COMMON = ("--out", "--on", "--mesh", "--steps", "--batch", "--seq", "--lr", "--data", "--devices", "--resume")
"""Options that the help lists first, in this order, where a verb has them."""
_COLUMN = 30
"""Column of the help at which descriptions begin."""
_RECIPE_OPTIONS = ("model", "recipe", "preset", "model_name", "model_name_or_path")
"""Options of other trainers for what is the first argument here."""
_CONFIG = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """One option, or one positional argument."""

    names: tuple[str, ...]
    """Spellings, shortest first; a positional argument has one without dashes."""
    path: tuple[str, ...]
    """Fields that lead to it from the verb's dataclass: `("run", "training", "steps")`."""
    metavar: str
    """Values that it takes: `N`, `TEXT ...`, or empty for a switch."""
    choices: tuple[str, ...]
    """Legal values; empty accepts any."""
    default: Any
    """Default value; `tyro.MISSING` of an option that must be given."""
    doc: str
    """Description: the string literal below the field."""
    group: str
    """Heading in the help: `training`, `model (Llama)`, `run`, or empty for the verb's own."""
    fixed: bool = False
    """Whether only a recipe, a run file or Python sets it."""

    @property
    def positional(self) -> bool:
        """Whether it is given without a name."""
        return not self.names[0].startswith("--")

    @property
    def gist(self) -> str:
        """First sentence of the description, after a space."""
        sentence = self.doc.partition(". ")[0].rstrip(".")
        return f" {sentence}." if sentence else ""


def parse[Options](kind: type[Options], verb: str, args: Sequence[str], *, default: Options | None = None) -> Options:
    """Parses the arguments of a verb.

    verb: the verb, and `[RECIPE]` where it takes one.  default: an instance whose fields are the defaults.
    Prints the help and raises SystemExit for `--help`. Raises ConfigError for an unknown option, an illegal value, or
    a missing option.
    """
    if default is not None:
        default = _with_optional_parts(default, args)
    without: Sequence[str] = getattr(kind, "without", ())
    options = [
        dataclasses.replace(option, fixed=True) if option.path[1:2] and option.path[1] in without else option
        for option in options_of(kind, default)
    ]
    command = f"meshwright {verb.split()[0]}"
    if "-h" in args or "--help" in args:
        positional = "".join(f" {option.names[0]}" for option in options if option.positional)
        write(_format_help(f"meshwright {verb}{positional} [options]", kind, options) + "\n")
        raise SystemExit(0)
    by_name = {name: option for option in options for name in option.names}
    words, given = _gather(command, args, by_name)
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
    """Raises ConfigError where an option was given that a mode of a verb does not use.

    names: fields of the options.  mode: what was asked for, such as `--decode`.  fix: the smallest change.
    """
    for name in given_options(options, names):
        raise ConfigError(f"{name} with {mode}", "it would not be used there", fix)


def given_options(options: Any, fields: Sequence[str]) -> list[str]:
    """Returns the options among `fields` that differ from their defaults, as they are typed."""
    default = {field.name: field.default for field in dataclasses.fields(options)}
    return [f"--{name.replace('_', '-')}" for name in fields if getattr(options, name) != default[name]]


def value_of(args: Sequence[str], name: str) -> str | None:
    """Returns the value that `args` give the option `name`, before they are parsed; None where they do not."""
    for token, following in zip(args, [*args[1:], ""], strict=False):
        if token == name:
            return following
        if token.startswith(f"{name}="):
            return token.partition("=")[2]
    return None


def options_of(
    owner: type,
    default: Any = None,
    path: tuple[str, ...] = (),
    prefix: str = "",
    group: str = "",
    *,
    parts: bool = False,
) -> Iterator[Option]:
    """Yields the options of a dataclass and of those nested in it.

    default: an instance whose fields are the defaults; None takes the defaults of the fields.  path, prefix, group: of
    a nested dataclass.  parts: also the options of optional parts that the default leaves out, such as `model.yarn`.
    """
    hints = typing.get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        if not field.init:
            continue
        annotation, metadata = hints[field.name], getattr(hints[field.name], "__metadata__", ())
        kind = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
        value = _default_of(field) if default is None else getattr(default, field.name)
        arg = next((m for m in metadata if hasattr(m, "aliases")), None)
        name = field.name if arg is None or arg.name is None else arg.name
        primitive = next((m for m in metadata if isinstance(m, tyro.constructors.PrimitiveConstructorSpec)), None)
        where, inside = (*path, field.name), prefix if name == "" else f"{prefix}{name}."
        part = _part_of(kind) if primitive is None else None
        if part is not None:
            if value is not None or parts:
                part = type(value) if dataclasses.is_dataclass(value) else part
                title, kind_name = inside.rstrip("."), part.__name__.removesuffix("Options")
                heading = kind_name.lower() if title in ("", kind_name.lower()) else f"{title} ({kind_name})"
                default_part = None if value is tyro.MISSING else value
                yield from options_of(part, default_part, where, inside, heading, parts=parts)
            continue
        metavar, choices = _values_of(kind) if primitive is None else (str(primitive.metavar), ())
        if arg is not None and arg.metavar is not None:
            metavar = arg.metavar
        spelling = f"--{prefix}{'no_' if kind is bool and value is True else ''}{name}".replace("_", "-")
        names = (name.upper(),) if tyro.conf.Positional in metadata else (spelling,)
        names = tuple(sorted((*(() if arg is None else arg.aliases or ()), *names), key=len))
        doc = _docs(owner).get(field.name, "")
        yield Option(names, where, metavar, choices, value, doc, group, tyro.conf.Fixed in metadata)


def _default_of(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is dataclasses.MISSING else field.default


def _part_of(kind: Any) -> type | None:
    """Returns the dataclass that a field of this type may hold; None where it holds none."""
    kinds = (k for k in (kind, *typing.get_args(kind)) if isinstance(k, type) and dataclasses.is_dataclass(k))
    return next(kinds, None)


def _values_of(kind: Any) -> tuple[str, tuple[str, ...]]:
    """Returns how the help names the values of a type, and the legal ones where they are listed."""
    args, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and types.NoneType in args:
        return _values_of(next(inner for inner in args if inner is not types.NoneType))
    if origin is Literal:
        return "{" + ",".join(map(str, args)) + "}", tuple(map(str, args))
    if origin is tuple and args[-1] is Ellipsis:
        return f"{_values_of(args[0])[0]} ...", _values_of(args[0])[1]
    if origin is tuple:
        return " ".join(_values_of(inner)[0] for inner in args), ()
    return {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}.get(kind, "VALUE"), ()


@cache
def _docs(owner: type) -> dict[str, str]:
    """Returns the string literals below the fields of a dataclass and of its bases, each as one line."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        try:
            found = docstring_parser.parse_from_object(base).params if base is not object else []
        except (OSError, TypeError, IndentationError):  # a class typed into an interpreter
            continue
        docs |= {param.arg_name: " ".join((param.description or "").split()) for param in found}
    return docs


def _format_help(usage: str, kind: type, options: Sequence[Option]) -> str:
    """Formats the help of a verb: its common options first, the verb's own, the Run's, then those of its parts."""
    options = [option for option in options if not option.fixed]
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    common = [option for name in COMMON for option in options if name in option.names]
    groups: dict[str, list[Option]] = {"arguments": [], "common options": common, "options": [], "run options": []}
    for option in options:
        if option not in common:
            title = "arguments" if option.positional else f"{option.group} options".strip()
            groups.setdefault(title, []).append(option)
    text = [f"usage: {usage}", "", textwrap.fill(inspect.cleandoc(kind.__doc__ or "").replace("\n", " "), width)]
    for title, members in groups.items():
        text += ["", f"{title}:"] if members else []
        for option in members:
            left = "  " + ", ".join(option.names) + ("" if option.positional else f" {option.metavar}".rstrip())
            default = "(required)" if option.default is tyro.MISSING else f"(default: {format_value(option.default)})"
            doc = option.doc if option.default in (None, (), "", False) else f"{option.doc} {default}"
            lines = textwrap.wrap(doc, width - _COLUMN, break_long_words=False) or [""]
            text.append(f"{left:<{_COLUMN}}{lines.pop(0)}".rstrip() if len(left) < _COLUMN - 1 else left)
            text += [" " * _COLUMN + line for line in lines]
    return "\n".join(text)


def format_value(value: Any) -> str:
    """Formats a default as it is typed."""
    if isinstance(value, tuple):
        return " ".join(map(format_value, value))
    return repr(value) if isinstance(value, str) and value != value.strip() else str(value)


def _with_optional_parts(default: Any, args: Sequence[str]) -> Any:
    """Returns the defaults with an optional part, such as `run.model.yarn`, wherever one of its options is given."""
    for word in args:
        path = word.partition("=")[0].lstrip("-").replace("-", "_").split(".")[:-1]
        if word.startswith("--") and path and hasattr(default, "run"):
            default = _with_part(default, ["run", *path])
    return default


def _with_part(owner: Any, path: list[str]) -> Any:
    """Returns a copy of a dataclass in which the part at `path` has blank fields where it was None."""
    if not path or not hasattr(owner, path[0]):
        return owner
    part = getattr(owner, path[0])
    if part is None and (kind := _part_of(typing.get_type_hints(type(owner))[path[0]])) is not None:
        part = object.__new__(kind)
        for field in dataclasses.fields(kind):
            object.__setattr__(part, field.name, _default_of(field))
    owner = copy.copy(owner)
    object.__setattr__(owner, path[0], _with_part(part, path[1:]))  # checked when tyro makes it of all options
    return owner


def _gather(command: str, args: Sequence[str], by_name: dict[str, Option]) -> tuple[list[str], dict[Option, list[str]]]:
    """Returns the arguments with all values of a repeated option after its first mention, and the values by option.

    Raises ConfigError for an unknown option, and for a path that is empty.
    """
    free: list[str] = []
    given: dict[Option, list[str]] = {}
    values = free
    for i, word in enumerate(args):
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            values.append(word)
            continue
        option = by_name.get(name.replace("_", "-"))
        if option is None or option.fixed:
            following = [value] if equals else [*_until_option(args[i + 1 :])]
            raise _unknown(command, name, following, by_name)
        values = given.setdefault(option, [])
        if not option.metavar.endswith("..."):
            values.clear()
        values += [value] if equals else []
    words = [*free]
    for option, values in given.items():
        if option.metavar.startswith("PATH") and "" in values:
            truth = "its value is empty, as of a shell variable that is not set"
            raise ConfigError(f"{command} {option.names[0]} ''", truth, f"{option.names[0]} PATH, or leave it out")
        words += [option.names[0], *values]
    return words, given


def _until_option(args: Sequence[str]) -> Iterator[str]:
    for word in args:
        if word.startswith("--"):
            return
        yield word


def _refused(command: str, text: str, by_name: dict[str, Option], given: dict[Option, list[str]]) -> ConfigError:
    """Builds the error for what tyro refuses; the first paragraph of its box is the reason."""
    lines = [line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    end = next((i for i, line in enumerate(lines) if line.startswith("──")), len(lines))
    truth = re.sub(r" ?\(required\)|\[/?bold\]", "", " ".join(" ".join(lines[:end]).split()))
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
    asked = [command, *([] if option.positional else [name]), *given.get(option, [])]
    return ConfigError(" ".join(asked), truth, f"{command if option.positional else name} {legal}")


def _stray(command: str, token: str, args: Sequence[str], options: Sequence[Option]) -> ConfigError:
    """Builds the error for a word that belongs to no option."""
    asked, rest = f"{command} {' '.join(args)}", list(args)
    rest.remove(token)
    takes_recipe = any(option.group == "run" for option in options)
    if not takes_recipe:
        truth = f"{token!r} belongs to no option, and the verb takes no further word"
        return ConfigError(asked, truth, f"leave {token!r} out")
    if args[0] == token:  # the recipe was read before the options
        truth = f"{token!r} belongs to no option, and a recipe was given before it"
        return ConfigError(f"{command} RECIPE {' '.join(args)}", truth, f"leave {token!r} out")
    fix = f"{' '.join([command, token, *rest])}, or leave it out"
    return ConfigError(asked, f"{token!r} belongs to no option; a recipe comes before the options", fix)


def _unknown(command: str, name: str, values: Sequence[str], by_name: dict[str, Option]) -> ConfigError:
    """Builds the error for an option that does not exist, with the option that was probably meant."""
    asked, because = " ".join([command, name, *values]), f"there is no option {name}"
    word = name.lstrip("-").replace("-", "_").lower()
    last = word.rpartition(".")[2]
    candidates = [name.replace("_", "-"), *_candidates(word, last, values)]
    meant = next((meant for meant in candidates if meant.split()[0] in by_name), None)
    if meant in by_name and by_name[meant].fixed:
        field = ".".join(by_name[meant].path[1:])
        place = f"{field} in the run.json that --run takes or in a recipe of your own"
        if field.startswith("finetune."):
            place = f"meshwright finetune, which has it, or {place}"
        return ConfigError(asked, f"{because} on the command line", place)
    if last in _RECIPE_OPTIONS and any(option.group == "run" for option in by_name.values()):
        recipe = values[0] if values else "RECIPE"
        return ConfigError(asked, because, f"{command} {recipe}: a recipe is the first argument")
    known = {key: option for key, option in by_name.items() if not option.fixed and key.startswith("--")}
    if meant is not None:
        option = by_name[meant.split()[0]]
        example = meant if " " in meant or not option.metavar else " ".join([meant, *values])
        return ConfigError(asked, because, f"did you mean {example}?{option.gist}")
    names = {key.lstrip("-").replace("-", "_"): key for key in known}
    ends = {key.rpartition(".")[2]: key for key in names}
    for text, keys in ((word, names), (last, ends)):
        for close in difflib.get_close_matches(text, keys, n=1, cutoff=0.6):
            meant = names[close if keys is names else ends[close]]
            return ConfigError(asked, because, f"did you mean {meant}?{known[meant].gist}")
    return ConfigError(asked, because, f"{command} --help, which lists all options")


def _candidates(word: str, last: str, values: Sequence[str]) -> list[str]:
    """Returns the options that `word` of another trainer may mean here, the likeliest first."""
    candidates = []
    if last in MESH_OPTIONS and (not values or values[0].isdigit()) and (values or last not in SETTINGS):
        candidates.append(f"--mesh {MESH_OPTIONS[last]}={values[0] if values else 'N'}")
    candidates += [table[key] for table in (SETTINGS, OPTIONS) for key in (word, last) if key in table]
    sections = ("model", "training", "optimizer", "data")
    return [*candidates, *(f"--{section}.{last.replace('_', '-')}" for section in sections)]
