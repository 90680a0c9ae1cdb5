"""Corpora: token files of one vocabulary, mixed by weight; text is tokenised once into the cache, by one process.

Hosts with a shared cache find the token files there; to the others process 0 sends them (`sharing`).
"""

import dataclasses
import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from meshwright.data.sources import open_source
from meshwright.data.tokenizers import Bytes, Tokenizer, build_tokenizer, is_learned, spec_identity
from meshwright.data.tokenizing import learn_tokenizer, tokenize
from meshwright.data.tokens import Progress, TokenFile, is_token_file, open_tokens
from meshwright.documents import parse_json
from meshwright.errors import DataError
from meshwright.storage.paths import in_bucket, path_of
from meshwright.storage.transfer import local_copy

_VERSION = "3"
"""First line of what a token file's name in the cache is the hash of. Formats 2 and 3 hold the same tokens."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One entry of `data.paths`, and its weight in the mixture."""

    path: str
    weight: float = 1.0


def parse_source(text: str) -> Source:
    """Parses `PATH` or `PATH=WEIGHT`. Raises DataError where the weight is not a positive number."""
    path, equals, weight = text.rpartition("=")
    if not equals or os.path.exists(text):
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
    paths: Sequence[str],
    spec: str,
    cache: Path,
    *,
    own: Path | None = None,
    bad_records: float = 0.0,
    text_field: str = "text",
    progress: Progress | None = None,
) -> Corpus:
    """Loads the token files of `paths` (each PATH or PATH=WEIGHT), with one vocabulary over all of them.

    own: tokenizer.json of a run that goes on; text that would now lead to another is tokenised with it.
    bad_records: largest share of records that may be skipped.  text_field: field or column with the text.  Where
    several processes compute together, process 0 tokenises and the others wait for it. Raises DataError where two token
    files were made with different tokenizers.
    """
    paths, spec = local_data(paths, spec, cache)
    sources = [parse_source(path) for path in paths]
    if not sources:
        raise DataError("training without text", "--data is empty", "--data PATH")
    texts = [source.path for source in sources if not is_token_file(source.path)]
    reading = _Reading(spec, cache, text_field, bad_records, progress)
    opened: dict[str, TokenFile] = {}

    def make() -> dict[str, Path]:
        opened.update(reading.tokenise(texts, own))
        return {path: file.folder for path, file in opened.items()}

    folders = share(cache, progress, make) if texts else {}
    files = tuple(opened.get(s.path) or open_tokens(folders.get(s.path, Path(s.path))) for s in sources)
    for file in files[1:]:
        if file.tokenizer.to_json() != files[0].tokenizer.to_json():
            raise DataError(
                f"mixing {files[0].folder} and {file.folder}",
                f"their tokenizers differ ({files[0].vocab} and {file.vocab} tokens)",
                "tokenise both with the same tokenizer file",
            )
    return Corpus(files, tuple(source.weight for source in sources))


def share(cache: Path, progress: Progress | None, make: Callable[[], dict[str, Path]]) -> dict[str, Path]:
    """Returns the token folders in `cache` that `make` returns in process 0, in every process (`share_folders`)."""
    # Asking for the number of processes first would start the devices.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return make()
    from meshwright.data.sharing import share_folders

    return share_folders(cache / "tokens", progress, make)


def vocab_of_corpus(
    paths: tuple[str, ...], spec: str, cache: Path, bad_records: float = 0.0, text_field: str = "text"
) -> int:
    """Returns the vocabulary size of `load_corpus`; reads text only where the tokenizer is learned from it."""
    paths, spec = local_data(paths, spec, cache)
    if not any(is_token_file(parse_source(path).path) for path in paths):
        if spec == "bytes":
            return Bytes().vocab
        if os.path.isfile(spec):
            return build_tokenizer(spec).vocab
    return load_corpus(paths, spec, cache, bad_records=bad_records, text_field=text_field).vocab


def local_data(paths: Sequence[str], spec: str, cache: Path) -> tuple[tuple[str, ...], str]:
    """Returns sources (each PATH or PATH=WEIGHT) and a tokenizer as they are on this host.

    What is in a bucket is copied into `cache`, and again where it has changed there; a token file's own checksums then
    verify it like any other. Raises StorageError.
    """

    def local(location: str) -> str:
        return str(local_copy(path_of(location), cache)) if in_bucket(location) else location

    def local_source(text: str) -> str:
        path, equals, weight = text.rpartition("=")
        return f"{local(path)}={weight}" if equals and "/" not in weight and in_bucket(text) else local(text)

    return tuple(map(local_source, paths)), local(spec)


@dataclasses.dataclass(frozen=True)
class _Reading:
    """How the text of a corpus is read, and where its tokens are kept."""

    spec: str
    cache: Path
    text_field: str
    bad_records: float
    progress: Progress | None

    def tokenise(self, paths: Sequence[str], own: Path | None) -> dict[str, TokenFile]:
        """Returns the token files of sources of text by path: from the cache, or tokenised into it."""
        spec, together = self.spec, len(paths) > 1 and is_learned(self.spec)
        learned = self._learned_file(paths) if together else None
        if own is not None and own.is_file():
            kept = build_tokenizer(str(own)).to_json()
            asked, kind = spec.partition(":")[0], parse_json(kept).get("kind", "bpe")
            # A file may have changed or gone since the run began: the run keeps its own.
            if asked in ("bytes", "chars", "bpe") and asked != kind:
                raise DataError(
                    f"going on with --data.tokenizer {spec}",
                    f"the run was trained with {kind}, and keeps its tokenizer",
                    "leave --data.tokenizer out",
                )
            if is_learned(spec):
                # The text may have changed since the vocabulary was learned from it. If not, its tokens are cached.
                folders = {path: self._folder_of(path, str(learned or spec)) for path in paths}
                if all(map(is_token_file, folders.values())):
                    cached = {path: open_tokens(folder) for path, folder in folders.items()}
                    if all(file.tokenizer.to_json() == kept for file in cached.values()):
                        return cached
                spec = str(own)
            elif (spec != "bytes" and not os.path.isfile(spec)) or build_tokenizer(spec).to_json() != kept:
                if os.path.isfile(spec):
                    truth = f"{spec} is not the tokenizer that the run was trained with; it goes on with {own}"
                    print(truth, file=sys.stderr)
                spec = str(own)
        elif learned is not None:
            if not learned.is_file():
                learn_tokenizer(paths, spec, self.text_field, self.bad_records, learned)
            spec = str(learned)
        return {path: self._load(path, spec) for path in paths}

    def _load(self, path: str, spec: str) -> TokenFile:
        folder = self._folder_of(path, spec)
        if is_token_file(folder):
            found = open_tokens(folder)
            if found.skipped.get("share", 0.0) <= self.bad_records:
                return found
            shutil.rmtree(folder)  # more records were skipped than is allowed now: refused like the text itself
        return tokenize(
            path, spec, folder, text_field=self.text_field, bad_records=self.bad_records, progress=self.progress
        )

    def _learned_file(self, paths: Sequence[str]) -> Path:
        """Returns the file of the tokenizer that is learned from all `paths` together."""
        key = "\n".join(self._folder_of(path, self.spec).name for path in paths)
        return self.cache / "tokenizers" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def _folder_of(self, path: str, spec: str) -> Path:
        """Returns the folder of the tokens of `path`: its name changes when the documents or the tokenizer do."""
        # Of a tokenizer's file its content, not its name or spaces: a run's copy of it finds the same tokens.
        lines = [_VERSION, spec_identity(spec), *open_source(path, self.text_field).fingerprint()]
        name = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:24]
        return self.cache / "tokens" / name
