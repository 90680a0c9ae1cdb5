"""Loss of a small model at a small learning rate: float32 parameters, and bfloat16 ones under each way of rounding.

    python bench/bfloat16_curves.py TEXT [WAY ...]

Prints one line of a table per way, and writes bench/results/bfloat16-params.json. `nearest` is the negative control:
the update is rounded to the nearest bfloat16 number, as a run without masters would. Same data, initial values, seed.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import meshwright
from meshwright.config import Optimizer

STEPS, LAST = 2000, 100
RESULTS = Path(__file__).parent / "results" / "bfloat16-params.json"


def adamw_to_nearest(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW whose updates leave every parameter at the nearest bfloat16 number."""
    adamw = optax.adamw(rate, o.beta1, o.beta2, eps=o.epsilon, weight_decay=0.0)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = adamw.update(grads, state, params)
        # The difference of two neighbouring bfloat16 numbers is exact in float32, and so is their sum.
        stay = jax.tree.map(
            lambda p, u: (p + u).astype(jnp.bfloat16).astype(jnp.float32) - p, params, updates
        )
        return stay, state

    return optax.GradientTransformation(adamw.init, update)


WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "master": {"param_dtype": "bfloat16", "param_rounding": "master"},
    "stochastic": {"param_dtype": "bfloat16", "param_rounding": "stochastic"},
    "nearest": {"optimizer": f"{Path(__file__).resolve()}:adamw_to_nearest"},
}


def losses(text: str, way: str) -> dict[str, float]:
    """Mean training loss of the last steps, and the loss on held-out text."""
    changes = {**WAYS[way]}
    optimizer = meshwright.Optimizer(
        changes.pop("optimizer", "adamw"), learning_rate=3e-5, warmup_steps=100, weight_decay=0.0
    )
    run = meshwright.recipe(
        "tiny", mesh="data=1", steps=STEPS, batch=16, seq=64, layers=2, width=128, heads=4, kv_heads=2, mlp=384,
        paths=(text,), tokenizer="bytes", sample=0, eval_samples=1024, optimizer=optimizer, **changes,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        summary = meshwright.train(
            run, out=Path(folder) / "run", progress="none", cache=Path(folder), devices=1
        )
        rows = [
            json.loads(line) for line in (summary.out / "metrics.jsonl").read_text().splitlines()
        ]
    curve = [row["loss"] for row in rows if "loss" in row]
    assert len(curve) >= STEPS and summary.held_out_loss is not None
    return {"first": curve[0], "last": sum(curve[-LAST:]) / LAST, "held out": summary.held_out_loss}


def main(text: str, ways: list[str]) -> None:
    """Prints the table and writes the results."""
    found: dict[str, dict[str, float]] = {}
    for way in ways:
        found[way] = losses(text, way)
        row = found[way]
        base = found.get("float32", row)
        print(
            f"| `{way}` | {row['first']:.4f} | {row['last']:.4f} | {row['last'] / base['last'] - 1:+.3%} "
            f"| {row['held out']:.4f} | {row['held out'] / base['held out'] - 1:+.3%} |",
            flush=True,
        )
    about = {"steps": STEPS, "last": LAST, "machine": platform.machine(), "jax": jax.__version__}
    RESULTS.write_text(json.dumps({"about": about, "losses": found}, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(WAYS))
