"""Writing of token files: shards, checksums and ends of documents, so that an interrupted writing can go on."""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from meshwright.data.tokens import BLOCK, FORMAT, HASHED, SKIPPED, shard_name
from meshwright.documents import read_json, seal, sha256_of, write_atomically

SHARD_TOKENS = 2**27
"""Tokens of a shard: 256 MiB with two bytes each."""
PROGRESS = "progress.json"


class TokenWriter:
    """Writer of the tokens, their checksums and the ends of their documents into a folder.

    shard_tokens: a multiple of a block.  note: of `save_progress`, to go on after the shards that were complete; what
    was written behind them is written again. `shards` are written and safe on the disk, `tokens` and `documents` were
    added. Raises ValueError where the folder has less than the note names.
    """

    def __init__(self, folder: Path, dtype: Any, shard_tokens: int = SHARD_TOKENS, note: dict[str, Any] | None = None):
        self.folder, self.dtype, self.shard_tokens = folder, np.dtype(dtype), shard_tokens
        self.shards, self.tokens, self.documents = (note[n] if note else 0 for n in ("shards", "tokens", "documents"))
        size = shard_tokens * self.dtype.itemsize
        for number in range(self.shards):
            if (folder / shard_name(number)).stat().st_size != size:
                raise ValueError(f"{shard_name(number)} is not {size} bytes long")
        # The first document that is read again begins before the shard's border; those tokens are not written again.
        self._drop, self._filled = self.shards * shard_tokens - self.tokens, 0
        self._crc, self._in_block = 0, 0
        self._shard: IO[bytes] | None = None
        self._ends = self._appending("ends.part", 8 * self.documents)
        self._sums = self._appending("sums.bin", 4 * self.shards * size // BLOCK)

    def _appending(self, name: str, size: int) -> IO[bytes]:
        """Opens a file to write behind its first `size` bytes. Raises ValueError where it has fewer."""
        file = self.folder / name
        file.touch()
        if file.stat().st_size < size:
            raise ValueError(f"{name} has fewer than {size} bytes")
        os.truncate(file, size)
        return file.open("ab")

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> bool:
        """Adds documents: their tokens, and the number of tokens of each. Returns whether a shard was completed."""
        np.add(np.cumsum(lengths), self.tokens, dtype="<i8").tofile(self._ends)
        self.tokens += len(tokens)
        self.documents += len(lengths)
        skip = min(self._drop, len(tokens))
        self._drop -= skip
        data, before = tokens[skip:].astype(self.dtype), self.shards
        while len(data):
            if self._shard is None:
                self._shard = (self.folder / shard_name(self.shards)).open("wb")
            room = (BLOCK - self._in_block) // self.dtype.itemsize  # a shard ends with a block
            view = memoryview(data[:room]).cast("B")
            self._shard.write(view)
            self._crc, self._in_block = zlib.crc32(view, self._crc), self._in_block + len(view)
            self._filled += len(data[:room])
            if self._in_block == BLOCK:
                self._close_block()
            if self._filled == self.shard_tokens:
                self._close_shard()
            data = data[room:]
        return self.shards > before

    def _close_block(self) -> None:
        if self._in_block:
            np.array([self._crc], "<u4").tofile(self._sums)
        self._crc = self._in_block = 0

    def _close_shard(self) -> None:
        """Ends the shard in progress and waits until it is on the disk."""
        if self._shard is not None:
            self._close_block()
            _sync(self._shard)
            self._shard.close()
            self._shard, self._filled, self.shards = None, 0, self.shards + 1

    def save_progress(self, key: str, note: Mapping[str, Any]) -> None:
        """Notes that the shards so far are complete.

        key: changes when the text or an option does.  note: `tokens` and `documents` before the text that is read
        first when the writing goes on, and its place.
        """
        for file in (self._ends, self._sums):
            _sync(file)
        note = seal({"format": FORMAT, "key": key, "shards": self.shards, **note})
        write_atomically(self.folder / PROGRESS, json.dumps(note))

    def finish(self) -> None:
        """Completes the shards, `sums.bin` and `ends.npy`. The description makes a token file of them."""
        self._close_shard()
        self.close()
        source = np.memmap(self.folder / "ends.part", "<i8", mode="r")
        target = np.lib.format.open_memmap(self.folder / "ends.npy", "w+", np.dtype("<i8"), source.shape)
        for start in range(0, len(source), 2**20):
            target[start : start + 2**20] = source[start : start + 2**20]
        target.flush()
        (self.folder / "ends.part").unlink()

    def description(self, vocab: int, **more: Any) -> dict[str, Any]:
        """Returns the description of what was written, for `write_description`."""
        counts = {"dtype": self.dtype.name, "tokens": self.tokens, "documents": self.documents}
        return {**counts, "vocab": vocab, "shards": self.shards, "shard_tokens": self.shard_tokens, **more}

    def close(self) -> None:
        """Closes all files."""
        for file in (self._ends, self._sums, *([] if self._shard is None else [self._shard])):
            file.close()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def read_progress(folder: Path) -> dict[str, Any] | None:
    """Returns the note of an unfinished writing; None where there is none, or it is damaged."""
    try:
        note = read_json(folder / PROGRESS)
        return dict(note) if seal(note) == note and note["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_description(folder: Path, record: Mapping[str, Any], *more: str) -> None:
    """Writes `tokens.json`, which makes a folder a token file. record: all but the checksums.  more: further files."""
    names = [*HASHED, *more, *([SKIPPED] if (folder / SKIPPED).is_file() else [])]
    sums = {name: sha256_of(folder / name) for name in names}
    record = seal({"format": FORMAT, **record, "block": BLOCK, "sha256": sums})
    write_atomically(folder / "tokens.json", json.dumps(record, indent=1))
