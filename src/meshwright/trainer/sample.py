"""Text sampled from the model at the end of a run."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.data.tokenizers import Tokenizer
from meshwright.sharding.params import count_params
from meshwright.step.device_run import DeviceRun

SMALL_MODEL = 100_000_000
"""Most parameters of a model that is sampled from where the run does not say."""
_SAMPLE = 200
"""Tokens of that sample."""


def write_sample(device_run: DeviceRun, tokenizer: Tokenizer, params: Any, out: Path) -> str:
    """Samples text from the model and writes it to `out`; returns it, or "" where the run asks for none."""
    data = device_run.run.data
    small = count_params(device_run.params) <= SMALL_MODEL
    count = _SAMPLE if data.sample is None and small else data.sample
    if not count:
        return ""
    from meshwright.generation.training_sample import sample_tokens  # a run without a sample does not load it

    if device_run.run.finetune.method == "lora" or device_run.run.finetune.objective == "preferences":
        from meshwright.checkpoint.adapters import merge_adapters  # loaded for runs that fine-tune

        device_run, params = merge_adapters(device_run, params)
    prompt = tokenizer.encode(data.prompt)
    prompt = prompt if len(prompt) else np.array([tokenizer.end], np.int32)
    tokens = sample_tokens(device_run, params, prompt, tokens=count, seed=device_run.run.training.seed)
    text = data.prompt + tokenizer.decode(tokens)
    if jax.process_index() == 0:
        (out / "sample.txt").write_text(text, encoding="utf-8")
    return text
