"""Chat templates: a conversation as the text that a model was tuned on, by the Jinja template of its tokenizer.

A template is a program from a stranger: it runs in Jinja's sandbox, which has no access to Python's objects
(`ImmutableSandboxedEnvironment`), with the functions and settings that `transformers` gives it.
"""

import dataclasses
import datetime
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshwright.errors import DataError

_MARKS = ("\ue0f8", "\ue0f9")
"""Characters of private use around answers, while a conversation is rendered."""

Message = dict[str, Any]
"""`{"role": "user", "content": "..."}`; other keys are the template's own."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Template of a conversation."""

    source: str
    """Jinja template."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """Names and texts of special tokens that the template may use: `bos_token`, `eos_token`."""

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """Returns the text of a conversation. answer: ends it where the model's answer begins.

        Raises DataError where the template refuses the conversation, or Jinja is not installed.
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
                "a conversation", f"it has one of the characters {_MARKS}, which mark answers", "without them"
            )
        text, spans = "", list[tuple[int, int]]()
        for number, part in enumerate(re.split(f"[{''.join(_MARKS)}]", self._render(messages, False, _MARKS))):
            if number % 2:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return text, spans

    def _render(self, messages: Sequence[Message], answer: bool, marks: tuple[str, str]) -> str:
        """Returns the text, with `marks` before and after each answer that the template marks."""
        import jinja2  # an optional dependency
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """Statement `{% generation %}`, which marks answers for training."""

            tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                first, last = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in marks)
                return [first, *body, last]

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        try:
            template = environment.from_string(self.source)
            return template.render(messages=list(messages), add_generation_prompt=answer, **dict(self.special_tokens))
        except jinja2.TemplateError as error:
            raise DataError(
                "a conversation in the tokenizer's chat template", f"the template refuses it: {error}",
                "roles and order of messages as the template has them",
            ) from error  # fmt: skip


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Reads the chat template beside a tokenizer: chat_template.jinja, or that of tokenizer_config.json.

    An output folder has the files of the model that it started from in `huggingface`. Returns None where there is no
    template. Raises DataError where tokenizer_config.json is no JSON.
    """
    config: dict[str, Any] = {}
    file = folder / "tokenizer_config.json"
    if file.is_file():
        try:
            config = dict(json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise DataError(f"reading {file}", f"not JSON: {error}", "the tokenizer's own file") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if source is None:
        return read_chat_template(folder / "huggingface") if (folder / "huggingface").is_dir() else None
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
        raise DataError("a chat template", "Jinja is not installed", "pip install 'meshwright[chat]'")
