"""Who reads an error: a caller in Python gets arguments, the command line its options.

Errors are written with options (`--devices 8`). `in_python` gives the same text with the arguments
of the public functions and the fields of a Run (`devices=8`).
"""

import contextlib
import json
import re
from collections.abc import Iterator

ARGUMENTS = {
    "--accept": "accept",
    "--against": "against",
    "--at": "at",
    "--budget": "budget",
    "--data": "data",
    "--days": "days",
    "--devices": "devices",
    "--dtype": "dtype",
    "--init-from": "init_from",
    "--limit": "limit",
    "--log-every": "progress",
    "--lr": "learning_rate",
    "--max-tokens": "max_tokens",
    "--mesh": "mesh",
    "--on": "on",
    "--out": "out",
    "--profile": "profile",
    "--prompts": "prompts",
    "--rank-by": "rank_by",
    "--report": "reporters",
    "--reporters": "reporters",
    "--shown": "at_most",
    "--stop": "stop",
    "--tokens": "tokens",
    "--tokens-per-step": "tokens_per_step",
    "--top-k": "top_k",
    "--top-p": "top_p",
    "--min-p": "min_p",
    "--temperature": "temperature",
    "--repetition-penalty": "repetition_penalty",
    "--weights": "weights",
    "--why": "include",
    "--name": "name",
    "--seed": "seed",
    "--fsdp-min-size": "fsdp_min_size",
    "--method": "method",
    "--objective": "objective",
    "--steps": "steps",
    "--batch": "batch",
    "--seq": "seq",
    "--layout": "layout",
}
"""Option of a verb, or short name of a field, -> the argument of the public functions
or of `recipe`."""
FIELDS = ("training", "optimizer", "data", "finetune", "model", "faults", "local-checkpoints")
"""Parts of a Run whose fields `recipe` and `finetune` take by name."""
_NEGATION = "no-"
"""Begin of the option that turns a field off which is on by default: `--training.no-health`."""
AMBIGUOUS = ("optimizer.name", "local-checkpoints.max-to-keep")
"""Fields whose name another part of the Run has first: they are given with their part."""
SEVERAL = ("accept", "data", "stop", "reporters", "compiler_options", "targets", "paths")
"""Arguments that are tuples of texts."""
CALLS = {
    "train": "run",
    "finetune": "",
    "evaluate": "",
    "generate": "",
    "plan": "run",
    "prove": "run",
    "show": "run",
    "view": "",
    "parity": "run",
    "convert": "",
}
"""Verbs that are functions as well -> their argument in the place of a recipe's name."""
_PROSE = (
    "a|and|as|at|for|has|have|if|in|is|it|may|on|one|or|out|so|takes|that|the|then|there|to|under"
    "|what|when|where|which|with|without|wrote"
)
"""Words that follow an option in a sentence, and are not its value."""
_OPTION = r"--[a-z][a-z0-9-]*(?:\.[a-z0-9-]+)*"
_QUOTED = r"'[^'\n]*'|\"[^\"\n]*\""
_PLAIN = r"[^\s;,()`'\"]*[^\s;,()`'\".:]"
_VALUE = rf"{_QUOTED}|(?!--)(?!(?:{_PROSE})(?![\w:=/.-])){_PLAIN}(?:,{_PLAIN})*"
_GIVEN = rf"(?P<option>{_OPTION})(?:[ =](?P<value>{_VALUE}))?"
_POSITIONAL = rf"{_QUOTED}|(?!--)(?=[^\s;,()`'\"]*[A-Z0-9/:=]){_PLAIN}"
_OPTION_PATTERN = re.compile(_GIVEN)
_WORDS_PATTERN = re.compile(rf"{_GIVEN}|(?P<positional>{_POSITIONAL})")
_UNNAMED = re.sub(r"\?P<\w+>", "?:", rf"{_GIVEN}|{_POSITIONAL}")
_TEXT_PATTERN = re.compile(
    rf"\bmeshwright (?P<verb>[a-z]+)(?P<words>(?: (?:{_UNNAMED}))*)|(?<![\w-]){_GIVEN}"
)

_command_line = False


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """Errors made inside it are read where a command was typed."""
    global _command_line
    before = _command_line
    _command_line = True
    try:
        yield
    finally:
        _command_line = before


def reads_options() -> bool:
    """Whether errors made now are read where a command was typed."""
    return _command_line


def argument_of(option: str) -> str | None:
    """Returns the argument or field in the place of an option;
    None where only the command line has it."""
    if option in ARGUMENTS:
        return ARGUMENTS[option]
    path = option.removeprefix("--")
    part, _, field = path.partition(".")
    if part not in FIELDS or not field:
        return None
    if path in AMBIGUOUS or "." in field:
        return path.replace("-", "_")
    return field.removeprefix(_NEGATION).replace("-", "_")


def in_python(text: str) -> str:
    """Returns the text of an error with arguments in the place of options,
    and functions in that of verbs.

    Commands of verbs that are no functions, and options that no function has, stay.

    Example:
        >>> from meshwright.callers import in_python
        >>> in_python("--devices 8, or a smaller --training.max-to-keep")
        'devices=8, or a smaller max_to_keep'
        >>> in_python("meshwright train --out runs/a --resume: step 7 is kept")
        'mw.train(run, out="runs/a", start="resume"): step 7 is kept'
        >>> in_python("--training.no-health")
        'health=False'
    """
    return _TEXT_PATTERN.sub(_replaced, text)


def _replaced(found: re.Match[str]) -> str:
    verb = found["verb"]
    if verb is None:
        return _argument(found)
    if verb not in CALLS:
        return found[0]
    arguments = []
    positional = False
    for word in _WORDS_PATTERN.finditer(found["words"]):
        if word["positional"]:
            positional = True
            arguments.append(_literal("", word["positional"]))
        elif word["option"] == "--at":
            name = "start" if verb == "train" else "at"
            arguments.append(f"{name}={word['value']}")
        else:
            arguments.append(_argument(word))
    if not arguments:
        return f"mw.{verb}"
    if not positional and CALLS[verb]:
        arguments.insert(0, CALLS[verb])
    return f"mw.{verb}({', '.join(arguments)})"


def _argument(found: re.Match[str]) -> str:
    option, value = found["option"], found["value"]
    rest = "" if value is None else f" {value}"
    if option == "--resume":
        return f'start="resume"{rest}'
    if option == "--at" and value is not None:
        return f"at={value}, of train start={value}"
    name = argument_of(option)
    if name is None:
        return found[0]
    if value is None:
        is_negated = option.partition(".")[2].startswith(_NEGATION)
        return f"{name}=False" if is_negated else name
    return f"{name}={_literal(name, value)}"


def _literal(name: str, word: str) -> str:
    """Returns a value of the command line as Python writes it; placeholders such as FILE stay."""
    if re.fullmatch(r"[A-Z][A-Z_]*", word):
        return word
    text = word
    if word[0] in "'\"":
        text = word[1:-1]
    if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    if name == "include":
        return f"[mw.MeshShape.parse({quoted})]"
    return f"({quoted},)" if name in SEVERAL else quoted
