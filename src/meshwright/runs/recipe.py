"""Runs by name: recipes, Hugging Face models, and the outputs of other runs.

A recipe is a Python function outside the package.
"""

import dataclasses
import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from meshwright.config import Data, MeshShape, Optimizer, Training
from meshwright.errors import ConfigError, foreign_code, nearest
from meshwright.path_kinds import find_path_kind, looks_like_hub_name
from meshwright.plugins import load, load_file
from meshwright.runs.catalogue import catalogue, recipe_name
from meshwright.runs.run import Run
from meshwright.storage.paths import path_of
from meshwright.trust import OwnName, accept, derive, foreign, is_reference, own, plain_text

_PARTS = ("training", "optimizer", "data", "finetune", "model", "faults", "local_checkpoints")
"""Parts of a Run whose fields can be changed by name, in this order."""


def find_recipe(name: str) -> Run:
    """Builds the Run of a recipe.

    NAME, FILE.py, FILE.py:FUNCTION, module:function, or hf:PATH of a model's folder.
    Raises ConfigError with the nearest name, or with the failure of a recipe's own code.
    """
    with foreign_code(f"recipe {name}", "correct the recipe"):
        built = _builder(name)()
    if not isinstance(built, Run):
        raise ConfigError(f"recipe {name}", f"it returned {type(built).__name__}", "return a Run")
    return own(built)  # code that the user chose, or a recipe of the package, chose what it names


def _builder(name: str) -> Callable[[], Run]:
    """Returns the function of a recipe. Raises ConfigError where there is none."""
    if name.startswith("hf:"):
        return functools.partial(run_of_hugging_face, name)
    path, colon, function = name.partition(":")
    if path.endswith(".py"):
        file = path_of(path)
        if not file.is_file():
            raise ConfigError(
                f"recipe {file}", "there is no such file", "a recipe's name, or FILE.py:FUNCTION"
            )
        # What the user gave as FILE.py, FILE.py:FUNCTION names too.
        accept("recipe", name if colon else derive(name, f"{name}:recipe"))
        functions = _functions(load_file(OwnName(file)))
        wanted = recipe_name(function) if colon else next(iter(functions), "")
        if wanted not in functions:
            raise ConfigError(
                f"recipe {file}:{function}", "it has no such function", nearest(wanted, functions)
            )
        return functions[wanted]
    if is_reference(name):
        builder: Callable[[], Run] = load("recipe", name)
        return builder
    recipes = catalogue()
    if name not in recipes:
        raise _unknown_recipe(name, recipes)
    return _functions(load_file(OwnName(recipes[name][0])))[name]


def _unknown_recipe(name: str, recipes: Iterable[str]) -> ConfigError:
    """Builds the error for a name that no recipe has, which may be a path or a name of the hub."""
    kind = find_path_kind(name)
    if kind is not None:
        return ConfigError(f"recipe {name!r}", f"it is {kind.summary}, not a recipe", kind.run)
    if os.path.exists(name):
        truth = "it is a file or folder, not a recipe: text to train on is given with --data"
        return ConfigError(f"recipe {name!r}", truth, f"tiny --data {name}")
    truth = "there is no recipe of that name"
    if looks_like_hub_name(name):
        fix = f"hf:{name}, if it is a model of the Hugging Face hub; {nearest(name, recipes)}"
        return ConfigError(f"recipe {name!r}", truth, fix)
    return ConfigError(f"recipe {name!r}", truth, nearest(name, recipes))


def _functions(module: ModuleType) -> dict[str, Callable[[], Run]]:
    """Returns the public functions defined in a module, in their order, by recipe name."""
    return {
        recipe_name(name): value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def recipe(name: str, *, mesh: str | MeshShape | None = None, **changes: Any) -> Run:
    """Returns the Run of a recipe with some fields changed.

    name: a row of `meshwright recipes`, or FILE.py:FUNCTION.  mesh: as `fsdp=8,tensor=2`.
    changes: fields of `Run`, or of its training, optimizer, data, finetune, model, faults,
    local_checkpoints, by name; a field that several have is that of the first in this order. Raises
    ConfigError for an unknown recipe or field.

    Example:
        >>> run = mw.recipe("tiny", mesh="fsdp=8", steps=100, learning_rate=1e-3)
        >>> str(run.mesh), run.training.steps, run.optimizer.learning_rate
        ('fsdp=8', 100, 0.001)
    """
    return change_fields(find_recipe(own(name)), mesh, own(changes))


def change_fields(run: Run, mesh: str | MeshShape | None, changes: Mapping[str, Any]) -> Run:
    """Returns `run` on another mesh and with some fields changed, as in `recipe`.

    Those are `chosen`.
    """
    base = run
    chosen = list[str]()
    if mesh is not None:
        chosen.append("mesh")
        shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh
        run = dataclasses.replace(run, mesh=shape)
    for field, value in changes.items():
        holder = next((part for part in ("run", *_PARTS) if field in _fields_of(run, part)), None)
        if holder is None:
            known = {name for part in ("run", *_PARTS) for name in _fields_of(run, part)}
            truth = "no part of a Run has that field"
            raise ConfigError(f"{field}={value!r} in a Run", truth, nearest(field, known))
        change = {field: value}
        if holder != "run":
            chosen.append(f"{holder}.{field}")
            change = {holder: dataclasses.replace(getattr(run, holder), **change)}
        elif field in _PARTS:
            _check_part(run, field, value)
            chosen += _differing_fields(getattr(run, field), value, field)
        else:
            chosen.append(field)
        run = dataclasses.replace(run, **change)
    return with_prompt_for_data(with_chosen(run, chosen), base)


def _check_part(run: Run, part: str, value: Any) -> None:
    """Raises ConfigError for a value that is not a part of a Run, such as a path as `data`."""
    if dataclasses.is_dataclass(value):
        return
    kind = type(getattr(run, part)).__name__
    inside = ", ".join(sorted(f"{part}.{name}" for name in _fields_of(run, part)))
    fix = f"a meshwright.{kind}, or its fields by name"
    if part == "data":
        fix += f": paths=({value!r},)"
    truth = f"{part} is a {kind} with fields of its own: {inside}"
    raise ConfigError(f"{part}={value!r} in a Run", truth, fix)


def _differing_fields(before: Any, now: Any, part: str) -> list[str]:
    """Returns the dotted names of the fields in which a part of a Run has changed."""
    names = []
    for field in dataclasses.fields(now):
        missing = object()
        if getattr(before, field.name, missing) != getattr(now, field.name):
            names.append(f"{part}.{field.name}")
    return names


def with_chosen(run: Run, fields: Iterable[str]) -> Run:
    """Returns the run with the present values of some fields recorded as those that the user gave.

    fields: dotted names, such as `mesh` or `training.steps`. Earlier choices of other fields stay.
    """
    chosen = dict(run.chosen)
    for field in fields:
        value = operator.attrgetter(field)(run)
        if isinstance(value, MeshShape):
            value = str(value)
        chosen[field] = msgspec.to_builtins(value, enc_hook=plain_text)
    return dataclasses.replace(run, chosen=chosen)


def with_prompt_for_data(run: Run, base: Run) -> Run:
    """Returns a changed run, with the default prompt if it has other data.

    A prompt that differs from that of `base` stays.
    The prompt of a recipe belongs to its text: samples of German prose do not begin with `def `.
    """
    same_data = run.data.paths == base.data.paths
    if same_data or run.data.prompt != base.data.prompt:
        return run
    return dataclasses.replace(run, data=dataclasses.replace(run.data, prompt=Data().prompt))


def _fields_of(run: Run, part: str) -> list[str]:
    owner = run if part == "run" else getattr(run, part)
    return [field.name for field in dataclasses.fields(owner)]


_LONGEST = 4096
"""Tokens per sequence where the model's own limit is longer: `--seq` takes more."""


def run_of_hugging_face(name: str) -> Run:
    """Returns the Run that trains the model `hf:NAME` from its weights, with its tokenizer.

    Batch, length and learning rate are those of a short continued training. Raises WeightsError
    where Meshwright does not have the model; weights are not read.
    """
    # Only runs of such models load their reader.
    from meshwright.hugging_face import folder

    found = folder.read_model(name)
    origin = str(found.path)
    return Run(
        name=Path(name.partition(":")[2]).resolve().name.lower(),
        model=foreign(found.model, origin),
        init_from=name,
        training=Training(batch=16, seq=min(found.max_seq or _LONGEST, _LONGEST), logits_mib=1024),
        optimizer=Optimizer(learning_rate=2e-5, warmup_steps=20),
        data=dataclasses.replace(Data(), tokenizer=foreign(str(found.tokenizer), origin)),
    )
