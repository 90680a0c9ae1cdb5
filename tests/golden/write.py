"""Writes the golden loss curves: 20 steps of each family on one device, float32."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_runs import MODELS, tiny_run, train

for family, model in MODELS.items():
    np.savetxt(
        Path(__file__).parent / f"{family}.txt", train(tiny_run(model), 20).losses, fmt="%.7f"
    )
