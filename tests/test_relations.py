"""Relations between fields of a run: every verb refuses a broken one before a text is read, or a step can be traced."""

import dataclasses
import random
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import pytest

from meshwright.cli.verbs import run_verb
from meshwright.config import MeshShape, Training
from meshwright.data import conversations
from meshwright.errors import MeshwrightError
from meshwright.hardware.mesh import build_mesh
from meshwright.models.families import find_family
from meshwright.models.model import Model
from meshwright.plugins import PARTS
from meshwright.runs.recipe import recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run
from meshwright.step.device_run import place_on_devices
from meshwright.step.train_step import build_train_step

RELATIONS: dict[str, tuple[str, str]] = {
    "key/value heads": ("--model.kv-heads 3", "--model.kv-heads 2"),
    "an odd head": ("--model.head-size 7", "--model.head-size 8"),
    "a head of one feature": ("--model.head-size 1", "--model.head-size 2"),
    "an odd head by width": ("--model.width 100", "--model.head-size 26"),
    "width by heads": ("--model.width 130", "--model.width 128"),
    "batch by microbatches": ("--training.microbatches 3 --batch 16", "--batch"),
    "optimizer": ("--optimizer.name adam", "adamw"),
    "schedule": ("--optimizer.lr-schedule cosin", "cosine"),
    "group of learning rates": ("--optimizer.lr-groups nothing=2", "known: blocks."),
    "bits without health": (
        "--faults.check-bits --training.no-health",
        "no --faults.check-bits",
    ),
    "split of another order": ("--data.split 90,10,0", "leave it out"),
    "type of moments": (
        "--optimizer.name adafactor --optimizer.moment-dtype bfloat16",
        "--optimizer.moment-dtype float32",
    ),
}
"""What a user asks for -> what the error says to change."""
ON_A_MESH: dict[str, tuple[str, str]] = {
    "batch by mesh": ("--mesh fsdp=3", "--batch 18"),
    "sequence by mesh": ("--mesh context=2 --seq 130", "--seq 132"),
    "heads by mesh": ("--mesh tensor=8", "tensor of"),
}
"""The same for verbs that take a mesh."""
TRAINED: dict[str, tuple[str, str]] = {
    "a folder that cannot be": ("--out /dev/null/run", "--out"),
    "another run's folder": ("--out {other}", "--resume"),
    "nothing to resume": ("--resume --out {empty}", "out"),
    "no such step": ("--resume --at 7 --out {other}", "--at 1"),
    "reporter": ("--report tensorbord --out {empty}", "tensorboard"),
    "difference": ("--accept modle --resume --out {other}", "model"),
    "profile": ("--profile 900:901 --out {empty}", "--profile 10:13"),
    "sample": ("--data.sample 0 --data.sample-every 5 --out {empty}", "--data.sample 200"),
}
"""The same for verbs that train."""
FRONTS: dict[str, tuple[str, tuple[dict[str, tuple[str, str]], ...]]] = {
    "train": ("train tiny", (RELATIONS, ON_A_MESH, TRAINED)),
    "finetune": (
        "finetune tiny --init-from {other} --data {empty}/chat.jsonl",
        (RELATIONS, ON_A_MESH, TRAINED),
    ),
    "parity": ("parity tiny", (RELATIONS, ON_A_MESH)),
    "plan": ("plan tiny --on h100:8", (RELATIONS,)),
    "show": ("show tiny", (RELATIONS, {"heads by mesh": ON_A_MESH["heads by mesh"]})),
    "prove": ("prove tiny", (RELATIONS, ON_A_MESH)),
    "launch": ("launch --on slurm train tiny --out /shared/a", (RELATIONS, ON_A_MESH)),
    "evaluate": (
        "evaluate {other}",
        ({"batch by mesh": ON_A_MESH["batch by mesh"], "no such step": ("--at 7", "--at 1")},),
    ),
}
"""Verb -> its command line, and what is wrong with it."""
NOT_TRAINED = ("batch by microbatches",)
"""Fields that a plan chooses itself, and that `show` lays out whatever the batch is."""


def cases() -> Iterator[Any]:
    for front, (command, tables) in FRONTS.items():
        for table in tables:
            for name, (options, fix) in table.items():
                if front in ("plan", "show") and name in NOT_TRAINED:
                    continue
                yield pytest.param(f"{command} {options}", fix, id=f"{front}-{name}")


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every reader of a text fail."""

    def read(*given: Any, **named: Any) -> NoReturn:
        raise AssertionError("a text was read")

    for place in ("trainer.prepare.load_corpus", "api.targets.vocab_of_corpus"):
        monkeypatch.setattr(f"meshwright.{place}", read)
    monkeypatch.setattr(conversations, "load_conversations", read)


@pytest.mark.parametrize(("command", "fix"), list(cases()))
@pytest.mark.usefixtures("unread")
def test_a_broken_relation_is_refused_before_a_text_is_read(
    command: str, fix: str, tmp_path: Path
) -> None:
    manifest = tmp_path / "other" / "checkpoints" / "1" / "manifest" / "metadata"
    manifest.parent.mkdir(parents=True)
    write_run(
        dataclasses.replace(recipe("tiny"), mesh=MeshShape()), tmp_path / "other" / "run.json"
    )
    manifest.write_text("{}", encoding="utf-8")
    words = command.format(other=tmp_path / "other", empty=tmp_path / "empty").split()
    with pytest.raises(MeshwrightError) as refused:
        run_verb(words[0], words[1:])
    assert fix in refused.value.fix
    assert not (tmp_path / "empty").exists()


SMALL = {
    "vocab": 50,
    "width": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "mlp": 48,
    "expert_mlp": 16,
    "shared_mlp": 16,
    "experts": 4,
    "experts_per_token": 2,
    "positions": 64,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "linear_heads": 2,
    "linear_value_heads": 4,
    "linear_key_size": 4,
    "linear_value_size": 4,
    "sliding_window": 8,
}
NUMBERS = {
    int: (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 100),
    float: (0.0, 0.25, 0.5, 1.0, 3.0, 1e4),
    bool: (False, True),
}
MESHES = (
    "fsdp=2",
    "tensor=2",
    "context=2",
    "stage=2",
    "expert=2",
    "fsdp=3",
    "tensor=3",
    "tensor=4",
)
SET_ELSEWHERE = ("vocab", "steps", "log_every", "eval_every", "save_every")
FAMILIES = tuple(name for name in PARTS["model family"] if name != "wrapped")


def values_of(kind: Any) -> list[Any]:
    """Values of a field's type: a few numbers, the choices of a literal, None where it may be that."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return list(arguments)
    if origin is typing.Annotated:
        return values_of(arguments[0])
    if kind in NUMBERS:
        return list(NUMBERS[kind])
    if kind is type(None):
        return [None]
    found: list[Any] = []
    for argument in arguments if origin is not tuple else ():
        found += values_of(argument)
    return found


def drawn(family: type[Model], rng: random.Random) -> Run:
    """A small run of a family with two fields drawn by chance, on one device or a small mesh."""
    names = [field.name for field in dataclasses.fields(family)]
    model: dict[str, Any] = {name: value for name, value in SMALL.items() if name in names}
    training: dict[str, Any] = {"steps": 2, "batch": 8, "seq": 16, "remat": "full"}
    hints = {"model": typing.get_type_hints(family, include_extras=True)}
    hints["training"] = typing.get_type_hints(Training, include_extras=True)
    fields = [("model", name) for name in names] * 2
    fields += [("training", field.name) for field in dataclasses.fields(Training)]
    for part, name in rng.sample([field for field in fields if field[1] not in SET_ELSEWHERE], 2):
        values = values_of(hints[part][name])
        if values:
            (model if part == "model" else training)[name] = rng.choice(values)
    mesh = rng.choice(MESHES) if rng.random() < 0.4 else "data=1"
    described = family(**model)
    return Run(model=described, mesh=MeshShape.parse(mesh), training=Training(**training))


def trace_or_refuse(family: str, seed: int) -> bool:
    """Traces a step of a drawn run; returns whether it was accepted. An error other than a refusal is raised."""
    try:
        run = drawn(find_family(family), random.Random(seed))
        assert run.mesh is not None
        device_run = place_on_devices(run, build_mesh(run.mesh))
    except MeshwrightError as refused:
        assert refused.truth and refused.fix
        return False
    jax.eval_shape(build_train_step(device_run), device_run.abstract, device_run.abstract_batch)
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_two_fields_drawn_by_chance_are_refused_or_a_step_is_traced(family: str) -> None:
    seeds = range(1000)
    assert next(seed for seed in seeds if trace_or_refuse(family, seed)) < 1000


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_many_pairs_of_fields_are_refused_or_a_step_is_traced(family: str) -> None:
    accepted = sum(trace_or_refuse(family, seed) for seed in range(40))
    assert 0 < accepted < 40


HEAD_SIZES = ("kv_heads", "head_size", "qk_rope_head_dim", "width", "heads")


def sizes_of_heads() -> list[tuple[str, str]]:
    """Returns every family but GPT-2, with each size of its heads."""
    pairs = []
    for family in FAMILIES:
        fields = {field.name for field in dataclasses.fields(find_family(family))}
        if family != "gpt2":
            pairs += [(family, name) for name in HEAD_SIZES if name in fields]
    return pairs


@pytest.mark.parametrize(("family", "field"), sizes_of_heads())
def test_sizes_of_heads_are_placed_only_where_they_can_be_traced(family: str, field: str) -> None:
    kind = find_family(family)
    names = [each.name for each in dataclasses.fields(kind)]
    small = {name: value for name, value in SMALL.items() if name in names}
    for value in NUMBERS[int]:
        try:
            run = Run(model=kind(**{**small, field: value}), training=Training(batch=8, seq=16))
            place_on_devices(run, build_mesh(MeshShape()))
        except MeshwrightError as refused:
            assert "--model." in refused.fix
            continue
        heads = getattr(run.model, "kv_heads", 1)
        assert run.model.heads % heads == 0  # type: ignore[attr-defined]
        for layer in run.model.decoder.layers:  # type: ignore[attr-defined]
            rotary = getattr(layer.attention, "rotary", None)
            assert rotary is None or rotary.size % 2 == 0
