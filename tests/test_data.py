"""Text to batches: every kind of file, sources from outside, windows and documents, one order on any host count."""

import gzip
import json
import zlib
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.config import MeshShape
from meshwright.data.batch import BatchRamp
from meshwright.data.corpus import load_corpus, parse_source, vocab_of_corpus
from meshwright.data.feed import Feed, Windows, build_stream, held_out_batches, split
from meshwright.data.readers import read_documents
from meshwright.data.sources import FileDocuments, Records, find_files
from meshwright.data.subwords import train_bpe
from meshwright.data.tokenizers import Bytes, Chars, build_tokenizer, tokenizer_from_json
from meshwright.data.tokenizing import tokenize
from meshwright.data.tokens import block_type, open_tokens
from meshwright.errors import ConfigError, DataError
from meshwright.hardware.mesh import build_mesh
from meshwright.plugins import load
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.trust import own

BATCH_SPEC = PartitionSpec(BATCH_AXES, None)
TEXTS = ["first document, with ümlauts", "second\none", "third " * 40]


def write(folder: Path, kind: str) -> Path:
    file = folder / f"text.{kind}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    if kind == "jsonl":
        file.write_text(lines)
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pa.table({"id": [1, 2, 3], "text": TEXTS}), file)
    else:
        file.write_text("\n\n".join(TEXTS))
    return file


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "parquet", "md"])
def test_every_kind_of_file_is_read(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path, kind)
    found = list(
        read_documents(FileDocuments(tuple(find_files(str(file)).files)), Records(str(file)))
    )
    assert found == (TEXTS if kind.startswith(("jsonl", "parquet")) else ["\n\n".join(TEXTS)])
    found_files = [find_files(str(tmp_path)).files, find_files(f"{tmp_path}/*.{kind}").files]
    assert found_files == [[file], [file]]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.jsonl",
            b'{"text": "good"}\n{"text": 3}\n',
            r"a.jsonl, line 2(.|\n)*no text: its 'text' is a number",
        ),
        (
            "a.jsonl",
            b'{"text": "go',
            r"line 1(.|\n)*not JSON: Unterminated string starting at column 10",
        ),
        ("a.jsonl.gz", gzip.compress(b'{"text": "good"}\n', mtime=0)[:-9], "EOFError"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, "error: Error -3"),
        ("a.parquet", b"PAR1 no parquet at all", "Arrow"),
        ("a.txt", b"\xff\xfe\xff", "not UTF-8: it is UTF-16"),
        ("a.txt", b"", "hold no text: all are empty"),
        ("a.xyz", b"hello", "without a file of a known kind"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        tokenize(str(tmp_path / "in"), "bytes", tmp_path / "out")
    assert not list(tmp_path.glob("*out*")), "nothing half-written is left"


def test_missing_text_and_bad_weights() -> None:
    with pytest.raises(DataError, match="neither a file, a folder nor a glob"):
        find_files("nowhere/at/all")
    with pytest.raises(DataError, match="weight -1 is not positive"):
        parse_source("a.txt=-1")
    assert parse_source("a.txt=0.25").weight == 0.25


@given(st.text())
def test_tokenizers_return_the_text(text: str) -> None:
    letters = Chars("".join(sorted(set(text) | {"x"})))
    for tokenizer in (Bytes(), letters):
        # A lone surrogate is no text that a file could hold.
        if text.isprintable():
            assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
            again = tokenizer_from_json(tokenizer.to_json())
            np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))


def test_bpe_is_trained_kept_and_read() -> None:
    tokenizer = train_bpe(TEXTS, 300)
    assert tokenizer.vocab <= 300
    again = tokenizer_from_json(tokenizer.to_json())
    for text in TEXTS:
        assert again.decode(tokenizer.encode(text).tolist()) == text
    assert len(tokenizer.encode(TEXTS[2])) < len(TEXTS[2]) / 2


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("bpe:99", "take 257 tokens"),
        ("bpe:x", "is not a number"),
        ("words", "no such file, and no known kind"),
    ],
)
def test_unknown_tokenizers_are_refused(spec: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        build_tokenizer(spec, iter(TEXTS))


def test_a_character_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(DataError, match="character 2 is 'z'"):
        Chars("ab").encode("abz")


def test_windows_know_their_documents(tmp_path: Path) -> None:
    file = tokenize(str(write(tmp_path, "jsonl")), "bytes", tmp_path / "tokens")
    tokens = np.asarray(file.tokens)
    seq = 16
    windows = Windows(file, seq, 0, len(tokens))
    document = np.searchsorted(file.tokens.ends, np.arange(len(tokens)), side="right")
    for i in range(len(windows)):
        sample, first = windows[i], i * seq
        here = slice(first, first + seq)
        np.testing.assert_array_equal(sample["inputs"], tokens[here])
        np.testing.assert_array_equal(sample["targets"], tokens[first + 1 : first + seq + 1])
        np.testing.assert_array_equal(sample["segments"], document[here] - document[first])
        for t in range(seq):
            start = max(first, ([0, *file.tokens.ends])[document[first + t]])
            assert sample["positions"][t] == first + t - start
        crosses = document[here] != document[first + 1 : first + seq + 1]
        np.testing.assert_array_equal(sample["weights"], (~crosses).astype(np.float32))


def test_training_and_held_out_text_do_not_overlap(tmp_path: Path) -> None:
    file = tokenize(str(write(tmp_path, "jsonl")), "bytes", tmp_path / "tokens")
    train, rest = split(file, 8, 0.25, "text.txt")
    assert train.stop == rest.start and rest.stop == len(file.tokens)
    with pytest.raises(DataError, match="a window takes 1001") as refused:
        split(file, 1000, 0.1, "pages.jsonl")
    assert refused.value.asked == "--seq 1000 with --data pages.jsonl"
    longest = int(refused.value.fix.rpartition(" ")[2])
    split(file, longest, 0.1, "pages.jsonl")
    with pytest.raises(DataError):
        split(file, longest + 1, 0.1, "pages.jsonl")


LOWER = "".join(chr(97 + int(i)) for i in np.random.default_rng(0).integers(0, 26, 1600))


def samples(tmp_path: Path, shards: int, cursor: int, steps: int, seed: int = 0) -> np.ndarray:
    parts = []
    for name, text in (("a", LOWER), ("b", LOWER.upper())):
        (tmp_path / f"{name}.txt").write_text(text)
        parts.append(
            load_corpus([str(tmp_path / f"{name}.txt")], "bytes", tmp_path / "cache").files[0]
        )
    windows = [split(part, 8, 0.1, "text")[0] for part in parts]
    mesh = build_mesh(MeshShape(data=shards))
    feed = Feed(
        build_stream(windows, [0.75, 0.25], seed), BatchRamp((), 8), seq=8, taken=0, cursor=cursor, steps=steps,
        sharding=NamedSharding(mesh, BATCH_SPEC),
    )  # fmt: skip
    return np.concatenate([jax.device_get(batch).inputs for batch in feed])


def test_one_order_for_any_number_of_shards_and_any_stop(tmp_path: Path) -> None:
    whole = samples(tmp_path, 1, 0, 30)
    for shards in (2, 4, 8):
        np.testing.assert_array_equal(samples(tmp_path, shards, 0, 30), whole)
    np.testing.assert_array_equal(samples(tmp_path, 4, 8 * 13, 17), whole[8 * 13 :])
    assert (samples(tmp_path, 1, 0, 30, seed=1) != whole).any()


def test_mixing_keeps_its_weights_and_every_window_comes_once_a_pass(tmp_path: Path) -> None:
    drawn = samples(tmp_path, 1, 0, 30)
    lower = drawn[:, 0] >= ord("a")
    assert lower.mean() == pytest.approx(0.75, abs=0.01)
    (tmp_path / "c.txt").write_text("".join(chr(33 + i % 90) for i in range(1000)))
    file = load_corpus([str(tmp_path / "c.txt")], "bytes", tmp_path / "cache").files[0]
    windows = split(file, 10, 0.1, "text.txt")[0]
    stream = build_stream([windows], [1.0], 0)
    first = [tuple(stream[i]["inputs"]) for i in range(len(windows))]
    second = [tuple(stream[i]["inputs"]) for i in range(len(windows), 2 * len(windows))]
    assert (
        sorted(first)
        == sorted(second)
        == sorted(tuple(windows[i]["inputs"]) for i in range(len(windows)))
    )
    assert first != second


def test_held_out_batches_count_every_sample_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 100)
    file = load_corpus([str(tmp_path / "a.txt")], "bytes", tmp_path / "cache").files[0]
    rest = split(file, 10, 0.3, "text.txt")[1]
    sharding = NamedSharding(build_mesh(MeshShape(data=4)), BATCH_SPEC)
    batches = list(held_out_batches([rest], samples=0, batch=8, sharding=sharding))
    assert sum(float(batch.weights.sum()) for batch in batches) == len(rest) * 10


def test_several_sources_share_one_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaa bbb" * 30)
    (tmp_path / "b.txt").write_text("ccc ddd" * 30)
    paths = (str(tmp_path / "a.txt"), f"{tmp_path}/b.txt=2")
    corpus = load_corpus(paths, "chars", tmp_path / "cache")
    assert corpus.tokenizer.letters == " abcd"  # type: ignore[attr-defined]
    assert corpus.weights == (1.0, 2.0)
    a = tokenize(paths[0], "chars", tmp_path / "ta")
    b = tokenize(str(tmp_path / "b.txt"), "chars", tmp_path / "tb")
    with pytest.raises(DataError, match="their tokenizers differ"):
        load_corpus((str(a.folder), str(b.folder)), "bytes", tmp_path / "cache")


@pytest.mark.parametrize(
    "harm", ["tokens-00000.bin", "shards.bin", "tokens.json", "tokenizer.json"]
)
def test_damaged_token_files_are_refused(tmp_path: Path, harm: str) -> None:
    tokenize(str(write(tmp_path, "txt")), "bytes", tmp_path / "tokens")
    file = tmp_path / "tokens" / harm
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"token file|reading a tokenizer"):
        open_tokens(tmp_path / "tokens")


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    file = tokenize(str(write(tmp_path, "txt")), "bytes", tmp_path / "tokens")
    shard = tmp_path / "tokens" / "tokens-00000.bin"
    content = bytearray(shard.read_bytes())
    content[10:12] = (999).to_bytes(2, "little")
    shard.write_bytes(content)
    with pytest.raises(
        DataError, match=r"bytes 0 to 4,355 of tokens-00000.bin are not what was written"
    ):
        Windows(open_tokens(file.folder), 16, 0, 100)[0]
    # A folder that was made so: its checksums agree.
    block = np.frombuffer(content[:-32], block_type("<u2"))
    content[-36:-32] = zlib.crc32(block.tobytes()[:-4]).to_bytes(4, "little")
    shard.write_bytes(content)
    with pytest.raises(DataError, match="token 5 is 999, and the vocabulary has 257"):
        Windows(open_tokens(file.folder), 16, 0, 100)[0]


SOURCE = """
calls = 0

def poems():
    global calls
    calls += 1
    yield from ["roses are red", "", "violets are blue"]

def broken():
    yield "one"
    raise KeyError("shelf")

def numbers():
    return ["one", 2]

class Shelf:
    def __init__(self, fingerprint=None):
        if fingerprint:
            self.fingerprint = fingerprint

    def __call__(self):
        return ["a book"]

bare = Shelf()
marked = Shelf("first edition")
"""


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    file = tmp_path / "shelf.py"
    file.write_text(SOURCE)
    return file


def test_a_function_of_ones_own_is_a_source_of_documents(tmp_path: Path, shelf: Path) -> None:
    file = load_corpus([own(f"{shelf}:poems")], "bytes", tmp_path / "cache").files[0]
    text = [
        file.tokenizer.decode(part)
        for part in np.split(np.asarray(file.tokens), file.tokens.ends[:-1])
    ]
    assert text == ["roses are red", "violets are blue"]
    assert json.loads((file.folder / "tokens.json").read_text())["source"] == f"{shelf}:poems"


def test_a_function_is_called_again_only_when_its_file_changes(tmp_path: Path, shelf: Path) -> None:
    def tokens() -> bytes:
        return (
            load_corpus([own(f"{shelf}:poems")], "bytes", tmp_path / "cache").files[0].folder
            / "tokens-00000.bin"
        ).read_bytes()

    first = tokens()
    module = load("data source", own(f"{shelf}:poems")).__globals__
    calls = module["calls"]
    assert tokens() == first and module["calls"] == calls
    shelf.write_text(SOURCE.replace("violets", "tulips"))
    # What a new process would import.
    exec(compile(shelf.read_text(), shelf, "exec"), module)
    assert tokens() != first


def test_functions_and_files_mix(tmp_path: Path, shelf: Path) -> None:
    (tmp_path / "a.txt").write_text("xyz" * 30)
    corpus = load_corpus(
        (own(f"{shelf}:poems=3"), str(tmp_path / "a.txt")), "chars", tmp_path / "cache"
    )
    assert corpus.weights == (3.0, 1.0)
    assert set("rosesxyz") <= set(corpus.tokenizer.letters)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        (
            "broken",
            DataError,
            r"after 1 document\(s\) it raised KeyError: 'shelf' .*shelf.py, line 11",
        ),
        ("numbers", DataError, "its document 2 is of type int"),
        ("bare", DataError, "give it an attribute `fingerprint`"),
        ("poem", ConfigError, "did you mean 'poems'"),
    ],
)
def test_bad_functions_say_what_is_wrong(
    tmp_path: Path, shelf: Path, name: str, error: type, says: str
) -> None:
    with pytest.raises(error, match=says):
        load_corpus([own(f"{shelf}:{name}")], "bytes", tmp_path / "cache").files[0]


def test_a_fingerprint_of_ones_own_names_the_tokens(tmp_path: Path, shelf: Path) -> None:
    first = load_corpus([own(f"{shelf}:marked")], "bytes", tmp_path / "cache").files[0].folder
    shelf.write_text(SOURCE + "\n# another comment\n")
    assert (
        load_corpus([own(f"{shelf}:marked")], "bytes", tmp_path / "cache").files[0].folder == first
    )
    load("data source", own(f"{shelf}:marked")).fingerprint = "second edition"
    assert (
        load_corpus([own(f"{shelf}:marked")], "bytes", tmp_path / "cache").files[0].folder != first
    )


def test_the_vocabulary_is_known_without_text_where_the_tokenizer_is(tmp_path: Path) -> None:
    assert vocab_of_corpus(("no/such/text",), "bytes", tmp_path) == 257
    (tmp_path / "tokenizer.json").write_text(train_bpe(TEXTS, 300).to_json())
    assert vocab_of_corpus(("no/such/text",), str(tmp_path / "tokenizer.json"), tmp_path) <= 300
    (tmp_path / "a.txt").write_text("aaa bbb" * 30)
    (tmp_path / "b.txt").write_text("ccc ddd" * 30)
    assert (
        vocab_of_corpus(
            (str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), "chars", tmp_path / "cache"
        )
        == 6
    )
    with pytest.raises(DataError, match="neither a file"):
        vocab_of_corpus(("no/such/text",), "chars", tmp_path)
