"""Answers in a rendered conversation: where each begins and where it ends.

The text of a conversation does not show where its messages are. They are found by rendering it once
more with two characters of private use around each message's content. If the text without them is
the text itself, their positions are those of the contents. An answer begins where the template's
prompt for it ends (`add_generation_prompt`), which may be before its content (a header, reasoning),
and ends with the token that ends it:

    <|im_start|>user\\nTwo and two?<|im_end|>\\n<|im_start|>assistant\\nFour.<|im_end|>\\n
                    ^content 0  ^                                 ^content 1
                                                                  ^answer          ^
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.data.chat import REASONING, TEMPLATES, ChatTemplate, Message
from meshwright.errors import DataError

Span = tuple[int, int]
"""First character, and one past the last."""

_OPENING, _CLOSING = 0x100000, 0x108000
"""First characters of private use (plane 16) that stand before and after the content of message 0,
1, ..."""
_MARKED_MESSAGES = 0x7FFD
_MARK = re.compile("[\U00100000-\U0010fffd]")
_PIECE = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\w+|.", re.S)
"""What two texts have in common is counted in: a control token as templates write them, a word, or
a character."""
_LINKS = {"tool": ("tool_call_id", "name")}
"""Keys by role that name the message to which another one belongs. Their order names it too:
templates may leave them."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages and everything else that a template is rendered with."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    """Descriptions of tools (JSON schemas)."""
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further variables of the template."""


class Answers(NamedTuple):
    """Text of a conversation, and the answers in it."""

    text: str
    spans: list[Span]
    """First character of each answer, and one past the token that ends it."""
    unclosed: str | None
    """Where the text ends with an answer without a token that ends it: the text of the token that
    does, `""` where the template has none."""


class _Marked(NamedTuple):
    """Text of a conversation with the positions of its contents by number of their message."""

    text: str
    begins: dict[int, int]
    ends: dict[int, int]


@dataclasses.dataclass(frozen=True)
class AnswerFinder:
    """Finder of the answers of one conversation."""

    template: ChatTemplate
    conversation: Conversation
    stops: Sequence[str] = ()
    """Texts of the tokens at which the model stops."""

    def find(self, first: int) -> Answers:
        """Returns the text of the conversation and its answers from message `first` on.

        Raises DataError where the template refuses the conversation, writes nothing of a part of
        it, or hides where an answer begins.
        """
        messages = self.conversation.messages
        text = self._render(messages)
        marked_messages, whole = self._mark(text)
        self._check_contents(text, whole)
        self._check_keys(text)
        last = len(messages) - 1
        if self.template.marks_answers:
            found, spans = self._spans_by_marks(text)
            if first:
                begin = self._begin(first, marked_messages, whole)
                spans = [(start, stop) for start, stop in spans if stop > begin]
            assert found == text
            spans = [self._with_stop(text, span) for span in spans]
        else:
            spans = []
            for number in range(first, len(messages)):
                if messages[number]["role"] == "assistant":
                    begin = self._begin(number, marked_messages, whole)
                    end = self._end(number, begin, marked_messages, whole)
                    spans.append((begin, end))
        if not spans or messages[last]["role"] != "assistant" or text[spans[-1][1] :].strip():
            return Answers(text, spans, None)
        start = max(spans[-1][0], min(whole.ends.get(last, 0), spans[-1][1]))
        closed = any(stop in text[start : spans[-1][1]] for stop in self.stops)
        if (
            text[whole.ends.get(last, 0) :].strip()
            and self.template.source not in TEMPLATES.values()
        ):
            closed = True  # by what the template has for it
        if closed:
            return Answers(text, spans, None)
        return Answers(text, spans, self._closing(last, marked_messages))

    def _render(self, messages: Sequence[Message], answer: bool = False) -> str:
        given = self.conversation
        return self.template.render(
            messages, answer=answer, tools=given.tools, variables=given.variables
        )

    def _partial(self, messages: Sequence[Message], answer: bool) -> _Marked | None:
        """Returns the first messages rendered.

        None: the template refuses them without the others.
        """
        try:
            return _positions(self._render(messages, answer))
        except DataError:
            return None

    def _mark(self, text: str) -> tuple[list[Message], _Marked]:
        """Returns the messages with marks around their contents, and the positions of the marks.

        A content whose rendering the marks change stays without.
        """
        if _MARK.search(text):
            truth = "it has a character of private use (U+100000 to U+10FFFD), which mark answers"
            raise DataError("a conversation", truth, "a text without it")
        messages = self.conversation.messages
        marked = [_with_marks(number, message) for number, message in enumerate(messages)]
        whole = self._partial(marked, answer=False)
        if whole is not None and whole.text == text:
            return marked, whole
        # The template reads some content, such as its first words: each is tried by itself.
        kept = list(messages)
        for number in range(len(messages)):
            tried = [*messages[:number], marked[number], *messages[number + 1 :]]
            alone = self._partial(tried, answer=False)
            if alone is not None and alone.text == text:
                kept[number] = marked[number]
        return kept, _positions(self._render(kept))

    def _check_contents(self, text: str, whole: _Marked) -> None:
        """Raises DataError for a message of whose content the template writes nothing."""
        messages = self.conversation.messages
        for number, message in enumerate(messages):
            if not (message["content"] or "").strip():
                continue
            if number in whole.begins and number in whole.ends:
                continue
            if number in whole.begins or number in whole.ends:
                self._check_all_words(number, whole)
                continue
            for other in ("", "x"):
                changed = {**message, "content": other}
                if self._is_text([*messages[:number], changed, *messages[number + 1 :]], text):
                    self._refuse_unwritten(f"the content of message {number} ({message['role']})")

    def _check_all_words(self, number: int, whole: _Marked) -> None:
        """Raises DataError if a content lost one of its ends and a word with it.

        Templates drop reasoning in `<think>`, for example.
        """
        message = self.conversation.messages[number]
        lost = _lost_word(number, message, whole)
        if lost is None:
            return
        until = self._partial(
            [
                *self.conversation.messages[:number],
                _with_marks(number, message),
            ],
            answer=False,
        )
        what = f"a part of the content of message {number} with the word {lost!r}"
        if until is not None and _lost_word(number, message, until) is None:
            self._refuse_unwritten(
                f"{what} where more messages follow",
                f"a record that ends with message {number}, or one without that part",
            )
        self._refuse_unwritten(what, "a record without that part")

    def _check_keys(self, text: str) -> None:
        """Raises DataError for a key of a message, tools or a variable that changes nothing."""
        messages = self.conversation.messages
        for number, message in enumerate(messages):
            links = _LINKS.get(message["role"], ())
            for key, value in message.items():
                if key in ("role", "content", *links) or value in ("", [], {}):
                    continue
                removed = REASONING if key in REASONING else (key,)
                rest = {name: item for name, item in message.items() if name not in removed}
                if not self._is_text([*messages[:number], rest, *messages[number + 1 :]], text):
                    continue
                until = self._partial([*messages[: number + 1]], answer=False)
                without = self._partial([*messages[:number], rest], answer=False)
                if number + 1 < len(messages) and until != without:
                    self._refuse_unwritten(
                        f"{key!r} of message {number} where more messages follow",
                        f"a record that ends with message {number}, or one without that key",
                    )
                self._refuse_unwritten(f"{key!r} of message {number}")
        given = self.conversation
        if given.tools and self._without(dataclasses.replace(given, tools=None)) == text:
            self._refuse_unwritten("`tools`")
        for name in given.variables:
            rest = {key: value for key, value in given.variables.items() if key != name}
            if self._without(dataclasses.replace(given, variables=rest)) == text:
                self._refuse_unwritten(f"`chat_template_kwargs` {name!r}")

    def _without(self, conversation: Conversation) -> str | None:
        """Returns the text of another conversation, None where the template refuses it."""
        other = dataclasses.replace(self, conversation=conversation)
        found = other._partial(conversation.messages, answer=False)
        return None if found is None else found.text

    def _is_text(self, messages: Sequence[Message], text: str) -> bool:
        found = self._partial(messages, answer=False)
        return found is not None and found.text == text

    def _refuse_unwritten(self, what: str, fix: str = "a record without it") -> None:
        truth = f"the template writes nothing of {what}: the model would not see it"
        raise DataError(
            "a conversation", truth, f"{fix}, or a template that writes it (--finetune.template)"
        )

    def _spans_by_marks(self, text: str) -> tuple[str, list[Span]]:
        given = self.conversation
        return self.template.render_marked(
            given.messages, tools=given.tools, variables=given.variables
        )

    def _with_stop(self, text: str, span: Span) -> Span:
        """Returns a span with the token behind it, if that ends an answer."""
        start, end = span
        for stop in self.stops:
            if text.startswith(stop, end):
                return start, end + len(stop)
        return span

    def _begin(self, number: int, marked: Sequence[Message], whole: _Marked) -> int:
        """Returns the first character of an answer: the one behind the template's prompt for it."""
        text = whole.text
        content = whole.begins.get(number, len(text))
        before = self._partial(marked[:number], answer=True)
        if before is not None:
            if text.startswith(before.text) and len(before.text) <= content:
                return len(before.text)
            known = [i for i in before.ends if i in whole.ends]
            anchor = max(known, key=lambda i: before.ends[i], default=None)
            at = 0 if anchor is None else whole.ends[anchor]
            prompt = before.text[0 if anchor is None else before.ends[anchor] :]
            common = _common(prompt, text[at:content])
            if common > self._closing_of_last(marked[:number], prompt, anchor):
                return at + common
        if number not in whole.begins:
            truth = (
                f"the template writes neither its prompt for answer {number} nor the beginning of "
                f"its content as they "
                "are: where that answer begins cannot be found"
            )
            fix = "a template with {% generation %} around answers (--finetune.template)"
            raise DataError("a conversation", truth, fix)
        return content

    def _closing_of_last(self, marked: Sequence[Message], prompt: str, anchor: int | None) -> int:
        """Returns how much of a prompt for an answer ends the message before it."""
        closed = self._partial(marked, answer=False)
        if closed is None or (anchor is not None and anchor not in closed.ends):
            return 0
        return _common(prompt, closed.text[0 if anchor is None else closed.ends[anchor] :])

    def _end(self, number: int, begin: int, marked: Sequence[Message], whole: _Marked) -> int:
        """Returns one past the last character of an answer: that of the token that ends it."""
        at = max(begin, whole.ends.get(number, begin))
        following = [place for i, place in whole.begins.items() if i > number and place >= at]
        behind = whole.text[at : min(following, default=len(whole.text))]
        if stop := _first(self.stops, behind):
            return at + stop
        if number == len(marked) - 1:
            return len(whole.text)
        alone = self._partial(marked[: number + 1], answer=False)
        if alone is None:
            return at
        closing = alone.text[alone.ends.get(number, begin) :]
        common = _common(closing, behind)
        if closing[:common].strip() or not closing.strip():
            return at + common
        # Another token ends an answer that others follow, such as <|end|> in the place of
        # <|return|>.
        token = _PIECE.match(behind, common)
        return at + (token.end() if token and len(token[0]) > 2 else common)

    def _closing(self, last: int, marked: Sequence[Message]) -> str:
        """Returns the token that ends the last answer when a question follows it.

        Empty if the template writes none.
        """
        question = _with_marks(last + 1, {"role": "user", "content": "x"})
        followed = self._partial([*marked, question], answer=False)
        if followed is None or not {last, last + 1} <= {*followed.ends}:
            return ""
        behind = followed.text[followed.ends[last] : followed.begins[last + 1]]
        stop = _first(self.stops, behind)
        return next((s for s in self.stops if stop and behind[:stop].endswith(s)), "")


def _with_marks(number: int, message: Message) -> Message:
    """Returns a message with a mark before and after its content.

    White space at its ends stays outside.
    """
    content = message["content"] or ""
    core = content.strip()
    if not core or number >= _MARKED_MESSAGES:
        return message
    begin = content.index(core)
    end = begin + len(core)
    opening, closing = chr(_OPENING + number), chr(_CLOSING + number)
    marked = f"{content[:begin]}{opening}{core}{closing}{content[end:]}"
    return {**message, "content": marked}


def _lost_word(number: int, message: Message, rendered: _Marked) -> str | None:
    """Returns the first word of a content that is missing between its neighbors in a text.

    None: no word is missing.
    """
    before = [end for other, end in rendered.ends.items() if other < number]
    after = [begin for other, begin in rendered.begins.items() if other > number]
    at = max(before, default=0)
    stop = min((begin for begin in after if begin >= at), default=len(rendered.text))
    for word in re.findall(r"\w+", message["content"]):
        found = rendered.text.find(word, at, stop)
        if found < 0:
            return str(word)
        at = found + len(word)
    return None


def _positions(marked: str) -> _Marked:
    """Returns a text without its marks, and where they were.

    For a content that is written twice, the last place counts.
    """
    parts = list[str]()
    begins, ends = dict[int, int](), dict[int, int]()
    length = start = 0
    for mark in _MARK.finditer(marked):
        part = marked[start : mark.start()]
        parts.append(part)
        length += len(part)
        start = mark.end()
        code = ord(mark[0])
        if code >= _CLOSING:
            ends[code - _CLOSING] = length
        else:
            begins[code - _OPENING] = length
    parts.append(marked[start:])
    for number in [i for i in begins if ends.get(i, length) < begins[i]]:
        del begins[number], ends[number]  # the template turns the text around
    return _Marked("".join(parts), begins, ends)


def _pieces(text: str) -> Iterator[str]:
    return (piece[0] for piece in _PIECE.finditer(text))


def _common(one: str, other: str) -> int:
    """Returns how many characters two texts begin with alike, in whole pieces."""
    if other.startswith(one):
        return len(one)
    length = 0
    for a, b in zip(_pieces(one), _pieces(other), strict=False):
        if a != b:
            break
        length += len(a)
    return length


def _first(stops: Sequence[str], text: str) -> int:
    """Returns one past the first of the tokens in a text, 0 where it has none."""
    found = [(text.index(stop), len(stop)) for stop in stops if stop in text]
    if not found:
        return 0
    at, length = min(found)
    return at + length
