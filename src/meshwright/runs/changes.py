"""Recipes with changed fields, for Python."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, nearest
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run

_PARTS = ("training", "optimizer", "data", "finetune", "model", "faults", "local_checkpoints")
"""Parts of a Run whose fields can be changed by name, in this order."""


def recipe(name: str, *, mesh: str | MeshShape | None = None, **changes: Any) -> Run:
    """Returns the Run of a recipe with some fields changed.

    name: a row of `meshwright recipes`, or FILE.py:FUNCTION.  mesh: as `fsdp=8,tensor=2`.
    changes: fields of `Run`, or of its training, optimizer, data, finetune, model, faults, local_checkpoints, by name;
    a field that several have is that of the first in this order. Raises ConfigError for an unknown recipe or field.

    Example:
        >>> run = mw.recipe("tiny", mesh="fsdp=8", steps=100, learning_rate=1e-3)
        >>> str(run.mesh), run.training.steps, run.optimizer.learning_rate
        ('fsdp=8', 100, 0.001)
    """
    return change_fields(find_recipe(name), mesh, changes)


def change_fields(run: Run, mesh: str | MeshShape | None, changes: dict[str, Any]) -> Run:
    """Returns `run` on another mesh and with some fields changed, as `recipe` takes them."""
    if mesh is not None:
        run = dataclasses.replace(run, mesh=MeshShape.parse(mesh) if isinstance(mesh, str) else mesh)
    return with_changes(run, changes)


def with_changes(run: Run, changes: Mapping[str, Any]) -> Run:
    """Returns a Run with fields changed by name, as `recipe` does. Raises ConfigError for an unknown field."""
    for field, value in changes.items():
        run = _change(run, field, value)
    return run


def _change(run: Run, field: str, value: Any) -> Run:
    if field in _fields(run):
        return dataclasses.replace(run, **{field: value})
    for part in _PARTS:
        if field in _fields(getattr(run, part)):
            return dataclasses.replace(run, **{part: dataclasses.replace(getattr(run, part), **{field: value})})
    known = {*_fields(run), *(name for part in _PARTS for name in _fields(getattr(run, part)))}
    raise ConfigError(f"{field}={value!r} in a Run", "no part of a Run has that field", nearest(field, known))


def _fields(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]
