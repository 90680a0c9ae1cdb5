"""What a corpus of 15 T tokens costs before and between steps: no time, memory or open file grows with it."""

import dataclasses
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from meshwright.data import corpus, tokens
from meshwright.data.feed import build_stream, held_out_border, held_out_order
from meshwright.data.token_writer import write_description
from meshwright.data.tokenizers import Bytes
from meshwright.data.tokenizing import tokenize
from meshwright.data.tokens import BLOCK, block_type, make_blocks, shard_name
from meshwright.errors import DataError, UnavailableError
from meshwright.storage import attempts

TRILLIONS = 15 * 10**12


@dataclasses.dataclass(frozen=True)
class Long:
    """Samples of a source, without tokens."""

    size: int
    seq: int = 8192

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": np.int64(index)}


@pytest.mark.parametrize("sizes", [[5], [3, 0, 7], [1, 1, 4, 2]])
def test_held_out_windows_are_taken_from_the_sources_in_turn(sizes: list[int]) -> None:
    parts: list[Any] = [Long(size) for size in sizes]
    expected = [(part, i) for i in range(max(sizes)) for part in parts if i < len(part)]
    for samples in (0, 1, 4, 99):
        assert list(held_out_order(parts, samples)) == expected[: samples or None]


def test_taking_windows_costs_what_is_taken() -> None:
    parts: list[Any] = [Long(TRILLIONS // 8192), Long(3), Long(TRILLIONS // 512)]
    taken = list(held_out_order(parts, 256))
    assert [len([i for part, i in taken if part is p]) for p in parts] == [127, 3, 126]
    stream = build_stream(parts, [0.5, 0.25, 0.25], 0)
    found = [int(stream[10**9 + i]["index"]) for i in range(200)]
    assert len(set(found)) > 100 and max(found) > 2**33


@pytest.mark.parametrize(
    ("total", "held_out", "border"),
    [(1000, None, 900), (2_533_041, None, round(2_533_041 * 0.9)), (10**8, None, 9 * 10**7),
     (TRILLIONS, None, TRILLIONS - 10**7), (TRILLIONS, 0.1, round(TRILLIONS * 0.9)), (1000, 0, 1000)],
)  # fmt: skip
def test_the_default_holds_out_a_tenth_and_no_more_than_an_evaluation_needs(
    total: int, held_out: float | None, border: int
) -> None:
    assert held_out_border(total, held_out) == border


SHARD = 2**32
SEQ = 8192


def sparse_corpus(folder: Path, total: int, documents: int, taken: int) -> None:
    """A token file of which only the blocks of the first `taken` windows, and of as many held-out ones, are written."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(Bytes().to_json())
    shards, block = -(-total // SHARD), block_type("<u2").itemsize
    checksums = np.random.default_rng(0).bytes(32 * shards)
    (folder / "shards.bin").write_bytes(checksums)
    for number in range(shards):
        blocks = -(-min(SHARD, total - number * SHARD) // BLOCK)
        with (folder / shard_name(number)).open("wb") as file:
            file.truncate(blocks * block)
            os.pwrite(file.fileno(), checksums[32 * number :][:32], blocks * block)
    border = held_out_border(total, None)
    stream = build_stream([Long((border - 1) // SEQ)], [1.0], 0)  # type: ignore[list-item]
    firsts = [int(stream[i]["index"]) * SEQ for i in range(taken)] + [
        border + i * SEQ for i in range(taken)
    ]
    for first in [(shards - 1) * SHARD, *firsts]:
        number, inside = divmod(first // BLOCK, SHARD // BLOCK)
        contents = np.arange(5 * BLOCK) % 251
        with (folder / shard_name(number)).open("r+b") as file:
            written = make_blocks(contents, contents == 250, "<u2", first // BLOCK)
            os.pwrite(file.fileno(), written.tobytes(), inside * block)
    described = {
        "dtype": "uint16",
        "tokens": total,
        "documents": documents,
        "vocab": 257,
        "shards": shards,
    }
    write_description(
        folder,
        {**described, "shard_tokens": SHARD, "source": "", "tokenizer": "bytes", "skipped": {}},
    )


READING = """
import os, resource, sys, time
from pathlib import Path
import jax
import numpy as np
from meshwright.data.corpus import load_corpus
from meshwright.data.feed import build_stream, held_out_order, split

folder, seq, taken = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def used(what):
    pages = int(Path("/proc/self/statm").read_text().split()[what])
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime, pages * 4096
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
resource.setrlimit(resource.RLIMIT_AS, (used(0)[1] + 2**30,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(used(0)[0]) + 20,) * 2)
start, (seconds, before) = time.perf_counter(), used(1)
corpus = load_corpus([str(folder)], "bytes", folder)
train, held_out = split(corpus.files[0], seq, None, "text.txt")
opened = time.perf_counter() - start
stream = build_stream([train], [1.0], 0)
for i in range(taken):
    assert stream[i]["inputs"][-1] == (seq - 1) % 251
assert corpus.fingerprint
for part, i in held_out_order([held_out], taken):
    assert part[i]["segments"].max() > 30
after, memory = used(1)
files = len(os.listdir("/proc/self/fd"))
print(len(held_out), f"{opened:.2f} s, cpu {after - seconds:.2f} s, {(memory - before) >> 20} MiB, {files} files")
"""


def test_a_corpus_is_read_under_limits_that_do_not_grow_with_it(tmp_path: Path) -> None:
    """3,493 shards of 15 T tokens and 15 G documents, with 200 open files, 1 GiB and 20 seconds."""
    sparse_corpus(tmp_path / "tokens", TRILLIONS, TRILLIONS // 1000, 300)
    command = [sys.executable, "-c", READING, str(tmp_path / "tokens"), str(SEQ), "300"]
    found = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert found.returncode == 0, found.stderr[-2000:]
    windows, *_ = found.stdout.split()
    assert int(windows) == (10**7 - 1) // SEQ


def test_an_open_file_too_many_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text " * 30_000)
    file = tokenize(str(tmp_path / "a.txt"), "bytes", tmp_path / "tokens", shard_tokens=1)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    tokens._open_file.cache_clear()
    taken = [os.open(os.devnull, os.O_RDONLY)]
    monkeypatch.setattr(attempts, "PAUSES", ())
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0], limit[1]))
    try:
        with pytest.raises(
            UnavailableError,
            match=r"tokens-00000.bin cannot be read: this process has \d+ files open, its",
        ) as e:
            _ = file.tokens[:9]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        os.close(taken[0])
    assert "ulimit -n 65536" in e.value.fix


def test_hosts_that_do_not_see_the_tokens_are_told_the_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hosts, of which host 2 has a cache of its own: nothing is sent, and all stop."""
    (tmp_path / "a.txt").write_text("some text " * 300)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(corpus, "answer_of_the_first", lambda compute: compute())
    absent = [[False], [False], [True]]
    monkeypatch.setattr(
        corpus.multihost_utils, "process_allgather", lambda own: np.array([own, *absent[1:]])
    )
    path = str(tmp_path / "a.txt")
    with pytest.raises(DataError) as e:
        corpus.load_corpus([path], "bytes", tmp_path / "cache")
    assert "which 1 hosts do not see, the first is host 2" in e.value.truth
    assert (
        f"`meshwright tokenize {path} --out s3://BUCKET/FOLDER`" in e.value.fix
        and "MESHWRIGHT_CACHE" in e.value.fix
    )
    absent[2] = [False]
    assert corpus.load_corpus([path], "bytes", tmp_path / "cache").files[0].documents == 1
