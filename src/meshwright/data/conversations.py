"""Chat data: conversations, prompts with completions, and preferences, as packed sequences.

A record has `messages`, or `prompt` and `completion`, or `prompt`, `chosen` and `rejected`, each a text or a list of
messages. Messages are rendered by the tokenizer's chat template; a text is taken as it is and its answer closed by the
tokenizer's end. A conversation is tokenised in one piece, as a model sees it, and only the assistant's answers have a
loss, with the token that ends them (`data.answers`). A template with marks (`{% generation %}`) shows where they are.

Records are tokenised once, into a token file with one more array, `answers.bin`. A sequence holds several complete
records, chosen by best fit; each is a document of its own, to which attention and positions are confined.
"""

import contextlib
import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from meshwright.config import Data
from meshwright.data.answers import AnswerFinder, Conversation
from meshwright.data.batch import PADDING
from meshwright.data.chat import (
    TEMPLATES,
    ChatTemplate,
    Message,
    check_jinja,
    read_chat_template,
    read_end_tokens,
    template_text,
)
from meshwright.data.chat_files import find_chat_files, read_records, unit_of
from meshwright.data.corpus import Check, Corpus, local_text, parse_source, share
from meshwright.data.feed import held_out_border
from meshwright.data.sources import Place
from meshwright.data.subwords import Subwords, check_unicode
from meshwright.data.token_writer import TokenWriter, write_description
from meshwright.data.tokenizers import Bytes, Chars, Tokenizer, build_tokenizer, with_begin
from meshwright.data.tokens import TokenFile, is_token_file, open_tokens
from meshwright.documents import LARGE, parse_json, read_json
from meshwright.errors import DataError, by_class, reason_of
from meshwright.fine_tuning import FineTune, Objective, TooLong
from meshwright.storage.removing import remove_tree, rename
from meshwright.storage.transfer import held_folder, sha256_of

_FORMAT = 5
_PLACE = np.dtype([("file", "<u4"), ("number", "<u8")])
"""Place of a record: the number of its file in `files.json`, and its line or row. They are in `places.bin`."""
_KINDS = {
    "answers": "`messages`, or `prompt` and `completion`",
    "preferences": "`prompt`, `chosen` and `rejected`",
}
_ROLES = "role and content, such as {'role': 'user', 'content': 'Hello'}"
_UNREAD = {
    "system": "a first message of the role system",
    "functions": "`tools`",
    "documents": "their text in a message",
}
"""Fields of a record that would say something to the model and are not read, and what is."""


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
    used: "Used"
    """What of the file is used."""

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
            start, stop = self._range(document)
            here, tokens = slice(at, at + stop - start - 1), self.file.tokens[start:stop]
            fields["inputs"][here] = tokens[:-1]
            fields["targets"][here] = tokens[1:]
            fields["segments"][here] = segment
            fields["positions"][here] = np.arange(stop - start - 1)
            fields["weights"][here] = self.answers[start + 1 : stop]
            at = here.stop
        fields["positions"][at:] = np.arange(self.seq - at)
        return fields

    def _range(self, document: int) -> tuple[int, int]:
        """First token of a document, and one past the last that is used."""
        start = document_range(self.file.tokens.ends, document)[0]
        return start, start + int(self.used.positions[document]) + 1

    def whole(self) -> "Packed":
        """Returns the sequences of all documents of the file that are used, in an order that is drawn."""
        packed = pack(self.file, self.answers, self.seq, self.used.units, self.together, self.used)
        return packed.shuffled()

    def shuffled(self) -> "Packed":
        """Returns the sequences in an order that is drawn, always the same: the first of them are a sample.

        As they are packed, those with the longest documents come first.
        """
        order = np.random.default_rng(0).permutation(len(self.rows))
        return dataclasses.replace(self, rows=tuple(self.rows[row] for row in order))

    def texts(self, samples: int) -> Iterator[np.ndarray]:
        """Yields the answers of the first sequences."""
        for row in self.rows[:samples]:
            for document in row:
                start, stop = self._range(document)
                yield self.file.tokens[start + 1 : stop][self.answers[start + 1 : stop] > 0]


def document_range(ends: np.ndarray, document: int) -> tuple[int, int]:
    """Returns the first token of a document and one past its last."""
    return (int(ends[document - 1]) if document else 0), int(ends[document])


class Used(NamedTuple):
    """Parts of the documents of a token file that are used."""

    positions: np.ndarray
    """Positions of each document: one fewer than its tokens, and fewer still where its end is cut."""
    units: np.ndarray
    """Units of documents that stay together which are used, ascending."""

    @classmethod
    def all_of(cls, file: TokenFile, together: int) -> "Used":
        """Returns that everything is used."""
        positions = np.diff(file.tokens.ends, prepend=0) - 1
        return cls(positions, np.arange(file.documents // together))

    def lengths(self, together: int) -> np.ndarray:
        """Returns the positions of each unit."""
        return self.positions.reshape(-1, together).sum(1)


def pack(
    file: TokenFile,
    answers: np.ndarray,
    seq: int,
    units: Any,
    together: int,
    used: Used | None = None,
) -> Packed:
    """Packs units of `together` documents by best fit: each goes where it leaves the least room, the longest first.

    Deterministic. Every unit fits in `seq` (`load_conversations`).  used: what of the documents is used, by default all.
    """
    used = Used.all_of(file, together) if used is None else used
    lengths = used.lengths(together)
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
    return Packed(file, answers, seq, tuple(map(tuple, rows)), together, used)


def load_conversations(
    data: Data,
    seq: int,
    tuning: FineTune,
    cache: Path,
    check: Check = lambda tokenizer, name: None,
) -> tuple[Corpus, list[tuple[Packed, Packed]]]:
    """Loads chat data: its files, and for each the sequences to train on and the held-out ones.

    Tokens are kept in `cache`. Records that are longer than a sequence are refused, cut or dropped (`FineTune.too_long`),
    and how many is printed.
    check: as of `load_corpus`.
    Raises DataError with file and line for a record that is malformed, has no answer, or is refused.
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
        check(build_tokenizer(spec), data.tokenizer)
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
        used, summary = fit(file, answers, seq, together, _place_of(folder), tuning.too_long)
        if summary and jax.process_index() == 0:
            print(f"{source.path}: {summary}", file=sys.stderr, flush=True)
        order = np.random.default_rng(0).permutation(used.units)
        border = held_out_border(len(order), data.held_out)
        if data.held_out != 0 and len(order) > 1:
            border = min(max(border, 1), len(order) - 1)
        if not border or (data.held_out != 0 and border == len(order)):
            truth = f"it has {len(order)} record(s): {border} to train on and {len(order) - border} to evaluate"
            truth += f" ({summary})" if summary else ""
            raise DataError(f"--data {source.path}", truth, "more records, or --data.held-out 0")
        train, held_out = (
            pack(file, answers, seq, units, together, used)
            for units in (order[:border], order[border:])
        )
        files.append(file)
        # Training draws its own order; an evaluation takes the first sequences.
        parts.append((train, held_out.shuffled()))
    return Corpus(tuple(files), tuple(source.weight for source in sources)), parts


def template_of(tokenizer: str, file: str | None) -> ChatTemplate | None:
    """Returns the chat template of a run: the one it names (`TEMPLATES`, or a file), or that beside its tokenizer."""
    beside = read_chat_template(Path(tokenizer).parent) if Path(tokenizer).is_file() else None
    if file is None:
        return beside
    try:
        text = template_text(file)
    except (OSError, ValueError) as error:
        fix = f"a file with a Jinja template, or {' or '.join(TEMPLATES)}"
        refusal = DataError(f"--finetune.template {file}", reason_of(error), fix)
        raise by_class(error, refusal) from error
    return ChatTemplate(text, beside.special_tokens if beside else ())


def stops_of(tokenizer: Tokenizer, spec: str) -> tuple[int, ...]:
    """Returns the tokens at which the model of a tokenizer's file stops."""
    if not Path(spec).is_file():
        return (tokenizer.end,)
    folder = Path(spec).parent
    stops = read_end_tokens(folder) or read_end_tokens(folder / "huggingface")
    return tuple(stop for stop in stops if stop < tokenizer.vocab) or (tokenizer.end,)


def _place_of(folder: Path) -> Callable[[int], str]:
    """Returns a function from the number of a record to its place. The places of others are not read."""
    places: Any = np.memmap(folder / "places.bin", _PLACE, mode="r")

    def place(record: int) -> str:
        found = places[record]
        file = Path(read_json(folder / "files.json", LARGE)[found["file"]])
        return str(Place(file, unit_of(file), int(found["number"])))

    return place


def fit(
    file: TokenFile,
    answers: np.ndarray,
    seq: int,
    together: int,
    place: Callable[[int], str],
    too_long: TooLong,
) -> tuple[Used, str]:
    """Fits the records of a token file into sequences of `seq` positions; returns what is used, and what was done.

    Only records that are longer than a sequence are touched. Where they are truncated, the documents of a record share
    its positions: one that needs less than its share leaves the rest to the other. A record of which some document has
    no token of an answer left is dropped: it would teach nothing.
    place: returns file and line of a record. Raises DataError for a record that does not fit, where that is refused.
    """
    used = Used.all_of(file, together)
    lengths = used.lengths(together)
    long = np.flatnonzero(lengths > seq)
    if not len(long):
        return used, ""
    records = f"{len(long):,} of {len(lengths):,} records are longer than a sequence of {seq}"
    if too_long == "refuse":
        first, longest = int(long[0]), int(lengths.max())
        raise DataError(
            place(first),
            f"it takes {lengths[first]} positions, and a sequence has {seq}; {len(long)} of {len(lengths)} records do "
            f"not fit, the longest takes {longest}",
            f"--seq {longest}, or --finetune.too-long truncate or drop",
        )
    if too_long == "drop":
        return Used(used.positions, np.setdiff1d(used.units, long)), f"{records}: dropped"
    positions, empty = used.positions.copy(), list[int]()
    for unit in long:
        documents = range(unit * together, (unit + 1) * together)
        for document, room in zip(
            documents, share_room([int(positions[d]) for d in documents], seq), strict=True
        ):
            positions[document] = room
        if not all(_has_answer(file, answers, positions, document) for document in documents):
            empty.append(int(unit))
    summary = f"{records}: {len(long) - len(empty):,} cut at their end, {len(empty):,} dropped"
    if empty:
        summary += f" as no token of an answer was left, the first {place(empty[0])}"
    return Used(positions, np.setdiff1d(used.units, empty)), summary


def share_room(wanted: Sequence[int], room: int) -> list[int]:
    """Returns the positions that each of one or two documents has of `room`, which they exceed together.

    Example:
        >>> share_room([10, 90], 60), share_room([70, 90], 61), share_room([90], 60)
        ([10, 50], [30, 31], [60])
    """
    if len(wanted) == 1:
        return [min(wanted[0], room)]
    first, second = wanted
    first = min(first, max(room // 2, room - second))
    return [first, min(second, room - first)]


def _has_answer(file: TokenFile, answers: np.ndarray, positions: np.ndarray, document: int) -> bool:
    start = document_range(file.tokens.ends, document)[0]
    return bool(answers[start + 1 : start + 1 + int(positions[document])].any())


def _tokenise(
    path: str, spec: str, template: ChatTemplate | None, objective: Objective, cache: Path
) -> Path:
    """Returns the folder with the tokens of one source, made where it is not there yet."""
    tokenizer = build_tokenizer(spec)
    stops = stops_of(tokenizer, spec)
    found = find_chat_files(path)
    files = found.files
    if found.note:
        print(f"{path}: {found.note}", file=sys.stderr, flush=True)
    status = [f"{file.resolve()} {sha256_of(file)}" for file in files]
    kind = [str(_FORMAT), objective, tokenizer.to_json(), repr(template), repr(stops), *status]
    folder = (
        cache / "tokens" / f"chat-{hashlib.sha256(chr(10).join(kind).encode()).hexdigest()[:24]}"
    )
    if is_token_file(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        writer = TokenWriter(scratch, "<u4")
        with (
            held_folder(scratch),
            contextlib.closing(writer),
            (scratch / "answers.bin").open("wb") as answers,
            (scratch / "places.bin").open("wb") as places,
        ):
            for number, where, record in read_records(files):
                renderer = RecordRenderer(str(where), tokenizer, template, stops)
                for document in renderer.render(record, objective):
                    writer.add(document.tokens, np.array([len(document.tokens)]))
                    answers.write(document.answers.astype(np.uint8).tobytes())
                places.write(np.array((number, where.number), _PLACE).tobytes())
            if not places.tell():
                raise DataError(f"--data {path}", "it has no records", "JSON lines with `messages`")
            writer.finish()
        (scratch / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        names = json.dumps([str(file) for file in files])
        (scratch / "files.json").write_text(names, encoding="utf-8")
        described = writer.description(tokenizer.vocab, source=path, tokenizer=spec, skipped={})
        write_description(scratch, described, "answers.bin", "places.bin", "files.json")
        try:
            rename(scratch, folder, below=folder.parent)
        except OSError:  # another process was first
            if not is_token_file(folder):
                raise
    finally:
        with contextlib.suppress(OSError):
            remove_tree(scratch, below=folder.parent)
    return folder


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
    stops: tuple[int, ...] = ()
    """Tokens at which the model stops. Where they are known, a last answer that a template leaves open ends with one."""

    def render(self, record: dict[str, Any], objective: Objective) -> list[Rendered]:
        """Returns the documents of a record: one, or the chosen and the rejected one.

        Raises DataError where it lacks what the objective needs, has no answer, or the template refuses it.
        """
        for name, fix in _UNREAD.items():
            if record.get(name):
                raise self._error(f"it has `{name}`, which is not read", fix)
        given = self._given(record)
        if objective == "preferences" and {"prompt", "chosen", "rejected"} <= record.keys():
            pairs = [(record["prompt"], record["chosen"]), (record["prompt"], record["rejected"])]
        elif objective == "preferences" and {"chosen", "rejected"} <= record.keys():
            conversations = [
                self._messages("chosen and rejected", record[name])
                for name in ("chosen", "rejected")
            ]
            pairs = [(messages[:-1], messages[-1:]) for messages in conversations]
        elif objective == "answers" and "messages" in record:
            messages = self._messages("messages", record["messages"])
            return [self._conversation(dataclasses.replace(given, messages=messages), 0)]
        elif objective == "answers" and {"prompt", "completion"} <= record.keys():
            pairs = [(record["prompt"], record["completion"])]
        else:
            raise self._error(
                f"it has {', '.join(map(repr, record)) or 'no fields'}", _KINDS[objective]
            )
        return [self._prompt_and_answer(given, prompt, answer) for prompt, answer in pairs]

    def _given(self, record: dict[str, Any]) -> Conversation:
        """Returns a conversation without messages: tools and further variables of the template."""
        tools = record.get("tools")
        if isinstance(tools, str) and tools.strip():  # as in tables, where tools differ in type
            try:
                tools = parse_json(tools)
            except ValueError as error:
                raise self._error(
                    f"its `tools` is a text that is not JSON: {error}", "a list"
                ) from error
        if tools and (
            not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)
        ):
            truth = f"its `tools` is {type(tools).__name__} {str(tools)[:40]!r}"
            raise self._error(truth, "a list of objects, each the description of a tool")
        variables = record.get("chat_template_kwargs") or {}
        if not isinstance(variables, dict):
            truth = f"its `chat_template_kwargs` is {type(variables).__name__}"
            raise self._error(truth, "an object with variables of the template")
        return Conversation((), tools or None, variables)

    def _error(self, truth: str, fix: str) -> DataError:
        return DataError(self.where, truth, fix)

    def _prompt_and_answer(self, given: Conversation, prompt: Any, answer: Any) -> Rendered:
        if isinstance(prompt, str) and isinstance(answer, str):
            if given.tools or given.variables:
                truth = (
                    "it has tools or variables of a template, and its prompt and answer are texts"
                )
                raise self._error(truth, "lists of messages in both")
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
        messages = before + self._messages("answer", answer)
        return self._conversation(dataclasses.replace(given, messages=messages), len(before))

    def _messages(self, field: str, value: Any) -> list[Message]:
        if not isinstance(value, list) or not value:
            raise self._error(
                f"its {field} is {type(value).__name__} {str(value)[:40]!r}", f"a list of {_ROLES}"
            )
        return [self._message(field, number, message) for number, message in enumerate(value)]

    def _message(self, field: str, number: int, message: Any) -> Message:
        """Returns a message without fields that are null, and its content as a text or null."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            truth = f"message {number} of its {field} is {str(message)[:60]}"
            raise self._error(truth, f"an object with {_ROLES}")
        present = {name: item for name, item in message.items() if item is not None}
        if present.get("tool_calls") == []:
            del present["tool_calls"]
        if "content" not in message and "tool_calls" not in present:
            truth = f"message {number} of its {field} is {str(message)[:60]}"
            raise self._error(truth, f"an object with {_ROLES}")
        content = message.get("content")
        if isinstance(content, list):
            content = self._joined(f"the content of message {number} of its {field}", content)
        if not isinstance(content, str | None):
            truth = (
                f"the content of message {number} of its {field} is {type(content).__name__} "
                f"{str(content)[:40]!r}, which a template would write as it is"
            )
            raise self._error(truth, "its text")
        self._check_text(content or "")
        return {**present, "content": content}

    def _joined(self, what: str, parts: list[Any]) -> str:
        """Returns the text of a content in parts. Raises DataError for a part that is not a text."""
        texts = []
        for number, part in enumerate(parts):
            text = part
            if isinstance(part, dict) and part.get("type", "text") == "text":
                text = part.get("text")
            if not isinstance(text, str):
                truth = f"part {number} of {what} is {str(part)[:60]}"
                raise self._error(truth, 'parts of text only, {"type": "text", "text": "Hello"}')
            texts.append(text)
        return "".join(texts)

    def _check_text(self, text: str) -> None:
        try:
            check_unicode(text)
        except DataError as error:
            raise self._error(error.truth, error.fix) from error

    def _conversation(self, conversation: Conversation, first: int) -> Rendered:
        messages = conversation.messages
        if self.template is None:
            truth = "the tokenizer has no chat template, which makes a text of messages"
            fix = (
                f"--finetune.template {' or '.join(TEMPLATES)} or FILE, or records of texts: `prompt` and "
                "`completion`"
            )
            raise self._error(truth, fix)
        if not any(message["role"] == "assistant" for message in messages[first:]):
            truth = "no message is the assistant's: there is nothing to learn"
            raise self._error(truth, "a message with that role")
        stops = {stop: token_text(self.tokenizer, stop) for stop in self.stops}
        texts = [text for text in stops.values() if text]
        try:
            self._check_null_contents(conversation, self.template)
            found = AnswerFinder(self.template, conversation, texts).find(first)
        except DataError as error:
            raise self._error(error.truth, error.fix) from error
        tokens, starts = _tokens_and_starts(self.tokenizer, found.text)
        answers = np.zeros(len(tokens), bool)
        for start, stop in found.spans:
            answers |= (starts >= start) & (starts < stop)
        if not answers.any() or answers[:1].all():
            truth = "its answers are empty, or begin the text"
            raise self._error(truth, "a question, and an answer with content")
        if found.unclosed is not None and self.stops:
            end = self.tokenizer.end if self.tokenizer.end in self.stops else self.stops[0]
            for stop, text in stops.items():
                if text and text == found.unclosed:
                    end = stop
            tokens = np.append(tokens, np.int32(end))
            answers = np.append(answers, True)
        return Rendered(tokens, answers)

    def _check_null_contents(self, conversation: Conversation, template: ChatTemplate) -> None:
        """Raises DataError where a template writes the word None for a content of null: not all know calls of tools."""
        messages = conversation.messages
        if all(message["content"] is not None for message in messages):
            return
        empty = [{**message, "content": message["content"] or ""} for message in messages]

        def nones(messages: Sequence[Message]) -> int:
            text = template.render(
                messages,
                answer=False,
                tools=conversation.tools,
                variables=conversation.variables,
            )
            return text.count("None")

        if nones(messages) > nones(empty):
            number = next(i for i, message in enumerate(messages) if message["content"] is None)
            truth = (
                f"the content of message {number} is null, and the template writes 'None' for it"
            )
            raise self._error(
                truth, "a content, or a template that knows messages without (--finetune.template)"
            )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text that a tokenizer reads as one control token; empty where it has none."""
    return tokenizer.text_of(token) if isinstance(tokenizer, Subwords) else ""


def _tokens_and_starts(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(tokenizer, Chars):
        return tokenizer.encode(text), np.arange(len(text))
    if isinstance(tokenizer, Bytes):
        sizes = [len(letter.encode("utf-8", "surrogatepass")) for letter in text]
        return tokenizer.encode(text), np.repeat(np.arange(len(text)), sizes)
    assert isinstance(tokenizer, Subwords)
    return tokenizer.encode_with_starts(text)
