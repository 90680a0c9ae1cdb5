"""Token files in the cache: text is tokenised once, by one process of a run."""

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from meshwright.data.reading import Progress, Reading
from meshwright.data.records import Records
from meshwright.data.sources import open_source
from meshwright.data.tokenizing import tokenize
from meshwright.data.tokens import TokenFile, open_tokens
from meshwright.data.vocabulary import build_tokenizer, is_learned
from meshwright.documents import parse_json, write_atomically
from meshwright.errors import DataError

_VERSION = "3"
"""First line of what a token file's name in the cache is the hash of. Formats 2 and 3 hold the same tokens."""


def load_text(
    paths: Sequence[str], spec: str, cache: Path, own: Path | None, reading: Reading
) -> dict[str, TokenFile]:  # fmt: skip
    """Returns the token files of sources of text by path: from `cache`, or tokenised into it.

    own: as of `load_corpus`. Of several processes that compute together, process 0 does it, and the others wait.
    """
    # Asking for the number of processes first would start the devices.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return _load(paths, spec, cache, own, reading)
    from meshwright.data.host_tokens import share_token_files  # runs on one host need none of it

    return share_token_files(cache / "tokens", reading.progress, lambda: _load(paths, spec, cache, own, reading))


def _load(
    paths: Sequence[str], spec: str, cache: Path, own: Path | None, reading: Reading
) -> dict[str, TokenFile]:  # fmt: skip
    if own is None or not own.is_file():
        return _load_all(paths, spec, cache, reading)
    kept = build_tokenizer(str(own), iter(())).to_json()
    _check_kind(spec, kept)
    if not is_learned(spec):
        same = (spec == "bytes" or os.path.isfile(spec)) and build_tokenizer(spec, iter(())).to_json() == kept
        if not same and os.path.isfile(spec):
            print(f"{spec} is not the tokenizer that the run was trained with; it goes on with {own}", file=sys.stderr)
        return _load_all(paths, spec if same else str(own), cache, reading)
    # The text may have changed since the vocabulary was learned from it. Where it has not, its tokens are in the cache.
    field = reading.text_field
    name = _shared_name(paths, spec, cache, field) if len(paths) > 1 else spec
    cached = [_cached(path, name, cache, field) for path in paths]
    if all(file is not None and file.tokenizer.to_json() == kept for file in cached):
        return dict(zip(paths, cached, strict=True))  # type: ignore[arg-type]
    return _load_all(paths, str(own), cache, reading)


def _check_kind(spec: str, kept: str) -> None:
    """Raises DataError where a run that goes on has a tokenizer of another kind than `spec`.

    A file may have changed or gone since the run began: the run keeps its own.
    """
    asked, kind = spec.partition(":")[0], parse_json(kept).get("kind", "bpe")
    if asked in ("bytes", "chars", "bpe") and asked != kind:
        raise DataError(
            f"going on with --data.tokenizer {spec}", f"the run was trained with {kind}, and keeps its tokenizer",
            "leave --data.tokenizer out",
        )  # fmt: skip


def _load_all(paths: Sequence[str], spec: str, cache: Path, reading: Reading) -> dict[str, TokenFile]:
    if len(paths) > 1 and is_learned(spec):
        spec = str(_shared_tokenizer(paths, spec, cache, reading))
    return {
        path: load_tokens(
            path, spec, cache, text_field=reading.text_field, bad_records=reading.bad_records, progress=reading.progress
        )
        for path in paths
    }


def load_tokens(
    path: str, spec: str, cache: Path, *, text_field: str = "text", bad_records: float = 0.0,
    progress: Progress | None = None,
) -> TokenFile:  # fmt: skip
    """Loads the tokens of a source of text, tokenised once into `cache`.

    A file in the cache that skipped a larger share of records than is allowed now is refused like the text itself.
    """
    folder = cache / "tokens" / _fingerprint(path, spec, text_field)
    if (folder / "tokens.json").is_file():
        found = open_tokens(folder)
        if found.skipped.get("share", 0.0) <= bad_records:
            return found
        shutil.rmtree(folder)
    return tokenize(path, spec, folder, text_field=text_field, bad_records=bad_records, progress=progress)


def _cached(path: str, spec: str, cache: Path, field: str) -> TokenFile | None:
    folder = cache / "tokens" / _fingerprint(path, spec, field)
    return open_tokens(folder) if (folder / "tokens.json").is_file() else None


def _shared_name(paths: Sequence[str], spec: str, cache: Path, field: str) -> str:
    """Returns the file of the tokenizer that is learned from all `paths` together."""
    key = "\n".join(_fingerprint(path, spec, field) for path in paths)
    return str(cache / "tokenizers" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json")


def _shared_tokenizer(paths: Sequence[str], spec: str, cache: Path, reading: Reading) -> Path:
    """Returns the file of a tokenizer learned from all `paths` together, kept in `cache`."""
    file, field = Path(_shared_name(paths, spec, cache, reading.text_field)), reading.text_field
    if not file.is_file():
        documents = (
            text for path in paths for text in open_source(path, field).read(Records(path, reading.bad_records))
        )
        text = build_tokenizer(spec, documents).to_json()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text)
        except OSError as error:
            raise DataError(f"writing {file}", f"{error.strerror or error}", "another MESHWRIGHT_CACHE") from error
    return file


def _fingerprint(path: str, spec: str, field: str) -> str:
    """Returns a name that changes when the documents of `path` or the tokenizer do."""
    # Of a file its tokenizer, not its name or its spaces: a run's copy of it finds the same tokens.
    parts = [_VERSION, build_tokenizer(spec, iter(())).to_json() if os.path.isfile(spec) else spec]
    parts += open_source(path, field).fingerprint()
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:24]
