"""Metrics as JSON lines and as TensorBoard events."""

import contextlib
import json
import math
import sys
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.report import Values


class JsonLines:
    """One JSON object per line: `{"step": 7, "loss": 2.31, ...}`. What is not finite is written as null.

    Where the disk is full lines wait in memory until there is room: it is the next checkpoint that ends the run, and
    says why. What still waits at the end is given up with a word on standard error.
    """

    def __init__(self, file: Path, *, upto: int):
        """upto: lines of later steps are dropped: a resumed run writes them again."""
        kept = []
        if file.exists():
            kept = [line for line in file.read_text(encoding="utf-8").splitlines() if _step_of(line) <= upto]
        file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = file.open("ab", buffering=0)
        self._waiting = b""

    def write(self, step: int, values: Values) -> None:
        told = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._waiting += (json.dumps({"step": step, **told}) + "\n").encode()
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        self._drain()
        if self._waiting:
            lost = self._waiting.count(b"\n")
            print(f"{self._file.name}: no room for its last {lost} lines", file=sys.stderr)
        self._file.close()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut short by a crash


class TensorBoard:
    """TensorBoard events (the extra `tensorboard`)."""

    def __init__(self, folder: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "--tensorboard", "tensorboardX is not installed", "pip install 'meshwright[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
