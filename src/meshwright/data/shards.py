"""Writer of token files: shards of equal size, and a note after each from which an interrupted writing goes on."""

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from meshwright.data.tokens import BLOCK, FORMAT, HASHED, SKIPPED, checksum, sha256_of, shard_name
from meshwright.documents import read_json, write_atomically

SHARD_TOKENS = 2**27
"""Tokens of a shard: 256 MiB with two bytes each."""
PROGRESS = "progress.json"


@dataclasses.dataclass
class BlockSums:
    """CRC-32 of each block of a file that is written in pieces of any size."""

    sums: list[int] = dataclasses.field(default_factory=list)
    current: int = 0
    filled: int = 0

    def add(self, data: memoryview) -> None:
        """Adds the next bytes of the file."""
        while data:
            part = data[: BLOCK - self.filled]
            self.current, self.filled = zlib.crc32(part, self.current), self.filled + len(part)
            if self.filled == BLOCK:
                self.close()
            data = data[len(part) :]

    def close(self) -> None:
        """Ends the block in progress."""
        if self.filled:
            self.sums.append(self.current)
        self.current = self.filled = 0


class TokenWriter:
    """Writer of the tokens, their checksums and the ends of their documents into a folder.

    shard_tokens: whole blocks.  note: of `save_progress`, to go on after the shards that were whole; what was written
    behind them is written again. `shards` are written and safe on the disk, `tokens` and `documents` were added.
    Raises ValueError where the folder has less than the note names.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], shard_tokens: int = SHARD_TOKENS,
        note: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        start: Mapping[str, int] = note or {"shards": 0, "tokens": 0, "documents": 0}
        self.shards, self.tokens, self.documents = start["shards"], start["tokens"], start["documents"]
        size = shard_tokens * dtype.itemsize
        for number in range(self.shards):
            if (folder / shard_name(number)).stat().st_size != size:
                raise ValueError(f"{shard_name(number)} is not {size} bytes long")
        # The first document that is read again begins before the shard's border: what lies there is not written again.
        self._drop, self._filled = self.shards * shard_tokens - self.tokens, 0
        self._sums = BlockSums()
        self._shard: IO[bytes] | None = None
        self._ends = self._appending("ends.part", 8 * self.documents)
        self._sums_file = self._appending("sums.bin", 4 * self.shards * size // BLOCK)

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
            part = data[: self.shard_tokens - self._filled]
            view = memoryview(part).cast("B")
            self._shard.write(view)
            self._sums.add(view)
            self._filled += len(part)
            if self._filled == self.shard_tokens:
                self._close_shard()
            data = data[len(part) :]
        return self.shards > before

    def _close_shard(self) -> None:
        """Ends the shard in progress and waits until it is on the disk."""
        if self._shard is not None:
            self._sums.close()
            np.array(self._sums.sums, "<u4").tofile(self._sums_file)
            self._sums.sums.clear()
            _sync(self._shard)
            self._shard.close()
            self._shard, self._filled, self.shards = None, 0, self.shards + 1

    def save_progress(self, key: str, note: Mapping[str, Any]) -> None:
        """Notes that the shards so far are whole.

        key: changes when the text or an option does.  note: `tokens` and `documents` before the text that is read
        first when the writing goes on, and its place.
        """
        for file in (self._ends, self._sums_file):
            _sync(file)
        note = {"format": FORMAT, "key": key, "shards": self.shards, **note}
        write_atomically(self.folder / PROGRESS, json.dumps({**note, "checksum": checksum(note)}))

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

    def close(self) -> None:
        """Closes all files."""
        for file in (self._ends, self._sums_file, *([] if self._shard is None else [self._shard])):
            file.close()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def read_progress(folder: Path) -> dict[str, Any] | None:
    """Returns the note of an unfinished writing; None where there is none, or it is damaged."""
    try:
        note = read_json(folder / PROGRESS)
        if note.pop("checksum") != checksum(note) or note["format"] != FORMAT:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(note)


def write_description(folder: Path, record: Mapping[str, Any], *more: str) -> None:
    """Writes `tokens.json`, which makes a folder a token file. record: all but the checksums.  more: further files."""
    names = [*HASHED, *more, *([SKIPPED] if (folder / SKIPPED).is_file() else [])]
    sums = {name: sha256_of(folder / name) for name in names}
    record = {"format": FORMAT, **record, "block": BLOCK, "sha256": sums}
    write_atomically(folder / "tokens.json", json.dumps({**record, "checksum": checksum(record)}, indent=1))
