"""Text sampled from the model at the end of a run."""

from pathlib import Path

import jax
import numpy as np

from meshwright.data.tokenizers import Tokenizer
from meshwright.generation.training_sample import sample_tokens
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State


def write_sample(device_run: DeviceRun, tokenizer: Tokenizer, state: State, out: Path, count: int) -> str:
    """Samples `count` tokens after the run's prompt, writes the text to `out`/sample.txt and returns it."""
    data = device_run.run.data
    prompt = tokenizer.encode(data.prompt)
    prompt = prompt if len(prompt) else np.array([tokenizer.end], np.int32)
    tokens = sample_tokens(device_run, state.params, prompt, tokens=count, seed=device_run.run.training.seed)
    text = data.prompt + tokenizer.decode(tokens)
    if jax.process_index() == 0:
        (out / "sample.txt").write_text(text, encoding="utf-8")
    return text
