"""Loss of a small model after training in each matmul precision, with the same data and initial values.

    python bench/precision_curves.py TEXT [RECIPE ...]

Prints one row of a table per precision, bfloat16 first: loss over steps 1901 to 2000 and held-out loss, both averaged
over two seeds, and their difference from bfloat16's; last, how far bfloat16's own two seeds are apart. Accelerators'
arithmetic is simulated on the CPU: the numbers count, not the time.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import meshwright
from meshwright.models.quantisation import RECIPES

STEPS, LAST, SEEDS = 2000, 100, (0, 1)


def losses(text: str, precision: str, seed: int) -> tuple[float, float]:
    """Mean training loss of the last steps, and the loss on held-out text."""
    run = meshwright.recipe(
        "tiny", mesh="data=1", steps=STEPS, batch=8, seq=64, layers=2, width=128, heads=4, kv_heads=2, mlp=384,
        paths=(text,), tokenizer="bytes", learning_rate=2e-3, warmup_steps=100, sample=0, eval_samples=1024,
        matmul_precision=precision, compute_dtype="bfloat16", seed=seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        summary = meshwright.train(run, out=Path(folder) / "run", progress="none", cache=Path(folder), devices=1)
        rows = [json.loads(line) for line in (summary.out / "metrics.jsonl").read_text().splitlines()]
    curve = [row["loss"] for row in rows if "loss" in row]
    assert len(curve) >= STEPS and summary.held_out_loss is not None
    return sum(curve[-LAST:]) / LAST, summary.held_out_loss


def main(text: str, names: list[str]) -> None:
    """Prints the table."""
    base = np.zeros(2)
    for name in ["compute", *names]:
        seeds = np.array([losses(text, name, seed) for seed in SEEDS])
        found = seeds.mean(0)
        base = found if name == "compute" else base
        apart = " | ".join(f"{a:.4f} | {a / b - 1:+.2%}" for a, b in zip(found, base, strict=True))
        spread = " ".join(f"{s:.2%}" for s in np.ptp(seeds, 0) / base)
        print(f"| {name} | {apart} |   (seeds apart: {spread})", flush=True)


main(sys.argv[1], sys.argv[2:] or list(RECIPES))
