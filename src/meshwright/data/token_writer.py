"""Writing of token files: shards and their checksums, so that an interrupted writing can go on."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from meshwright.data.tokens import (
    BLOCK,
    CHECKSUM,
    DESCRIPTION,
    FORMAT,
    HASHED,
    block_type,
    make_blocks,
    shard_name,
)
from meshwright.documents import read_json, seal
from meshwright.hardware.agreement import note_progress
from meshwright.storage.attempts import may_pass
from meshwright.storage.transfer import sha256_of
from meshwright.storage.writing import open_file, write_atomically

SHARD_TOKENS = 2**27
"""Tokens of a shard: 256 MiB with two bytes each."""
UNIT = 2**17
"""Tokens that are written at a time: shards have a whole number of units."""
PROGRESS = "progress.json"


class TokenWriter:
    """Writer of tokens and the ends of their documents into the shards of a folder.

    shard_tokens: a multiple of `UNIT`.  note: of `save_progress`, to go on after the shards that
    were complete; what was written behind them is written again. `shards` are written and safe on
    the disk, `tokens` and `documents` were added. Raises ValueError where the folder has less than
    the note names.
    """

    def __init__(
        self,
        folder: Path,
        dtype: Any,
        shard_tokens: int = SHARD_TOKENS,
        note: dict[str, Any] | None = None,
    ):
        note = note or {"shards": 0, "tokens": 0, "documents": 0}
        self.folder = folder
        self.dtype = np.dtype(dtype)
        self.shard_tokens = shard_tokens
        self.shards = note["shards"]
        self.tokens = note["tokens"]
        self.documents = note["documents"]
        size = shard_tokens // BLOCK * block_type(self.dtype).itemsize
        self._checksums = [self._checksum(number, size) for number in range(self.shards)]
        # The first document that is read again begins before the shard's border; those tokens are
        # not written again.
        self._drop = self.shards * shard_tokens - self.tokens
        self._filled = 0
        self._chain = self._checksums[-1] if self._checksums else b""
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._shard: IO[bytes] | None = None

    def _checksum(self, number: int, size: int) -> bytes:
        """Returns the checksum of a complete shard, whose blocks take `size` bytes.

        Raises ValueError for another.
        """
        file = self.folder / shard_name(number)
        if file.stat().st_size != size + CHECKSUM:
            raise ValueError(f"{file.name} is not {size + CHECKSUM} bytes long")
        with file.open("rb") as opened:
            opened.seek(size)
            return opened.read()

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> bool:
        """Adds documents: their tokens, and the number of tokens of each.

        Returns whether a shard was completed.
        """
        last = np.zeros(len(tokens), np.bool_)
        last[np.cumsum(lengths) - 1] = True
        self.tokens += len(tokens)
        self.documents += len(lengths)
        skip, before = min(self._drop, len(tokens)), self.shards
        self._drop -= skip
        self._waiting.append((tokens[skip:], last[skip:]))
        note_progress()
        self._write(UNIT)
        return self.shards > before

    def _write(self, least: int) -> None:
        """Writes what waits, in units, while it is `least` tokens or more."""
        if sum(len(tokens) for tokens, _ in self._waiting) < least:
            return
        tokens, last = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        while len(tokens) >= least:
            if self._shard is None:
                self._shard = open_file(self.folder / shard_name(self.shards), "wb")
            first = (self.shards * self.shard_tokens + self._filled) // BLOCK
            blocks = make_blocks(tokens[:UNIT], last[:UNIT], self.dtype, first)
            self._shard.write(blocks.tobytes())
            # A unit does not depend on the size of a shard, so what the chain comes to does not
            # either.
            self._chain = hashlib.sha256(self._chain + blocks["sum"].tobytes()).digest()
            self._filled += len(tokens[:UNIT])
            if self._filled == self.shard_tokens:
                self._close_shard()
            tokens, last = tokens[UNIT:], last[UNIT:]
        self._waiting = [(tokens, last)]

    def _close_shard(self) -> None:
        """Ends the shard in progress and waits until it is on the disk."""
        if self._shard is not None:
            self._shard.write(self._chain)
            self._shard.flush()
            os.fsync(self._shard.fileno())
            self._shard.close()
            self._checksums.append(self._chain)
            self._shard = None
            self._filled = 0
            self.shards += 1

    def save_progress(self, key: str, note: Mapping[str, Any]) -> None:
        """Notes that the shards so far are complete.

        key: changes when the text or an option does.  note: `tokens` and `documents` before the
        text that is read first when the writing goes on, and its place.
        """
        note = seal({"format": FORMAT, "key": key, "shards": self.shards, **note})
        write_atomically(self.folder / PROGRESS, json.dumps(note))

    def finish(self) -> None:
        """Completes the shards, and writes `shards.bin`.

        The description makes a token file of them.
        """
        self._write(1)
        self._close_shard()
        with open_file(self.folder / "shards.bin", "wb") as checksums:
            checksums.write(b"".join(self._checksums))

    def description(self, vocab: int, **more: Any) -> dict[str, Any]:
        """Returns the description of what was written, for `write_description`."""
        counts = {"dtype": self.dtype.name, "tokens": self.tokens, "documents": self.documents}
        return {
            **counts,
            "vocab": vocab,
            "shards": self.shards,
            "shard_tokens": self.shard_tokens,
            **more,
        }

    def close(self) -> None:
        """Closes the shard in progress."""
        if self._shard is not None:
            self._shard.close()


def read_progress(folder: Path) -> dict[str, Any] | None:
    """Returns the note of an unfinished writing; None where there is none, or it is damaged.

    Raises OSError where it cannot be read for now: what was written is not begun again for that.
    """
    try:
        note = read_json(folder / PROGRESS)
        return dict(note) if seal(note) == note and note["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if may_pass(error):
            raise
        return None


def write_description(folder: Path, record: Mapping[str, Any], *more: str) -> None:
    """Writes `tokens.json`, which makes a folder a token file.

    record: all but the checksums.  more: further files.
    """
    sums = {name: sha256_of(folder / name) for name in (*HASHED, *more)}
    record = seal({"format": FORMAT, **record, "block": BLOCK, "sha256": sums})
    write_atomically(folder / DESCRIPTION, json.dumps(record, indent=1))
