"""Bad inputs in text and token files: each refused with file and line, or skipped and counted where that is allowed."""

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from meshwright.data.tokenizing import load_tokens, tokenize, write_description
from meshwright.data.tokens import load_corpus, open_tokens, parse_source
from meshwright.errors import DataError

GOOD = '{"text": "good"}\n'


def line_of(value: str | bytes) -> bytes:
    """Two good records with a bad one between them."""
    return GOOD.encode() + (value if isinstance(value, bytes) else value.encode()) + b"\n" + GOOD.encode()


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
        tokens = tokenize(str(tmp_path / file), "bytes", tmp_path / f"{file}.tokens", bad_records=0.4)
        assert tokens.skipped["bad"] == 1 and tokens.skipped["read"] == 3 and len(tokens.ends) == 2
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
    "numbers": ("a.parquet", lambda f: parquet(f, [1, 2]), "its column 'text' is of type int64, and no text"),
    "bytes": ("a.parquet", lambda f: parquet(f, [b"a"]), "its column 'text' is of type binary"),
    "lists": ("a.parquet", lambda f: parquet(f, [["a"]]), "its column 'text' is of type list"),
    "nulls": ("a.parquet", lambda f: parquet(f, pa.nulls(2)), "its column 'text' is of type null"),
    "other column": ("a.parquet", lambda f: parquet(f, ["a"], "body"), "no column 'text' among body"),
    "no Parquet": ("a.parquet", b"PAR1 nothing PAR1", "reading .*a.parquet"),
    "empty Parquet": ("a.parquet", b"", "reading .*a.parquet"),
    "cut Parquet": ("a.parquet", lambda f: (parquet(f, ["a" * 999]), f.write_bytes(f.read_bytes()[:-9]))[0], "Arrow"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(GOOD.encode() * 99)[:-9], "EOFError"),
    "no gzip": ("a.jsonl.gz", b"plain", "BadGzipFile"),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(b"")[:10] + b"\xff" * 20, "error: Error -3"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), "not UTF-8: it is UTF-16"),
    "latin-1": ("a.txt", "one\ntwo\ncaf\xe9".encode("latin-1"), r"not UTF-8: byte 12 \(0xe9\) on line 3"),
    "a picture": ("a.md", b"\x89PNG\r\n\x1a\n", r"not UTF-8: byte 1 \(0x89\) on line 1"),
    "empty": ("a.txt", b"", "hold no text: all are empty"),
    "a mark alone": ("a.txt", b"\xef\xbb\xbf", "hold no text: all are empty"),
    "empty lines": ("a.jsonl", b"\n\n  \n", "hold no text: all are empty"),
    "empty texts": ("a.jsonl", b'{"text": ""}\n', "hold no text: all are empty"),
    "unknown kind": ("a.doc", b"text", "a folder without a file of a known kind"),
    "a pipe": ("a.txt", lambda f: os.mkfifo(f), "no regular file"),
    "a pipe of lines": ("a.jsonl", lambda f: os.mkfifo(f), "no regular file"),
    "a link to nothing": ("a.txt", lambda f: f.symlink_to("nothing"), "No such file"),
    "a folder in the place of a file": ("a.txt", lambda f: f.mkdir(), "without a file of a known kind"),
}
"""Files that cannot be read, whatever share of records may be skipped, and the reason."""


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row_is_refused_with_its_place_or_skipped(name: str, tmp_path: Path) -> None:
    column, reason = ROWS[name]
    parquet(tmp_path / "a.parquet", column())
    with pytest.raises(DataError, match=rf"reading \S*a.parquet, {reason}"):
        tokenize(str(tmp_path / "a.parquet"), "bytes", tmp_path / "refused")
    tokens = tokenize(str(tmp_path / "a.parquet"), "bytes", tmp_path / "tokens", bad_records=0.4)
    assert tokens.skipped["bad"] == 1 and len(tokens.ends) == 2


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    file, content, reason = FILES[name]
    (tmp_path / "in").mkdir()
    if callable(content):
        content(tmp_path / "in" / file)
    else:
        (tmp_path / "in" / file).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        load_tokens(str(tmp_path / "in"), "bytes", tmp_path / "cache")
    assert not list(tmp_path.glob("cache/tokens/*")), "nothing half-written is left"


def test_marks_are_no_tokens_and_text_files_may_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "\\ufeffdef"}\r\n')
    (tmp_path / "c.txt").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match=r"c.txt(.|\n)*not UTF-8"):
        tokenize(str(tmp_path), "bytes", tmp_path / "tokens")
    file = tokenize(str(tmp_path), "bytes", tmp_path / "tokens", bad_records=0.5)
    texts = {file.tokenizer.decode(part) for part in np.split(np.asarray(file.tokens), file.ends[:-1])}
    assert texts == {"abc", "def"} and file.skipped["bad"] == 1


def test_tokens_that_skipped_more_than_is_allowed_now_are_not_taken_from_the_cache(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line_of(b"bad"))
    assert load_tokens(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "cache", bad_records=0.5).skipped["bad"] == 1
    with pytest.raises(DataError, match="line 2"):
        load_tokens(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "cache")


HARMS: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "flipped token": ("tokens.bin", lambda b: bytes([b[0] ^ 1]) + b[1:], "checksum differs"),
    "flipped last token": ("tokens.bin", lambda b: b[:-1] + bytes([b[-1] ^ 1]), "checksum differs"),
    "cut tokens": ("tokens.bin", lambda b: b[:-2], "tokens.bin has"),
    "more tokens": ("tokens.bin", lambda b: b + b"\0\0", "tokens.bin has"),
    "no tokens": ("tokens.bin", lambda b: b"", "tokens.bin has"),
    "flipped end": ("ends.npy", lambda b: b[:-8] + bytes([b[-8] ^ 1]) + b[-7:], "ends.npy is not what was written"),
    "cut ends": ("ends.npy", lambda b: b[:-8], "ends.npy is not what was written"),
    "flipped sum": ("sums.bin", lambda b: bytes([b[0] ^ 1]) + b[1:], "sums.bin is not what was written"),
    "other tokenizer": ("tokenizer.json", lambda b: b.replace(b"bytes", b"chars"), "tokenizer.json is not what was"),
    "other count": ("tokens.json", lambda b: b.replace(b'"documents": 2', b'"documents": 3'), "checksum differs"),
    "other format": (
        "tokens.json",
        lambda b: b.replace(b'"format": 2', b'"format": 9'),
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


def test_ends_that_disagree_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD * 2)
    folder = tokenize(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "tokens").folder
    record = json.loads((folder / "tokens.json").read_text())
    for ends in (np.array([5.0, 10.0]), np.array([5, 9]), np.array([10])):
        np.save(folder / "ends.npy", ends)
        kept = {name: value for name, value in record.items() if name not in ("format", "block", "sha256", "checksum")}
        write_description(folder, kept)
        with pytest.raises(DataError, match=r"ends.npy is \w+\[\d\], and there are 2 documents"):
            open_tokens(folder)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_a_weight_that_is_none_is_refused(weight: str) -> None:
    with pytest.raises(DataError, match="is not positive"):
        parse_source(f"a.txt={weight}")


def test_a_hundred_thousand_files_are_found_quickly(tmp_path: Path) -> None:
    """Ten thousand here; finding, naming and reading one takes less than 0.2 ms of the processor."""
    count = 10_000
    for number in range(count):
        if number % 1000 == 0:
            (tmp_path / "in" / str(number)).mkdir(parents=True)
            folder = str(tmp_path / "in" / str(number))
        with open(f"{folder}/{number}.txt", "w") as file:
            file.write("some text")
    start = time.process_time()
    corpus = load_corpus([str(tmp_path / "in")], "bytes", tmp_path / "cache")
    seconds = time.process_time() - start
    assert len(corpus.files[0].ends) == count
    assert seconds < 0.2e-3 * count
