"""Chat data: conversations, prompts with completions, and preferences, as packed sequences.

A record is one line of JSON: `messages`, or `prompt` and `completion`, or `prompt`, `chosen` and `rejected`, each a
text or a list of messages. Messages are rendered by the tokenizer's chat template; a text is taken as it is and its
answer closed by the tokenizer's end. A conversation is tokenised in one piece, as a model sees it, and only the
assistant's answers have a loss. A template with marks (`{% generation %}`) shows where they are. With any other, an
answer is what the conversation up to it has beyond the conversation before it with the prompt for an answer: its text,
and the token that ends it.

Records are tokenised once, into a token file with one more array, `answers.bin`. A sequence holds several complete
records, chosen by best fit; each is a document of its own, to which attention and positions are confined.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.config import Data
from meshwright.data.batch import PADDING
from meshwright.data.chat import ChatTemplate, Message, check_jinja, read_chat_template
from meshwright.data.corpus import Corpus, local_text, parse_source, share
from meshwright.data.feed import held_out_border
from meshwright.data.readers import decompressed, kind_of_value, read_json_lines
from meshwright.data.sources import Records, kind_of
from meshwright.data.subwords import Subwords, check_unicode
from meshwright.data.token_writer import TokenWriter, write_description
from meshwright.data.tokenizers import Bytes, Chars, Tokenizer, build_tokenizer, with_begin
from meshwright.data.tokens import TokenArray, TokenFile, is_token_file, open_tokens
from meshwright.documents import LARGE, open_bytes, read_json, read_text
from meshwright.errors import DataError, by_class
from meshwright.fine_tuning import FineTune, Objective, TooLong
from meshwright.storage.transfer import sha256_of

_FORMAT = 3
_KINDS = {
    "answers": "`messages`, or `prompt` and `completion`",
    "preferences": "`prompt`, `chosen` and `rejected`",
}
_ROLES = "role and content, such as {'role': 'user', 'content': 'Hello'}"
Span = tuple[int, int]
"""First character, and one past the last."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """Sequences of `seq` tokens with complete documents."""

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
            "segments": np.full(self.seq, PADDING, np.int32),
            "positions": np.zeros(self.seq, np.int32),
            "weights": np.zeros(self.seq, np.float32),
        }
        at = 0
        for segment, document in enumerate(self.rows[int(index)]):
            start, stop = document_range(self.file.tokens.ends, document)
            here, tokens = slice(at, at + stop - start - 1), self.file.tokens[start:stop]
            fields["inputs"][here] = tokens[:-1]
            fields["targets"][here] = tokens[1:]
            fields["segments"][here] = segment
            fields["positions"][here] = np.arange(stop - start - 1)
            fields["weights"][here] = self.answers[start + 1 : stop]
            at = here.stop
        fields["positions"][at:] = np.arange(self.seq - at)
        return fields

    def whole(self) -> "Packed":
        """Returns the sequences of all documents of the file."""
        return pack(
            self.file,
            self.answers,
            self.seq,
            range(self.file.documents // self.together),
            self.together,
        )

    def texts(self, samples: int) -> Iterator[np.ndarray]:
        """Yields the answers of the first sequences."""
        for row in self.rows[:samples]:
            for document in row:
                start, stop = document_range(self.file.tokens.ends, document)
                yield self.file.tokens[start + 1 : stop][self.answers[start + 1 : stop] > 0]


def document_range(ends: np.ndarray, document: int) -> tuple[int, int]:
    """Returns the first token of a document and one past its last."""
    return (int(ends[document - 1]) if document else 0), int(ends[document])


def _positions(file: TokenFile, together: int) -> np.ndarray:
    """Positions that each unit of `together` documents takes: one fewer than the tokens of a document."""
    return np.diff(file.tokens.ends, prepend=0).reshape(-1, together).sum(1) - together


def pack(file: TokenFile, answers: np.ndarray, seq: int, units: Any, together: int) -> Packed:
    """Packs units of `together` documents by best fit: each goes where it leaves the least room, the longest first.

    Deterministic. Every unit fits in `seq` (`load_conversations`).
    """
    lengths = _positions(file, together)
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

    Tokens are kept in `cache`. Raises DataError with file and line for a record that is malformed, has no answer, or is
    longer than a sequence (`FineTune.too_long`).
    """
    spec = local_text(data.tokenizer, cache)
    if not Path(spec).is_file() and spec != "bytes":
        fix = "--data.tokenizer FILE, the tokenizer.json of the model, or bytes"
        raise DataError(
            f"chat data with the tokenizer {spec!r}",
            "it is learned from text, and this is none",
            fix,
        )
    sources = [parse_source(path) for path in data.paths]
    template = template_of(spec, tuning.template)
    if template is not None:
        check_jinja()
    together = 2 if tuning.objective == "preferences" else 1
    files, parts = [], []

    def make() -> dict[str, Path]:
        texts = {source.path: local_text(source.path, cache) for source in sources}
        return {
            path: _tokenise(text, spec, template, tuning.objective, cache)
            for path, text in texts.items()
        }

    folders = share([source.path for source in sources], cache, None, make)
    for source in sources:
        folder = folders[source.path]
        file = open_tokens(folder)
        answers: Any = np.memmap(folder / "answers.bin", np.uint8, mode="r")
        units = _fitting(
            file, seq, together, read_json(folder / "lines.json", LARGE), tuning.too_long
        )
        if tuning.too_long == "truncate":
            file, answers = _truncated(file, answers, seq // together)
        order = np.random.default_rng(0).permutation(units)
        border = held_out_border(len(order), data.held_out)
        if data.held_out != 0 and len(order) > 1:
            border = min(max(border, 1), len(order) - 1)
        if not border or (data.held_out != 0 and border == len(order)):
            truth = f"it has {len(order)} record(s): {border} to train on and {len(order) - border} to evaluate"
            raise DataError(f"--data {source.path}", truth, "more records, or --data.held-out 0")
        train, held_out = (
            pack(file, answers, seq, u, together) for u in (order[:border], order[border:])
        )
        files.append(file)
        parts.append((train, held_out))
    return Corpus(tuple(files), tuple(source.weight for source in sources)), parts


def template_of(tokenizer: str, file: str | None) -> ChatTemplate | None:
    """Returns the chat template of a run: that of the file it names, or the one beside its tokenizer."""
    beside = read_chat_template(Path(tokenizer).parent) if Path(tokenizer).is_file() else None
    if file is None:
        return beside
    try:
        text = read_text(Path(file))
    except (OSError, ValueError) as error:
        raise by_class(
            error,
            DataError(f"--finetune.template {file}", str(error), "a file with a Jinja template"),
        ) from error
    return ChatTemplate(text, beside.special_tokens if beside else ())


def _fitting(
    file: TokenFile, seq: int, together: int, lines: list[str], too_long: TooLong
) -> list[int]:
    """Units of documents that are used: those that fit in a sequence, or all where they are truncated.

    Raises DataError for one that does not fit, where that is refused.
    """
    lengths = _positions(file, together)
    long = np.flatnonzero(lengths > seq)
    if len(long) and too_long == "refuse":
        first, longest = int(long[0]), int(lengths.max())
        raise DataError(
            lines[first],
            f"it takes {lengths[first]} positions, and a sequence has {seq}; {len(long)} of {len(lengths)} records do "
            f"not fit, the longest takes {longest}",
            f"--seq {longest}, or --finetune.too-long truncate or drop",
        )
    return (
        np.flatnonzero(lengths <= seq).tolist() if too_long == "drop" else list(range(len(lengths)))
    )


def _truncated(
    file: TokenFile, answers: np.ndarray, positions: int
) -> tuple[TokenFile, np.ndarray]:
    """Token file and answers in memory, each document cut after its first `positions` + 1 tokens."""
    ranges = [document_range(file.tokens.ends, d) for d in range(file.documents)]
    kept = [slice(start, min(stop, start + positions + 1)) for start, stop in ranges]
    tokens, marks = (
        np.concatenate([array[part] for part in kept]) for array in (file.tokens[:], answers)
    )
    return file._replace(
        tokens=TokenArray.of(tokens, np.cumsum([part.stop - part.start for part in kept]))
    ), marks


def _tokenise(
    path: str, spec: str, template: ChatTemplate | None, objective: Objective, cache: Path
) -> Path:
    """Returns the folder with the tokens of one source, made where it is not there yet."""
    location, tokenizer = Path(path), build_tokenizer(spec)
    files = sorted(location.rglob("*.jsonl")) if location.is_dir() else [location]
    if not files or not all(file.is_file() for file in files):
        reason = "a folder without .jsonl files" if location.is_dir() else "not there"
        raise DataError(
            f"--data {path}", f"it is {reason}", "a file of JSON lines, or a folder of such files"
        )
    status = [f"{file.resolve()} {sha256_of(file)}" for file in files]
    kind = [str(_FORMAT), objective, tokenizer.to_json(), repr(template), *status]
    folder = (
        cache / "tokens" / f"chat-{hashlib.sha256(chr(10).join(kind).encode()).hexdigest()[:24]}"
    )
    if is_token_file(folder):
        return folder
    lines = list[str]()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        writer = TokenWriter(scratch, "<u4")
        with contextlib.closing(writer), (scratch / "answers.bin").open("wb") as answers:
            for where, record in _records(files):
                for document in RecordRenderer(where, tokenizer, template).render(
                    record, objective
                ):
                    writer.add(document.tokens, np.array([len(document.tokens)]))
                    answers.write(document.answers.astype(np.uint8).tobytes())
                lines.append(where)
            if not lines:
                raise DataError(f"--data {path}", "it has no records", "JSON lines with `messages`")
            writer.finish()
        (scratch / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        (scratch / "lines.json").write_text(json.dumps(lines), encoding="utf-8")
        described = writer.description(tokenizer.vocab, source=path, tokenizer=spec, skipped={})
        write_description(scratch, described, "answers.bin", "lines.json")
        try:
            os.replace(scratch, folder)
        except OSError:  # another process was first
            if not is_token_file(folder):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _records(files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in files:
        with open_bytes(file) as raw:
            stream = decompressed(raw, kind_of(file.name)[1])
            for place, record in read_json_lines(file, stream, Records(str(file))):
                if not isinstance(record, dict):
                    truth = f"it is {kind_of_value(record)}, and no object"
                    raise DataError(str(place), truth, "one JSON object in a line")
                yield str(place), record


class Rendered(NamedTuple):
    """One document: its tokens, int32 [tokens], and True for those that are answers, [tokens]."""

    tokens: np.ndarray
    answers: np.ndarray


@dataclasses.dataclass(frozen=True)
class RecordRenderer:
    """Renderer of one record. where: its file and line, for errors."""

    where: str
    tokenizer: Tokenizer
    template: ChatTemplate | None

    def render(self, record: dict[str, Any], objective: Objective) -> list[Rendered]:
        """Returns the documents of a record: one, or the chosen and the rejected one.

        Raises DataError where it lacks what the objective needs, has no answer, or the template refuses it.
        """
        if objective == "preferences" and {"prompt", "chosen", "rejected"} <= record.keys():
            pairs = [(record["prompt"], record["chosen"]), (record["prompt"], record["rejected"])]
        elif objective == "preferences" and {"chosen", "rejected"} <= record.keys():
            conversations = [
                self._messages("chosen and rejected", record[name])
                for name in ("chosen", "rejected")
            ]
            pairs = [(messages[:-1], messages[-1:]) for messages in conversations]
        elif objective == "answers" and "messages" in record:
            if record.get("tools"):
                fix = "their description in a system message, or no `tools`"
                raise self._error("it has `tools`, which no template is given", fix)
            return [self._conversation(self._messages("messages", record["messages"]), 0)]
        elif objective == "answers" and {"prompt", "completion"} <= record.keys():
            pairs = [(record["prompt"], record["completion"])]
        else:
            raise self._error(
                f"it has {', '.join(map(repr, record)) or 'no fields'}", _KINDS[objective]
            )
        return [self._prompt_and_answer(prompt, answer) for prompt, answer in pairs]

    def _error(self, truth: str, fix: str) -> DataError:
        return DataError(self.where, truth, fix)

    def _prompt_and_answer(self, prompt: Any, answer: Any) -> Rendered:
        if isinstance(prompt, str) and isinstance(answer, str):
            self._check_text(prompt + answer)
            first = self.tokenizer.encode(prompt)
            last = np.append(self.tokenizer.encode(answer), self.tokenizer.end)
            if not len(first) or not answer:
                raise self._error(
                    f"its {'answer' if len(first) else 'prompt'} is empty", "a text in both"
                )
            first = with_begin(self.tokenizer, first)
            return Rendered(
                np.concatenate([first, last]), np.repeat([False, True], [len(first), len(last)])
            )
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        before = self._messages("prompt", prompt)
        return self._conversation(before + self._messages("answer", answer), len(before))

    def _messages(self, field: str, value: Any) -> list[Message]:
        if not isinstance(value, list) or not value:
            raise self._error(
                f"its {field} is {type(value).__name__} {str(value)[:40]!r}", f"a list of {_ROLES}"
            )
        for number, message in enumerate(value):
            if (
                not isinstance(message, dict)
                or not isinstance(message.get("role"), str)
                or "content" not in message
            ):
                truth = f"message {number} of its {field} is {str(message)[:60]}"
                raise self._error(truth, f"an object with {_ROLES}")
            content = message["content"]
            if not isinstance(content, str | None):
                found = f"{type(content).__name__} {str(content)[:40]!r}, which a template would write as it is"
                raise self._error(
                    f"the content of message {number} of its {field} is {found}", "its text"
                )
            self._check_text(content or "")
        return value

    def _check_text(self, text: str) -> None:
        try:
            check_unicode(text)
        except DataError as error:
            raise self._error(error.truth, error.fix) from error

    def _conversation(self, messages: list[Message], first: int) -> Rendered:
        if self.template is None:
            truth = "the tokenizer has no chat template, which makes a text of messages"
            raise self._error(
                truth, "--finetune.template FILE, or records of texts: `prompt` and `completion`"
            )
        if not any(message["role"] == "assistant" for message in messages[first:]):
            truth = "no message is the assistant's: there is nothing to learn"
            raise self._error(truth, "a message with that role")
        try:
            self._check_null_contents(messages, self.template)
            text, spans = self._answers(messages, self.template, first)
        except DataError as error:
            raise self._error(error.truth, error.fix) from error
        tokens, starts = _tokens_and_starts(self.tokenizer, text)
        answers = np.zeros(len(tokens), bool)
        for start, stop in spans:
            answers |= (starts >= start) & (starts < stop)
        if not answers.any() or answers[:1].all():
            truth = "its answers are empty, or begin the text"
            raise self._error(truth, "a question, and an answer with content")
        return Rendered(tokens, answers)

    def _check_null_contents(self, messages: list[Message], template: ChatTemplate) -> None:
        """Raises DataError where a template writes the word None for a content of null: not all know calls of tools."""
        if all(message["content"] is not None for message in messages):
            return
        empty = [{**message, "content": message["content"] or ""} for message in messages]
        if template.render(messages, answer=False).count("None") > template.render(
            empty, answer=False
        ).count("None"):
            number = next(i for i, message in enumerate(messages) if message["content"] is None)
            truth = (
                f"the content of message {number} is null, and the template writes 'None' for it"
            )
            raise self._error(
                truth, "a content, or a template that knows messages without (--finetune.template)"
            )

    def _answers(
        self, messages: Sequence[Message], template: ChatTemplate, first: int
    ) -> tuple[str, list[Span]]:
        if template.marks_answers:
            text, spans = template.render_marked(messages)
            return text, spans[
                sum(message["role"] == "assistant" for message in messages[:first]) :
            ]
        text, spans = template.render(messages, answer=False), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            before = template.render(messages[:number], answer=True)
            after = template.render(messages[: number + 1], answer=False)
            if not (text.startswith(after) and after.startswith(before)):
                raise self._error(
                    f"the template renders the messages up to answer {number} otherwise where more follow: that answer "
                    "cannot be found in the whole",
                    "a template with {% generation %} around answers (--finetune.template), or one answer in a record",
                )
            spans.append((len(before), len(after)))
        return text, spans


def _tokens_and_starts(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(tokenizer, Chars):
        return tokenizer.encode(text), np.arange(len(text))
    if isinstance(tokenizer, Bytes):
        sizes = [len(letter.encode("utf-8", "surrogatepass")) for letter in text]
        return tokenizer.encode(text), np.repeat(np.arange(len(text)), sizes)
    assert isinstance(tokenizer, Subwords)
    return tokenizer.encode_with_starts(text)
