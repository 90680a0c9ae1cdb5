"""A resume compares what wrote its checkpoint with what it would run: differences are named, and refused or printed."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from test_checkpoint import StopAt, programs_are_compiled_once, text_run, train_into
from tiny_runs import MODELS, tiny_run

import meshwright as mw
from meshwright.checkpoint.manifest import Manifest, manifest_of
from meshwright.config import Data, Optimizer, Training
from meshwright.data.conversations import load_conversations
from meshwright.documents import seal
from meshwright.errors import CheckpointError, ConfigError
from meshwright.fine_tuning import FineTune
from meshwright.hardware.agreement import flatten
from meshwright.reporters.files import JsonLines, last_start
from meshwright.runs.fields import declaration_of
from meshwright.runs.recipe import change_fields
from meshwright.runs.run import Run
from meshwright.runs.run_file import fields_to_compare, write_run
from meshwright.step.optimizers import LR_SCHEDULES, build_lr_schedule
from meshwright.storage.tiers import LocalCheckpoints
from meshwright.trainer import loop, recovery
from meshwright.trainer.recovery import describe_rate_jump

__all__ = ["programs_are_compiled_once"]  # a fixture of this file too

Harm = Callable[[Path], Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Run, Path]:
    """A run that was stopped after two of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    run = text_run(folder, "data=1", steps=4, remat="none", family="qwen-like")
    train_into(run, folder / "out", cache, reporters=lambda start: [StopAt(1)])
    return run, folder / "out"


@pytest.fixture
def begun(trained: tuple[Run, Path], tmp_path: Path) -> tuple[Run, Path]:
    """A copy of that run which a test may change."""
    shutil.copytree(trained[1], tmp_path / "out")
    return trained[0], tmp_path / "out"


def rewritten(out: Path, **changes: Any) -> None:
    """Changes fields of a manifest and makes its checksum again; None removes one."""
    file = out / "checkpoints" / "2" / "manifest" / "metadata"
    document = {**json.loads(file.read_text()), **changes}
    file.write_text(
        json.dumps(seal({name: value for name, value in document.items() if value is not None}))
    )


def of_another_run(out: Path) -> None:
    """Places the checkpoint of another run of the same shapes."""
    rewritten(out, identity="f" * 32)


def one_that_is_skipped(out: Path, **more: Any) -> None:
    (out / "skipped.json").write_text(json.dumps([{"first": 0, "number": 16, "step": 1, **more}]))


REFUSED: dict[str, tuple[dict[str, Any], Harm, str]] = {
    "rope_theta": ({"rope_theta": 20000.0}, str, r"model.rope_theta was 10000.0 and is 20000.0"),
    "norm_epsilon": ({"norm_epsilon": 1e-3}, str, r"model.norm_epsilon was 1e-05 and is 0.001"),
    "sliding_window": ({"sliding_window": None}, str, r"model.sliding_window was 5 and is null"),
    "seed": ({"seed": 7}, str, r"training.seed was 0 and is 7"),
    "seq": ({"seq": 8}, str, r"training.seq was 16 and is 8"),
    "held-out part": ({"held_out": 0.3}, str, r"data.held_out was 0.1 and is 0.3"),
    "another run's checkpoints": (
        {},
        of_another_run,
        r"it is of the run ffffffff, and metrics and events are of \w{8}",
    ),
    "cursor": (
        {},
        lambda out: rewritten(out, cursor=96),
        r"its cursor is 96, and steps 1 to 2 read 32 samples from 0",
    ),
    "skipped.json": (
        {},
        one_that_is_skipped,
        r"leaves out samples 0 to 15, of no run that is known",
    ),
    "skipped.json of a run": (
        {},
        lambda out: one_that_is_skipped(out, identity="e" * 32),
        r"to 15, of the run eeeeeeee",
    ),
}
NAMES = {
    **{name: f"model.{name}" for name in ("rope_theta", "norm_epsilon", "sliding_window")},
    **{name: f"training.{name}" for name in ("seed", "seq")},
    "held-out part": "held_out",
    "another run's checkpoints": "identity",
    "skipped.json of a run": "skipped.json",
}
"""Names of the differences, where they are others than those of the rows."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_changes_the_function_or_the_data_is_refused(
    case: str, begun: tuple[Run, Path], cache: Path
) -> None:
    run, out = begun
    changes, harm, truth = REFUSED[case]
    harm(out)
    with pytest.raises(
        ConfigError,
        match=rf"resuming from step 2(.|\n)*{truth}(.|\n)*--accept {NAMES.get(case, case)}, if",
    ):
        train_into(
            change_fields(run, None, changes), out, cache, start="resume", accept=("weights",)
        )


def test_what_is_accepted_goes_on_and_what_changes_the_training_is_printed(
    begun: tuple[Run, Path], cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, out = begun
    identity = last_start(out)["identity"]
    assert len(identity) == 32 and manifest_of(out / "checkpoints", 2).identity == identity
    one_that_is_skipped(out, identity="e" * 32)
    other = change_fields(
        run, None, {"rope_theta": 20000.0, "learning_rate": 1e-4, "save_every": 1}
    )
    accept = ("model", "skipped.json")
    assert train_into(other, out, cache, start="resume", accept=accept).steps == 4
    told = capfd.readouterr().err
    for change in ("model.rope_theta was 10000.0 and is 20000.0", "optimizer.learning_rate was 0.003 and is 0.0001",
                   "training.save_every was 0 and is 1"):  # fmt: skip
        assert f"resuming from step 2 with changes: {change}" in told or f"; {change}" in told
    start = last_start(out)
    assert start["how"] == "resume" and start["identity"] == identity
    assert (
        start["changes"]["optimizer.learning_rate"]
        == "optimizer.learning_rate was 0.003 and is 0.0001"
    )
    last = manifest_of(out / "checkpoints", 4)
    assert (last.identity, last.began, last.skipped, last.cursor) == (
        identity,
        (2, 32),
        ((0, 16),),
        64,
    )
    # The next resume finds nothing that has changed, and knows the samples from the checkpoint.
    assert train_into(other, out, cache, start="resume").steps_taken == 0
    assert "resuming" not in capfd.readouterr().err and "changes" not in last_start(out)
    with pytest.raises(
        ConfigError, match=r"--accept model.rope_teta(.|\n)*did you mean 'model.rope_theta'"
    ):
        train_into(other, out, cache, start="resume", accept=("model.rope_teta",))
    # A run that begins has an identity of its own.
    shutil.rmtree(out / "checkpoints")
    train_into(run, out, cache, reporters=lambda start: [StopAt(1)])
    assert last_start(out)["identity"] not in ("", identity)
    assert "skipped.json is of another run" in capfd.readouterr().err


def test_a_checkpoint_without_an_identity_is_resumed_with_a_word(
    begun: tuple[Run, Path], cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, out = begun
    rewritten(out, identity=None, began=None, corpus=None)
    (out / "events.jsonl").unlink()
    one_that_is_skipped(out)
    train_into(run, out, cache, start="resume")
    told = capfd.readouterr().err
    assert (
        "resuming from step 2 without comparing: whether it is of this run, as the checkpoint has no identity"
        in told
    )
    assert (
        "; its tokenizer, of which it has no fingerprint; its sources, of" in told
        and "another run" not in told
    )
    identity = last_start(out)["identity"]
    assert len(identity) == 32 and manifest_of(out / "checkpoints", 4).identity == identity


def test_every_field_of_a_run_says_what_it_changes() -> None:
    run = dataclasses.replace(
        tiny_run(MODELS["llama"]), local_checkpoints=LocalCheckpoints("/local", 2)
    )
    unsaid = [
        name
        for name in flatten(fields_to_compare(run))
        if not name.startswith(("model.", "mesh")) and declaration_of(name).changes is None
    ]
    assert unsaid == []


def manifest_of_run(run: Run, corpus: dict[str, Any]) -> Manifest:
    return Manifest(2, 32, run, {}, corpus=corpus, identity="a" * 32, began=(0, 0))


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"batch": 32}, False),
        ({"dropout": 0.5}, False),
        ({"remat": "none"}, False),
        ({"mesh": mw.MeshShape(fsdp=8)}, False),
        ({"alpha": 8.0}, True),
        ({"paths": ("other",)}, False),
        ({"aux_loss_weight": 0.5}, False),
        ({"vocab_multiple": 32}, False),
    ],
)
def test_a_change_of_the_function_is_refused(changes: dict[str, Any], is_refused: bool) -> None:
    run = tiny_run(MODELS["mixtral"])
    other = (
        dataclasses.replace(run, **changes)
        if "mesh" in changes
        else change_fields(run, None, changes)
    )
    found, unknown = recovery.compare(manifest_of_run(run, {}), other, None, "a" * 32, [])
    assert [change.refused for change in found] == [is_refused] and not unknown


SOURCES = {"tokenizer": "t", "sources": [["one", 1.0], ["two", 1.0]], "held_out": 0.1}


@pytest.mark.parametrize(
    ("now", "names"),
    [
        ({"sources": [["one", 1.0], ["2", 3.0]]}, ["text", "weights"]),
        ({"sources": [["one", 1.0]]}, ["text"]),
        ({"tokenizer": "u"}, ["tokenizer"]),
        ({"held_out": 0.2}, ["held_out"]),
        ({"loss": [1, "a"]}, []),
    ],
)
def test_data_are_compared_by_what_they_are(now: dict[str, Any], names: list[str]) -> None:
    run = dataclasses.replace(tiny_run(MODELS["llama"]), data=Data(paths=("a", "b")))
    found, unknown = recovery.compare(
        manifest_of_run(run, SOURCES), run, {**SOURCES, **now}, "a" * 32, []
    )
    assert [change.name for change in found] == names and all(change.refused for change in found)
    assert bool(unknown) == ("loss" in now)


def wrapped(scale: float = 1.0, shift: float = 0.0, random: bool = False) -> mw.Run:
    """A wrapped model with a constant in its loss and another in its batches."""
    constant = np.full(3, scale, np.float32)
    draws = np.random.default_rng()

    def batches(step: int) -> dict[str, Any]:
        x = np.full((8, 4), step + 1 + (draws.random() if random else shift), np.float32)
        return {"x": x, "y": np.ones((8, 3), np.float32)}

    def loss(params: Any, batch: Any) -> Any:
        return (jnp.asarray(constant) * (batch["x"] @ params["w"] - batch["y"]) ** 2).mean()

    model = mw.wrap({"w": jnp.zeros((4, 3))}, loss, batches)
    return model.run(mesh="data=1", steps=2, learning_rate=0.1)


def test_a_wrapped_models_loss_and_batches_are_compared(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(run: mw.Run, **how: Any) -> mw.Summary:
        return mw.train(run, tmp_path / "out", cache=cache, progress="none", **how)

    train(wrapped())
    assert train(wrapped(), start="resume").steps == 2
    assert "resuming" not in capfd.readouterr().err
    with pytest.raises(
        ConfigError, match=r"the loss, as it is traced, is another(.|\n)*--accept loss, if"
    ):
        train(wrapped(scale=2.0), start="resume")
    with pytest.raises(
        ConfigError, match=r"the first batch of the data is another(.|\n)*--accept batches, if"
    ):
        train(wrapped(shift=0.5), start="resume")
    assert (
        train(wrapped(scale=2.0, shift=0.5), start="resume", accept=("loss", "batches")).steps == 2
    )
    capfd.readouterr()
    assert train(wrapped(random=True), start="resume").steps == 2
    assert (
        "without comparing: its batches, which are others each time they are read"
        in capfd.readouterr().err
    )


def test_a_chat_file_that_is_edited_in_place_is_another_text(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    record = {"prompt": "how much is one", "completion": "a lot of it"}
    file.write_text("".join(json.dumps(record) + "\n" for _ in range(12)))
    data, tuning = Data(paths=(str(file),), tokenizer="bytes"), FineTune(objective="answers")
    before, stat = (
        load_conversations(data, 64, tuning, tmp_path / "cache")[0].fingerprint,
        file.stat(),
    )
    file.write_text(file.read_text().replace("a lot", "a bit"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert load_conversations(data, 64, tuning, tmp_path / "cache")[0].fingerprint != before


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 11))
    )
    yield file


@pytest.mark.parametrize(
    ("harm", "every", "hole"),
    [
        (lambda text: text, 1, ""),
        (lambda text: text[: len(text) // 2], 1, "lines of steps 6 to 10 are missing"),
        (
            lambda text: text.replace('{"step": 3', '{"step": ' + "3" * 400),
            1,
            "lines of steps 3 to 3 are missing",
        ),
        (lambda text: "".join(text.splitlines(True)[1::2]), 2, ""),
        (
            lambda text: "".join(text.splitlines(True)[1::2]),
            1,
            "lines of steps 1 to 1 are missing, and in 4 more places",
        ),
        (lambda text: "", 5, "lines of steps 1 to 10 are missing"),
        (lambda text: text[: len(text) // 2], 0, ""),
    ],
)
def test_a_hole_in_the_metrics_is_named(
    harm: Callable[[str], str],
    every: int,
    hole: str,
    metrics: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    metrics.write_text(harm(metrics.read_text()))
    lines = JsonLines(metrics, upto=10, every=every)
    lines.close()
    assert lines.hole == hole and (hole in capfd.readouterr().err)


def test_a_hole_in_the_metrics_is_among_the_events(begun: tuple[Run, Path], cache: Path) -> None:
    run, out = begun
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text(lines[0] + "\n")
    train_into(run, out, cache, start="resume")
    assert last_start(out)["metrics"] == "lines of steps 2 to 2 are missing"


def test_an_edited_run_file_and_a_damaged_list_are_refused(
    begun: tuple[Run, Path], cache: Path
) -> None:
    from meshwright.api.training import TrainOptions

    run, out = begun
    prepared = loop.prepare_run(run, cache=cache).device_run.run
    write_run(change_fields(prepared, None, {"rope_theta": 5.0}), out / "run.json")
    edited = TrainOptions.base(["--out", str(out), "--resume"]).run
    with pytest.raises(ConfigError, match=r"model.rope_theta was 10000.0 and is 5.0"):
        train_into(edited, out, cache, start="resume")
    (out / "skipped.json").write_text("[7]")
    with pytest.raises(CheckpointError, match=r"skipped.json cannot be read"):
        train_into(run, out, cache, start="resume")


@pytest.mark.parametrize("schedule", [name for name in LR_SCHEDULES if name != "constant"])
@pytest.mark.parametrize(("taken", "more"), [(20, 40), (10, 40), (20, 21)])
def test_a_jump_of_the_learning_rate_is_said(schedule: str, taken: int, more: int) -> None:
    """A run of 20 steps, finished or half way, that goes on as one of more steps."""

    def lasting(steps: int, peak: float = 1.0) -> Run:
        optimizer = Optimizer(
            learning_rate=peak, lr_schedule=schedule, warmup_steps=3, final_lr_fraction=0.1
        )
        return Run(MODELS["llama"], optimizer=optimizer, training=Training(steps=steps))

    rates = [float(build_lr_schedule(lasting(n).optimizer, n)(taken)) for n in (20, more)]
    said = describe_rate_jump(lasting(20), lasting(more), taken)
    if rates[0] == pytest.approx(rates[1], rel=1e-4):
        assert said is None
    else:
        assert f"step {taken + 1} is {rates[1]:.3g} of the peak and not {rates[0]:.3g}" in (
            said or ""
        )
        assert f"over {more} steps and was over 20" in (said or "")
    # A run that goes on as it was, or with another peak, which is a field, has no jump.
    assert describe_rate_jump(lasting(more), lasting(more, peak=0.5), taken) is None


def test_a_resume_says_that_the_rate_jumps(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = text_run(tmp_path, "data=1", steps=4, remat="none", family="qwen-like")
    train_into(run, tmp_path / "out", cache)
    longer = dataclasses.replace(run, training=dataclasses.replace(run.training, steps=8))
    train_into(longer, tmp_path / "out", cache, start="resume")
    told = capfd.readouterr().err
    assert "the learning rate of step 5 is" in told and "over 8 steps and was over 4" in told
    assert "learning rate" in last_start(tmp_path / "out")["changes"]
