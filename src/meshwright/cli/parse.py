"""Command line of a verb: tyro parses it into the verb's dataclass.

Help and errors name options as they are typed.
"""

import contextlib
import copy
import dataclasses
import io
import itertools
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import docstring_parser
import tyro

from meshwright.api.verb import RunOptions, empty_error
from meshwright.cli.output import write
from meshwright.errors import ConfigError
from meshwright.ranges import check_words, ranges_of
from meshwright.runs.recipe import with_chosen
from meshwright.storage.paths import path_of
from meshwright.trust import own

_CONFIG = (
    tyro.conf.AvoidSubcommands,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.PositionalMetavarFromFieldName,
)


_MAY_BE_EMPTY = ("prompt", "system", "text")
"""Fields whose empty text is a text. Of any other option it is a shell variable that is not set."""


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
    of_another_verb: bool = False
    """Whether this verb refuses it: `train` has none of the options of `finetune`."""
    numbers: Any = None
    """Type of its numbers, with their range; None where it takes none."""
    several: bool = False
    """Whether it takes several values, of one mention or of several."""

    @property
    def positional(self) -> bool:
        """Whether it is given without a name."""
        return not self.names[0].startswith("--")

    @property
    def gist(self) -> str:
        """First sentence of the description, after a space."""
        sentence = self.doc.partition(". ")[0].rstrip(".")
        return f" {sentence}." if sentence else ""


def _explain() -> ModuleType:
    from meshwright.cli import explain  # help and errors need it, and no verb that runs

    return explain


def parse[Options](
    kind: type[Options], verb: str, args: Sequence[str], *, default: Options | None = None
) -> Options:
    """Parses the arguments of a verb.

    verb: the verb, and `[RECIPE]` where it takes one.  default: an instance whose fields are the
    defaults. Prints the help and raises SystemExit for `--help`. Raises ConfigError for an unknown
    option, an illegal value, or a missing option.
    """
    if default is not None:
        default = _with_optional_parts(default, args)
    without: Sequence[str] = getattr(kind, "without", ())
    options = [
        dataclasses.replace(option, of_another_verb=True)
        if option.path[1:2] and option.path[1] in without
        else option
        for option in options_of(kind, default)
    ]
    command = f"meshwright {verb.split()[0]}"
    if "-h" in args or "--help" in args:
        positional = "".join(f" {option.names[0]}" for option in options if option.positional)
        write(
            _explain().format_help(f"meshwright {verb}{positional} [options]", kind, options) + "\n"
        )
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
        raise _explain().refused_error(command, complaint.getvalue(), by_name, given) from error
    except ValueError as error:  # the checks of a configuration from outside the package
        raise ConfigError(f"{command} {' '.join(args)}", str(error), f"{command} --help") from error
    if strays:
        raise _explain().stray_error(command, strays[0], args, options)
    for option in options:
        if option.positional or option in given:
            _own_value(parsed, option.path)
    if isinstance(parsed, RunOptions):
        chosen = [".".join(option.path[1:]) for option in given if option.path[0] == "run"]
        object.__setattr__(parsed, "run", with_chosen(parsed.run, chosen))
    for field in dataclasses.fields(parsed):
        value = getattr(parsed, field.name)
        if isinstance(value, Path) and str(value) != "-":  # standard input
            object.__setattr__(parsed, field.name, path_of(value))
        elif isinstance(value, tuple) and value and all(isinstance(path, Path) for path in value):
            object.__setattr__(parsed, field.name, tuple(map(path_of, value)))
    return parsed


def _refuse_empty_words(words: Sequence[str], by_name: dict[str, Option]) -> None:
    """Raises ConfigError for an empty positional argument, which would be the working directory."""
    positional = [option for option in by_name.values() if option.positional]
    for word, option in zip(words, positional, strict=False):
        if not word and option.path[-1] not in _MAY_BE_EMPTY:
            raise empty_error(option.names[0])


def _own_value(parsed: Any, path: tuple[str, ...]) -> None:
    """Marks the value at `path`, which was typed, as the user's own.

    Every other value keeps its class.
    """
    *parts, name = path
    for part in parts:
        parsed = getattr(parsed, part)
    value = getattr(parsed, name)
    owned = own(value)
    if owned is not value:
        object.__setattr__(parsed, name, owned)


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

    default: an instance whose fields are the defaults; None takes the defaults of the fields.
    path, prefix, group: of a nested dataclass.  parts: also the options of optional parts that the
    default leaves out, such as `model.yarn`.
    """
    hints = typing.get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        if not field.init:
            continue
        hint = _Hint.of(hints[field.name])
        if hint.is_suppressed:
            continue
        value = _default_of(field) if default is None else getattr(default, field.name)
        name = hint.name_of(field.name)
        inner_path = (*path, field.name)
        part = None if hint.primitive is not None else _part_of(hint.kind)
        if part is None:
            yield _option_of(owner, field.name, hint, value, inner_path, prefix, group)
            continue
        if value is None and not parts:
            continue
        if dataclasses.is_dataclass(value):
            part = type(value)
        inner_prefix = prefix if name == "" else f"{prefix}{name}."
        part_default = None if value is tyro.MISSING else value
        heading = _heading(inner_prefix, part)
        yield from options_of(part, part_default, inner_path, inner_prefix, heading, parts=parts)


@dataclasses.dataclass(frozen=True)
class _Hint:
    """Type of a field, and its metadata for the command line."""

    kind: Any
    """The type without its annotation."""
    arg: Any
    """`tyro.conf.arg`: another name, other spellings, another metavar; None without."""
    primitive: Any
    """How one word makes a value, for types that tyro does not know; None without."""
    is_positional: bool
    is_suppressed: bool
    """Whether the command line leaves it out: a verb sets it."""

    @classmethod
    def of(cls, annotation: Any) -> "_Hint":
        kind = annotation
        if typing.get_origin(annotation) is Annotated:
            kind = typing.get_args(annotation)[0]
        metadata = getattr(annotation, "__metadata__", ())
        arg = next((entry for entry in metadata if hasattr(entry, "aliases")), None)
        spec = tyro.constructors.PrimitiveConstructorSpec
        primitive = next((entry for entry in metadata if isinstance(entry, spec)), None)
        return cls(
            kind,
            arg,
            primitive,
            is_positional=tyro.conf.Positional in metadata,
            is_suppressed=tyro.conf.Suppress in metadata,
        )

    def name_of(self, field: str) -> str:
        """Returns the name of a field in its option; empty for a part without a prefix."""
        if self.arg is None or self.arg.name is None:
            return field
        return str(self.arg.name)


def _option_of(
    owner: type,
    field: str,
    hint: _Hint,
    value: Any,
    path: tuple[str, ...],
    prefix: str,
    group: str,
) -> Option:
    """Returns the option of a field that is not a part.

    value: its default.  path, prefix, group: as in `options_of`.
    """
    name = hint.name_of(field)
    spelling = name.upper()
    if not hint.is_positional:
        negation = "no_" if hint.kind is bool and value is True else ""
        spelling = f"--{prefix}{negation}{name}".replace("_", "-")
    aliases = () if hint.arg is None else hint.arg.aliases or ()
    if hint.primitive is None:
        metavar, choices = _values_of(hint.kind)
    else:
        metavar, choices = str(hint.primitive.metavar), ()
    if hint.arg is not None and hint.arg.metavar is not None:
        metavar = hint.arg.metavar
    return Option(
        names=tuple(sorted((*aliases, spelling), key=len)),
        path=path,
        metavar=metavar,
        choices=choices,
        default=value,
        doc=_docs(owner).get(field, ""),
        group=group,
        numbers=ranges_of(owner).get(field),
        several=hint.primitive is None and _takes_several(hint.kind),
    )


def _heading(prefix: str, part: type) -> str:
    """Returns the heading of a part's options: `training`, or `model (Llama)`."""
    title = prefix.rstrip(".")
    kind_name = part.__name__.removesuffix("Options")
    if title in ("", kind_name.lower()):
        return kind_name.lower()
    return f"{title} ({kind_name})"


def _takes_several(kind: Any) -> bool:
    """Whether a type has any number of values: `tuple[X, ...]`, also where it may be None."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(map(_takes_several, arguments))
    return typing.get_origin(kind) is tuple and arguments[-1:] == (Ellipsis,)


def _default_of(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is dataclasses.MISSING else field.default


def _part_of(kind: Any) -> type | None:
    """Returns the dataclass that a field of this type may hold; None where it holds none."""
    kinds = (
        k
        for k in (kind, *typing.get_args(kind))
        if isinstance(k, type) and dataclasses.is_dataclass(k)
    )
    return next(kinds, None)


def _values_of(kind: Any) -> tuple[str, tuple[str, ...]]:
    """Returns how the help names the values of a type, and the legal ones where they are listed."""
    args, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Annotated:
        return _values_of(args[0])
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
    """Returns the string literals below a dataclass's fields and its bases', a line each."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        try:
            found = docstring_parser.parse_from_object(base).params if base is not object else []
        except (OSError, TypeError, IndentationError):  # a class typed into an interpreter
            continue
        docs |= {param.arg_name: " ".join((param.description or "").split()) for param in found}
    return docs


def _with_optional_parts(default: Any, args: Sequence[str]) -> Any:
    """Returns the defaults with each optional part of which an option is given.

    Such a part is `run.model.yarn`.
    """
    for word in args:
        path = word.partition("=")[0].lstrip("-").replace("-", "_").split(".")[:-1]
        if word.startswith("--") and path and hasattr(default, "run"):
            default = _with_part(default, ["run", *path])
    return default


def _with_part(owner: Any, path: list[str]) -> Any:
    """Returns a copy of a dataclass in which the part at `path`, if None, has blank fields."""
    if not path or not hasattr(owner, path[0]):
        return owner
    part = getattr(owner, path[0])
    if part is None and (kind := _part_of(typing.get_type_hints(type(owner))[path[0]])) is not None:
        part = object.__new__(kind)
        for field in dataclasses.fields(kind):
            object.__setattr__(part, field.name, _default_of(field))
    owner = copy.copy(owner)
    object.__setattr__(
        owner, path[0], _with_part(part, path[1:])
    )  # checked when tyro makes it of all options
    return owner


def _gather(
    command: str, args: Sequence[str], by_name: dict[str, Option]
) -> tuple[list[str], dict[Option, list[str]]]:
    """Returns the arguments with the values of repeated options together, and values by option.

    Raises ConfigError for an unknown option, a number out of range, and an empty value.
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
        if option is None or option.of_another_verb:
            following = (
                [value]
                if equals
                else [*itertools.takewhile(lambda word: not word.startswith("--"), args[i + 1 :])]
            )
            raise _explain().unknown_error(command, name, following, by_name)
        values = given.setdefault(option, [])
        if not option.several:
            values.clear()
        values += [value] if equals else []
    _refuse_empty_words(free, by_name)
    words = [*free]
    for option, values in given.items():
        if "" in values and option.path[-1] not in _MAY_BE_EMPTY:
            raise empty_error(option.names[0])
        if option.numbers is not None:
            several = len(values) if option.several else 1
            check_words(option.names[0], values[:several], option.numbers, option.default)
        if option.numbers is None and len(values) == 1 and values[0].startswith("-"):
            words += [f"{option.names[0]}={values[0]}"]  # alone it would be an option
            continue
        words += [option.names[0], *values]
    return words, given
