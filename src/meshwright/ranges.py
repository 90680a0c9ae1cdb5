"""Ranges of the numbers that a user gives, stated in their types,
and the one place that refuses other numbers.

A dataclass of options, or of a part of a Run, derives from `Ranged`; its fields have types such as
`PositiveInt`. They are checked when it is made, whether by the command line, from a file or in
Python.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from meshwright.errors import ConfigError

_MOST_INT, _MOST_FLOAT = 2**40, sys.float_info.max
"""Largest numbers where a range has no upper end: all divisors
of it are found quickly, and infinity is no number."""

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=_MOST_INT)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=_MOST_INT)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=_MOST_FLOAT)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0, le=_MOST_FLOAT)]
FiniteFloat = Annotated[float, msgspec.Meta(ge=-_MOST_FLOAT, le=_MOST_FLOAT)]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]
"""Part of a whole, never all of it."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
TimeLimit = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
"""Most seconds that something may take, which the system's clocks can count."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

_PLAIN = {int: NonNegativeInt, float: FiniteFloat}
"""Ranges of fields that state none, as those of a model family from outside the package."""


class Ranged:
    """Base of a dataclass whose numbers are in the ranges of their types;
    ConfigError for any other.

    part: what precedes the name of a field in its option:
    `class Optimizer(Ranged, part="optimizer")`.
    """

    option_part: ClassVar[str] = ""

    def __init_subclass__(cls, part: str | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if part is not None:
            cls.option_part = part

    def __post_init__(self) -> None:
        check_ranges(self)


def check_ranges(config: Any) -> None:
    """Raises ConfigError for the first number of a dataclass that is outside the range
    of its type."""
    owner: Any = type(config)
    for name, kind in ranges_of(owner).items():
        value = getattr(config, name)
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise _refused(
                option_of(owner, name), value, kind, owner.__dataclass_fields__[name].default
            ) from error


def check_words(option: str, words: Sequence[str], kind: Any, default: Any) -> None:
    """Raises ConfigError for the first word of an option that is not a number of its type.
    kind: of `ranges_of`."""
    number = number_in(kind)
    for word in words:
        try:
            msgspec.convert(typing.get_args(number)[0](word), number)
        except (ValueError, OverflowError) as error:  # those of int, float and msgspec
            if word != "None" or default is not None:
                raise _refused(option, word, kind, default) from error


def _refused(option: str, value: Any, kind: Any, default: Any) -> ConfigError:
    wanted = f"it takes {describe_range(kind, value)}"
    return ConfigError(
        f"{option} {_words(value)}", wanted, f"{option} {_example(kind, default, value)}"
    )


@functools.cache
def ranges_of(owner: type) -> dict[str, Any]:
    """Returns the types, with their ranges, of the fields that hold numbers.

    A field to which a subclass gives another default keeps its range.
    """
    found = {}
    for field in dataclasses.fields(owner):
        bases = (base for base in owner.__mro__ if field.name in inspect.get_annotations(base))
        kinds = [typing.get_type_hints(base, include_extras=True)[field.name] for base in bases]
        arms = (
            kinds[0],
            *(typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) is not tuple else ()),
        )
        stated = [kind for kind in kinds if number_in(kind)]
        stated += [_PLAIN[arm] | None for arm in arms if arm in _PLAIN]
        if stated:
            found[field.name] = stated[0]
    return found


def describe_range(kind: Any, value: Any = None) -> str:
    """Describes the numbers of a type: `a whole number of at least 1`.
    value: what it does not take."""
    number = number_in(kind)
    meta, whole = number.__metadata__[0], typing.get_args(number)[0] is int
    with contextlib.suppress(TypeError, ValueError):
        value = float(value)
    hidden = (
        None,
        -_MOST_FLOAT,
        _MOST_FLOAT,
        *(() if isinstance(value, float) and value > 1 else (_MOST_INT,)),
    )
    ends = {"above": meta.gt, "of at least": meta.ge, "below": meta.lt, "at most": meta.le}
    bounds = [
        f"{word} {end}"
        for word, end in {**ends, "a multiple of": meta.multiple_of}.items()
        if end not in hidden
    ]
    noun = (
        "a whole number" if whole else "a finite number" if meta.le == _MOST_FLOAT else "a number"
    )
    return f"{noun} {' and '.join(bounds)}".strip()


def _example(kind: Any, default: Any, value: Any) -> str:
    """Returns what a type takes: the number that a word like `1e3` means, the largest where it is
    above that, the default, or a number like `value`."""
    number = number_in(kind)
    meta, meant, like = number.__metadata__[0], None, None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        meant, like = (round(float(value)), None) if isinstance(value, str) else (None, abs(value))
    asked = like if meant is None else meant
    largest = None
    if asked is not None and meta.le not in (None, _MOST_INT, _MOST_FLOAT) and asked > meta.le:
        largest = meta.le
    for candidate in (meant, largest, default, like, 1, 0.5, meta.multiple_of, meta.ge, meta.le):
        for wanted in (kind, number):
            with contextlib.suppress(msgspec.ValidationError):
                taken = msgspec.convert(candidate, wanted)
                if taken not in (None, ()):
                    return _words(taken)
    raise AssertionError(f"no number is of type {kind}")


def _words(value: Any) -> str:
    return " ".join(map(_words, value)) if isinstance(value, tuple | list) else str(value)


def number_in(kind: Any) -> Any:
    """Returns the number type, with its range, inside a type such as
    `tuple[PositiveInt, ...] | None`; None without."""
    inner = [arm for arm in typing.get_args(kind) if arm is not Ellipsis]
    metas = [meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    return (
        Annotated[inner[0], metas[0]] if metas else next(filter(None, map(number_in, inner)), None)
    )


def option_of(owner: type, name: str) -> str:
    """Returns how a user gives a field: its shortest option."""
    metadata = getattr(typing.get_type_hints(owner, include_extras=True)[name], "__metadata__", ())
    part = getattr(owner, "option_part", "")
    arg = next((entry for entry in metadata if hasattr(entry, "aliases")), None)
    if arg is not None and arg.aliases:
        return str(min(arg.aliases, key=len))
    return "--" + f"{part}.{(arg and arg.name) or name}".lstrip(".").replace("_", "-")
