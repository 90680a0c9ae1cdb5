"""Fields of a run by path: which of them a path honors, refuses or does not use.

Their declarations say so.
"""

import dataclasses
import operator
from typing import Any, Literal

from meshwright.config import MeshShape
from meshwright.declarations import Declaration, Refused, Result, declarations_of
from meshwright.errors import ConfigError
from meshwright.ranges import option_of
from meshwright.runs.run import Run


@dataclasses.dataclass(frozen=True)
class Path:
    """Something that a run is given to.

    A verb, or `train` with a method or objective of fine-tuning.
    """

    computes: frozenset[Result] | None
    """Results of a run that it computes; None computes all that training does."""
    given_with: str = ""
    """What a refused option was given with."""


PATHS = {
    "train": Path(None),
    "evaluate": Path(frozenset({"evaluation"})),
    "answers": Path(None, "conversations"),
    "preferences": Path(None, "preferences"),
    "wrap": Path(None, "a wrapped model"),
    "full": Path(None, "--finetune.method full"),
    "lora": Path(None, "--finetune.method lora"),
    "text": Path(None, "--finetune.objective text"),
    "parity": Path(frozenset({"program", "data"})),
    "plan": Path(frozenset({"plan"})),
    "prove": Path(frozenset({"program"})),
}

Status = Literal["honoured", "refused", "no effect"]

_PARTS: dict[str, type] = {"": Run, "mesh": MeshShape} | {
    field.name: type(field.default)
    for field in dataclasses.fields(Run)
    if dataclasses.is_dataclass(field.default)
}
"""Dataclasses whose fields are those of a run, by what precedes their names; a model has those of
its family."""
_HOLDERS = {"model", *_PARTS}


def fields_of_runs() -> dict[str, Any]:
    """Returns the defaults of all fields of a run by dotted name, without those of its model.

    `Run.chosen`, which no comparison of runs sees, is not one of them.
    """
    return {
        f"{part}.{field.name}".lstrip("."): field.default
        for part, owner in _PARTS.items()
        for field in dataclasses.fields(owner)
        if field.compare and (part or field.name not in _HOLDERS)
    }


def declaration_of(field: str) -> Declaration:
    """Returns the declaration of a field of `fields_of_runs`."""
    part, _, name = field.rpartition(".")
    return declarations_of(_PARTS[part])[name]


def status_of(path: str, field: str) -> Status:
    """Returns what becomes of a field of a run on a path."""
    if _refusal(path, field) is not None:
        return "refused"
    stated = declaration_of(field).changes
    assert stated is not None, f"{field} does not say what it changes"
    if stated.needs and _refusal(path, stated.needs) is not None:
        return "no effect"
    if path == "parity" and not stated.parity:
        return "no effect"
    computed = PATHS[path].computes
    return "honoured" if computed is None or computed & stated.results else "no effect"


def _refusal(path: str, field: str) -> Refused | None:
    """Returns why a path refuses a field; None where it does not."""
    refusals = declaration_of(field).refusals
    return next((refusal for refusal in refusals if path in refusal.paths), None)


def check_fields(path: str, run: Run, shape: MeshShape) -> None:
    """Raises ConfigError for a field that the path refuses and that is not at its default."""
    run = dataclasses.replace(run, mesh=shape)
    for field, default in fields_of_runs().items():
        refusal = _refusal(path, field)
        value = operator.attrgetter(field)(run)
        if refusal is None or value == default:
            continue
        part, _, name = field.rpartition(".")
        asked = f"{option_of(_PARTS[part], name)} {value}"
        if part == "mesh":
            asked = f"mesh {shape}"
        fix = refusal.instead.format(stage=shape.stage, fsdp=shape.stage * shape.fsdp)
        raise ConfigError(f"{asked} with {PATHS[path].given_with}", refusal.because, fix)


def may_change(run: Run, name: str) -> bool:
    """Returns whether a run may be resumed with another value of a field without `--accept`.

    name: dotted, with the fields of its model and of parts of that. What a field of a model does
    not say, and what the run does not have, changes the function of the model; any mesh gives the
    same numbers.
    """
    part, _, field = name.rpartition(".")
    owner = type(run.model) if part == "model" else _PARTS.get(part)
    if part == "mesh" or name == "mesh":
        return True
    declaration = None if owner is None else declarations_of(owner).get(field)
    if declaration is None or declaration.changes is None:
        return False
    return declaration.changes.resumes
