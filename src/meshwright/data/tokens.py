"""Token files: text tokenised once, then mapped into memory and verified as it is read.

A token file is a folder with `tokens.bin` (uint16 or uint32, little-endian, documents one after another, each closed
by the tokenizer's `end`), `ends.npy` (int64, where each document ends), `sums.bin` (uint32, CRC-32 of each block of
`tokens.bin`), `tokenizer.json`, and `tokens.json` (the description with SHA-256 of the small files, written last).

Opening verifies all but `tokens.bin`. A block of that is verified when it is first read, in the threads that read
ahead: a corpus larger than memory is not read before the first step.
"""

import dataclasses
import functools
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.tokenizers import Tokenizer, tokenizer_from_json
from meshwright.documents import LARGE, check_inside, read_json, read_text
from meshwright.errors import DataError

FORMAT = 2
BLOCK = 2**18
"""Bytes of `tokens.bin` under one checksum: verified in about 0.3 ms, and 4 bytes of `sums.bin`."""
HASHED = ("ends.npy", "sums.bin", "tokenizer.json")
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class TokenArray:
    """Memory-mapped tokens, [tokens]. A slice is verified before it is returned."""

    def __init__(self, file: Path, dtype: np.dtype[Any]):
        self._file = file
        self._tokens = np.memmap(file, dtype, mode="r")
        self._sums = np.fromfile(file.with_name("sums.bin"), "<u4")
        self._verified = np.zeros(len(self._sums), np.bool_)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self._tokens))
        size = self._tokens.itemsize
        first, last = start * size // BLOCK, -(-stop * size // BLOCK)
        for block in first + np.flatnonzero(~self._verified[first:last]):
            self._verify(int(block))
        return self._tokens[part]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype, copy=copy)

    def _verify(self, block: int) -> None:
        tokens = self._tokens[block * BLOCK // self._tokens.itemsize :][: BLOCK // self._tokens.itemsize]
        if zlib.crc32(tokens) != self._sums[block]:
            raise DataError(
                f"token file {self._file.parent}",
                f"bytes {block * BLOCK:,} to {block * BLOCK + tokens.nbytes - 1:,} of {self._file.name} are not what "
                "was written: their checksum differs",
                "tokenise again, or copy the folder again",
            )
        self._verified[block] = True


class TokenFile(NamedTuple):
    """Token file opened for reading."""

    tokens: Any
    """Tokens of all documents, [tokens]: a `TokenArray`, or an array."""
    ends: np.ndarray
    """One past each document's last token, int64 [documents]."""
    vocab: int
    tokenizer: Tokenizer
    folder: Path
    digest: str = ""
    """SHA-256 of all that training reads of the file: its tokens, documents and tokenizer."""
    skipped: Mapping[str, Any] = {}
    """Records that were left out, by reason."""


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def checksum(record: Any) -> str:
    """Returns the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def open_tokens(folder: Path) -> TokenFile:
    """Opens the token file in `folder`. Raises DataError where it is damaged."""
    try:
        record = _read_description(folder)
        dtype, count, vocab = _DTYPES[record["dtype"]], int(record["tokens"]), int(record["vocab"])
        size, sums = (folder / "tokens.bin").stat().st_size, (folder / "sums.bin").stat().st_size
        if size != count * dtype.itemsize or sums != 4 * -(-size // BLOCK) or not count:
            raise ValueError(
                f"tokens.bin has {size} bytes, and {count} tokens of {dtype.itemsize} bytes are "
                f"{count * dtype.itemsize}; sums.bin has {sums}"
            )
        for name, expected in record["sha256"].items():
            if sha256_of(folder / name) != expected:
                raise ValueError(f"{name} is not what was written: its SHA-256 differs")
        # Mapped: a header that promises more than the file has is refused before anything is allocated.
        ends = np.load(folder / "ends.npy", mmap_mode="r", allow_pickle=False)
        if ends.dtype != np.int64 or ends.shape != (int(record["documents"]),) or ends[-1] != count:
            raise ValueError(
                f"ends.npy is {ends.dtype}{list(ends.shape)}, and there are {record['documents']} documents"
            )
        tokenizer = tokenizer_from_json(read_text(folder / "tokenizer.json", LARGE))
        if tokenizer.vocab != vocab:
            raise ValueError(f"its vocabulary is {vocab}, and its tokenizer has {tokenizer.vocab} tokens")
        tokens = TokenArray(folder / "tokens.bin", dtype)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise DataError(f"token file {folder}", f"it cannot be read: {error}", "tokenise again") from error
    digest = checksum([record["dtype"], count, record["sha256"]])
    return TokenFile(tokens, np.asarray(ends), vocab, tokenizer, folder, digest, record["skipped"])


def _read_description(folder: Path) -> dict[str, Any]:
    """Reads `tokens.json`. Raises ValueError where it is not of this format, or another file is outside the folder."""
    record = read_json(folder / "tokens.json")
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("block") != BLOCK:
        found = record.get("format") if isinstance(record, dict) else None
        raise ValueError(f"tokens.json is of format {found}, and this version reads {FORMAT}")
    if record.pop("checksum", None) != checksum(record):
        raise ValueError("tokens.json is not what was written: its checksum differs")
    names = tuple(record["sha256"])
    if not set(HASHED) <= set(names) or not isinstance(record["skipped"], dict):
        raise ValueError("tokens.json has no checksums")
    if any(Path(name).name != name for name in names):
        raise ValueError("tokens.json names a file outside the folder")
    check_inside(folder, [folder / name for name in ("tokens.json", "tokens.bin", *names)])
    return record


@dataclasses.dataclass(frozen=True)
class Source:
    """One entry of `data.paths`, and its weight in the mixture."""

    path: str
    weight: float = 1.0


def parse_source(text: str) -> Source:
    """Parses `PATH` or `PATH=WEIGHT`. Raises DataError where the weight is not a positive number."""
    path, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return Source(text)
    try:
        value = float(weight)
    except ValueError:
        return Source(text)
    if not 0 < value < float("inf"):
        raise DataError(f"--data {text}", f"the weight {weight} is not positive", f"{path}=1")
    return Source(path, value)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token files of one vocabulary, and their weights in the mixture."""

    files: tuple[TokenFile, ...]
    weights: tuple[float, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of all files."""
        return self.files[0].tokenizer

    @property
    def vocab(self) -> int:
        """Vocabulary size."""
        return self.files[0].vocab

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """SHA-256 of the tokenizer, and of what training reads of each source, with its weight; as JSON values."""
        tokenizer = hashlib.sha256(self.tokenizer.to_json().encode()).hexdigest()
        sources = [[file.digest, weight] for file, weight in zip(self.files, self.weights, strict=True)]
        return {"tokenizer": tokenizer, "sources": sources}


def load_corpus(
    paths: Sequence[str], spec: str, cache: Path, *, own: Path | None = None, bad_records: float = 0.0
) -> Corpus:
    """Loads the token files of `paths` (each PATH or PATH=WEIGHT), with one vocabulary over all of them.

    own: tokenizer.json that a run which goes on has; text that would now lead to another is tokenised with it.
    bad_records: largest share of records that may be skipped. Raises DataError where two token files were made with
    different tokenizers.
    """
    sources = [parse_source(path) for path in paths]
    if not sources:
        raise DataError("training without text", "--data is empty", "--data PATH")
    raw = [source.path for source in sources if not is_token_file(source.path)]
    if raw:
        from meshwright.data.tokenizing import load_text  # token files need none of it

        texts = load_text(raw, spec, cache, own, bad_records)
    files = tuple(texts[s.path] if s.path in raw else open_tokens(Path(s.path)) for s in sources)
    for file in files[1:]:
        if file.tokenizer.to_json() != files[0].tokenizer.to_json():
            raise DataError(
                f"mixing {files[0].folder} and {file.folder}",
                f"their tokenizers differ ({files[0].vocab} and {file.vocab} tokens)",
                "tokenise both with the same tokenizer file",
            )
    return Corpus(files, tuple(source.weight for source in sources))


def is_token_file(path: str) -> bool:
    """Whether `path` is a folder that `tokenize` wrote."""
    return (Path(path) / "tokens.json").is_file()
