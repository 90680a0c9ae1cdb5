"""Megatron's token files, PREFIX.bin and PREFIX.idx, read where they are and without a cache.

    PREFIX.idx | "MMIDIDX\\0\\0", version (u64) 1, type of a token (u8),
               | sequences S (u64), marks M (u64)
               | lengths (i32) [S]: tokens of each sequence
               | starts (i64) [S]: its first byte in PREFIX.bin
               | marks (i64) [M]: the first sequence of each document, and then S
    PREFIX.bin | the tokens of all sequences, one after another

The format has no checksums. Every number of the index is compared with the others and with the size
of PREFIX.bin when a dataset is opened, and every token with the vocabulary when it is read. One
start in `STRIDE` is kept in memory, 8 bytes for 1,024 sequences; the others are read where a sample
needs them. No file is mapped: one that is cut off while it is read is an error and not a signal.

Source: `megatron/core/datasets/indexed_dataset.py` of megatron-core 0.16.
"""

import contextlib
import dataclasses
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.tokenizers import Tokenizer
from meshwright.data.tokens import TokenArray, TokenFile
from meshwright.errors import DataError, by_class, reason_of
from meshwright.storage.attempts import RegularFile, attempt, is_file
from meshwright.storage.paths import in_bucket, path_of

INDEX, TOKENS = ".idx", ".bin"
"""Ends of the names of the two files of a dataset."""
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the token type, sequences, marks."""
_VERSION = 1
_TYPES: dict[int, str] = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
"""Codes of Megatron's `DType`."""
STRIDE = 2**10
"""Entries of an ascending column of which the first is kept in memory."""
_CHUNK = 2**20
"""Entries of a column that are read at a time where all of them are; a multiple of `STRIDE`."""
_FIRST = 2**20
"""Tokens that are compared with the vocabulary when a dataset is opened."""
_PROBES, _PROBE = 256, 2**12
"""Places of PREFIX.bin of which the digest of a dataset knows the bytes, and bytes of each."""


def is_megatron(path: str | Path) -> bool:
    """Whether `path` names a Megatron dataset: PREFIX, PREFIX.bin or PREFIX.idx,
    where both files are there."""
    return not in_bucket(path) and len(_files_of(str(path))) == 2


def check_pair(path: str) -> None:
    """Raises DataError for PREFIX.bin or PREFIX.idx without the other, or in a bucket."""
    if not path.endswith((INDEX, TOKENS)):
        return
    prefix = _prefix_of(path)
    if in_bucket(path):
        truth = "a Megatron dataset in a bucket is not read: its parts have no checksums"
        fix = f"a copy of {prefix}{INDEX} and {prefix}{TOKENS} on a disk"
        raise DataError(f"--data {path}", truth, fix)
    found = _files_of(path)
    if len(found) == 1:
        missing = TOKENS if found == [INDEX] else INDEX
        truth = f"a Megatron dataset is two files, and {prefix}{missing} is not there"
        raise DataError(f"--data {path}", truth, f"both files in {os.path.dirname(path) or '.'}")


def _prefix_of(path: str) -> str:
    return path[: -len(INDEX)] if path.endswith((INDEX, TOKENS)) else path


def _files_of(path: str) -> list[str]:
    """Returns the ends of the names of those files of a dataset that are there."""
    prefix = os.path.expanduser(_prefix_of(path))
    if not os.path.basename(prefix):
        return []
    return [end for end in (INDEX, TOKENS) if is_file(prefix + end)]


class _File:
    """File of which parts are read, by several threads.
    A handle whose read failed for now is not used again."""

    def __init__(self, path: Path):
        self.path = path
        self._handle = RegularFile(path)
        self.size = os.fstat(self._handle.fileno()).st_size

    def read(self, at: int, size: int) -> bytes:
        """Returns bytes of the file. Raises OSError, or ValueError where it has become shorter."""

        def read() -> bytes:
            try:
                return os.pread(self._handle.fileno(), size, at)
            except OSError:
                self._handle = RegularFile(self.path)
                raise

        found = attempt(read)
        if len(found) != size:
            there = os.stat(self.path).st_size
            raise ValueError(
                f"{self.path.name} had {self.size:,} bytes when it was opened, and has {there:,} "
                "now"
            )
        return found


@dataclasses.dataclass(frozen=True)
class _Column:
    """Numbers in a file, one after another."""

    file: _File
    at: int
    """First byte."""
    count: int
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.at + self.count * self.dtype.itemsize

    def read(self, first: int, stop: int) -> np.ndarray:
        """Returns the entries [first, stop)."""
        size = self.dtype.itemsize
        return np.frombuffer(
            self.file.read(self.at + first * size, (stop - first) * size), self.dtype
        )

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields all entries in parts, each with the number of its first entry."""
        for first in range(0, self.count, _CHUNK):
            yield first, self.read(first, min(first + _CHUNK, self.count))


@dataclasses.dataclass(frozen=True)
class _Ascending:
    """Column of ascending numbers, of which one in `STRIDE` is in memory."""

    column: _Column
    coarse: np.ndarray
    """Entries 0, STRIDE, 2 STRIDE, ..., int64."""

    def rank(self, value: int) -> int:
        """Returns how many entries are at most `value`."""
        block = int(np.searchsorted(self.coarse, value, side="right")) - 1
        if block < 0:
            return 0
        first = block * STRIDE
        entries = self.column.read(first, min(first + STRIDE, self.column.count))
        return first + int(np.searchsorted(entries, value, side="right"))


class MegatronTokens(TokenArray):
    """Tokens of a Megatron dataset in the order of its file, and where its documents end.

    prefix: names PREFIX.bin and PREFIX.idx.
    vocab: size of the vocabulary, which every token is below. Raises OSError, and ValueError for an
    index that contradicts itself or PREFIX.bin.
    """

    def __init__(self, prefix: Path, vocab: int):
        self.prefix = prefix
        self.vocab = vocab
        index = _File(prefix.with_name(prefix.name + INDEX))
        self._tokens = _File(prefix.with_name(prefix.name + TOKENS))
        digest = hashlib.sha256()

        self.dtype, self.lengths, starts, marks = _read_header(index, digest)
        self.starts, total = self._check_starts(starts, digest)
        self.marks, self.sequences_are_documents = _check_marks(marks, starts.count, digest)
        super().__init__(total, self._no_blocks)

        self.documents = marks.count - 1
        self.digest = self._digest(digest)

    @staticmethod
    def _no_blocks(first: int, stop: int) -> np.ndarray:
        raise NotImplementedError("a Megatron dataset has no blocks")

    @property
    def sequences(self) -> int:
        """Number of sequences: what Megatron's GPT dataset calls documents."""
        return self.lengths.count

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens [start, stop), and one past the last token of each document that ends
        in them."""
        with self._refusing():
            return self._read_tokens(start, stop), self._ends(start, stop)

    def read_sequence(self, sequence: int, offset: int, count: int) -> np.ndarray:
        """Returns `count` tokens of a sequence, from its token `offset` on."""
        with self._refusing():
            start = int(self.starts.column.read(sequence, sequence + 1)[0]) // self.dtype.itemsize
            return self._read_tokens(start + offset, start + offset + count)

    def read_lengths(self, first: int, stop: int) -> np.ndarray:
        """Returns the tokens of each sequence [first, stop), int32."""
        with self._refusing():
            parts = [
                self.lengths.read(at, min(at + _CHUNK, stop)) for at in range(first, stop, _CHUNK)
            ]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def _read_tokens(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens by their places in the file.
        Raises DataError for one that the vocabulary does not have."""
        size = self.dtype.itemsize
        found = np.frombuffer(
            self._tokens.read(start * size, (stop - start) * size), self.dtype
        ).astype(np.int64)
        wrong = np.flatnonzero((found < 0) | (found >= self.vocab))
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"Megatron dataset {self.prefix}",
                f"token {start + at:,} is {found[at]}, and the tokenizer of the run has "
                f"{self.vocab:,} tokens, 0 to {self.vocab - 1:,}",
                "--data.tokenizer TOKENIZER.json, the one that the dataset was made with",
            )
        return found

    def _ends(self, start: int, stop: int) -> np.ndarray:
        """Returns one past the last token of each document that ends in (start, stop]."""
        size = self.dtype.itemsize
        first = self.starts.rank(start * size)
        last = self.starts.rank(stop * size)
        # Each of these sequences begins in (start, stop], where the one before it ends.
        begins = self.starts.column.read(first, last)
        if not self.sequences_are_documents:
            after = self.marks.rank(first - 1)
            marks = self.marks.column.read(after, self.marks.rank(last - 1))
            begins = begins[marks - first]
        ends = begins // size
        if stop == len(self):
            ends = np.append(ends, stop)
        return np.unique(ends)

    def _check_starts(self, starts: _Column, digest: Any) -> tuple[_Ascending, int]:
        """Returns the starts of the sequences and the number of all tokens.

        Raises ValueError where lengths, starts and the size of PREFIX.bin contradict each other.
        """
        size = self.dtype.itemsize
        there = self._tokens.size
        coarse = []
        total = 0
        for first, lengths in self.lengths.chunks():
            found = starts.read(first, first + len(lengths))
            digest.update(lengths)
            digest.update(found)
            if lengths.min() < 0:
                at = int(lengths.argmin())
                raise ValueError(f"sequence {first + at} has the length {lengths[at]}")
            ends = total + np.cumsum(lengths, dtype=np.int64)
            expected = (ends - lengths) * size
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                at = int(wrong[0])
                raise ValueError(
                    f"sequence {first + at} begins at byte {found[at]:,} by the index, and the "
                    f"sequences before it have {expected[at] // size:,} tokens of {size} bytes, "
                    f"{expected[at]:,} bytes"
                )
            total = int(ends[-1])
            if total * size > there:
                break
            coarse.append(found[::STRIDE])
        if total * size != there:
            raise ValueError(
                f"the index has {total:,} tokens of {size} bytes ({self.dtype}), {total * size:,} "
                f"bytes, and {self._tokens.path.name} has {there:,}"
            )
        if total == 0:
            raise ValueError("it has no tokens")
        return _Ascending(starts, np.concatenate(coarse)), total

    def _digest(self, digest: Any) -> str:
        """Returns a SHA-256 of the index and of `_PROBES` places in PREFIX.bin,
        which may have terabytes."""
        last = max(self._tokens.size - _PROBE, 0)
        digest.update(f"{self.dtype} {self._tokens.size}".encode())
        for number in range(_PROBES):
            at = last * number // (_PROBES - 1)
            digest.update(self._tokens.read(at, min(_PROBE, self._tokens.size)))
        return str(digest.hexdigest())

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raises DataError where the files cannot be read, or have changed."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise by_class(error, _refusal(self.prefix, error)) from error


def _read_header(index: _File, digest: Any) -> tuple[np.dtype[Any], _Column, _Column, _Column]:
    """Returns the type of a token, and the columns of lengths, starts and marks.

    Raises ValueError where the header is of another format,
    or the size of the index is not what its counts take.
    """
    name = index.path.name
    if index.size < _HEADER.size:
        raise ValueError(f"{name} has {index.size} bytes, and its header takes {_HEADER.size}")
    header = index.read(0, _HEADER.size)
    digest.update(header)
    magic, version, code, sequences, marks = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ValueError(f"{name} begins with {magic!r}, and an index of Megatron with {_MAGIC!r}")
    if version != _VERSION:
        raise ValueError(f"{name} is of version {version}, and version {_VERSION} is read")
    if code not in _TYPES:
        raise ValueError(f"{name} has tokens of type {code}, and the types are 1 to {len(_TYPES)}")
    dtype = np.dtype(_TYPES[code]).newbyteorder("<")
    if dtype.kind == "f":
        raise ValueError(f"{name} has tokens of type {_TYPES[code]}, which are no whole numbers")

    expected = _HEADER.size + (4 + 8) * sequences + 8 * marks
    counts = f"{sequences:,} sequences and {marks:,} marks of documents"
    if index.size == expected + sequences and sequences:
        raise ValueError(
            f"{name} has {sequences:,} bytes more than {counts} take, a mode for each sequence: it "
            "is a multimodal dataset, whose sequences are not all text"
        )
    if index.size != expected:
        raise ValueError(
            f"{name} has {index.size:,} bytes, and {counts} take {_HEADER.size} + 12 x "
            f"{sequences:,} + 8 x {marks:,} = {expected:,}"
        )
    if sequences < 1 or marks < 2:
        raise ValueError(f"{name} has {counts}: a dataset has at least 1 and 2")
    lengths = _Column(index, _HEADER.size, sequences, np.dtype("<i4"))
    starts = _Column(index, lengths.end, sequences, np.dtype("<i8"))
    return dtype, lengths, starts, _Column(index, starts.end, marks, np.dtype("<i8"))


def _check_marks(marks: _Column, sequences: int, digest: Any) -> tuple[_Ascending, bool]:
    """Returns the marks of the documents, and whether every sequence is a document.

    Raises ValueError where they do not ascend from 0 to the number of sequences.
    """
    coarse = []
    before = 0
    one_each = marks.count == sequences + 1
    for first, entries in marks.chunks():
        digest.update(entries)
        if first == 0 and entries[0] != 0:
            raise ValueError(f"its first document begins with sequence {entries[0]}, and not 0")
        steps = np.diff(entries, prepend=before)
        if steps.min() < 0:
            at = int(steps.argmin())
            previous = entries[at] - steps[at]
            raise ValueError(
                f"document {first + at} begins with sequence {entries[at]}, and the one before it "
                f"with {previous}"
            )
        one_each = one_each and bool(np.all(steps[1 if first == 0 else 0 :] == 1))
        before = int(entries[-1])
        coarse.append(entries[::STRIDE])
    if before != sequences:
        raise ValueError(f"its documents end with sequence {before}, and it has {sequences}")
    return _Ascending(marks, np.concatenate(coarse)), one_each


def open_megatron(path: Path, tokenizer: Tokenizer) -> TokenFile:
    """Opens a Megatron dataset as a token file of the run's tokenizer.

    path: as of `is_megatron`. Raises DataError where its index is damaged, or where its first
    tokens are none of the tokenizer.
    """
    place = path_of(_prefix_of(str(path)))
    try:
        tokens = MegatronTokens(place, tokenizer.vocab)
    except (OSError, ValueError) as error:
        raise by_class(error, _refusal(place, error)) from error
    tokens.read(0, min(_FIRST, len(tokens)))
    return TokenFile(tokens, tokenizer.vocab, tokenizer, place, tokens.documents, tokens.digest)


def _refusal(prefix: Path, error: OSError | ValueError) -> DataError:
    """Returns the error of a dataset that cannot be read."""
    truth = reason_of(error)
    fix = (
        f"a copy of {prefix.name}{INDEX} and {prefix.name}{TOKENS} as Megatron's "
        "preprocess_data.py wrote them"
    )
    return DataError(f"Megatron dataset {prefix}", truth, fix)
