"""Chat templates: a conversation as the text that a model was tuned on, by the Jinja template of its tokenizer.

A template is a program from a stranger. It runs in a process of its own, in Jinja's sandbox
(`ImmutableSandboxedEnvironment`, which has no access to Python's objects), with limits on its time, its memory and its
text (`chat_renderer`).
"""

import dataclasses
import importlib.util
import json
import multiprocessing
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshwright.documents import SMALL, check_inside, parse_json, read_text
from meshwright.errors import DataError, by_class

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

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """Returns the text of a conversation. answer: ends it where the model's answer begins.

        Raises DataError where the template refuses the conversation, takes too long or too much memory, or Jinja is
        not installed.
        """
        return self._render(messages, answer, ("", ""))

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks which of its text is answers: `{% generation %}`."""
        return re.search(r"{%-?\s*generation\s*-?%}", self.source) is not None

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and first and last character (one past it) of each answer.

        For a template that `marks_answers`. Raises as `render`.
        """
        if any(mark in str(message.get("content")) for message in messages for mark in _MARKS):
            raise DataError(
                "a conversation",
                f"it has one of the characters {_MARKS}, which mark answers",
                "without them",
            )
        text, spans = "", list[tuple[int, int]]()
        for number, part in enumerate(
            re.split(f"[{''.join(_MARKS)}]", self._render(messages, False, _MARKS))
        ):
            if number % 2:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return text, spans

    def _render(self, messages: Sequence[Message], answer: bool, marks: tuple[str, str]) -> str:
        """Returns the text, with `marks` before and after each answer that the template marks."""
        check_jinja()
        what = {"source": self.source, "tokens": dict(self.special_tokens), "marks": marks}
        request = {**what, "messages": list(messages), "answer": answer}
        reply = _renderer.ask(json.dumps(request))
        if "text" in reply:
            return str(reply["text"])
        raise DataError(
            "a conversation in the tokenizer's chat template",
            f"the template refuses it: {reply['error']}",
            "roles and order of messages as the template has them, or --chat-template FILE.jinja",
        )


class _Renderer:
    """Process that renders templates; it is started when it is first needed, and again after it was stopped."""

    def __init__(self) -> None:
        self._stop: Callable[[], Any] | None = None
        self._connection: Connection | None = None

    def ask(self, request: str) -> dict[str, Any]:
        """Sends one request and returns the answer; a process that gives none in time is stopped."""
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
        # By the path of the file: the package itself would take longer to import than a conversation to render.
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
    """Reads the chat template beside a tokenizer: chat_template.jinja, or that of tokenizer_config.json.

    An output folder has the files of the model that it started from in `huggingface`. Returns None where there is no
    template. Raises DataError where a file is damaged or leaves the folder.
    """
    file, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        check_inside(folder, [file, template])
        config = dict(parse_json(read_text(file))) if file.is_file() else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((t["template"] for t in source if t.get("name") == "default"), None)
        if template.is_file():
            source = read_text(template)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise by_class(
            error,
            DataError(
                f"the chat template of {folder}", f"it cannot be read: {error}", "its own files"
            ),
        ) from error
    if source is None:
        return (
            read_chat_template(folder / "huggingface")
            if (folder / "huggingface").is_dir()
            else None
        )
    if not isinstance(source, str) or len(source) > SMALL:
        raise DataError(
            f"the chat template of {folder}", f"it is a {type(source).__name__}", "its own files"
        )
    special = []
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            special.append((name, text))
    return ChatTemplate(source, tuple(special))


def check_jinja() -> None:
    """Raises DataError where Jinja is not installed."""
    if importlib.util.find_spec("jinja2") is None:
        raise DataError(
            "a chat template", "Jinja is not installed", "pip install 'meshwright[chat]'"
        )
