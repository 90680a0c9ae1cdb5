"""A small Llama, trained on the source of Python's standard library; what `meshwright train` trains by
default, on eight simulated devices or on real ones.

    meshwright train

Measured on 2 cores of an AMD EPYC (no accelerator), 2026-11-21: see README.md.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.llama import Llama
from meshwright.runs.run import Run


def tiny() -> Run:
    """A small Llama: 1.0 M parameters, 250 steps of 2,048 tokens; under 90 seconds on two cores."""
    return Run(
        name="tiny",
        model=Llama(width=128, layers=4, heads=4, kv_heads=2, mlp=352, vocab_multiple=16),
        training=Training(
            steps=250,
            batch=16,
            seq=128,
            compute_dtype="float32",
            remat="none",
            eval_every=125,
            eval_samples=128,
            save_every=125,
        ),
        optimizer=Optimizer(learning_rate=4e-3, warmup_steps=20, weight_decay=0.1, beta2=0.98),
        data=Data(paths=("stdlib",), tokenizer="bpe:1024", prompt="def "),
    )
