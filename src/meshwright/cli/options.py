"""Options of a verb, read off its dataclass as tyro reads them: for the help, the pages, and suggestions."""

import dataclasses
import inspect
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

COMMON = ("--out", "--on", "--mesh", "--steps", "--batch", "--seq", "--lr", "--data", "--devices", "--resume")
"""Options that come first, in this order, where a verb has them."""
_COLUMN = 30
"""Column of the help at which descriptions begin."""


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


def options_of(
    owner: type, default: Any = None, path: tuple[str, ...] = (), prefix: str = "", group: str = "", *,
    parts: bool = False,
) -> Iterator[Option]:  # fmt: skip
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
        value = default_of(field) if default is None else getattr(default, field.name)
        arg = next((m for m in metadata if hasattr(m, "aliases")), None)
        name = field.name if arg is None or arg.name is None else arg.name
        primitive = next((m for m in metadata if isinstance(m, tyro.constructors.PrimitiveConstructorSpec)), None)
        where, inside = (*path, field.name), prefix if name == "" else f"{prefix}{name}."
        part = part_of(kind) if primitive is None else None
        if part is not None:
            if value is not None or parts:
                part = type(value) if dataclasses.is_dataclass(value) else part
                title = inside.rstrip(".")
                heading = f"{title} ({part.__name__})" if title not in ("", part.__name__.lower()) else ""
                heading = heading or part.__name__.lower()
                default_part = None if value is tyro.MISSING else value
                yield from options_of(part, default_part, where, inside, heading, parts=parts)
            continue
        metavar, choices = values_of(kind, value) if primitive is None else (str(primitive.metavar), ())
        if arg is not None and arg.metavar is not None:
            metavar = arg.metavar
        spelling = "--" + prefix + ("no_" if kind is bool and value is True else "") + name
        names = (name.upper(),) if tyro.conf.Positional in metadata else (spelling.replace("_", "-"),)
        names = tuple(sorted((*(() if arg is None else arg.aliases or ()), *names), key=len))
        doc = _docs(owner).get(field.name, "")
        yield Option(names, where, metavar, choices, value, doc, group, tyro.conf.Fixed in metadata)


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Returns the default of a field; `tyro.MISSING` where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is dataclasses.MISSING else field.default


def part_of(kind: Any) -> type | None:
    """Returns the dataclass that a field of this type may hold; None where it holds none."""
    kinds = (k for k in (kind, *typing.get_args(kind)) if isinstance(k, type) and dataclasses.is_dataclass(k))
    return next(kinds, None)


def values_of(kind: Any, default: Any = None) -> tuple[str, tuple[str, ...]]:
    """Returns how the help names the values of a type, and the legal ones where they are listed."""
    args = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType) and len(args) == 2 and types.NoneType in args:
        return values_of(next(inner for inner in args if inner is not types.NoneType))
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, args)) + "}", tuple(map(str, args))
    if typing.get_origin(kind) is tuple and args[-1] is Ellipsis:
        return f"{values_of(args[0])[0]} ...", values_of(args[0])[1]
    if typing.get_origin(kind) is tuple:
        return " ".join(values_of(inner)[0] for inner in args), ()
    names: dict[Any, str] = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}
    return names.get(kind, "VALUE"), ()


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


def format_help(usage: str, kind: type, options: Sequence[Option]) -> str:
    """Formats the help of a verb: its common options first, the verb's own, the Run's, then those of its parts.

    usage: the line after `usage:`.  kind: dataclass of the options, whose docstring follows.
    """
    options = [option for option in options if not option.fixed]
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    common = [option for name in COMMON for option in options if name in option.names]
    groups: dict[str, list[Option]] = {"arguments": [], "common options": common, "options": [], "run options": []}
    for option in options:
        if option not in common:
            groups.setdefault("arguments" if option.positional else f"{option.group} options".strip(), []).append(
                option
            )
    parts = [f"usage: {usage}", textwrap.fill(inspect.cleandoc(kind.__doc__ or "").replace("\n", " "), width)]
    for title, members in groups.items():
        if members:
            parts.append("\n".join([f"{title}:", *(_format_option(option, width) for option in members)]))
    return "\n\n".join(parts)


def _format_option(option: Option, width: int) -> str:
    left = "  " + ", ".join(option.names) + ("" if option.positional else f" {option.metavar}".rstrip())
    default = "(required)" if option.default is tyro.MISSING else f"(default: {format_value(option.default)})"
    if option.default in (None, (), "", False):
        default = ""
    lines = textwrap.wrap(f"{option.doc} {default}", width - _COLUMN, break_long_words=False) or [""]
    first = f"{left:<{_COLUMN}}{lines.pop(0)}" if len(left) < _COLUMN - 1 else left
    return "\n".join([first, *(" " * _COLUMN + line for line in lines)]).rstrip()


def format_value(value: Any) -> str:
    """Formats a default as it is typed."""
    if isinstance(value, tuple):
        return " ".join(map(format_value, value))
    return repr(value) if isinstance(value, str) and value != value.strip() else str(value)
