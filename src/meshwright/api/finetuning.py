"""Fine-tuning from Python."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.api.training import train
from meshwright.config import MeshShape
from meshwright.fine_tuning import Method, Objective
from meshwright.runs.recipe import change_fields, check_start, source_run, tuned
from meshwright.runs.run import Run
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
