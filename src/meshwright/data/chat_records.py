"""Records of chat data as documents: their tokens, and which of these are answers.

A record has `messages`; or `prompt` and `completion`; or, for preferences, `chosen` and `rejected`,
with or without a `prompt`. Messages are rendered by the tokenizer's chat template; a text is taken
as it is, and its answer is closed by the tokenizer's end. A conversation is tokenised in one piece,
as a model sees it, and only the assistant's answers have a loss (`data.answers`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.answers import AnswerFinder, Answers, Conversation
from meshwright.data.chat import TEMPLATES, ChatTemplate, Message
from meshwright.data.subwords import Subwords, check_unicode
from meshwright.data.tokenizers import Bytes, Chars, Tokenizer, with_begin
from meshwright.documents import parse_json
from meshwright.errors import DataError
from meshwright.fine_tuning import Objective

_FIELDS = {
    "answers": "`messages`, or `prompt` and `completion`",
    "preferences": "`prompt`, `chosen` and `rejected`",
}
_ROLES = "role and content, such as {'role': 'user', 'content': 'Hello'}"
_UNREAD = {
    "system": "a first message of the role system",
    "functions": "`tools`",
    "documents": "their text in a message",
}
"""Fields of other formats that a model would need and that are not read, and what to write instead.
"""


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
    """Tokens at which the model stops; one of them closes a last answer that a template leaves
    open."""

    def render(self, record: dict[str, Any], objective: Objective) -> list[Rendered]:
        """Returns the documents of a record: one, or the chosen and the rejected one.

        Raises DataError if it lacks a field that the objective needs or has no answer, or if the
        template refuses it.
        """
        for name, fix in _UNREAD.items():
            if record.get(name):
                raise self._error(f"it has `{name}`, which is not read", fix)
        context = self._without_messages(record)
        if objective == "answers" and "messages" in record:
            messages = self._messages("messages", record["messages"])
            conversation = dataclasses.replace(context, messages=messages)
            return [self._conversation(conversation, 0)]
        pairs = self._prompts_with_answers(record, objective)
        return [self._prompt_and_answer(context, prompt, answer) for prompt, answer in pairs]

    def _prompts_with_answers(
        self, record: dict[str, Any], objective: Objective
    ) -> list[tuple[Any, Any]]:
        """Returns the prompt and the answer of each document of a record without `messages`."""
        if objective == "answers" and {"prompt", "completion"} <= record.keys():
            return [(record["prompt"], record["completion"])]
        if objective == "preferences" and {"chosen", "rejected"} <= record.keys():
            if "prompt" in record:
                return [(record["prompt"], record[name]) for name in ("chosen", "rejected")]
            # Both are conversations, each with its own prompt.
            chosen = self._messages("chosen and rejected", record["chosen"])
            rejected = self._messages("chosen and rejected", record["rejected"])
            return [(chosen[:-1], chosen[-1:]), (rejected[:-1], rejected[-1:])]
        fields = ", ".join(map(repr, record)) or "no fields"
        raise self._error(f"it has {fields}", _FIELDS[objective])

    def _without_messages(self, record: dict[str, Any]) -> Conversation:
        """Returns a conversation without messages: its tools and further template variables."""
        tools = record.get("tools")
        if isinstance(tools, str) and tools.strip():  # as in tables, where tools differ in type
            try:
                tools = parse_json(tools)
            except ValueError as error:
                truth = f"its `tools` is a text that is not JSON: {error}"
                raise self._error(truth, "a list") from error
        is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        if tools and not is_list:
            truth = f"its `tools` is {type(tools).__name__} {str(tools)[:40]!r}"
            raise self._error(truth, "a list of objects, each the description of a tool")
        variables = record.get("chat_template_kwargs") or {}
        if not isinstance(variables, dict):
            truth = f"its `chat_template_kwargs` is {type(variables).__name__}"
            raise self._error(truth, "an object with variables of the template")
        return Conversation((), tools or None, variables)

    def _error(self, truth: str, fix: str) -> DataError:
        return DataError(self.where, truth, fix)

    def _prompt_and_answer(self, context: Conversation, prompt: Any, answer: Any) -> Rendered:
        """Returns the document of a prompt and an answer, each a text or a list of messages."""
        if isinstance(prompt, str) and isinstance(answer, str):
            if context.tools or context.variables:
                truth = "it has tools or template variables, and its prompt and answer are texts"
                raise self._error(truth, "lists of messages in both")
            return self._texts(prompt, answer)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        before = self._messages("prompt", prompt)
        messages = before + self._messages("answer", answer)
        return self._conversation(dataclasses.replace(context, messages=messages), len(before))

    def _texts(self, prompt: str, answer: str) -> Rendered:
        """Returns the document of two texts, tokenised one after the other, without a template."""
        self._check_text(prompt + answer)
        prompt_tokens = self.tokenizer.encode(prompt)
        if not len(prompt_tokens):
            raise self._error("its prompt is empty", "a text in both")
        if not answer:
            raise self._error("its answer is empty", "a text in both")
        prompt_tokens = with_begin(self.tokenizer, prompt_tokens)
        answer_tokens = np.append(self.tokenizer.encode(answer), self.tokenizer.end)
        tokens = np.concatenate([prompt_tokens, answer_tokens])
        return Rendered(tokens, np.arange(len(tokens)) >= len(prompt_tokens))

    def _messages(self, field: str, value: Any) -> list[Message]:
        if not isinstance(value, list) or not value:
            truth = f"its {field} is {type(value).__name__} {str(value)[:40]!r}"
            raise self._error(truth, f"a list of {_ROLES}")
        return [self._message(field, number, message) for number, message in enumerate(value)]

    def _message(self, field: str, number: int, message: Any) -> Message:
        """Returns a message without fields that are null, its content a text or null."""
        described = f"message {number} of its {field}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            truth = f"{described} is {str(message)[:60]}"
            raise self._error(truth, f"an object with {_ROLES}")
        present = {name: item for name, item in message.items() if item is not None}
        if present.get("tool_calls") == []:
            del present["tool_calls"]
        if "content" not in message and "tool_calls" not in present:
            truth = f"{described} is {str(message)[:60]}"
            raise self._error(truth, f"an object with {_ROLES}")
        content = message.get("content")
        if isinstance(content, list):
            content = self._joined(f"the content of {described}", content)
        if not isinstance(content, str | None):
            truth = (
                f"the content of {described} is {type(content).__name__} {str(content)[:40]!r}, "
                "which a template would write as it is"
            )
            raise self._error(truth, "its text")
        self._check_text(content or "")
        return {**present, "content": content}

    def _joined(self, described: str, parts: list[Any]) -> str:
        """Returns the text of a content in parts.

        Raises DataError for a part that is not a text.
        """
        texts = []
        for number, part in enumerate(parts):
            text = part
            if isinstance(part, dict) and part.get("type", "text") == "text":
                text = part.get("text")
            if not isinstance(text, str):
                truth = f"part {number} of {described} is {str(part)[:60]}"
                raise self._error(truth, 'parts of text only, {"type": "text", "text": "Hello"}')
            texts.append(text)
        return "".join(texts)

    def _check_text(self, text: str) -> None:
        try:
            check_unicode(text)
        except DataError as error:
            raise self._error(error.truth, error.fix) from error

    def _conversation(self, conversation: Conversation, first: int) -> Rendered:
        """Returns the document of a conversation; its answers are those from message `first` on."""
        if self.template is None:
            truth = "the tokenizer has no chat template, which makes a text of messages"
            templates = " or ".join(TEMPLATES)
            fix = (
                f"--finetune.template {templates} or FILE, or records of texts: `prompt` and "
                "`completion`"
            )
            raise self._error(truth, fix)
        if not any(message["role"] == "assistant" for message in conversation.messages[first:]):
            truth = "no message is the assistant's: there is nothing to learn"
            raise self._error(truth, "a message with that role")
        texts = {stop: token_text(self.tokenizer, stop) for stop in self.stops}
        try:
            self._check_null_contents(conversation, self.template)
            known = [text for text in texts.values() if text]
            found = AnswerFinder(self.template, conversation, known).find(first)
        except DataError as error:
            raise self._error(error.truth, error.fix) from error
        tokens, starts = _tokens_and_starts(self.tokenizer, found.text)
        is_answer = np.zeros(len(tokens), bool)
        for start, stop in found.spans:
            is_answer |= (starts >= start) & (starts < stop)
        if not is_answer.any() or is_answer[0]:
            truth = "its answers are empty, or begin the text"
            raise self._error(truth, "a question, and an answer with content")
        if found.unclosed is not None and self.stops:
            tokens = np.append(tokens, np.int32(self._closing_token(found, texts)))
            is_answer = np.append(is_answer, True)
        return Rendered(tokens, is_answer)

    def _closing_token(self, found: Answers, texts: dict[int, str]) -> int:
        """Returns the token that closes the last answer.

        It is the template's own, or else one of `stops`.
        """
        for stop in reversed(self.stops):
            if texts[stop] and texts[stop] == found.unclosed:
                return stop
        if self.tokenizer.end in self.stops:
            return self.tokenizer.end
        return self.stops[0]

    def _check_null_contents(self, conversation: Conversation, template: ChatTemplate) -> None:
        """Raises DataError if a template writes the word None for a content of null.

        Templates that do not know calls of tools do.
        """
        messages = conversation.messages
        null = [number for number, message in enumerate(messages) if message["content"] is None]
        if not null:
            return
        empty = [{**message, "content": message["content"] or ""} for message in messages]
        if _count_nones(conversation, template, messages) > _count_nones(
            conversation, template, empty
        ):
            truth = (
                f"the content of message {null[0]} is null, and the template writes 'None' for it"
            )
            fix = "a content, or a template that knows messages without (--finetune.template)"
            raise self._error(truth, fix)


def _count_nones(
    conversation: Conversation, template: ChatTemplate, messages: Sequence[Message]
) -> int:
    """Returns how often `None` stands in a conversation that is rendered with these messages."""
    text = template.render(
        messages, answer=False, tools=conversation.tools, variables=conversation.variables
    )
    return text.count("None")


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text that a tokenizer reads as one control token; empty for other tokens."""
    return tokenizer.text_of(token) if isinstance(tokenizer, Subwords) else ""


def _tokens_and_starts(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a text and the first character of each, [tokens]."""
    if isinstance(tokenizer, Chars):
        return tokenizer.encode(text), np.arange(len(text))
    if isinstance(tokenizer, Bytes):
        sizes = [len(letter.encode("utf-8", "surrogatepass")) for letter in text]
        return tokenizer.encode(text), np.repeat(np.arange(len(text)), sizes)
    assert isinstance(tokenizer, Subwords)
    return tokenizer.encode_with_starts(text)
