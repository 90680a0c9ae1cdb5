"""What a run writes of itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.report.files import JsonLines


class Full:
    """A file on a disk that has room for so many bytes."""

    def __init__(self, file: Any, room: int):
        self.file, self.room, self.name = file, room, "metrics.jsonl"

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        return int(self.file.write(taken))

    def close(self) -> None:
        self.file.close()


def test_lines_wait_for_room_and_none_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: Any = JsonLines(tmp_path / "metrics.jsonl", upto=0)
    disk = lines._file = Full(lines._file, 30)
    for step in (1, 2, 3):
        lines.write(step, {"loss": step / 2})
    disk.room = 10**6
    lines.write(4, {"loss": float("inf")})
    lines.close()
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert told == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 1.5},
                    {"step": 4, "loss": None}]  # fmt: skip
    assert capsys.readouterr().err == ""


def test_lines_that_find_no_room_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: Any = JsonLines(tmp_path / "metrics.jsonl", upto=0)
    lines._file = Full(lines._file, 0)
    lines.write(1, {"loss": 1.0})
    lines.write(2, {"loss": 1.0})
    lines.close()
    assert "no room for its last 2 lines" in capsys.readouterr().err
