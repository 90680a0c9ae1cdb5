"""Records of chat data as tokens, and which of them are the assistant's answers.

A conversation is rendered and tokenised whole, as a model sees it, and the answers are found by their characters. A
template with marks (`{% generation %}`) shows where they are. With any other, an answer is what the conversation up
to it has beyond the conversation before it with the prompt for an answer: its text, and the token that ends it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from meshwright.data.chars import Chars
from meshwright.data.chat import ChatTemplate, Message
from meshwright.data.subwords import check_unicode
from meshwright.data.tokenizers import Bytes, Tokenizer, with_begin
from meshwright.errors import DataError
from meshwright.fine_tuning import Objective

Span = tuple[int, int]
"""First character, and one past the last."""
_KINDS = {
    "answers": "`messages`, or `prompt` and `completion`",
    "preferences": "`prompt`, `chosen` and `rejected`",
}
_ROLES = "role and content, such as {'role': 'user', 'content': 'Hello'}"


@dataclasses.dataclass(frozen=True)
class Rendered:
    """One document."""

    tokens: np.ndarray
    """int32 [tokens]."""
    answers: np.ndarray
    """True for tokens that are answers, [tokens]."""


def render_record(
    where: str, record: dict[str, Any], objective: Objective, tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[Rendered]:
    """Returns the documents of a record: one, or the chosen and the rejected one.

    where: file and line, for errors. Raises DataError where the record lacks what the objective needs, has no answer,
    or the template refuses it.
    """
    if objective == "preferences" and {"prompt", "chosen", "rejected"} <= record.keys():
        pairs = [(record["prompt"], record["chosen"]), (record["prompt"], record["rejected"])]
    elif objective == "preferences" and {"chosen", "rejected"} <= record.keys():
        pairs = [_shared_prompt(where, record["chosen"]), _shared_prompt(where, record["rejected"])]
    elif objective == "answers" and "messages" in record:
        if record.get("tools"):
            raise DataError(
                where, "it has `tools`, which no template is given",
                "their description in a system message, or no `tools`",
            )  # fmt: skip
        return [_conversation(where, _messages(where, "messages", record["messages"]), tokenizer, template, 0)]
    elif objective == "answers" and {"prompt", "completion"} <= record.keys():
        pairs = [(record["prompt"], record["completion"])]
    else:
        raise DataError(where, f"it has {', '.join(map(repr, record)) or 'no fields'}", _KINDS[objective])
    return [_prompt_and_answer(where, prompt, answer, tokenizer, template) for prompt, answer in pairs]


def _shared_prompt(where: str, conversation: Any) -> tuple[Any, Any]:
    """Prompt and answer of a conversation that ends with its answer."""
    messages = _messages(where, "chosen and rejected", conversation)
    return messages[:-1], messages[-1:]


def _prompt_and_answer(
    where: str, prompt: Any, answer: Any, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Rendered:
    if isinstance(prompt, str) and isinstance(answer, str):
        _check_text(where, prompt + answer)
        first, last = tokenizer.encode(prompt), np.append(tokenizer.encode(answer), tokenizer.end)
        if not len(first) or not answer:
            raise DataError(where, f"its {'answer' if len(first) else 'prompt'} is empty", "a text in both")
        first = with_begin(tokenizer, first)
        return Rendered(np.concatenate([first, last]), np.repeat([False, True], [len(first), len(last)]))
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    before = _messages(where, "prompt", prompt)
    return _conversation(where, before + _messages(where, "answer", answer), tokenizer, template, len(before))


def _messages(where: str, field: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(where, f"its {field} is {type(value).__name__} {str(value)[:40]!r}", f"a list of {_ROLES}")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(
                where, f"message {number} of its {field} is {str(message)[:60]}", f"an object with {_ROLES}"
            )
        content = message["content"]
        if not isinstance(content, str | None):
            raise DataError(
                where, f"the content of message {number} of its {field} is {type(content).__name__} "
                f"{str(content)[:40]!r}, which a template would write as it is", "its text",
            )  # fmt: skip
        _check_text(where, content or "")
    return value


def _check_text(where: str, text: str) -> None:
    try:
        check_unicode(text)
    except DataError as error:
        raise DataError(where, error.truth, error.fix) from error


def _check_null_contents(where: str, messages: list[Message], template: ChatTemplate) -> None:
    """Raises DataError where a template writes the word None for a content of null: not all know calls of tools."""
    if all(message["content"] is not None for message in messages):
        return
    empty = [{**message, "content": message["content"] or ""} for message in messages]
    if template.render(messages, answer=False).count("None") > template.render(empty, answer=False).count("None"):
        number = next(i for i, message in enumerate(messages) if message["content"] is None)
        raise DataError(
            where, f"the content of message {number} is null, and the template writes 'None' for it",
            "a content, or a template that knows messages without (--finetune.template)",
        )  # fmt: skip


def _conversation(
    where: str, messages: list[Message], tokenizer: Tokenizer, template: ChatTemplate | None, first: int
) -> Rendered:
    """A conversation whose answers from message `first` on are trained on."""
    if template is None:
        raise DataError(
            where, "the tokenizer has no chat template, which makes a text of messages",
            "--finetune.template FILE, or records of texts: `prompt` and `completion`",
        )  # fmt: skip
    if not any(message["role"] == "assistant" for message in messages[first:]):
        raise DataError(where, "no message is the assistant's: there is nothing to learn", "a message with that role")
    try:
        _check_null_contents(where, messages, template)
        text, spans = _answers(where, messages, template, first)
    except DataError as error:
        if error.asked == where:
            raise
        raise DataError(where, error.truth, error.fix) from error
    tokens, starts = _encode(tokenizer, text)
    answers = np.zeros(len(tokens), bool)
    for start, stop in spans:
        answers |= (starts >= start) & (starts < stop)
    if not answers.any() or answers[:1].all():
        raise DataError(where, "its answers are empty, or begin the text", "a question, and an answer with content")
    return Rendered(tokens, answers)


def _answers(where: str, messages: Sequence[Message], template: ChatTemplate, first: int) -> tuple[str, list[Span]]:
    """Text of a conversation, and where its answers from message `first` on are."""
    if template.marks_answers:
        text, spans = template.render_marked(messages)
        skipped = sum(message["role"] == "assistant" for message in messages[:first])
        return text, spans[skipped:]
    text, spans = template.render(messages, answer=False), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first:
            continue
        before = template.render(messages[:number], answer=True)
        after = template.render(messages[: number + 1], answer=False)
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                where,
                f"the template renders the messages up to answer {number} otherwise where more follow: that answer "
                "cannot be found in the whole",
                "a template with {% generation %} around answers (--finetune.template), or one answer in a record",
            )
        spans.append((len(before), len(after)))
    return text, spans


def _encode(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a text, and the first character of each."""
    if isinstance(tokenizer, Chars):
        return tokenizer.encode(text), np.arange(len(text))
    if isinstance(tokenizer, Bytes):
        sizes = [len(letter.encode("utf-8", "surrogatepass")) for letter in text]
        return tokenizer.encode(text), np.repeat(np.arange(len(text)), sizes)
    encoded = _subwords(tokenizer.to_json()).encode(text, add_special_tokens=False)
    return np.array(encoded.ids, np.int32), np.array([start for start, _ in encoded.offsets], np.int64)


@functools.lru_cache(maxsize=4)
def _subwords(text: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(text)
