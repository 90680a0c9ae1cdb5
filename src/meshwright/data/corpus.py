"""Corpora: token files of one vocabulary, mixed by weight.

One process tokenizes text, once, into the cache.
The other processes find the token files in the same cache, or the run is refused. Token files in a
bucket need neither.
"""

import dataclasses
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.data.megatron import check_pair, is_megatron, open_megatron
from meshwright.data.sources import check_skipped, open_source
from meshwright.data.tokenizers import Bytes, Tokenizer, build_tokenizer, is_learned, spec_identity
from meshwright.data.tokenizing import learn_tokenizer, tokenize
from meshwright.data.tokens import Progress, TokenFile, is_token_file, open_tokens
from meshwright.documents import parse_json
from meshwright.errors import DataError, shell_word
from meshwright.hardware.agreement import answer_of_the_first
from meshwright.signs import waiting
from meshwright.storage.paths import in_bucket, path_of, place_of
from meshwright.storage.transfer import local_copy
from meshwright.trust import derive

Check = Callable[[Tokenizer, str], None]
"""`(tokenizer, its file or the folder of its tokens)`; raises where the run cannot have it."""
_VERSION = "4"
"""First line of what a token file's name in the cache is the hash of."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One entry of `data.paths`, and its weight in the mixture."""

    path: str
    weight: float = 1.0
    is_weighted: bool = False
    """Whether the entry has a weight."""


def parse_source(text: str) -> Source:
    """Parses `PATH` or `PATH=WEIGHT`.

    Raises DataError where the weight is not a positive number.
    """
    path, equals, weight = text.rpartition("=")
    if not equals or os.path.exists(text):
        return Source(text)
    try:
        value = float(weight)
    except ValueError:
        return Source(text)
    if not 0 < value < float("inf"):
        raise DataError(f"--data {text}", f"the weight {weight} is not positive", f"{path}=1")
    return Source(derive(text, path), value, is_weighted=True)


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
        """SHA-256 of the tokenizer, and of what training reads of each source, with its weight.

        They are JSON values.
        """
        tokenizer = hashlib.sha256(self.tokenizer.to_json().encode()).hexdigest()
        sources = [
            [file.digest, weight] for file, weight in zip(self.files, self.weights, strict=True)
        ]
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
    check: Check = lambda tokenizer, name: None,
) -> Corpus:
    """Loads the token files of `paths`, with one vocabulary over all of them.

    Each path is PATH or PATH=WEIGHT.
    own: tokenizer.json of a run that goes on; text that would now lead to another is tokenised with
    it.
    bad_records: largest share of records that may be skipped.  text_field: field or column with the
    text.  Where several processes compute together, process 0 tokenises and the others wait for it.
    check: called in process 0 with each tokenizer and its name, before a text is tokenised.
    Raises DataError where two token files were made with different tokenizers.
    """
    sources = [parse_source(path) for path in paths]
    if not sources:
        raise DataError("training without text", "--data is empty", "--data PATH")
    paths = [source.path for source in sources]
    reading = _Reading(local_text(spec, cache), cache, text_field, bad_records, progress, check)
    folders = share(paths, cache, progress, functools.partial(reading.make, spec, paths, own))
    files = tuple(reading.open(folders[path], own) for path in paths)
    for file in files[1:]:
        if file.tokenizer.to_json() != files[0].tokenizer.to_json():
            raise DataError(
                f"mixing {files[0].folder} and {file.folder}",
                f"their tokenizers differ ({files[0].vocab} and {file.vocab} tokens)",
                "tokenise both with the same tokenizer file",
            )
    return Corpus(files, tuple(source.weight for source in sources))


def share(
    paths: Sequence[str],
    cache: Path,
    progress: Progress | None,
    make: Callable[[], dict[str, Path]],
) -> dict[str, Path]:
    """Returns the token folder of each of `paths`, the same in every process.

    It is the path itself, or what process 0 made of it.
    make: returns the token folders, in the cache, that process 0 makes of texts. What it raises is
    raised in all.
    Raises DataError in all where a process does not see a folder.
    """
    # Asking for the number of processes first would start the devices.
    several = jax.distributed.is_initialized() and jax.process_count() > 1
    if (
        several
        and progress is not None
        and jax.process_index()
        and not all(map(is_tokenised, paths))
    ):
        progress.write("waiting for process 0, which tokenises")

    name_folders = functools.partial(_names_of, make)
    names = answer_of_the_first(name_folders) if several else name_folders()
    folders = {path: path_of(path) for path in paths}
    folders |= {path: cache / "tokens" / name for path, name in names.items()}
    if not several:
        return folders
    mine = np.array([not is_tokenised(folder) for folder in folders.values()])
    with waiting("the devices"):
        absent = multihost_utils.process_allgather(mine)
    for path, without in zip(folders, map(np.flatnonzero, absent.T), strict=True):
        if len(without):
            raise DataError(
                f"--data {path} on {jax.process_count()} hosts",
                f"process 0 reads its tokens in {folders[path]}, which {len(without)} hosts do "
                f"not see, the "
                f"first is host {without[0]}",
                f"`meshwright tokenize {shell_word(path)} --out s3://BUCKET/FOLDER` and --data "
                f"s3://BUCKET/FOLDER, which every "
                "host reads; or MESHWRIGHT_CACHE in a folder that all hosts share; or that folder "
                "on every host",
            )
    return folders


def _names_of(make: Callable[[], dict[str, Path]]) -> dict[str, str]:
    """Returns the names of the folders that `make` makes."""
    return {path: folder.name for path, folder in make().items()}


def vocab_of_corpus(
    paths: tuple[str, ...],
    spec: str,
    cache: Path,
    bad_records: float = 0.0,
    text_field: str = "text",
) -> int:
    """Returns the vocabulary size of `load_corpus`.

    Text is read only if the tokenizer is learned from it.
    """
    spec = local_text(spec, cache)
    if not any(is_tokenised(parse_source(path).path) for path in paths):
        if spec == "bytes":
            return Bytes().vocab
        if os.path.isfile(spec):
            return build_tokenizer(spec).vocab
    return load_corpus(paths, spec, cache, bad_records=bad_records, text_field=text_field).vocab


def is_tokenised(path: str | Path) -> bool:
    """Whether `path` has tokens and not text."""
    return is_token_file(path) or is_megatron(path)


def local_text(location: str, cache: Path) -> str:
    """Returns a text or a tokenizer as it is on this host: copied from a bucket into `cache`.

    Raises StorageError.
    """
    return str(local_copy(path_of(location), cache)) if in_bucket(location) else place_of(location)


def _is_kept(own: Path | None) -> bool:
    """Whether an earlier start of the run kept its tokenizer."""
    return own is not None and own.is_file()


@dataclasses.dataclass(frozen=True)
class _Reading:
    """How the text of a corpus is read, and where its tokens are kept."""

    spec: str
    cache: Path
    text_field: str
    bad_records: float
    progress: Progress | None
    check: Check

    def make(self, name: str, paths: Sequence[str], own: Path | None) -> dict[str, Path]:
        """Returns the token folders of those sources that are text, and checks all tokenizers.

        name: the tokenizer as the run names it.
        """
        copies = {}
        for path in paths:
            check_pair(path)
            if is_token_file(path):
                file = path_of(path) / "tokenizer.json"
                self.check(build_tokenizer(str(file)), path)
            elif is_megatron(path):
                self.check(self.tokenizer_of_tokens(path, own), name)
            else:
                copies[path] = local_text(path, self.cache)
        if not copies:
            return {}
        files = self.tokenise(list(copies.values()), own)
        return {path: files[copy].folder for path, copy in copies.items()}

    def tokenise(self, paths: Sequence[str], own: Path | None) -> dict[str, TokenFile]:
        """Returns the token files of sources of text by path, from the cache or made into it."""
        spec = self._kept(own)
        if not _is_kept(own) and is_learned(spec):
            spec = str(self._learned(paths))
        self.check(build_tokenizer(spec), self.spec)
        return {path: self._load(path, spec) for path in paths}

    def open(self, folder: Path, own: Path | None) -> TokenFile:
        """Opens tokens: a token file, or a Megatron dataset with the tokenizer of the run."""
        if is_token_file(folder):
            return open_tokens(folder, self.cache)
        return open_megatron(folder, self.tokenizer_of_tokens(folder, own))

    def tokenizer_of_tokens(self, path: str | Path, own: Path | None) -> Tokenizer:
        """Returns the tokenizer of tokens that have none with them.

        Raises DataError where the run learns its tokenizer from text.
        """
        spec = self._kept(own)
        if is_learned(spec):
            raise DataError(
                f"--data {path} with --data.tokenizer {spec}",
                "a Megatron dataset has tokens and no text, of which no tokenizer can be learned",
                "--data.tokenizer TOKENIZER.json, the one that the dataset was made with",
            )
        return build_tokenizer(spec)

    def _kept(self, own: Path | None) -> str:
        """Returns the tokenizer of the run, or the file that an earlier start of it kept.

        A file may have changed or gone since the run began: the run keeps its own, and prints that.
        Raises DataError for another kind of tokenizer than the run's own.
        """
        if own is None or not _is_kept(own):
            return self.spec
        kept = build_tokenizer(str(own)).to_json()
        kind = parse_json(kept).get("kind", "bpe")
        asked = self.spec.partition(":")[0]
        if asked in ("bytes", "chars", "bpe") and asked != kind:
            raise DataError(
                f"going on with --data.tokenizer {self.spec}",
                f"the run was trained with {kind}, and keeps its tokenizer",
                "leave --data.tokenizer out",
            )
        if os.path.isfile(self.spec) and build_tokenizer(self.spec).to_json() != kept:
            truth = f"{self.spec} is not the tokenizer that the run was trained with"
            print(f"{truth}; it goes on with {own}", file=sys.stderr)
        return str(own)

    def _load(self, path: str, spec: str) -> TokenFile:
        folder = self._folder_of(path, spec)
        if is_token_file(folder):
            if note := open_source(path, self.text_field).note:
                print(f"{path}: {note}", file=sys.stderr, flush=True)
            # Other runs may read these tokens: an entry of the cache is used or refused, never
            # changed or deleted.
            found = open_tokens(folder)
            check_skipped(path, found.skipped, self.bad_records)
            return found
        return tokenize(
            path,
            spec,
            folder,
            text_field=self.text_field,
            bad_records=self.bad_records,
            progress=self.progress,
        )

    def _learned(self, paths: Sequence[str]) -> Path:
        """Returns the file of the tokenizer that is learned from all of the text."""
        key = "\n".join(self._folder_of(path, self.spec).name for path in paths)
        file = self.cache / "tokenizers" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        if not file.is_file():
            if self.progress is not None:
                self.progress.write(f"learning the vocabulary {self.spec}")
            learn_tokenizer(paths, self.spec, self.text_field, self.bad_records, file)
        return file

    def _folder_of(self, path: str, spec: str) -> Path:
        """Returns the folder of the tokens of `path`.

        Its name changes when the documents or the tokenizer do.
        """
        # Of a tokenizer's file its content, not its name or spaces: a run's copy of it finds the
        # same tokens.
        lines = [_VERSION, spec_identity(spec), *open_source(path, self.text_field).fingerprint()]
        name = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:24]
        return self.cache / "tokens" / name
