"""Processor time of a step with the health of every tensor, and with sums of bits, over one without.

    python bench/health_cost.py

The three steps are taken by turns, so that what else the machine does meets all of them. Prints the quartiles of the
ratios of the rounds.
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)

from tiny_runs import MODELS, device_run_of, random_batch, tiny_run  # noqa: E402

from meshwright.config import Faults  # noqa: E402
from meshwright.step.train_step import build_train_step  # noqa: E402

ROUNDS = 12
STEPS_OF_A_ROUND = 3


class Case:
    """One kind of step, and its state."""

    def __init__(self, health: bool, check_bits: bool):
        size = {"width": 256, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 768, "vocab": 1024}
        model: Any = dataclasses.replace(MODELS["llama"], **size)
        run = tiny_run(model, "data=1")
        training = dataclasses.replace(run.training, health=health, batch=4, seq=256)
        run = dataclasses.replace(run, training=training, faults=Faults(check_bits=check_bits))
        device_run = device_run_of(run)
        self._step = build_train_step(device_run)
        self._state = device_run.initial_state()
        self._batch = random_batch(device_run)

    def seconds(self) -> float:
        """Takes a round of steps; returns the processor seconds of one."""
        began = time.process_time()
        for _ in range(STEPS_OF_A_ROUND):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return (time.process_time() - began) / STEPS_OF_A_ROUND


def main() -> None:
    """Prints the ratios."""
    cases = {"without": Case(False, False), "health": Case(True, False), "bits": Case(True, True)}
    for case in cases.values():
        case.seconds()  # compiles
    rounds = [[case.seconds() for case in cases.values()] for _ in range(ROUNDS)]
    seconds = np.array(rounds)
    for number, name in enumerate(cases):
        quartiles = np.percentile(seconds[:, number] / seconds[:, 0], [25, 50, 75])
        print(f"{name}: {quartiles[0]:.3f} {quartiles[1]:.3f} {quartiles[2]:.3f}")


if __name__ == "__main__":
    main()
