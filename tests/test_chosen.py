"""What the user chose is recorded in run.json, by every way to a Run, and shown apart from what was resolved."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_run

import meshwright as mw
from meshwright.api.training import TrainOptions
from meshwright.checkpoint.manifest import Manifest
from meshwright.cli.parse import options_of
from meshwright.cli.verbs import parse_verb
from meshwright.hardware.targets import parse_target
from meshwright.models.families import find_family
from meshwright.planner.plan_file import write_plan
from meshwright.planner.search import price_run
from meshwright.plugins import PARTS
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_from_dict, run_to_dict, write_run
from meshwright.trainer.recovery import compare
from meshwright.views.blocks import Table
from meshwright.views.run_folder import open_folders
from meshwright.views.run_page import chosen_and_resolved, run_page


def chosen_by(*words: str) -> dict[str, Any]:
    """Returns what a command line records, as run.json has it."""
    run = parse_verb(words[0], words[1:]).run
    chosen: dict[str, Any] = json.loads(json.dumps(run_to_dict(run)))["chosen"]
    return chosen


def test_every_option_of_a_run_is_recorded_also_with_the_value_that_it_has_anyway() -> None:
    recipe = find_recipe("tiny")
    words, fields = list[str](), set[str]()
    for option in options_of(TrainOptions, TrainOptions(run=recipe)):
        if option.path[0] != "run" or option.path[1] in TrainOptions.without:
            continue
        fields.add(".".join(option.path[1:]))
        default = option.default
        if option.path[-1] == "held_out":
            default = 0.5
        if option.path[1] == "local_checkpoints":
            default = {"path": "x", "every": 5}.get(option.path[-1], default)
        if option.metavar == "AXIS=N,...":
            values = ["data=1"]
        elif option.metavar == "":
            values = []
        elif isinstance(default, tuple) and default:
            values = [str(value) for value in default]
        elif default is None or default == ():
            values = ["1=1"] if option.path[-1] in ("batch_ramp", "lr_groups") else ["128"]
        else:
            values = [str(default)]
        words += [option.names[-1], *values]
    assert len(fields) > 60
    assert chosen_by("train", "tiny", *words).keys() == fields


def paths_of(owner: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of every field of a dataclass and of those nested in it."""
    for field in dataclasses.fields(owner):
        if not field.init or field.name == "chosen":
            continue
        value = getattr(owner, field.name)
        inner = (*path, field.name)
        if dataclasses.is_dataclass(value):
            yield from paths_of(value, inner)
        else:
            yield inner


@pytest.mark.parametrize("family", sorted(PARTS["model family"]))
def test_every_field_of_a_run_is_an_option(family: str) -> None:
    """Whoever can set a field in a recipe can set it on the command line."""
    run = Run(model=find_family(family)())
    options = {option.path for option in options_of(Run, run, parts=True)}
    # A part that is left out, such as `model.yarn`, has only options of its own fields.
    known = options | {path[:-1] for path in options}
    assert set(paths_of(run)) <= known


@pytest.mark.parametrize(
    "words",
    [
        "--training.gather-ahead layer",
        "--training.tensor-strategy gather",
        "--training.grouped-matmul ragged_dot",
        "--local-checkpoints.path x --local-checkpoints.every 5 --local-checkpoints.max-to-keep 3",
        "--model.norm-epsilon 1e-6",
        "--model.rope-factor 2",
        "--model.qk-norm rms",
        "--model.norm-place after",
        "--model.qkv-bias learned",
        "--model.out-bias learned",
    ],
)
def test_a_field_of_a_model_table_is_taken_as_typed(words: str) -> None:
    name, value = words.split()[-2:]
    part, _, field = name.removeprefix("--").replace("-", "_").partition(".")
    run = parse_verb("train", ["tiny", *words.split()]).run
    found = getattr(getattr(run, part), field)
    assert found == type(found)(value)


def test_a_command_line_records_what_it_gave_and_a_later_one_adds_to_it(tmp_path: Path) -> None:
    words = ["--steps", "7", "--data", "a.txt", "--data", "b.txt=2", "--mesh", "fsdp=2"]
    first = {"training.steps": 7, "data.paths": ["a.txt", "b.txt=2"], "mesh": "fsdp=2"}
    assert chosen_by("train", "tiny", *words) == first
    assert chosen_by("finetune", "tiny", "--method", "full", "--lr", "1e-4") == {
        "finetune.method": "full",
        "optimizer.learning_rate": 1e-4,
    }, "the defaults of fine-tuning are nobody's choice"
    out = tmp_path / "out"
    out.mkdir()
    write_run(parse_verb("train", ["tiny", *words]).run, out / "run.json")
    resumed = chosen_by("train", "--out", str(out), "--resume", "--steps", "9")
    assert resumed == {**first, "training.steps": 9}
    assert chosen_by("train", "--run", str(out / "run.json"), "--seed", "1") == {
        **first,
        "training.seed": 1,
    }
    tuned = parse_verb("finetune", [str(out), "--steps", "3"]).run
    assert tuned.chosen == {"training.steps": 3}, (
        "the other choices are of the run with the weights"
    )


def test_a_plan_keeps_what_was_chosen_for_it(tmp_path: Path) -> None:
    target, file = parse_target("h100:8"), tmp_path / "plan.json"
    run = mw.recipe("gpt2-xl", mesh="fsdp=8", batch=64)
    write_plan(price_run(run, target), target, file)
    assert chosen_by("train", str(file), "--steps", "9") == {
        "mesh": "fsdp=8",
        "training.batch": 64,
        "training.steps": 9,
    }


def test_python_records_the_fields_of_a_call_and_nothing_of_a_run_built_by_hand() -> None:
    run = mw.recipe("tiny", steps=7, optimizer=mw.Optimizer(beta1=0.8, learning_rate=0.004))
    recipe = find_recipe("tiny").optimizer
    assert run.chosen["training.steps"] == 7 and run.chosen["optimizer.beta1"] == 0.8
    differing = {
        f"optimizer.{field.name}"
        for field in dataclasses.fields(recipe)
        if getattr(recipe, field.name) != getattr(run.optimizer, field.name)
    }
    assert run.chosen.keys() == {"training.steps", *differing}
    assert tiny_run(find_recipe("tiny").model, "fsdp=2", steps=3).chosen == {}


def test_an_older_run_file_is_read_and_choices_make_no_other_run() -> None:
    run = mw.recipe("tiny", steps=7)
    document = json.loads(json.dumps(run_to_dict(run)))
    assert run_from_dict(document, "run.json").chosen == {"training.steps": 7}
    del document["chosen"]
    older = run_from_dict(document, "run.json")
    assert older.chosen == {} and older == run and hash(older) == hash(run)
    manifest = Manifest(run=older, step=0, cursor=0, tensors={}, identity="a")
    assert compare(manifest, run, None, "a", ()) == ([], [])


def tables(document: Any, recipe: Any) -> dict[str, list[list[Any]]]:
    found = {}
    for block in chosen_and_resolved(document, recipe, "own: "):
        assert isinstance(block, Table)
        found[block.title] = [list(row) for row in block.rows]
    return found


def test_chosen_set_and_resolved_are_three_tables() -> None:
    training = {"steps": 10, "remat": "auto", "batch": 4}
    recipe = {"name": "own", "mesh": None, "layout": "auto", "training": training}
    training = {"steps": 20, "remat": "full", "batch": 8}
    now = {"name": "own", "mesh": "fsdp=2", "layout": "fsdp", "training": training}
    chosen = {"mesh": "fsdp=2", "training.steps": 20, "layout": "auto"}
    batch, remat = ["training.batch", "4", "8"], ["training.remat", "auto", "full"]
    assert tables({**now, "chosen": chosen}, recipe) == {
        "own: chosen": [
            ["mesh", "none", "fsdp=2"],
            ["training.steps", "10", "20"],
            ["layout", "auto", "auto, resolved to fsdp"],
        ],
        "own: differences from the recipe own": [batch],
        "own: resolved where the recipe own leaves it open": [remat],
    }
    assert tables({**now, "chosen": chosen}, None).keys() == {"own: chosen"}
    for unknown in (now, {**now, "chosen": "damaged"}):
        assert tables(unknown, recipe) == {
            "own: differences from the recipe own": [["training.steps", "10", "20"], batch],
            "own: resolved where the recipe own leaves it open": [
                ["mesh", "none", "fsdp=2"],
                ["layout", "auto", "fsdp"],
                remat,
            ],
        }


def test_the_page_of_a_run_shows_them_apart_and_no_choice_twice(tmp_path: Path) -> None:
    run = mw.recipe("tiny", steps=7, mesh="data=2", layout="auto")
    training = dataclasses.replace(run.training, microbatches=1)
    resolved = dataclasses.replace(run, layout="fsdp", training=training)
    write_run(resolved, tmp_path / "run.json")
    for shown in (str(run_page(open_folders([tmp_path]))), str(resolved.page())):
        before, after = shown.split("resolved where the recipe tiny leaves it open")
        table = before[before.rindex("chosen") :]
        assert "training.steps" in table and "auto, resolved to fsdp" in table
        assert "training.microbatches" in after and "training.microbatches" not in table
        assert "chosen.training" not in shown and "differences from the recipe" not in shown
