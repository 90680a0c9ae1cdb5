"""Bad inputs in text and token files: each refused with file and line, or skipped and counted where that is allowed."""

import cProfile
import dataclasses
import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import meshwright as mw
from meshwright.cli.verbs import run_verb
from meshwright.data import subwords, tokenizing
from meshwright.data.corpus import load_corpus, parse_source
from meshwright.data.sources import FileDocuments, Records
from meshwright.data.subwords import train_bpe
from meshwright.data.tokenizers import Chars, tokenizer_from_json
from meshwright.data.tokenizing import tokenize
from meshwright.data.tokens import open_tokens
from meshwright.documents import checksum
from meshwright.errors import ConfigError, DataError
from meshwright.runs.placed_run import place_run
from meshwright.runs.run_file import read_run, run_to_dict
from meshwright.trainer.sample import check_prompt

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
GOOD = '{"text": "good"}\n'


def line_of(value: str | bytes) -> bytes:
    """Two good records with a bad one between them."""
    return (
        GOOD.encode()
        + (value if isinstance(value, bytes) else value.encode())
        + b"\n"
        + GOOD.encode()
    )


RECORDS: dict[str, tuple[bytes, str]] = {
    "number": (b'{"text": 3}', "its 'text' is a number"),
    "fraction": (b'{"text": 3.5}', "its 'text' is a number"),
    "null": (b'{"text": null}', "its 'text' is null"),
    "true": (b'{"text": true}', "its 'text' is true or false"),
    "list": (b'{"text": ["a"]}', "its 'text' is a list"),
    "object": (b'{"text": {"a": 1}}', "its 'text' is an object"),
    "no field": (b'{"content": "a"}', "it has no field 'text'"),
    "empty object": (b"{}", "it has no field 'text'"),
    "no object": (b'["text"]', "it is a list, and no object"),
    "bare text": (b'"text"', "it is text, and no object"),
    "bare number": (b"17", "it is a number, and no object"),
    "bare null": (b"null", "it is null, and no object"),
    "cut off": (b'{"text": "go', "not JSON: Unterminated string starting at column 10"),
    "no value": (b'{"text":}', "not JSON: Expecting value at column 9"),
    "two records": (b'{"text": "a"} {"text": "b"}', "not JSON: Extra data at column 15"),
    "single quotes": (b"{'text': 'a'}", "not JSON: Expecting property name"),
    "trailing comma": (b'{"text": "a",}', "not JSON: "),
    "no JSON": (b"plain text", "not JSON: Expecting value at column 1"),
    "a tab in a string": (b'{"text": "a\tb"}', "not JSON: Invalid control character at column 12"),
    "bad escape": (rb'{"text": "\x"}', r"not JSON: Invalid \\+escape"),
    "bad unicode escape": (rb'{"text": "\u12"}', r"not JSON: Invalid \\+uXXXX escape"),
    "half an emoji": (rb'{"text": "a \ud83d b"}', "character 3 is half of a surrogate pair"),
    "other half": (rb'{"text": "\ude00"}', "character 1 is half of a surrogate pair"),
    "latin-1": ('{"text": "caf\xe9"}'.encode("latin-1"), r"not UTF-8: byte 14 \(0xe9\)"),
    "cut UTF-8": (b'{"text": "\xf0\x9f\x98"}', r"not UTF-8: byte 11 \(0xf0\)"),
    "overlong UTF-8": (b'{"text": "\xc0\x80"}', r"not UTF-8: byte 11 \(0xc0\)"),
    "surrogate in UTF-8": (b'{"text": "\xed\xa0\xbd"}', r"not UTF-8: byte 11 \(0xed\)"),
    "nested": (b"[" * 100_000, "nested too deeply"),
    "a number of many digits": (b'{"text": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    "zeros": (b"\0\0\0\0", "not JSON"),
    "a field twice": (b'{"text": "a", "text": "b"}', "has the field 'text' twice"),
    "a field twice, once in escapes": (
        rb'{"text": "a", "te\u0078t": "b"}',
        "has the field 'text' twice",
    ),
    "a mark inside": (b'\xef\xbb\xbf{"text": "a"}', "not JSON"),
}
"""Bad lines of a JSON file, and the reason that is given for each."""


@pytest.mark.parametrize("name", RECORDS)
def test_a_bad_line_is_refused_with_its_place_or_skipped(name: str, tmp_path: Path) -> None:
    content, reason = RECORDS[name]
    (tmp_path / "a.jsonl").write_bytes(line_of(content))
    for file in ("a.jsonl", "a.jsonl.gz"):
        if file.endswith(".gz"):
            (tmp_path / file).write_bytes(gzip.compress(line_of(content)))
        with pytest.raises(DataError, match=rf"reading \S*{file}, line 2(.|\n)*{reason}"):
            tokenize(str(tmp_path / file), "bytes", tmp_path / "refused")
        tokens = tokenize(
            str(tmp_path / file), "bytes", tmp_path / f"{file}.tokens", bad_records=0.4
        )
        assert tokens.skipped["bad"] == 1 and tokens.skipped["read"] == 3 and tokens.documents == 2
        assert f"{file}, line 2" in tokens.skipped["examples"][0]
    # A third of the records is more than a tenth.
    with pytest.raises(DataError, match=r"1 of 3 records cannot be read, 33\.33%(.|\n)*line 2"):
        tokenize(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "refused", bad_records=0.1)


def parquet(file: Path, column: Any, name: str = "text") -> None:
    pyarrow.parquet.write_table(pa.table({name: column}), file)


def not_utf8() -> pa.Array:
    raw = pa.array([b"good", b"\xff\xfe", b"good"], pa.binary())
    return pa.Array.from_buffers(pa.string(), 3, raw.buffers())


ROWS: dict[str, tuple[Callable[[], Any], str]] = {
    "null": (lambda: pa.array(["good", None, "good"]), "row 2(.|\n)*its 'text' is null"),
    "not UTF-8": (not_utf8, "row 2(.|\n)*not UTF-8"),
}
FILES: dict[str, tuple[str, bytes | Callable[[Path], None], str]] = {
    "numbers": (
        "a.parquet",
        lambda f: parquet(f, [1, 2]),
        "its column 'text' is of type int64, and no text",
    ),
    "bytes": ("a.parquet", lambda f: parquet(f, [b"a"]), "its column 'text' is of type binary"),
    "lists": ("a.parquet", lambda f: parquet(f, [["a"]]), "its column 'text' is of type list"),
    "nulls": ("a.parquet", lambda f: parquet(f, pa.nulls(2)), "its column 'text' is of type null"),
    "other column": (
        "a.parquet",
        lambda f: parquet(f, ["a"], "body"),
        "no column 'text' among body",
    ),
    "no Parquet": ("a.parquet", b"PAR1 nothing PAR1", "reading .*a.parquet"),
    "empty Parquet": ("a.parquet", b"", "reading .*a.parquet"),
    "cut Parquet": (
        "a.parquet",
        lambda f: (parquet(f, ["a" * 999]), f.write_bytes(f.read_bytes()[:-9]))[0],
        "Arrow",
    ),
    "cut gzip": ("a.jsonl.gz", gzip.compress(GOOD.encode() * 99)[:-9], "EOFError"),
    "no gzip": ("a.jsonl.gz", b"plain", "BadGzipFile"),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(b"")[:10] + b"\xff" * 20, "error: Error -3"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), "not UTF-8: it is UTF-16"),
    "lines in UTF-16 without a mark": (
        "a.jsonl",
        GOOD.encode("utf-16-le"),
        "it is UTF-16LE(.|\n)*iconv -f UTF-16LE",
    ),
    "gzip by another name": (
        "a.jsonl",
        gzip.compress(GOOD.encode()),
        r"it is .gz(.|\n)*the end .gz of its name",
    ),
    "a name that is bytes": (os.fsdecode(b"a\xff.jsonl"), b"3", r"a\\udcff.jsonl, line 1"),
    "a link to itself": ("a.txt", lambda f: f.symlink_to(f), "Too many levels of symbolic links"),
    "columns of one name": (
        "a.parquet",
        lambda f: pyarrow.parquet.write_table(
            pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"]), f
        ),
        "2 of its columns are named 'text'",
    ),
    "a name for a terminal": ("a\n\x1b[2J.jsonl", b"3", r"a\\n\\x1b\[2J.jsonl, line 1"),
    "latin-1": (
        "a.txt",
        "one\ntwo\ncaf\xe9".encode("latin-1"),
        r"not UTF-8: byte 12 \(0xe9\) on line 3",
    ),
    "a picture": ("a.md", b"\x89PNG\r\n\x1a\n", r"not UTF-8: byte 1 \(0x89\) on line 1"),
    "empty": ("a.txt", b"", "hold no text: all are empty"),
    "a mark alone": ("a.txt", b"\xef\xbb\xbf", "hold no text: all are empty"),
    "empty lines": ("a.jsonl", b"\n\n  \n", "hold no text: all are empty"),
    "empty texts": ("a.jsonl", b'{"text": ""}\n', "hold no text: all are empty"),
    "unknown kind": ("a.doc", b"text", "a folder without a file of a known kind"),
    "a pipe": ("a.txt", lambda f: os.mkfifo(f), "no regular file"),
    "a pipe of lines": ("a.jsonl", lambda f: os.mkfifo(f), "no regular file"),
    "a link to nothing": ("a.txt", lambda f: f.symlink_to("nothing"), "No such file"),
    "a folder in the place of a file": (
        "a.txt",
        lambda f: f.mkdir(),
        "without a file of a known kind",
    ),
}
"""Files that cannot be read, whatever share of records may be skipped, and the reason."""


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row_is_refused_with_its_place_or_skipped(name: str, tmp_path: Path) -> None:
    column, reason = ROWS[name]
    parquet(tmp_path / "a.parquet", column())
    with pytest.raises(DataError, match=rf"reading \S*a.parquet, {reason}"):
        tokenize(str(tmp_path / "a.parquet"), "bytes", tmp_path / "refused")
    tokens = tokenize(str(tmp_path / "a.parquet"), "bytes", tmp_path / "tokens", bad_records=0.4)
    assert tokens.skipped["bad"] == 1 and tokens.documents == 2


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    file, content, reason = FILES[name]
    (tmp_path / "in").mkdir()
    if callable(content):
        content(tmp_path / "in" / file)
    else:
        (tmp_path / "in" / file).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        load_corpus([str(tmp_path / "in")], "bytes", tmp_path / "cache").files[0]
    with pytest.raises(DataError, match=reason):
        tokenize(str(tmp_path / "in"), "bytes", tmp_path / "cache" / "tokens" / "own")
    assert not list(tmp_path.glob("cache/tokens/*")), "nothing half-written is left"


def test_marks_are_no_tokens_and_text_files_may_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "\\ufeffdef"}\r\n')
    (tmp_path / "c.txt").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match=r"c.txt(.|\n)*not UTF-8"):
        tokenize(str(tmp_path), "bytes", tmp_path / "tokens")
    file = tokenize(str(tmp_path), "bytes", tmp_path / "tokens", bad_records=0.5)
    texts = {
        file.tokenizer.decode(part)
        for part in np.split(np.asarray(file.tokens), file.tokens.ends[:-1])
    }
    assert texts == {"abc", "def"} and file.skipped["bad"] == 1


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    for name in ("in/own", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "A.TXT").write_text(name)
    (tmp_path / "in" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "b").symlink_to(tmp_path / "in" / "own")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "in")
    file = tokenize(str(tmp_path / "in"), "bytes", tmp_path / "tokens")
    assert sorted(np.diff(file.tokens.ends, prepend=0)) == [len("in/own") + 1, len("elsewhere") + 1]


def test_streams_of_one_file_are_read_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(GOOD.encode() * 2) + gzip.compress(GOOD.encode())
    )
    assert tokenize(str(tmp_path), "bytes", tmp_path / "tokens").documents == 3


def test_a_linked_file_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("in/b.txt", "other"):
        (tmp_path / name).write_text(name)
    for link, target in (("a.txt", "b.txt"), ("c.txt", "../other"), ("d.txt", "../other")):
        (tmp_path / "in" / link).symlink_to(target)
    for number, source in enumerate(("in", "in/*.txt")):
        assert (
            tokenize(str(tmp_path / source), "bytes", tmp_path / f"tokens{number}").documents == 2
        )


def tokenizer_file(**changes: Any) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        own = json.loads(train_bpe(["good text"] * 9, 270).to_json())
        model = {**own["model"], **changes.pop("model", {})}
        file.write_text(json.dumps({**own, "model": model, **changes}))

    return write


ONE_WORD = {
    "type": "WordLevel",
    "vocab": {"</s>": 0, "good": 1},
    "unk_token": "<unk>",
    "merges": None,
}
TOKENIZERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no letters": (tokenizer_file(model={"vocab": {"<|end|>": 0}, "merges": []}), "line 1(.|\n)*character 1 is 'g'"),
    "no unknown word": (tokenizer_file(model=ONE_WORD), "Missing .UNK. token"),
    "numbers of two tokens": (tokenizer_file(model={"vocab": {"<|end|>": 0, "a": 0}, "merges": ["a b"]}), "own.json"),
    "an expression without end": (
        tokenizer_file(pre_tokenizer={
            "type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": "(o+o+)+!"}}),
        "line 2(.|\n)*retry-limit",
    ),
    "a token that is not there": (
        tokenizer_file(post_processor={
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [],
            "special_tokens": {}}),
        "reading a tokenizer: the tokenizers library: no entry",
    ),
    "erased text": (
        tokenizer_file(normalizer={"type": "Replace", "pattern": {"Regex": ".+"}, "content": ""}),
        "makes no tokens of any of the 2 documents",
    ),
}  # fmt: skip
"""Tokenizers that would panic, lose text or never end, and the reason for which they are refused."""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_cannot_encode_is_refused(name: str, tmp_path: Path) -> None:
    write, reason = TOKENIZERS[name]
    write(tmp_path / "own.json")
    (tmp_path / "a.jsonl").write_text(GOOD + json.dumps({"text": "o" * 5000}) + "\n")
    with pytest.raises(DataError, match=reason):
        tokenize(str(tmp_path / "a.jsonl"), str(tmp_path / "own.json"), tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("size", ["0", "\u00b2", "9" * 30, "1e3", "-5", ""])
def test_a_vocabulary_of_no_size_is_refused(size: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(DataError, match=f"bpe:{size}"):
        tokenize(str(tmp_path / "a.jsonl"), f"bpe:{size}", tmp_path / "tokens")


def test_the_verb_names_its_own_options(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line_of(b'{"body": 3}'))
    for words, own in (
        ([], "--text-field NAME, or --bad-records 0.001"),
        (["--tokenizer", "chars"], "--bad-records"),
    ):
        with pytest.raises(DataError) as refused:
            run_verb(
                "tokenize", [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "tokens"), *words]
            )
        assert (
            own in str(refused.value)
            and "--data" not in str(refused.value)
            and "faults" not in str(refused.value)
        )


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tokenizing.read_documents

    def read(source: FileDocuments, records: Records) -> Iterator[str]:
        for text in real(source, records):
            with source.files[0].open("a") as file:
                file.write(GOOD)
            yield text
            return

    monkeypatch.setattr(tokenizing, "read_documents", read)
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(DataError, match=r"reading \S*a.jsonl\n(.|\n)*it changed while it was read"):
        tokenize(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a share is from 0 to 1"):
        tokenize("stdlib", "bytes", tmp_path / "tokens", bad_records=share)


def test_a_run_that_goes_on_keeps_its_kind_of_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.json").write_text('{"kind": "bytes"}')
    (tmp_path / "a.txt").write_text("some text")
    for spec in ("chars", "bpe:300"):
        with pytest.raises(
            DataError, match="the run was trained with bytes, and keeps its tokenizer"
        ):
            load_corpus(
                [str(tmp_path / "a.txt")], spec, tmp_path / "cache", own=tmp_path / "own.json"
            )
    for spec in ("bytes", str(tmp_path / "gone.json")):
        assert (
            load_corpus(
                [str(tmp_path / "a.txt")], spec, tmp_path / "cache", own=tmp_path / "own.json"
            ).vocab
            == 257
        )
    assert not capsys.readouterr().err
    (tmp_path / "other.json").write_text('{"kind": "chars", "letters": " emostx"}')
    load_corpus(
        [str(tmp_path / "a.txt")],
        str(tmp_path / "other.json"),
        tmp_path / "cache",
        own=tmp_path / "own.json",
    )
    assert "it goes on with" in capsys.readouterr().err


def test_long_documents_are_encoded_in_parts_to_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (Path(np.__file__).parent / "conftest.py").read_text() * 3
    own = train_bpe([text], 400).to_json()
    llama = json.loads(own)
    llama["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": LLAMA}},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}  # fmt: skip
    monkeypatch.setattr(subwords, "LONG", 50)
    for description in (own, json.dumps(llama)):
        tokenizer, parts = (
            tokenizer_from_json(description),
            list(subwords.split_text(text, description)),
        )
        assert len(parts) > 100 and "".join(parts) == text
        assert np.array_equal(
            np.concatenate([tokenizer.encode(p) for p in parts]), tokenizer.encode(text)
        )
    pieces = json.loads(own) | {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}
    }
    assert list(subwords.split_text(text, json.dumps(pieces))) == [text]
    monkeypatch.setattr(subwords, "_COST", 10**12)
    with pytest.raises(DataError, match="this tokenizer takes it in one piece"):
        list(subwords.split_text(text, json.dumps(pieces)))


def test_tokens_that_skipped_more_than_is_allowed_now_are_not_taken_from_the_cache(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_bytes(line_of(b"bad"))
    assert (
        load_corpus([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "cache", bad_records=0.5)
        .files[0]
        .skipped["bad"]
        == 1
    )
    with pytest.raises(DataError, match="line 2"):
        load_corpus([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "cache").files[0]


HARMS: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "flipped token": (
        "tokens-00000.bin",
        lambda b: bytes([b[0] ^ 1]) + b[1:],
        "bytes 0 to 4,355 .* checksum differs",
    ),
    "flipped end": (
        "tokens-00000.bin",
        lambda b: b[:-37] + bytes([b[-37] ^ 1]) + b[-36:],
        "checksum differs",
    ),
    "flipped sum": (
        "tokens-00000.bin",
        lambda b: b[:-33] + bytes([b[-33] ^ 1]) + b[-32:],
        "checksum differs",
    ),
    "flipped checksum": (
        "tokens-00000.bin",
        lambda b: b[:-1] + bytes([b[-1] ^ 1]),
        "not the shard of this place",
    ),
    "cut tokens": (
        "tokens-00000.bin",
        lambda b: b[:-2],
        "tokens-00000.bin has fewer than 4,388 bytes",
    ),
    "more tokens": ("tokens-00000.bin", lambda b: b + b"\0\0", "tokens-00000.bin has more bytes"),
    "no tokens": ("tokens-00000.bin", lambda b: b"", "tokens-00000.bin has"),
    "other checksum": (
        "shards.bin",
        lambda b: bytes([b[0] ^ 1]) + b[1:],
        "shards.bin is not what was written",
    ),
    "other tokenizer": (
        "tokenizer.json",
        lambda b: b.replace(b"bytes", b"chars"),
        "tokenizer.json is not what was",
    ),
    "other count": (
        "tokens.json",
        lambda b: b.replace(b'"documents": 2', b'"documents": 3'),
        "checksum differs",
    ),
    "other format": (
        "tokens.json",
        lambda b: b.replace(b'"format": 4', b'"format": 9'),
        "of format 9, and this",
    ),
    "no description": ("tokens.json", lambda b: b"{", "it cannot be read"),
    "binary description": ("tokens.json", lambda b: b"\xff", "it cannot be read"),
}
"""Harm to a file of a token folder, and the reason for which it is refused."""


@pytest.mark.parametrize("name", HARMS)
def test_a_damaged_token_folder_is_refused(name: str, tmp_path: Path) -> None:
    file, harm, reason = HARMS[name]
    (tmp_path / "a.jsonl").write_text(GOOD * 2)
    folder = tokenize(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "tokens").folder
    (folder / file).write_bytes(harm((folder / file).read_bytes()))
    with pytest.raises(DataError, match=rf"token file {folder}(.|\n)*{reason}"):
        _ = open_tokens(folder).tokens[0:10]


def other_shard(folder: Path) -> Path:
    """A complete second shard of a text that differs in its first shard alone."""
    text = "".join(chr(97 + i * i % 23) for i in range(1000))
    (folder / "b.jsonl").write_text(json.dumps({"text": "A" + (text * 300)[1:]}) + "\n")
    return (
        tokenize(str(folder / "b.jsonl"), "bytes", folder / "other", shard_tokens=1).folder
        / "tokens-00001.bin"
    )


SHARD_HARMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard is missing": (lambda f: (f / "tokens-00001.bin").unlink(), "tokens-00001.bin"),
    "two shards swapped": (
        lambda f: [(f / a).rename(f / b) for a, b in (
            ("tokens-00000.bin", "x"), ("tokens-00001.bin", "tokens-00000.bin"), ("x", "tokens-00001.bin"))],
        "tokens-00000.bin is not the shard of this place",
    ),
    "a shard of other text": (
        lambda f: shutil.copy(other_shard(f.parent), f / "tokens-00001.bin"), "00001.bin is not the shard of this place"
    ),
    "a cut shard": (lambda f: os.truncate(f / "tokens-00001.bin", 9), "tokens-00001.bin has fewer than"),
    "a longer last shard": (lambda f: os.truncate(f / "tokens-00002.bin", 2**18), "tokens-00002.bin has more bytes"),
    "a flipped bit in the last shard": (
        lambda f: (f / "tokens-00002.bin").write_bytes(b"\x01" + (f / "tokens-00002.bin").read_bytes()[1:]),
        "bytes 0 to .* of tokens-00002.bin are not what was written",
    ),
    "a shard that is a link": (
        lambda f: (f / "tokens-00001.bin").symlink_to((f / "tokens-00001.bin").rename(f.parent / "x")),
        "a link that leaves the folder",
    ),
    "other shards": (lambda f: described(f, shards=2), "are not 2 shards of"),
    "shards of no size": (lambda f: described(f, shard_tokens=0), "are not 3 shards of 0"),
    "shards of half a block": (lambda f: described(f, shard_tokens=2**17 - 2), "are not 3 shards of"),
    "shards without a checksum": (lambda f: described(f, tokens=2**18, shards=2), "has 96 bytes, and 2 shards"),
    "a number that is none": (lambda f: described(f, tokens="many"), "it cannot be read"),
    "other block": (lambda f: described(f, block=2**17), "has no checksums"),
    "no shards": (lambda f: described(f, shards=None), "it cannot be read"),
    "unfinished": (lambda f: (f / "tokens.json").unlink(), "it cannot be read"),
}  # fmt: skip
"""Harm to a token folder of three shards, and the reason for which it is refused."""


def described(folder: Path, **changes: Any) -> None:
    """Changes the description, with its checksum."""
    record = {**json.loads((folder / "tokens.json").read_text()), **changes}
    del record["checksum"]
    (folder / "tokens.json").write_text(json.dumps({**record, "checksum": checksum(record)}))


@pytest.mark.parametrize("name", SHARD_HARMS)
def test_damaged_shards_are_refused(name: str, tmp_path: Path) -> None:
    harm, reason = SHARD_HARMS[name]
    text = "".join(chr(97 + i * i % 23) for i in range(1000))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text * 300}) + "\n")
    folder = tokenize(
        str(tmp_path / "a.jsonl"), "bytes", tmp_path / "tokens", shard_tokens=1
    ).folder
    harm(folder)
    with pytest.raises(DataError, match=rf"token file {folder}(.|\n)*{reason}"):
        _ = np.asarray(open_tokens(folder).tokens)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_a_weight_that_is_none_is_refused(weight: str) -> None:
    with pytest.raises(DataError, match="is not positive"):
        parse_source(f"a.txt={weight}")


def test_each_of_many_files_is_found_named_and_read_with_as_many_calls(tmp_path: Path) -> None:
    """Some 310 calls of Python for each, 0.1 ms: a hundred thousand files begin in 10 s."""
    calls = {}
    for count in (500, 2000):
        for number in range(count):
            folder = tmp_path / str(count) / str(number // 100)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_text("some text")
        profile = cProfile.Profile()
        corpus = profile.runcall(
            load_corpus, [str(tmp_path / str(count))], "bytes", tmp_path / "cache"
        )
        assert corpus.files[0].documents == count
        calls[count] = sum(entry.callcount for entry in profile.getstats())
    assert calls[2000] - calls[500] < 400 * 1500


RUN_FILES: dict[str, tuple[Callable[[str], str], str]] = {
    "a section twice": (lambda text: text[:-1] + ', "training": {"steps": 5}}', "has 'training' twice"),
    "an unknown axis": (lambda text: text[:-1] + ', "mesh": {"foo": 1}}', "mesh.foo"),
    "text for a number": (lambda text: text.replace('"steps": 2', '"steps": "2"'), r"Expected .int., .*training.steps"),
    "a name without a module": (lambda text: text.replace('"layout": "fsdp"', '"layout": ":x"'), "no layout has that"),
    "a function for a family": (lambda text: text.replace('"llama"', '"meshwright:recipe"'), "not a model class"),
    "layers without end": (lambda text: text.replace('"layers": 4', '"layers": 9' + "9" * 9), "<= 100000"),
    "a negative seed": (lambda text: text.replace('"seed": 0', '"seed": -1'), r">= 0 - at `training.seed`"),
}  # fmt: skip
"""Changes to a run.json, and the reason for which it is refused."""


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_file_that_is_wrong_is_refused(name: str, tmp_path: Path) -> None:
    change, reason = RUN_FILES[name]
    document = run_to_dict(mw.recipe("tiny", steps=2, vocab=512))
    document.pop("mesh", None)
    (tmp_path / "run.json").write_text(change(json.dumps({**document, "layout": "fsdp"})))
    with pytest.raises(ConfigError, match=reason):
        place_run(read_run(tmp_path / "run.json"), mw.MeshShape())


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("learning_rate", -1.0, "--lr 0.0003"),
        ("beta1", 2.0, "--optimizer.beta1 0.9"),
        ("unroll", 0, "--training.unroll 1"),
        ("norm_epsilon", -1.0, "--model.norm-epsilon 1e-05"),
    ],
)
def test_a_fix_names_the_option_with_a_value_that_works(field: str, value: float, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        place_run(mw.recipe("tiny", vocab=512, **{field: value}), mw.MeshShape())
    assert refused.value.fix == fix


def test_a_prompt_in_other_characters_than_the_text() -> None:
    """One that is asked for is refused before the run trains; the line break of runs that name none is left out."""
    data = mw.Data(("text.txt",), tokenizer="chars")
    tokenizer = Chars("abcd")
    with pytest.raises(ConfigError, match="character 0 is 'x'") as error:
        check_prompt(dataclasses.replace(data, prompt="xyz"), tokenizer)
    assert error.value.fix == "--data.prompt a, or --data.tokenizer bytes"
    for prompt in ("\n", "ab", ""):
        check_prompt(dataclasses.replace(data, prompt=prompt), tokenizer)
