"""Token files: text tokenised once, then mapped into memory and verified as it is read.

A token file is a folder with the tokens of all documents one after another, each closed by the tokenizer's `end`, in
shards `tokens-00000.bin`, ... of equal size (uint16 or uint32, little-endian), `ends.npy` (int64, where each document
ends), `sums.bin` (uint32, CRC-32 of each block of the tokens), `tokenizer.json`, and `tokens.json` (the description
with SHA-256 of the small files, written last). A shard has a whole number of blocks, so its size changes no checksum.
Format 2 had all tokens in `tokens.bin`. The writer notes after each shard from where an interrupted writing goes on.

Opening verifies all but the tokens. A block of those is verified when it is first read, in the threads that read ahead:
a corpus larger than memory is not read before the first step.
"""

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshwright.data.tokenizers import Tokenizer, tokenizer_from_json
from meshwright.documents import LARGE, check_inside, checksum, read_json, read_text, seal, sha256_of
from meshwright.errors import DataError

FORMAT = 3
_SINGLE = 2
"""Format with all tokens in `tokens.bin`."""
BLOCK = 2**18
"""Bytes of tokens under one checksum: verified in about 0.3 ms, and 4 bytes of `sums.bin`."""
SKIPPED = "skipped.jsonl"
"""File with a line for every record that was left out; training does not read it."""
HASHED = ("ends.npy", "sums.bin", "tokenizer.json")
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class Progress(Protocol):
    """Display of a tokenisation that is under way."""

    def update(self, label: str, read: float, size: float, files: tuple[int, int], tokens: int) -> None:
        """Takes bytes read of those there are (0: not known), files read of those there are, and tokens written."""
        ...

    def write(self, text: str) -> None:
        """Takes a line for the user."""
        ...

    def close(self) -> None:
        """Called once, at the end."""
        ...


class TokenArray:
    """Memory-mapped tokens, [tokens]. A slice is verified before it is returned.

    files: shards of `size` tokens each, except for the last one.
    """

    def __init__(self, files: Sequence[Path], size: int, count: int, dtype: np.dtype[Any]):
        self._files, self._size, self._count, self._dtype = files, size, count, dtype
        self._shards: dict[int, Any] = {}
        self._sums = np.fromfile(files[0].with_name("sums.bin"), "<u4")
        self._verified = np.zeros(len(self._sums), np.bool_)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._count)
        first, last = start * self._dtype.itemsize // BLOCK, -(-stop * self._dtype.itemsize // BLOCK)
        for block in first + np.flatnonzero(~self._verified[first:last]):
            self._verify(int(block))
        pieces: list[np.ndarray] = []
        while start < stop or not pieces:
            number, inside = divmod(start, self._size)
            count = min(max(0, stop - start), self._size - inside)
            pieces.append(self._shard(number)[inside : inside + count])
            start += max(count, 1)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype, copy=copy)

    def _shard(self, number: int) -> Any:
        if number not in self._shards:
            self._shards[number] = np.memmap(self._files[number], self._dtype, mode="r")
        return self._shards[number]

    def _verify(self, block: int) -> None:
        per_block = BLOCK // self._dtype.itemsize
        number, first = divmod(block * per_block, self._size)
        tokens = self._shard(number)[first : first + per_block]
        if zlib.crc32(tokens) != self._sums[block]:
            at, file = first * self._dtype.itemsize, self._files[number]
            raise DataError(
                f"token file {file.parent}",
                f"bytes {at:,} to {at + tokens.nbytes - 1:,} of {file.name} are not what "
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


def is_token_file(path: str | Path) -> bool:
    """Whether `path` is a folder that `tokenize` wrote."""
    return os.path.isfile(os.path.join(path, "tokens.json"))  # false for names that no file can have


def open_tokens(folder: Path) -> TokenFile:
    """Opens the token file in `folder`. Raises DataError where it is damaged."""
    try:
        record = _read_description(folder)
        dtype, count, vocab = _DTYPES[record["dtype"]], int(record["tokens"]), int(record["vocab"])
        files, shard = _shards(folder, record, dtype.itemsize, count)
        check_inside(folder, [*files, *(folder / name for name in ("tokens.json", *record["sha256"]))])
        for number, file in enumerate(files):
            size, expected = file.stat().st_size, min(shard, count - number * shard) * dtype.itemsize
            if size != expected:
                raise ValueError(f"{file.name} has {size} bytes, and its tokens are {expected}")
        blocks, sums = -(-count * dtype.itemsize // BLOCK), (folder / "sums.bin").stat().st_size
        if sums != 4 * blocks:
            total = count * dtype.itemsize
            raise ValueError(f"sums.bin has {sums} bytes, and {total} bytes of tokens have {blocks} checksums")
        for name, expected in record["sha256"].items():
            if sha256_of(folder / name) != expected:
                raise ValueError(f"{name} is not what was written: its SHA-256 differs")
        # Mapped: a header that promises more than the file has is refused before anything is allocated.
        ends = np.load(folder / "ends.npy", mmap_mode="r", allow_pickle=False, max_header_size=128)
        if ends.dtype != np.int64 or ends.shape != (int(record["documents"]),) or ends[-1] != count:
            found = f"{ends.dtype}{list(ends.shape)}"
            raise ValueError(f"ends.npy is {found}, and there are {record['documents']} documents")
        if ends[0] < 1 or np.any(ends[1:] <= ends[:-1]):
            raise ValueError("ends.npy has a document that ends at or before the one before it")
        tokenizer = tokenizer_from_json(read_text(folder / "tokenizer.json", LARGE))
        if tokenizer.vocab != vocab:
            raise ValueError(f"its vocabulary is {vocab}, and its tokenizer has {tokenizer.vocab} tokens")
        tokens = TokenArray(files, shard, count, dtype)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise DataError(f"token file {folder}", f"it cannot be read: {error}", "tokenise again") from error
    read = {name: value for name, value in record["sha256"].items() if name != SKIPPED}
    digest = checksum([record["dtype"], count, read])
    return TokenFile(tokens, np.asarray(ends), vocab, tokenizer, folder, digest, record["skipped"])


def _read_description(folder: Path) -> dict[str, Any]:
    """Reads `tokens.json`. Raises ValueError where it is not of this format, or names a file outside the folder."""
    record = read_json(folder / "tokens.json")
    if not isinstance(record, dict) or record.get("format") not in (_SINGLE, FORMAT):
        found = record.get("format") if isinstance(record, dict) else None
        raise ValueError(f"tokens.json is of format {found}, and this version reads {_SINGLE} and {FORMAT}")
    if seal(record) != record:
        raise ValueError("tokens.json is not what was written: its checksum differs")
    names = tuple(record["sha256"])
    if record.get("block") != BLOCK or not set(HASHED) <= set(names) or not isinstance(record["skipped"], dict):
        raise ValueError("tokens.json has no checksums")
    if any(Path(name).name != name or not (folder / name).is_file() for name in names):
        raise ValueError("tokens.json names a file outside the folder, or one that is not there")
    return record


def _shards(folder: Path, record: Mapping[str, Any], itemsize: int, count: int) -> tuple[list[Path], int]:
    """Returns the files with the tokens, and the tokens of each but the last. Raises ValueError for wrong numbers."""
    if not count:
        raise ValueError("it has no tokens")
    if record["format"] == _SINGLE:
        return [folder / "tokens.bin"], count
    shards, size = int(record["shards"]), int(record["shard_tokens"])
    if size < 1 or size * itemsize % BLOCK or shards != -(-count // size):
        raise ValueError(f"{count} tokens are not {shards} shards of {size} tokens")
    return [folder / shard_name(number) for number in range(shards)], size


def shard_name(number: int) -> str:
    """Returns the name of a shard's file."""
    return f"tokens-{number:05d}.bin"
