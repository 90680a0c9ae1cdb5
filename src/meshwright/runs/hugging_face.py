"""Runs of Hugging Face models: `hf:PATH` in the place of a recipe."""

import dataclasses
from pathlib import Path

from meshwright.config import Data, Optimizer, Training
from meshwright.hugging_face.folder import read_model
from meshwright.hugging_face.hub import find_folder
from meshwright.runs.run import Run

_LONGEST = 4096
"""Tokens per sequence where the model's own limit is longer: `--seq` takes more."""


def run_of_hugging_face(name: str) -> Run:
    """Returns the Run that trains the model `hf:NAME` from its weights, with its tokenizer.

    Batch, length and learning rate are those of a short continued training. Raises WeightsError where the model is not
    one that Meshwright computes; weights are not read. An adapter in PEFT's format is a run of the model it belongs to,
    with adapters that start from it.
    """
    path = find_folder(name, weights=False)
    if (path / "adapter_config.json").is_file():
        from meshwright.hugging_face.peft_files import read_config, targets_in, tuning_of

        base = run_of_hugging_face(f"hf:{read_config(path)['base_model_name_or_path']}")
        tuning = dataclasses.replace(tuning_of(path), targets=targets_in(path, base.model))
        return dataclasses.replace(base, name=path.resolve().name.lower(), finetune=tuning)
    folder = read_model(name)
    return Run(
        name=Path(name.partition(":")[2]).resolve().name.lower(),
        model=folder.model,
        init_from=name,
        training=Training(batch=16, seq=min(folder.max_seq or _LONGEST, _LONGEST), logits_mib=1024),
        optimizer=Optimizer(learning_rate=2e-5, warmup_steps=20),
        data=dataclasses.replace(Data(), tokenizer=str(folder.tokenizer)),
    )
