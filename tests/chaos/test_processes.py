"""Real processes: two that train together, one that is killed, one whose disk is full."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import ranks

SMALL = [
    "--model.width", "32", "--model.layers", "2", "--model.mlp", "64", "--data.tokenizer", "bytes",
    "--training.seq", "32", "--training.eval-samples", "16", "--data.sample", "4", "--training.eval-every", "0",
]  # fmt: skip


def start(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshwright", *arguments]
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, err[-3000:] + out[-3000:]
    return out + err


def losses(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def text_file(tmp_path: Path) -> list[str]:
    file = tmp_path / "text.txt"
    file.write_text("She sells sea shells by the sea shore. " * 500)
    return ["--data", str(file), *SMALL]


@pytest.mark.parametrize(
    "other", ["data=1", pytest.param("data=2,fsdp=2,tensor=2", marks=pytest.mark.exhaustive)]
)
def test_two_processes_compare_two_meshes(other: str) -> None:
    """One that process 0 computes alone, and one that both compute; and a mistake that only process 0 meets."""
    words = ["parity", "tiny", *SMALL, "--mesh", "fsdp=8", "--json", "--steps", "2"]
    first, second = [start(*words, "--against", other, env=rank) for rank in ranks(2)]
    found, error = first.communicate(timeout=240)
    assert first.returncode == 0, error[-3000:]
    finish(second)
    result = json.loads(found)
    assert result["meshes"] == ["fsdp=8", other] and result["unequal_initial"] == []
    assert result["first_divergence"] is None
    assert [0 < step["gradient_difference"] < 1e-5 for step in result["steps"]] == [True, True]
    if other == "data=1":
        for process in [start(*words, "--against", "data=3", env=rank) for rank in ranks(2)]:
            said = finish(process, 2)
            assert "16 = 5 * 3 + 1" in said and "Check failure stack" not in said


@pytest.mark.exhaustive
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    same = ["train", *text_file(tmp_path), "--steps", "8", "--devices", "8", "--mesh", "data=2,fsdp=2,tensor=2",
            "--training.save-every", "4"]  # fmt: skip
    alone, together = tmp_path / "alone", tmp_path / "together"
    finish(start(*same, "--out", str(alone)))
    same += ["--out", str(together)]
    for process in [start(*same, env=rank) for rank in ranks(2)]:
        finish(process)
    single, sharded = losses(alone), losses(together)
    assert single.keys() == sharded.keys() == set(range(1, 9))
    assert [sharded[s] for s in sharded] == pytest.approx([single[s] for s in single], rel=1e-5)
    assert (together / "sample.txt").read_text() == (alone / "sample.txt").read_text()
    # One process resumes what two have saved, on another mesh.
    more = [
        "train",
        "--out",
        str(together),
        "--resume",
        "--steps",
        "10",
        "--mesh",
        "fsdp=4",
        "--devices",
        "4",
    ]
    finish(start(*more))
    assert max(losses(together)) == 10


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_killed_while_saving_it_resumes_from_the_last_committed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Wide enough that a save takes a while.
    arguments = ["train", *text_file(tmp_path), "--model.width", "256", "--steps", "12", "--devices", "2",
             "--mesh", "fsdp=2", "--training.save-every", "2", "--training.max_to_keep", "3"]  # fmt: skip
    process = start(*arguments, "--out", str(out))
    folder = out / "checkpoints"
    wait_for(lambda: (folder / "4.tmp").is_dir() or (folder / "6").exists(), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    committed = max(int(p.name) for p in folder.iterdir() if p.name.isdigit())
    output = finish(start("train", "--out", str(out), "--resume"))
    reference = tmp_path / "reference"
    finish(start(*arguments, "--out", str(reference)))
    again, expected = losses(out), losses(reference)
    assert committed < 12 and set(again) == set(expected) == set(range(1, 13)), output
    assert again == expected
    assert not list(folder.glob("*tmp*"))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)]
)
def test_a_signal_saves_and_leaves(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    arguments = [
        "train",
        *text_file(tmp_path),
        "--steps",
        "100000",
        "--devices",
        "2",
        "--mesh",
        "fsdp=2",
    ]
    process = start(*arguments, "--out", str(out))
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(losses(out)) > 3, process)
    process.send_signal(number)
    output = finish(process, 128 + number)
    last = max(losses(out))
    assert f"stopped  by signal {int(number)} after step {last}" in " ".join(
        output.replace("stopped", "stopped ").split("\n")
    ) or (f"after step {last}" in output)
    assert (out / "checkpoints" / str(last)).is_dir()


def mounted(folder: Path, options: str) -> list[str]:
    """A command prefix that runs with a tmpfs on `folder`, in a mount namespace of its own."""
    script = f'mount -t tmpfs -o {options} meshwright "$1" && shift && exec "$@"'
    alone = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    )
    return [*alone, "sh", "-c", script, "sh", str(folder)]


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    kept = tmp_path / "kept"
    # 24 MiB: enough for the check before the first step; another file then fills the disk after the first checkpoint.
    arguments = ["train", *text_file(tmp_path), "--steps", "400", "--devices", "1", "--mesh", "data=1", "--out",
             f"{disk}/out", "--training.save-every", "40", "--training.max_to_keep", "1"]  # fmt: skip
    inside = (
        f'"$@" & child=$!; while ! ls {disk}/out/checkpoints/40/manifest >/dev/null 2>&1; do sleep 0.01; done; '
        f"dd if=/dev/zero of={disk}/filler bs=64k 2>/dev/null; wait $child; code=$?; rm -f {disk}/filler; "
        f"cp -r {disk}/out {kept}; exit $code"
    )
    command = [
        *mounted(disk, "size=24m"),
        "sh",
        "-c",
        inside,
        "sh",
        sys.executable,
        "-m",
        "meshwright",
        *arguments,
    ]
    done = subprocess.run(command, text=True, capture_output=True, timeout=240)
    assert done.returncode == 10, done.stdout[-2000:] + done.stderr[-2000:]
    assert "the disk is full; the checkpoint of step" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr) < 4000
    output = finish(start("train", "--out", str(kept), "--resume", "--steps", "90"))
    assert "90" in output


def test_a_run_that_fits_its_disk_resumes_there(tmp_path: Path) -> None:
    """On a disk with room for 1.5 checkpoints besides the one that is kept, with a supervisor, and killed once."""
    disk = tmp_path / "disk"
    disk.mkdir()
    arguments = ["train", *text_file(tmp_path), "--model.width", "128", "--steps", "60", "--devices", "1", "--mesh",
                 "data=1", "--out", f"{disk}/out", "--training.save-every", "20", "--training.max_to_keep", "1",
                 "--data.sample", "0", "--supervise", "--restarts.backoff", "0.1"]  # fmt: skip
    # A checkpoint takes 2.7 MiB. The supervisor's child is killed once, after the first.
    inside = (
        f'"$@" & supervisor=$!; while ! ls {disk}/out/checkpoints/20/manifest >/dev/null 2>&1; do sleep 0.01; done; '
        f"kill -9 $(cat /proc/$supervisor/task/*/children); wait $supervisor; code=$?; "
        f"du -sb {disk}/out/checkpoints/60; exit $code"
    )
    command = [
        *mounted(disk, "size=6800k"),
        "sh",
        "-c",
        inside,
        "sh",
        sys.executable,
        "-m",
        "meshwright",
        *arguments,
    ]
    done = subprocess.run(command, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    size = int(done.stdout.splitlines()[-1].split()[0])
    assert 2.25 * size < 6800 * 2**10 < 2.75 * size, "room for 2.5 checkpoints"
    assert (
        "exit code 137; starting again" in done.stderr
        and "restored the last checkpoint" in done.stdout
    )


def test_a_read_only_folder_is_refused_before_the_first_step(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [
        *mounted(disk, "ro"),
        sys.executable,
        "-m",
        "meshwright",
        "train",
        *text_file(tmp_path),
        "--out",
        f"{disk}/out",
    ]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120)
    # Disks become read-only for a while after an error: another start may find it writable.
    assert done.returncode == 75
    assert "it cannot be written: Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr
