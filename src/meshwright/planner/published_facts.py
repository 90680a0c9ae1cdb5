"""Files of facts about published training runs: fields, and what a file lacks or has wrong (docs/atlas/index.md)."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from meshwright.documents import read_text
from meshwright.errors import ConfigError, nearest
from meshwright.plugins import note_names

_Positive = Annotated[float, Meta(gt=0, lt=1e30)]
_Fraction = Annotated[float, Meta(gt=0, lt=1)]
_Text = Annotated[str, Meta(min_length=1)]
_SPEEDS = "seconds, tokens_per_second, tokens_per_second_per_chip, mfu, or tokens and chip_hours"


class Source(msgspec.Struct, forbid_unknown_fields=True):
    """Where a fact was published."""

    states: _Text
    where: _Text
    url: Annotated[str, Meta(pattern="^https://")]


class Difference(msgspec.Struct, forbid_unknown_fields=True):
    """How the priced run differs from the published one."""

    what: _Text


class Published(msgspec.Struct, forbid_unknown_fields=True):
    """Published speed; each figure is None where the sources do not have it."""

    seconds: _Positive | None = None
    """Seconds per step."""
    tokens_per_second: _Positive | None = None
    """Tokens per second over all chips."""
    tokens_per_second_per_chip: _Positive | None = None
    mfu: _Fraction | None = None
    """Model-FLOP utilisation as its publisher counts it."""
    tokens: _Positive | None = None
    """Tokens of the whole training."""
    chip_hours: _Positive | None = None
    """Chip-hours of the whole training."""


class Step(msgspec.Struct, forbid_unknown_fields=True):
    """Machine, mesh and program of a step."""

    on: str
    program: str
    mesh: str
    layout: str = "fsdp"
    training: dict[str, Any] = {}
    network_bandwidth: Annotated[float, Meta(ge=1e6)] | None = None
    """Bytes per second of a device between nodes, one way."""
    nvlink_bandwidth: Annotated[float, Meta(ge=1e6)] | None = None


class Facts(msgspec.Struct, forbid_unknown_fields=True):
    """All of a file."""

    title: _Text
    summary: _Text
    year: int
    recipe: str
    step: Step
    published: Published
    sources: tuple[Source, ...]
    model: dict[str, Any] = {}
    instead: dict[str, Any] = {}
    differs: tuple[Difference, ...] = ()
    reason: str = ""


_TABLES: dict[str, type[msgspec.Struct]] = {
    "step": Step, "published": Published, "sources": Source, "differs": Difference,
}  # fmt: skip
_HINTS = {
    "title": "what the run is called, in quotes",
    "summary": "one sentence about how it was trained, in quotes",
    "year": "a whole number without quotes",
    "recipe": "a name that `meshwright recipes` lists; [model] has what the model has otherwise",
    "step": "[step] with on, program and mesh",
    "step.on": 'the machine, such as "h100:16x8" for sixteen nodes of eight',
    "step.program": "a row of SOFTWARE in planner/software.py",
    "step.mesh": 'degrees of the mesh axes, such as "data=16,tensor=8"',
    "step.network_bandwidth": "bytes per second of a device, one way: 50e9 for a link of 400 Gbit/s",
    "step.nvlink_bandwidth": "bytes per second of a device, one way: 450e9 for an H100",
    "published": f"[published] with {_SPEEDS}",
    "published.mfu": "a fraction: 0.41 for 41 %",
    "sources": "[[sources]] with states, where and url; the first has the speed",
    "sources.url": "an address that begins with https://",
}
"""Field -> what it takes."""


def read_facts(file: Path) -> Facts:
    """Reads a file of facts, which is data: it runs no code.

    Raises ConfigError naming the field that is missing, unknown or ill-typed, and for a recipe that is code of a file.
    """
    try:
        document = tomllib.loads(read_text(file))
    except OSError as error:
        raise ConfigError(f"facts {file}", f"the file cannot be read: {error.strerror}", "a TOML file") from error
    except ValueError as error:  # tomllib's errors are ValueErrors
        raise ConfigError(f"facts {file}", str(error), "a TOML file like those of docs/atlas/runs") from error
    try:
        facts = msgspec.convert(document, Facts)
    except msgspec.ValidationError as error:
        raise _mistake(file, document, str(error)) from error
    p = facts.published
    rates = (p.seconds, p.tokens_per_second, p.tokens_per_second_per_chip, p.mfu)
    if all(rate is None for rate in rates) and (p.tokens is None or p.chip_hours is None):
        raise ConfigError(f"facts {file}", "its [published] has no speed", _SPEEDS)
    if not facts.sources:
        raise ConfigError(f"facts {file}", "it names no source", _HINTS["sources"])
    if ":" in facts.recipe or facts.recipe.endswith(".py"):
        raise ConfigError(
            f"facts {file}", f"recipe {facts.recipe!r} is code, and a file of facts is data", _HINTS["recipe"]
        )
    note_names(document, str(file))
    return facts


def _mistake(file: Path, document: Any, message: str) -> ConfigError:
    """Returns the error for a message of msgspec: the field, its value, and the name or value that is meant."""
    what, _, path = message.partition(" - at `$")
    path = re.sub(r"\[[^]]*\]|`$", "", path).lstrip(".")
    parts = path.split(".") if path else []
    fields = _TABLES.get(parts[0] if parts else "", Facts).__struct_fields__
    for word, because in (("missing required", "is missing"), ("unknown", "is no field of such a file")):
        found = re.search(f"{word} field `(.*)`", what)
        if found:
            name = ".".join([*parts, found[1]])
            fix = nearest(found[1], fields) if word == "unknown" else _HINTS.get(name, f"one of {', '.join(fields)}")
            return ConfigError(f"facts {file}", f"{name} {because}", fix)
    for part in parts:
        document = document.get(part) if isinstance(document, dict) else None
    value = "" if document is None else f" is {document!r}"
    return ConfigError(f"facts {file}", f"{path}{value}: {_lower(what)}", _HINTS.get(path, "a positive number"))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
