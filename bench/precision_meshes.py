"""How far first gradients on a mesh are from those of one device, for each matmul precision and for adapters on int8.

    python bench/precision_meshes.py [--batches N] [RECIPE ...]

A small Llama in float32 on eight simulated devices, from the same parameters, on N random batches; differences are
relative Frobenius norms. Prints one row of the table in docs/precision.md per recipe: the smallest and the largest
over the batches on each mesh, then the largest difference from `compute`, the recipe's own error.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from meshwright.hardware.mesh import prepare_host

prepare_host(8)

from tiny_runs import (
    MODELS,
    by_layers,
    device_run_of,
    random_batch,
    state_of,
    tiny_run,
)

from meshwright.config import Optimizer
from meshwright.models.quantisation import RECIPES
from meshwright.runs.run import Run
from meshwright.step.train_step import CompiledTrainStep

MESHES = (
    "data=8",
    "fsdp=8",
    "tensor=2",
    "tensor=4",
    "context=2",
    "data=2,fsdp=2,tensor=2",
    "fsdp=4,context=2",
)


def run_of(precision: str, mesh: str) -> Run:
    """The run whose gradients are compared, without clipping."""
    return tiny_run(
        MODELS["llama"],
        mesh,
        dropout=0.0,
        matmul_precision=precision,
        optimizer=Optimizer(learning_rate=3e-3, warmup_steps=2, grad_clip_norm=0.0),
    )


def gradients(precision: str, mesh: str, batches: int, initial: Any) -> tuple[Any, list[Any]]:
    """Initial parameters, and the gradients of the first step on each batch, as one vector."""
    run = run_of(precision, mesh)
    device_run = device_run_of(run)
    if initial is None:
        initial = by_layers(device_run, device_run.initial_state().params)
    step = CompiledTrainStep(device_run, random_batch(device_run))
    found = []
    for seed in range(batches):
        state, _ = step(state_of(device_run, initial), random_batch(device_run, seed))
        adam = getattr(state.optimizer, "inner", state.optimizer)[0]
        # Adam's first moment after one step is (1 - beta1) times the gradient.
        moments = jax.tree.leaves(by_layers(device_run, adam.mu))
        found.append(np.concatenate([np.ravel(leaf) for leaf in moments]))
    return initial, found


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Norm of the difference over that of the second."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("recipes", nargs="*", default=[*RECIPES])
    options = parser.parse_args()
    initial, plain = gradients("compute", "data=1", options.batches, None)
    print(f"| recipe | {' | '.join(f'`{mesh}`' for mesh in MESHES)} | against float32 |")
    print(f"|---|{'---|' * (len(MESHES) + 1)}")
    for recipe in options.recipes:
        _, one = gradients(recipe, "data=1", options.batches, initial)
        cells = []
        for mesh in MESHES:
            _, many = gradients(recipe, mesh, options.batches, initial)
            found = [difference(a, b) for a, b in zip(many, one, strict=True)]
            cells.append(f"{min(found):.1e} to {max(found):.1e}")
        own = max(difference(a, b) for a, b in zip(one, plain, strict=True))
        print(f"| `{recipe}` | {' | '.join(cells)} | {own:.1e} |", flush=True)


if __name__ == "__main__":
    main()
