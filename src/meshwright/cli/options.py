"""Options of a verb, read off its dataclass: names, values, defaults, descriptions."""

import ast
import dataclasses
import inspect
import itertools
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro

REQUIRED = object()
"""Default of an option that must be given."""


@dataclasses.dataclass(frozen=True)
class Values:
    """Values that an option takes."""

    metavar: str
    count: int | None = 1
    """Number of values: 0 for a switch, None for any number."""
    kind: type | None = None
    """int or float for numbers; None accepts any text."""
    choices: tuple[str, ...] = ()
    """Legal values; empty accepts any."""
    optional: bool = False
    """Whether `None` is legal too."""


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """One option, or one positional argument."""

    names: tuple[str, ...]
    """Spellings, shortest first; a positional argument has one without dashes."""
    path: tuple[str, ...]
    """Fields that lead to it from the verb's dataclass: `("run", "training", "steps")`."""
    annotation: Any
    """Type of the field."""
    values: Values
    default: Any
    """Default value, or `REQUIRED`."""
    owner: type
    """Dataclass with the field."""
    group: str
    """Heading in the help: `training`, `model (Llama)`, `run`, or empty for the verb's own."""

    @property
    def positional(self) -> bool:
        """Whether it is given without a name."""
        return not self.names[0].startswith("--")

    @property
    def example(self) -> str:
        """How it is given: `--steps N`, or `FOLDER`."""
        return self.names[0] if self.positional else f"{self.names[0]} {self.values.metavar}".rstrip()

    @property
    def doc(self) -> str:
        """Description: the string literal below the field."""
        return field_docs(self.owner).get(self.path[-1], "")


def options_of(
    owner: type, default: Any = None, path: tuple[str, ...] = (), prefix: str = "", group: str = "",
    args: Sequence[str] = (),
) -> Iterator[Option]:  # fmt: skip
    """Yields the options of a dataclass and of those nested in it.

    default: an instance whose fields are the defaults; None takes the defaults of the fields.
    path, prefix, group: of a nested dataclass.  args: words of a command; an optional part that the default leaves out,
    such as `model.yarn`, has options where one of them is among these.
    """
    hints = typing.get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        if not field.init:
            continue
        annotation, metadata = hints[field.name], getattr(hints[field.name], "__metadata__", ())
        value = _default(field) if default is None else getattr(default, field.name)
        given = next((m for m in metadata if hasattr(m, "aliases")), None)
        name = field.name if given is None or given.name is None else given.name
        primitive = next((m for m in metadata if isinstance(m, tyro.constructors.PrimitiveConstructorSpec)), None)
        where = (*path, field.name)
        if primitive is None and dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = prefix if name == "" else f"{prefix}{name}."
            yield from options_of(type(value), value, where, inside, _heading(inside.rstrip("."), type(value)), args)
            continue
        if primitive is None and value is None and (part := part_of(annotation)) is not None:
            inside = f"{prefix}{name}."
            if any(word.lstrip("-").replace("-", "_").startswith(inside) for word in args):
                yield from options_of(part, None, where, inside, _heading(inside.rstrip("."), part), args)
            continue
        values = values_of(annotation) if primitive is None else Values(str(primitive.metavar), 1)
        if given is not None and given.metavar is not None:
            values = dataclasses.replace(values, metavar=given.metavar)
        missing = value is REQUIRED or value is tyro.MISSING
        names = _names(prefix, name, () if given is None else given.aliases or (), metadata)
        if not names[0].startswith("--"):
            annotation = typing.get_args(annotation)[0]  # without the marker of a positional argument
        yield Option(names, where, annotation, values, REQUIRED if missing else value, owner, group)


def _names(prefix: str, name: str, aliases: tuple[str, ...], metadata: tuple[Any, ...]) -> tuple[str, ...]:
    if tyro.conf.Positional in metadata:
        return (name.upper(),)
    return tuple(sorted((*aliases, "--" + (prefix + name).replace("_", "-")), key=len))


def _heading(path: str, kind: type) -> str:
    if path in ("", kind.__name__.lower()):
        return kind.__name__.lower()
    return f"{path} ({kind.__name__})"


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return REQUIRED if field.default_factory is dataclasses.MISSING else field.default_factory()


def part_of(annotation: Any) -> type | None:
    """Returns the dataclass that a field of this type may hold; None where it holds none."""
    kind = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    kinds = (k for k in (kind, *typing.get_args(kind)) if isinstance(k, type) and dataclasses.is_dataclass(k))
    return next(kinds, None)


def values_of(annotation: Any) -> Values:
    """Returns the values that an option of type `annotation` takes."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        values = values_of(args[0])
        # A switch has no value; other booleans are true or false.
        return Values("", 0) if tyro.conf.FlagCreatePairsOff in args[1:] else values
    if origin in (Union, types.UnionType):
        inner = [kind for kind in args if kind is not types.NoneType]
        if len(inner) == 1:
            return dataclasses.replace(values_of(inner[0]), optional=len(args) > 1)
        return Values("VALUE", None)
    if origin is Literal:
        choices = tuple(map(str, args))
        return Values("{" + ",".join(choices) + "}", choices=choices)
    if origin is tuple and args:
        inner_values = values_of(args[0])
        if args[-1] is Ellipsis:
            return dataclasses.replace(inner_values, metavar=f"{inner_values.metavar} ...", count=None)
        metavar = " ".join(values_of(kind).metavar for kind in args)
        return dataclasses.replace(inner_values, metavar=metavar, count=len(args))
    if annotation is bool:
        return Values("{True,False}", choices=("True", "False"))
    known = {int: Values("N", kind=int), float: Values("X", kind=float), str: Values("TEXT"), Path: Values("PATH")}
    return known.get(annotation, Values("VALUE", None))


@cache
def field_docs(owner: type) -> dict[str, str]:
    """Returns the string literals below the fields of a dataclass and of its bases, each as one line."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        for node in ast.walk(_module_of(base)):
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                docs |= _docs_in(node.body)
    return docs


@cache
def _module_of(owner: type) -> ast.Module:
    """Returns the syntax tree of the file that defines a class; an empty one where there is no file."""
    try:
        return ast.parse(Path(inspect.getsourcefile(owner) or "").read_text(encoding="utf-8"))
    except (OSError, TypeError, SyntaxError):  # a built-in class, or one typed into an interpreter
        return ast.Module([], [])


def _docs_in(body: list[ast.stmt]) -> dict[str, str]:
    docs = {}
    for field, doc in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
        ):  # fmt: skip
            docs[field.target.id] = " ".join(doc.value.value.split())
    return docs
