"""Stores: a bucket is read and written like a local path, through faults, and nothing half-written counts."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from object_servers import BUCKET, FaultyProxy, object_server
from test_checkpoint import programs_are_compiled_once  # noqa: F401  of every test here too
from test_checkpoint_verb import save
from tiny_runs import MODELS, tiny_run

from meshwright.checkpoint import checkpoints
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.move import plan_move
from meshwright.checkpoint.steps import committed_steps, partial_steps
from meshwright.cli.verbs import run_verb
from meshwright.config import Data, MeshShape
from meshwright.data import tokens
from meshwright.data.corpus import load_corpus, local_text
from meshwright.data.feed import build_stream, split
from meshwright.errors import CheckpointError, ConfigError, DataError, StorageError
from meshwright.hardware.hosts import Hosts
from meshwright.launching import supervise
from meshwright.launching.restarts import Restarts
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run
from meshwright.storage import bucket
from meshwright.storage.bucket import MISSING, BucketPath
from meshwright.storage.paths import bucket_path, path_of
from meshwright.storage.tiers import LocalCheckpoints
from meshwright.storage.transfer import copy_tree
from meshwright.trainer import loop
from meshwright.trainer.evaluation import evaluate_prepared, run_to_evaluate
from meshwright.trainer.heartbeat import LockError
from meshwright.trainer.hosts import _Watch
from meshwright.trainer.lock import locked

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def servers() -> Iterator[FaultyProxy]:
    """S3 behind a server that fails, and Google Cloud Storage; TensorStore reads their addresses once a process."""
    with (
        object_server("s3") as s3,
        object_server("gcs") as gcs,
        pytest.MonkeyPatch.context() as patch,
    ):
        proxy, other = FaultyProxy(s3), FaultyProxy(gcs)
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": proxy.url,
            "TENSORSTORE_GCS_HTTP_URL": other.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        bucket.context.cache_clear()
        yield proxy
        proxy.close()
        other.close()


@pytest.fixture(params=["local", "s3", "gs"])
def folder(request: pytest.FixtureRequest, servers: FaultyProxy, tmp_path: Path) -> Path:
    """An empty folder of each kind of store."""
    return (
        tmp_path
        if request.param == "local"
        else path_of(f"{request.param}://{BUCKET}/{tmp_path.name}")
    )


def test_a_path_of_each_store_reads_writes_and_lists(folder: Path) -> None:
    file = folder / "a" / "b.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    assert not file.exists() and not file.is_file()
    with pytest.raises(FileNotFoundError):
        file.read_text()
    file.write_text("ä\n", encoding="utf-8")
    empty = (
        b"" if "gs:" not in folder.parts else b"1"
    )  # the emulator breaks off when an object is empty
    with (folder / "a" / "empty").open("wb") as opened:
        opened.write(empty)
    assert file.read_text(encoding="utf-8") == "ä\n" and file.is_file() and not file.is_dir()
    assert (
        (folder / "a").is_dir()
        and (folder / "a" / "empty").is_file()
        and (folder / "a" / "empty").read_bytes() == empty
    )
    assert sorted(path.name for path in (folder / "a").iterdir()) == ["b.txt", "empty"]
    assert (
        file.stat().st_size == 3 and path_of(str(file)) == file and path_of(Path(str(file))) == file
    )
    file.unlink()
    assert not file.exists() and (folder / "a").exists()


def test_a_bucket_writes_on_condition_and_reads_parts(servers: FaultyProxy) -> None:
    file = BucketPath(f"s3://{BUCKET}/conditional")
    first = file.put_if(b"one", MISSING)
    assert first and file.put_if(b"two", MISSING) is None and file.read_bytes() == b"one"
    assert file.put_if(b"three", first) and file.put_if(b"four", first) is None
    assert [file.read_part(*part) for part in ((0, 2), (3, 9), (5, 9), (2, 99))] == [
        b"th",
        b"ee",
        b"",
        b"ree",
    ]


REFUSALS: dict[str, tuple[str, dict[str, str], str]] = {
    "bucket": ("s3://nowhere/x", {}, "the bucket does not exist"),
    "credentials": (f"s3://{BUCKET}/x", {"AWS_ACCESS_KEY_ID": ""}, "there are no credentials"),
    "endpoint": (
        f"s3://{BUCKET}/x",
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
        "could not be reached",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_bucket_that_cannot_be_written_says_why(
    servers: FaultyProxy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    location, environment, truth = REFUSALS[name]
    bucket.context.cache_clear()
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(StorageError, match=truth):
        bucket_path(location).check_writable()
    bucket.context.cache_clear()


def test_refused_locations() -> None:
    with pytest.raises(ConfigError, match="az:// is no store"):
        path_of("az://container/x")
    with pytest.raises(ConfigError, match="names no bucket"):
        path_of("s3://")
    error = bucket.storage_error(
        "writing", ValueError("PERMISSION_DENIED: [http_response_code='403']")
    )
    assert "refused permission" in error.truth and "AWS_ACCESS_KEY_ID" in error.fix
    assert (
        "again and again"
        in bucket.storage_error("x", ValueError("ABORTED: All 12 retry attempts failed: 503")).truth
    )


def text_run(data: str, steps: int) -> Run:
    model = dataclasses.replace(MODELS["llama"], vocab=None)
    return tiny_run(
        model, "data=2,fsdp=2,tensor=2", data=Data(paths=(data,), tokenizer="chars", sample=0), steps=steps,
        save_every=2, max_to_keep=2,
    )  # fmt: skip


def losses(out: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


class CrashAt:
    """Ends the run by an error once `step` has been reported: nothing is saved afterwards."""

    def __init__(self, step: int):
        self.step = step

    def write(self, step: int, values: dict[str, float]) -> None:
        if step == self.step:
            raise KeyboardInterrupt

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_run_in_a_bucket_that_fails_crashes_and_resumes_has_the_losses_of_a_local_one(
    servers: FaultyProxy, tmp_path: Path, cache: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.share, servers.latency = 0.1, 0.005
    text, out = tmp_path / "text.txt", path_of(f"{kind}://{BUCKET}/runs/{tmp_path.name}")
    text.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    stored = path_of(f"{kind}://{BUCKET}/data/{tmp_path.name}.txt")
    stored.write_bytes(text.read_bytes())
    run = text_run(str(stored), 7)
    local = loop.train(loop.prepare_run(text_run(str(text), 7), cache=cache), tmp_path / "local")
    with pytest.raises(KeyboardInterrupt):
        loop.train(loop.prepare_run(run, cache=cache), out, reporters=lambda start: [CrashAt(5)])
    assert committed_steps(out / "checkpoints") == [2, 4]
    with pytest.raises(ConfigError, match="it holds the checkpoint of step 4"):
        loop.train(loop.prepare_run(run, cache=cache), out)
    # The writer of step 6 died before its manifest: what there is of it does not count, and does not stay.
    (out / "checkpoints" / "started" / "6").write_bytes(b"6")
    (out / "checkpoints" / "6" / "state" / "step" / "0").write_bytes(b"\0\0\0\0")
    assert partial_steps(out / "checkpoints") == [6]
    resumed = loop.train(loop.prepare_run(run, cache=cache), out, start="resume")
    assert (resumed.steps, resumed.held_out_loss) == (7, local.held_out_loss)
    assert losses(out) == losses(tmp_path / "local")
    assert committed_steps(out / "checkpoints") == [6, 7] and not (out / ".lock").is_file()
    if kind == "s3":
        assert servers.failed > 10
    evaluations = [
        evaluate_prepared(
            loop.prepare_run(run_to_evaluate(source), cache=cache), source, False, None
        )
        for source in (out, tmp_path / "local")
    ]
    assert evaluations[0] == evaluations[1]
    _verbs_agree(out, tmp_path / "local", capsys)
    _moves_both_ways(out, tmp_path, run, cache)
    servers.share = servers.latency = 0.0


def _verbs_agree(out: Path, local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run_verb("checkpoint", ["list", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(6, "whole"), (7, "whole")]
    assert all(row["bytes"] > 1000 and row["written"] > 1e9 for row in rows)
    assert run_verb("checkpoint", ["verify", str(out), "--at", "7"]) == 0
    capsys.readouterr()
    assert run_verb("checkpoint", ["inspect", str(out), "--json"]) == 0
    assert run_verb("checkpoint", ["inspect", str(local), "--json"]) == 0
    first, second = (json.loads(line)["tensors"] for line in capsys.readouterr().out.splitlines())
    assert first == second


def _moves_both_ways(out: Path, tmp_path: Path, run: Run, cache: Path) -> None:
    """A checkpoint of a bucket restores from a disk, and the other way round, after a move."""
    device_run = loop.prepare_run(run, cache=cache).device_run
    with Checkpoints(out / "checkpoints", max_to_keep=None) as checkpoints:
        expected, _ = checkpoints.restore(device_run)
    assert (
        run_verb("checkpoint", ["move", str(out), str(tmp_path / "moved"), "--dry-run"]) == 0
        and not (tmp_path / "moved").exists()
    )
    assert run_verb("checkpoint", ["move", str(out), str(tmp_path / "moved")]) == 0
    assert not committed_steps(out / "checkpoints") and committed_steps(
        tmp_path / "moved" / "checkpoints"
    ) == [6, 7]
    back = [path_of(f"{str(out).partition(':')[0]}://{BUCKET}/from-disk/{tmp_path.name}")]
    for folder in back:
        assert (
            run_verb(
                "checkpoint", ["move", str(tmp_path / "local"), str(folder), "--at", "7", "--copy"]
            )
            == 0
        )
    assert (tmp_path / "local" / "run.json").is_file()
    for folder in (tmp_path / "moved", *back):
        with Checkpoints(folder / "checkpoints", max_to_keep=None) as checkpoints:
            state, _ = checkpoints.restore(device_run)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def full_below(disk: Path, write: Any) -> Any:
    def write_or_refuse(state: Path, *args: Any, **how: Any) -> None:
        if state.is_relative_to(disk):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(state, *args, **how)

    return write_or_refuse


def test_a_resume_takes_the_newest_of_two_tiers_and_survives_the_loss_of_one(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, disk = tmp_path / "text.txt", tmp_path / "disk"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    run = text_run(str(text), 9)
    run = dataclasses.replace(
        run, training=dataclasses.replace(run.training, save_every=4),
        local_checkpoints=LocalCheckpoints(path=str(disk), every=2),
    )  # fmt: skip
    whole = loop.train(loop.prepare_run(run, cache=cache), tmp_path / "whole")
    shutil.rmtree(disk)

    def go(out: Path, crash: int = 0, **how: Any) -> loop.Summary | None:
        reporters = [CrashAt(crash)] if crash else []
        prepared = loop.prepare_run(run, cache=cache)
        if not crash:
            return loop.train(prepared, out, **how)
        with pytest.raises(KeyboardInterrupt):
            loop.train(prepared, out, reporters=lambda start: list(reporters), **how)
        return None

    def same(summary: loop.Summary | None, out: Path, taken: int) -> None:
        assert summary is not None
        assert (summary.steps_taken, summary.held_out_loss) == (taken, whole.held_out_loss)
        assert losses(out) == losses(tmp_path / "whole")

    # Killed after step 6, which the hosts alone have.
    out = tmp_path / "out"
    go(out, crash=7)
    (process,) = disk.glob("out-*/process-0")
    assert (committed_steps(out / "checkpoints"), committed_steps(process)) == ([4], [2, 6])
    shutil.copytree(
        tmp_path,
        copies := tmp_path.with_name(f"{tmp_path.name}-copies"),
        ignore=lambda *_: ["whole"],
    )
    same(go(out, start="resume"), out, 3)
    assert "step 6 is restored from the hosts' own disks" in capsys.readouterr().err
    assert list(disk.iterdir()) == [], "the output folder has the last state"

    def again() -> None:
        for folder in (out, disk):
            shutil.rmtree(folder)
            shutil.copytree(copies / folder.name, folder)

    # The host is replaced, and its disk with it.
    again()
    shutil.rmtree(disk)
    same(go(out, start="resume"), out, 5)
    # A shard on its disk is damaged.
    again()
    shard = next(
        path for path in sorted((process / "6" / "state").rglob("0.*")) if path.stat().st_size > 8
    )
    shard.write_bytes(bytes(255 - byte for byte in shard.read_bytes()))
    same(go(out, start="resume"), out, 5)
    assert "step 6 on the hosts' own disks is left out" in capsys.readouterr().err
    # The output folder has nothing yet, and one command is for every start. An earlier step is asked for, and later
    # ones of the hosts are forgotten.
    again()
    shutil.rmtree(out / "checkpoints")
    same(go(out, start="resume if exists"), out, 3)
    shutil.rmtree(out)
    same(go(out, start="resume if exists"), out, 9)
    capsys.readouterr()
    # The host's own disk is full: the run goes on without those checkpoints.
    shutil.rmtree(out)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_shards", full_below(disk, checkpoints.write_shards))
        same(go(out), out, 9)
    told = capsys.readouterr().err
    assert told.count("a local checkpoint is left out, and the run goes on: the disk is full") == 2
    again()
    go(out, start="resume", at=4, crash=5)
    assert committed_steps(process) == [2]
    # A new run in another folder does not take them for its own.
    with pytest.raises(CheckpointError, match="no checkpoint was committed"):
        go(tmp_path / "other", start="resume")


def test_a_damaged_object_is_found(
    servers: FaultyProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", 2)
    out = path_of(f"s3://{BUCKET}/damaged")
    copy_tree(tmp_path / "run", out)
    assert run_verb("checkpoint", ["verify", str(out)]) == 0
    chunk = out / "checkpoints" / "2" / "state" / "params.a" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\1")
    assert run_verb("checkpoint", ["verify", str(out)]) == CheckpointError.exit_code
    assert "'params.a' is not what was saved" in capsys.readouterr().out


def test_a_move_goes_on_and_never_loses_the_source(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    for step in (2, 4):
        save(source, step)
    (source / "checkpoints" / "6").mkdir()
    (source / "run.json").write_text("{}")
    target = folder / "target"
    from meshwright.storage import transfer

    copied = transfer.copy_file

    def breaks(first: Path, second: Path) -> Any:
        if first.name == "metadata" and first.parts[-3] == "4":
            raise StorageError("copying", "the network is gone", "try again")
        return copied(first, second)

    monkeypatch.setattr(transfer, "copy_file", breaks)
    with pytest.raises(StorageError, match="network is gone"):
        run_verb("checkpoint", ["move", str(source), str(target)])
    assert committed_steps(source / "checkpoints") == [2, 4] and committed_steps(
        target / "checkpoints"
    ) == [2]
    monkeypatch.setattr(transfer, "copy_file", copied)
    assert [row.action for row in plan_move(source, target, None)] == [
        "there",
        "copy",
        "left out",
        "copy",
    ]
    monkeypatch.setattr(
        transfer, "sha256_of", lambda path: "other" if "target" in str(path) else "same"
    )
    with pytest.raises(StorageError, match="the source is as it was"):
        run_verb("checkpoint", ["move", str(source), str(target)])
    monkeypatch.undo()
    assert run_verb("checkpoint", ["move", str(source), str(target)]) == 0
    assert committed_steps(source / "checkpoints") == [] and committed_steps(
        target / "checkpoints"
    ) == [2, 4]
    assert (
        run_verb("checkpoint", ["verify", str(target)]) == 0
        and (target / "run.json").read_text() == "{}"
    )
    save(tmp_path / "other", 4, a=np.ones((3, 4), np.float32))
    with pytest.raises(CheckpointError, match="another checkpoint of that step"):
        run_verb("checkpoint", ["move", str(tmp_path / "other"), str(target)])


def test_one_run_at_a_time_writes_into_a_bucket(
    servers: FaultyProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    out = path_of(f"s3://{BUCKET}/locked")
    with locked(out), pytest.raises(CheckpointError, match="two runs in one folder"), locked(out):
        pass
    # Its process is gone: the lock is taken over at once.
    (out / ".lock").write_text(
        json.dumps({"host": __import__("socket").gethostname(), "process": 2**22 + 1})
    )
    with locked(out):
        pass
    assert "conditional writes" not in capsys.readouterr().err
    with locked(path_of(f"gs://{BUCKET}/locked")):  # the emulator takes no notice of conditions
        assert "takes no notice of conditional writes" in capsys.readouterr().err


HOLDER = """
import sys, time
from meshwright.storage.paths import path_of
from meshwright.trainer import bucket_lock, heartbeat, lock
heartbeat.BEAT, bucket_lock._ANSWER, bucket_lock._GIVEN_UP = 0.1, 0.5, 0.5
with lock.locked(path_of(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["taken over", "not renewed"])
def test_a_run_that_loses_its_lock_ends_at_once(servers: FaultyProxy, how: str) -> None:
    out = path_of(f"s3://{BUCKET}/lost")
    command = [sys.executable, "-c", HOLDER, str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        if how == "taken over":
            (out / ".lock").write_text(
                json.dumps({"host": "node7", "process": 4103, "token": "its own"})
            )
        else:
            servers.refuses = True
        _, err = holder.communicate(timeout=60)
        servers.refuses = False
    if how == "taken over":
        assert holder.returncode == LockError.exit_code == 9 and (out / ".lock").is_file()
        assert (
            "process 4103 on node7 has taken this folder over; this run stopped at once and saved nothing"
            in err
        )
    else:
        assert holder.returncode == StorageError.exit_code and "it was not renewed for" in err
    (out / ".lock").unlink()


def test_supervisors_meet_in_a_bucket(
    servers: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_POLL", 0.2)
    servers.share = 0.1
    out, found = path_of(f"s3://{BUCKET}/supervised"), {}
    run = dataclasses.replace(text_run("text.txt", 7), mesh=MeshShape.parse("data=4,fsdp=2"))

    def start(process: int) -> None:
        limits = Restarts(wait=5, hosts="left")
        meeting = supervise.Meeting(out, Hosts("test", 3, process, "127.0.0.1:9911"), limits)
        found[process] = meeting.next_start(run, 6)

    threads = [threading.Thread(target=start, args=(process,)) for process in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    servers.share = 0.0
    assert (
        found[0] == found[2]
        and found[0].members == (0, 2)
        and MeshShape.parse(found[0].mesh).size == 4
    )


def test_a_supervised_run_in_a_bucket_is_started_again(
    servers: FaultyProxy, tmp_path: Path, cache: Path
) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "run.json"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    run = text_run(str(text), 40)
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, save_every=10))
    undisturbed = loop.train(loop.prepare_run(run, cache=cache), tmp_path / "undisturbed")
    write_run(run, file)
    out = path_of(f"s3://{BUCKET}/started-again/{tmp_path.name}")
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "train",
        "--run",
        str(file),
        "--devices",
        "8",
        "--out",
        str(out),
    ]
    command += ["--supervise", "--restarts.backoff", "0.1", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 120
        while not committed_steps(out / "checkpoints"):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        summary, err = process.communicate(timeout=240)
    assert process.returncode == 0 and "exit code 137; starting again" in err, err[-3000:]
    assert "restored the last checkpoint" in err
    assert json.loads(summary)["held_out_loss"] == undisturbed.held_out_loss
    assert losses(out) == losses(tmp_path / "undisturbed")
    journal = (out / ".supervise" / "journal-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in journal].count("starting") == 2


def test_stacks_of_a_host_are_kept_in_the_bucket_or_here(servers: FaultyProxy) -> None:
    out = path_of(f"s3://{BUCKET}/stacks")
    watch = types.SimpleNamespace(out=out, process=1)
    file = _Watch._stacks(watch)  # type: ignore[arg-type]
    assert (
        file == out / "watchdog" / "stacks-process-1.txt"
        and "most recent call first" in file.read_text()
    )


def test_texts_are_copied_once_and_again_when_they_change(
    servers: FaultyProxy, tmp_path: Path
) -> None:
    data = path_of(f"s3://{BUCKET}/{tmp_path.name}")
    for name in ("a.txt", "b/c.txt"):
        (data / name).write_text(name)
    assert local_text("stdlib", tmp_path) == "stdlib"
    copy = Path(local_text(str(data), tmp_path))
    assert (copy / "b" / "c.txt").read_text() == "b/c.txt"
    assert Path(local_text(str(data / "a.txt"), tmp_path)).read_text() == "a.txt"
    passed = servers.passed
    assert local_text(str(data), tmp_path) == str(copy)
    assert servers.passed - passed <= 4  # a listing and the versions, no content
    (data / "a.txt").write_text("changed")
    (data / "b" / "c.txt").unlink()
    (data / "d.txt").write_text("as it was")
    third = Path(local_text(str(data), tmp_path))
    assert (third / "a.txt").read_text() == "changed" and not (third / "b" / "c.txt").exists()
    # What another process may read stays: another version is another copy, which shares what is the same.
    assert (copy / "a.txt").read_text() == "a.txt" and (copy / "b" / "c.txt").is_file()
    (data / "a.txt").write_text("again")
    fourth = Path(local_text(str(data), tmp_path))
    assert os.path.samefile(third / "d.txt", fourth / "d.txt")
    with pytest.raises(StorageError, match="no such object"):
        local_text(f"s3://{BUCKET}/nothing", tmp_path)
    shutil.rmtree(copy)


def test_token_files_in_a_bucket_are_read_where_they_are(
    servers: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": "word " * 150 + str(i)}) + "\n" for i in range(900))
    )
    stored = f"s3://{BUCKET}/{tmp_path.name}/tokens"
    words = [str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--shard-tokens", "1"]
    assert (
        run_verb("tokenize", [*words, "--out", str(tmp_path / "tokens")])
        == run_verb("tokenize", [*words, "--out", stored])
        == 0
    )
    assert not list((tmp_path / "cache" / "tokens").iterdir()), "it is moved"
    with pytest.raises(ConfigError, match="exists already"):
        run_verb("tokenize", [*words, "--out", stored])
    local, first = (
        load_corpus([p], "bytes", tmp_path / "one")
        for p in (str(tmp_path / "tokens"), f"{stored}=2")
    )
    assert local.files[0].digest == first.files[0].digest and len(first.files[0].tokens) > 5 * 2**17

    seq = 8192
    train = split(local.files[0], seq, 0.1)[0]
    expected = [build_stream([train], [1.0], 3)[i] for i in range(2 * len(train))]

    def read(cache: Path, windows: int) -> float:
        """Bytes that come from the bucket for each byte of a window of 16 KiB, in a shuffled order."""
        file = load_corpus([stored], "bytes", cache).files[0]
        stream, before = build_stream([split(file, seq, 0.1)[0]], [1.0], 3), servers.sent
        for i in range(windows):
            jax.tree.map(np.testing.assert_array_equal, stream[i], expected[i])
        return (servers.sent - before) / (windows * 2 * seq)

    assert read(tmp_path / "one", len(train)) < 1.5
    assert read(tmp_path / "one", 2 * len(train)) == 0, (
        "all of it is in the cache, also of another process"
    )
    cached = next((tmp_path / "one" / "buckets").glob("*.blocks"))
    content = bytearray(cached.read_bytes())
    content[5000] ^= 1
    cached.write_bytes(content)
    assert 0 < read(tmp_path / "one", len(train)) < 0.1, "what the cache has wrong is read again"
    # A cache that holds a tenth of it: blocks of other numbers are in their places, and none is taken for another.
    monkeypatch.setattr(tokens, "_CACHED", 30 * 4356)
    assert read(tmp_path / "small", 2 * len(train)) < 1.5
    assert next((tmp_path / "small" / "buckets").glob("*.blocks")).stat().st_size < 40 * 4356
    shard = path_of(stored) / "tokens-00001.bin"
    shard.write_bytes((path_of(stored) / "tokens-00002.bin").read_bytes())
    with pytest.raises(DataError, match=r"tokens-00001.bin is not the shard of this place"):
        read(tmp_path / "other", len(train))
    shard.unlink()
    with pytest.raises(DataError, match=r"tokens-00001.bin cannot be read: no such object"):
        read(tmp_path / "another", len(train))
