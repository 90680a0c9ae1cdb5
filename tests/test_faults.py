"""Faults of a run: bad steps, changed data, two runs in one folder, broken files, signals in the middle of a call."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_checkpoint import (
    StopAt,
    assert_same_bits,
    final_state,
    programs_are_compiled_once,
    text_run,
    train_into,
)
from tiny_runs import device_run_of

from meshwright.checkpoint.manifest import Manifest, manifest_of
from meshwright.checkpoint.steps import committed_steps, partial_steps
from meshwright.config import Faults
from meshwright.data.batch import ramp_of
from meshwright.data.feed import Feed, Windows, build_stream
from meshwright.errors import CheckpointError, ConfigError, TrainingError
from meshwright.reporters.files import JsonLines
from meshwright.runs.run import Run
from meshwright.step.optimizers import build_lr_schedule
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep
from meshwright.trainer import heartbeat, lock, loop
from meshwright.trainer.lock import locked
from meshwright.trainer.meter import Meter
from meshwright.trainer.recovery import changed_versions, healed
from meshwright.trainer.relations import Output

__all__ = ["programs_are_compiled_once"]  # a fixture of this file too

STEPS, BATCH, BAD = 6, 16, 3


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return text_run(tmp_path, "data=1", steps=STEPS, save_every=2, max_to_keep=9, remat="none")


@pytest.fixture
def poisoned(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample of the third step has no finite weight."""
    prepared = loop.prepare_run(run, cache=cache)
    stream = build_stream(list(prepared.train), list(prepared.corpus.weights), run.training.seed)
    read, indices = Windows.__getitem__, []

    def poison(self: Windows, index: int) -> dict[str, np.ndarray]:
        sample = read(self, index)
        indices.append(int(index))
        if len(indices) > 1 and index == indices[0] and self.start == 0:
            sample["weights"] = np.full_like(sample["weights"], np.nan)
        return sample

    monkeypatch.setattr(Windows, "__getitem__", poison)
    _ = stream[(BAD - 1) * BATCH]


def trained_by_hand(
    run: Run, cache: Path, skipped: tuple[tuple[int, int], ...], without: int | None
) -> State:
    """State after all steps: samples of `skipped` left out, and the update of the step `without`."""
    prepared = loop.prepare_run(run, cache=cache)
    feed = Feed(
        build_stream(list(prepared.train), list(prepared.corpus.weights), run.training.seed),
        ramp_of(run.training), seq=run.training.seq, taken=0, cursor=0, steps=STEPS,
        sharding=prepared.device_run.batch_sharding, skipped=skipped,
    )  # fmt: skip
    state, step = prepared.device_run.initial_state(), None
    for number, batch in enumerate(feed, 1):
        step = step or CompiledTrainStep(prepared.device_run, batch)
        state = healed(state, number) if number == without else step(state, batch)[0]
    return state


def with_faults(run: Run, **faults: Any) -> Run:
    return dataclasses.replace(run, faults=Faults(**faults))


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("poisoned")
def test_a_bad_step_stops_the_run_with_its_evidence(run: Run, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(
        TrainingError,
        match=rf"step {BAD}(.|\n)*not finite(.|\n)*the state before it and its batch(.|\n)*roll_back",
    ):
        train_into(run, tmp_path / "out", cache)
    folder = tmp_path / "out" / f"evidence-step-{BAD}"
    assert committed_steps(folder / "checkpoints") == [BAD - 1]
    assert np.isnan(np.load(folder / "batch-process-0.npz", allow_pickle=False)["weights"]).any()
    assert json.loads((folder / "metrics.json").read_text())["loss"] == "nan"


@pytest.mark.usefixtures("poisoned")
def test_a_bad_step_is_skipped(
    run: Run, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    skipping = with_faults(run, bad_step="skip")
    summary = train_into(skipping, tmp_path / "out", cache)
    assert (
        summary.steps == STEPS
        and f"step {BAD}: its loss or gradient is not finite" in capfd.readouterr().err
    )
    expected = trained_by_hand(run, cache, (), BAD)
    assert_same_bits(final_state(run, tmp_path / "out", cache), expected)
    assert [line["step"] for line in lines_of(tmp_path / "out") if "loss" in line] == list(
        range(1, STEPS + 1)
    )
    assert (tmp_path / "out" / f"evidence-step-{BAD}" / "batch-process-0.npz").is_file()
    # The rate that is reported is the one that was used: the rule's schedule counts updates, and one was left out.
    rate = build_lr_schedule(run.optimizer, STEPS)
    used = [float(rate(count)) for count in (0, 1, 2, 2, 3, 4)]
    rates = [
        line["learning rate"] for line in lines_of(tmp_path / "out") if "learning rate" in line
    ]
    np.testing.assert_allclose(rates, used, rtol=1e-6)


def test_a_step_without_any_weight_is_skipped(
    run: Run,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    prepared = loop.prepare_run(run, cache=cache)
    stream = build_stream(list(prepared.train), list(prepared.corpus.weights), run.training.seed)
    read, of_the_step, known = Windows.__getitem__, set[int](), False

    def unweighted(self: Windows, index: int) -> dict[str, np.ndarray]:
        sample = read(self, index)
        if not known:
            of_the_step.add(int(index))
        elif self.start == 0 and int(index) in of_the_step:
            sample["weights"] = np.zeros_like(sample["weights"])
        return sample

    monkeypatch.setattr(Windows, "__getitem__", unweighted)
    _ = [stream[(BAD - 1) * BATCH + i] for i in range(BATCH)]
    known = True
    train_into(with_faults(run, bad_step="skip"), tmp_path / "out", cache)
    assert f"step {BAD}: the total weight of its batch is 0" in capfd.readouterr().err
    assert_same_bits(
        final_state(run, tmp_path / "out", cache), trained_by_hand(run, cache, (), BAD)
    )
    assert [line["loss"] is None for line in lines_of(tmp_path / "out") if "loss" in line] == [
        step == BAD for step in range(1, STEPS + 1)
    ]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("stop", [BAD, BAD + 1])
def test_a_run_rolls_back_and_skipped_samples_stay_skipped(
    run: Run, tmp_path: Path, cache: Path, stop: int
) -> None:  # fmt: skip
    rolling, out = with_faults(run, bad_step="roll_back"), tmp_path / "out"
    first = train_into(rolling, out, cache, reporters=lambda start: [StopAt(stop)])
    assert first.interrupted_by == signal.SIGTERM and first.steps < STEPS
    skipped = ((BAD - 1) * BATCH, BATCH)
    record = json.loads((out / "skipped.json").read_text())
    assert [(part["first"], part["number"], part["step"]) for part in record] == [(*skipped, BAD)]
    if first.steps > BAD:
        (
            out / "skipped.json"
        ).unlink()  # the checkpoint that was saved since then knows them as well
    second = train_into(rolling, out, cache, start="resume")
    assert second.steps == STEPS and not list(out.glob("evidence-step-*.1"))
    assert_same_bits(final_state(run, out, cache), trained_by_hand(run, cache, (skipped,), None))
    steps = [line["step"] for line in lines_of(out) if "loss" in line]
    assert steps == list(range(1, STEPS + 1)), "no step is in the metrics twice"


@pytest.mark.usefixtures("poisoned")
def test_too_many_bad_steps_stop_the_run(
    run: Run, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Windows.__getitem__
    monkeypatch.setattr(
        Windows,
        "__getitem__",
        lambda self, i: {**read(self, i), "weights": np.full(self.seq, np.nan, np.float32)},
    )
    with pytest.raises(
        TrainingError, match=r"3 steps were bad, and --faults.most-skipped is 2(.|\n)*a higher"
    ):
        train_into(with_faults(run, bad_step="roll_back", most_skipped=2), tmp_path / "out", cache)


def test_a_spike_is_measured_by_the_median(run: Run, tmp_path: Path) -> None:
    mesh = device_run_of(
        dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=50))
    ).mesh
    meter = Meter(
        [], dataclasses.replace(run, faults=Faults(spike=5.0)), mesh, per_sample=1, flops=1.0
    )
    assert not any(meter._note_norm(1.0 + 0.01 * step) for step in range(30))
    assert "is 50, 43.7 times the median" in meter._note_norm(50.0)
    assert not meter._note_norm(5.0)
    # A run that resumes, or returns to a checkpoint, has the norms of that checkpoint.
    manifest = Manifest(31, 0, run, {}, norms=tuple(meter.norms))
    manifest.write(tmp_path / "31")
    later = Meter(
        [], dataclasses.replace(run, faults=Faults(spike=5.0)), mesh, per_sample=1, flops=1.0
    )
    assert not later._note_norm(50.0)
    later.rewind(31, manifest_of(tmp_path, 31).norms)
    assert later.norms == meter.norms and "times the median" in later._note_norm(50.0)
    for wrong in (
        {"spike": 0.5},
        {"bad_records": 1.0},
        {"most_skipped": 0},
        {"spike": 3.0, "bad_step": "skip"},
    ):
        with pytest.raises(ConfigError, match="--faults"):
            Faults(**wrong)  # type: ignore[arg-type]


def test_a_resume_on_other_data_is_refused(run: Run, tmp_path: Path, cache: Path) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    short = dataclasses.replace(
        run, training=dataclasses.replace(run.training, steps=2, save_every=0)
    )
    train_into(short, out, cache)
    vocabulary = (out / "tokenizer.json").read_text()

    def resumed(run: Run, **how: Any) -> loop.Summary:
        prepared = loop.prepare_run(run, cache=cache, output=Output(out, resumes=True))
        return loop.train(prepared, out, start="resume", **how)

    other = dataclasses.replace(run, training=dataclasses.replace(run.training, seed=7))
    with pytest.raises(
        ConfigError,
        match=r"training.seed was 0 and is 7(.|\n)*--accept training.seed, if the change",
    ):
        resumed(other)
    # Other text, which would lead to another vocabulary of as many characters.
    text.write_text(text.read_text().swapcase().replace("LAZY", "lazy"))
    with pytest.raises(Exception, match=r"which the vocabulary does not have"):
        resumed(run)
    text.write_text("".join(reversed(text.read_text().swapcase().replace("LAZY", "lazy"))))
    with pytest.raises(
        ConfigError, match=r"text.txt have changed(.|\n)*--accept text, if the change is meant"
    ):
        resumed(run)
    assert resumed(run, accept=("text",)).steps == STEPS
    assert (out / "tokenizer.json").read_text() == vocabulary


def test_a_finished_run_and_broken_files_are_no_obstacle(
    run: Run, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    train_into(run, out, cache)
    finished = train_into(run, out, cache, start="resume")
    assert finished.steps == STEPS and finished.steps_taken == finished.tokens == 0
    reference = final_state(run, out, cache)
    # Checkpoints whose copy was cut off: one empty, one without its manifest.
    shutil.rmtree(out / "checkpoints" / str(STEPS))
    (out / "checkpoints" / "5").mkdir()
    shutil.copytree(out / "checkpoints" / "4" / "state", out / "checkpoints" / str(STEPS) / "state")
    (out / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 1.0}\n\xff\xfe\x00{"step": 2\n[[[\n{"step": "x"}\n'
    )
    assert committed_steps(out / "checkpoints") == [2, 4] and partial_steps(
        out / "checkpoints"
    ) == [5, STEPS]
    train_into(run, out, cache, start="resume")
    assert_same_bits(final_state(run, out, cache), reference)
    told = capfd.readouterr().err
    assert "left out, it is not whole; step 4 is taken" in told
    assert {path.name for path in (out / "set-aside").iterdir()} >= {"5", str(STEPS)}
    assert [line["step"] for line in lines_of(out) if "loss" in line] == [1, 5, 6]


def test_metrics_that_cannot_be_read_are_put_aside(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    lines = JsonLines(tmp_path / "metrics.jsonl", upto=3)
    lines.write(4, {"loss": float("nan")})
    lines.close()
    [line] = lines_of(tmp_path)
    assert (line["step"], line["loss"]) == (4, None)
    assert len(list(tmp_path.glob("metrics.jsonl.unreadable-*"))) == 1


HOLDER = """
import sys, time
from pathlib import Path
from meshwright.trainer.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_run_at_a_time_writes_into_a_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(
            CheckpointError, match=rf"process {holder.pid} on {socket.gethostname()} trains there"
        ):
            locked(tmp_path / "out").__enter__()
        holder.kill()
    with locked(tmp_path / "out"):  # of a process that is gone
        assert json.loads((tmp_path / "out" / ".lock").read_text())["process"] == os.getpid()
    assert (tmp_path / "out" / ".lock").read_text() == ""


def test_a_lock_of_another_host_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(heartbeat, "BEAT", 0.1)
    file = tmp_path / ".lock"
    file.write_text(json.dumps({"host": "elsewhere", "process": 7, "count": 3}))
    with locked(tmp_path):  # it counts no more
        pass
    file.write_text(json.dumps({"host": "elsewhere", "process": 7, "count": 3}))
    counts = itertools.count()
    monkeypatch.setattr(
        lock,
        "parse_holder",
        lambda text: {"host": "elsewhere", "process": 7, "count": next(counts)},
    )
    with pytest.raises(CheckpointError, match="on elsewhere trains there"):
        locked(tmp_path).__enter__()


IN_A_CALL = """
import hashlib, sys
from meshwright.trainer.preemption import Preemption
from meshwright.trainer.relations import Output
with Preemption().listening() as preemption:
    print("computing", flush=True)
    # No Python code runs before it returns, as in a compilation.
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[1]))
    print("returned", preemption.received, flush=True)
"""


def test_ctrl_c_is_acknowledged_inside_a_call(tmp_path: Path) -> None:
    def start(rounds: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", IN_A_CALL, str(rounds)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "computing\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        return process

    process = start(20_000_000)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(
        "Ctrl-C: the run saves a checkpoint after the step in progress"
    )
    assert process.poll() is None, "it had not returned yet"
    out, _ = process.communicate(timeout=200)
    assert out == f"returned {int(signal.SIGINT)}\n" and process.returncode == 0
    # A second one ends a process that does not return.
    process = start(2_000_000_000)
    assert process.stderr is not None and process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert "the last one is whole" in process.communicate(timeout=60)[1]
    assert process.returncode == 130


BEFORE_THE_LOOP = """
import gc, hashlib, sys
from meshwright.cli import interrupt
interrupt._PATIENCE = 0.2
interrupt.acknowledge_interrupts()
compute = lambda *_: hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[1]))
print("computing", flush=True)
if sys.argv[2] == "a callback of the collector":  # Python drops what is raised there
    gc.callbacks.append(compute)
    gc.collect()
else:
    compute()
"""


@pytest.mark.parametrize(
    "place, rounds", [("a long call", 2_000_000_000), ("a callback of the collector", 1_000_000)]
)
def test_ctrl_c_ends_every_verb(place: str, rounds: int) -> None:
    command = [sys.executable, "-c", BEFORE_THE_LOOP, str(rounds), place]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "computing\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in error
    assert error == "Ctrl-C: stopping; Ctrl-C again leaves at once\n"


def test_every_device_gets_the_state_of_a_skipped_step(run: Run, cache: Path) -> None:
    prepared = loop.prepare_run(
        dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, data=2)), cache=cache
    )
    state = healed(prepared.device_run.initial_state(), 5)
    assert int(state.step) == 5 and bool(state.healthy) and len(state.step.sharding.device_set) == 2
    assert jax.tree.map(lambda x: x.sharding, state) == prepared.device_run.abstract.shardings


def test_a_resume_by_other_versions_says_so() -> None:
    before = {"jax": "0.11.0", "numpy": "2.5.5", "libtpu": "0.0.52"}
    now = {"jax": "0.12.0", "numpy": "2.5.5", "meshwright's source": "ab"}
    changes = changed_versions(before, now)
    assert [change.text for change in changes] == [
        "the version of jax was 0.11.0 and is 0.12.0",
        "the version of libtpu was 0.0.52 and is absent",
        "the version of meshwright's source was absent and is ab",
    ]
    assert not any(change.refused for change in changes)
    assert changed_versions({}, now) == changed_versions(now, now) == []
