"""Tokenisation: text into token files, in the cache or in a folder of the user's."""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.records import Records
from meshwright.data.sources import Documents, open_source
from meshwright.data.tokenizers import Tokenizer
from meshwright.data.tokens import BLOCK, FORMAT, HASHED, TokenFile, checksum, open_tokens, sha256_of
from meshwright.data.vocabulary import build_tokenizer
from meshwright.documents import write_atomically
from meshwright.errors import DataError


def tokenize(path: str, spec: str, out: Path, *, bad_records: float = 0.0) -> TokenFile:
    """Tokenises the source `path` with the tokenizer `spec` into the folder `out`.

    bad_records: largest share of records that may be skipped. Raises DataError where there is no text, where a record
    is bad, or where `out` cannot be written.
    """
    source = open_source(path)
    tokenizer = build_tokenizer(spec, source.read(Records(path, bad_records)))
    dtype = np.dtype("<u2" if tokenizer.vocab <= 2**16 else "<u4")
    records = Records(path, bad_records)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            ends = _write(scratch, path, source, tokenizer, dtype, records)
            np.save(scratch / "ends.npy", ends)
            (scratch / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
            description = {
                "dtype": "uint16" if dtype.itemsize == 2 else "uint32", "tokens": int(ends[-1]),
                "documents": len(ends), "vocab": tokenizer.vocab, "source": path, "tokenizer": spec,
                "skipped": records.summary(),
            }  # fmt: skip
            write_description(scratch, description)
            _move(scratch, out)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"writing tokens to {out}", f"{error.strerror or error}", "another folder, or more space"
        ) from error
    return open_tokens(out)


def _move(scratch: Path, out: Path) -> None:
    """Moves a finished folder into place; where another process was first, its folder stays."""
    try:
        os.replace(scratch, out)
    except OSError:
        if not (out / "tokens.json").exists():
            raise


@dataclasses.dataclass
class BlockSums:
    """CRC-32 of each block of a file that is written in pieces of any size."""

    sums: list[int] = dataclasses.field(default_factory=list)
    current: int = 0
    filled: int = 0

    def add(self, data: bytes) -> None:
        """Adds the next bytes of the file."""
        view = memoryview(data)
        while view:
            part = view[: BLOCK - self.filled]
            self.current, self.filled = zlib.crc32(part, self.current), self.filled + len(part)
            if self.filled == BLOCK:
                self.close()
            view = view[len(part) :]

    def close(self) -> None:
        """Ends the block in progress."""
        if self.filled:
            self.sums.append(self.current)
        self.current = self.filled = 0

    def write(self, file: Path) -> None:
        """Writes the sums of all blocks."""
        self.close()
        np.array(self.sums, "<u4").tofile(file)


def _write(
    folder: Path, path: str, source: Documents, tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger],
    records: Records,
) -> np.ndarray:  # fmt: skip
    """Writes the tokens and their checksums; returns where each document ends."""
    ends: list[int] = []
    total, sums = 0, BlockSums()
    with (folder / "tokens.bin").open("wb") as output:
        for text in source.read(records):
            tokens = np.append(tokenizer.encode(text), tokenizer.end)
            if tokens.max() >= tokenizer.vocab or tokens.min() < 0:
                raise DataError(
                    f"--data {path}", f"its tokenizer gives token {tokens.max()} of {tokenizer.vocab}",
                    "a tokenizer whose tokens are numbered without gaps",
                )  # fmt: skip
            data = tokens.astype(dtype).tobytes()
            output.write(data)
            sums.add(data)
            total += len(tokens)
            ends.append(total)
    if not ends:
        raise DataError(f"--data {path}", f"{source} hold no text: all are empty", "a source with text in it")
    sums.write(folder / "sums.bin")
    return np.array(ends, np.int64)


def load_text(
    paths: Sequence[str], spec: str, cache: Path, own: Path | None, bad_records: float
) -> dict[str, TokenFile]:  # fmt: skip
    """Returns the token files of sources of text by path: from `cache`, or tokenised into it.

    own, bad_records: as of `load_corpus`.
    """
    if own is None or not own.is_file():
        return _load_all(paths, spec, cache, bad_records)
    kept = build_tokenizer(str(own), iter(())).to_json()
    if not _is_learned(spec):
        same = (spec == "bytes" or Path(spec).is_file()) and build_tokenizer(spec, iter(())).to_json() == kept
        return _load_all(paths, spec if same else str(own), cache, bad_records)
    # The text may have changed since the vocabulary was learned from it. Where it has not, its tokens are in the cache.
    cached = [_cached(path, _shared_name(paths, spec, cache) if len(paths) > 1 else spec, cache) for path in paths]
    if all(file is not None and file.tokenizer.to_json() == kept for file in cached):
        return dict(zip(paths, cached, strict=True))  # type: ignore[arg-type]
    return _load_all(paths, str(own), cache, bad_records)


def _is_learned(spec: str) -> bool:
    return spec == "chars" or spec.startswith("bpe:")


def _load_all(paths: Sequence[str], spec: str, cache: Path, bad_records: float) -> dict[str, TokenFile]:
    if len(paths) > 1 and _is_learned(spec):
        spec = str(_shared_tokenizer(paths, spec, cache, bad_records))
    return {path: load_tokens(path, spec, cache, bad_records=bad_records) for path in paths}


def load_tokens(path: str, spec: str, cache: Path, *, bad_records: float = 0.0) -> TokenFile:
    """Loads the tokens of a source of text, tokenised once into `cache`.

    A file in the cache that skipped a larger share of records than is allowed now is refused like the text itself.
    """
    found = _cached(path, spec, cache)
    if found is None or found.skipped.get("share", 0.0) > bad_records:
        if found is not None:
            shutil.rmtree(found.folder)
        return tokenize(path, spec, cache / "tokens" / _fingerprint(path, spec), bad_records=bad_records)
    return found


def _cached(path: str, spec: str, cache: Path) -> TokenFile | None:
    folder = cache / "tokens" / _fingerprint(path, spec)
    return open_tokens(folder) if (folder / "tokens.json").is_file() else None


def _shared_name(paths: Sequence[str], spec: str, cache: Path) -> str:
    """Returns the file of the tokenizer that is learned from all `paths` together."""
    key = "\n".join(_fingerprint(path, spec) for path in paths)
    return str(cache / "tokenizers" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json")


def _shared_tokenizer(paths: Sequence[str], spec: str, cache: Path, bad_records: float) -> Path:
    """Returns the file of a tokenizer learned from all `paths` together, kept in `cache`."""
    file = Path(_shared_name(paths, spec, cache))
    if not file.is_file():
        documents = (text for path in paths for text in open_source(path).read(Records(path, bad_records)))
        text = build_tokenizer(spec, documents).to_json()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text)
        except OSError as error:
            raise DataError(f"writing {file}", f"{error.strerror or error}", "another MESHWRIGHT_CACHE") from error
    return file


def _fingerprint(path: str, spec: str) -> str:
    """Returns a name that changes when the documents of `path` or the tokenizer do."""
    # Of a file its tokenizer, not its name or its spaces: a run's copy of it finds the same tokens.
    parts = [str(FORMAT), build_tokenizer(spec, iter(())).to_json() if Path(spec).is_file() else spec]
    parts += open_source(path).fingerprint()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def write_description(folder: Path, record: dict[str, Any], *more: str) -> None:
    """Writes `tokens.json`, which makes a folder a token file. record: all but the checksums.  more: further files."""
    sums = {name: sha256_of(folder / name) for name in (*HASHED, *more)}
    record = {"format": FORMAT, **record, "block": BLOCK, "sha256": sums}
    (folder / "tokens.json").write_text(
        json.dumps({**record, "checksum": checksum(record)}, indent=1), encoding="utf-8"
    )
