"""A run with two faults planted while it trains: `python planted.py MESH OUT` trains it in one process of a run.

step 61  a sample is replaced by "~~~...", whose row of the embedding is a thousand times as large: a finite spike
step 63  the copy of the final norm that one device has is not a number
"""

import dataclasses
import itertools
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tiny_runs import MODELS, tiny_run

import meshwright as mw
from meshwright.api.verb import start_devices
from meshwright.config import Data, Faults, Optimizer
from meshwright.data.batch import Batch
from meshwright.data.feed import Feed
from meshwright.hardware.hosts import hosts_of
from meshwright.sharding.params import named_leaves
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep

SPIKE, NOT_A_NUMBER = 61, 63
SEQUENCE = 9
DEVICE = 2
"""Index of the device among all; of two processes with two each it is the first of the second."""
TEXT = "She sells sea shells by the sea shore. " * 400 + "~"
RARE = sorted(set(TEXT)).index("~")

Change = Callable[[jax.Device, np.ndarray, int], None]
"""`(device, shard, index of its first row)`, which changes the shard."""


def with_shards(x: jax.Array, change: Change) -> jax.Array:
    """Returns an array whose shards are changed one by one."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        change(shard.device, data, shard.index[0].start or 0)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def with_param(state: State, path: str, change: Change) -> State:
    """Returns a state of which one parameter is changed."""
    target = named_leaves(state.params)[path]
    new = with_shards(target, change)
    params = jax.tree.map(lambda x: new if x is target else x, state.params)
    return dataclasses.replace(state, params=params)


def enlarge(device: jax.Device, rows: np.ndarray, start: int) -> None:
    if start <= RARE < start + len(rows):
        rows[RARE - start] *= 1000


def replace_sample(device: jax.Device, rows: np.ndarray, start: int) -> None:
    if start <= SEQUENCE < start + len(rows):
        rows[SEQUENCE - start] = RARE


def spoil_copy(device: jax.Device, rows: np.ndarray, start: int) -> None:
    if device == jax.devices()[DEVICE]:
        rows[3] = np.nan


def plant(setattr: Callable[..., None]) -> None:
    """Plants the faults in the runs of this process. setattr: of `pytest.MonkeyPatch`, or the builtin."""
    read, take = Feed.__next__, CompiledTrainStep.__call__
    batches, steps = itertools.count(1), itertools.count(1)

    def read_planted(self: Feed) -> Batch:
        batch = read(self)
        if next(batches) != SPIKE:
            return batch
        return dataclasses.replace(batch, inputs=with_shards(batch.inputs, replace_sample))

    def take_planted(self: CompiledTrainStep, state: State, batch: Batch) -> Any:
        number = next(steps)
        if number == SPIKE:
            state = with_param(state, "embed", enlarge)
        if number == NOT_A_NUMBER:
            state = with_param(state, "final_norm", spoil_copy)
        return take(self, state, batch)

    setattr(Feed, "__next__", read_planted)
    setattr(CompiledTrainStep, "__call__", take_planted)


def planted_run(folder: Path, mesh: str, family: str = "llama", **changes: Any) -> mw.Run:
    """Returns the run. folder: for its text."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "text.txt"
    if not file.exists():
        file.write_text(TEXT)
    layers = changes.pop("layers", 2)
    model = dataclasses.replace(MODELS[family], vocab=None, layers=layers)
    data = Data(paths=(str(file),), tokenizer="chars", sample=0)
    options: dict[str, Any] = {
        "steps": NOT_A_NUMBER,
        "dropout": 0.0,
        "health": True,
        "optimizer": Optimizer(learning_rate=1e-3, warmup_steps=5),
        "faults": Faults(bad_step="skip"),
    }
    return tiny_run(model, mesh, data=data, **options | changes)


if __name__ == "__main__":
    socket.gethostname = lambda: f"node{os.environ['RANK']}"
    start_devices(4, None, hosts_of(os.environ))
    plant(setattr)
    folder = Path(sys.argv[2])
    mw.train(
        planted_run(folder, sys.argv[1], microbatches=2), out=folder / "out",
        cache=folder / "cache", devices=4, progress="none",
    )  # fmt: skip
