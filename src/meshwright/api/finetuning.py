"""The verb `finetune`: training from weights on chat data, with adapters or all parameters."""

import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from meshwright.api.training import TrainOptions, resumed_folder, train
from meshwright.api.verb import Base, Call, Outcome, base_run, value_of
from meshwright.config import MeshShape
from meshwright.errors import ConfigError, shell_word
from meshwright.fine_tuning import FineTune, Method, Objective
from meshwright.hugging_face.hub import is_hugging_face
from meshwright.runs.recipe import change_fields, find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.storage.paths import path_of, place_of
from meshwright.trainer.loop import Summary
from meshwright.trust import own


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainOptions):
    """Fine-tune the model SOURCE: hf:PATH of a Hugging Face model, the output folder of a run, or a
    recipe with --init-from. By default it trains LoRA adapters on the answers of conversations
    (--data CHAT.jsonl); everything else is as in `train`.
    """

    usage: ClassVar[str] = "[SOURCE]"
    without: ClassVar[Sequence[str]] = ()

    @classmethod
    def base(cls, args: Sequence[str]) -> Base:
        """Returns the Run to start from, with the defaults of fine-tuning.

        A resumed run is the one in its folder.
        """
        args = list(args)
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

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright finetune`, with the exit codes of `train`.

        Raises ConfigError without weights.
        """
        check_start(self.run)
        return super().act(call)


def _check_same_source(source: str, run: Run, out: str) -> None:
    """Raises ConfigError for a model that is not the one from which the run to resume has started.

    A supervisor and `--resume-if-exists` give both: the model, and the folder to resume in.
    """
    is_weights = is_hugging_face(source) or (path_of(source) / "run.json").is_file()
    if is_weights and _place(source) != _place(run.init_from or ""):
        raise ConfigError(
            f"finetune {source} --out {out} --resume",
            f"the run in {out} started from {run.init_from}",
            f"finetune --out {shell_word(out)} --resume to continue it, or another --out",
        )


def _place(source: str) -> str:
    """Returns the absolute path of a source that is a folder, else its name."""
    path = path_of(source.removeprefix("hf:"))
    return str(path.resolve()) if path.exists() else source


def finetune(
    source: str | Path | Run,
    data: str | Sequence[str],
    out: str | Path | None = None,
    *,
    method: Method = "lora",
    objective: Objective = "answers",
    mesh: str | MeshShape | None = None,
    cache: Path | None = None,
    **changes: Any,
) -> Summary:
    """Fine-tunes a model and returns a summary.

    source: hf:PATH of a Hugging Face model, the output folder of a run, or a Run with `init_from`.
    data: files (JSON lines, an array, or Parquet) with `messages`, `prompt` and `completion`, or
    for preferences `prompt`, `chosen` and `rejected`; PATH=WEIGHT mixes several.  out: output
    folder, as for `train`, which resumes it.
    method, objective: fields of `FineTune`.  changes: fields of the Run or its parts by name, as
    for `recipe`.
    Raises ConfigError, DataError, WeightsError, TrainingError.

    Example:
        >>> short = {"layers": 1, "steps": 2, "sample": 0, "eval_samples": 16}
        >>> run = mw.recipe("tiny", mesh="data=2", tokenizer="bytes", **short)
        >>> base = mw.train(run, out=tmp / "base", progress="none", cache=tmp).out
        >>> record = '{"prompt": "What is two and two?", "completion": " It is four."}'
        >>> questions = tmp / "questions.jsonl"
        >>> _ = questions.write_text(f"{record}\\n" * 40)
        >>> tuned = mw.finetune(base, str(questions), tmp / "tuned", cache=tmp, steps=2, rank=4)
        >>> tuned.steps, tuned.loss > 0
        (2, True)
    """
    run = own(source) if isinstance(source, Run) else source_run(own(str(source)))
    run = tuned(run, method, objective)
    paths = own((data,) if isinstance(data, str) else tuple(data))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, paths=paths))
    run = change_fields(run, mesh, own(changes))
    check_start(run)
    return train(run, out, progress="none", cache=cache)


def source_run(source: str) -> Run:
    """Returns the Run that starts from the weights of a source.

    hf:PATH, the output folder of a run, or a recipe.
    """
    source, folder = place_of(source), path_of(source)
    if not (folder / "run.json").is_file():
        return find_recipe(source)
    run = run_in_folder(folder)
    tokenizer = str(folder / "tokenizer.json")
    data = dataclasses.replace(run.data, tokenizer=tokenizer, other_tokenizer=False)
    return dataclasses.replace(
        run,
        init_from=source,
        data=data,
        finetune=FineTune(),
        name=f"{folder.name}-tuned",
        chosen={},  # those of the run whose weights are taken
    )


_RATES: dict[Method, float] = {"lora": 2e-4, "full": 2e-5}
_PREFERENCE_RATES: dict[Method, float] = {"lora": 5e-6, "full": 5e-7}
"""Peak learning rates by method: QLoRA's for adapters, TRL's for DPO."""


def tuned(run: Run, method: Method, objective: Objective) -> Run:
    """Returns a run with the defaults of fine-tuning.

    The method's learning rate, no weight decay, no sample.
    """
    rates = _PREFERENCE_RATES if objective == "preferences" else _RATES
    return dataclasses.replace(
        run,
        optimizer=dataclasses.replace(
            run.optimizer,
            learning_rate=rates[method],
            weight_decay=0.0,
            warmup_steps=10,
            beta2=0.999,
        ),
        data=dataclasses.replace(run.data, sample=0),
        finetune=dataclasses.replace(run.finetune, method=method, objective=objective),
    )


def check_start(run: Run) -> None:
    """Raises ConfigError where a run that fine-tunes has no weights to start from."""
    if run.init_from is None:
        raise ConfigError(
            f"fine-tuning {run.name}",
            "the recipe draws random weights: there is nothing to tune",
            "--init-from hf:PATH or the output folder of a run; or hf:PATH instead of the recipe",
        )
