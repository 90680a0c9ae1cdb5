"""The verb `generate`: text from a run's checkpoint, streamed as it is decoded."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import jax
import tyro

from meshwright.api.generation import open_generator
from meshwright.cli.devices import CheckpointOptions, start_devices
from meshwright.cli.output import write, write_json
from meshwright.cli.parse import parse
from meshwright.data.chat import ChatTemplate, Message, check_jinja
from meshwright.documents import read_text
from meshwright.errors import ConfigError, DataError
from meshwright.formatting import format_bytes, format_count, format_step, format_time
from meshwright.generation.generator import Decoding, Generated, GenerationReport
from meshwright.generation.sampling import Sampling
from meshwright.generation.source import run_of_source
from meshwright.hardware.agreement import failing_together
from meshwright.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(CheckpointOptions):
    """Continue prompts with the model of a run, on any mesh, and show the text as it is decoded. Prompts come from
    PROMPT, from --prompt, from a file, or from standard input."""

    source: Annotated[str, tyro.conf.Positional]
    """Output folder of a run, or hf:PATH of a Hugging Face model."""
    text: Annotated[str | None, tyro.conf.Positional] = None
    """Prompt."""
    prompt: tuple[str, ...] = ()
    """Further prompts, continued together with the first."""
    prompts: Path | None = None
    """File of prompts: one on each line, or {"prompt": "..."} on each line of a .jsonl file; `-` is standard input."""
    max_tokens: PositiveInt = 128
    """Most tokens that are generated for each prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end a text, beside the end of a document; they are not shown."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling()
    chat: bool = False
    """Hold a conversation: prompts are messages in the tokenizer's chat template. Without a prompt it reads them line
    by line, and ends at the end of the input."""
    system: str | None = None
    """System message of the conversation."""
    chat_template: Path | None = None
    """Jinja chat template to use in the place of the tokenizer's own."""
    decoding: Decoding = Decoding()
    json: bool = False
    """Print one line of JSON with texts, tokens, log-probabilities and the report."""


_Generate = Callable[[Sequence[str], Callable[[int, str], None] | None], Generated]


@failing_together()
def main(args: Sequence[str]) -> int:
    """Runs `meshwright generate`. Raises CheckpointError without a run, and ConfigError for contradictory options."""
    options = parse(GenerateOptions, "generate", args, default=GenerateOptions(source=tyro.MISSING))
    if options.chat:
        check_jinja()
    prompts, shape = _prompts(options), options.shape()
    run, hosts = run_of_source(options.source), options.hosts.hosts()
    if options.chat and hosts.processes > 1:
        truth = "only one of them has your terminal"
        raise ConfigError(f"--chat with {hosts.processes} processes", truth, "--prompts FILE")
    start_devices(options.devices, shape or run.mesh, hosts)
    at, devices, decoding = options.at, options.devices, options.decoding
    generator = open_generator(options.source, mesh=shape, at=at, devices=devices, decoding=decoding)
    _write(f"{generator.origin} on {generator.device_run.shape}: weights {generator.layout}\n", sys.stderr)

    def generate(texts: Sequence[str], show: Callable[[int, str], None] | None) -> Generated:
        limits: dict[str, Any] = {"max_tokens": options.max_tokens, "stop": options.stop}
        return generator.generate(texts, sampling=options.sampling, on_text=show, **limits)

    if options.chat:
        report = _converse(options, generator.chat, generate, _lines() if prompts is None else prompts)
    else:
        texts = prompts if prompts is not None else [sys.stdin.read().removesuffix("\n")]
        if len(texts) == 1 and not options.json:
            _write(texts[0])
            generated = generate(texts, _stream)
            _write("\n")
        else:
            generated = generate(texts, None)
        if options.json and hosts.process == 0:
            write_json(_record(texts, generated))
        elif len(texts) > 1 and not options.json:
            _write("".join(f"--- {text}\n{new}\n" for text, new in zip(texts, generated.texts, strict=True)))
        report = generated.report
    if report is not None:
        _write(format_report(report), sys.stderr)
    return 0


def _prompts(options: GenerateOptions) -> list[str] | None:
    """Returns the prompts of the options, None where standard input has them."""
    prompts = [*([] if options.text is None else [options.text]), *options.prompt]
    if options.prompts is None:
        if not prompts and sys.stdin.isatty() and not options.chat:
            command = f"meshwright generate {options.source}"
            truth = "there is no prompt, and standard input is a terminal"
            raise ConfigError(command, truth, f'{command} "Once upon a time"')
        return prompts or None
    file, asked = options.prompts, f"--prompts {options.prompts}"
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(asked, f"{error}", "a file of prompts in UTF-8, or -") from error
    # Other ends of lines, such as U+2028, may stand within a prompt.
    lines = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not lines:
        raise DataError(asked, "it has no line with a prompt", "one prompt on each line")
    for number, line in enumerate(lines, 1):
        prompt: Any = line
        if file.suffix == ".jsonl":
            where = f"prompt {number} of {asked}"
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise DataError(where, f'it is not {{"prompt": "..."}}: {error!r}', "such lines") from error
            if not isinstance(prompt, str):
                raise DataError(where, f"its prompt is {json.dumps(prompt)[:80]}, and no text", '{"prompt": "..."}')
        prompts.append(prompt)
    return prompts


def _converse(
    options: GenerateOptions, template: ChatTemplate | None, generate: _Generate, prompts: Iterable[str]
) -> GenerationReport | None:
    """Answers messages one after another; each answer knows all before it. Returns the report of the last."""
    if options.chat_template is not None:
        try:
            template = ChatTemplate(read_text(options.chat_template))
        except (OSError, ValueError) as error:
            raise DataError(f"--chat-template {options.chat_template}", f"{error}", "a file of text") from error
    if template is None:
        truth = "its tokenizer has no chat template"
        raise ConfigError(f"--chat with {options.source}", truth, "--chat-template FILE.jinja")
    messages: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
    report = None
    for message in prompts:
        messages.append({"role": "user", "content": message})
        generated = generate([template.render(messages)], None if options.json else _stream)
        messages.append({"role": "assistant", "content": generated.texts[0]})
        report = generated.report
        write_json(_record([message], generated)) if options.json else _write("\n")
    return report


def _lines() -> Iterator[str]:
    """Yields the lines of standard input, after a mark where it is a terminal."""
    while True:
        if sys.stdin.isatty():
            _write("> ")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _record(prompts: Sequence[str], generated: Generated) -> dict[str, Any]:
    report = generated.report
    rates = {name: getattr(report, name) for name in ("prefill_tokens_per_second", "decode_tokens_per_second")}
    rows = zip(prompts, generated.texts, generated.tokens, generated.logprobs, strict=True)
    texts = [dict(zip(("prompt", "text", "tokens", "logprobs"), row, strict=True)) for row in rows]
    return {"texts": texts, "report": {**dataclasses.asdict(report), **rates}}


def format_report(report: GenerationReport) -> str:
    """Formats speed and memory of a generation, in three lines."""
    first, decode = report.first_token_seconds, report.decode_tokens_per_second
    took = format_step(report.decode_seconds) if report.decode_seconds < 1 else format_time(report.decode_seconds)
    cache = format_bytes(report.cache_bytes)
    return (
        f"prefill: {report.prompt_tokens} tokens, first token after {format_step(first)} "
        f"({format_count(round(report.prefill_tokens_per_second))} tokens/s); compiling took "
        f"{format_time(report.compile_seconds)}\n"
        f"decode:  {report.new_tokens} tokens in {took} "
        f"({format_count(round(decode))} tokens/s)\n"
        f"memory:  weights {format_bytes(report.weight_bytes)} ({report.weights}), cache {cache} (planned "
        f"{format_bytes(report.planned_cache_bytes)}), temporaries {format_bytes(report.temporary_bytes)} per device\n"
    )


def _stream(_: int, text: str) -> None:
    _write(text)


def _write(text: str, stream: TextIO | None = None) -> None:
    """Writes from process 0: texts to standard output, notes to standard error."""
    if jax.process_index() == 0:
        write(text, stream)
