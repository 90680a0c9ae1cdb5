"""The verb `finetune`: training from weights on chat data, with adapters or all parameters."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from meshwright.cli.base_run import Base, base_run
from meshwright.cli.parse import parse, value_of
from meshwright.cli.train import TrainOptions, resume_if_exists, run_training
from meshwright.errors import ConfigError
from meshwright.fine_tuning import FineTune
from meshwright.hugging_face.hub import is_hugging_face
from meshwright.runs.recipe import check_start, source_run, tuned
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.storage.paths import path_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainOptions):
    """Fine-tune the model SOURCE: hf:PATH of a Hugging Face model or of an adapter in PEFT's format, the output folder
    of a run, or a recipe with --init-from. By default it trains LoRA adapters on the answers of conversations (--data
    CHAT.jsonl); everything else is as in `train`."""

    without: ClassVar[Sequence[str]] = ()


def main(args: Sequence[str]) -> int:
    """Runs `meshwright finetune`, with the exit codes of `train`. Raises ConfigError without weights to start from."""
    base = base_of_fine_tuning(list(resume_if_exists(args)))
    options = parse(FinetuneOptions, "finetune [SOURCE]", base.args, default=FinetuneOptions(run=base.run))
    check_start(options.run)
    return run_training(options, ["finetune", *args])


def base_of_fine_tuning(args: list[str]) -> Base:
    """The Run to start from, with the defaults of fine-tuning; a resumed run is the one in its folder."""
    out = value_of(args, "--out")
    named = bool(args) and not args[0].startswith("-")
    if ("--resume" in args or value_of(args, "--at") is not None) and out is not None:
        run = run_in_folder(path_of(out))
        if named:
            _check_same_source(args[0], run, out)
        return Base(run, args[1:] if named else args)
    if not named and value_of(args, "--run") is None and not {"-h", "--help"} & set(args):
        raise ConfigError(
            f"meshwright finetune {' '.join(args)}".rstrip(), "it starts from the weights of a model",
            "meshwright finetune hf:PATH --data CHAT.jsonl --out DIR",
        )  # fmt: skip
    if not named or args[0].endswith(".json"):
        base = base_run(args)
        if base.run.finetune != FineTune():
            return base  # a plan, or the run.json, of a run that fine-tunes
    else:
        base = Base(source_run(args[0]), args[1:])
    method: Any = _given(args, "method", "lora")
    objective: Any = _given(args, "objective", "answers")
    return dataclasses.replace(base, run=tuned(base.run, method, objective))


def _check_same_source(source: str, run: Run, out: str) -> None:
    """Raises ConfigError for a model that is not the one from which the run to resume has started.

    A supervisor and `--resume-if-exists` give both: the model, and the folder to go on in.
    """
    is_weights = is_hugging_face(source) or (path_of(source) / "run.json").is_file()
    started = [name for name in (run.init_from, run.finetune.adapter) if name is not None]
    if is_weights and _place(source) not in map(_place, started):
        raise ConfigError(
            f"finetune {source} --out {out} --resume", f"the run in {out} started from {' and '.join(started)}",
            f"finetune --out {out} --resume to continue it, or another --out",
        )  # fmt: skip


def _place(source: str) -> str:
    """Returns the absolute path of a source that is a folder, else its name."""
    path = Path(source.removeprefix("hf:"))
    return str(path.resolve()) if path.exists() else source


def _given(args: Sequence[str], field: str, default: str) -> str:
    """The value of an option on which defaults depend; one that is illegal is refused where all are parsed."""
    value = value_of(args, f"--finetune.{field}") or value_of(args, f"--{field}")
    known = {"method": ("full", "lora"), "objective": ("text", "answers", "preferences")}[field]
    return value if value in known else default
