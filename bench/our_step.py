"""Our train step on random tokens, for `turns.py`: `python bench/our_step.py RECIPE [DEVICES [OPTION ...]]`.

OPTION is one of the Run, as `meshwright train` takes it: `--model.layers 4`. DEVICES are simulated.
"""

import dataclasses
import sys

import jax
import numpy as np
import turns

from meshwright.config import MeshShape
from meshwright.data.batch import Batch
from meshwright.hardware.mesh import build_mesh, prepare_host
from meshwright.runs.recipe import find_recipe
from meshwright.step.device_run import place_on_devices
from meshwright.step.train_step import CompiledTrainStep


def main(recipe: str, devices: int, options: dict[str, str]) -> None:
    prepare_host(devices)
    run = find_recipe(recipe)
    for name, text in options.items():
        part, _, field = name.partition(".")
        config = getattr(run, part)
        kind = type(getattr(config, field))
        value = int(text) if kind in (int, type(None)) else kind(text)
        run = dataclasses.replace(run, **{part: dataclasses.replace(config, **{field: value})})
    device_run = place_on_devices(run, build_mesh(MeshShape(fsdp=devices)))
    shape, vocab = (run.training.batch, run.training.seq), run.model.vocab
    tokens = (
        np.random.default_rng(0).integers(0, vocab - 1, (shape[0], shape[1] + 1)).astype(np.int32)
    )
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    batch = Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        np.zeros(shape, np.int32),
        positions,
        np.ones(shape, np.float32),
    )
    batch = jax.device_put(batch, device_run.batch_sharding)
    step, state = CompiledTrainStep(device_run, batch), device_run.initial_state()

    def steps(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)

    turns.serve(steps)


if __name__ == "__main__":
    words = sys.argv[3:]
    pairs = {
        name.removeprefix("--"): text for name, text in zip(words[::2], words[1::2], strict=True)
    }
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1, pairs)
