"""Chat data: conversations, prompts with completions, and preferences, as packed sequences.

A record is one line of JSON: `messages`, or `prompt` and `completion`, or `prompt`, `chosen` and `rejected`, each a
text or a list of messages. Messages are rendered by the tokenizer's chat template; a text is taken as it is and its
answer closed by the tokenizer's end. The loss is that of the assistant's answers (data/rendering.py).

Records are tokenised once, into a token file with one more array, `answers.bin`. A sequence holds several of them,
whole, chosen by best fit; each is a document of its own, to which attention and positions are confined.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.config import Data
from meshwright.data.chat import ChatTemplate, check_jinja, read_chat_template
from meshwright.data.local import local_data
from meshwright.data.opening import decompressed, kind_of, open_bytes
from meshwright.data.readers import kind_of_value, read_json_lines
from meshwright.data.records import Records
from meshwright.data.rendering import Rendered, render_record
from meshwright.data.shards import TokenWriter, write_description
from meshwright.data.tokens import Corpus, TokenFile, open_tokens, parse_source
from meshwright.data.vocabulary import build_tokenizer
from meshwright.documents import LARGE, read_json, read_text
from meshwright.errors import DataError
from meshwright.fine_tuning import FineTune, Objective, TooLong

_FORMAT = 3


@dataclasses.dataclass(frozen=True)
class Packed:
    """Sequences of `seq` tokens with whole documents."""

    file: TokenFile
    answers: np.ndarray
    """1 for tokens that are answers, uint8 [tokens]."""
    seq: int
    rows: tuple[tuple[int, ...], ...]
    """Documents of each sequence."""
    together: int
    """Documents that stay together: 1, or 2 for a chosen and a rejected answer."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns the fields of a `Batch` for one sequence, each [T]; the rest of it is padding of weight 0."""
        fields = {
            "inputs": np.full(self.seq, self.file.tokenizer.end, np.int32),
            "targets": np.full(self.seq, self.file.tokenizer.end, np.int32),
            "segments": np.full(self.seq, len(self.rows[index]), np.int32),
            "positions": np.zeros(self.seq, np.int32),
            "weights": np.zeros(self.seq, np.float32),
        }
        at = 0
        for segment, document in enumerate(self.rows[int(index)]):
            start, stop = document_range(self.file.ends, document)
            here = slice(at, at + stop - start - 1)
            fields["inputs"][here] = self.file.tokens[start : stop - 1]
            fields["targets"][here] = self.file.tokens[start + 1 : stop]
            fields["segments"][here] = segment
            fields["positions"][here] = np.arange(stop - start - 1)
            fields["weights"][here] = self.answers[start + 1 : stop]
            at = here.stop
        fields["positions"][at:] = np.arange(self.seq - at)
        return fields

    def whole(self) -> "Packed":
        """Returns the sequences of all documents of the file."""
        return pack(self.file, self.answers, self.seq, range(len(self.file.ends) // self.together), self.together)

    def texts(self, samples: int) -> Iterator[np.ndarray]:
        """Yields the answers of the first sequences."""
        for row in self.rows[:samples]:
            for document in row:
                start, stop = document_range(self.file.ends, document)
                yield self.file.tokens[start + 1 : stop][self.answers[start + 1 : stop] > 0]


def document_range(ends: np.ndarray, document: int) -> tuple[int, int]:
    """Returns the first token of a document and one past its last."""
    return (int(ends[document - 1]) if document else 0), int(ends[document])


def pack(file: TokenFile, answers: np.ndarray, seq: int, units: Any, together: int) -> Packed:
    """Packs units of `together` documents by best fit: each goes where it leaves the least room, the longest first.

    A document of n tokens takes n - 1 positions. Deterministic. Every unit fits in `seq` (`load_conversations`).
    """
    lengths = np.diff(file.ends, prepend=0).reshape(-1, together).sum(1) - together
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # rooms that some row has, ascending
    for unit in sorted(units, key=lambda unit: (-int(lengths[unit]), unit)):
        need = int(lengths[unit])
        at = int(np.searchsorted(rooms, need))
        if at == len(rooms):
            row, room = len(rows), seq
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        rows[row] += range(unit * together, (unit + 1) * together)
        left = room - need
        if not by_room.get(left):
            rooms.insert(int(np.searchsorted(rooms, left)), left)
        by_room.setdefault(left, []).append(row)
    return Packed(file, answers, seq, tuple(map(tuple, rows)), together)


def load_conversations(
    data: Data, seq: int, tuning: FineTune, cache: Path
) -> tuple[Corpus, list[tuple[Packed, Packed]]]:
    """Loads chat data: its files, and for each the sequences to train on and the held-out ones.

    Tokens are kept in `cache`. Raises DataError with file and line for a record that is none, has no answer, or is
    longer than a sequence (`FineTune.too_long`).
    """
    paths, tokenizer = local_data(data.paths, data.tokenizer, cache)
    data = dataclasses.replace(data, paths=paths, tokenizer=tokenizer)
    if not Path(data.tokenizer).is_file() and data.tokenizer != "bytes":
        raise DataError(
            f"chat data with the tokenizer {data.tokenizer!r}", "it is learned from text, and this is none",
            "--data.tokenizer FILE, the tokenizer.json of the model, or bytes",
        )  # fmt: skip
    sources = [parse_source(path) for path in data.paths]
    template = template_of(data.tokenizer, tuning.template)
    if template is not None:
        check_jinja()
    together = 2 if tuning.objective == "preferences" else 1
    files, parts = [], []
    folders = _folders([source.path for source in sources], data.tokenizer, template, tuning.objective, cache)
    for source in sources:
        folder = folders[source.path]
        file = open_tokens(folder)
        answers: Any = np.memmap(folder / "answers.bin", np.uint8, mode="r")
        lines = read_json(folder / "lines.json", LARGE)
        units = _fitting(file, seq, together, lines, tuning.too_long)
        if tuning.too_long == "truncate":
            file, answers = _truncated(file, answers, seq // together)
        order = np.random.default_rng(0).permutation(units)
        border = round(len(order) * (1 - data.held_out))
        if data.held_out and len(order) > 1:
            border = min(max(border, 1), len(order) - 1)
        if not border or (data.held_out and border == len(order)):
            raise DataError(
                f"--data {source.path}", f"it has {len(order)} record(s): {border} to train on and "
                f"{len(order) - border} to evaluate", "more records, or --data.held-out 0",
            )  # fmt: skip
        train, held_out = (pack(file, answers, seq, u, together) for u in (order[:border], order[border:]))
        files.append(file)
        parts.append((train, held_out))
    return Corpus(tuple(files), tuple(source.weight for source in sources)), parts


def _folders(
    paths: list[str], spec: str, template: ChatTemplate | None, objective: Objective, cache: Path
) -> dict[str, Path]:
    """Returns the folders with the tokens of sources; process 0 makes them for all that compute together."""

    def make() -> dict[str, Path]:
        return {path: _tokenise(path, spec, template, objective, cache) for path in paths}

    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return make()
    from meshwright.data.host_tokens import share_folders  # runs on one host need none of it

    return share_folders(cache / "tokens", None, make)


def template_of(tokenizer: str, file: str | None) -> ChatTemplate | None:
    """Returns the chat template of a run: that of the file it names, or the one beside its tokenizer."""
    beside = read_chat_template(Path(tokenizer).parent) if Path(tokenizer).is_file() else None
    if file is None:
        return beside
    try:
        text = read_text(Path(file))
    except (OSError, ValueError) as error:
        raise DataError(f"--finetune.template {file}", str(error), "a file with a Jinja template") from error
    return ChatTemplate(text, beside.special_tokens if beside else ())


def _fitting(file: TokenFile, seq: int, together: int, lines: list[str], too_long: TooLong) -> list[int]:
    """Units of documents that fit in a sequence, or all where they are truncated. Raises DataError for one that does
    not."""
    lengths = np.diff(file.ends, prepend=0).reshape(-1, together).sum(1) - together
    long = np.flatnonzero(lengths > seq)
    if len(long) and too_long == "refuse":
        first, longest = int(long[0]), int(lengths.max())
        raise DataError(
            lines[first],
            f"it takes {lengths[first]} positions, and a sequence has {seq}; {len(long)} of {len(lengths)} records do "
            f"not fit, the longest takes {longest}",
            f"--seq {longest}, or --finetune.too-long truncate or drop",
        )
    fits = lengths <= seq if too_long == "drop" else np.ones(len(lengths), bool)
    return [int(unit) for unit in np.flatnonzero(fits)]


def _truncated(file: TokenFile, answers: np.ndarray, positions: int) -> tuple[TokenFile, np.ndarray]:
    """Token file and answers in memory, each document without what goes beyond `positions` and its first token."""
    ranges = [document_range(file.ends, d) for d in range(len(file.ends))]
    kept = [slice(start, min(stop, start + positions + 1)) for start, stop in ranges]
    tokens, marks = (np.concatenate([array[part] for part in kept]) for array in (file.tokens, answers))
    return file._replace(tokens=tokens, ends=np.cumsum([part.stop - part.start for part in kept])), marks


def _tokenise(path: str, spec: str, template: ChatTemplate | None, objective: Objective, cache: Path) -> Path:
    """Returns the folder with the tokens of one source, made where it is not there yet."""
    files = _files(path)
    tokenizer = build_tokenizer(spec, iter(()))
    kind = [str(_FORMAT), objective, tokenizer.to_json(), repr(template), *map(_status, files)]
    folder = cache / "tokens" / f"chat-{hashlib.sha256(chr(10).join(kind).encode()).hexdigest()[:24]}"
    if (folder / "tokens.json").is_file():
        return folder
    lines = list[str]()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        writer = TokenWriter(scratch, np.dtype("<u4"))
        with contextlib.closing(writer), (scratch / "answers.bin").open("wb") as answers:
            for where, record in _records(files):
                documents: list[Rendered] = render_record(where, record, objective, tokenizer, template)
                for document in documents:
                    writer.add(document.tokens, np.array([len(document.tokens)]))
                    answers.write(document.answers.astype(np.uint8).tobytes())
                lines.append(where)
            if not lines:
                raise DataError(f"--data {path}", "it has no records", "JSON lines with `messages`")
            writer.finish()
        (scratch / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        (scratch / "lines.json").write_text(json.dumps(lines), encoding="utf-8")
        record = {"dtype": "uint32", "tokens": writer.tokens, "documents": writer.documents, "vocab": tokenizer.vocab,
                  "shards": writer.shards, "shard_tokens": writer.shard_tokens, "source": path, "tokenizer": spec,
                  "skipped": {}}  # fmt: skip
        write_description(scratch, record, "answers.bin", "lines.json")
        try:
            os.replace(scratch, folder)
        except OSError:  # another process was first
            if not (folder / "tokens.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _files(path: str) -> list[Path]:
    location = Path(path)
    files = sorted(location.rglob("*.jsonl")) if location.is_dir() else [location]
    if not files or not all(file.is_file() for file in files):
        reason = "a folder without .jsonl files" if location.is_dir() else "not there"
        raise DataError(f"--data {path}", f"it is {reason}", "a file of JSON lines, or a folder of such files")
    return files


def _status(file: Path) -> str:
    return f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}"


def _records(files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields file and line of each record, and the record."""
    for file in files:
        records = Records(str(file))
        with open_bytes(file) as raw:
            for place, record in read_json_lines(file, decompressed(raw, kind_of(file.name)[1]), records):
                if not isinstance(record, dict):
                    truth = f"it is {kind_of_value(record)}, and no object"
                    raise DataError(str(place), truth, "one JSON object in a line")
                yield str(place), record
