"""Tokenisation in shards and processes: every source, the same bytes however it was interrupted, one host for all."""

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from meshwright.cli.verbs import run_verb
from meshwright.data import tokenizing
from meshwright.data.corpus import load_corpus
from meshwright.data.readers import read_documents
from meshwright.data.sources import Records, download_dataset, open_source
from meshwright.data.subwords import train_bpe
from meshwright.data.token_writer import read_progress
from meshwright.data.tokenizing import tokenize
from meshwright.data.tokens import open_tokens
from meshwright.errors import DataError

SHARD = 2**17
TEXTS = ["first, with ümlauts", 'second "quoted"\none', "third \u2028 line", "fourth\u0085"]
ROWS = [{"id": i, "body": {"text": text, "n": i}, "text": text} for i, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def parquet(file: Path) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=2)


SOURCES: dict[str, tuple[str, bytes | Callable[[Path], None]]] = {
    "lines": ("a.jsonl", LINES),
    "lines that end with CRLF": ("a.jsonl", LINES.replace(b"\n", b"\r\n")),
    "lines, gzip": ("a.jsonl.gz", gzip.compress(LINES)),
    "lines, zstd of two frames": ("a.jsonl.zst", zstd(LINES[:99]) + zstd(LINES[99:])),
    "Parquet": ("a.parquet", parquet),
}


def create(folder: Path, name: str) -> Path:
    file, content = SOURCES[name]
    folder.mkdir(exist_ok=True)
    if callable(content):
        content(folder / file)
    else:
        (folder / file).write_bytes(content)
    return folder / file


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_its_texts_from_any_record_on(name: str, tmp_path: Path) -> None:
    path = create(tmp_path / "in", name)
    for field in ("text", "body.text"):
        source, records = open_source(str(path), field), Records(str(path))
        states = [records.state()]
        assert [
            (text, states.append(records.state()))[0] for text in read_documents(source, records)
        ] == TEXTS
        for start, state in enumerate(states):
            records = Records(str(path))
            records.resume(state)
            assert list(read_documents(source, records)) == TEXTS[start:]


def test_texts_are_compressed_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(zstd(b"\xef\xbb\xbftext"))
    assert list(read_documents(open_source(str(tmp_path)), Records(""))) == ["text"]


BAD: dict[str, tuple[str, bytes | Callable[[Path], None], str, str]] = {
    "no such field": ("a.jsonl", LINES, "body.txt", "no field 'body.txt'; it has 'id' .a number., 'body' "),
    "no such column": ("a.parquet", parquet, "txt", r"no column 'txt' among id \(int64\), body"),
    "no such nested": ("a.parquet", parquet, "body.x", r"no column 'body.x'(.|\n)*text-field text"),
    "a column of numbers": ("a.parquet", parquet, "body.n", "'body.n' is of type int64, and"),
    "NUL in a text": ("a.txt", b"a\0b", "text", "character 2 is NUL"),
    "NUL in a record": ("a.jsonl", b'{"text": "a"}\n{"text": "\\u0000"}\n', "text", "line 2(.|\n)*character 1 is NUL"),
    "UTF-16 lines": ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "text", "UTF-16(.|\n)*iconv -f UTF-16 -t UTF-8"),
    "UTF-16 text": ("a.txt", "text".encode("utf-16"), "text", "UTF-16(.|\n)*iconv -f UTF-16 -t UTF-8"),
    "UTF-32 text": ("a.txt", "text".encode("utf-32"), "text", "UTF-32(.|\n)*iconv -f UTF-32"),
    "UTF-16 without a mark": ("a.txt", "text".encode("utf-16-le"), "text", "it is UTF-16LE"),
    "cut zstd": ("a.jsonl.zst", zstd(LINES)[:-9], "text", "Truncated compressed stream"),
    "no zstd": ("a.jsonl.zst", LINES, "text", "ZSTD decompress failed"),
    "empty zstd": ("a.jsonl.zst", b"", "text", "it is empty, which no compressed file is"),
}  # fmt: skip
"""File, contents, field, and the reason for which it is refused."""


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    file, content, field, reason = BAD[name]
    if callable(content):
        content(tmp_path / file)
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        tokenize(str(tmp_path / file), "bytes", tmp_path / "tokens", text_field=field)
    assert not (tmp_path / "tokens").exists()


def test_skipped_records_are_listed_beside_the_shards(tmp_path: Path) -> None:
    lines = [b'{"text": "good"}'] * 60
    lines[3:50:2] = [b"bad"] * len(lines[3:50:2])
    (tmp_path / "a.jsonl").write_bytes(b"\r\n".join(lines) + b"\r\n")
    file = tokenize(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "tokens", bad_records=0.5)
    listed = [
        json.loads(line)
        for line in (tmp_path / "tokens" / "skipped.jsonl").read_text().splitlines()
    ]
    assert [entry["line"] for entry in listed] == list(range(4, 51, 2))
    assert file.skipped["bad"] == 24 and len(file.skipped["examples"]) == 20
    assert listed[0] == {
        "file": str(tmp_path / "a.jsonl"),
        "line": 4,
        "reason": "not JSON: Expecting value at column 1",
    }


def corpus_text(folder: Path) -> Path:
    """Documents of many lengths, one of them longer than three shards, in two files; 0.8 million bytes."""
    random = np.random.default_rng(0)
    texts = ["".join(map(chr, random.integers(97, 123, n))) for n in random.integers(1, 9000, 60)]
    texts[40] = "long " * (3 * SHARD // 5 + 999)
    folder.mkdir()
    for name, part in (("a", texts[:30]), ("b", texts[30:])):
        lines = [json.dumps({"text": text}) for text in part]
        lines.insert(9, "bad")
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus_text(tmp_path_factory.mktemp("corpus") / "in")


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches so small that a shard has many."""
    monkeypatch.setattr(tokenizing, "BATCH", 20_000)


def undisturbed(corpus: Path, out: Path, shard: int = SHARD) -> dict[str, bytes]:
    tokenize(str(corpus), "bytes", out, bad_records=0.1, shard_tokens=shard)
    return files_of(out)


@pytest.mark.parametrize("stop", [1, 3, 12, 24, 26, 39])
def test_an_interrupted_tokenisation_goes_on_to_the_same_bytes(
    stop: int, corpus: Path, tmp_path: Path, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed(corpus, tmp_path / "whole")
    assert len([name for name in expected if name.startswith("tokens-")]) == 6
    real = tokenizing.encode_texts

    def encode_some(*args: Any) -> Any:
        counter.append(0)
        if len(counter) > stop:
            raise KeyboardInterrupt
        return real(*args)

    for _ in range(2):  # interrupted twice
        counter: list[int] = []
        monkeypatch.setattr(tokenizing, "encode_texts", encode_some)
        with pytest.raises(KeyboardInterrupt):
            undisturbed(corpus, tmp_path / "parts")
            raise KeyboardInterrupt  # the second time it may come to its end
        monkeypatch.setattr(tokenizing, "encode_texts", real)
        if (tmp_path / "parts" / "tokens.json").exists():
            break
        with pytest.raises(DataError, match="unfinished tokenisation of other text"):
            tokenize(str(corpus), "chars", tmp_path / "parts", bad_records=0.1, shard_tokens=SHARD)
    else:
        undisturbed(corpus, tmp_path / "parts")
    assert files_of(tmp_path / "parts") == expected


def test_a_killed_tokenisation_goes_on(corpus: Path, tmp_path: Path, small_batches: None) -> None:
    expected = undisturbed(corpus, tmp_path / "whole")
    program = (
        "import sys, time; from pathlib import Path; from meshwright.data import tokenizing\n"
        "tokenizing.BATCH, real = 20_000, tokenizing.encode_texts\n"
        "tokenizing.encode_texts = lambda *args: (time.sleep(0.05), real(*args))[1]\n"
        "tokenizing.tokenize(sys.argv[1], 'bytes', Path(sys.argv[2]), bad_records=0.1, shard_tokens=2**17)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(corpus), str(tmp_path / "parts")]
    )
    until = time.monotonic() + 60
    while (read_progress(tmp_path / "parts") or {"shards": 0})[
        "shards"
    ] < 1 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "parts" / "tokens.json").exists()
    assert undisturbed(corpus, tmp_path / "parts") == expected


def test_shards_do_not_change_what_training_reads(
    corpus: Path, tmp_path: Path, small_batches: None
) -> None:
    undisturbed(corpus, tmp_path / "one", 2**30)
    undisturbed(corpus, tmp_path / "shards", 1)
    whole, shards = open_tokens(tmp_path / "one"), open_tokens(tmp_path / "shards")
    assert whole.digest == shards.digest
    np.testing.assert_array_equal(whole.tokens, shards.tokens)
    np.testing.assert_array_equal(whole.tokens.ends, shards.tokens.ends)
    assert len(whole.tokens.ends) == whole.documents == shards.documents
    for start in range(0, len(whole.tokens) - 200, 997):
        np.testing.assert_array_equal(
            shards.tokens[start : start + 199], whole.tokens[start : start + 199]
        )


def test_a_token_file_of_an_earlier_format_is_refused_with_the_command_that_makes_it_new(
    corpus: Path, tmp_path: Path
) -> None:
    undisturbed(corpus, tmp_path / "old")
    record = json.loads((tmp_path / "old" / "tokens.json").read_text())
    (tmp_path / "old" / "tokens.json").write_text(json.dumps({**record, "format": 3}))
    with pytest.raises(DataError) as refused:
        open_tokens(tmp_path / "old")
    command = refused.value.fix.replace("ANOTHER_FOLDER", str(tmp_path / "new"))
    assert "format 3" in refused.value.truth and command.startswith("meshwright tokenize ")
    assert run_verb("tokenize", [*shlex.split(command)[2:], "--bad-records", "0.1", "--json"]) == 0
    (tmp_path / "old" / "tokens.json").write_text(json.dumps(record))
    assert open_tokens(tmp_path / "new").digest == open_tokens(tmp_path / "old").digest


def test_subwords_do_not_depend_on_batches(tmp_path: Path, corpus: Path, monkeypatch: Any) -> None:
    tokenizer = train_bpe(["some text to learn from"] * 9, 270)
    spec = tmp_path / "tokenizer.json"
    spec.write_text(tokenizer.to_json())
    for batch in (2**21, 20_000):
        monkeypatch.setattr(tokenizing, "BATCH", batch)
        tokenize(str(corpus), str(spec), tmp_path / str(batch), bad_records=0.1)
    assert files_of(tmp_path / "20000") == files_of(tmp_path / str(2**21))
    for one, other in zip(tokenizer.encode_batch(TEXTS), map(tokenizer.encode, TEXTS), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_document_that_has_no_tokens_is_named(
    tmp_path: Path, corpus: Path, small_batches: None
) -> None:
    spec = tmp_path / "tokenizer.json"
    spec.write_text(json.dumps({"kind": "chars", "letters": "abcdefghijklmnopqrstuvwxyz"}))
    with pytest.raises(DataError, match=r"b.jsonl, line 12(.|\n)*character 4 is ' '"):
        tokenize(str(corpus), str(spec), tmp_path / "out", bad_records=0.1)


def test_damaged_parts_are_refused(
    corpus: Path, tmp_path: Path, small_batches: None, monkeypatch: Any
) -> None:
    real = tokenizing.encode_texts

    def interrupted(*args: Any) -> Any:
        if (read_progress(tmp_path / "parts") or {"shards": 0})["shards"] > 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(tokenizing, "encode_texts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        undisturbed(corpus, tmp_path / "parts")
    os.truncate(tmp_path / "parts" / "tokens-00000.bin", 99)
    with pytest.raises(DataError, match=r"it is damaged: tokens-00000\.bin is not"):
        undisturbed(corpus, tmp_path / "parts")


def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from meshwright.data.tokenizing import tokenize\n"
        "tokenize(sys.argv[1], 'bytes', Path(sys.argv[2]))\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    line, peaks = json.dumps({"text": "some text " * 500}).encode() + b"\n", []
    for count in (2_000, 30_000):
        (tmp_path / f"{count}.jsonl.gz").write_bytes(gzip.compress(line * count, 1))
        command = [
            sys.executable,
            "-c",
            program,
            str(tmp_path / f"{count}.jsonl.gz"),
            str(tmp_path / f"{count}"),
        ]
        peaks.append(
            int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        )
    # 150 MB of text and 300 MB of tokens, beside 10 and 20.
    assert peaks[1] - peaks[0] < 40_000, peaks


@pytest.mark.exhaustive
def test_datasets_of_the_hub_are_named_in_full_and_need_its_library(
    monkeypatch: Any, tmp_path: Path
) -> None:
    for path in ("hf://datasets/alone", "hf://models/a/b"):
        with pytest.raises(DataError, match="names no dataset of the hub"):
            download_dataset(path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(LINES)
    asked = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options["repo_type"], options["revision"], options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert list(read_documents(open_source("hf://datasets/a/b@v1/data"), Records(""))) == TEXTS
    assert asked == [("a/b", "dataset", "v1", ["data", "data/**"])]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"is not installed(.|\n)*meshwright\[hub\]"):
        download_dataset("hf://datasets/a/b")


def test_a_field_is_part_of_the_name_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "title": "bb"}\n')
    found = [
        load_corpus([str(tmp_path / "a.jsonl")], "bytes", tmp_path, text_field=f).files[0]
        for f in ("text", "title")
    ]
    assert [len(file.tokens) for file in found] == [2, 3]


def test_what_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="it exists already"):
        tokenize(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "mine")
    assert files_of(tmp_path / "mine") == {"thesis.tex": b"precious"}


HOST = """
import sys, jax
from pathlib import Path
from meshwright.data import corpus as module
from meshwright.data.corpus import load_corpus
from meshwright.errors import DataError

process, port, source, cache = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
calls, real = [], module.tokenize
def counted(*args, **options):
    calls.append(args[0])
    return real(*args, **options)
module.tokenize = counted
try:
    corpus = load_corpus([source], "bytes", cache)
except DataError as error:
    print(error.truth, error.fix, sep="|")
    sys.exit()
first = len(calls), corpus.fingerprint["sources"][0][0]
corpus = load_corpus([source], "bytes", cache)
try:
    load_corpus([source + ".missing"], "bytes", cache)
except DataError as error:
    print(*first, len(calls), error.truth, sep="|")
"""


@pytest.mark.parametrize("caches", ["one", "each its own"])
def test_one_host_tokenises_and_all_see_its_files_or_are_told_the_choices(
    caches: str, tmp_path: Path
) -> None:
    import socket

    (tmp_path / "a.jsonl").write_bytes(LINES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    folders = [tmp_path / (caches if caches == "one" else str(process)) for process in (0, 1)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, str(process), str(port), str(tmp_path / "a.jsonl"), str(folders[process])],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for process in (0, 1)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    found = [output.strip().splitlines()[-1].split("|") for output, _ in outputs]
    if caches != "one":
        for truth, fix in found:
            assert "1 hosts do not see, the first is host 1" in truth
            assert (
                "MESHWRIGHT_CACHE in a folder that all hosts share" in fix
                and 'data=("s3://BUCKET/FOLDER",)' in fix
            )
        return
    # Process 0 tokenised once, process 1 never; both have the same tokens and stop for the same reason.
    assert [f[0] for f in found] == ["1", "0"] and [f[2] for f in found] == ["1", "0"]
    assert (
        found[0][1] == found[1][1]
        and found[0][3] == found[1][3] == "it is neither a file, a folder nor a glob"
    )
    assert {file.parent.name for file in tmp_path.rglob("tokens.json")} == {load_name(folders[0])}


def load_name(cache: Path) -> str:
    return next(iterated(cache / "tokens")).name


def iterated(folder: Path) -> Iterator[Path]:
    return (file for file in folder.iterdir() if not file.name.startswith("."))
