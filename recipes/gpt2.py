"""GPT-2 sizes (Radford et al. 2019), and nanoGPT's CPU setting."""

from meshwright.config import Data, MeshShape, Optimizer, Training
from meshwright.models.families.gpt2 import Gpt2
from meshwright.runs.run import Run


def nanogpt_cpu() -> Run:
    """nanoGPT's published CPU setting: 0.80 M parameters, 2000 steps of 12 x 64 characters of tiny Shakespeare.

        meshwright train nanogpt-cpu --data tinyshakespeare.txt --devices 1

    nanoGPT reports a validation loss of 1.88 after some three minutes on a laptop.
    """
    return Run(
        name="nanogpt-cpu",
        model=Gpt2(width=128, layers=4, heads=4, positions=64, bias="none", vocab_multiple=1),
        mesh=MeshShape(),
        training=Training(
            steps=2000,
            batch=12,
            seq=64,
            compute_dtype="float32",
            remat="none",
            unroll=4,
            eval_samples=0,
            log_every=10,
        ),
        optimizer=Optimizer(
            learning_rate=4e-3,
            warmup_steps=100,
            final_lr_fraction=0.1,
            beta2=0.99,
            weight_decay=0.1,
        ),
        data=Data(paths=("tinyshakespeare.txt",), tokenizer="chars", held_out=0.1, prompt="\n"),
    )


def _sized(name: str, width: int, layers: int, heads: int) -> Run:
    return Run(
        name=name,
        model=Gpt2(vocab=50257, width=width, layers=layers, heads=heads),
        training=Training(
            steps=600_000,
            batch=480,
            seq=1024,
            eval_every=1000,
            save_every=1000,
            remat="projections",
        ),
        optimizer=Optimizer(learning_rate=6e-4, warmup_steps=2000),
        data=Data(
            paths=("openwebtext/*.parquet",), tokenizer="gpt2/tokenizer.json", held_out=0.0005
        ),
    )


def gpt2() -> Run:
    """GPT-2: 124 M parameters."""
    return _sized("gpt2", 768, 12, 12)


def gpt2_medium() -> Run:
    """GPT-2 medium: 355 M parameters."""
    return _sized("gpt2-medium", 1024, 24, 16)


def gpt2_large() -> Run:
    """GPT-2 large: 774 M parameters."""
    return _sized("gpt2-large", 1280, 36, 20)


def gpt2_xl() -> Run:
    """GPT-2 XL: 1.56 B parameters."""
    return _sized("gpt2-xl", 1600, 48, 25)
