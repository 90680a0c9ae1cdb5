"""Tokenisation: text into a token file, in any number of processes, and from where it was interrupted."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from meshwright.data.encoding import BATCH, TextBatch, encode
from meshwright.data.reading import Progress
from meshwright.data.records import Place, Records
from meshwright.data.shards import PROGRESS, SHARD_TOKENS, TokenWriter, read_progress, write_description
from meshwright.data.sources import STDIN, Documents, open_source
from meshwright.data.tokenizers import Tokenizer, tokenizer_from_json
from meshwright.data.tokens import BLOCK, SKIPPED, TokenFile, is_token_file, open_tokens
from meshwright.data.vocabulary import build_tokenizer, is_learned
from meshwright.documents import LARGE, read_text, write_atomically
from meshwright.errors import DataError

_DOCUMENTS = 4096
"""Largest number of documents in a batch."""
_PATIENCE = 600.0
"""Seconds without a change for which a process waits for another that writes the same folder."""
_LOCK = ".lock"
_MOST = 64
"""Processes that are taken where the user does not say how many."""


def tokenize(
    path: str, spec: str, out: Path, *, text_field: str = "text", bad_records: float = 0.0, processes: int = 0,
    shard_tokens: int = SHARD_TOKENS, progress: Progress | None = None,
) -> TokenFile:  # fmt: skip
    """Tokenises the source `path` with the tokenizer `spec` into the folder `out`; goes on where it was interrupted.

    text_field: field or column with the text.  bad_records: largest share of records that may be skipped.  processes:
    0 takes one for each core.  shard_tokens: rounded up to whole blocks of 131,072. Neither changes the tokens.
    Raises DataError where there is no text, a record is bad, or `out` has something else or cannot be written.
    """
    if not 0 <= bad_records <= 1:
        raise DataError(f"skipping a share of {bad_records:g} of the records", "a share is from 0 to 1", "0.001")
    source = open_source(path, text_field)
    text = [_name_of(spec), *source.fingerprint()]
    processes = processes or min(_MOST, len(os.sched_getaffinity(0)))
    shard_tokens = -(-shard_tokens // (BLOCK // 2)) * (BLOCK // 2)
    try:
        while not is_token_file(str(out)):
            _check_ours(out)
            out.mkdir(parents=True, exist_ok=True)
            with _locked(out, progress) as ours:
                if ours and not is_token_file(str(out)):
                    _tokenise(text, source, spec, out, Records(path, bad_records), processes, shard_tokens, progress)
    except OSError as error:
        kept = "; the same command goes on after the last whole shard" if (out / PROGRESS).exists() else ""
        raise DataError(
            f"writing tokens to {out}", f"{error.strerror or error}",
            f"another folder (a run's is below MESHWRIGHT_CACHE), or more space{kept}",
        ) from error  # fmt: skip
    finally:
        if progress is not None:
            progress.close()
    return open_tokens(out)


def _check_ours(out: Path) -> None:
    """Raises DataError where `out` is neither new, empty nor an unfinished token file."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / _LOCK).exists())):
        raise DataError(f"writing tokens to {out}", "it exists already", "a folder that does not exist yet")


@contextlib.contextmanager
def _locked(out: Path, progress: Progress | None) -> Iterator[bool]:
    """Holds the lock on an unfinished token file; waits for another process that has it.

    Yields False where that one removed the folder. Raises DataError where nothing in the folder changes for 10 minutes.
    """
    with (out / _LOCK).open("ab") as file:
        until, seen = time.monotonic() + _PATIENCE, 0.0
        while not _lock(file):
            if progress is not None and not seen:
                progress.write(f"waiting for another process that tokenises into {out}")
            changed = max([1.0, *(entry.stat().st_mtime for entry in os.scandir(out))] if out.is_dir() else [1.0])
            if changed != seen:
                until, seen = time.monotonic() + _PATIENCE, changed
            if time.monotonic() > until:
                raise DataError(
                    f"writing tokens to {out}", f"another process holds it and wrote nothing for {_PATIENCE:.0f} s",
                    "end that process; what it wrote is kept",
                )  # fmt: skip
            time.sleep(0.2)
        yield os.fstat(file.fileno()).st_nlink > 0


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _tokenise(
    text: list[str], source: Documents, spec: str, out: Path, records: Records, processes: int, shard_tokens: int,
    progress: Progress | None,
) -> None:  # fmt: skip
    """Writes the token file `out`, which this process holds. Leaves nothing there where no shard became whole.

    text: the tokenizer, and the fingerprint of the source before the writing.
    """
    path = records.source
    described = "\n".join([text[0], str(shard_tokens), *text[1:]])
    key = hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()  # names of files may be any bytes
    note = read_progress(out)
    if note is not None and note["key"] != key:
        raise DataError(
            f"writing tokens to {out}",
            "it has an unfinished tokenisation of other text, with another tokenizer or of other shards",
            f"the command that began it, or another folder, or rm -r {out}",
        )
    try:
        tokenizer = _tokenizer(path, source, spec, out, note, records.share, progress)
        dtype = np.dtype("<u2" if tokenizer.vocab <= 2**16 else "<u4")
        writer = _writer(out, dtype, shard_tokens, records, note, progress)
        with contextlib.closing(writer):
            _write(source, tokenizer, writer, records, key, _display(progress, source, records), processes)
        _check_unchanged(out, text[1:], source.fingerprint())
        write_description(
            out,
            {
                "dtype": "uint16" if dtype.itemsize == 2 else "uint32", "tokens": writer.tokens,
                "documents": writer.documents, "vocab": tokenizer.vocab, "shards": writer.shards,
                "shard_tokens": shard_tokens, "source": path, "tokenizer": spec, "skipped": records.summary(),
            },
        )  # fmt: skip
        for name in (PROGRESS, _LOCK):
            (out / name).unlink(missing_ok=True)
    except (DataError, OSError):
        found = read_progress(out)
        if found is None or not found["shards"]:
            shutil.rmtree(out, ignore_errors=True)
        raise


def _check_unchanged(out: Path, before: list[str], after: list[str]) -> None:
    """Raises DataError where a file grew or was written while it was read: its tokens may be of no version of it."""
    changed = next((old for old, new in zip(before, after, strict=False) if old != new), None)
    if changed is not None:
        shutil.rmtree(out)
        raise DataError(
            f"reading {changed.rsplit(' ', 2)[0]}",
            "it changed while it was read",
            "wait until it is written, or copy it",
        )


def _name_of(spec: str) -> str:
    """Returns the tokenizer itself where `spec` is a file, whose name and spaces do not matter."""
    return build_tokenizer(spec, iter(())).to_json() if os.path.isfile(spec) else spec


def _tokenizer(
    path: str, source: Documents, spec: str, out: Path, note: dict[str, Any] | None, share: float,
    progress: Progress | None,
) -> Tokenizer:  # fmt: skip
    """Returns the tokenizer: the one that an unfinished folder has, or a new one, which is written there."""
    if note is not None:
        return tokenizer_from_json(read_text(out / "tokenizer.json", LARGE))
    if path == STDIN and is_learned(spec):
        raise DataError(
            f"learning the tokenizer {spec} from standard input", "it would be read twice, and can be read once",
            "--tokenizer bytes or a tokenizer.json; or a file",
        )  # fmt: skip
    records = Records(path, share)
    display = _display(progress, source, records, "learning the vocabulary")
    tokenizer = build_tokenizer(spec, _displayed(source.read(records), display))
    write_atomically(out / "tokenizer.json", tokenizer.to_json())
    return tokenizer


def _displayed(documents: Iterator[str], display: Any) -> Iterator[str]:
    size = 0
    for text in documents:
        size += len(text)
        if size > BATCH:
            display(0)
            size = 0
        yield text


def _display(progress: Progress | None, source: Documents, records: Records, label: str = "tokenising") -> Any:
    """Returns the function of the number of tokens that shows them and the place in the source."""
    if progress is None:
        return lambda tokens: None
    files, size = source.size()

    def display(tokens: int) -> None:
        progress.update(label, records.bytes_before + records.bytes_here(), size, (records.file, files), tokens)

    return display


def _writer(
    out: Path, dtype: np.dtype[Any], shard_tokens: int, records: Records, note: dict[str, Any] | None,
    progress: Progress | None,
) -> TokenWriter:  # fmt: skip
    """Opens `out` to write, with `records` at the place where to go on. Raises DataError where it is damaged."""
    try:
        writer = TokenWriter(out, dtype, shard_tokens, note)
        if note is not None:
            records.resume(note["records"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"going on in {out}", f"it is damaged: {error}", f"rm -r {out} and begin again") from error
    if progress is not None and writer.shards:
        kept = writer.shards * writer.shard_tokens
        progress.write(f"{out}: goes on after {writer.shards:,} whole shards with {kept:,} tokens")
    return writer


def _write(
    source: Documents, tokenizer: Tokenizer, writer: TokenWriter, records: Records, key: str, display: Any,
    processes: int,
) -> None:  # fmt: skip
    """Writes the tokens of all documents, and notes after every shard where to go on."""
    skipped = writer.folder / SKIPPED
    skipped.touch()
    os.truncate(skipped, records.logged)
    with skipped.open("ab") as log:
        records.log = log
        if not writer.shards:
            writer.save_progress(key, {"tokens": 0, "documents": 0, "records": records.state()})
        for batch, (tokens, lengths) in encode(tokenizer, _batches(source, records), processes):
            before = {"tokens": writer.tokens, "documents": writer.documents, "records": dict(batch.before)}
            if writer.add(tokens, lengths):
                log.flush()
                os.fsync(log.fileno())
                writer.save_progress(key, before)
            display(writer.tokens)
    if not writer.documents:
        raise DataError(f"--data {records.source}", f"{source} hold no text: all are empty", "a source with text in it")
    if writer.tokens == writer.documents * (1 + len(tokenizer.begin)):
        truth = f"the tokenizer makes no tokens of any of the {writer.documents:,} documents"
        raise DataError(f"--data {records.source}", truth, "another --data.tokenizer")
    if not records.logged:
        skipped.unlink()
    writer.finish()


def _batches(source: Documents, records: Records) -> Iterator[TextBatch]:
    """Yields documents in batches, each with the position before it."""
    texts, places, size, before = list[str](), list[Place](), 0, records.state()
    for text in source.read(records):
        texts.append(text)
        places.append(records.place)
        size += len(text)
        if size >= BATCH or len(texts) == _DOCUMENTS:
            yield TextBatch(texts, places, before)
            texts, places, size, before = [], [], 0, records.state()
    if texts:
        yield TextBatch(texts, places, before)
