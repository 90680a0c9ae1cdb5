"""Token files: text tokenised once, then mapped into memory.

A folder with `tokens.bin` (uint16 or uint32, little-endian, documents one after another, each closed by the
tokenizer's `end`), `ends.npy` (int64, where each document ends) and `tokens.json` (what it is; written last).
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.sources import find_files, parse_source, read_documents
from meshwright.data.tokenizers import Tokenizer, build_tokenizer, tokenizer_from_json
from meshwright.errors import DataError

_FORMAT = 1


class TokenFile(NamedTuple):
    """tokens: memory-mapped, [all].  ends: int64 [documents], one past each document's last token."""

    tokens: np.ndarray
    ends: np.ndarray
    vocab: int
    tokenizer: Tokenizer
    folder: Path


def tokenize(path: str, spec: str, out: Path) -> TokenFile:
    """Tokenises the files of `path` with the tokenizer `spec` into the folder `out`.

    Raises DataError where there is no text.
    """
    files = find_files(path)
    tokenizer = build_tokenizer(spec, read_documents(files))
    dtype = np.uint16 if tokenizer.vocab <= 2**16 else np.uint32
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            ends = _write(scratch / "tokens.bin", path, files, tokenizer, dtype)
            np.save(scratch / "ends.npy", ends)
            (scratch / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
            told = {
                "format": _FORMAT,
                "dtype": np.dtype(dtype).name,
                "tokens": int(ends[-1]),
                "documents": len(ends),
                "vocab": tokenizer.vocab,
                "source": path,
                "tokenizer": spec,
            }
            (scratch / "tokens.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
            _move(scratch, out)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"writing tokens to {out}", f"{error.strerror or error}", "another folder, or more space"
        ) from error
    return open_tokens(out)


def _move(scratch: Path, out: Path) -> None:
    """Several processes may tokenise at once: whoever comes second keeps what the first one made."""
    try:
        os.replace(scratch, out)
    except OSError:
        if not (out / "tokens.json").exists():
            raise


def _write(file: Path, path: str, files: list[Path], tokenizer: Tokenizer, dtype: type) -> np.ndarray:
    ends: list[int] = []
    total = 0
    with file.open("wb") as sink:
        for text in read_documents(files):
            tokens: np.ndarray = np.append(tokenizer.encode(text), tokenizer.end).astype(dtype)
            sink.write(tokens.tobytes())
            total += len(tokens)
            ends.append(total)
    if not ends:
        raise DataError(
            f"--data {path}", f"its {len(files)} file(s) hold no text: all are empty", "a file with text in it"
        )
    return np.array(ends, np.int64)


def open_tokens(folder: Path) -> TokenFile:
    """The token file in `folder`. Raises DataError where it is damaged."""
    try:
        told = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        ends = np.load(folder / "ends.npy")
        tokenizer = tokenizer_from_json((folder / "tokenizer.json").read_text(encoding="utf-8"))
        dtype = np.dtype(told["dtype"])
        held = (folder / "tokens.bin").stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"token file {folder}", f"it cannot be read: {error}", "tokenise again") from error
    if held != told["tokens"] * dtype.itemsize or not len(ends) or ends[-1] != told["tokens"]:
        raise DataError(
            f"token file {folder}",
            f"tokens.bin has {held} bytes, and {told['tokens']} tokens of {dtype.itemsize} bytes are "
            f"{told['tokens'] * dtype.itemsize}",
            "tokenise again",
        )
    tokens: Any = np.memmap(folder / "tokens.bin", dtype, mode="r")
    return TokenFile(tokens, ends, int(told["vocab"]), tokenizer, folder)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token files of one vocabulary, and how often each is drawn."""

    files: tuple[TokenFile, ...]
    weights: tuple[float, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.files[0].tokenizer

    @property
    def vocab(self) -> int:
        return self.files[0].vocab


def load_corpus(paths: tuple[str, ...], spec: str, cache: Path) -> Corpus:
    """The token files of `paths` (each PATH or PATH=WEIGHT), with one vocabulary over all of them.

    Raises DataError where two token files were made with different tokenizers.
    """
    sources = [parse_source(path) for path in paths]
    if not sources:
        raise DataError("training without text", "--data is empty", "--data PATH")
    raw = [source.path for source in sources if not (Path(source.path) / "tokens.json").is_file()]
    if len(raw) > 1 and (spec == "chars" or spec.startswith("bpe:")):
        spec = str(_shared_tokenizer(raw, spec, cache))
    files = tuple(load_tokens(source.path, spec, cache) for source in sources)
    for file in files[1:]:
        if file.tokenizer.to_json() != files[0].tokenizer.to_json():
            raise DataError(
                f"mixing {files[0].folder} and {file.folder}",
                f"their tokenizers differ ({files[0].vocab} and {file.vocab} tokens)",
                "tokenise both with the same tokenizer file",
            )
    return Corpus(files, tuple(source.weight for source in sources))


def _shared_tokenizer(paths: list[str], spec: str, cache: Path) -> Path:
    """A tokenizer learned from all `paths` together, kept in `cache`."""
    told = "\n".join(_fingerprint(path, spec) for path in paths)
    file = cache / "tokenizers" / f"{hashlib.sha256(told.encode()).hexdigest()[:24]}.json"
    if not file.is_file():
        files = [file for path in paths for file in find_files(path)]
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(build_tokenizer(spec, read_documents(files)).to_json(), encoding="utf-8")
        os.replace(scratch, file)
    return file


def load_tokens(path: str, spec: str, cache: Path) -> TokenFile:
    """The tokens of `path`: a folder that `tokenize` wrote, or files, tokenised once into `cache`."""
    if (Path(path) / "tokens.json").is_file():
        return open_tokens(Path(path))
    folder = cache / "tokens" / _fingerprint(path, spec)
    return open_tokens(folder) if (folder / "tokens.json").is_file() else tokenize(path, spec, folder)


def _fingerprint(path: str, spec: str) -> str:
    """A name that changes when a file, its size or time, or the tokenizer does."""
    told = [str(_FORMAT), spec]
    if Path(spec).is_file():
        told.append(hashlib.sha256(Path(spec).read_bytes()).hexdigest())
    for file in find_files(path):
        status = file.stat()
        told.append(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:24]
