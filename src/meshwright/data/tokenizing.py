"""Tokenisation: text into a token file, on all cores, and from where it was interrupted."""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.readers import read_documents
from meshwright.data.sources import Documents, Place, Records, check_skipped, open_source
from meshwright.data.token_writer import (
    PROGRESS,
    SHARD_TOKENS,
    UNIT,
    TokenWriter,
    read_progress,
    write_description,
)
from meshwright.data.tokenizers import (
    Tokenizer,
    build_tokenizer,
    spec_identity,
    tokenizer_from_json,
    with_begin,
)
from meshwright.data.tokens import (
    DESCRIPTION,
    SKIPPED,
    Progress,
    TokenFile,
    is_token_file,
    open_tokens,
)
from meshwright.documents import LARGE, read_text
from meshwright.errors import DataError, by_class, reason_of
from meshwright.storage.removing import remove_file, remove_tree
from meshwright.storage.writing import make_folder, open_file, refuse_links, write_atomically

BATCH = 2**21
"""Characters of a batch of documents."""
_DOCUMENTS = 4096
"""Largest number of documents in a batch."""
_PATIENCE = 600.0
"""Seconds without a change for which a process waits for another that writes the same folder."""
_LOCK = ".lock"


@dataclasses.dataclass(frozen=True)
class TextBatch:
    """Documents that are encoded together."""

    texts: list[str]
    places: list[Place]
    before: Mapping[str, Any]
    """State of the reading before the first."""


def encode_texts(tokenizer: Tokenizer, batch: TextBatch) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of documents, one after another, and how many each has.

    A document has the tokens that one begins with, and is closed by the tokenizer's end. Raises
    DataError with the place of a document that has no tokens.
    """
    try:
        encoded = tokenizer.encode_batch(batch.texts)
    except DataError:  # which of them it is, only encoding them one by one shows
        encoded = [
            _encode_document(tokenizer, *document)
            for document in zip(batch.texts, batch.places, strict=True)
        ]
    parts = [
        np.append(with_begin(tokenizer, tokens), np.int32(tokenizer.end)) for tokens in encoded
    ]
    for part, place in zip(parts, batch.places, strict=True):
        if int(part.max()) >= tokenizer.vocab or int(part.min()) < 0:
            truth = f"its tokenizer gives token {part.max()} of {tokenizer.vocab}"
            raise DataError(
                f"reading {place}", truth, "a tokenizer whose tokens are numbered without gaps"
            )
    return np.concatenate(parts), np.fromiter(map(len, parts), np.int64, len(parts))


def _encode_document(tokenizer: Tokenizer, text: str, place: Place) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except DataError as error:
        raise DataError(f"reading {place}", error.truth, error.fix) from error


def encode(
    tokenizer: Tokenizer, batches: Iterable[TextBatch]
) -> Iterator[tuple[TextBatch, tuple[np.ndarray, np.ndarray]]]:
    """Yields batches in order with their tokens; the next batch is read while one is encoded."""
    with concurrent.futures.ThreadPoolExecutor(1, "encoder") as encoder:
        waiting: list[
            tuple[TextBatch, concurrent.futures.Future[tuple[np.ndarray, np.ndarray]]]
        ] = []
        for batch in batches:
            waiting.append((batch, encoder.submit(encode_texts, tokenizer, batch)))
            if len(waiting) == 2:
                done, future = waiting.pop(0)
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


def tokenize(
    path: str,
    spec: str,
    out: Path,
    *,
    text_field: str = "text",
    bad_records: float = 0.0,
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress | None = None,
) -> TokenFile:
    """Tokenizes the source `path` with the tokenizer `spec` into the folder `out`.

    An interrupted tokenization continues.
    text_field: field or column with the text.  bad_records: largest share of records that may be
    skipped.
    shard_tokens: rounded up to a multiple of 131,072; the tokens do not depend on it.
    Raises DataError where there is no text, a record is bad, or `out` has something else or cannot
    be written.
    """
    if not 0 <= bad_records <= 1:
        raise DataError(
            f"skipping a share of {bad_records:g} of the records", "a share is from 0 to 1", "0.001"
        )
    shard_tokens = -(-shard_tokens // UNIT) * UNIT
    source, records = open_source(path, text_field), Records(path, bad_records)
    if source.note:
        print(f"{path}: {source.note}", file=sys.stderr, flush=True)
    job = _Tokenisation(source, spec, out, records, shard_tokens, progress)
    try:
        while not is_token_file(out):
            if out.exists() and (
                not out.is_dir() or (any(out.iterdir()) and not (out / _LOCK).exists())
            ):
                raise DataError(
                    f"writing tokens to {out}",
                    "it exists already",
                    "a folder that does not exist yet",
                )
            make_folder(out)
            refuse_links(out)
            with _locked(out, progress) as ours:
                if ours and not is_token_file(out):
                    job.run()
    except OSError as error:
        kept = (
            "; the same command goes on after the last whole shard"
            if (out / PROGRESS).exists()
            else ""
        )
        fix = f"another folder (a run's is below MESHWRIGHT_CACHE), or more space{kept}"
        raise by_class(
            error, DataError(f"writing tokens to {out}", reason_of(error), fix)
        ) from error
    finally:
        if progress is not None:
            with contextlib.suppress(OSError):  # of a terminal that has gone
                progress.close()
    file = open_tokens(out)
    # Another process may have written them while this one waited, and may allow more bad records.
    check_skipped(path, file.skipped, bad_records)
    return file


def learn_tokenizer(
    paths: Sequence[str], spec: str, text_field: str, bad_records: float, file: Path
) -> None:
    """Writes the tokenizer that is learned from all of several sources into `file`.

    Raises DataError.
    """
    sources = ((path, open_source(path, text_field)) for path in paths)
    documents = (
        text
        for path, source in sources
        for text in read_documents(source, Records(path, bad_records))
    )
    first = next(documents, None)
    if first is None:
        raise DataError(
            f"--data {', '.join(paths)}",
            "they hold no text: all are empty",
            "a source with text in it",
        )
    text = build_tokenizer(spec, itertools.chain([first], documents)).to_json()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    except OSError as error:
        raise by_class(
            error, DataError(f"writing {file}", reason_of(error), "another MESHWRIGHT_CACHE")
        ) from error


@contextlib.contextmanager
def _locked(out: Path, progress: Progress | None) -> Iterator[bool]:
    """Holds the lock on an unfinished token file; waits for another process that has it.

    Yields False where that one removed the folder. Raises DataError where nothing in the folder
    changes for 10 minutes.
    """
    with open_file(out / _LOCK, "ab") as file:
        until, seen = time.monotonic() + _PATIENCE, 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            except OSError:
                break  # a file system without locks
            if progress is not None and not seen:
                progress.write(f"waiting for another process that tokenises into {out}")
            changed = _last_change(out)
            if changed != seen:
                until, seen = time.monotonic() + _PATIENCE, changed
            if time.monotonic() > until:
                truth = f"another process holds it and wrote nothing for {_PATIENCE:.0f} s"
                raise DataError(
                    f"writing tokens to {out}", truth, "end that process; what it wrote is kept"
                )
            time.sleep(0.2)
        yield os.fstat(file.fileno()).st_nlink > 0


def _last_change(folder: Path) -> float:
    """Returns when a file of a folder was last written, in seconds since 1970; 1 without a file."""
    if not folder.is_dir():
        return 1.0
    return max((entry.stat().st_mtime for entry in os.scandir(folder)), default=1.0)


@dataclasses.dataclass
class _Tokenisation:
    """Tokenisation of one source into a folder whose lock this process holds."""

    source: Documents
    spec: str
    out: Path
    records: Records
    shard_tokens: int
    progress: Progress | None

    def __post_init__(self) -> None:
        self.identity, self.before = spec_identity(self.spec), self.source.fingerprint()

    def run(self) -> None:
        """Writes the token file.

        What this process began is deleted where no shard became complete.
        Nothing is deleted once the description is written: from then on other processes may read
        the folder.
        """
        lines = [self.identity, str(self.shard_tokens), *self.before]
        key = hashlib.sha256(
            "\n".join(lines).encode("utf-8", "surrogateescape")
        ).hexdigest()  # names may be any bytes
        note = read_progress(self.out)
        if note is not None and note["key"] != key:
            raise DataError(
                f"writing tokens to {self.out}",
                "it has an unfinished tokenisation of other text, with another tokenizer or of "
                "other shards",
                f"the command that began it, or another folder, or rm -r {self.out}",
            )
        try:
            tokenizer = self._tokenizer(note)
            writer = self._writer(tokenizer, note)
            with contextlib.closing(writer):
                self._write(tokenizer, writer, key)
            after = self.source.fingerprint()
            changed = next(
                (old for old, new in zip(self.before, after, strict=False) if old != new), None
            )
            if changed is not None:  # the tokens may be of no version of it
                remove_tree(
                    self.out, below=self.out.parent
                )  # unfinished, and this process holds its lock
                truth = "it changed while it was read"
                raise DataError(
                    f"reading {changed.rsplit(' ', 2)[0]}",
                    truth,
                    "wait until it is written, or copy it",
                )
            named = {
                "source": self.records.source,
                "tokenizer": self.spec,
                "skipped": self.records.summary(),
            }
            write_description(self.out, writer.description(tokenizer.vocab, **named))
        except (DataError, OSError):
            if not self._of_use():
                remove_tree(self.out, below=self.out.parent, ignore_errors=True)
            raise
        for name in (PROGRESS, _LOCK):
            with contextlib.suppress(OSError):  # the token file is complete without it
                remove_file(self.out / name, below=self.out, missing_ok=True)

    def _of_use(self) -> bool:
        """Whether the folder has a complete shard, a description, or an unreadable note."""
        if (self.out / DESCRIPTION).exists():
            return True
        note = read_progress(self.out)
        return bool(note["shards"]) if note is not None else (self.out / PROGRESS).exists()

    def _tokenizer(self, note: dict[str, Any] | None) -> Tokenizer:
        """Returns the tokenizer of an unfinished folder, or a new one, which is written there."""
        if note is not None:
            return tokenizer_from_json(read_text(self.out / "tokenizer.json", LARGE))
        tokenizer = build_tokenizer(self.spec, self._texts_to_learn_from())
        write_atomically(self.out / "tokenizer.json", tokenizer.to_json())
        return tokenizer

    def _texts_to_learn_from(self) -> Iterator[str]:
        """Yields all documents, and shows how far it is."""
        records = Records(self.records.source, self.records.share)
        display = self._display(records, "learning the vocabulary")
        size = 0
        for text in read_documents(self.source, records):
            size += len(text)
            if size > BATCH:
                display(0)
                size = 0
            yield text

    def _display(self, records: Records, label: str) -> Callable[[int], None]:
        """Returns a function that shows a number of tokens and the place in the source."""
        progress = self.progress
        if progress is None:
            return lambda tokens: None
        files, size = self.source.size()
        return lambda tokens: progress.update(
            label, records.bytes_before + records.bytes_here(), size, (records.file, files), tokens
        )

    def _writer(self, tokenizer: Tokenizer, note: dict[str, Any] | None) -> TokenWriter:
        """Opens the folder to write, with `records` at the place where to go on.

        Raises DataError for a damaged one.
        """
        try:
            writer = TokenWriter(
                self.out, "<u2" if tokenizer.vocab <= 2**16 else "<u4", self.shard_tokens, note
            )
            if note is not None:
                self.records.resume(note["records"])
        except (KeyError, TypeError, ValueError) as error:
            fix = f"rm -r {self.out} and begin again"
            raise DataError(
                f"going on in {self.out}", f"it is damaged: {reason_of(error)}", fix
            ) from error
        if self.progress is not None and writer.shards:
            kept = (
                f"{writer.shards:,} whole shards with {writer.shards * writer.shard_tokens:,} "
                f"tokens"
            )
            self.progress.write(f"{self.out}: goes on after {kept}")
        return writer

    def _write(self, tokenizer: Tokenizer, writer: TokenWriter, key: str) -> None:
        """Writes the tokens of all documents, and notes after every shard where to go on."""
        skipped, records = self.out / SKIPPED, self.records
        display = self._display(records, "tokenising")
        with open_file(skipped, "ab") as log:
            log.truncate(records.logged)
            records.log = log
            if not writer.shards:
                writer.save_progress(key, {"tokens": 0, "documents": 0, "records": records.state()})
            for batch, (tokens, lengths) in encode(tokenizer, self._batches()):
                before = {
                    "tokens": writer.tokens,
                    "documents": writer.documents,
                    "records": dict(batch.before),
                }
                if writer.add(tokens, lengths):
                    log.flush()
                    os.fsync(log.fileno())
                    writer.save_progress(key, before)
                display(writer.tokens)
        asked = f"--data {records.source}"
        if not writer.documents:
            raise DataError(
                asked, f"{self.source} hold no text: all are empty", "a source with text in it"
            )
        if writer.tokens == writer.documents * (1 + len(tokenizer.begin)):
            truth = f"the tokenizer makes no tokens of any of the {writer.documents:,} documents"
            raise DataError(asked, truth, "another --data.tokenizer")
        if not records.logged:
            remove_file(skipped, below=self.out)
        writer.finish()

    def _batches(self) -> Iterator[TextBatch]:
        """Yields documents in batches, each with the position before it."""
        records = self.records
        batch = TextBatch([], [], records.state())
        size = 0
        for text in read_documents(self.source, records):
            batch.texts.append(text)
            batch.places.append(records.place)
            size += len(text)
            if size >= BATCH or len(batch.texts) == _DOCUMENTS:
                yield batch
                batch = TextBatch([], [], records.state())
                size = 0
        if batch.texts:
            yield batch
