"""Text sampled from the model at the end of a run."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.activity import activity
from meshwright.data.tokenizers import Tokenizer, with_begin
from meshwright.errors import ConfigError
from meshwright.sharding.params import count_params
from meshwright.step.device_run import DeviceRun

SMALL_MODEL = 100_000_000
"""Most parameters of a model that is sampled from where the run asks for neither a sample nor one every some steps."""
_SAMPLE = 200
"""Tokens of that sample."""


def check_sample(device_run: DeviceRun) -> None:
    """Raises ConfigError where the run asks for a sample that its model cannot give; before it trains, not after."""
    data, without = device_run.run.data, _cannot_decode(device_run)
    if data.sample == 0 and data.sample_every:
        truth = "--data.sample 0 is no text at all"
        raise ConfigError(f"--data.sample-every {data.sample_every}", truth, f"--data.sample {_SAMPLE}")
    asked = f"--data.sample-every {data.sample_every}" if data.sample_every else f"--data.sample {data.sample}"
    if without and (data.sample or data.sample_every):
        raise ConfigError(
            f"{asked} with layers of stack {without!r}",
            "they have no attention, and what they carry from token to token is not known",
            "--data.sample 0, and no --data.sample-every",
        )


def _cannot_decode(device_run: DeviceRun) -> str:
    """The first stack of layers that state nothing to decode with; "" where all do."""
    layers = device_run.placed.spec.layers
    return next((layer.stack for layer in layers if layer.attention is None and layer.delta is None), "")


def write_sample(device_run: DeviceRun, tokenizer: Tokenizer, params: Any, out: Path) -> str:
    """Samples text from the model and writes it to `out`; returns it, or "" where the run asks for none."""
    data = device_run.run.data
    small = count_params(device_run.params) <= SMALL_MODEL
    count = _SAMPLE if data.sample is None and (small or data.sample_every) else data.sample
    if not count:
        return ""
    if _cannot_decode(device_run):  # `check_sample` refuses what was asked for
        with activity("note", "looking for what it decodes with", "looked") as work:
            work.result = "no sample: its layers have no attention to decode with"
        return ""
    from meshwright.generation.training_sample import sample_tokens  # a run without a sample does not load it

    if device_run.run.finetune.method == "lora" or device_run.run.finetune.objective == "preferences":
        from meshwright.checkpoint.adapters import merge_adapters  # loaded for runs that fine-tune

        device_run, params = merge_adapters(device_run, params)
    prompt = with_begin(tokenizer, tokenizer.encode(data.prompt))
    prompt = prompt if len(prompt) else np.array([tokenizer.end], np.int32)
    with activity("sample", "sampling from the model", "sampled from the model") as work:
        tokens = sample_tokens(device_run, params, prompt, tokens=count, seed=device_run.run.training.seed)
        work.record["text"] = text = data.prompt + tokenizer.decode(tokens)
    if jax.process_index() == 0:
        (out / "sample.txt").write_text(text, encoding="utf-8")
    return text
