"""Loss of a small model after training in each matmul precision, with the same data and initial values.

    python bench/precision_curves.py [--experts] [--seed N] TEXT [RECIPE ...]

With --experts the model has 8 experts of width 96 in each layer, two for each token. Prints one line of a table per
precision, the first of them bfloat16's: loss over steps 1901 to 2000, held-out loss, and their difference from
bfloat16's. Accelerators' arithmetic is simulated on the CPU: the numbers count, not the time.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import meshwright
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.quantisation import RECIPES

STEPS, LAST = 2000, 100

EXPERTS = Mixtral(
    layers=2, width=64, heads=4, kv_heads=2, experts=8, experts_per_token=2, expert_mlp=96
)


def losses(text: str, precision: str, experts: bool, seed: int) -> tuple[float, float]:
    """Mean training loss of the last steps, and the loss on held-out text."""
    run = meshwright.recipe(
        "tiny", mesh="data=1", steps=STEPS, batch=8, seq=64, layers=2, width=64, heads=4, kv_heads=2, mlp=192,
        paths=(text,), tokenizer="bytes", learning_rate=3e-3, warmup_steps=100, sample=0, eval_samples=1024,
        matmul_precision=precision, compute_dtype="bfloat16", seed=seed,
    )  # fmt: skip
    run = dataclasses.replace(run, model=EXPERTS) if experts else run
    with tempfile.TemporaryDirectory() as folder:
        summary = meshwright.train(
            run, out=Path(folder) / "run", progress="none", cache=Path(folder), devices=1
        )
        rows = [
            json.loads(line) for line in (summary.out / "metrics.jsonl").read_text().splitlines()
        ]
    curve = [row["loss"] for row in rows if "loss" in row]
    assert len(curve) >= STEPS and summary.held_out_loss is not None
    return sum(curve[-LAST:]) / LAST, summary.held_out_loss


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given, base = parser.parse_args(), None
    for name in ["compute", *given.recipes]:
        found = losses(given.text, name, given.experts, given.seed)
        base = base or found
        apart = " | ".join(f"{a:.4f} | {a / b - 1:+.2%}" for a, b in zip(found, base, strict=True))
        print(f"| {name} | {apart} |", flush=True)


main()
