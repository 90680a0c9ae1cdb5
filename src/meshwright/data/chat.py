"""Chat templates: a conversation as the text that a model was tuned on.

The template is Jinja, and comes with the tokenizer.
A template is a program from a stranger. It runs in a process of its own, in Jinja's sandbox
(`ImmutableSandboxedEnvironment`, which has no access to Python's objects), with limits on its time,
its memory and its text (`chat_renderer`).
"""

import dataclasses
import importlib.util
import json
import multiprocessing
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshwright.documents import SMALL, check_inside, fix_of, parse_document, read_json, read_text
from meshwright.errors import DataError, WeightsError, by_class, reason_of
from meshwright.storage.paths import path_of

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}
"""Chat templates by name: ChatML, for tokenizers that come without a template."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning. Templates read one of the first two; `transformers` fills both
from any."""

_MARKS = ("\ue0f8", "\ue0f9")
"""Characters of private use around answers, while a conversation is rendered."""

Message = dict[str, Any]
"""`{"role": "user", "content": "..."}`; other keys are the template's own."""

SECONDS = 10.0
"""Most seconds in which a template renders a conversation."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Template of a conversation."""

    source: str
    """Jinja template."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """Names and texts of special tokens that the template may use: `bos_token`, `eos_token`."""

    tool_source: str | None = None
    """Jinja template of conversations with tools, where the model has one of its own for them."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        answer: bool = True,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of a conversation.

        answer: ends it where the model's answer begins.
        tools: descriptions of tools.  variables: further variables of the template.
        Raises DataError where the template refuses the conversation, takes too long or too much
        memory, or Jinja is not installed.
        """
        return self._render(messages, answer, tools, variables, ("", ""))

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks which of its text is answers: `{% generation %}`."""
        return re.search(r"{%-?\s*generation\s*-?%}", self.source) is not None

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and the [first, last) characters of each answer.

        For a template that `marks_answers`. Raises as `render`.
        """
        if any(mark in str(message.get("content")) for message in messages for mark in _MARKS):
            raise DataError(
                "a conversation",
                f"it has one of the characters {_MARKS}, which mark answers",
                "without them",
            )
        text, spans = "", list[tuple[int, int]]()
        marked = self._render(messages, False, tools, variables, _MARKS)
        for number, part in enumerate(re.split(f"[{''.join(_MARKS)}]", marked)):
            if number % 2:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return text, spans

    def _render(
        self,
        messages: Sequence[Message],
        answer: bool,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] | None,
        marks: tuple[str, str],
    ) -> str:
        """Returns the text, with `marks` before and after each answer that the template marks."""
        check_jinja()
        source = self.source if not tools or self.tool_source is None else self.tool_source
        request = {
            "source": source,
            "tokens": dict(self.special_tokens),
            "marks": marks,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools or None,
            "variables": dict(variables or {}),
            "answer": answer,
        }
        reply = _renderer.ask(json.dumps(request))
        if "text" in reply:
            return str(reply["text"])
        asked = "a conversation in the chat template"
        another = "another template: --finetune.template FILE, or --chat-template FILE of generate"
        if reply.get("of") == "template":
            raise DataError(asked, f"the template is not Jinja: {reply['error']}", another)
        raise DataError(
            asked,
            f"the template refuses it: {reply['error']}",
            f"roles and order of messages as the template has them, or {another}",
        )


def _with_reasoning(message: Message) -> Message:
    """Returns a message whose reasoning has the names that templates read.

    `transformers` fills them alike.
    """
    given = (message[key] for key in REASONING if message.get(key) is not None)
    reasoning = next(given, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Renderer:
    """Process that renders templates.

    It starts when it is first needed, and again after it was stopped.
    """

    def __init__(self) -> None:
        self._stop: Callable[[], Any] | None = None
        self._connection: Connection | None = None

    def ask(self, request: str) -> dict[str, Any]:
        """Sends one request and returns the answer; stops a process that gives none in time."""
        if self._connection is None:
            self._start()
        assert self._connection is not None and self._stop is not None
        try:
            self._connection.send_bytes(request.encode())
            if self._connection.poll(SECONDS):
                return dict(json.loads(self._connection.recv_bytes()))
            error = f"it took more than {SECONDS:.0f} s"
        except (OSError, EOFError):
            error = "it ran out of its memory or its time"
        self._connection = None
        self._stop()
        return {"error": error}

    def _start(self) -> None:
        # By the path of the file: the package itself would take longer to import than a
        # conversation to render.
        file = Path(__file__).with_name("chat_renderer.py")
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen([sys.executable, "-P", str(file)], stdin=theirs.fileno())
        self._stop = weakref.finalize(self, _end, process, self._connection)
        self._connection.recv_bytes()  # it has started: the time of a template begins now


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()


_renderer = _Renderer()


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Reads the chat template of a tokenizer's folder.

    It is in chat_template.jinja, or else in tokenizer_config.json.
    An output folder has the files of the model that it started from in `huggingface`. Returns None
    where there is no template. Raises DataError where a file is damaged or leaves the folder.
    """
    file, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    with_tools_file = folder / "additional_chat_templates" / "tool_use.jinja"
    try:
        check_inside(folder, [file, template, with_tools_file])
        config = dict(parse_document(read_text(file))) if file.is_file() else {}
        source = config.get("chat_template")
        with_tools = None
        if isinstance(source, list):  # several, by name
            named = {t.get("name"): t["template"] for t in source}
            source, with_tools = named.get("default"), named.get("tool_use")
        if template.is_file():
            source, with_tools = read_text(template), None
        if with_tools_file.is_file():
            with_tools = read_text(with_tools_file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise by_class(
            error,
            DataError(
                f"the chat template of {folder}",
                f"it cannot be read: {reason_of(error)}",
                fix_of(error, "its own files"),
            ),
        ) from error
    if source is None:
        return (
            read_chat_template(folder / "huggingface")
            if (folder / "huggingface").is_dir()
            else None
        )
    if not isinstance(source, str) or not isinstance(with_tools, str | None) or len(source) > SMALL:
        raise DataError(
            f"the chat template of {folder}", f"it is a {type(source).__name__}", "its own files"
        )
    special = []
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            special.append((name, text))
    return ChatTemplate(source, tuple(special), with_tools)


def read_template(asked: str, name: str) -> str:
    """Returns the Jinja template of a name in `TEMPLATES`, or the text of a file.

    asked: the request, for errors.
    Raises DataError where the file cannot be read.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        return read_text(path_of(name))
    except (OSError, ValueError) as error:
        fix = f"a file with a Jinja template, or {' or '.join(TEMPLATES)}"
        raise by_class(error, DataError(asked, reason_of(error), fix)) from error


def read_end_tokens(folder: Path) -> tuple[int, ...]:
    """Returns the tokens at which a Hugging Face model stops.

    They are in its generation settings, or else in its configuration.
    """
    for file in ("generation_config.json", "config.json"):
        if (folder / file).is_file():
            try:
                ends = read_json(folder / file).get("eos_token_id")
                if ends is not None:
                    return (
                        tuple(int(end) for end in ends) if isinstance(ends, list) else (int(ends),)
                    )
            except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
                refusal = WeightsError(
                    f"reading {folder / file}",
                    f"it is not a configuration: {reason_of(error)}",
                    fix_of(error, "download it again"),
                )
                raise by_class(error, refusal) from error
    return ()


def check_jinja() -> None:
    """Raises DataError where Jinja is not installed."""
    if importlib.util.find_spec("jinja2") is None:
        raise DataError(
            "a chat template", "Jinja is not installed", "pip install 'meshwright[chat]'"
        )
