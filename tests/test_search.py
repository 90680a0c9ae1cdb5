"""The search for plans: what it ranks, how it explains, the plan file, and the command."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from page_data import blocks_of, page_data
from test_cli import in_process
from tiny_runs import MODELS, tiny_run

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.targets import parse_target
from meshwright.models.model import LayerSpec, Model, ModelSpec, padded_vocab
from meshwright.planner.estimate import estimate
from meshwright.planner.explain import (
    STEP_PARTS,
    alternatives,
    explain_mesh,
    memory_remedies,
    mesh_axes,
)
from meshwright.planner.plan_file import read_plan, write_plan
from meshwright.planner.search import (
    CHOSEN_REMAT,
    SearchResult,
    candidate_schedules,
    price_mesh,
    price_run,
    search,
    split_size,
    with_choices,
    with_choices_that_fit,
    with_tokens_per_step,
)
from meshwright.runs.placed_run import place_run
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.sharding.params import Param
from meshwright.sharding.schedules import SCHEDULES


@pytest.fixture(scope="module")
def found() -> SearchResult:
    run = with_tokens_per_step(find_recipe("llama3-8b"), 2**21)
    return search(run, parse_target("v5p:2x4x4"), include=(MeshShape.parse("fsdp=4,tensor=8"),))


def test_a_search_finds_what_fits_and_ranks_it(found: SearchResult) -> None:
    seconds = [plan.estimate.seconds for plan in found.plans]
    assert seconds == sorted(seconds) and len(found.plans) > 50
    for plan in found.plans[:40]:
        assert plan.mesh.size == 32 and plan.estimate.fits
        assert place_run(plan.run) == plan.placed  # the trainer takes it
    assert not any(p.estimate.fits for p in found.too_large)
    best = found.plans[0]
    assert best.mesh.fsdp == 32 and best.estimate.bound_by == "matmuls"


def test_every_other_set_of_axes_has_its_reason(found: SearchResult) -> None:
    losers = alternatives(found)
    assert {"fsdp + tensor", "stage + fsdp", "data"} <= {loser.axes for loser in losers}
    assert all(loser.reason for loser in losers)
    assert any(
        "more of exposed communication, over tensor (ICI" in loser.reason for loser in losers
    )


def test_why_explains_a_mesh(found: SearchResult) -> None:
    text = explain_mesh(found, MeshShape.parse("fsdp=4,tensor=8"))
    assert "rank" in text and "against fsdp=32" in text
    with pytest.raises(ConfigError, match=r"it has 16 devices, and v5p:2x4x4 has 32"):
        explain_mesh(found, MeshShape.parse("fsdp=16"))
    run, shape = find_recipe("llama3-8b"), MeshShape.parse("fsdp=32")
    small = dataclasses.replace(run, training=dataclasses.replace(run.training, batch=8))
    refused = explain_mesh(search(small, found.target, include=(shape,)), shape)
    assert "the trainer refuses it" in refused and "8 = 0 * 32 + 8" in refused


@pytest.mark.parametrize("mesh", ["data=2,fsdp=16", "data=4,fsdp=8", "fsdp=16,tensor=2", "fsdp=32"])
def test_why_ranks_a_mesh_in_the_printed_table(mesh: str) -> None:
    """A mesh that is not among the candidates is ranked with them: no slower plan stands above rank 1."""
    run, shape = with_tokens_per_step(find_recipe("llama32-1b"), 2**18), MeshShape.parse(mesh)
    found = search(run, parse_target("v5p:2x4x4"), include=(shape,))
    rank = next(number for number, plan in enumerate(found.plans, 1) if plan.mesh == shape)
    assert f"rank {rank} of {len(found.plans)}" in explain_mesh(found, shape)
    seconds = [plan.estimate.seconds for plan in found.plans]
    assert seconds == sorted(seconds)


def test_hsdp_is_named() -> None:
    run = with_tokens_per_step(find_recipe("llama32-1b"), 2**19)
    found = search(run, parse_target("2*v6e:4x4"))
    names = {mesh_axes(plan) for plan in found.plans}
    assert "data + fsdp (HSDP)" in names and "fsdp" in names


def test_remedies_are_priced(found: SearchResult) -> None:
    run = find_recipe("llama3-70b")
    changed = dataclasses.replace(run.training, batch=128, remat="none")
    placed = place_run(dataclasses.replace(run, training=changed), MeshShape.parse("fsdp=32"))
    over = estimate(placed, found.target).bytes - found.target.chip.hbm_bytes
    assert over > 0
    enough = memory_remedies(placed.run, found.target, placed.layout.shape, over)
    assert enough and all(remedy.saved_bytes >= over for remedy in enough)
    remedies = memory_remedies(placed.run, found.target, placed.layout.shape, 1.0)
    assert len(remedies) == 3
    assert [r.extra_seconds for r in remedies] == sorted(r.extra_seconds for r in remedies)
    assert any("--training.remat" in r.option for r in remedies)


def test_two_plans_differ_by_parts(found: SearchResult) -> None:
    a, b = found.plans[0].estimate, found.plans[-1].estimate
    assert sum(b.parts[part] - a.parts[part] for part in STEP_PARTS) == pytest.approx(
        b.seconds - a.seconds
    )


@dataclasses.dataclass(frozen=True)
class NoAttention(Model):
    """A stack of feed-forward layers."""

    width: int = 512
    layers: int = 4

    def params(self) -> Any:
        D, V = self.width, padded_vocab(self)
        up = Param((self.layers, D, 4 * D), "LDF", role="ffn_in")
        down = Param((self.layers, 4 * D, D), "LFD", role="ffn_out")
        return {"embed": Param((V, D), "VD", rows=self.vocab), "blocks": {"up": up, "down": down}}

    def spec(self) -> ModelSpec:
        return ModelSpec(self.width, (LayerSpec("blocks"),) * self.layers)


def test_a_model_without_attention_is_planned() -> None:
    run = dataclasses.replace(find_recipe("llama3-8b"), model=NoAttention(vocab=32000))
    assert (split_size(run, "tensor"), split_size(run, "expert")) == (2048, 1)
    found = search(with_tokens_per_step(run, 2**19), parse_target("v5p:2x2x2"))
    assert {plan.mesh.tensor for plan in found.plans} == {1, 2, 4, 8}
    assert all(plan.estimate.parts["attention"] == 0 for plan in found.plans)
    assert any(plan.mesh.context > 1 for plan in found.plans)


@pytest.mark.parametrize(
    ("name", "tensor", "expert"),
    [("llama3-8b", 8, 1), ("mixtral-8x7b", 8, 8), ("gpt2-xl", 25, 1), ("qwen2-7b", 4, 1)],
)
def test_degrees_divide_the_dimensions_that_the_layout_splits(
    name: str, tensor: int, expert: int
) -> None:
    run = find_recipe(name)
    run = dataclasses.replace(
        run, model=dataclasses.replace(run.model, vocab=run.model.vocab or 50257)
    )
    assert (split_size(run, "tensor"), split_size(run, "expert")) == (tensor, expert)


def test_a_plan_is_a_file_that_other_verbs_take(found: SearchResult, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(found.plans[0], found.target, file)
    back = read_plan(file)
    assert back.run == found.plans[0].run and back.target == "v5p:2x4x4"
    assert back.predicted["seconds"] == found.plans[0].estimate.seconds
    shown = json.loads(in_process("show", str(file), "--json"))
    assert shown["mesh"] == str(found.plans[0].mesh)
    for text, says in (("{", "it cannot be read"), ("{}", "it is not a plan of format 2")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_plan(file)


@pytest.mark.parametrize(
    ("tokens", "batch"), [(4_000_000, 512), (2**22, 512), (8192, 1), (100_000, 12)]
)
def test_tokens_of_a_step_are_a_batch_that_divides(tokens: int, batch: int) -> None:
    assert with_tokens_per_step(find_recipe("llama3-8b"), tokens).training.batch == batch


# The command.


def test_the_command_plans_explains_compares_and_draws(tmp_path: Path) -> None:
    page, plan = tmp_path / "plan.html", tmp_path / "plan.json"
    done = in_process(
        "plan", "llama32-1b", "--on", "h100:8", "--tokens-per-step", "0.5M", "--why", "data=8", "--compare", "fsdp=8",
        "fsdp=4,tensor=2", "--html", str(page), "--out", str(plan),
    )  # fmt: skip
    for words in (
        "plans priced in", "predicted by arithmetic", "chip-hours", "Why not other mesh axes", "why data=8",
        "difference", "bound by", "links ", "over NVLink",
    ):  # fmt: skip
        assert words in done, done
    assert "Memory of one device" not in done and read_plan(plan).target == "h100:1x8"
    text = page.read_text(encoding="utf-8")
    data = page_data(text)
    chosen = next(block for block in blocks_of(data) if block["block"] == "Inspector")
    assert [chosen["items"][key]["title"].split(",")[0] for key in chosen["first"].split("~")] == [
        "fsdp=8",
        "fsdp=4",
    ]
    # The data may name the source of a price; nothing else of the page has an address.
    rest = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
    assert "://" not in rest.replace("http://www.w3.org/2000/svg", "")


def test_what_fits_nowhere_is_told_how_close_it_came() -> None:
    done = in_process("plan", "llama3-405b", "--on", "v5e:2x4", "--tokens-per-step", "64k", code=2)
    assert "no mesh has the memory; the closest:" in done
    assert "does not fit:" in done and "times the chips" in done


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--on", "v5q:4x4"), "did you mean 'v5p'?"),
        (("--on", "v5e:3x5"), "v5e:2x4 (8 chips) or v5e:4x4 (16 chips)"),
        (("--on", "v5p:2x2x2", "--tokens-per-step", "many"), "--tokens-per-step many"),
        (("--on", "nowhere.toml:8"), "cannot be read"),
        (("--on", "no_such_module:chip:8"), "no module 'no_such_module'"),
    ],
)
def test_bad_questions_teach(words: tuple[str, ...], says: str) -> None:
    assert says in in_process("plan", "llama32-1b", *words, code=2)


@pytest.mark.parametrize(
    ("recipe", "mesh", "target", "batch", "seq"),
    [
        ("llama2-7b", "fsdp=16", "v5p:2x2x4", 64, 4096),
        ("llama2-70b", "fsdp=128", "v5p:4x4x8", 512, 4096),
        ("llama3-405b", "fsdp=512", "v5p:8x8x8", 512, 8192),
        ("llama3-8b", "fsdp=8", "h100:8", 16, 4096),
    ],
)
def test_remat_that_fits_the_memory_there_is(
    recipe: str, mesh: str, target: str, batch: int, seq: int
) -> None:
    run = find_recipe(recipe)
    training = dataclasses.replace(run.training, batch=batch, seq=seq)
    run = dataclasses.replace(run, mesh=MeshShape.parse(mesh), training=training)
    machine = parse_target(target)
    chosen = price_run(with_choices(run, machine), machine)
    assert chosen.estimate.fits and chosen.estimate.bytes <= machine.chip.roomy_bytes
    saved, layers = chosen.run.training.saved_layers, len(chosen.placed.layout.spec.layers)
    for remat in CHOSEN_REMAT:
        other = price_run(
            dataclasses.replace(run, training=dataclasses.replace(training, remat=remat)), machine
        )
        assert (
            other.estimate.bytes > machine.chip.roomy_bytes
            or other.estimate.seconds >= chosen.estimate.seconds
        )
    if 0 < saved < layers:
        more = dataclasses.replace(chosen.run.training, saved_layers=saved + 1)
        assert (
            price_run(dataclasses.replace(run, training=more), machine).estimate.bytes
            > machine.chip.roomy_bytes
        )
    given = dataclasses.replace(
        run, training=dataclasses.replace(training, remat="full", microbatches=2)
    )
    assert with_choices(given, machine) == given  # a policy that is named is kept


def test_the_pipeline_schedule_is_the_fastest_that_fits() -> None:
    run, machine = find_recipe("llama3-8b"), parse_target("v5p:2x4x4")
    training = dataclasses.replace(run.training, batch=128, seq=4096, microbatches=16)
    run = dataclasses.replace(run, mesh=MeshShape.parse("stage=4,fsdp=8"), training=training)
    chosen = with_choices(run, machine)
    best = price_run(chosen, machine).estimate
    assert "auto" not in (
        chosen.training.pipeline_schedule,
        chosen.training.stage_saves,
        chosen.training.remat,
    )
    assert best.fits
    for schedule, saves in itertools.product(SCHEDULES, ("layers", "input")):
        other = dataclasses.replace(training, pipeline_schedule=schedule, stage_saves=saves)
        estimate = price_run(
            with_choices(dataclasses.replace(run, training=other), machine), machine
        ).estimate
        assert estimate.seconds >= best.seconds or estimate.bytes > machine.chip.roomy_bytes
    # Nothing that is named is changed.
    named = dataclasses.replace(
        training, remat="full", pipeline_schedule="gpipe", stage_saves="input", microbatches=16
    )
    assert with_choices(dataclasses.replace(run, training=named), machine).training == named


def test_choices_that_do_not_fit_as_compiled_are_given_up() -> None:
    """A compiler that needs 30 % more than planned gets a plan for less memory; the third choice is the last."""
    run, machine = find_recipe("llama3-8b"), parse_target("h100:8")
    run = dataclasses.replace(
        run, mesh=MeshShape(fsdp=8), training=dataclasses.replace(run.training, batch=64, seq=8192)
    )
    for more, tries in ((1.3, 1), (1.5, 2), (1e3, 3)):
        asked, said = list[Run](), list[str]()

        def needed(run: Run, more: float = more, asked: list[Run] = asked) -> float:
            asked.append(run)
            return price_run(run, machine).estimate.bytes * more

        chosen = with_choices_that_fit(run, machine, needed, said.append)
        assert chosen == asked[-1] and len(asked) == tries and len(said) == tries - 1
        planned = [price_run(run, machine).estimate.bytes for run in asked]
        assert planned == sorted(planned, reverse=True) and all(
            "does not fit: planned" in why for why in said
        )
    assert (
        with_choices_that_fit(chosen, machine, lambda run: math.inf, said.append) == chosen
    )  # nothing is open


def test_a_mesh_alone_is_given_the_plan_of_that_mesh() -> None:
    run, machine = find_recipe("llama3-70b"), parse_target("h100:64")
    training = dataclasses.replace(run.training, batch=128, seq=4096)
    run = dataclasses.replace(
        run, mesh=MeshShape.parse("stage=8,data=2,tensor=4"), training=training
    )
    best = price_mesh(run, machine, MeshShape.parse("stage=8,data=2,tensor=4"))[0]
    chosen = with_choices(run, machine)
    assert (
        best is not None
        and price_run(chosen, machine).name == best.name
        and chosen.layout == "zero1"
    )
    assert chosen.training.microbatches > 1 and best.estimate.bytes <= machine.chip.roomy_bytes


@pytest.mark.parametrize(
    ("mesh", "changes", "layout"),
    [
        ("expert=2,tensor=4", {}, "folded"),
        ("expert=8", {}, "auto"),  # nothing to fold
        ("expert=2,tensor=4", {"dispatch": "capacity"}, "auto"),
        ("expert=2,tensor=4", {"experts": 12}, "auto"),  # 8 devices do not divide 12 experts
        ("stage=2,data=2,tensor=2", {}, "folded_zero1"),
    ],
)
def test_experts_are_folded_where_that_is_predicted_to_be_faster(
    mesh: str, changes: dict[str, Any], layout: str
) -> None:
    """Without room for all rows: with it a device computes elementwise on up to n times an even share of them."""
    run, machine = find_recipe("qwen3-30b-a3b"), parse_target("h100:8")
    training = dataclasses.replace(run.training, batch=32, seq=4096)
    model = dataclasses.replace(run.model, layers=4, **changes)
    run = dataclasses.replace(run, model=model, mesh=MeshShape.parse(mesh), training=training)
    chosen = with_choices(run, machine)
    assert chosen.layout == layout
    if layout.startswith("folded"):
        plain = dataclasses.replace(
            chosen, layout=layout.replace("folded_", "").replace("folded", "fsdp")
        )
        assert (
            price_run(chosen, machine).estimate.seconds < price_run(plain, machine).estimate.seconds
        )
        assert with_choices(dataclasses.replace(run, layout="fsdp"), machine).layout == "fsdp"


def test_virtual_stages_are_tried_while_layers_allow() -> None:
    """Fewer than one part of each stage may be empty: 126 layers are 128 parts of one layer (arXiv:2407.21783)."""
    run = find_recipe("llama3-405b")
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, batch=2048, seq=8192))
    tried: dict[str, set[int]] = {}
    for scheduled in candidate_schedules(run, MeshShape.parse("stage=16,data=128,tensor=8")):
        training = scheduled.training
        tried.setdefault(training.pipeline_schedule, set()).add(training.virtual_stages)
        place_run(scheduled)
    assert tried["interleaved"] == {2, 4, 8} and tried["zbv"] == {2} and tried["1f1b"] == {1}


def test_what_a_stage_keeps_is_on_the_device() -> None:
    with pytest.raises(ConfigError, match="remat policy that does not offload"):
        place_run(tiny_run(MODELS["llama"], "stage=2", remat="offload", stage_saves="layers"))


def test_saved_layers_that_cannot_be() -> None:
    run = find_recipe("llama2-7b")
    for changes, mesh, said in (
        ({"saved_layers": 33}, "fsdp=16", "the model has 32 layers"),
        ({"saved_layers": 4, "microbatches": 4}, "stage=2,fsdp=8", "one remat policy"),
    ):
        with pytest.raises(ConfigError, match=said):
            training = dataclasses.replace(run.training, **changes)
            place_run(dataclasses.replace(run, mesh=MeshShape.parse(mesh), training=training))
