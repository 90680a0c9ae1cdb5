"""Hosts that differ are named before compiling; a host that dies, stops or falls behind is named by the others."""

import dataclasses
import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import MODELS, device_run_of, tiny_run

from meshwright.checkpoint.checkpoints import Checkpoints, named_tensors, write_error
from meshwright.errors import CheckpointError, ConfigError, reason_of
from meshwright.hardware.agreement import differences, flatten
from meshwright.signs import EVERYBODY, NOBODY, Phases
from meshwright.storage.attempts import store_error
from meshwright.trainer.hosts import Sign, slow_hosts, verdict
from meshwright.trainer.watchdog import Watchdog

HOSTS = """
import os, sys, traceback
def fail(*error):  # the other process must not wait for this one at the exit
    traceback.print_exception(*error)
    os._exit(1)
sys.excepthook = fail
import dataclasses, importlib.metadata, sys
from pathlib import Path
from meshwright.api.verb import start_devices
from meshwright.hardware.hosts import Hosts
from meshwright.errors import CheckpointError, ConfigError, reason_of
folder, port, process = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(folder / f"out-{process}").mkdir()
from meshwright.runs.recipe import find_recipe
from meshwright.config import MeshShape
run = find_recipe("tiny")
model = dataclasses.replace(run.model, width=32, layers=1, heads=4, kv_heads=2, mlp=32)
training = dataclasses.replace(run.training, seq=16, batch=4, steps=2)
data = dataclasses.replace(run.data, paths=(str(folder / "text.txt"),), tokenizer="bytes", held_out=0.0, sample=0)
run = dataclasses.replace(run, model=model, mesh=MeshShape(data=2), training=training, data=data)
start_devices(2, run.mesh, Hosts("test", 2, process, "127.0.0.1:" + port))
import jax
from meshwright.hardware.agreement import agree
from meshwright.step.train_step import build_train_step, CompiledTrainStep
from meshwright.trainer.loop import prepare_run
from meshwright.trainer.prepare import Position
from meshwright.trainer.hosts import agree_on, same_fields

def fields(run, **changes):
    return same_fields(prepare_run(run, cache=folder / "cache"))

def other(run, section, **changes):
    if process == 0:
        return run
    return dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **changes)})

def expect(kind, compare):
    try:
        compare()
        print(kind, "NO ERROR", flush=True)
    except ConfigError as error:
        print(kind, " ".join(str(error).split()), flush=True)

agree("start", fields(run))
print("same: agreed", flush=True)
expect("run:", lambda: agree("start", fields(other(run, "optimizer", learning_rate=1e-4))))
real = importlib.metadata.version
if process:
    importlib.metadata.version = lambda name: "0.9.1" if name == "optax" else real(name)
expect("version:", lambda: agree("start", fields(run)))
importlib.metadata.version = real
import jax
for name, value in (("jax_default_prng_impl", "rbg"), ("jax_threefry_partitionable", False)):
    before = getattr(jax.config, name)
    jax.config.update(name, value if process else before)
    expect(name + ":", lambda: agree_on(run))
    jax.config.update(name, before)
from meshwright.trainer.hosts import check_shared
expect("unshared:", lambda: check_shared(folder / f"out-{process}"))
check_shared(folder)
expect("paths:", lambda: agree_on(other(run, "data", paths=(str(folder / "text-2.txt"),))))
# Folders of tokens behind the same path differ between hosts: with other text, and with another tokenizer.
prepared = prepare_run(run, cache=folder / "cache")
def tokens_of(change):
    corpus = prepared.corpus
    changed = {**corpus.fingerprint, **(change if process else {})}
    class Other:
        device_run = prepared.device_run
        fingerprint = staticmethod(lambda: changed)
    return same_fields(Other)
expect("data:", lambda: agree("start", tokens_of({"sources": [["0123", 1.0]]})))
expect("tokenizer:", lambda: agree("start", tokens_of({"tokenizer": "4567"})))
# The same Run: a difference that only the program shows, such as a patched library.
prepared = prepare_run(other(run, "training", z_loss=0.1), cache=folder / "cache")
batch = next(prepared.feed(Position(0, 0)))
expect("program:", lambda: prepared.compile(batch))
os._exit(0)
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_planted_differences_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("She sells sea shells by the sea shore. " * 50)
    (tmp_path / "text-2.txt").write_text("She sells sea shells by the sea shore! " * 50)
    command, port = [sys.executable, "-c", HOSTS, str(tmp_path)], free_port()
    both = [
        subprocess.Popen(
            [*command, port, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in both]
    for out, err in outputs:
        lines = dict(
            line.split(":", 1)
            for line in out.splitlines()
            if ": " in line and not line.startswith("[")
        )
        assert "agreed" in lines.get("same", ""), err[-3000:]
        assert "optimizer.learning_rate: 0.004 on host 0, 0.0001 on host 1" in lines["run"]
        assert "version of optax" in lines["version"] and "0.9.1 on host 1" in lines["version"]
        assert "data.paths: " in lines["paths"]
        assert (
            "jax_default_prng_impl: threefry2x32 on host 0, rbg on host 1"
            in lines["jax_default_prng_impl"]
        )
        assert (
            "jax_threefry_partitionable: True on host 0, False on host 1"
            in lines["jax_threefry_partitionable"]
        )
        assert "processes 1 do not see the file that process 0 wrote there" in lines["unshared"]
        assert "tokens: sources" in lines["data"] and "on host 1" in lines["data"]
        assert "tokenizer: " in lines["tokenizer"] and "on host 0" in lines["tokenizer"]
        assert "lowered train step: " in lines["program"] and "on host 1" in lines["program"]
        assert all(
            "the same command, versions and files" in lines[kind]
            for kind in ("run", "version", "program")
        )


def test_differences_group_hosts() -> None:
    answers = {i: {"lr": "3e-4", "seq": "8"} for i in range(4)} | {
        4: {"lr": "1e-4", "seq": "8", "xla": "x"}
    }
    assert differences(answers) == [
        "lr: 3e-4 on hosts 0 to 3, 1e-4 on host 4", "xla: absent on hosts 0 to 3, x on host 4",
    ]  # fmt: skip
    assert flatten({"a": {"b": [1, 2]}, "c": None}) == {"a.b": "[1, 2]", "c": "null"}


def sign(
    process: int,
    step: int,
    phase: str,
    seconds: float = 0.0,
    at: float = 100.0,
    left: str = "",
    host: int | None = None,
) -> Sign:
    if host is None:
        host = EVERYBODY if phase in ("step", "commit") else NOBODY
    return Sign(process, f"node{process}", 9, 1, step, phase, seconds, at, left, host=host)


@pytest.mark.parametrize(
    ("signs", "words"),
    [
        ([sign(0, 5, "step"), sign(1, 5, "step", 3.0)], None),
        ([sign(0, 5, "step"), sign(1, 4, "step", at=70.0)], "no sign for 30 s of process 1 (node1, pid 9): step 4"),
        # All wait in step 6; the one that waits for data keeps them.
        ([sign(0, 6, "step", 70.0), sign(1, 6, "data", 65.0)], "process 1 (node1, pid 9): data after step 6 since"),
        ([sign(0, 6, "step", 70.0), sign(1, 6, "step", 61.0)], "process 0 (node0, pid 9): step 6 since"),
        ([sign(0, 0, "step", 70.0), sign(1, 0, "compile", 70.0)], None),
        ([sign(0, 6, "step", 2.0), sign(1, 6, "data", left="DataError: bad")], "process 1 (node1) has left: DataError"),
        # Process 1 has prepared for minutes and comes to the first step a moment after the other.
        ([sign(0, 0, "step", 1.0), sign(1, 0, "prepare", 590.0)], None),
        # Process 0 tokenises for as long as it takes; the others wait for its answer.
        ([sign(0, 0, "prepare", 90000.0), sign(1, 0, "prepare", 90000.0, host=0)], None),
        ([sign(0, 0, "prepare", 9000.0, host=1), sign(1, 0, "prepare", 9000.0)], "process 1 (node1, pid 9): prepare"),
        ([sign(0, 6, "save", 2.0), sign(1, 6, "save", at=10.0, left="done")], None),
        # A save of half an hour: process 0 wrote two seconds ago, and the other has nothing left to write.
        ([sign(0, 6, "save", 2.0), sign(1, 6, "commit", 1800.0)], None),
        ([sign(0, 6, "save", 70.0), sign(1, 6, "commit", 1800.0)], "process 0 (node0, pid 9): save after step 6 since"),
    ],
)  # fmt: skip
def test_verdict(signs: list[Sign], words: str | None) -> None:
    found = verdict({s.process: s for s in signs}, Watchdog(silence=20, stall=60), 100.0)
    assert found is None if words is None else found is not None and words in found


def test_a_save_is_late_by_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    phases = Phases()
    phases.enter("save", 6)
    now[0] = 2000.0
    assert phases.place == (6, "save", 100.0)
    phases.saves("save")
    assert phases.place == (6, "save", 2000.0)
    phases.saves("commit")
    now[0] = 2100.0
    phases.enter("step", 7)
    assert phases.place == (7, "step", 2100.0)
    monkeypatch.undo()
    device_run, told = device_run_of(tiny_run(MODELS["llama"])), []
    with Checkpoints(tmp_path, max_to_keep=1, saves=told.append) as checkpoints:
        checkpoints.save(state := device_run.initial_state(), device_run, step=1, cursor=0)
    assert told == ["save"] * len(named_tensors(state))


def test_a_host_at_a_tenth_of_its_speed_is_named() -> None:
    signs = {i: dataclasses.replace(sign(i, 6, "step"), delay=0.002 + 0.001 * i) for i in range(3)}
    assert slow_hosts(signs) == {} == slow_hosts({0: sign(0, 1, "start"), 1: sign(1, 1, "start")})
    for hosts in (2, 3):
        found = slow_hosts(
            {i: signs[i] for i in range(hosts - 1)} | {7: dataclasses.replace(signs[2], delay=0.04)}
        )
        assert list(found) == [7] and "is slow: 40 ms for what takes other hosts" in found[7]
    unknown = dataclasses.replace(signs[0], delay=0.0)  # one that has taken too few steps
    assert slow_hosts({0: unknown, 7: dataclasses.replace(signs[2], delay=0.04)}) == {}


def test_a_save_that_failed_is_known_before_the_next(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(tmp_path, max_to_keep=2, reach="process")
    assert checkpoints._thread is not None
    checkpoints._pending = checkpoints._thread.submit(full)
    until = time.monotonic() + 10
    with pytest.raises(CheckpointError, match="the disk is full"):
        while time.monotonic() < until:
            checkpoints.check()
            time.sleep(0.01)
    checkpoints.check()
    checkpoints.close()


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk quota is used up"), (errno.EFBIG, "`ulimit -f`")],
)  # fmt: skip
def test_what_a_disk_refuses(number: int, reason: str, tmp_path: Path) -> None:
    """By the number of the system call, also where TensorStore has it in a field of its text."""
    in_text = store_error(tmp_path, ValueError(f"RESOURCE_EXHAUSTED: [os_error_code='{number}']"))
    assert in_text is not None
    for refused in (OSError(number, os.strerror(number)), in_text):
        error = write_error("saving step 4", tmp_path, refused)
        assert reason in error.truth and "MiB are free" in error.fix
        gone = write_error("saving step 4", tmp_path / "gone", refused)
        assert "the folder is gone" in gone.truth and "free" not in gone.fix
    odd = write_error("saving step 4", tmp_path, ValueError("odd"))
    assert "odd; no checkpoint was committed" in odd.truth and "free" not in odd.fix


@pytest.mark.parametrize(
    ("number", "truth", "fix"),
    [(errno.EMFILE, "files open, its limit", "ulimit -n 65536"), (errno.ENFILE, "all processes", "fs.file-max"),
     (errno.ENOMEM, "no memory is left, or no map", "vm.max_map_count")],
)  # fmt: skip
def test_a_limit_that_is_reached_is_no_full_disk(
    number: int, truth: str, fix: str, tmp_path: Path
) -> None:
    in_text = store_error(tmp_path, ValueError(f"opening x [os_error_code='{number}']"))
    assert in_text is not None
    for error in (OSError(number, os.strerror(number), "x"), in_text):
        found = write_error("saving step 4", tmp_path, error)
        assert truth in found.truth and fix in found.fix and "disk" not in f"{found}"
        assert truth in reason_of(error) and fix in reason_of(error)


TOKENISING = """
import sys, time
from pathlib import Path
import jax
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, int(sys.argv[3]))
from meshwright.data.corpus import share
from meshwright.trainer.hosts import watching
from meshwright.signs import PREPARING, Phases
from meshwright.trainer.watchdog import Watchdog
with watching(Path(sys.argv[1]), Phases(PREPARING), Watchdog(silence=2)):
    time.sleep(1)
    print("ready", flush=True)
    share(["text"], Path(sys.argv[1]), None, lambda: time.sleep(60))
"""


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_host_that_dies_while_tokens_are_made_is_named(tmp_path: Path, killed: int) -> None:
    command = [sys.executable, "-c", TOKENISING, str(tmp_path), free_port()]
    both = [
        subprocess.Popen(
            [*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    both[killed].kill()
    both[killed].communicate()
    _, err = both[1 - killed].communicate(timeout=60)
    assert both[1 - killed].returncode == 75, err[-3000:]
    assert f"seen by process {1 - killed} in phase prepare" in err and f"process {killed} (" in err
    assert "the same command again: no checkpoint was committed" in err


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"silence 1\n.*a number of at least 2"):
        Watchdog(silence=1)
    with pytest.raises(ConfigError, match="a number of at least 0"):
        Watchdog(stall=-1)
