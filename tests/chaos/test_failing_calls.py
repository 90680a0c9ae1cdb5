"""System calls that fail, one by one, below a training: a file server that does not answer ends no run for good.

`shim.c` stands before the system's library (LD_PRELOAD), so that calls of TensorStore fail as well as those of Python.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.tokenizing import tokenize
from meshwright.errors import FOR_NOW, NUMBERS, RoomError
from meshwright.launching.restarts import restarts

HERE = Path(__file__).parent
READ = 1
"""Number of the kind of call, as `shim.c` has it."""
ONCE = {
    "start": ("open ESTALE", "write EIO", "fsync EIO", "rename ETIMEDOUT", "read EIO"),
    "resume": ("open ESTALE", "read EIO"),
    "step": ("open ETIMEDOUT", "read ESTALE"),
}
ALWAYS = {
    "start": ("open EROFS", "write ENOSPC", "write EIO", "fsync EIO", "rename ESTALE"),
    "resume": ("read ESTALE", "open EACCES"),
    "step": ("open EIO", "read EIO"),
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler, with which the calls are replaced")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    words = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "shim.c"), "-ldl"]
    subprocess.run(words, check=True)
    return library


def ends(shim: Path, folder: Path, rows: list[str]) -> list[list[Any]]:
    """What `failing_calls.py` prints."""
    done = subprocess.run(
        [sys.executable, str(HERE / "failing_calls.py"), str(folder), *rows],
        text=True, capture_output=True, env={**os.environ, "LD_PRELOAD": str(shim)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("phase", ONCE)
def test_a_call_that_fails_once_changes_nothing(phase: str, shim: Path, tmp_path: Path) -> None:
    """The first, the middle and the last call of a kind: the training ends well, with the losses of one without."""
    rows = [f"{phase} {fault} 1" for fault in ONCE[phase]]
    found = ends(shim, tmp_path, rows)
    assert {row[0] for row in found} == {*rows}
    for row, _, total, end, code, equal, text in found:
        assert total > 0 and (end, code, equal) == ("", 0, True), (row, text)


@pytest.mark.parametrize("phase", ALWAYS)
def test_calls_that_fail_on_and_on_ask_for_another_start(
    phase: str, shim: Path, tmp_path: Path
) -> None:
    """That start, without faults, ends with the losses of an undisturbed run: nothing was set aside or deleted."""
    rows = [f"{phase} {fault} all" for fault in ALWAYS[phase]]
    found = ends(shim, tmp_path, rows)
    assert {row[0] for row in found} == {*rows}
    for row, _, _, end, code, equal, text in found:
        number = getattr(errno, row.split()[2])
        assert equal, (row, text)
        if end:
            assert restarts(code) == (NUMBERS.get(number) in FOR_NOW), (row, end, text)
            assert code == RoomError.exit_code or number != errno.ENOSPC, (row, end, text)


def test_a_supervised_run_goes_on_after_a_server_that_was_away(shim: Path, tmp_path: Path) -> None:
    """Every read of tokens fails in the first start, and in no other."""
    (tmp_path / "text.txt").write_text("She sells sea shells by the sea shore. " * 2000)
    tokenize(str(tmp_path / "text.txt"), "bytes", tmp_path / "tokens")
    words = ["train", "tiny", "--out", str(tmp_path / "out"), "--data", str(tmp_path / "tokens")]
    words += ["--mesh", "data=1", "--devices", "1", "--steps", "3", "--data.sample", "0"]
    words += [
        "--model.width",
        "16",
        "--model.layers",
        "1",
        "--model.mlp",
        "16",
        "--training.seq",
        "16",
    ]
    words += ["--training.batch", "2", "--training.eval-samples", "2", "--restarts.backoff", "0.1"]
    fault = f"{tmp_path}/tokens {READ} {errno.EIO} {tmp_path}/mark"
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words, "--supervise"],
        text=True, capture_output=True, env={**os.environ, "LD_PRELOAD": str(shim), "SHIM": fault},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exit code 75; starting again" in done.stderr and "Traceback" not in done.stderr
    assert "cannot be read: Input/output error" in done.stderr, done.stderr
    assert (tmp_path / "mark").exists()
