"""The verb `generate`: text from a run's checkpoint, streamed as it is decoded."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from meshwright.api.verb import Call, CheckpointOptions, Outcome, start_devices
from meshwright.config import MeshShape
from meshwright.data.chat import TEMPLATES, ChatTemplate, Message, check_jinja, read_template
from meshwright.errors import ConfigError, DataError, by_class, reason_of, shell_word
from meshwright.formatting import format_bytes, format_count, format_step, format_time
from meshwright.generation.generator import Decoding, Generated, GenerationReport, Generator, OnText
from meshwright.generation.sampling import Sampling
from meshwright.generation.source import open_weights, run_of_source
from meshwright.hardware.agreement import failing_together
from meshwright.hardware.mesh import enable_compilation_cache
from meshwright.ranges import PositiveInt
from meshwright.reporters.console import open_console
from meshwright.storage.paths import default_cache_folder, path_of, place_of

_Generate = Callable[[Sequence[str], OnText | None], Generated]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(CheckpointOptions):
    """Continue prompts with the model of a run, on any mesh, and show the text as it is decoded.
    Prompts come from PROMPT, from --prompt, from a file, or from standard input.
    """

    source: Annotated[str, tyro.conf.Positional]
    """Output folder of a run, or hf:PATH of a Hugging Face model."""
    text: Annotated[str | None, tyro.conf.Positional] = None
    """Prompt."""
    prompt: tuple[str, ...] = ()
    """Further prompts, continued together with the first."""
    prompts: Path | None = None
    """File of prompts: one on each line, or {"prompt": "..."} on each line of a .jsonl file; `-` is
    standard input."""
    max_tokens: PositiveInt = 128
    """Most tokens that are generated for each prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end a text, beside the end of a document; they are not shown."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling()
    chat: bool = False
    """Hold a conversation: prompts are messages in the tokenizer's chat template. Without a prompt
    it reads them line by line, and ends at the end of the input."""
    system: str | None = None
    """System message of the conversation."""
    chat_template: str | None = None
    """Chat template to use in the place of the tokenizer's own: a file (Jinja), or `chatml`."""
    decoding: Decoding = Decoding()
    json: bool = False
    """Print one line of JSON with texts, tokens, log-probabilities and the report."""

    @failing_together()
    def act(self, call: Call) -> Outcome:
        """Runs `meshwright generate`.

        Raises CheckpointError without a run, ConfigError for contradictory options.
        """
        if self.chat:
            check_jinja()
        prompts = self._prompts()
        shape = self.shape()
        run = run_of_source(self.source)
        hosts = self.hosts.hosts()
        if self.chat and hosts.processes > 1:
            truth = "only one of them has your terminal"
            raise ConfigError(f"--chat with {hosts.processes} processes", truth, "--prompts FILE")
        start_devices(self.devices, shape or run.mesh, hosts)
        generator = open_generator(
            self.source, mesh=shape, at=self.at, devices=self.devices, decoding=self.decoding
        )
        notes = open_console(sys.stderr)
        notes.quiet = call.console.quiet
        _stream(
            notes,
            f"{generator.origin} on {generator.device_run.layout.shape}: weights "
            f"{generator.layout}\n",
        )
        generate = functools.partial(self._generate, generator)
        if self.chat:
            messages = _lines(call.console) if prompts is None else prompts
            report = self._converse(call, generator.chat, generate, messages)
            if report is not None:
                _stream(notes, format_report(report))
            return Outcome()
        texts = prompts if prompts is not None else [sys.stdin.read().removesuffix("\n")]
        if len(texts) == 1 and not self.json:
            _stream(call.console, texts[0])
            generated = generate(texts, lambda _, text: _stream(call.console, text))
            _stream(call.console, "\n")
        else:
            generated = generate(texts, None)
            if not self.json:
                pairs = zip(texts, generated.texts, strict=True)
                _stream(call.console, "".join(f"--- {text}\n{new}\n" for text, new in pairs))
        _stream(notes, format_report(generated.report))
        return Outcome(record=_record(texts, generated))

    def _generate(
        self, generator: Generator, texts: Sequence[str], show: OnText | None
    ) -> Generated:
        return generator.generate(
            texts,
            sampling=self.sampling,
            on_text=show,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )

    def _prompts(self) -> list[str] | None:
        """Returns the prompts of the options, None where standard input has them."""
        prompts = [*([] if self.text is None else [self.text]), *self.prompt]
        if self.prompts is None:
            if not prompts and sys.stdin.isatty() and not self.chat:
                command = f"meshwright generate {shell_word(self.source)}"
                truth = "there is no prompt, and standard input is a terminal"
                raise ConfigError(command, truth, f'{command} "Once upon a time"')
            return prompts or None
        file, asked = self.prompts, f"--prompts {self.prompts}"
        fix = "a file of prompts in UTF-8, or -"
        if str(file) != "-" and not file.exists():
            command = f"meshwright generate {shell_word(self.source)} {json.dumps(str(file))}"
            fix = f"{fix}; a prompt itself: {command}"
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise by_class(error, DataError(asked, reason_of(error), fix)) from error
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
                    raise DataError(
                        where, f'it is not {{"prompt": "..."}}: {reason_of(error)}', "such lines"
                    ) from error
                if not isinstance(prompt, str):
                    raise DataError(
                        where,
                        f"its prompt is {json.dumps(prompt)[:80]}, and no text",
                        '{"prompt": "..."}',
                    )
            prompts.append(prompt)
        return prompts

    def _converse(
        self, call: Call, template: ChatTemplate | None, generate: _Generate, prompts: Iterable[str]
    ) -> GenerationReport | None:
        """Answers messages one after another; each answer knows all before it.

        Returns the report of the last.
        """
        if self.chat_template is not None:
            asked = f"--chat-template {self.chat_template}"
            template = ChatTemplate(read_template(asked, self.chat_template))
        if template is None:
            truth = "its tokenizer has no chat template"
            fix = f"--chat-template FILE.jinja, or {' or '.join(TEMPLATES)} if it was tuned on that"
            raise ConfigError(f"--chat with {self.source}", truth, fix)
        messages: list[Message] = (
            [] if self.system is None else [{"role": "system", "content": self.system}]
        )
        report = None
        for message in prompts:
            messages.append({"role": "user", "content": message})
            show = None if self.json else lambda _, text: _stream(call.console, text)
            generated = generate([template.render(messages)], show)
            messages.append({"role": "assistant", "content": generated.texts[0]})
            report = generated.report
            call.write_json(_record([message], generated)) if self.json else _stream(
                call.console, "\n"
            )
        return report


def _lines(console: Console) -> Iterator[str]:
    """Yields the lines of standard input, after a mark where it is a terminal."""
    while True:
        if sys.stdin.isatty():
            _stream(console, "> ")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _record(prompts: Sequence[str], generated: Generated) -> dict[str, Any]:
    report = generated.report
    rates = {
        name: getattr(report, name)
        for name in ("prefill_tokens_per_second", "decode_tokens_per_second")
    }
    rows = zip(prompts, generated.texts, generated.tokens, generated.logprobs, strict=True)
    texts = [dict(zip(("prompt", "text", "tokens", "logprobs"), row, strict=True)) for row in rows]
    return {"texts": texts, "report": {**dataclasses.asdict(report), **rates}}


def format_report(report: GenerationReport) -> str:
    """Formats speed and memory of a generation, in three lines."""
    first, decode = report.first_token_seconds, report.decode_tokens_per_second
    took = (
        format_step(report.decode_seconds)
        if report.decode_seconds < 1
        else format_time(report.decode_seconds)
    )
    cache = format_bytes(report.cache_bytes)
    return (
        f"prefill: {report.prompt_tokens} tokens, first token after {format_step(first)} "
        f"({format_count(round(report.prefill_tokens_per_second))} tokens/s); compiling took "
        f"{format_time(report.compile_seconds)}\n"
        f"decode:  {report.new_tokens} tokens in {took} ({format_count(round(decode))} tokens/s)\n"
        f"memory:  weights {format_bytes(report.weight_bytes)} ({report.weights}), cache {cache} "
        f"(planned "
        f"{format_bytes(report.planned_cache_bytes)}), temporaries "
        f"{format_bytes(report.temporary_bytes)} per device\n"
    )


def _stream(console: Console, text: str) -> None:
    console.out(text, end="", highlight=False)


def open_generator(
    source: str | Path,
    *,
    mesh: str | MeshShape | None = None,
    at: int | None = None,
    devices: int | None = None,
    decoding: Decoding | None = None,
    cache: Path | None = None,
) -> Generator:
    """Loads a run's weights onto a mesh and returns a generator.

    It keeps its compiled programs between calls.
    source: output folder of a run.  mesh: None takes the run's own.  at: step of the checkpoint;
    None takes the last.
    devices: use the first so many; None uses all.  cache: folder of compiled programs; None takes
    the user's cache.
    Raises CheckpointError where there is no run, ConfigError for a mesh with pipeline stages.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=1", layers=1, steps=1, sample=0, eval_samples=16)
        >>> out = mw.train(run, out=tmp / "opened", progress="none", cache=tmp, devices=1).out
        >>> generator = mw.open_generator(out, mesh="fsdp=2,tensor=2", cache=tmp)
        >>> results = [generator.generate([text], max_tokens=4) for text in ("import ", "def f")]
        >>> [len(result.tokens[0]) for result in results]
        [4, 4]
        >>> generator.compilations
        1
    """
    enable_compilation_cache((path_of(cache or default_cache_folder())) / "compiled")
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh
    return Generator(
        open_weights(place_of(str(source)), mesh=shape, at=at, devices=devices), decoding
    )


def generate(
    source: str | Path,
    prompts: Sequence[str],
    *,
    max_tokens: int = 128,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    mesh: str | MeshShape | None = None,
    decoding: Decoding | None = None,
    on_text: OnText | None = None,
) -> Generated:
    """Continues each prompt by up to `max_tokens` tokens; for several calls use `open_generator`.

    source: output folder of a run, whose last checkpoint is loaded.  sampling: None takes the most
    probable tokens.
    stop: texts that end a text, the end of a document apart.  mesh: None takes the run's own.
    on_text: called with the index of a prompt and the text that was added to it, while it is
    decoded.
    Raises CheckpointError where there is no run, ConfigError where a text would be longer than the
    model's table of positions; with rotary positions a note on standard error tells that it is
    longer than those it was trained on.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=1", layers=1, steps=1, sample=0, eval_samples=16)
        >>> out = mw.train(run, out=tmp / "spoken", progress="none", cache=tmp, devices=1).out
        >>> sampling = mw.Sampling(temperature=0.8, seed=1)
        >>> result = mw.generate(out, ["import ", "def "], max_tokens=5, sampling=sampling)
        >>> len(result.texts), result.report.planned_cache_bytes == result.report.cache_bytes
        (2, True)
    """
    generator = open_generator(source, mesh=mesh, decoding=decoding)
    return generator.generate(
        prompts, max_tokens=max_tokens, sampling=sampling, stop=stop, on_text=on_text
    )
