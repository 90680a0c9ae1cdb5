"""What one run asks of its stores as it grows: its reporters in a bucket, and opens of token shards.

The reporters write the lines of `--steps` steps with a save every `--save-every` into a bucket in memory that counts what
is put, and are started again. A feed reads shuffled windows from token files of `--shards` shards, and the opens of files
are counted. `bench/budgets.py --steps` prints both tables.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorstore

from meshwright.activity import activity, watched_by
from meshwright.data.token_writer import UNIT, TokenWriter, write_description
from meshwright.data.tokenizers import Bytes
from meshwright.data.tokens import open_tokens
from meshwright.reporters.files import EventLog, JsonLines, last_start
from meshwright.storage.bucket import BucketPath
from meshwright.storage.paths import path_of

SEQ = 2048
"""Tokens of a window."""


@contextlib.contextmanager
def counted_bucket(counts: dict[str, int]) -> Iterator[None]:
    """Makes buckets of this process's memory, and counts what is put and read."""
    shared = tensorstore.Context()
    write, read = BucketPath.write_bytes, BucketPath.read_object

    def kvstore(path: BucketPath, retries: int = 0) -> Any:
        prefix = "/".join([path.bucket, *([path.key] if path.key else [])])
        return {"driver": "memory", "path": f"{prefix}/"}, shared

    def count_write(path: BucketPath, data: Any) -> int:
        counts["puts"] += 1
        counts["bytes put"] += len(data)
        return write(path, data)

    def count_read(path: BucketPath) -> bytes | None:
        content = read(path)
        counts["bytes read"] += len(content or b"")
        return content

    with contextlib.ExitStack() as stack:
        for name, value in (
            ("kvstore", kvstore),
            ("write_bytes", count_write),
            ("read_object", count_read),
        ):
            stack.enter_context(mock.patch.object(BucketPath, name, value))
        yield


def report(out: Path, first: int, last: int, save_every: int) -> None:
    """Reports steps and saves as the training loop does."""
    events = EventLog(out / "events.jsonl")
    since = last_start(out).get("checked")
    lines = JsonLines(out / "metrics.jsonl", upto=first, every=1, since=since)
    events.start(first, devices=8, checked=lines.checked)
    values = {"loss": 2.312345678, "gradient norm": 0.8123456, "learning rate": 0.001}
    with watched_by(events):
        for step in range(first + 1, last + 1):
            lines.write(step, values)
            events.write(step, values)
            if step % save_every == 0:
                with activity("save", "saving", "saved", step):
                    pass
    lines.close()
    events.close()


def reporter_costs(steps: int, save_every: int) -> dict[str, dict[str, int]]:
    """Returns what the reporters of a run put and read: in all its steps, and at two starts after them."""
    counts = dict.fromkeys(("puts", "bytes put", "bytes read"), 0)
    found = {}
    with counted_bucket(counts):
        out = path_of("s3://bucket/run")
        starts = ("a start after them", "the next start")
        for phase, first in zip(("all steps", *starts), (0, steps, steps), strict=True):
            counts.update(dict.fromkeys(counts, 0))
            report(out, first, steps, save_every)
            found[phase] = dict(counts)
    return found


def shard_opens(shards: int, windows: int) -> int:
    """Returns how many files a feed opens that reads so many shuffled windows from token files of so many shards."""
    opens = [0]
    names = "tokens-"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and names in str(arguments[0]):
            opens[0] += 1

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tokens"
        folder.mkdir()
        with contextlib.closing(TokenWriter(folder, "<u2", UNIT)) as writer:
            for _ in range(shards):
                writer.add(np.zeros(UNIT, np.int32), np.array([UNIT]))
            writer.finish()
            (folder / "tokenizer.json").write_text(Bytes().to_json(), encoding="utf-8")
            named = {"source": "zeros", "tokenizer": "bytes", "skipped": {}}
            write_description(folder, writer.description(Bytes().vocab, **named))
        tokens = open_tokens(folder).tokens
        count = len(tokens) // SEQ - 1
        order = np.random.default_rng(0).permutation(count)
        sys.addaudithook(hook)
        for number in range(windows):
            start = int(order[number % count]) * SEQ
            tokens.read(start, start + SEQ + 1)
        names = "no file"
    return opens[0]


def tables(steps: int, save_every: int, shards: list[int], windows: int) -> str:
    """Returns the tables of the page."""
    lines = [
        f"Reporters in a bucket, {steps:,} steps, a save every {save_every}:\n",
        "| phase | puts | bytes put | bytes read |",
        "|---|---|---|---|",
    ]
    for phase, counts in reporter_costs(steps, save_every).items():
        cells = " | ".join(f"{count:,}" for count in counts.values())
        lines.append(f"| {phase} | {cells} |")
    lines += [
        "",
        f"Token shards, {windows:,} shuffled windows:\n",
        "| shards | opens |",
        "|---|---|",
    ]
    lines += [f"| {number:,} | {shard_opens(number, windows):,} |" for number in shards]
    return "\n".join(lines) + "\n"
