"""Plans compiled in child processes: their figures, their cache, and what tuning keeps."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from tiny_runs import MODELS, tiny_run

import meshwright as mw
from meshwright.analysis import run_census
from meshwright.analysis.programs import Census, OutOfMemory, compiler_error
from meshwright.api import planning, proofs
from meshwright.api.planning import PlanOptions
from meshwright.api.proofs import Proof, prove_best, prove_plan, tune
from meshwright.api.verb import Call
from meshwright.config import MeshShape
from meshwright.errors import CensusError, ConfigError
from meshwright.hardware.targets import parse_target
from meshwright.planner.plan_file import read_plan
from meshwright.planner.search import Plan, price_run
from meshwright.reporters.console import open_console
from meshwright.runs.recipe import find_recipe

TARGET = parse_target("v5p:2x2x2")


def plan(remat: str = "full") -> Plan:
    run = find_recipe("llama3-8b")
    training = dataclasses.replace(run.training, batch=64, remat=remat)
    return price_run(dataclasses.replace(run, mesh=MeshShape(fsdp=8), training=training), TARGET)


def answer(monkeypatch: pytest.MonkeyPatch, out: str = "", err: str = "") -> list[list[str]]:
    asked: list[list[str]] = []

    def start(command: list[str], *, stdout: int, stderr: Any, **_: object) -> object:
        asked.append(command)
        assert json.loads(Path(command[5]).read_text())["target"] == str(TARGET)
        os.write(stdout, out.encode())
        stderr.write(err)
        # No process has this number, so none is limited.
        return SimpleNamespace(pid=-1, wait=lambda seconds=None: 2 if err else 0, kill=lambda: None)

    monkeypatch.setattr(proofs, "require_compiler", lambda target: None)
    monkeypatch.setattr(proofs, "compiler_environment", lambda target: {})
    monkeypatch.setattr(proofs.subprocess, "Popen", start)
    return asked


def census_json(seconds: float, live: float) -> str:
    schedule = {"step_seconds": seconds}
    return (
        json.dumps(
            {"simulated_schedule": schedule, "memory": {"live": live}, "compile_seconds": 40.0}
        )
        + "\n"
    )


def test_a_proof_brings_back_seconds_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, "noise\n" + census_json(7.5, 2e10))
    proof = prove_plan(plan(), TARGET, 60)
    assert (proof.step_seconds, proof.peak_bytes, proof.compile_seconds, proof.refused) == (
        7.5,
        2e10,
        40.0,
        "",
    )
    assert asked[0][3:5] == ["meshwright", "prove"]


def test_a_proof_that_is_too_large_or_refused_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, census_json(7.5, 2e11))
    assert prove_plan(plan(), TARGET, 60).refused == "186 GiB of 95.7 GiB"
    answer(
        monkeypatch, "", "error: compiling\n  because: D=3 does not divide\n  fix: another mesh\n"
    )
    refused = prove_plan(plan(), TARGET, 60)
    assert refused.step_seconds is None and refused.refused == "D=3 does not divide"
    answer(monkeypatch, "", "Traceback (most recent call last):\nValueError: no such layout\n")
    assert (
        "the compiler failed: ValueError: no such layout" in prove_plan(plan(), TARGET, 60).refused
    )


def quiet(line: str) -> None:
    """Shows no progress."""


def test_proofs_rank_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"full": 9.0, "projections": 8.0, "none": 1.0}

    def prove(plan: Plan, target: Any, limit: int) -> Proof:
        remat = plan.run.training.remat
        return Proof(plan, seconds[remat], 1e10, 1.0, "too large" if remat == "none" else "")

    monkeypatch.setattr(proofs, "prove_plan", prove)
    ranked = prove_best([plan("full"), plan("none"), plan("projections")], TARGET, 60, quiet)
    assert [p.plan.run.training.remat for p in ranked] == ["projections", "full", "none"]


def test_tuning_keeps_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(plan: Plan, target: Any, limit: int) -> Proof:
        training = plan.run.training
        seconds = (
            10.0
            - (2.0 if training.reduce_dtype == "bfloat16" else 0)
            - (0 if training.compiler_options else 1.0)
        )
        seconds += 1.0 if training.logits_mib != 1024 else 0.0
        seconds += 0.5 if training.microbatches > 1 else 0.0
        too_large = training.remat != "full"
        return Proof(plan, seconds - 5.0 * too_large, 1e10, 1.0, "too large" if too_large else "")

    monkeypatch.setattr(proofs, "prove_plan", prove)
    tuned = tune(prove(plan(), TARGET, 60), TARGET, 60, quiet)
    training = tuned.best.plan.run.training
    assert (
        tuned.best.step_seconds == 7.0
        and training.reduce_dtype == "bfloat16"
        and training.remat == "full"
    )
    assert training.compiler_options == () and training.logits_mib == 1024
    names = {name for name, _ in tuned.tried}
    assert tuned.kept == {"gradients summed in bfloat16", "the compiler's own options"}
    assert {
        *tuned.kept,
        "logits of 2048 MiB",
        "attention in blocks of 1024",
        "2 microbatches",
    } <= names
    assert "0 microbatch" not in names  # one is the least
    became = {name: proof.refused for name, proof in tuned.tried}
    assert became["2 microbatches"] == "" and became["remat attention_out"] == "too large"
    # Of a plan that does not fit the slower variant that does is taken.
    small = dataclasses.replace(prove(plan(), TARGET, 60), step_seconds=1.0, refused="too large")
    found = tune(small, TARGET, 60, quiet).best
    assert found.step_seconds == 7.5 and not found.refused
    with pytest.raises(ConfigError, match="it cannot be compiled: no room"):
        tune(Proof(plan(), None, None, None, "no room"), TARGET, 60, quiet)


@pytest.mark.parametrize(
    ("target", "remats"),
    [
        ("v5p:2x2x2", {"attention_out", "offload_attention", "offload"}),
        ("h100:8", {"feed_forward", "attention_out"}),
    ],
)
def test_neighbours_of_a_policy_are_those_of_the_machine(target: str, remats: set[str]) -> None:
    tried = [
        run.training.remat
        for name, run in proofs.trials(plan().run, parse_target(target))
        if "remat" in name
    ]
    assert set(tried) == remats


def test_what_was_tuned_is_printed_drawn_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prove(plan: Plan, target: Any, limit: int) -> Proof:
        training = plan.run.training
        refused = "took too long" if training.logits_mib == 256 else ""
        return Proof(
            plan, 9.0 if training.reduce_dtype == "bfloat16" else 10.0, 1e10, 40.0, refused
        )

    monkeypatch.setattr(proofs, "prove_plan", prove)
    monkeypatch.setattr(planning, "require_compiler", lambda target: None)
    page, file = tmp_path / "plan.html", tmp_path / "plan.json"
    run = find_recipe("llama3-8b")
    options = PlanOptions(
        run=run, on=str(TARGET), tokens_per_step="256k", prove=2, tune=True, html=page, out=file
    )
    options.act(Call((), open_console(), lambda value: None))
    printed = capsys.readouterr().out
    assert (
        "Compiled for the hardware" in printed
        and "gradients summed in bfloat16" in printed
        and "best: 9 s, -10.0%" in printed
    )
    drawn = page.read_text()
    assert (
        "Compiled for the hardware" in drawn and "Tuned, each change on top of those kept" in drawn
    )
    assert "took too long" in drawn
    written = json.loads(file.read_text())
    assert len(written["proofs"]) == 2 and [t["change"] for t in written["tuned"] if t["kept"]] == [
        "gradients summed in bfloat16"
    ]
    assert read_plan(file).run.training.reduce_dtype == "bfloat16"
    quiet = dataclasses.replace(options, json=True, html=None, out=None)
    document = quiet.act(Call((), open_console(), lambda value: None)).record
    assert (
        document["proofs"][0]["step_seconds"] == 10.0
        and document["tuned"][0]["planned_seconds"] > 0
    )


def test_a_proof_is_kept_and_a_broken_one_made_again(tmp_path: Path) -> None:
    made, file = [], tmp_path / "proofs" / "key.json"

    def census() -> Census:
        made.append("census")
        return mw.census(lambda x: x + 1, jnp.ones(3))

    first, again = (run_census.cached(file, Census, census, fresh=False) for _ in range(2))
    assert len(made) == 1 and again.text == first.text
    run_census.cached(file, Census, census, fresh=True)
    assert len(made) == 2
    for broken in (b"", b"\x80", b'{"no": "census"}'):
        file.write_bytes(broken)
        assert run_census.cached(file, Census, census, fresh=False).name == first.name
    assert len(made) == 5


def test_a_proof_is_of_its_program_machine_and_options() -> None:
    from tiny_runs import device_run_of

    def key(target: str, **changes: Any) -> str:
        return run_census.cache_key(
            device_run_of(tiny_run(MODELS["llama"], "fsdp=2", **changes)), parse_target(target)
        )

    same = key("v5p:2x2x1")
    assert same == key("v5p:2x2x1")
    assert (
        len({same, key("v5e:2x2"), key("v5p:2x2x1", remat="none"), key("v5p:2x2x1", batch=32)}) == 4
    )


def test_errors_of_the_compiler_are_explained() -> None:
    error = RuntimeError(
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (101.49G) exceeds available HBM (95.73G)."
    )
    found = compiler_error(error)
    assert isinstance(found, OutOfMemory) and found.exit_code == 6
    assert found.required - found.available == pytest.approx(5.76 * 2**30)
    assert "101 GiB of HBM at the peak" in str(found)
    other = compiler_error(
        RuntimeError(
            "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of vmem" + 999 * "."
        )
    )
    assert (
        isinstance(other, CensusError)
        and "ScopedVmemOom: Ran out of vmem.." in str(other)
        and len(str(other)) < 750
    )


@pytest.mark.parametrize(
    ("recipe", "target", "given"),
    [
        ("qwen3-30b-a3b", "h100:16", True),
        ("llama3-8b", "v6e:4x4", True),
        ("llama3-8b", "v5e:4x4", False),
    ],
)
def test_options_of_a_program_are_tried_without_too(recipe: str, target: str, given: bool) -> None:
    """Options of a chip, and schedules by predicted times: the compiler's own may be faster."""
    run = dataclasses.replace(find_recipe(recipe), mesh=MeshShape.parse("fsdp=16"))
    run = dataclasses.replace(
        run, training=dataclasses.replace(run.training, batch=64, remat="full", microbatches=1)
    )
    names = {name for name, _ in proofs.trials(run, parse_target(target))}
    assert ("the compiler's own options" in names) == given
