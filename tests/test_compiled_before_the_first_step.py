"""Programs of a training that are needed later: as small as the train step, and compiled before the first step."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_checkpoint import text_run, train_into
from tiny_runs import MODELS, device_run_of, random_batch, tiny_run

from meshwright.analysis.run_census import census_of_eval_step
from meshwright.config import Training
from meshwright.data.batch import ramp_of
from meshwright.step import device_memory, eval_step, train_step
from meshwright.step.device_memory import OutOfDeviceMemory, Room
from meshwright.step.eval_step import build_eval_step
from meshwright.step.train_step import build_train_step
from meshwright.trainer import prepare


def test_an_evaluation_takes_the_microbatches_of_training() -> None:
    """No more temporaries than a train step, where they were 5 times as many; and the loss of the whole batch."""
    run = tiny_run(MODELS["llama"], "fsdp=8", batch=64, seq=128, microbatches=8)
    device_run = device_run_of(run)
    batch, params = device_run.abstract_batch, device_run.abstract.params
    trains = (
        build_train_step(device_run).lower(device_run.abstract, batch).compile().memory_analysis()
    )
    evaluates = build_eval_step(device_run).lower(params, batch).compile().memory_analysis()
    assert evaluates.temp_size_in_bytes <= trains.temp_size_in_bytes
    whole = device_run_of(
        dataclasses.replace(run, training=dataclasses.replace(run.training, microbatches=1))
    )
    values, given = device_run.initial_state().params, random_batch(device_run)
    losses = [build_eval_step(d)(values, given)["loss"] for d in (device_run, whole)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert census_of_eval_step(device_run).flops.compiled > 0


def test_sizes_of_a_ramp_that_are_ahead() -> None:
    ramp = ramp_of(Training(batch=256, batch_ramp=("100=64", "200=128")))
    assert ramp.sizes_of(0, 1000) == (64, 128, 256)
    assert ramp.sizes_of(100, 1000) == (128, 256) and ramp.sizes_of(300, 1000) == (256,)
    assert ramp.sizes_of(0, 300) == (64, 128) and ramp.sizes_of(99, 100) == (64,)


@dataclasses.dataclass
class _Compiled:
    """Programs that were compiled, in order, and those of them that were called."""

    compiled: list[str] = dataclasses.field(default_factory=list)
    steps: int = 0


def _watch(monkeypatch: pytest.MonkeyPatch) -> _Compiled:
    seen, compile_once, take = (
        _Compiled(),
        train_step.compile_on_devices,
        train_step.CompiledTrainStep.__call__,
    )

    def compile_on_devices(device_run: Any, lowered: Any, what: str, resident: int = 0) -> Any:
        assert seen.steps == 0, f"{what} is compiled after step {seen.steps}"
        seen.compiled.append(f"{what} of {device_run.run.training.batch}")
        return compile_once(device_run, lowered, what, resident)

    def call(self: Any, *arguments: Any) -> Any:
        seen.steps += 1
        return take(self, *arguments)

    for module in (train_step, eval_step):
        monkeypatch.setattr(module, "compile_on_devices", compile_on_devices)
    monkeypatch.setattr(train_step.CompiledTrainStep, "__call__", call)
    return seen


def test_every_program_is_compiled_once_and_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    seen = _watch(monkeypatch)
    run = text_run(
        tmp_path, "fsdp=2", steps=4, batch=4, batch_ramp=("2=2",), eval_every=1, microbatches=1
    )
    summary = train_into(run, tmp_path / "out", cache)
    assert seen.compiled == ["a step of 2", "a step of 4", "an evaluation step of 4"]
    assert (seen.steps, summary.steps) == (4, 4) and summary.held_out_loss is not None


def test_an_evaluation_that_does_not_fit_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    """The optimizer state is in memory meanwhile, and counts: on an accelerator the program takes parameters alone."""
    seen, given = _watch(monkeypatch), []
    check = device_memory.check_memory

    def little_room(compiled: Any, devices: Any, asked: str, resident: int = 0) -> None:
        given.append(resident)
        if "evaluation" in asked:
            monkeypatch.setattr(device_memory, "_host_memory", lambda: Room(2**10, "this host"))
        check(compiled, devices, asked, resident)

    monkeypatch.setattr(train_step, "check_memory", little_room)
    run = text_run(tmp_path, "fsdp=2", steps=4, batch=4)
    optimizer = prepare.prepare_run(run, cache=cache).device_run.abstract.optimizer
    with pytest.raises(
        OutOfDeviceMemory, match="an evaluation step of 4 sequences of 16 tokens on mesh fsdp=2"
    ):
        train_into(run, tmp_path / "out", cache)
    assert seen.steps == 0 and given == [
        0,
        sum(x.nbytes for x in jax.tree.leaves(_on_one_device(optimizer))),
    ]


def _on_one_device(tree: Any) -> Any:
    """The shards of a tree's arrays on one device."""
    return jax.tree.map(lambda x: np.empty(x.sharding.shard_shape(x.shape), x.dtype), tree)
