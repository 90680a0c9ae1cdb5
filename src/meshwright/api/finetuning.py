"""Fine-tuning from Python."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.api.training import train
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.fine_tuning import FineTune, Method, Objective
from meshwright.runs.recipe import change_fields, find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.storage.paths import path_of, place_of
from meshwright.trainer.loop import Summary


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

    source: hf:PATH of a Hugging Face model or of an adapter in PEFT's format, the output folder of a run, or a Run with
    `init_from`.  data: files of JSON lines with `messages`, `prompt` and `completion`, or for preferences `prompt`,
    `chosen` and `rejected`; PATH=WEIGHT mixes several.  out: output folder, as for `train`, which resumes it.
    method, objective: fields of `FineTune`.  changes: fields of the Run or its parts by name, as for `recipe`.
    Raises ConfigError, DataError, WeightsError, TrainingError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, steps=2, sample=0, eval_samples=16, tokenizer="bytes")
        >>> base = mw.train(run, out=tmp / "base", progress="none", cache=tmp).out
        >>> record = '{"prompt": "What is two and two?", "completion": " It is four."}'
        >>> _ = (tmp / "questions.jsonl").write_text(f"{record}\\n" * 40)
        >>> tuned = mw.finetune(base, str(tmp / "questions.jsonl"), tmp / "tuned", cache=tmp, steps=2, rank=4)
        >>> tuned.steps, tuned.loss > 0
        (2, True)
    """
    run = source if isinstance(source, Run) else source_run(str(source))
    run = tuned(run, method, objective)
    run = dataclasses.replace(
        run, data=dataclasses.replace(run.data, paths=(data,) if isinstance(data, str) else tuple(data))
    )
    run = change_fields(run, mesh, changes)
    check_start(run)
    return train(run, out, progress="none", cache=cache)


def source_run(source: str) -> Run:
    """Returns the Run that starts from the weights of a source: hf:PATH, the output folder of a run, or a recipe."""
    source, folder = place_of(source), path_of(source)
    if not (folder / "run.json").is_file():
        return find_recipe(source)
    run = run_in_folder(folder)
    data = dataclasses.replace(run.data, tokenizer=str(folder / "tokenizer.json"))
    return dataclasses.replace(run, init_from=source, data=data, finetune=FineTune(), name=f"{folder.name}-tuned")


_RATES: dict[Method, float] = {"lora": 2e-4, "full": 2e-5}
_PREFERENCE_RATES: dict[Method, float] = {"lora": 5e-6, "full": 5e-7}
"""Peak learning rates by method: QLoRA's for adapters, TRL's for DPO."""


def tuned(run: Run, method: Method, objective: Objective) -> Run:
    """Returns a run with the defaults of fine-tuning: learning rate of the method, no weight decay, no sample."""
    rates = _PREFERENCE_RATES if objective == "preferences" else _RATES
    return dataclasses.replace(
        run,
        optimizer=dataclasses.replace(
            run.optimizer, learning_rate=rates[method], weight_decay=0.0, warmup_steps=10, beta2=0.999
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
