"""Reporters that write files: JSON lines and TensorBoard events."""

import contextlib
import json
import math
import sys
import time
from pathlib import Path

from meshwright.documents import parse_json, write_atomically
from meshwright.errors import ConfigError
from meshwright.report import Values


class JsonLines:
    """Reporter that writes one JSON object per line: `{"step": 7, "loss": 2.31, ...}`, with null for NaN and infinity.

    On a full disk the lines wait in memory until there is room; the next checkpoint then ends the run with an error
    that names the disk. Lines still waiting at `close` are lost, which a message on standard error states.
    """

    def __init__(self, file: Path, *, upto: int):
        """Opens `file`, and drops its lines of steps after `upto`, which a resumed run writes again."""
        self._path, self._waiting = file, b""
        self._open(upto)

    def _open(self, upto: int) -> None:
        """Opens the file without the lines after `upto`; a file that cannot be read is kept under another name."""
        kept: list[str] = []
        try:
            if self._path.exists():
                text = self._path.read_text(encoding="utf-8", errors="replace")
                kept = [f"{line}\n" for line in text.splitlines() if _step_of(line) <= upto]
        except OSError as error:
            aside = self._path.with_name(f"{self._path.name}.unreadable-{time.strftime('%Y%m%d-%H%M%S')}")
            print(f"{self._path}: {error.strerror}; moved to {aside.name}", file=sys.stderr)
            self._path.rename(aside)
        write_atomically(self._path, "".join(kept))
        self._file = self._path.open("ab", buffering=0)

    def rewind(self, step: int) -> None:
        """Drops the lines of steps after `step`, which are taken again."""
        self._drain()
        self._file.close()
        self._open(step)

    def write(self, step: int, values: Values) -> None:
        """Appends the line of a step."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._waiting += (json.dumps({"step": step, **finite}) + "\n").encode()
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        """Writes the lines that wait, and closes the file."""
        self._drain()
        if self._waiting:
            lost = self._waiting.count(b"\n")
            print(f"{self._file.name}: no room for its last {lost} lines", file=sys.stderr)
        self._file.close()


def _step_of(line: str) -> float:
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut off by a crash, or damaged


class TensorBoard:
    """Reporter that writes TensorBoard events into `folder` (needs the extra `tensorboard`)."""

    def __init__(self, folder: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "--report tensorboard", "tensorboardX is not installed", "pip install 'meshwright[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Values) -> None:
        """Adds one scalar per metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what is buffered."""
        self._writer.close()
