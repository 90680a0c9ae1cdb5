"""Token files: text tokenized once, on a disk or in a bucket, and verified as it is read.

A token file is a folder with the tokens of all documents one after another, each closed by the
tokenizer's `end`, in shards `tokens-00000.bin`, ... of equal size, `shards.bin` (the checksum of
each shard), `tokenizer.json`, and `tokens.json` (the description with SHA-256 of the small files,
written last). A shard is a row of blocks, and after them its checksum, a SHA-256 over the sums of
all blocks so far. A block is `BLOCK` tokens (uint16 or uint32, little-endian), a bit for each that
is the last one of a document, and the CRC-32 of both, which begins with the block's number. The
writer notes after each shard from where an interrupted writing goes on.

Opening costs the same for every size of corpus. A window is one read of the blocks it is in, and
each read verifies its
blocks: nothing is kept of the others, and no shard is mapped. A shard's checksum is compared when
it is first opened.
"""

import contextlib
import fcntl
import functools
import os
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshwright.data.tokenizers import Tokenizer, tokenizer_from_json
from meshwright.documents import LARGE, check_inside, checksum, read_json, read_text, seal
from meshwright.errors import DataError, by_class, reason_of, shell_word
from meshwright.storage.attempts import attempt, is_file
from meshwright.storage.paths import bucket_path, in_bucket, path_of
from meshwright.storage.transfer import sha256_of

FORMAT = 4
BLOCK = 2**11
"""Tokens under one checksum: a window of 8,192 reads 1.3 times its bytes, its documents' ends
included."""
CHECKSUM = 32
"""Bytes of a shard's checksum."""
DESCRIPTION = "tokens.json"
"""File of a token file that is written last: a folder with it is complete, and never changes again.
"""
SKIPPED = "skipped.jsonl"
"""File with a line for every record that was left out; training does not read it."""
HASHED = ("shards.bin", "tokenizer.json")
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_OPEN = 128
"""Shards that a process has open at a time, those of all token files together."""
_CACHED = 8 * 2**30
"""Bytes of a token file in a bucket that are kept in the local cache."""
_AGAIN = "tokenise again, or copy the folder again"
_MOST = 2**12
"""Blocks that are read at a time."""


class Progress(Protocol):
    """Display of a tokenisation that is under way."""

    def update(
        self, label: str, read: float, size: float, files: tuple[int, int], tokens: int
    ) -> None:
        """Shows how many bytes and files are read, of how many (0: unknown).

        tokens: written so far.
        """
        ...

    def write(self, text: str) -> None:
        """Takes a line for the user."""
        ...

    def close(self) -> None:
        """Called once, at the end."""
        ...


def block_type(dtype: Any) -> np.dtype[Any]:
    """Returns the type of a block of tokens."""
    return np.dtype([("tokens", dtype, BLOCK), ("ends", "u1", BLOCK // 8), ("sum", "<u4")])


def make_blocks(tokens: np.ndarray, ends: np.ndarray, dtype: Any, first: int = 0) -> np.ndarray:
    """Returns the blocks of tokens, from the block of number `first` on.

    ends: True for the last token of each document, [tokens].
    """
    blocks = np.zeros(-(-len(tokens) // BLOCK), block_type(dtype))
    room = len(blocks) * BLOCK - len(tokens)
    blocks["tokens"] = np.pad(tokens, (0, room)).reshape(-1, BLOCK)
    blocks["ends"] = np.packbits(
        np.pad(ends, (0, room)).reshape(-1, BLOCK), axis=1, bitorder="little"
    )
    blocks["sum"] = _sums(blocks, first)
    return blocks


def _sums(blocks: np.ndarray, first: int) -> np.ndarray:
    """Returns the checksums that blocks should have.

    A block is not taken for one of another number.
    """
    rows = blocks.view(np.uint8).reshape(len(blocks), -1)[:, :-4]
    return np.array([zlib.crc32(row, (first + i) % 2**32) for i, row in enumerate(rows)], "<u4")


class TokenArray:
    """Tokens, [tokens], and where their documents end.

    read: returns the blocks [first, stop).
    """

    def __init__(self, count: int, read: Callable[[int, int], np.ndarray]):
        self._count, self._read = count, read

    @classmethod
    def of(cls, tokens: np.ndarray, ends: np.ndarray) -> "TokenArray":
        """Returns tokens that are in memory. ends: one past each document's last token."""
        last = np.zeros(len(tokens), np.bool_)
        last[np.asarray(ends) - 1] = True
        blocks = make_blocks(tokens, last, tokens.dtype)
        return cls(len(tokens), lambda first, stop: blocks[first:stop])

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens [start, stop), and where documents end in them.

        An end is one past a document's last token.
        """
        first = start // BLOCK
        blocks = self._read(first, -(-stop // BLOCK))
        part = slice(start - first * BLOCK, stop - first * BLOCK)
        is_last = np.unpackbits(blocks["ends"], axis=1, bitorder="little").reshape(-1)[part]
        return blocks["tokens"].reshape(-1)[part], start + 1 + np.flatnonzero(is_last)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._count)
        return self.read(start, max(start, stop))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype, copy=copy)

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """One past each document's last token, int64 [documents]. Reads all of the file."""
        starts = range(0, len(self), _MOST * BLOCK)
        return np.concatenate(
            [self.read(start, min(start + _MOST * BLOCK, len(self)))[1] for start in starts]
        )


class TokenFile(NamedTuple):
    """Token file opened for reading."""

    tokens: TokenArray
    """Tokens of all documents."""
    vocab: int
    tokenizer: Tokenizer
    folder: Path
    documents: int = 0
    digest: str = ""
    """SHA-256 of all that training reads of the file: its tokens, documents and tokenizer."""
    skipped: Mapping[str, Any] = {}
    """Records that were left out, by reason."""


class _Shards:
    """Shards of a folder on a disk, as blocks.

    checksums: those of all shards, one after another.
    """

    def __init__(
        self, folder: Path, count: int, dtype: np.dtype[Any], shard: int, checksums: bytes
    ):
        self.folder = folder
        self.type = block_type(dtype)
        self.checksums = checksums
        self.blocks = -(-count // BLOCK)
        self.per_shard = shard // BLOCK
        self.checked = np.zeros(len(checksums) // CHECKSUM, np.bool_)
        self.lock: _OpenFile | None = None
        """What holds the lock on the folder."""

    def __call__(self, first: int, stop: int) -> np.ndarray:
        """Returns the blocks [first, stop).

        Raises DataError for one that is not what was written.
        """
        pieces = [np.zeros(0, self.type)] if first >= stop else []
        while first < stop:
            last = min(stop, first + min(self.per_shard - first % self.per_shard, _MOST))
            pieces.append(self.piece(first, last - first))
            first = last
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def piece(self, first: int, count: int) -> np.ndarray:
        """Returns blocks of one shard."""
        number, inside = divmod(first, self.per_shard)
        name = shard_name(number)
        size = count * self.type.itemsize
        at = inside * self.type.itemsize
        try:
            if not self.checked[number]:
                self.check(name, number)
            blocks = np.frombuffer(self.fetch(name, at, size), self.type)
        except OSError as error:
            truth = f"{name} cannot be read: {reason_of(error)}"
            refusal = DataError(f"token file {self.folder}", truth, _AGAIN)
            raise by_class(error, refusal) from error
        except ValueError as error:
            raise DataError(f"token file {self.folder}", str(error), _AGAIN) from error
        wrong = np.flatnonzero(_sums(blocks, first) != blocks["sum"])
        if len(wrong) or len(blocks) < count:
            at += int(wrong[0] if len(wrong) else len(blocks)) * self.type.itemsize
            what = (
                f"bytes {at:,} to {at + self.type.itemsize - 1:,} of {name} are not what was "
                f"written"
            )
            raise DataError(f"token file {self.folder}", f"{what}: their checksum differs", _AGAIN)
        return blocks

    def check(self, name: str, number: int) -> None:
        """Compares the checksum of a shard that is read for the first time. Raises ValueError."""
        end = min(self.per_shard, self.blocks - number * self.per_shard) * self.type.itemsize
        found = self.fetch(name, end, CHECKSUM + 1)
        if len(found) != CHECKSUM:
            there = f"fewer than {end + CHECKSUM:,}" if len(found) < CHECKSUM else "more"
            raise ValueError(
                f"{name} has {there} bytes, and its blocks and checksum are {end + CHECKSUM:,}"
            )
        if found != self.checksums[number * CHECKSUM :][:CHECKSUM]:
            raise ValueError(
                f"{name} is not the shard of this place and token file: its checksum differs"
            )
        self.checked[number] = True

    def fetch(self, name: str, at: int, size: int) -> bytes:
        """Returns bytes of a shard. A handle with which a read fails for now is not used again."""
        return attempt(functools.partial(self._read, self.folder / name, at, size))

    def _read(self, file: Path, at: int, size: int) -> bytes:
        try:
            return os.pread(_open_file(self, file).number, size, at)
        except OSError:
            _open_file.cache_clear()
            raise


class _BucketShards(_Shards):
    """Shards in a bucket.

    What is read of them is kept in a local file: block N at the place N modulo its size.
    """

    def __init__(self, *args: Any, cache: Path):
        super().__init__(*args)
        self.slots = min(self.blocks, _CACHED // self.type.itemsize) | 1
        file = cache / "buckets" / f"{self.checksums[-CHECKSUM:].hex()}.blocks"
        file.parent.mkdir(parents=True, exist_ok=True)
        self.cache = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        weakref.finalize(self, os.close, self.cache)

    def piece(self, first: int, count: int) -> np.ndarray:
        size = count * self.type.itemsize
        at = first % self.slots * self.type.itemsize
        kept = os.pread(self.cache, size, at)
        if len(kept) == size:
            blocks = np.frombuffer(kept, self.type)
            # A place that was never written has the sum 0. The blocks of one place differ in their
            # numbers modulo 2^32, because `slots` is odd, and so in the sums of the same bytes.
            if np.all((_sums(blocks, first) == blocks["sum"]) & (blocks["sum"] != 0)):
                return blocks
        blocks = super().piece(first, count)
        try:
            os.pwrite(self.cache, blocks.tobytes(), at)
        except OSError as error:
            room = f"{self.slots * self.type.itemsize / 2**30:.1f} GiB"
            truth = f"{reason_of(error)}, and up to {room} of {self.folder} are kept there"
            refusal = DataError(
                "writing into the cache", truth, "a MESHWRIGHT_CACHE with more space"
            )
            raise by_class(error, refusal) from error
        return blocks

    def fetch(self, name: str, at: int, size: int) -> bytes:
        return bucket_path(self.folder / name).read_part(at, size)


class _OpenFile:
    """File that is open while something refers to this."""

    def __init__(self, file: Path):
        self.number = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


@functools.lru_cache(_OPEN)
def _open_file(owner: _Shards, file: Path) -> _OpenFile:
    """Opens a shard for its owner. Raises ValueError for a link that leaves the folder."""
    check_inside(owner.folder, [file])
    return _OpenFile(file)


def is_token_file(path: str | Path) -> bool:
    """Whether `path` is a folder that `tokenize` wrote, on a disk or in a bucket."""
    if in_bucket(path):
        return (path_of(path) / DESCRIPTION).is_file()
    file = os.path.join(path, DESCRIPTION)
    try:
        return is_file(file)
    except OSError as error:
        refusal = DataError(f"token file {path}", f"it cannot be read: {reason_of(error)}", _AGAIN)
        if by_class(error, refusal) is refusal:
            return False  # a folder that this user may not open is no token file of theirs
        raise by_class(error, refusal) from error


def open_tokens(folder: Path, cache: Path | None = None) -> TokenFile:
    """Opens the token file in `folder`. Raises DataError where it is damaged.

    cache: local folder that keeps what is read of a token file in a bucket.
    """
    try:
        lock = None if in_bucket(folder) else _hold(folder)
        record = _read_description(folder)
        dtype = _DTYPES[record["dtype"]]
        tokens = int(record["tokens"])
        documents = int(record["documents"])
        shards = int(record["shards"])
        shard_tokens = int(record["shard_tokens"])
        has_blocks = shard_tokens >= 1 and shard_tokens % BLOCK == 0
        if tokens < 1 or not has_blocks or shards != -(-tokens // shard_tokens):
            raise ValueError(f"{tokens} tokens are not {shards} shards of {shard_tokens} tokens")
        for name, expected in record["sha256"].items():
            if sha256_of(folder / name) != expected:
                raise ValueError(f"{name} is not what was written: its SHA-256 differs")
        checksums = _read_checksums(folder, shards)
        tokenizer = _read_tokenizer(folder, int(record["vocab"]))
        read: _Shards
        if in_bucket(folder):
            assert cache is not None
            read = _BucketShards(folder, tokens, dtype, shard_tokens, checksums, cache=cache)
        else:
            _check_complete(folder, shards)
            read = _Shards(folder, tokens, dtype, shard_tokens, checksums)
            read.lock = lock
        read.piece((shards - 1) * read.per_shard, 1)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
    ) as error:
        truth = f"it cannot be read: {reason_of(error)}"
        refusal = DataError(f"token file {folder}", truth, "tokenise again")
        raise by_class(error, refusal) from error
    hashes = {name: value for name, value in record["sha256"].items() if name != "shards.bin"}
    digest = checksum([record["dtype"], tokens, checksums[-CHECKSUM:].hex(), hashes])
    skipped = record["skipped"]
    contents = TokenArray(tokens, read)
    return TokenFile(contents, tokenizer.vocab, tokenizer, folder, documents, digest, skipped)


def _read_checksums(folder: Path, shards: int) -> bytes:
    """Reads the checksums of all shards, one after another.

    Raises ValueError for another number.
    """
    checksums = attempt((folder / "shards.bin").read_bytes)
    if len(checksums) != shards * CHECKSUM:
        truth = f"shards.bin has {len(checksums)} bytes, and {shards} shards take {CHECKSUM} each"
        raise ValueError(truth)
    return checksums


def _read_tokenizer(folder: Path, vocab: int) -> Tokenizer:
    """Reads the tokenizer. Raises ValueError for one of another vocabulary."""
    tokenizer = tokenizer_from_json(read_text(folder / "tokenizer.json", LARGE))
    if tokenizer.vocab != vocab:
        truth = f"its vocabulary is {vocab}, and its tokenizer has {tokenizer.vocab} tokens"
        raise ValueError(truth)
    return tokenizer


def _check_complete(folder: Path, shards: int) -> None:
    """Raises ValueError where a shard is missing."""
    present = set(attempt(functools.partial(os.listdir, folder)))
    absent = [name for name in map(shard_name, range(shards)) if name not in present]
    if absent:
        truth = f"{len(absent)} of {shards} shards are not there, the first is {absent[0]}"
        raise ValueError(truth)


def _hold(folder: Path) -> _OpenFile:
    """Holds a shared lock on a token file as long as the result lives.

    `meshwright cache` does not delete a file that is read.
    """
    lock = attempt(lambda: _OpenFile(folder / DESCRIPTION))
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock.number, fcntl.LOCK_SH)
    return lock


def _read_description(folder: Path) -> dict[str, Any]:
    """Reads `tokens.json`.

    Raises ValueError where it is not of this format, or names a file outside the folder.
    """
    record = read_json(folder / DESCRIPTION)
    if not isinstance(record, dict):
        raise ValueError("tokens.json is not an object")
    if record.get("format") != FORMAT:
        truth = f"tokens.json is of format {record.get('format')}, and this version reads {FORMAT}"
        again = (
            f"meshwright tokenize {shell_word(record.get('source'))} --tokenizer "
            f"{folder}/tokenizer.json"
        )
        raise DataError(f"token file {folder}", truth, f"{again} --out ANOTHER_FOLDER")
    if seal(record) != record:
        raise ValueError("tokens.json is not what was written: its checksum differs")
    names = tuple(record["sha256"])
    if (
        record.get("block") != BLOCK
        or not set(HASHED) <= set(names)
        or not isinstance(record["skipped"], dict)
    ):
        raise ValueError("tokens.json has no checksums")
    if any(Path(name).name != name or not _is_there(folder / name) for name in names):
        raise ValueError("tokens.json names a file outside the folder, or one that is not there")
    if not in_bucket(folder):
        check_inside(folder, (folder / name for name in (DESCRIPTION, *names)))
    return record


def _is_there(file: Path) -> bool:
    return file.is_file() if in_bucket(file) else is_file(file)


def shard_name(number: int) -> str:
    """Returns the name of a shard's file."""
    return f"tokens-{number:05d}.bin"
