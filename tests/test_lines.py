"""Files of lines that grow: what a start, a save and a roll back of them costs, on disks and in buckets."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorstore

from meshwright.activity import activity, watched_by
from meshwright.reporters.files import EventLog, JsonLines, last_start, last_step
from meshwright.reporters.lines import LocalLines
from meshwright.storage.bucket import BucketPath
from meshwright.storage.paths import path_of


@dataclasses.dataclass
class Counted:
    """What a store was asked for."""

    puts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Object -> times that it was put."""
    put_bytes: int = 0
    read_bytes: int = 0


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """A bucket in memory that counts."""
    counted, shared = Counted(), tensorstore.Context()
    write, read = BucketPath.write_bytes, BucketPath.read_object

    def kvstore(path: BucketPath, retries: int = 0) -> Any:
        prefix = "/".join([path.bucket, *([path.key] if path.key else [])])
        return {"driver": "memory", "path": f"{prefix}/"}, shared

    def count_write(path: BucketPath, data: Any) -> int:
        counted.puts[path.name] = counted.puts.get(path.name, 0) + 1
        counted.put_bytes += len(data)
        return write(path, data)

    def count_read(path: BucketPath) -> bytes | None:
        content = read(path)
        counted.read_bytes += len(content or b"")
        return content

    monkeypatch.setattr(BucketPath, "kvstore", kvstore)
    monkeypatch.setattr(BucketPath, "write_bytes", count_write)
    monkeypatch.setattr(BucketPath, "read_object", count_read)
    yield counted


def train(out: Path, first: int, last: int, save_every: int) -> None:
    """Reports steps and saves as the loop does."""
    log = EventLog(out / "events.jsonl")
    since = last_start(out).get("checked")
    lines = JsonLines(out / "metrics.jsonl", upto=first, every=1, since=since)
    log.start(first, devices=1, checked=lines.checked)
    with watched_by(log):
        for step in range(first + 1, last + 1):
            lines.write(step, {"loss": 1.0})
            log.write(step, {})
            if step % save_every == 0:
                with activity("save", "saving", "saved", step):
                    pass
    lines.close()
    log.close()


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("place", ["bucket", "disk"])
def test_lines_are_the_same_in_a_bucket_and_on_a_disk(
    place: str, bucket: Counted, tmp_path: Path
) -> None:
    out = path_of("s3://bucket/run") if place == "bucket" else tmp_path
    train(out, 0, 40, 7)
    train(out, 33, 50, 7)
    assert [line["step"] for line in read(out / "metrics.jsonl")] == list(range(1, 51))
    assert (last_step(out), last_start(out)["step"]) == (50, 33)
    assert [line["event"] for line in read(out / "events.jsonl")].count("save") == 8
    assert last_step(path_of("s3://bucket/absent")) == 0
    lines = JsonLines(out / "metrics.jsonl", upto=50)
    lines.rewind(20)
    lines.write(21, {"loss": 2.0})
    lines.close()
    assert [line["step"] for line in read(out / "metrics.jsonl")] == list(range(1, 22))


def test_every_line_is_put_once_and_the_bytes_of_saves_do_not_grow_with_the_run(
    bucket: Counted,
) -> None:
    sent = []
    for steps in (200, 400, 800):
        out = path_of(f"s3://bucket/{steps}")
        before = bucket.put_bytes
        train(out, 0, steps, 2)
        total = sum(len((out / name).read_bytes()) for name in ("metrics.jsonl", "events.jsonl"))
        assert bucket.put_bytes - before == total, "each line is put once"
        sent.append(bucket.put_bytes - before)
    assert sent[2] - sent[1] < 2.2 * (sent[1] - sent[0])


def test_a_start_reads_what_was_added_since_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.reporters import files

    parsed = []
    step_of: Callable[[str], float] = files.step_of_line

    def counting(line: str) -> float:
        parsed.append(line)
        return step_of(line)

    train(tmp_path, 0, 2000, 100)
    train(tmp_path, 2000, 2010, 100)
    monkeypatch.setattr(files, "step_of_line", counting)
    status = (tmp_path / "metrics.jsonl").stat()
    train(tmp_path, 2010, 2011, 100)
    assert len(parsed) < 50, "a start reads the lines since the one before, and the last"
    assert (tmp_path / "metrics.jsonl").stat().st_ino == status.st_ino, "it is not written anew"


def test_a_whole_object_of_an_earlier_version_goes_on(bucket: Counted) -> None:
    out = path_of("s3://bucket/old")
    (out / "metrics.jsonl").write_text(
        "".join(f'{{"step": {n}, "loss": 1.0}}\n' for n in (1, 2, 3))
    )
    train(out, 2, 4, 2)
    assert [line["step"] for line in read(out / "metrics.jsonl")] == [1, 2, 3, 4]


def test_an_event_after_a_line_that_was_cut_off_is_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "events.jsonl"
    log = EventLog(file)
    log.add("first")
    log.release()
    with file.open("ab") as opened:
        opened.truncate(opened.tell() - 9)
    log = EventLog(file)
    log.add("after a crash")
    write = LocalLines.write
    monkeypatch.setattr(LocalLines, "write", lambda lines, data: write(lines, data[:20]))
    log.add("on a disk that becomes full")
    monkeypatch.undo()
    log.add("with room again")
    log.release()
    lines = file.read_text().splitlines()
    assert len(lines) == 4
    assert [json.loads(lines[i])["event"] for i in (1, 3)] == ["after a crash", "with room again"]
