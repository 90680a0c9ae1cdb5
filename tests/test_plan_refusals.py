"""What `plan` refuses, and what it says of machines that are too large: each fix holds, each reason is the run's own."""

import dataclasses
import re

import pytest

from meshwright.errors import ConfigError
from meshwright.hardware.targets import parse_target
from meshwright.planner.explain import fewer_are_faster, notes, nothing_fits, smaller_target
from meshwright.planner.search import search
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES


def run_with(recipe: str, **changes: int) -> Run:
    """A recipe with a vocabulary and changed fields of its training."""
    run = find_recipe(recipe)
    model = dataclasses.replace(run.model, vocab=run.model.vocab or 50257)
    training = dataclasses.replace(run.training, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(run, model=model, training=training)


def refusal(run: Run, on: str) -> ConfigError:
    """The error of a run that has no plan on a machine."""
    result = search(run, parse_target(on))
    assert not result.plans
    return nothing_fits(run, result)


@pytest.mark.parametrize("on", ["h100:1", "h100:6", "h100:8", "v5e:4x4"])
@pytest.mark.parametrize("seq", [1025, 4096, 262144])
def test_what_no_mesh_can_have_is_said_first_and_alike_everywhere(seq: int, on: str) -> None:
    error = refusal(run_with("gpt2", seq=seq, batch=48), on)
    assert str(error) == str(refusal(run_with("gpt2", seq=seq, batch=48), "h100:2"))
    assert "the model has 1024 positions" in str(error)
    assert error.fix.startswith("--seq 1024")


@pytest.mark.parametrize(
    ("recipe", "on", "changes"),
    [
        ("gpt2", "h100:6", {"seq": 262144}),
        ("gpt2", "h100:7", {"batch": 3, "seq": 1023}),
        ("llama32-1b", "h100:7", {"batch": 3, "seq": 8191}),
        ("llama32-1b", "h100:5", {"batch": 1, "seq": 2047}),
    ],
)
def test_a_batch_or_sequence_that_is_advised_has_a_plan(
    recipe: str, on: str, changes: dict[str, int]
) -> None:
    fix = refusal(run_with(recipe, **changes), on).fix
    advised = re.findall(r"--(batch|seq) (\d+)", fix)
    assert advised, fix
    for field, value in advised:
        fixed = run_with(recipe, **{"batch": 6, **changes, field: int(value)})
        assert search(fixed, parse_target(on)).plans, f"--{field} {value}"


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_no_pipeline_is_offered_that_mostly_waits(batch: int) -> None:
    run = run_with("llama32-1b", batch=batch, seq=8192)
    result = search(run, parse_target("h100:8"))
    for plan in (*result.plans, *result.too_large):
        assert plan.mesh.stage <= max(1, batch // plan.mesh.over(BATCH_AXES)), plan.name
        assert plan.estimate.parts["bubble"] < 0.5 * plan.estimate.seconds, plan.name
    waiting = [text for mesh, text in result.refused.items() if mesh == "stage=8"]
    assert len(waiting) == 1 and f"a stage waits during {7 / (batch + 7):.0%}" in waiting[0]
    # A mesh that is asked for is priced.
    shape = next(s for s in map(type(result.plans[0].mesh).parse, ["stage=8"]))
    assert any(plan.mesh == shape for plan in search(run, parse_target("h100:8"), (shape,)).plans)


def test_a_larger_machine_that_is_slower_says_so() -> None:
    run = run_with("gpt2", batch=32, seq=1024)
    results = {on: search(run, parse_target(on)) for on in ("h100:4", "h100:6", "h100:8")}
    seconds = {on: result.plans[0].estimate.seconds for on, result in results.items()}
    assert seconds["h100:8"] < seconds["h100:4"] < seconds["h100:6"]
    said = [note for note in notes(run, results["h100:6"]) if "devices are slower than" in note]
    assert len(said) == 1 and said[0].startswith("6 devices are slower than 4: ")
    assert not [note for note in notes(run, results["h100:8"]) if "slower" in note]
    ranked = fewer_are_faster([result.plans[0] for result in results.values()])
    assert ranked == said


@pytest.mark.parametrize(
    ("on", "smaller"),
    [
        ("h100:6", "h100:1x4"),
        ("h100:24", "h100:2x8"),
        ("h100:8", "h100:1x4"),
        ("h100:12", "h100:1x8"),
        ("h100:20", "h100:2x8"),
        ("h100:4x4", "h100:2x4"),
        ("v5e:4x4", "v5e:2x4"),
        ("h100:1", None),
    ],
)
def test_the_next_smaller_machine_is_one_of_the_same_chips(on: str, smaller: str | None) -> None:
    found = smaller_target(parse_target(on))
    assert (None if found is None else str(found)) == smaller


@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_that_is_advised_is_the_nearest_with_a_plan(batch: int) -> None:
    run = run_with("tiny", batch=batch)
    fix = refusal(run, "h100:16").fix
    advised = int(fix.removeprefix("--batch "))
    nearer = range(batch - abs(advised - batch) + 1, batch + abs(advised - batch))
    for size in nearer:
        if size > 0:
            assert not search(run_with("tiny", batch=size), parse_target("h100:16")).plans, size
    assert search(run_with("tiny", batch=advised), parse_target("h100:16")).plans


def test_a_batch_that_no_mesh_divides_has_its_arithmetic() -> None:
    error = refusal(run_with("tiny", batch=16), "gb200:1x7")
    assert "16 = 2 * 7 + 2, so a factor of 7 must be in stage, context or tensor" in str(error)
    assert error.fix == "--batch 14"


@pytest.mark.parametrize("gb", [25, 80])
def test_a_plan_without_room_for_the_compiler_says_so(gb: int) -> None:
    """Llama 3.2 1B takes 20 GB at least: more than three quarters of 25."""
    target = parse_target("h100:1")
    chip = dataclasses.replace(target.chip, hbm_bytes=gb * 1e9)
    run = run_with("llama32-1b", batch=4, seq=4096)
    found = search(run, dataclasses.replace(target, chip=chip))
    taken = found.plans[0].estimate.bytes / chip.hbm_bytes
    said = [note for note in notes(run, found) if f"takes {taken:.0%}, and above 75%" in note]
    assert len(said) == (taken > 0.75) == (gb == 25)
