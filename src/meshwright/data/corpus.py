"""Corpora: token files of one vocabulary, mixed by weight; text is tokenised once into the cache, by one process.

Hosts with a shared cache find the token files there; to the others process 0 sends them, over the links of the arrays.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.data.readers import Records
from meshwright.data.sources import open_source
from meshwright.data.tokenizers import Bytes, Tokenizer, build_tokenizer, is_learned
from meshwright.data.tokenizing import Progress, spec_identity, tokenize
from meshwright.data.tokens import TokenFile, is_token_file, open_tokens
from meshwright.documents import parse_json, write_atomically
from meshwright.errors import DataError
from meshwright.hardware.agreement import store
from meshwright.heartbeat import beating
from meshwright.storage.paths import in_bucket, path_of
from meshwright.storage.transfer import local_copy

_VERSION = "3"
"""First line of what a token file's name in the cache is the hash of. Formats 2 and 3 hold the same tokens."""
PATIENCE = 600.0
"""Seconds for which a process waits without a sign of process 0."""
_BEAT = 5.0
"""Seconds between two signs of process 0."""
_EVERY = 30.0
"""Seconds between two lines of a process that waits."""
_PIECE = 2**26
"""Bytes that are sent at a time."""
_rounds = itertools.count()


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


class _Reading(NamedTuple):
    """How the text of a corpus is read and where its tokens are kept."""

    spec: str
    cache: Path
    text_field: str
    bad_records: float
    progress: Progress | None


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
        opened.update(_tokenise(texts, reading, own))
        return {path: file.folder for path, file in opened.items()}

    folders = share_folders(cache / "tokens", progress, make) if texts else {}
    files = tuple(opened.get(s.path) or open_tokens(folders.get(s.path, Path(s.path))) for s in sources)
    for file in files[1:]:
        if file.tokenizer.to_json() != files[0].tokenizer.to_json():
            raise DataError(
                f"mixing {files[0].folder} and {file.folder}",
                f"their tokenizers differ ({files[0].vocab} and {file.vocab} tokens)",
                "tokenise both with the same tokenizer file",
            )
    return Corpus(files, tuple(source.weight for source in sources))


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


def _tokenise(paths: Sequence[str], reading: _Reading, own: Path | None) -> dict[str, TokenFile]:
    """Returns the token files of sources of text by path: from the cache, or tokenised into it."""
    spec = reading.spec
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
        if not is_learned(spec):
            same = (spec == "bytes" or os.path.isfile(spec)) and build_tokenizer(spec).to_json() == kept
            if not same and os.path.isfile(spec):
                truth = f"{spec} is not the tokenizer that the run was trained with; it goes on with {own}"
                print(truth, file=sys.stderr)
            spec = spec if same else str(own)
        else:
            # The text may have changed since the vocabulary was learned from it. If not, its tokens are in the cache.
            name = str(_learned_file(paths, reading)) if len(paths) > 1 else spec
            folders = {path: _folder_of(path, reading._replace(spec=name)) for path in paths}
            if all(map(is_token_file, folders.values())):
                cached = {path: open_tokens(folder) for path, folder in folders.items()}
                if all(file.tokenizer.to_json() == kept for file in cached.values()):
                    return cached
            spec = str(own)
    elif len(paths) > 1 and is_learned(spec):
        spec = str(_learn_tokenizer(paths, reading))
    return {path: _load_tokens(path, reading._replace(spec=spec)) for path in paths}


def load_tokens(path: str, spec: str, cache: Path, *, text_field: str = "text", bad_records: float = 0.0) -> TokenFile:
    """Loads the tokens of a source of text, tokenised once into `cache`."""
    return _load_tokens(path, _Reading(spec, cache, text_field, bad_records, None))


def _load_tokens(path: str, reading: _Reading) -> TokenFile:
    folder = _folder_of(path, reading)
    if is_token_file(folder):
        found = open_tokens(folder)
        if found.skipped.get("share", 0.0) <= reading.bad_records:
            return found
        shutil.rmtree(folder)  # more records were skipped than is allowed now: refused like the text itself
    return tokenize(
        path,
        reading.spec,
        folder,
        text_field=reading.text_field,
        bad_records=reading.bad_records,
        progress=reading.progress,
    )


def _learned_file(paths: Sequence[str], reading: _Reading) -> Path:
    """Returns the file of the tokenizer that is learned from all `paths` together."""
    key = "\n".join(_folder_of(path, reading).name for path in paths)
    return reading.cache / "tokenizers" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _learn_tokenizer(paths: Sequence[str], reading: _Reading) -> Path:
    file = _learned_file(paths, reading)
    if not file.is_file():
        sources = ((path, open_source(path, reading.text_field)) for path in paths)
        documents = (text for path, source in sources for text in source.read(Records(path, reading.bad_records)))
        text = build_tokenizer(reading.spec, documents).to_json()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text)
        except OSError as error:
            raise DataError(f"writing {file}", f"{error.strerror or error}", "another MESHWRIGHT_CACHE") from error
    return file


def _folder_of(path: str, reading: _Reading) -> Path:
    """Returns the folder of the tokens of `path`: its name changes when the documents or the tokenizer do."""
    # Of a tokenizer's file its content, not its name or spaces: a run's copy of it finds the same tokens.
    lines = [_VERSION, spec_identity(reading.spec), *open_source(path, reading.text_field).fingerprint()]
    name = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return reading.cache / "tokens" / name


def share_folders(cache: Path, progress: Progress | None, make: Callable[[], dict[str, Path]]) -> dict[str, Path]:
    """Returns the token folders, each inside `cache`, that `make` returns in process 0.

    Every process calls this. Those that have no such folder in their cache receive it. Raises DataError in all where
    `make` does so in process 0, or where that gives no sign for ten minutes.
    """
    # Asking for the number of processes first would start the devices.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return make()
    client, key = store(), f"meshwright/tokens/{next(_rounds)}"
    if jax.process_index() == 0:
        folders = _make(client, key, make)
    else:
        folders = {path: cache / name for path, name in _wait(client, key, progress).items()}
    for folder in dict.fromkeys(folders.values()):
        _send(folder)
    return folders


def _make(client: Any, key: str, make: Callable[[], dict[str, Path]]) -> dict[str, Path]:
    """Calls `make`, and tells the other processes that it is under way, what it returned, or why it failed."""
    numbers = itertools.count()

    def fail(*failure: str) -> None:
        client.key_value_set(f"{key}/result", json.dumps({"failure": failure}))

    with beating(lambda: client.key_value_set(f"{key}/sign", str(next(numbers)), True), _BEAT, "signs of tokenisation"):
        try:
            folders = make()
        except DataError as error:
            fail(error.asked, error.truth, error.fix)
            raise
        except BaseException as error:
            fail("tokenising in process 0", f"{type(error).__name__}: {error}", "see the output of process 0")
            raise
    names = {path: folder.name for path, folder in folders.items()}
    client.key_value_set(f"{key}/result", json.dumps({"folders": names}))
    return folders


def _wait(client: Any, key: str, progress: Progress | None) -> dict[str, str]:
    """Returns what process 0 made: the folder's name by source. Raises DataError where it failed, or gives no sign."""
    start = said = time.monotonic()
    until, sign = start + PATIENCE, ""
    while (found := _get(client, f"{key}/result", 2000)) is None:
        now, newest = time.monotonic(), _get(client, f"{key}/sign", 1) or ""
        if newest != sign:
            until, sign = now + PATIENCE, newest
        if now > until:
            raise DataError(
                "waiting for process 0 to tokenise",
                f"it gave no sign for {PATIENCE:.0f} s",
                "see the output of process 0; or tokenise beforehand: meshwright tokenize",
            )
        if progress is not None and now - said > _EVERY:
            progress.write(f"waiting for process 0, which tokenises: {now - start:.0f} s")
            said = now
    record = json.loads(found)
    if "failure" in record:
        asked, truth, fix = record["failure"]
        raise DataError(f"{asked} (in process 0)", truth, fix)
    return dict(record["folders"])


def _get(client: Any, key: str, milliseconds: int) -> str | None:
    try:
        return str(client.blocking_key_value_get(key, milliseconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
            return None
        truth = f"it does not answer: {str(error).splitlines()[0]}"
        raise DataError("waiting for process 0 to tokenise", truth, "see the output of process 0") from error


def _send(folder: Path) -> None:
    """Copies a folder of process 0 to the processes that have none. All of them call this at the same time."""
    missing = not is_token_file(folder)
    if not multihost_utils.process_allgather(np.array(missing)).any():
        return
    first = jax.process_index() == 0
    listing = sorted((file.name, file.stat().st_size) for file in folder.iterdir()) if first else []
    names = json.loads(_broadcast(json.dumps(listing).encode()))
    part = folder.with_name(f".{folder.name}.{jax.process_index()}.part")
    if missing:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    for name, size in names:
        _send_file(folder / name, size, part / name if missing else None)
    if missing:
        try:
            os.replace(part, folder)
        except OSError:  # another process of this host was first
            shutil.rmtree(part, ignore_errors=True)
            if not is_token_file(folder):
                raise


def _send_file(source: Path, size: int, target: Path | None) -> None:
    """Sends a file of process 0 in pieces; `target` is written where it is given."""
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(source.open("rb")) if jax.process_index() == 0 else None
        writer = stack.enter_context(target.open("wb")) if target is not None else None
        for start in range(0, size, _PIECE):
            count = min(_PIECE, size - start)
            piece = np.frombuffer(reader.read(count), np.uint8) if reader else np.zeros(count, np.uint8)
            piece = np.asarray(multihost_utils.broadcast_one_to_all(piece))
            if writer is not None:
                piece.tofile(writer)


def _broadcast(data: bytes) -> bytes:
    """Returns the bytes that process 0 gives, in every process."""
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(data))))
    own = data if jax.process_index() == 0 else bytes(size)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(own, np.uint8))))
