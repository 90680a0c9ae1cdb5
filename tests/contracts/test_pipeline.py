"""Every pipeline schedule gives the numbers of one device; all but gpipe take no more memory for more microbatches."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import (
    MODELS,
    assert_same_initial,
    assert_same_steps,
    device_run_of,
    tiny_run,
    train,
    train_on_one_device,
)

import meshwright as mw
from meshwright.analysis.run_census import census_of_train_step
from meshwright.errors import ConfigError
from meshwright.step import pipeline
from meshwright.step.gradients import build_gradients
from meshwright.step.train_step import build_train_step
from meshwright.trust import own

STEPS = 3
ZBV = own("outside.extensions.zbv:zbv")


exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("family", "layers", "mesh", "microbatches", "schedule"),
    [
        pytest.param("llama", 3, "stage=1,data=2", 8, "1f1b", marks=exhaustive),
        pytest.param("llama", 4, "stage=2,fsdp=2,tensor=2", 4, "1f1b", marks=exhaustive),
        pytest.param("gpt2", 4, "stage=4,data=2", 8, "1f1b", marks=exhaustive),
        pytest.param("qwen-like", 6, "stage=4,tensor=2", 2, "1f1b", marks=exhaustive),
        ("qwen-like", 3, "stage=2,data=2", 8, "gpipe"),
        pytest.param("llama", 4, "stage=4,fsdp=2", 2, "gpipe", marks=exhaustive),
        ("llama", 4, "stage=2,data=2", 4, "zbv"),
        pytest.param("llama", 8, "stage=4,data=2", 8, "zbv", marks=exhaustive),
        pytest.param("gpt2", 5, "stage=2,fsdp=2,tensor=2", 4, "zbv", marks=exhaustive),
        pytest.param("deepseek-like", 5, "stage=2,expert=2,tensor=2", 2, "zbv", marks=exhaustive),
        pytest.param("gpt2", 3, "stage=2,fsdp=4", 2, "zero_bubble", marks=exhaustive),
        pytest.param("llama", 4, "stage=4", 16, "zero_bubble", marks=exhaustive),
        ("qwen-like", 3, "stage=2,tensor=2", 4, "interleaved"),  # one of four parts is empty
        pytest.param("qwen-like", 5, "stage=2,tensor=2", 4, "interleaved", marks=exhaustive),
        pytest.param("llama", 5, "stage=4,data=2", 4, "zbv", marks=exhaustive),
        pytest.param("llama", 8, "stage=4,data=2", 2, "interleaved", marks=exhaustive),
        pytest.param("llama", 4, "stage=2,data=2,fsdp=2", 4, "circular", marks=exhaustive),
        pytest.param("gpt2", 8, "stage=4,tensor=2", 8, "circular", marks=exhaustive),
        pytest.param("deepseek-like", 3, "stage=2,expert=2,tensor=2", 4, "1f1b", marks=exhaustive),
        pytest.param("mixtral", 4, "stage=2,expert=4", 2, "interleaved", marks=exhaustive),
        pytest.param("llama", 8, "stage=4,data=2", 8, ZBV, marks=exhaustive),
        pytest.param("gpt2", 5, "stage=2,fsdp=2,tensor=2", 4, ZBV, marks=exhaustive),
        pytest.param(
            "deepseek-like",
            5,
            "stage=2,expert=2,tensor=2",
            2,
            ZBV,
            marks=exhaustive,
        ),
        pytest.param(
            "llama", 4, "stage=4,fsdp=2", 4, own("outside_parts:half_split"), marks=exhaustive
        ),
    ],
)
def test_same_numbers_as_one_device(
    family: str, layers: int, mesh: str, microbatches: int, schedule: str
) -> None:
    model = dataclasses.replace(MODELS[family], layers=layers)
    run = tiny_run(model, mesh, microbatches=microbatches, pipeline_schedule=schedule)
    one, many = train_on_one_device(run, STEPS), train(run, STEPS)
    assert_same_initial(many, one)
    assert_same_steps(many, one)
    np.testing.assert_allclose(many.evaluate(), one.evaluate(), rtol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "family", "mesh", "schedule"),
    [
        ("ring", "llama", "stage=2,context=2", "1f1b"),
        pytest.param(
            "ring", "qwen-like", "stage=2,context=2,tensor=2", "interleaved", marks=exhaustive
        ),
        pytest.param("ring", "llama", "stage=2,context=4", "zbv", marks=exhaustive),
        pytest.param(
            "ring",
            "llama",
            "stage=2,context=2,fsdp=2",
            ZBV,
            marks=exhaustive,
        ),
        pytest.param("usp", "gpt2", "stage=2,context=4", "gpipe", marks=exhaustive),
    ],
)
def test_a_ring_inside_the_stages(strategy: str, family: str, mesh: str, schedule: str) -> None:
    """Keys and values pass along a ring of all devices, also those of stages that have no task in a tick."""
    model = dataclasses.replace(MODELS[family], layers=4)
    run = tiny_run(
        model, mesh, microbatches=4, pipeline_schedule=schedule, context_strategy=strategy
    )
    one = train_on_one_device(run, STEPS)
    many = train(run, STEPS, initial=one.initial)
    assert_same_steps(many, one)
    np.testing.assert_allclose(many.evaluate(), one.evaluate(), rtol=1e-5)


KEEPS = {"stage_saves": "layers"}


@pytest.mark.parametrize(
    ("family", "mesh", "schedule", "changes"),
    [
        ("llama", "stage=2,data=2", "1f1b", {"remat": "projections"}),
        pytest.param(
            "llama", "stage=2,fsdp=2,tensor=2", "gpipe", {"remat": "full"}, marks=exhaustive
        ),
        pytest.param(
            "qwen-like", "stage=2,tensor=2", "zbv", {"remat": "attention"}, marks=exhaustive
        ),
        pytest.param(
            "mixtral", "stage=2,expert=2", "interleaved", {"remat": "none"}, marks=exhaustive
        ),
        pytest.param(
            "gpt2", "stage=2,context=2", "1f1b", {"context_strategy": "ring"}, marks=exhaustive
        ),
    ],
)
def test_stages_that_keep_what_remat_saves(
    family: str, mesh: str, schedule: str, changes: dict[str, Any]
) -> None:
    model = dataclasses.replace(MODELS[family], layers=4)
    run = tiny_run(model, mesh, microbatches=4, pipeline_schedule=schedule, **KEEPS, **changes)
    one = train_on_one_device(run, STEPS)
    assert_same_steps(train(run, STEPS, initial=one.initial), one)


@pytest.mark.parametrize("schedule", ["zero_bubble", ZBV])
def test_stages_of_a_split_backward_pass_keep_their_inputs_alone(schedule: str) -> None:
    model = dataclasses.replace(MODELS["llama"], layers=4)
    run = tiny_run(
        model, "stage=2", microbatches=4, pipeline_schedule=schedule, remat="full", **KEEPS
    )
    with pytest.raises(ConfigError, match=r"--training\.stage-saves input"):
        train(run, 1)


def test_a_stage_keeps_no_parameters_of_layers_that_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are there: a slot for each microbatch would hold them as often."""
    found, kept = list[Any](), pipeline._Engine._kept
    monkeypatch.setattr(
        pipeline._Engine, "_kept", lambda engine: found.append(engine) or kept(engine)
    )
    model = mw.Gemma3(50, 64, 4, 8, 4, 8, 96, vocab_multiple=16, local_layers=1, sliding_window=5)
    device_run = device_run_of(
        tiny_run(model, "stage=2", microbatches=4, dropout=0.0, remat="feed_forward", **KEEPS)
    )
    build_train_step(device_run).lower(device_run.abstract, device_run.abstract_batch)
    stacked = [path for path, p, _ in device_run.layout.leaves if "L" in p.dims]
    assert set(found[0]._backward_of_part.input_of.values()) >= set(range(len(stacked)))


def test_a_stage_that_keeps_everything_recomputes_nothing() -> None:
    run = tiny_run(MODELS["llama"], "stage=2", microbatches=4, dropout=0.0, remat="none", **KEEPS)
    by_phase = dict.fromkeys(("forward", "recomputed", "backward"), 0.0)
    for matmul in census_of_train_step(device_run_of(run)).flops.matmuls:
        by_phase[matmul.phase] += matmul.flops
    # The loss recomputes its logits, and blocked attention its scores.
    assert by_phase["recomputed"] < 0.2 * by_phase["forward"]
    assert by_phase["backward"] == pytest.approx(2 * by_phase["forward"], rel=0.2)


@pytest.mark.parametrize(
    ("microbatches", "schedule"),
    [
        pytest.param(1, "1f1b", marks=exhaustive),
        (3, "interleaved"),
        pytest.param(5, "zero_bubble", marks=exhaustive),
        pytest.param(7, "1f1b", marks=exhaustive),
    ],
)
def test_uneven_microbatches(microbatches: int, schedule: str) -> None:
    """Fewer microbatches than stages, and numbers that the stages do not divide."""
    model = dataclasses.replace(MODELS["llama"], layers=4 if schedule == "interleaved" else 2)
    run = tiny_run(
        model,
        "stage=2,data=2",
        batch=2 * microbatches,
        microbatches=microbatches,
        pipeline_schedule=schedule,
    )
    one = train_on_one_device(run, 2)
    assert_same_steps(train(run, 2, initial=one.initial), one)


def peak(schedule: str, microbatches: int) -> int:
    """Returns the compiler's bytes of temporaries on a device, for microbatches of two sequences."""
    model = dataclasses.replace(MODELS["llama"], layers=4)
    changes = {"batch": 2 * microbatches, "seq": 128, "microbatches": microbatches, "dropout": 0.0}
    run = tiny_run(model, "stage=2", pipeline_schedule=schedule, **changes)
    device_run = device_run_of(run)
    gradients = jax.jit(build_gradients(device_run))
    compiled = gradients.lower(
        device_run.abstract.params, device_run.abstract.step, device_run.abstract_batch
    ).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


@pytest.mark.parametrize(
    "schedule",
    ["1f1b", *(pytest.param(s, marks=exhaustive) for s in ("interleaved", "zbv", "zero_bubble"))],
)
def test_memory_is_constant_in_microbatches(schedule: str) -> None:
    one_input = 2 * 128 * 64 * 4
    # The tables grow by some bytes per tick.
    assert abs(peak(schedule, 24) - peak(schedule, 8)) < one_input / 10


@exhaustive
def test_gpipe_grows() -> None:
    microbatches = (4, 8, 16)
    grows = [peak("gpipe", m) for m in microbatches]
    one_input = 2 * 128 * 64 * 4
    # One more input and one more gradient for each further microbatch.
    assert [b - a for a, b in itertools.pairwise(grows)] == pytest.approx(
        [2 * one_input * (b - a) for a, b in itertools.pairwise(microbatches)], rel=0.01
    )


@pytest.mark.parametrize(
    ("schedule", "permutes"),
    [
        # Of P - 1 + M ticks with forward passes all but the last send activations, and the same number sends gradients.
        ("1f1b", 2 * 5),
        pytest.param("gpipe", 2 * 5, marks=exhaustive),
    ],
)
def test_the_compiled_ticks_are_those_of_the_table(schedule: str, permutes: int) -> None:
    """A half of a tick counts as often as the table takes it, and is not in the loops of other ticks."""
    run = tiny_run(
        MODELS["llama"],
        "stage=2,tensor=2",
        microbatches=4,
        dropout=0.0,
        remat="none",
        pipeline_schedule=schedule,
    )
    device_run = device_run_of(run)
    census = census_of_train_step(device_run)
    table = device_run.schedule_table
    assert not any(entry.conditional for entry in census.ledger)
    passes = sum(e.count for e in census.ledger if e.kind == "collective-permute")
    assert passes == permutes, (passes, table.segments)
    # A layer gathers its sequence twice: in four forward ticks and again in four backward ticks, where the backward
    # pass of its two reduce-scatters gathers twice more.
    gathered = sum(
        e.count for e in census.ledger if e.kind == "all-gather" and e.axes_label == "tensor"
    )
    unembedding = 4
    assert gathered == 4 * (2 + 2 + 2) + unembedding + 4
    by_phase = {matmul.phase: 0.0 for matmul in census.flops.matmuls}
    for matmul in census.flops.matmuls:
        by_phase[matmul.phase] += matmul.flops
    assert by_phase["recomputed"] == pytest.approx(by_phase["forward"], rel=0.3)
    assert by_phase["backward"] == pytest.approx(2 * by_phase["forward"], rel=0.3)
