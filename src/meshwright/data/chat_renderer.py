"""Program that renders chat templates.

Requests and replies are JSON, over the socket that is its standard input.
It has Jinja's sandbox, and the functions and settings that `transformers` gives a template. Its
memory and the seconds of its processor are limited, and it can open no file to write: what a
template does wrong ends this process alone.
"""

import contextlib
import datetime
import functools
import json
import os
import resource
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 2**30
"""Bytes of address space."""
SECONDS = 10
"""Seconds of the processor for each conversation."""
TEXT = 16 * 2**20
"""Most characters of a rendered conversation."""


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as `transformers` writes it, without the HTML escapes of Jinja's filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=8)
def _template(source: str, marks: tuple[str, str]) -> jinja2.Template:
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
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment.from_string(source)


def _render(request: dict[str, Any]) -> dict[str, str]:
    try:
        template = _template(request["source"], tuple(request["marks"]))
        conversation = {
            "messages": request["messages"],
            "tools": request["tools"],
            "documents": None,
            "add_generation_prompt": request["answer"],
        }
        text = template.render({**request["tokens"], **request["variables"], **conversation})
        text.encode("utf-8")
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}", "of": "template"}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY // 2**20} MiB"}
    except (
        Exception
    ) as error:  # a template can raise any: TypeError, ZeroDivisionError, RecursionError, ...
        return {"error": (str(error) or type(error).__name__)[:1000]}
    if len(text) > TEXT:
        return {"error": f"its text has {len(text):,} characters, more than {TEXT:,}"}
    return {"text": text}


def main() -> None:
    """Answers requests until the socket is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(os.dup(0))
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = json.loads(connection.recv_bytes())
            used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            resource.setrlimit(
                resource.RLIMIT_CPU, (int(used) + SECONDS + 1, resource.RLIM_INFINITY)
            )
            connection.send_bytes(json.dumps(_render(request)).encode())


if __name__ == "__main__":
    main()
