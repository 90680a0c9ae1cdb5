"""The verb `finetune`: training from weights on chat data, with adapters or all parameters."""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any, ClassVar

from meshwright.api.finetuning import check_start, source_run, tuned
from meshwright.cli.base_run import Base, base_run
from meshwright.cli.parse import parse, value_of
from meshwright.cli.train import TrainOptions, resumed_folder, run_training
from meshwright.errors import ConfigError
from meshwright.fine_tuning import FineTune, Method, Objective
from meshwright.hugging_face.hub import is_hugging_face
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
    base = base_of_fine_tuning(list(args))
    options = parse(FinetuneOptions, "finetune [SOURCE]", base.args, default=FinetuneOptions(run=base.run))
    check_start(options.run)
    return run_training(options, ["finetune", *args])


def base_of_fine_tuning(args: list[str]) -> Base:
    """Returns the Run to start from, with the defaults of fine-tuning; a resumed run is the one in its folder."""
    folder, named = resumed_folder(args), bool(args) and not args[0].startswith("-")
    if folder is not None:
        run = run_in_folder(folder)
        if named:
            _check_same_source(args[0], run, str(folder))
        return Base(run, args[1:] if named else args)
    if named and not args[0].endswith(".json"):
        base = Base(source_run(args[0]), args[1:])
    elif named or value_of(args, "--run") is not None or {"-h", "--help"} & set(args):
        base = base_run(args)
        if base.run.finetune != FineTune():
            return base  # a plan, or the run.json, of a run that fine-tunes
    else:
        raise ConfigError(
            f"meshwright finetune {' '.join(args)}".rstrip(),
            "it starts from the weights of a model",
            "meshwright finetune hf:PATH --data CHAT.jsonl --out DIR",
        )
    # Defaults depend on these two; an illegal value is refused where all options are parsed.
    method: Any = value_of(args, "--finetune.method") or value_of(args, "--method")
    objective: Any = value_of(args, "--finetune.objective") or value_of(args, "--objective")
    method = method if method in typing.get_args(Method) else "lora"
    objective = objective if objective in typing.get_args(Objective) else "answers"
    return dataclasses.replace(base, run=tuned(base.run, method, objective))


def _check_same_source(source: str, run: Run, out: str) -> None:
    """Raises ConfigError for a model that is not the one from which the run to resume has started.

    A supervisor and `--resume-if-exists` give both: the model, and the folder to resume in.
    """
    is_weights = is_hugging_face(source) or (path_of(source) / "run.json").is_file()
    started = [name for name in (run.init_from, run.finetune.adapter) if name is not None]
    if is_weights and _place(source) not in map(_place, started):
        raise ConfigError(
            f"finetune {source} --out {out} --resume",
            f"the run in {out} started from {' and '.join(started)}",
            f"finetune --out {out} --resume to continue it, or another --out",
        )


def _place(source: str) -> str:
    """Returns the absolute path of a source that is a folder, else its name."""
    path = path_of(source.removeprefix("hf:"))
    return str(path.resolve()) if path.exists() else source
