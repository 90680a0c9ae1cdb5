"""Declarations of the fields of a run: effects and refusals, stated beside type and range.

A field states what another value of it changes, and which kinds of runs refuse it; every field is
an option of the command line:

    dropout: Annotated[Fraction, changes("program"), TRANSFORMERS_ONLY] = 0.0

Checks, resumes, the help, docs/composition.md and tests/test_fields.py read these declarations
(`runs.fields`); the test measures whether each declaration is true.
"""

import dataclasses
import functools
import inspect
import typing
from typing import Literal

Result = Literal["program", "evaluation", "data", "plan", "loop"]
RESULTS: dict[Result, str] = {
    "program": "the train step: its program, its state, or the options it is compiled with",
    "evaluation": "what `evaluate` computes: its program, or the text that it reads",
    "data": "the samples that training reads, and their order",
    "plan": "the figures of `plan`",
    "loop": "what training does around its step: initial weights, metrics, evaluations, samples, "
    "checkpoints, bad steps",
}
"""Results of a run that a field may change."""


@dataclasses.dataclass(frozen=True)
class Changes:
    """Effects of another value of a field."""

    results: frozenset[Result]
    resumes: bool
    """Whether a run may be resumed with another value without `--accept`: neither the function of
    the model nor the order of its data is another."""
    parity: bool
    """Whether `parity` compares what a run computes with the field's value;
    it sets others itself, such as types."""
    needs: str
    """Field without which this one means nothing: a path that refuses that one ignores this one."""


@dataclasses.dataclass(frozen=True)
class Refused:
    """Paths on which a field that is not at its default is refused."""

    paths: tuple[str, ...]
    because: str
    instead: str
    """What works; `{stage}` and `{fsdp}` stand for degrees of the mesh."""


def changes(
    *results: Result, resumes: bool = True, parity: bool = True, needs: str = ""
) -> Changes:
    """States what a field changes. results: words of `RESULTS`; other arguments as in `Changes`."""
    return Changes(frozenset(results), resumes, parity, needs)


def refused(*paths: str, because: str, instead: str) -> Refused:
    """States the paths (`runs.fields.PATHS`) that refuse a field, why, and what works instead."""
    return Refused(paths, because, instead)


TRANSFORMERS_ONLY = refused(
    "wrap",
    because="it is about transformers that this package defines",
    instead="leave it out",
)
TEXT_ONLY = refused(
    "wrap",
    because="it is about text",
    instead="leave it out: its data are those of mw.wrap(..., data, held_out=...)",
)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """Statements of one field about itself."""

    changes: Changes | None
    """None where the field does not say."""
    refusals: tuple[Refused, ...]


@functools.cache
def declarations_of(owner: type) -> dict[str, Declaration]:
    """Returns the declaration of every field of a dataclass, those of its bases included."""
    found = {}
    for field in dataclasses.fields(owner):
        stated = _stated(owner, field.name, Changes)
        refusals = _stated(owner, field.name, Refused)
        found[field.name] = Declaration(stated[0] if stated else None, refusals)
    return found


def _stated[Entry](owner: type, name: str, kind: type[Entry]) -> tuple[Entry, ...]:
    """Returns what the type of a field states of one kind.

    A field to which a subclass gives another default keeps the declaration of its base.
    """
    for base in owner.__mro__:
        if name not in inspect.get_annotations(base):
            continue
        hint = typing.get_type_hints(base, include_extras=True)[name]
        metadata = getattr(hint, "__metadata__", ())
        found = tuple(entry for entry in metadata if isinstance(entry, kind))
        if found:
            return found
    return ()
