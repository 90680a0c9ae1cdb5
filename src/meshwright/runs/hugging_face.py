"""Runs of Hugging Face models: `hf:PATH` in the place of a recipe."""

import dataclasses
from pathlib import Path

from meshwright.config import Data, Optimizer, Run, Training
from meshwright.hugging_face.folder import read_model

_LONGEST = 4096
"""Tokens per sequence where the model's own limit is longer: `--seq` takes more."""


def run_of_hugging_face(name: str) -> Run:
    """Returns the Run that trains the model `hf:NAME` from its weights, with its tokenizer.

    Batch, length and learning rate are those of a short continued training. Raises WeightsError where the model is not
    one that Meshwright computes; weights are not read.
    """
    folder = read_model(name)
    return Run(
        name=Path(name.partition(":")[2]).resolve().name.lower(),
        model=folder.model,
        init_from=name,
        training=Training(batch=16, seq=min(folder.max_seq or _LONGEST, _LONGEST), logits_mib=1024),
        optimizer=Optimizer(learning_rate=2e-5, warmup_steps=20),
        data=dataclasses.replace(Data(), tokenizer=str(folder.tokenizer)),
    )
