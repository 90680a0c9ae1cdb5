"""Checkpoints: a resumed run is bitwise the uninterrupted one, on another mesh within rounding; damage is refused."""

import dataclasses
import gc
import json
import logging
import math
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import MODELS, device_run_of, tiny_run

from meshwright.checkpoint.checkpoints import Checkpoints, check_room, named_tensors
from meshwright.checkpoint.layer_order import abstract_in_layer_order, reordering
from meshwright.checkpoint.steps import committed_steps
from meshwright.config import Data, Faults, MeshShape
from meshwright.documents import seal
from meshwright.errors import CheckpointError, ConfigError, RoomError, TrainingError
from meshwright.runs.run import Run
from meshwright.sharding.params import layers_to_rows, named_leaves, rows_to_layers
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State
from meshwright.trainer import loop, prepare

MESH = "data=2,fsdp=2,tensor=2"
TEXT = "the quick brown fox jumps over the lazy dog; " * 400


def text_run(tmp_path: Path, mesh: str = MESH, **changes: Any) -> Run:
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    model = dataclasses.replace(MODELS[changes.pop("family", "llama")], vocab=None)
    data = Data(paths=(str(text),), tokenizer="chars", sample=0)
    return tiny_run(model, mesh, data=data, **changes)


def train_into(run: Run, out: Path, cache: Path, **how: Any) -> loop.Summary:
    return loop.train(loop.prepare_run(run, cache=cache), out, **how)


def final_state(run: Run, out: Path, cache: Path) -> State:
    with Checkpoints(out / "checkpoints", max_to_keep=9) as checkpoints:
        return checkpoints.restore(loop.prepare_run(run, cache=cache).device_run)[0]


def assert_same_bits(a: State, b: State) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(autouse=True, scope="module")
def programs_are_compiled_once() -> Iterator[None]:
    """Runs of this file that have the same program share its executable, as `prepare_run` shares their data."""
    compiled: dict[tuple[Any, Run], Any] = {}

    def shared(build: Any) -> Any:
        def build_once(device_run: DeviceRun, *like: Any) -> Any:
            run = device_run.run
            # None of these is part of a program.
            training = dataclasses.replace(
                run.training, save_every=0, max_to_keep=1, eval_every=0, log_every=1
            )
            key = (
                build,
                dataclasses.replace(
                    run, training=training, data=Data(), name="", reporters=(), faults=Faults()
                ),
            )
            if key not in compiled:
                compiled[key] = build(device_run, *like)
            return compiled[key]

        return build_once

    with pytest.MonkeyPatch.context() as patch:
        for name in ("CompiledTrainStep", "compile_eval_step"):
            patch.setattr(prepare, name, shared(getattr(prepare, name)))
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Run, Path]:
    """60 steps without interruption, and the checkpoints of steps 20 and 37 on the way."""
    tmp_path = tmp_path_factory.mktemp("uninterrupted")
    run = text_run(tmp_path, steps=60, max_to_keep=9)
    train_into(run, tmp_path / "out", cache)
    return run, tmp_path


class StopAt:
    """Asks the run to stop, as SIGTERM would, once `step` has been reported."""

    def __init__(self, step: int):
        self.step = step

    def write(self, step: int, values: dict[str, float]) -> None:
        import os
        import signal

        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None: ...


def test_a_run_stopped_twice_is_bitwise_the_uninterrupted_run(
    uninterrupted: tuple[Run, Path], tmp_path: Path, cache: Path
) -> None:
    run, folder = uninterrupted
    out = tmp_path / "out"
    first = train_into(run, out, cache, reporters=lambda start: [StopAt(19)])
    assert (first.interrupted_by, first.steps) == (15, 20)
    second = train_into(run, out, cache, start="resume", reporters=lambda start: [StopAt(36)])
    assert second.steps == 37
    third = train_into(run, out, cache, start="resume")
    assert (third.interrupted_by, third.steps) == (0, 60)
    assert_same_bits(final_state(run, out, cache), final_state(run, folder / "out", cache))
    assert losses_of(out) == losses_of(folder / "out")
    assert [step for step, _ in losses_of(out)] == list(range(1, 61))


def losses_of(out: Path) -> list[tuple[int, float]]:
    """Step and loss of the lines of steps; a run that stops adds a line of its goodput."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.parametrize(
    "mesh",
    [
        *(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in ("data=1", "fsdp=8")),
        "data=4,tensor=2",
    ],
)
def test_resumed_on_another_mesh_agrees(
    uninterrupted: tuple[Run, Path], tmp_path: Path, cache: Path, mesh: str
) -> None:
    run, folder = uninterrupted
    out = tmp_path / "out"
    train_into(run, out, cache, reporters=lambda start: [StopAt(19)])
    moved = dataclasses.replace(run, mesh=MeshShape.parse(mesh))
    summary = train_into(moved, out, cache, start="resume")
    losses = [json.loads(x).get("loss") for x in (out / "metrics.jsonl").read_text().splitlines()]
    expected = [
        json.loads(x).get("loss")
        for x in (folder / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    resumed, reference = ([x for x in each if x is not None] for each in (losses, expected))
    assert summary.steps == len(resumed) == 60
    np.testing.assert_allclose(resumed[:20], reference[:20], rtol=0)
    np.testing.assert_allclose(resumed[20:], reference[20:], rtol=1e-5)


def test_another_padding_of_the_vocabulary_restores(
    uninterrupted: tuple[Run, Path], cache: Path
) -> None:
    run, folder = uninterrupted
    wider = dataclasses.replace(
        run, model=dataclasses.replace(run.model, vocab_multiple=40), mesh=MeshShape(fsdp=4)
    )
    narrow, wide = (
        final_state(run, folder / "out", cache),
        final_state(wider, folder / "out", cache),
    )
    rows = len(set(TEXT)) + 1
    assert wide.params["embed"].shape[0] == 40 != narrow.params["embed"].shape[0]
    np.testing.assert_array_equal(wide.params["embed"][:rows], narrow.params["embed"][:rows])
    assert not np.asarray(wide.params["embed"][rows:]).any()


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Run, Path]:
    """A run with checkpoints of steps 2 and 4."""
    tmp_path = tmp_path_factory.mktemp("two_checkpoints")
    run = text_run(tmp_path, "fsdp=2,tensor=2", steps=4, save_every=2, remat="none")
    train_into(run, tmp_path / "out", cache)
    return run, tmp_path / "out"


@pytest.fixture
def saved_twice(two_checkpoints: tuple[Run, Path], tmp_path: Path) -> tuple[Run, Path]:
    """The same run, in a folder that a test may damage."""
    run, out = two_checkpoints
    return run, Path(shutil.copytree(out, tmp_path / "out"))


def largest_file(folder: Path) -> Path:
    return max(
        (f for f in (folder / "state").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size
    )


def test_one_flipped_bit_names_the_tensor_and_the_previous_checkpoint(
    saved_twice: tuple[Run, Path], cache: Path
) -> None:
    run, out = saved_twice
    device_run = loop.prepare_run(run, cache=cache).device_run
    with Checkpoints(out / "checkpoints", max_to_keep=9) as checkpoints:
        state, manifest = checkpoints.restore(device_run)
    # A flipped bit that the file format does not detect: the tensor is saved with one bit changed, with the
    # fingerprints of the original state.
    bits = np.asarray(state.params["blocks"]["up"]).view(np.uint32).copy()
    bits[1, 3, 5] ^= 1
    damaged = jax.device_put(bits.view(np.float32), state.params["blocks"]["up"].sharding)
    params = {**state.params, "blocks": {**state.params["blocks"], "up": damaged}}
    shutil.rmtree(out / "checkpoints" / "4")
    with Checkpoints(out / "checkpoints", max_to_keep=9) as checkpoints:
        checkpoints.save(
            dataclasses.replace(state, params=params), device_run, step=4, cursor=manifest.cursor
        )
    file = out / "checkpoints" / "4" / "manifest" / "metadata"
    content = json.loads(file.read_text())
    content["tensors"] = manifest.to_dict()["tensors"]
    file.write_text(json.dumps(seal(content)))
    with (
        Checkpoints(out / "checkpoints", max_to_keep=9) as checkpoints,
        pytest.raises(
            CheckpointError, match=r"'params\.blocks\.up' is not what was saved(.|\n)*--at 2"
        ),
    ):
        checkpoints.restore(device_run)
    resumed = train_into(run, out, cache, start="resume", at=2)
    assert resumed.steps == 4
    assert (out / "set-aside" / "4").is_dir(), "no checkpoint is deleted"


def test_bits_flipped_on_disk_never_load(saved_twice: tuple[Run, Path], cache: Path) -> None:
    run, out = saved_twice
    device_run = loop.prepare_run(run, cache=cache).device_run
    with Checkpoints(out / "checkpoints", max_to_keep=9) as checkpoints:
        good = checkpoints.restore(device_run)[0]
    file = largest_file(out / "checkpoints" / "4")
    clean = file.read_bytes()
    for position in np.linspace(0, len(clean) - 1, 12).astype(int):
        damaged = bytearray(clean)
        damaged[position] ^= 16
        file.write_bytes(bytes(damaged))
        with Checkpoints(out / "checkpoints", max_to_keep=9) as checkpoints:
            try:
                assert_same_bits(checkpoints.restore(device_run)[0], good)
            except CheckpointError as error:
                assert "--at 2" in str(error) and len(str(error)) < 1500


def test_a_truncated_file_is_refused_and_the_previous_checkpoint_restores(
    saved_twice: tuple[Run, Path], cache: Path
) -> None:
    run, out = saved_twice
    device_run = loop.prepare_run(run, cache=cache).device_run
    file = largest_file(out / "checkpoints" / "4")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with Checkpoints(out / "checkpoints", max_to_keep=9) as checkpoints:
        with pytest.raises(CheckpointError, match=r"(cannot be read|is damaged)(.|\n)*--at 2"):
            checkpoints.restore(device_run)
        assert checkpoints.restore(device_run, 2)[1].step == 2


def test_another_model_is_refused_naming_its_first_tensor(
    saved_twice: tuple[Run, Path], cache: Path
) -> None:
    run, out = saved_twice
    other = dataclasses.replace(run, model=dataclasses.replace(run.model, mlp=64))
    with pytest.raises(
        CheckpointError,
        match=r"'params\.blocks\.down' is float32\[2, 96, 64\] in the checkpoint and",
    ):
        final_state(other, out, cache)
    with pytest.raises(
        CheckpointError, match=r"the model has a tensor '.*', and the checkpoint does not"
    ):
        final_state(text_run(out.parent, "fsdp=2,tensor=2", family="gpt2"), out, cache)
    half = dataclasses.replace(
        run, training=dataclasses.replace(run.training, param_dtype="bfloat16")
    )
    with pytest.raises(CheckpointError, match=r"is float32.* in the checkpoint and bfloat16"):
        final_state(half, out, cache)


def test_only_the_last_ones_are_kept(tmp_path: Path, cache: Path) -> None:
    run = text_run(tmp_path, "fsdp=2,tensor=2", steps=5, save_every=1, max_to_keep=2, remat="none")
    train_into(run, tmp_path / "out", cache)
    assert sorted(
        p.name for p in (tmp_path / "out" / "checkpoints").iterdir() if p.name.isdigit()
    ) == ["4", "5"]


def test_parameters_restore_without_the_optimizer_state(
    saved_twice: tuple[Run, Path], cache: Path
) -> None:
    run, out = saved_twice
    prepared = loop.prepare_run(dataclasses.replace(run, mesh=MeshShape(tensor=4)), cache=cache)
    with Checkpoints(out / "checkpoints", max_to_keep=9) as checkpoints:
        params, manifest = checkpoints.restore_params(prepared.device_run)
    for a, b in zip(
        jax.tree.leaves(params), jax.tree.leaves(final_state(run, out, cache).params), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert manifest.step == 4 and manifest.cursor == 4 * run.training.batch


def test_a_folder_of_another_run_is_refused(saved_twice: tuple[Run, Path], cache: Path) -> None:
    run, out = saved_twice
    with pytest.raises(ConfigError, match="holds the checkpoint of step 4 of another"):
        train_into(run, out, cache)
    with pytest.raises(CheckpointError, match="no checkpoint was committed there"):
        train_into(run, out.parent / "empty", cache, start="resume")
    with pytest.raises(CheckpointError, match="the folder has those of steps 2, 4"):
        train_into(run, out, cache, start="resume", at=3)


def test_disk_space_is_checked_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_run = device_run_of(tiny_run(MODELS["llama"]))
    nearly_full = shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: nearly_full)
    with pytest.raises(
        CheckpointError,
        match=r"takes up to 0\.\d MiB, 2 are kept while another is written, and 1\.0 MiB are free",
    ):
        check_room(tmp_path / "out", device_run, max_to_keep=2)


def test_checkpoints_that_will_be_replaced_count_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fitted its disk resumes on it: with room for 1.5 checkpoints besides the two that are kept."""
    device_run = device_run_of(tiny_run(MODELS["llama"]))
    size = sum(x.size * x.dtype.itemsize for x in named_tensors(device_run.abstract).values())
    usage = shutil._ntuple_diskusage(10 * size, 0, size * 3 // 2)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check_room(tmp_path / "out", device_run, 2, replaced=2)
    check_room(tmp_path / "out", device_run, 1, replaced=4)
    for keep, replaced in ((2, 1), (1, 0)):
        with pytest.raises(RoomError, match=r"more need room|2 are kept|1 are kept") as caught:
            check_room(tmp_path / "out", device_run, keep, replaced)
        assert caught.value.exit_code == 10


def test_a_failed_save_is_reported_once_and_leaves_the_process_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    device_run = device_run_of(tiny_run(MODELS["llama"], "fsdp=2,tensor=2"))
    state = device_run.initial_state()
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]

    def process() -> list[Any]:
        settings = [
            [logger.level, logger.disabled, *logger.filters, *logger.handlers] for logger in loggers
        ]
        return [sys.unraisablehook, *settings, *warnings.filters]

    before, limits = process(), resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path / "checkpoints", max_to_keep=2) as checkpoints:
        checkpoints.save(state, device_run, step=1, cursor=16)
        checkpoints.wait()
        # Larger files fail with EFBIG, as on a file system that is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, limits[1]))
        try:
            with pytest.raises(
                CheckpointError,
                match=r"than `ulimit -f`(.|\n)*the checkpoint of step 1 is intact and takes 0\.\d MiB",
            ) as caught:
                checkpoints.save(state, device_run, step=2, cursor=32)
                # The loop asks before each step: it does not go on to the next save.
                for _ in range(1000):
                    checkpoints.check()
                    time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert process() == before
        # The same object saves again.
        checkpoints.check()
        checkpoints.save(state, device_run, step=3, cursor=48)
    assert process() == before
    assert committed_steps(tmp_path / "checkpoints") == [1, 3]
    del caught
    gc.collect()
    output = capfd.readouterr()
    assert "Traceback" not in output.err and "Event loop" not in output.err


@pytest.mark.parametrize(("schedule", "layers"), [("interleaved", 8), ("1f1b", 7)])
def test_reordering_layers_takes_half_a_local_shard_of_memory(schedule: str, layers: int) -> None:
    """No device gathers the rows of all stages, neither for a save nor for a restore; tensors go in pieces."""
    model = dataclasses.replace(MODELS["llama"], layers=layers)
    run = tiny_run(model, "stage=4,fsdp=2", pipeline_schedule=schedule, microbatches=4)
    device_run = device_run_of(run)
    rows = {f"params.{name}": x for name, x in named_leaves(device_run.abstract.params).items()}
    in_order = abstract_in_layer_order(rows, device_run.layout.params)
    permuted = {
        name: p for name, p in named_leaves(device_run.layout.params).items() if p.order is not None
    }
    assert permuted
    for path, p in permuted.items():
        x, y = rows[f"params.{path}"], in_order[f"params.{path}"]
        local = 4 * math.prod(x.sharding.shard_shape(x.shape))
        for convert, source in ((rows_to_layers, x), (layers_to_rows, y)):
            compiled = (
                reordering(convert, p, x.shape, x.sharding, y.sharding).lower(source).compile()
            )
            pieces = 1 if x.ndim < 3 else 2
            assert compiled.memory_analysis().temp_size_in_bytes <= 2 * local / pieces + 1024, path
            assert "all-gather" not in compiled.as_text()


def test_a_loss_that_is_nan_stops_with_evidence(tmp_path: Path, cache: Path) -> None:
    from meshwright.config import Optimizer

    run = text_run(
        tmp_path,
        MESH,
        steps=20,
        optimizer=Optimizer(
            name="sgd", learning_rate=1e30, lr_schedule="constant", grad_clip_norm=0
        ),
    )
    with pytest.raises(
        TrainingError, match=r"gradient norm (nan|inf)(.|\n)*its batch are saved in"
    ) as caught:
        train_into(run, tmp_path / "out", cache)
    folder = next((tmp_path / "out").glob("evidence-step-*"))
    step = int(folder.name.rsplit("-", 1)[1])
    assert f"step {step}" in str(caught.value)
    prepared = loop.prepare_run(run, cache=cache)
    with Checkpoints(folder / "checkpoints", max_to_keep=1) as checkpoints:
        state, manifest = checkpoints.restore(prepared.device_run)
    assert manifest.step == int(state.step) == step - 1
    assert np.load(folder / "batch-process-0.npz")["inputs"].shape == (16, 16)
    # The saved batch and state reproduce the failure.
    from meshwright.data.batch import Batch
    from meshwright.step.train_step import build_train_step

    batch = jax.device_put(
        Batch(**np.load(folder / "batch-process-0.npz")), prepared.device_run.batch_sharding
    )
    after, _ = build_train_step(prepared.device_run)(state, batch)
    assert not bool(after.healthy)
