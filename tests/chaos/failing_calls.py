"""Trains with system calls that fail, in one process; a program of `test_failing_calls`, under LD_PRELOAD of `shim.c`.

python failing_calls.py FOLDER ROWS: each row is `phase kind errno times`. Prints a JSON list for each call that failed:
the row, which call of how many it was, the name of the error that ended the training ("" for none), its exit code, and
whether the run, resumed after it, ends with the losses of one without faults.
"""

import ctypes
import errno
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.checkpoint.steps import committed_steps
from meshwright.data import tokens
from meshwright.errors import ConfigError, MeshwrightError, by_class
from meshwright.storage import attempts

KINDS = {"open": 0, "read": 1, "write": 2, "fsync": 3, "rename": 4}
PHASES = {"start": "out", "resume": "out", "step": "tokens"}
"""Phase -> folder whose calls fail. A start writes the files of a run, saves and ends it."""
shim = ctypes.CDLL(None)


def arm(
    folder: Path | None, kind: str = "open", first: int = 0, times: int = 0, number: int = 0
) -> None:
    where = b"/" if folder is None else str(folder).encode()
    shim.shim_arm(where, KINDS[kind], ctypes.c_long(first), ctypes.c_long(times), number)


def disarm() -> None:
    arm(Path("/nowhere"))


def losses(out: Path) -> dict[int, Any]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


class Runs:
    """Small runs in a folder, all alike."""

    def __init__(self, folder: Path):
        self.folder = folder
        text = folder / "text.txt"
        text.write_text("She sells sea shells by the sea shore. " * 2000)
        from meshwright.data.tokenizing import tokenize

        tokenize(str(text), "bytes", folder / "tokens")
        self.run = mw.recipe(
            "tiny", mesh="data=1", layers=1, width=16, mlp=16, heads=2, kv_heads=2, steps=4, batch=2, seq=16,
            sample=0, eval_samples=2, paths=(str(folder / "tokens"),), save_every=2,
        )  # fmt: skip

    def train(self, out: Path, start: str) -> None:
        tokens._open_file.cache_clear()
        mw.train(
            self.run, out, start=start, devices=1, progress="none", cache=self.folder / "cache"
        )

    def prepare(self, phase: str) -> Path:
        """Returns the output folder in which a phase begins: without files, or with half of a run."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        if phase == "resume":
            shutil.copytree(self.folder / "half", out)
        return out

    def end(self, out: Path, start: str) -> tuple[str, int, float]:
        """Trains; returns name, exit code of the error that ended it, and the loss at the end."""
        try:
            self.train(out, start)
        except MeshwrightError as error:
            return type(error).__name__, error.exit_code, str(error)
        except (OSError, MemoryError) as error:  # as `meshwright train` has it
            found = by_class(error, ConfigError("", "", ""))
            return type(error).__name__, found.exit_code, str(error)
        return "", 0, ""


def main(folder: Path, rows: list[str]) -> None:
    attempts.PAUSES = (0.0, 0.0, 0.0)
    warnings.simplefilter("ignore")
    runs = Runs(folder)
    disarm()
    runs.train(folder / "whole", "fresh")
    expected = losses(folder / "whole")
    half = folder / "half"
    shutil.copytree(folder / "whole", half)
    shutil.rmtree(half / "checkpoints" / "4")
    for row in rows:
        phase, kind, name, times = row.split()
        target = folder / PHASES[phase]
        start = "resume" if phase == "resume" else "fresh"

        out = runs.prepare(phase)
        arm(target, kind, first=10**9)
        runs.train(out, start)
        total = shim.shim_count()
        for first in sorted({1, (total + 1) // 2, total}):
            out = runs.prepare(phase)
            arm(target, kind, first, 10**9 if times == "all" else int(times), getattr(errno, name))
            end, code, text = runs.end(out, start)
            disarm()
            again = "resume" if committed_steps(out / "checkpoints") else "fresh"
            equal = True
            if end:
                runs.train(out, again)
            equal = losses(out) == expected
            print(json.dumps([row, first, total, end, code, equal, text[:300]]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
