"""The Run that a verb's options change: a recipe, a plan, a run file, or the run in an output folder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from meshwright.cli.parse import parse, value_of
from meshwright.errors import ConfigError
from meshwright.ranges import Ranged
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_run
from meshwright.storage.paths import path_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Ranged):
    """Options of every verb that takes a recipe."""

    run: Annotated[Run, tyro.conf.arg(name="")]
    run_file: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """Take the Run from this run.json instead of a recipe; every training writes one."""


@dataclasses.dataclass(frozen=True)
class Base:
    """The Run before the options are applied, and the arguments that are left."""

    run: Run
    args: Sequence[str]
    target: str | None = None
    """Hardware of a plan, as `--on` names it."""


def base_run(args: Sequence[str]) -> Base:
    """Reads the Run that the options change, from the first argument or `--run`; by default the recipe `tiny`.

    The first argument is a recipe (a name, FILE.py:FUNCTION, module:function) or a plan (FILE.json).
    Raises ConfigError where both are given, or where there is no such recipe or file.
    """
    args = list(args)
    recipe = args.pop(0) if args and not args[0].startswith("-") else None
    file = value_of(args, "--run")
    if file is not None:
        if recipe is not None:
            raise ConfigError(f"recipe {recipe} and --run {file}", "each gives a whole Run", "one of them")
        return Base(read_run(path_of(file)), args)
    if recipe == "":
        raise ConfigError("a recipe without a name", "the first argument is empty", "leave it out for tiny")
    if recipe is not None and recipe.endswith(".json"):
        from meshwright.planner.plan_file import read_plan

        plan = read_plan(path_of(recipe))
        return Base(plan.run, args, plan.target)
    return Base(find_recipe(recipe or "tiny"), args)


def parse_run[Options: RunOptions](kind: type[Options], verb: str, args: Sequence[str], **defaults: Any) -> Options:
    """Parses the arguments of a verb that takes a recipe. defaults: of further fields."""
    base = base_run(args)
    return parse(kind, f"{verb} [RECIPE]", base.args, default=kind(run=base.run, **defaults))
